"""From the user's file to the operator graph: modelfile loads it, trace reads the model."""
