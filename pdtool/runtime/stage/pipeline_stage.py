"""Forward and backward of one stage: its module, and the minibatches whose graphs are alive.

With recomputation a stage keeps only its inputs, and runs its forward again before its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_map

from pdtool.errors import ModelError
from pdtool.frontend import compute_mode
from pdtool.frontend.compute_mode import computing_in
from pdtool.frontend.model_io import tensors_of, with_own_classes
from pdtool.frontend.model_rules import check_gradient, check_loss_parameters, graph_leaves
from pdtool.frontend.operators import empty_in_same_place, storage_address
from pdtool.frontend.random_numbers import OperatorSeeds, is_user_module
from pdtool.runtime.stage.split_backward import WeightBackward, backward_input
from pdtool.runtime.stage.weight_versions import OnGradient, WeightVersion, WeightVersions


class StashedMinibatch(NamedTuple):
    """A minibatch between its forward and its backward.

    It keeps the graph, but not the outputs: their memory is free once they are sent, unless an operator saved them.

    Attributes:
        outputs: for each output where its gradient enters the graph, None if it has no gradient; () with recomputation,
            which makes the graph again before the backward.
        forward_state: with recomputation, the state that the forward saw.
        weight_backward: the second part of a split backward, after the first.
    """

    version: WeightVersion
    inputs: list[Tensor]
    outputs: Sequence[GradientEdge | None]
    forward_state: ForwardState | None = None
    weight_backward: WeightBackward | None = None


@dataclass(frozen=True)
class Autocast:
    """Computing in bf16 where it is safe (torch.autocast); weights and messages between stages keep their dtypes.

    Attributes:
        output_dtypes: dtypes of the stage's outputs for the next stages.
    """

    device: torch.device
    output_dtypes: Sequence[torch.dtype]

    def cast_outputs(self, outputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Return the outputs, of any shapes, in the dtypes that the next stages take.

        Wrong outputs are returned unchanged: StageIO refuses them.
        """
        if len(outputs) != len(self.output_dtypes) or not all(isinstance(output, Tensor) for output in outputs):
            return tuple(outputs)
        return tuple(output.to(dtype) for output, dtype in zip(outputs, self.output_dtypes, strict=True))


