"""Turn a plan into a bundle: one readable PyTorch module for each stage, proved equal to the model each time.

Other folders use `generate` only.
"""
