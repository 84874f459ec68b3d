"""Run a traced model operator by operator, on the first minibatch of its training set."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pdtool.errors import ModelError
from pdtool.frontend.compute_mode import RunPrecision, computing_in
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import ModelInputs, Structure, tensors_in, tensors_of
from pdtool.frontend.model_rules import check_gradient, target_fault
from pdtool.frontend.operators import ByMode, Operator, Size, State, Traced, Value, in_mode, named_state, values_in
from pdtool.frontend.update_proof import set_mode, wrapped_optimizers
from pdtool.frontend.user_code import defaults_kept

Environment = dict[Value, Tensor]
Work = Callable[[], Any]
R = TypeVar("R")  # the readings for a piece of work
OnProgress = Callable[[int, int], None]  # called with (done, total)


@dataclass(frozen=True)
class Executor:
    """Runs the operators of `traced` in training mode.

    Attributes:
        batch: samples in the minibatch.
        device: where tensors are made.
        state: the model's parameters and buffers by name.
        precision: precision of forwards.
    """

    traced: Traced
    batch: int
    device: torch.device
    state: Mapping[str, Tensor]
    precision: RunPrecision

    def __call__(self, op: Operator, environment: Mapping[Value, Tensor]) -> list[Tensor]:
        """Run an operator and return its output tensors."""
        with self.region():
            return tensors_in(self.bound_call(op, environment)())

    def region(self) -> AbstractContextManager[Any]:
        """Return the context of a forward, the same as in a run."""
        return computing_in(self.precision, self.device)

    def bound_call(self, op: Operator, environment: Mapping[Value, Tensor]) -> Callable[[], Any]:
        """Return the operator's own call with its arguments bound, so that nothing else is timed with it."""
        if op.branch:
            return partial(self._run_branch, op, environment)
        args, kwargs = self.arguments(op, environment)
        return partial(self.callee(op), *args, **kwargs)

    def callee(self, op: Operator) -> Callable[..., Any]:
        """Return the function or module that an operator without branches calls."""
        call: Any = op.function.apply if op.function else op.target
        return self.traced.model.get_submodule(op.module) if call is None else call

    def arguments(self, op: Operator, environment: Mapping[Value, Any]) -> Any:
        """Return an operator's arguments, with the tensors of the model and the environment filled in."""

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

        return pytree.tree_map(resolve, (op.args, op.kwargs))

    def _run_branch(self, op: Operator, environment: Mapping[Value, Tensor]) -> list[Tensor]:
        """Run the operator's training branch; outputs that only evaluation computes are zeros."""
        assert op.branch
        inner = dict(environment)
        for part in op.branch.training:
            inner.update(zip(part.outputs, self(part, inner), strict=True))
        return [
            inner[value] if value else torch.zeros_like(output.meta(self.batch), device=self.device)
            for (value, _), output in zip(op.branch.results, op.outputs, strict=True)
        ]


@dataclass(frozen=True)
class _Backward:
    """The backward of a node whose forward has run.

    Attributes:
        ends: the outputs that have a gradient.
        leaves: the tensors that get one.
        is_opaque: whether the node may checkpoint reentrantly, which allows only autograd.backward.
    """

    node: str
    ends: list[Tensor]
    leaves: list[Tensor]
    is_opaque: bool = False

    def work(self) -> Work:
        """Return the call that computes it, with gradients of one."""
        gradients = [torch.ones_like(t) for t in self.ends]
        if self.is_opaque:
            return partial(torch.autograd.backward, self.ends, gradients)
        return partial(torch.autograd.grad, self.ends, self.leaves, gradients, allow_unused=True)


