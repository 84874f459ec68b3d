"""One worker: its start, its loop over the actions, its checkpoints and its measurements.

`launch` uses `start_worker`, which returns a `worker`; whoever reads a checkpoint uses `checkpoint`.
"""
