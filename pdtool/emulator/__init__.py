"""Run a plan's real workers on a pretend cluster: each in a network namespace, behind links of a given speed.

`emulation` is what others use; `pretend_cluster` has the links, `sleeping_model` what is trained in place of a model.
"""
