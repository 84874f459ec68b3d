"""Law 1, checked on every call: the stages composed equal the model.

Two consecutive minibatches of different sizes, in training and in evaluation mode: outputs, gradients of all
parameters, and buffers afterwards. Random operators draw from a generator seeded by their own input, so that both
sides drop the same elements in whatever order they run.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from pdtool.artifacts.bundle import Bundle
from pdtool.errors import PdtoolError

_TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


class VerificationError(PdtoolError):
    """The generated stages are not equal to the model: nothing is written."""


def load_stages(texts: Mapping[str, str], bundle: Bundle, device: str = "cpu") -> list[nn.Module]:
    """Make the stage modules from the texts just generated, on `device` (`meta`: without storage)."""
    modules = []
    for stage in bundle.stages:
        module = ModuleType(stage.file.removesuffix(".py"))
        exec(compile(texts[stage.file], stage.file, "exec"), module.__dict__)
        with torch.device(device):
            modules.append(getattr(module, stage.class_name)())
    return modules


def copy_state(model: nn.Module, stages: Sequence[nn.Module], bundle: Bundle) -> None:
    """Give each stage the model's parameters and buffers, by name."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    with torch.no_grad():
        for stage, spec in zip(stages, bundle.stages, strict=True):
            own = dict(stage.named_parameters(remove_duplicate=False)) | dict(
                stage.named_buffers(remove_duplicate=False)
            )
            missing = set(own) ^ {*spec.parameters, *spec.buffers}
            if missing:
                raise VerificationError(f"{spec.file} and the model name their state differently: {sorted(missing)}")
            for name, tensor in own.items():
                tensor.copy_(state[name])


def compose(stages: Sequence[nn.Module], bundle: Bundle, inputs: Sequence[Tensor]) -> Any:
    """Run all stages in this process, tensors going where the bundle says; the last stage's output."""
    flowing = dict(zip(bundle.inputs, inputs, strict=True))
    result: Any = None
    for stage, spec in zip(stages, bundle.stages, strict=True):
        result = stage(*(flowing[name] for name in spec.inputs))
        if spec.outputs:
            outputs = result if len(spec.outputs) > 1 else (result,)
            flowing |= dict(zip(spec.outputs, outputs, strict=True))
    return result


def verify_values(
    model: nn.Module, texts: Mapping[str, str], bundle: Bundle, batches: Sequence[Sequence[Tensor]]
) -> None:
    """Raises VerificationError where the composed stages differ from `model`; `model` is left as it was.

    Args:
        batches: inputs of consecutive minibatches, of different sizes.
    """
    stages = load_stages(texts, bundle)
    copy_state(model, stages, bundle)
    reference = copy.deepcopy(model)
    for training in (True, False):
        for module in (reference, *stages):
            module.train(training)
        mode = "training" if training else "evaluation"
        for number, inputs in enumerate(batches):
            where = f"{mode}, minibatch {number} of {len(batches)}"
            with torch.set_grad_enabled(training), _repeatable():
                expected = _run(reference, lambda xs=inputs: reference(*xs), where)
            with torch.set_grad_enabled(training), _repeatable():
                found = _run(None, lambda xs=inputs: compose(stages, bundle, xs), where)
            _compare_outputs(expected, found, where)
            if training:
                _compare_gradients(reference, stages, expected, found, where)
            _compare_buffers(reference, stages, where)


