"""Tensors between stages: which go where, and the channels that carry them."""
