"""The costs of a model's operators: `measure` times them on this machine, `estimate` computes them for another device.

`pipedream_import` reads the profiles that PipeDream published, and `probe` measures the network.
"""
