"""One worker: its start, its loop over the actions, its checkpoints and its measurements.

`launch` uses `start_worker`, which returns a `worker`. Code that reads a checkpoint uses `checkpoint`.
"""
