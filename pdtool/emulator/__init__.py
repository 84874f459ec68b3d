"""A plan's real workers on a pretend cluster: each in a network namespace of its own, behind links of a given speed."""
