"""Find at the start of a run what a last minibatch of one sample breaks.

Batch norm finds a single value per channel, and squeeze() takes the dimension of the samples away.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pdtool.artifacts.bundle import Bundle, TensorSpec
from pdtool.errors import ModelError
from pdtool.frontend.model_io import dtype_of
from pdtool.run.stage import as_tuple

_REFUSED = "Expected more than 1 value per channel"  # of torch.nn.functional.batch_norm


def check_last_minibatch(modules: Mapping[int, nn.Module], bundle: Bundle, samples: int, device: torch.device) -> None:
    """Check that the last minibatch of an epoch is one that can be trained with.

    Args:
        modules: of stages, by their number.
        samples: of an epoch.

    Raises:
        ModelError: it has one sample, of which a batch norm would see a single value per channel, or a stage makes
            a tensor of another shape than the bundle says.
    """
    size = bundle.batch_size
    if (samples - 1) % size:
        return
    what = f"the last of an epoch's minibatches has one sample ({samples} samples in minibatches of {size})"
    remedy = "set DROP_LAST = True in model.py to leave a short last minibatch out"
    for s, module in modules.items():
        spec = bundle.stages[s]
        inputs, expected = ([bundle.by_name[name] for name in names] for names in (spec.inputs, spec.outputs))
        try:
            shapes = _shapes_of_single_sample(module, inputs, device)
        except ValueError as error:
            if _REFUSED in str(error):
                why = "in which a batch norm finds a single value per channel, which it cannot be trained with"
                remedy = remedy if size > 1 else "profile and plan with a larger --batch-size"
                raise ModelError(f"{what}, {why}", remedy) from error
            continue
        except Exception:
            continue  # training finds it
        for tensor, shape in zip(expected, shapes, strict=False):
            if shape != tensor.sizes(1):
                why = f"of which {spec.file} makes {tensor.name} of shape {list(shape)}, not {list(tensor.sizes(1))}"
                raise ModelError(f"{what}, {why}", f"give squeeze() its dimension; or {remedy}")


def _shapes_of_single_sample(
    module: nn.Module, inputs: Sequence[TensorSpec], device: torch.device
) -> list[tuple[int, ...]]:
    """Run a copy of a stage's module on one sample, with tensors without content; return the shapes of its outputs."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = {id(t): fake.from_tensor(t) for t in (*module.parameters(), *module.buffers())}
    with fake, torch.no_grad():
        copied = copy.deepcopy(module, tensors)  # what deepcopy finds there it does not copy
        returned = copied(*(torch.zeros(spec.sizes(1), dtype=dtype_of(spec), device=device) for spec in inputs))
    return [tuple(tensor.shape) for tensor in as_tuple(returned) if isinstance(tensor, Tensor)]
