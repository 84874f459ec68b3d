"""The program as functions, which take and return the artifacts themselves; the command line is their shell.

`profiling`, `planning`, `training`, `emulating` and `reporting` have the functions that `pdtool` offers; `inputs` reads
what they start from, `staleness` says what is out of date, and what they have to say goes through `console`.
"""
