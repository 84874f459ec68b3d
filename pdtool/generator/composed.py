"""Load the generated stages and run them in one process, one after the other."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from pdtool.artifacts.bundle import Bundle
from pdtool.errors import PdtoolError
from pdtool.frontend.operators import named_state, registered_state
from pdtool.frontend.user_modules import user_modules_importable
from pdtool.host import memory_limits

# Copies of all parameters in memory while values are compared: the model, its copy, the stages, and their gradients.
_COPIES = 6
REPORT = "this is a defect of pdtool: please report it with your model file"


class VerificationError(PdtoolError):
    """The generated stages are not equal to the model: nothing is written."""


class ModelFailedError(VerificationError):
    """The model itself fails, perhaps because a minibatch is too small for it."""


def load_stages(
    texts: Mapping[str, str], bundle: Bundle, device: str = "cpu", build: Callable[[], nn.Module] | None = None
) -> list[nn.Module]:
    """Make the stage modules from the generated texts, on `device` (`meta`: without storage).

    Args:
        build: makes a model for each stage, which takes its opaque modules from it.
    """
    modules: list[nn.Module] = []
    for stage in bundle.stages:
        module = ModuleType(stage.file.removesuffix(".py"))
        with user_modules_importable():
            exec(compile(texts[stage.file], stage.file, "exec", dont_inherit=True), module.__dict__)
        model = (build(),) if stage.opaque and build else ()
        with torch.device(device), patch.multiple(Tensor, uniform_=_unchanged, normal_=_unchanged):
            modules.append(getattr(module, stage.class_name)(*model).train())
    return modules


def _unchanged(tensor: Tensor, *_: Any, **__: Any) -> Tensor:
    """Draw no initial weights, which takes seconds in large models: `copy_state` gives a stage the model's."""
    return tensor


def copy_state(model: nn.Module, stages: Sequence[nn.Module], bundle: Bundle) -> None:
    """Give each stage the model's parameters and buffers, by name."""
    state = named_state(model)
    with torch.no_grad():
        for stage, spec in zip(stages, bundle.stages, strict=True):
            stage_state = registered_state(stage)
            if missing := stage_state.keys() ^ {*spec.parameters, *spec.buffers}:
                what = f"{spec.file} and the model name their parameters and buffers differently: {sorted(missing)}"
                raise VerificationError(what, REPORT)
            for name, tensor in stage_state.items():
                if tensor.shape != state[name].shape:
                    shapes = f"of shape {list(tensor.shape)}, by one of shape {list(state[name].shape)}"
                    raise VerificationError(f"forward replaces the buffer {name}, {shapes}", "keep its shape")
                tensor.copy_(state[name])


def fits_in_memory(model: nn.Module) -> bool:
    """Whether this machine has the memory to compare the stages with a model."""
    needed = _COPIES * sum(p.nbytes for p in model.parameters())
    return needed < min((limit.free_bytes for limit in memory_limits()), default=math.inf)


@contextmanager
def state_kept(*modules: nn.Module) -> Iterator[None]:
    """Restore the values of the modules' parameters and buffers at the end, unless there is an error. A buffer that is
    made meanwhile, or gets another shape, stays as it is."""
    before = [{name: t.detach().clone() for name, t in registered_state(module).items()} for module in modules]
    yield
    with torch.no_grad():
        for module, state in zip(modules, before, strict=True):
            for name, tensor in registered_state(module).items():
                if name in state and state[name].shape == tensor.shape:
                    tensor.copy_(state[name])


def compose(stages: Sequence[nn.Module], bundle: Bundle, inputs: Sequence[Tensor], *, cuts_graph: bool = False) -> Any:
    """Run all stages in this process, one after the other, and return the last one's output.

    As in a run, only tensors with a gradient in the bundle send one back over a border.

    Args:
        cuts_graph: whether tensors lose their graph at each border, as in a run.
    """
    tensors = dict(zip(bundle.inputs, inputs, strict=True))
    result: Any = None
    for stage, spec in zip(stages, bundle.stages, strict=True):
        result = stage(*(tensors[name] for name in spec.inputs))
        if spec.outputs:
            outputs = result if len(spec.outputs) > 1 else (result,)
            for name, tensor in zip(spec.outputs, outputs, strict=True):
                has_gradient = bundle.by_name[name].gradient
                if cuts_graph or not has_gradient:
                    tensor = tensor.detach().requires_grad_(has_gradient and tensor.requires_grad)
                tensors[name] = tensor
    return result
