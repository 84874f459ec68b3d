"""The program as functions that take and return the artifacts themselves; the command line is a shell around them.

`profiling`, `planning`, `training`, `emulating` and `reporting` have the functions that `pdtool` offers. `inputs` reads
their inputs, `staleness` says which files are out of date, and `console` shows their messages.
"""
