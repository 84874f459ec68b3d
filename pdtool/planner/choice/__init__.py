"""Choose a plan among those that the search finds, compare it with its rivals, and check what it claims.

Other folders use `make_plan`, `strategies`, `comparison` and `plan_check`.
"""
