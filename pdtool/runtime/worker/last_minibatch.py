"""Checks of an epoch's last minibatch that has one sample: they find at the start what would fail at the end."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pdtool.artifacts.bundle import Bundle, TensorSpec
from pdtool.errors import ModelError, describe_error
from pdtool.frontend.model_io import dtype_of
from pdtool.runtime.stage.pipeline_stage import as_tuple

_BATCH_NORM_REFUSAL = "Expected more than 1 value per channel"  # of torch.nn.functional.batch_norm


def check_last_minibatch(modules: Mapping[int, nn.Module], bundle: Bundle, samples: int, device: torch.device) -> None:
    """Check that the stages can train with the last minibatch of an epoch.

    If it has one sample, batch norm finds a single value per channel, and squeeze() removes the batch dimension.

    Args:
        modules: modules of stages, by number.
        samples: samples of an epoch.

    Raises:
        ModelError: it has one sample, and a batch norm would see a single value per channel, or a stage's tensor has a
            different shape than the bundle says.
    """
    size = bundle.batch_size
    if (samples - 1) % size:
        return
    what = f"the last minibatch of an epoch has one sample ({samples} samples in minibatches of {size})"
    remedy = "set DROP_LAST = True in the model file to skip a short last minibatch"
    for s, module in modules.items():
        spec = bundle.stages[s]
        inputs, expected = ([bundle.by_name[name] for name in names] for names in (spec.inputs, spec.outputs))
        try:
            shapes = _shapes_of_single_sample(module, inputs, device)
        except ValueError as error:
            if _BATCH_NORM_REFUSAL in describe_error(error):
                why = "so a batch norm has a single value per channel and cannot train with it"
                remedy = remedy if size > 1 else "profile and plan with a larger --batch-size"
                raise ModelError(f"{what}, {why}", remedy) from error
            continue
        except Exception:
            continue  # training finds it
        for tensor, shape in zip(expected, shapes, strict=False):
            if shape != tensor.sizes(1):
                why = (
                    f"for which {spec.file} returns {tensor.name} with shape {list(shape)}, not {list(tensor.sizes(1))}"
                )
                raise ModelError(f"{what}, {why}", f"if forward calls squeeze(), pass it the dimension; or {remedy}")


def check_single_samples(bundle: Bundle, trained: int, validated: int) -> None:
    """Check that no minibatch has one sample if codegen has found that the stages differ from the model for it; raises
    ModelError.

    Args:
        trained, validated: samples of an epoch, and of a validation.
    """
    size = bundle.batch_size
    for samples, where, leave_out in (
        (trained, "an epoch", "or set DROP_LAST = True"),
        (validated, "a validation", "or give dataset('valid') another number of samples"),
    ):
        if bundle.differs_for_one_sample and samples and not (samples - 1) % size:
            raise ModelError(
                f"the last minibatch of {where} has one sample ({samples} samples in minibatches of {size}), and the "
                "model computes a single sample differently from several",
                "if forward branches on the number of samples, move that line into a module of its own and name the "
                f"module in HINTS = {{'opaque': [...]}}, {leave_out}",
            )


def _shapes_of_single_sample(
    module: nn.Module, inputs: Sequence[TensorSpec], device: torch.device
) -> list[tuple[int, ...]]:
    """Run a copy of a stage's module on one sample, with empty tensors; return the shapes of its outputs."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = {id(t): fake.from_tensor(t) for t in (*module.parameters(), *module.buffers())}
    with fake, torch.no_grad():
        copied = copy.deepcopy(module, tensors)  # deepcopy does not copy entries that it finds there
        returned = copied(*(torch.zeros(spec.sizes(1), dtype=dtype_of(spec), device=device) for spec in inputs))
    return [tuple(tensor.shape) for tensor in as_tuple(returned) if isinstance(tensor, Tensor)]
