"""The paper's models as model.py files: each stands alone, imports nothing of pdtool, and may be copied."""
