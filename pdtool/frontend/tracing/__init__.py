"""From a model to its operator graph: torch.export, read and merged over both modes."""
