"""Train a plan: one process per worker, executing its action list (PipeDream, SOSP'19, sections 3.2 and 3.3)."""
