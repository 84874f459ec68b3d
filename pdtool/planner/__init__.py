"""From a profile and a cluster to a plan: the fastest by formulas (search, cost), chosen by simulation (simulator)."""
