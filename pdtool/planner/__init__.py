"""Find the fastest plan for a profile and a cluster: search by cost formulas, then choose by simulation.

Other folders use the modules of `choice`, `simulator.result` for what a simulation says, and `stage_costs`.
"""