@dataclass(frozen=True, kw_only=True)
class ProfiledModel:
    """A traced model with one minibatch, of real or of fake tensors.

    Attributes:
        run: executes its operators.
        inputs: the model's arguments, from the user's `example_inputs` or dataset.
        target: the target of the loss; None without a loss.
        with_loss: whether the model file has a loss and a dataset to take a target from.
    """

    model_file: ModelFile
    traced: Traced
    batch: int
    run: Executor
    inputs: ModelInputs
    target: Any
    with_loss: bool

    @classmethod
    def of(
        cls,
        model_file: ModelFile,
        traced: Traced,
        batch: int,
        device: torch.device,
        move: Callable[[Tensor], Tensor] | None = None,
        precision: RunPrecision = "fp32",
    ) -> Self:
        """Join a traced model with the first minibatch of its training set.

        Args:
            move: function that brings a tensor of the minibatch to the model; None: copy it to `device`.
            precision: precision of forwards.

        Raises:
            ModelError: the training set does not match the model, or there is nothing to train.
        """
        parameters = list(traced.model.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            what = "no parameter of the model requires a gradient, so there is nothing to train"
            raise model_file.error(what, "leave requires_grad on in model() for the parameters to train")
        may_have = any(isinstance(leaf, (State, ByMode)) for leaf in pytree.tree_leaves(traced.output))
        if parameters and not (traced.with_gradient or may_have):
            raise _no_gradient(model_file)
        state = {name: tensor.to(device) for name, tensor in named_state(in_mode(traced.model, True)).items()}
        place = move or (lambda t: t.to(device))
        with_loss = model_file.has("loss") and model_file.has("dataset")
        data, target = model_file.example_batch(batch) if with_loss else (model_file.example_inputs(batch), None)
        inputs = model_file.as_inputs(data)
        model_file.check_arguments(inputs, traced.arguments, "dataset('train')")
        # a run refuses the same targets
        if fault := target_fault(target, model_file.example_batch(1)[1], batch) if with_loss else None:
            raise model_file.error(f"dataset('train') {fault[0]}", fault[1])
        Structure.of(target)
        return cls(
            model_file=model_file,
            traced=traced,
            batch=batch,
            run=Executor(traced, batch, device, state, precision),
            inputs=inputs.map(place),
            target=pytree.tree_map(lambda t: place(t) if isinstance(t, Tensor) else t, target),
            with_loss=with_loss,
        )

    @property
    def computed(self) -> list[Operator]:
        """The operators that run for a minibatch."""
        return [op for op in self.traced.operators if not (op.is_input or op.constant)]

    @cached_property
    def outputs(self) -> list[Value]:
        """The tensors that the model returns."""
        return values_in(self.traced.output)

    def environment(self) -> Environment:
        """Return the model's inputs and its constants."""
        environment: Environment = {}
        inputs = iter(self.inputs.tensors)
        for op in self.traced.operators:
            if op.is_input:
                environment[op.outputs[0]] = next(inputs)
            elif op.constant:
                environment.update(zip(op.outputs, self.run(op, environment), strict=True))
        return environment

    def replay(
        self, measure: Callable[[str, Work], tuple[Any, R]], progress: OnProgress = lambda done, total: None
    ) -> tuple[dict[str, R], dict[str, R]]:
        """Measure every node's forward, in order, and then every node's backward, in reverse order.

        Args:
            measure: called with (name, work); does the work and returns its result and its reading.
            progress: called with (nodes done, nodes in all).

        Returns:
            The readings of the forward and of the backward, by node; a node without gradients has no backward.
        """
        environment = self.environment()
        backwards: list[_Backward] = []
        forward: dict[str, R] = {}
        for done, op in enumerate(self.computed):
            progress(done, len(self.computed))
            inputs = detached(op.values, environment)
            call = self.run.bound_call(op, inputs)
            with self.run.region():
                result, forward[op.name] = measure(op.name, call)
            outputs = tensors_in(result)
            environment.update(zip(op.outputs, (t.detach() for t in outputs), strict=True))
            if not self.traced.with_gradient.isdisjoint(op.outputs):
                taken = {id(t): t for t in (*inputs.values(), *(self.run.state[name] for name in op.parameters))}
                leaves = requiring_gradients(taken.values())
                backwards.append(_Backward(op.name, requiring_gradients(outputs), leaves, is_opaque=op.opaque))
        if self.with_loss:
            returned = detached(self.outputs, environment)
            copies = {value: tensor.clone() for value, tensor in returned.items()}  # a loss may change them in place
            output = self.output(copies)
            loss, forward["loss"] = measure("loss", lambda: self.loss(output))
            backwards.append(_Backward("loss", requiring_gradients([loss]), requiring_gradients(returned.values())))
        backward: dict[str, R] = {}
        while backwards:  # each is dropped when it is done, and with it the tensors that it saved
            last = backwards.pop()
            if last.ends and last.leaves:
                _, backward[last.node] = measure(f"{last.node} backward", last.work())
                for leaf in last.leaves:
                    leaf.grad = None
        progress(len(self.computed), len(self.computed))
        return forward, backward

    def train_step(self) -> None:
        """Run forward, loss and backward of the model itself."""
        with defaults_kept(f"{self.model_file.path.name}: forward"), self.run.region():
            output = self.inputs.call(self.traced.model)
        scalars = [self.loss(output)] if self.with_loss else [t.sum() for t in tensors_of(output) if t.requires_grad]
        if self._trained_parameters and not requiring_gradients(scalars):
            raise _no_gradient(self.model_file)
        torch.autograd.backward(scalars)  # not autograd.grad, which reentrant checkpointing refuses
        for parameter in self._trained_parameters:
            parameter.grad = None

    @cached_property
    def _trained_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.traced.model.parameters() if p.requires_grad]

    def output(self, environment: Mapping[Value, Tensor]) -> Any:
        """Return the model's output with its tensors filled in, in the form for the user's loss."""
        state = self.run.state
        return self.traced.output_with(lambda v: environment[v] if isinstance(v, Value) else state[v.name], self.batch)

    def loss(self, output: Any) -> Tensor:
        """Compute the user's loss of this minibatch, a scalar; raises ModelError if it cannot train anything."""
        with defaults_kept(f"{self.model_file.path.name}: loss()"), self.run.region():
            loss = self.model_file.loss(output, self.target)
        check_gradient(loss, output)
        return loss

    def loss_is_a_sum(self) -> bool:
        """Whether the loss of a minibatch that holds each sample twice is twice as large."""

        def twice(value: Any) -> Any:
            is_batched = isinstance(value, Tensor) and value.dim() > 0 and len(value) == self.batch
            return torch.cat([value, value]) if is_batched else value

        losses = []
        with self.run.region():
            output = self.inputs.call(self.traced.model)
            for given in (pytree.tree_map(twice, (output, self.target)), (output, self.target)):
                try:
                    losses.append(float(self.model_file.loss(*given).detach()))
                except Exception:  # a loss for this minibatch size only
                    return False
        return bool(losses[1]) and math.isclose(losses[0], 2 * losses[1], rel_tol=1e-3)

    def update(self, measure: Callable[[Work], tuple[float, float]]) -> tuple[float, float, float]:
        """Measure a step of the user's optimizer over all parameters, with gradients of zero.

        Args:
            measure: called with the second step, which allocates no state; returns its seconds and its scratch memory.

        Returns:
            The seconds, and the bytes of state and of scratch memory per byte of parameters; zeros without an
            optimizer. Scalars of the state, such as a step count, are left out.

        Raises:
            ModelError: its step fails, or needs a closure.
        """
        if not self.model_file.has("optimizer"):
            return 0.0, 0.0, 0.0
        named = list(self.traced.model.named_parameters())
        optimizer = self.model_file.optimizer(named)
        for _, parameter in named:
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        try:
            set_mode(optimizer, training=True)
            optimizer.step()
        except Exception as error:
            raise self.model_file.error_at(error, f"a step of {type(optimizer).__name__}") from error
        seconds, scratch_bytes = measure(optimizer.step)
        optimizer.zero_grad()
        optimizers = (optimizer, *wrapped_optimizers(optimizer).values())
        state = [t for each in optimizers for t in tensors_in(list(each.state.values())) if t.dim()]
        trained = max(1, sum(p.nbytes for p in self._trained_parameters))
        return seconds, sum(t.nbytes for t in state) / trained, scratch_bytes / trained


def _no_gradient(model_file: ModelFile) -> ModelError:
    what = "none of the model's outputs has a gradient, so nothing can be trained"
    return model_file.error(what, "remove torch.no_grad(), inference_mode() and detach() from its forward")


def detached(values: Iterable[Value], environment: Mapping[Value, Tensor]) -> Environment:
    """Return detached tensors, so that a backward stops there."""
    return {v: environment[v].detach().requires_grad_(v.differentiable) for v in values}


def requiring_gradients(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors that require gradients."""
    return [t for t in tensors if t.requires_grad]


def disable_inplace_modules(model: nn.Module) -> None:
    """Set `inplace=False` in all modules, as codegen does, because a replayed operator must not change its inputs."""
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
