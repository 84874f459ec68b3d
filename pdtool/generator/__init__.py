"""Turn a plan into a bundle: one readable PyTorch module for each stage, checked against the model each time.

Other folders use `generate` only.
"""
