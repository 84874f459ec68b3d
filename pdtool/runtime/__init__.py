"""Train a plan: one process per worker executes its action list (PipeDream, SOSP'19, sections 3.2 and 3.3).

Other folders describe a run with `config` and start it with `launch.launcher`.
"""
