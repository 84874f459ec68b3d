"""From the user's model.py to its operator graph: `model_file` loads the file, and `tracing` traces its model.

Other folders also use `operators`, `graph_digest`, `model_io`, `model_rules`, `user_code`, `compute_mode` and
`random_numbers`.
"""
