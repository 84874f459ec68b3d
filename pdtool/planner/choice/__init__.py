"""Choose a plan among those that the search finds, compare it with its rivals, and check what it claims.

Other folders use `make_plan`, `plan_figures`, `without_formulas`, `strategies`, `comparison` and `plan_check`.
"""
