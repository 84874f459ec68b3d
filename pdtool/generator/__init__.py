"""From a plan to a bundle: one readable PyTorch module per stage, proved equal to the model each time."""
