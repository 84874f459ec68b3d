"""One stage on one worker: its forward and backward, its weight versions, and its updates.

`worker` builds a `stage_replica` from the other modules and then uses only that.
"""
