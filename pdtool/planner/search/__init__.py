"""The search: where a graph may be cut, where a pipeline may lie in a cluster, and the fastest division."""
