"""The times of a model whose operators torch.compile fuses: segments of them are compiled and timed as a whole."""
