"""One stage: its module, and the minibatches whose graphs are alive."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pdtool.artifacts.bundle import Bundle
from pdtool.errors import ArtifactError
from pdtool.run.recompute import Before, Recompute
from pdtool.run.split import Rest, input_part
from pdtool.run.weights import Version, Weights


@dataclass(frozen=True)
class Stashed:
    """A minibatch between its forward and its backward.

    Attributes:
        outputs: with their graph; () where it is made again before the backward.
        before: what its forward saw, where it is.
        rest: of its backward, once the gradients of the inputs were computed.
    """

    version: Version
    inputs: list[Tensor]
    outputs: tuple[Tensor, ...]
    before: Before | None = None
    rest: Rest | None = None


@dataclass(frozen=True)
class Precision:
    """Computing in bf16 where it is safe (torch.autocast); weights and what goes between stages stay as they are.

    Attributes:
        outputs: dtypes of the stage's outputs as the next stages take them.
    """

    device: torch.device
    outputs: Sequence[torch.dtype]

    def inside(self) -> AbstractContextManager[Any]:
        """Around the stage's forward and the loss."""
        return torch.autocast(self.device.type, torch.bfloat16)

    def outside(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """The outputs in the dtypes that were agreed."""
        return tuple(output.to(dtype) for output, dtype in zip(outputs, self.outputs, strict=True))


class Stage:
    """Forward and backward of one stage.

    Attributes:
        stashed: minibatch -> its live graph.
        peak_stashed: most graphs ever alive together.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None,
        *,
        recompute: bool = False,
        stashing: bool = True,
        ahead: bool = False,
        precision: Precision | None = None,
        compiled: bool = False,
    ) -> None:
        """`loss` of (output, target): for the last stage; `stashing` and `ahead`: see Weights."""
        self.module, self.precision = module, precision
        self._call: Callable[..., Any] = torch.compile(module) if compiled else module
        self.recompute = Recompute(module) if recompute else None
        self.weights = Weights(module, stashing=stashing, ahead=ahead)
        self.loss = loss
        self.stashed: dict[int, Stashed] = {}
        self.peak_stashed = 0

    def forward(self, minibatch: int, inputs: Sequence[Tensor], target: Any = None) -> tuple[Tensor, ...]:
        """Compute with the weights that it is to read and keep the graph; the last stage's output is its loss."""
        version, kept = self.weights.acquire(minibatch), list(inputs)
        if self.recompute:
            with self.recompute.first(kept, target) as before:
                outputs = self._compute(kept, target)
            self.stashed[minibatch] = Stashed(version, kept, (), before)
        else:
            outputs = self._compute(kept, target)
            self.stashed[minibatch] = Stashed(version, kept, outputs)
        self.peak_stashed = max(self.peak_stashed, len(self.stashed))
        return outputs

    def _compute(self, inputs: Sequence[Tensor], target: Any) -> tuple[Tensor, ...]:
        with self.precision.inside() if self.precision else nullcontext():
            output = self._call(*inputs)
            outputs = as_tuple(output if self.loss is None else self.loss(output, target))
        return self.precision.outside(outputs) if self.precision and self.loss is None else outputs

    def _outputs(self, kept: Stashed) -> tuple[Tensor, ...]:
        """With their graph, made again where it was not kept."""
        if not self.recompute or not kept.before:
            return kept.outputs
        self.weights.use(kept.version)
        with self.recompute.again(kept.before):
            return self._compute(kept.inputs, kept.before.target)

    def evaluate(self, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """Outputs of the newest weights, without a graph; the last stage's one is the model's own."""
        self.weights.use()
        with self.precision.inside() if self.precision else nullcontext():
            output = self._call(*inputs)
        if self.loss is not None:
            return (output,)
        return self.precision.outside(as_tuple(output)) if self.precision else as_tuple(output)

    def backward(
        self,
        minibatch: int,
        gradients: Sequence[Tensor | None],
        weight: float = 1.0,
        final: Callable[[nn.Parameter], None] | None = None,
    ) -> list[Tensor | None]:
        """Compute with the weights of this minibatch's forward; its parameters' gradients are added, times `weight`.

        Args:
            gradients: one per output; None for an output without gradient, and for the loss.
            final: told of each parameter whose gradient is there, while the others are still computed.

        Returns:
            The gradients of the inputs, None where no path leads to one.
        """
        kept = self.stashed.pop(minibatch)
        outputs, known = self._roots(kept, gradients)
        self.weights.lend(kept.version, weight)
        with self._telling(kept.version, weight, final):
            if outputs:
                torch.autograd.backward(outputs, known)
        self.weights.collect(kept.version, weight)
        self.weights.release(kept.version)
        return [value.grad for value in kept.inputs]

    def backward_input(self, minibatch: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The first part of `backward`: the gradients of the inputs."""
        kept = self.stashed[minibatch]
        outputs, known = self._roots(kept, gradients)
        found, rest = input_part(outputs, kept.inputs, known)
        self.stashed[minibatch] = Stashed(kept.version, [], (), rest=rest)
        return found

    def backward_weight(
        self, minibatch: int, weight: float = 1.0, final: Callable[[nn.Parameter], None] | None = None
    ) -> None:
        """The second part: the gradients of the parameters."""
        kept = self.stashed.pop(minibatch)
        assert kept.rest, "the first part comes first"
        self.weights.lend(kept.version, weight)
        with self._telling(kept.version, weight, final):
            kept.rest.weight_part()
        self.weights.collect(kept.version, weight)
        self.weights.release(kept.version)

    def _roots(self, kept: Stashed, gradients: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Outputs that a gradient goes back from, and the gradients."""
        roots = [
            (output, gradient)
            for output, gradient in zip(self._outputs(kept), gradients, strict=True)
            if output.requires_grad and (self.loss is not None or gradient is not None)
        ]
        return [output for output, _ in roots], [gradient for _, gradient in roots]

    def _telling(
        self, version: Version, weight: float, final: Callable[[nn.Parameter], None] | None
    ) -> AbstractContextManager[None]:
        return self.weights.collecting(version, weight, final) if final else nullcontext()


def as_tuple(output: Any) -> tuple[Any, ...]:
    """What a stage returned: one tensor as it is, several as a tuple."""
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


def load_module(bundle: Bundle, folder: Path, stage: int, model: nn.Module) -> nn.Module:
    """Import the stage's class and give it the parameters and buffers of the whole `model`, by name, not copied.

    Raises:
        StaleError: the file is not as codegen wrote it.
        ArtifactError: its parameters are not the model's.
    """
    bundle.check_files(folder)
    described = bundle.stages[stage]
    path = folder / described.file
    spec = importlib.util.spec_from_file_location(f"pdtool_stage_{stage}", path)
    assert spec
    assert spec.loader
    code = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = code
    spec.loader.exec_module(code)
    module: nn.Module = getattr(code, described.class_name)()
    for kind in ("_parameters", "_buffers"):
        _adopt(module, model, kind, path)
    return module.train()


def _adopt(module: nn.Module, model: nn.Module, kind: str, path: Path) -> None:
    """Replace every entry of `kind` in `module` by the model's of the same name, so that what is tied stays tied."""
    for prefix, owner in module.named_modules():
        for key, own in getattr(owner, kind).items():
            name = f"{prefix}.{key}" if prefix else key
            theirs = _state(model, kind, name)
            if own is None and theirs is None:
                continue
            if own is None or theirs is None or own.shape != theirs.shape or own.dtype != theirs.dtype:
                raise ArtifactError(
                    path, f"its {name} is {_shape(own)}, the model's is {_shape(theirs)}", "run `pdtool codegen` again"
                )
            setattr(owner, key, theirs)  # nn.LSTM makes its list of weights here


def _state(model: nn.Module, kind: str, name: str) -> Tensor | None:
    prefix, _, key = name.rpartition(".")
    try:
        found: Tensor | None = getattr(model.get_submodule(prefix), kind).get(key)
    except AttributeError:
        found = None
    return found


def _shape(value: Tensor | None) -> str:
    return "missing" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
