"""Run single operators of a traced model on real tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pdtool.frontend.operators import ByMode, Operator, Size, State, Traced, Value

Environment = dict[Value, Tensor]


@dataclass(frozen=True)
class Executor:
    """Runs the operators of `traced` in training mode.

    Attributes:
        batch: samples in the minibatch.
        device: where tensors are made.
        state: the model's parameters and buffers by name.
    """

    traced: Traced
    batch: int
    device: torch.device
    state: Mapping[str, Tensor]

    @classmethod
    def of(cls, traced: Traced, batch: int, device: torch.device) -> Executor:
        """An executor over the traced model itself, which stands on `device`."""
        model = traced.model.train()
        state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
        return cls(traced, batch, device, state)

    def __call__(self, op: Operator, environment: Mapping[Value, Tensor]) -> list[Tensor]:
        """The operator's output tensors."""
        return tensors(self.prepared(op, environment)())

    def prepared(self, op: Operator, environment: Mapping[Value, Tensor]) -> Callable[[], Any]:
        """The operator's own call, its arguments in place, so that nothing else is timed with it."""

        def resolve(argument: Any) -> Any:
            if isinstance(argument, Value):
                return environment[argument]
            if isinstance(argument, State):
                return self.state[argument.name]
            if isinstance(argument, Size):
                return argument.at(self.batch)
            if isinstance(argument, ByMode):
                return resolve(argument.training)
            if isinstance(argument, torch.device):
                return self.device
            return argument.to(self.device) if isinstance(argument, Tensor) else argument

        args, kwargs = pytree.tree_map(resolve, (op.args, op.kwargs))
        call: Any = op.target or self.traced.model.get_submodule(op.module)
        return partial(call, *args, **kwargs)

    def fresh(self, op: Operator, environment: Mapping[Value, Tensor]) -> Environment:
        """The operator's inputs alone, cut off from what made them, so that a backward stops here."""
        return {v: environment[v].detach().requires_grad_(v.differentiable) for v in op.values}

    def sources(self, op: Operator, inputs: Mapping[Value, Tensor]) -> list[Tensor]:
        """What a backward of this operator differentiates by: its inputs and its parameters."""
        parameters = [self.state[name] for name in op.parameters]
        unique = {id(t): t for t in (*inputs.values(), *parameters) if t.requires_grad}
        return list(unique.values())


class Output(dict[str, Any]):
    """What a model returns by name, as the generated last stage returns it: output["logits"] or output.logits."""

    __getattr__ = dict.__getitem__


def filled(output: Any, environment: Mapping[Value, Tensor]) -> Any:
    """The model's output with its tensors in place, as the user's loss takes it."""
    result = pytree.tree_map(lambda v: environment[v] if isinstance(v, Value) else v, output)
    return Output(result) if isinstance(result, dict) else result


def tensors(result: Any) -> list[Tensor]:
    """Those in what an operator returned, in order."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def differentiable(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Those that have a gradient function."""
    return [t for t in tensors if t.requires_grad]


def inplace_modules_off(model: nn.Module) -> None:
    """A replayed operator must leave its inputs as they are: `inplace=True` is dropped, as codegen drops it."""
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
