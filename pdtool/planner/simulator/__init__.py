"""Simulate a plan on a clock: the action lists that the workers execute, over links that they share.

`engine` runs a simulation, `job` says what is simulated, and `result` what came out.
"""