class PipelineStage:
    """Forward and backward of one stage.

    Args:
        loss: function of (output, target), in the form of the user's model and dataset; None unless the stage is last.
        recompute: whether to run each forward again before its backward, instead of keeping its graph.
        stashing, extrapolates: see WeightVersions.
        autocast: None computes in the dtypes of the weights.
        compiled: whether the module goes through torch.compile; then operators are not seeded one by one.
        seeds: None draws the random numbers of stage 0 on the CPU.
        without_gradient: number of an output that has no gradient -> its name.
        modules_of_loss: modules that the loss may use and change.
        output_classes: see Bundle.

    Attributes:
        seeds: seeds of the random numbers that forward draws.
        stashed: minibatch -> its live graph.
    """

    def __init__(
        self,
        module: nn.Module,
        loss: Callable[[Any, Any], Tensor] | None,
        *,
        recompute: bool = False,
        stashing: bool = True,
        extrapolates: bool = False,
        autocast: Autocast | None = None,
        compiled: bool = False,
        seeds: OperatorSeeds | None = None,
        without_gradient: Mapping[int, str] | None = None,
        modules_of_loss: Iterable[nn.Module] = (),
        output_classes: Mapping[str, str] | None = None,
    ) -> None:
        self._without_gradient, self._output_classes = without_gradient or {}, output_classes or {}
        self.module, self._loss, self._autocast = module, loss, autocast
        # the context of the stage's forward and of the loss
        self._region = partial(computing_in, "bf16", autocast.device) if autocast else nullcontext
        self._call: Callable[..., Any] = compute_mode.compiled(module) if compiled else module
        self._recomputation = Recomputation((module, *modules_of_loss)) if recompute else None
        self.seeds = seeds or OperatorSeeds()
        if not compiled:
            self.seeds.attach(module)
        self.weights = WeightVersions(module, stashing=stashing, extrapolates=extrapolates)
        self._is_loss_checked = False
        self.stashed: dict[int, StashedMinibatch] = {}

    def forward(self, minibatch: int, inputs: list[Tensor], target: Any = None) -> tuple[Tensor, ...]:
        """Compute with the weight version that the minibatch reads, and keep the graph or, to recompute, the inputs.

        Args:
            inputs: the module's inputs, [samples, ...] each; those that get a gradient are leaves.
            target: the minibatch's target, at the last stage.

        Returns:
            The module's outputs, [samples, ...] each; at the last stage the loss, a scalar.

        Raises:
            ModelError: some trained parameters get no gradient here.
        """
        version = self.weights.acquire()
        self.seeds.begin_forward(minibatch)
        state = self._recomputation.save(inputs, target) if self._recomputation else None
        outputs = self._compute(inputs, target)
        self._check_gradients(outputs)
        if state:
            outputs = tuple(o.detach() if isinstance(o, Tensor) else o for o in outputs)
            self.stashed[minibatch] = StashedMinibatch(version, state.inputs, (), state)
        else:
            self.stashed[minibatch] = StashedMinibatch(version, inputs, _gradient_edges(outputs))
        return outputs

    def evaluate(self, minibatch: int, inputs: Sequence[Tensor]) -> tuple[Any, ...]:
        """Compute with the newest weights, without a graph.

        Args:
            inputs: the module's inputs, [samples, ...] each.

        Returns:
            The module's outputs, [samples, ...] each; at the last stage only the model's own output.
        """
        self.weights.bind_newest()
        self.seeds.begin_forward(minibatch)
        return self._compute(inputs, None, with_loss=False)

    def loss(self, output: Any, target: Any) -> Tensor:
        """Compute the user's loss, a scalar, at the last stage: with the random numbers and autocast of training.

        Args:
            output, target: in the form of the user's model and dataset.
        """
        assert self._loss
        self.seeds.seed_user_code("loss")
        with self._region():
            return self._loss(output, target)

    def backward(
        self, minibatch: int, gradients: Sequence[Tensor | None], weight: float = 1.0, on_gradient: OnGradient = None
    ) -> list[Tensor | None]:
        """Compute the gradients of a minibatch with the weights of its forward, and accumulate those of parameters.

        Args:
            gradients: one per output, of its shape; None for an output without gradient, and for the loss.
            weight: factor of the parameters' gradients: the samples of the minibatch over those of a full one.
            on_gradient: called with each parameter whose gradient is complete, while others are still computed.

        Returns:
            The gradients of the inputs, of their shapes; None where no path leads to one.
        """
        stashed = self.stashed.pop(minibatch)
        outputs, output_gradients = self._differentiable_outputs(minibatch, stashed, gradients)
        backward = partial(torch.autograd.backward, outputs, output_gradients)
        self.weights.accumulate_gradients(stashed.version, backward, weight, on_gradient)
        return [value.grad for value in stashed.inputs]

    def backward_input(self, minibatch: int, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Do the first part of `backward`: compute the gradients of the inputs; arguments and result as there."""
        stashed = self.stashed[minibatch]
        outputs, output_gradients = self._differentiable_outputs(minibatch, stashed, gradients)
        input_gradients, second_part = backward_input(outputs, stashed.inputs, output_gradients)
        self.stashed[minibatch] = StashedMinibatch(stashed.version, [], (), weight_backward=second_part)
        return input_gradients

    def backward_weight(self, minibatch: int, weight: float = 1.0, on_gradient: OnGradient = None) -> None:
        """Do the second part of `backward`: accumulate the gradients of the parameters; arguments as there."""
        stashed = self.stashed.pop(minibatch)
        assert stashed.weight_backward, "backward_input comes first"
        self.weights.accumulate_gradients(stashed.version, stashed.weight_backward.run, weight, on_gradient)

    def _compute(self, inputs: Sequence[Tensor], target: Any, *, with_loss: bool = True) -> tuple[Any, ...]:
        with self._region():
            output = self._call(*inputs)
            if self._loss is not None:
                if self._output_classes:
                    output = with_own_classes(output, self._output_classes)
                return as_tuple(self._differentiable_loss(output, target, inputs)) if with_loss else (output,)
        return self._autocast.cast_outputs(as_tuple(output)) if self._autocast else as_tuple(output)

    def _check_gradients(self, outputs: Sequence[Any]) -> None:
        for i, name in self._without_gradient.items():
            if i < len(outputs) and isinstance(outputs[i], Tensor) and outputs[i].requires_grad:
                raise ModelError(
                    "optimizer() or after_update() trains parameters that model() left frozen, but the plan sends no "
                    f"gradient back for {name}, which depends on them",
                    "leave them trainable in model(), freeze them in optimizer() instead, and profile and plan again",
                )

    def _differentiable_loss(self, output: Any, target: Any, inputs: Sequence[Tensor]) -> Tensor:
        """The user's loss of a training step, which must depend on an output that can be trained.

        Raises:
            ModelError: it does not, or it depends on a parameter outside the model, which no stage would train.
        """
        made = [] if self._is_loss_checked else [leaf for t in tensors_of(output) for leaf in graph_leaves(t)]
        made = [leaf for leaf in made if not isinstance(leaf, nn.Parameter)]
        loss = self.loss(output, target)
        if not torch.is_grad_enabled():
            what = "gradients are switched off in training: the model file has called torch.set_grad_enabled(False)"
            raise ModelError(what, "use `with torch.no_grad():` instead")
        check_gradient(loss, output)
        if loss.requires_grad and not self._is_loss_checked:  # once, because its graph is the same in each minibatch
            self._is_loss_checked = True
            known = (*self.module.parameters(), *inputs, *made)  # made in forward, for a penalty
            check_loss_parameters(loss, known, self.weights.parameters.values())
        return loss

    def _differentiable_outputs(
        self, minibatch: int, stashed: StashedMinibatch, gradients: Sequence[Tensor | None]
    ) -> tuple[list[GradientEdge], list[Tensor | None]]:
        """The outputs that have a gradient, in their graph, which is computed again if it was not kept; and the
        gradients."""
        outputs = stashed.outputs
        if self._recomputation and stashed.forward_state:
            self.weights.bind(stashed.version)
            self.seeds.begin_forward(minibatch)
            with self._recomputation.restored(stashed.forward_state):
                outputs = _gradient_edges(self._compute(stashed.inputs, stashed.forward_state.target))
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=True)
            if output is not None and (self._loss is not None or gradient is not None)
        ]
        return [output for output, _ in pairs], [gradient for _, gradient in pairs]


def _gradient_edges(outputs: Sequence[Any]) -> list[GradientEdge | None]:
    """For each output of a stage where its gradient enters the graph; None if it has no gradient."""
    return [get_gradient_edge(o) if isinstance(o, Tensor) and o.requires_grad else None for o in outputs]


def as_tuple(output: Any) -> tuple[Any, ...]:
    """Return a stage's result, one tensor or several, as a tuple."""
    return tuple(output) if isinstance(output, (tuple, list)) else (output,)


@dataclass(frozen=True)
class ForwardState:
    """The state that a forward saw, besides its weights.

    Attributes:
        inputs: inputs of the stage's module; those that get a gradient are the received ones.
        target: target of the minibatch; None unless the stage is the last.
        attributes: attributes of each module that may keep state, including buffers.
    """

    inputs: list[Tensor]
    target: Any
    attributes: list[dict[str, Any]]


class Recomputation:
    """Saves and restores the state that one stage's forwards see, so that a forward can run again.

    Chen et al., 2016, "Training Deep Nets with Sublinear Memory Cost", with one checkpoint for a whole stage. The
    second forward sees the same weight version, buffers and target, and the same random numbers, because the stage
    seeds them again. Its writes are dropped: only the first one updates running statistics.

    The first forward also makes a graph, which is dropped. Without a graph torch uses different kernels, such as those
    of an LSTM on a CPU, whose last bits differ.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        inner = (m for module in modules for m in module.modules())
        self._modules = [m for m in inner if m._buffers or is_user_module(m)]

    def save(self, inputs: Sequence[Tensor], target: Any) -> ForwardState:
        """Return the state that a forward would see now."""
        copy = _LazyCopy()
        return ForwardState(
            [copy(value) for value in inputs],
            tree_map(copy, target),
            [
                vars(module) | {"_buffers": {name: copy(buffer) for name, buffer in module._buffers.items()}}
                for module in self._modules
            ],
        )

    @contextmanager
    def restored(self, state: ForwardState) -> Iterator[None]:
        """Put the modules into the saved `state` in this context; a state can be restored once."""
        newest = [vars(module).copy() for module in self._modules]
        try:
            self._set(state.attributes)
            with torch.enable_grad():
                yield
        finally:
            self._set(newest)

    def _set(self, attributes: Sequence[dict[str, Any]]) -> None:
        for module, values in zip(self._modules, attributes, strict=True):
            vars(module).clear()
            vars(module).update(values)


class _LazyCopy:
    """Copies tensors, of any shapes; tensors that share memory share it in their copies.

    It copies memory only when somebody writes into one of the two, so unchanged tensors cost nothing. Memory outside
    torch, as of a message or of numpy, is copied at once.
    """

    def __init__(self) -> None:
        self._copies: dict[int, torch.UntypedStorage] = {}  # address of a storage -> its copy

    def __call__(self, value: Any) -> Any:
        """Return a copy of a tensor; anything else, and a tensor with a graph, unchanged."""
        if not isinstance(value, Tensor) or value.requires_grad:
            return value
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_conj() or value.is_neg():
            return value.clone()
        address = storage_address(value)
        if address not in self._copies:
            self._copies[address] = _copied_when_written(value)
        return empty_in_same_place(value, self._copies)


def _copied_when_written(tensor: Tensor) -> torch.UntypedStorage:
    """A copy of the memory of a tensor."""
    try:
        return torch._lazy_clone(tensor).untyped_storage()
    except RuntimeError:
        return tensor.untyped_storage().clone()  # type: ignore[no-untyped-call,no-any-return]
