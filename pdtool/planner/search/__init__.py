"""Search for the fastest plans by the cost formulas: over cuts of the graph, layouts in the cluster and schedules.

`search` is the module that `choice` uses, with `cuts` and `layouts` for the spaces that it searches.
"""
