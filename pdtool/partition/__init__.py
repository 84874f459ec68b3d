"""From a profile and a cluster to a plan: space (where to cut), cost (what it takes), search (which is best)."""
