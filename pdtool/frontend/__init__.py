"""From the user's file to its operator graph: modelfile loads it, tracing and graph_reader trace it."""
