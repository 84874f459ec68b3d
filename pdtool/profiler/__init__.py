"""What each operator of a model costs: `measure` times it on this machine, `estimate` computes it for another device.

`pipedream_import` reads the profiles that PipeDream published, and `probe` measures the network.
"""