def verify_shapes(texts: Mapping[str, str], bundle: Bundle, inputs: Sequence[Tensor], output: Any) -> None:
    """Shapes and wiring only, on the meta device: for a model that would not fit this machine twice.

    Args:
        output: what the model returns, as meta tensors.
    """
    stages = load_stages(texts, bundle, "meta")
    found = _run(None, lambda: compose(stages, bundle, [t.to("meta") for t in inputs]), "shapes")
    for index, (a, b) in enumerate(zip(_tensors(output), _tensors(found), strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise VerificationError(f"output {index} is {tuple(b.shape)} {b.dtype}, not {tuple(a.shape)} {a.dtype}")


def _run(model: nn.Module | None, call: Any, where: str) -> Any:
    try:
        return call()
    except PdtoolError:
        raise
    except Exception as error:
        who = "the model" if model is not None else "the generated stages"
        raise VerificationError(f"{who} failed ({where}): {type(error).__name__}: {error}") from error


def _compare_outputs(expected: Any, found: Any, where: str) -> None:
    a, b = _tensors(expected), _tensors(found)
    if len(a) != len(b):
        raise VerificationError(f"the stages return {len(b)} tensors, the model {len(a)} ({where})")
    for index, (x, y) in enumerate(zip(a, b, strict=True)):
        _compare(x, y, f"output {index} ({where})")


def _compare_gradients(model: nn.Module, stages: Sequence[nn.Module], expected: Any, found: Any, where: str) -> None:
    for module in (model, *stages):
        module.zero_grad()
    for output in (expected, found):
        generator = torch.Generator().manual_seed(0)
        tensors = [t for t in _tensors(output) if t.requires_grad]
        weights = [torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t) for t in tensors]
        if tensors:
            with _repeatable():
                torch.autograd.backward(tensors, weights)
    original = dict(model.named_parameters(remove_duplicate=False))
    total: dict[int, Tensor] = {}
    name_of: dict[int, str] = {}
    seen: set[int] = set()
    for stage in stages:
        for name, parameter in stage.named_parameters(remove_duplicate=False):
            key = id(original[name])
            name_of.setdefault(key, name)
            if parameter.grad is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                total[key] = total[key] + parameter.grad if key in total else parameter.grad
    for name, parameter in model.named_parameters():
        mine, theirs = total.get(id(parameter)), parameter.grad
        if mine is None and (theirs is None or not theirs.any()):
            continue
        if mine is None or theirs is None:
            raise VerificationError(f"the gradient of {name} reaches only one of the model and the stages ({where})")
        _compare(theirs, mine, f"the gradient of {name} ({where})")


def _compare_buffers(model: nn.Module, stages: Sequence[nn.Module], where: str) -> None:
    original = dict(model.named_buffers(remove_duplicate=False))
    for stage in stages:
        for name, buffer in stage.named_buffers(remove_duplicate=False):
            _compare(original[name], buffer, f"buffer {name} ({where})")


def _compare(expected: Tensor, found: Tensor, what: str) -> None:
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise VerificationError(
            f"{what} is {tuple(found.shape)} {found.dtype} in the stages, {tuple(expected.shape)} {expected.dtype} "
            "in the model"
        )
    scale = expected.abs().max().item() if expected.is_floating_point() and expected.numel() else 0.0
    tolerance = {"rtol": _TOLERANCE["rtol"], "atol": _TOLERANCE["atol"] * max(1.0, scale)}
    if not torch.allclose(expected, found, **tolerance, equal_nan=True):
        worst = (expected.double() - found.double()).abs().max().item()
        raise VerificationError(
            f"{what} differs between the stages and the model by up to {worst:.3g}",
            "it may keep state on self between calls, override train(), or use an autograd.Function of its own",
        )


def _tensors(output: Any) -> list[Tensor]:
    return [
        leaf
        for leaf in pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
        if isinstance(leaf, Tensor)
    ]


_RANDOM = ("dropout", "attention", "lstm", "gru", "rnn", "rand", "bernoulli", "multinomial", "normal", "rrelu")


class _SeedByInput(TorchFunctionMode):
    """Seeds the generator before each function that may draw from it, from the function's own first tensor."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(word in getattr(func, "__name__", str(func)) for word in _RANDOM):
            first = next((a for a in pytree.tree_leaves((args, kwargs)) if isinstance(a, Tensor)), torch.zeros(0))
            with torch._C.DisableTorchFunction():
                total = float(first.detach().double().abs().sum())
                torch.manual_seed(hash((total, tuple(first.shape))) & 0x7FFFFFFF)
        return func(*args, **(kwargs or {}))


@contextmanager
def _repeatable() -> Iterator[None]:
    with torch.random.fork_rng(), _SeedByInput():
        yield
