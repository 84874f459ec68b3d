"""Let `len(x)` of a tensor be x.shape[0] while torch.export runs.

Python makes a plain integer of a length, which binds the model to one size of the minibatch.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from torch import Tensor, nn


@contextmanager
def symbolic_len(model: nn.Module) -> Iterator[None]:
    """Put a `len` of our own into the files that define the model's modules."""
    kinds = {kind for module in model.modules() for kind in type(module).__mro__ if issubclass(kind, nn.Module)}
    with ExitStack() as stack:
        for name in sorted({kind.__module__ for kind in kinds}):
            if name in sys.modules and name.partition(".")[0] != "torch":
                stack.enter_context(patch.object(sys.modules[name], "len", _len, create=True))
        yield


def _len(value: Any) -> Any:
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else len(value)
