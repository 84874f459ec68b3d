"""The processes of a run: launched, watched, and grouped in torch.distributed."""
