"""A plan on a clock: the action lists that the workers execute, over links that they share."""
