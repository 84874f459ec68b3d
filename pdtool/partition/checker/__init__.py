"""A plan computed again with formulas of its own, to catch a false certificate."""
