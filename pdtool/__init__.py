"""pdtool: turn an ordinary PyTorch model into a pipeline-parallel training job."""

__version__ = "0.1.0"
