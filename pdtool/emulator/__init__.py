"""Run a plan's real workers on a pretend cluster: each in a network namespace, behind links of a given speed.

Other folders use `emulation`. `pretend_cluster` has the links, `sleeping_model` the stand-in for a model.
"""
