"""Find at the start of a run what a last minibatch of one sample breaks: batch norm of a single value per channel."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pdtool.artifacts.bundle import Bundle, TensorSpec
from pdtool.errors import ModelError
from pdtool.run.messages.routes import dtype_of

_REFUSED = "Expected more than 1 value per channel"  # of torch.nn.functional.batch_norm


def check_last_minibatch(modules: Mapping[int, nn.Module], bundle: Bundle, samples: int, device: torch.device) -> None:
    """Check that the last minibatch of an epoch is one that batch norm can be trained with.

    Args:
        modules: of stages, by their number.
        samples: of an epoch.

    Raises:
        ModelError: it has one sample, and a batch norm would see a single value per channel.
    """
    size = bundle.batch_size
    if (samples - 1) % size:
        return
    for s, module in modules.items():
        if not _can_train_single_sample(module, [bundle.by_name[name] for name in bundle.stages[s].inputs], device):
            raise ModelError(
                f"the last of an epoch's minibatches has one sample ({samples} samples in minibatches of {size}), in "
                "which a batch norm of the model finds a single value per channel, which it cannot be trained with",
                "set DROP_LAST = True in model.py to leave a short last minibatch out"
                if size > 1
                else "profile and plan with a larger --batch-size",
            )


def _can_train_single_sample(module: nn.Module, inputs: Sequence[TensorSpec], device: torch.device) -> bool:
    """Whether batch norm computes in training with one sample; other errors are left for training to find."""
    try:
        _run_single_sample(module, inputs, device)
    except ValueError as error:
        return _REFUSED not in str(error)
    except Exception:
        return True
    return True


def _run_single_sample(module: nn.Module, inputs: Sequence[TensorSpec], device: torch.device) -> None:
    """Run a copy of a stage's module on one sample, with tensors without content."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = {id(t): fake.from_tensor(t) for t in (*module.parameters(), *module.buffers())}
    with fake, torch.no_grad():
        copied = copy.deepcopy(module, tensors)  # what deepcopy finds there it does not copy
        copied(*(torch.zeros(spec.sizes(1), dtype=dtype_of(spec), device=device) for spec in inputs))
