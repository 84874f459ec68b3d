"""Tensors between stages: their routes, and the channels that carry them.

Other folders use `routes`, `open_channels`, `stage_io` and `pinned`.
"""
