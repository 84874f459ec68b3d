"""What a profile counts, whether its times are measured or estimated: the graph, bytes and flops of each operator."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from pdtool.artifacts.profile import Device, Node, Profile, SharedParameter
from pdtool.errors import ModelError, PdtoolError
from pdtool.frontend.modelfile import ModelFile
from pdtool.frontend.operators import Operator, Traced, Value
from pdtool.profile.execute import Environment, Executor, filled, tensors
from pdtool.profile.flops import FORMULAS

Times = Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A traced model with one minibatch, of real or of fake tensors.

    Attributes:
        run: executes its operators.
        inputs: the model's arguments.
        target: what the loss compares the output with; None without a loss.
        with_loss: whether the model file has a loss and a dataset to take a target from.
    """

    model_file: ModelFile
    traced: Traced
    batch: int
    run: Executor
    inputs: tuple[Tensor, ...]
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
    ) -> Self:
        """The traced model with the first minibatch of its training set.

        Args:
            move: what brings a tensor of the minibatch to where the model is; None: a copy to `device`.
        """
        place = move or (lambda t: t.to(device))
        with_loss = model_file.has("loss") and model_file.has("dataset")
        data, target = model_file.example_batch(batch) if with_loss else (model_file.example_inputs(batch), None)
        return cls(
            model_file=model_file,
            traced=traced,
            batch=batch,
            run=Executor.of(traced, batch, device),
            inputs=tuple(place(t) for t in model_file.as_inputs(data)),
            target=pytree.tree_map(lambda t: place(t) if isinstance(t, Tensor) else t, target),
            with_loss=with_loss,
        )

    @property
    def computed(self) -> list[Operator]:
        """The operators that a minibatch runs through."""
        return [op for op in self.traced.operators if not (op.is_input or op.constant)]

    @cached_property
    def outputs(self) -> list[Value]:
        """The tensors that the model returns."""
        return [v for v in pytree.tree_leaves(self.traced.output) if isinstance(v, Value)]

    def environment(self) -> Environment:
        """The model's inputs and the constants."""
        environment: Environment = {}
        inputs = iter(self.inputs)
        for op in self.traced.operators:
            if op.is_input:
                environment[op.outputs[0]] = next(inputs)
            elif op.constant:
                environment.update(zip(op.outputs, self.run(op, environment), strict=True))
        return environment

    def loss_inputs(self, environment: Environment) -> tuple[list[Tensor], Any]:
        """(leaves that a gradient comes back for, the model's output made of them)."""
        leaves = {v: environment[v].detach().requires_grad_(v.differentiable) for v in self.outputs}
        return [t for t in leaves.values() if t.requires_grad], filled(self.traced.output, leaves)

    def loss(self, output: Any) -> Tensor:
        """The user's loss of this minibatch."""
        return self.model_file.loss(output, self.target)

    def stepped(self) -> Optimizer | None:
        """The user's optimizer over all parameters, after one step with gradients of zero; None without one."""
        if not self.model_file.has("optimizer"):
            return None
        named = [(name, p) for name, p in self.traced.model.named_parameters() if p.requires_grad]
        optimizer = self.model_file.optimizer(named)
        for _, parameter in named:
            parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step()
        except TypeError as error:
            raise ModelError(
                f"{self.model_file.path.name}: {type(optimizer).__name__}.step() cannot be called alone ({error})",
                "use an optimizer that needs no closure",
            ) from error
        return optimizer

    def state_bytes(self, optimizer: Optimizer | None) -> float:
        """Bytes of the optimizer's state for each byte of parameters; scalars such as a step count are left out."""
        if optimizer is None:
            return 0.0
        state = (t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.dim())
        trained = sum(p.nbytes for p in self.traced.model.parameters() if p.requires_grad)
        return sum(t.nbytes for t in state) / max(1, trained)

    def survey(self) -> tuple[dict[str, int], dict[str, int]]:
        """(stash bytes, flops) of each operator, from one forward of the whole graph with autograd.

        A storage that several operators save is counted once, at the first; parameters are not counted.
        """
        seen = {p.untyped_storage()._cdata for p in self.run.state.values()}
        kept: list[Tensor] = []
        stash: dict[str, int] = {}
        flops: dict[str, int] = {}
        current = ""

        def note(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            if storage._cdata not in seen:
                seen.add(storage._cdata)
                kept.append(tensor)  # so that its address is not given to another
                stash[current] = stash.get(current, 0) + storage.nbytes()
            return tensor

        environment = self.environment()
        counter = FlopCounterMode(display=False, custom_mapping=FORMULAS)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), counter:
            for op in self.computed:
                current, before = op.name, counter.get_total_flops()
                environment.update(zip(op.outputs, self.run(op, environment), strict=True))
                flops[op.name] = counter.get_total_flops() - before
            if self.with_loss:
                current = "loss"
                self.loss(filled(self.traced.output, environment))
        return stash, flops

    def profile(
        self,
        device: Device,
        *,
        forwards: Times,
        backwards: Times,
        update_s: float,
        state_bytes: float,
        step_s: float,
        survey: tuple[Mapping[str, int], Mapping[str, int]],
        scratch: Mapping[str, int] | None = None,
    ) -> Profile:
        """The profile with these times.

        Args:
            forwards, backwards: seconds of each node; update_s: of the optimizer step, shared out by parameter bytes.
            state_bytes: of the optimizer, for each byte of parameters.
            step_s: seconds of a whole step without the update; 0 when it is estimated.
            scratch: bytes, where they were measured; see Node.
        """
        nodes = tuple(self._nodes(*survey, forwards, backwards, update_s, scratch or {}))
        spent = sum(n.forward_s + n.backward_s + n.update_s for n in nodes)
        profile = Profile(
            name=self.model_file.name,
            model=self.model_file.ref,
            digests={self.model_file.ref.source: self.model_file.sha256},
            batch_size=self.batch,
            device=device,
            step_s=step_s + update_s if step_s else 0.0,
            coverage=spent / (step_s + update_s) if step_s else 0.0,
            optimizer_state_bytes=state_bytes,
            nodes=nodes,
            shared=tuple(self._shared()),
        )
        return profile.model_copy(update=self._hints(profile))

    def _nodes(
        self,
        stash: Mapping[str, int],
        flops: Mapping[str, int],
        forwards: Times,
        backwards: Times,
        update_s: float,
        scratch: Mapping[str, int],
    ) -> Iterator[Node]:
        taken = {v for op in self.traced.operators for v in op.values} | set(self.outputs)
        all_bytes = max(1, sum(p.nbytes for p in self.traced.model.parameters()))
        charged: set[str] = set()
        for op in self.traced.operators:
            if op.constant:
                continue
            names = {self.traced.tied[name] for name in op.parameters}
            share = sum(self.run.state[name].nbytes for name in names - charged) / all_bytes
            charged |= names
            outputs = [v for v in op.outputs if v in taken]
            yield Node(
                name=op.name,
                op=op.op,
                module=op.module,
                inputs=tuple(dict.fromkeys(v.operator for v in op.values if not self._is_constant(v))),
                forward_s=forwards.get(op.name, 0.0),
                backward_s=backwards.get(op.name, 0.0),
                update_s=update_s * share,
                output_bytes=sum(v.nbytes(self.batch) for v in outputs),
                gradient_bytes=sum(v.nbytes(self.batch) for v in outputs if v.differentiable),
                parameter_bytes=sum(self.run.state[name].nbytes for name in names),
                stash_bytes=stash.get(op.name, 0),
                scratch_bytes=scratch.get(op.name, 0),
                flops=flops.get(op.name, 0),
            )
        if self.with_loss:
            sources = (*dict.fromkeys(v.operator for v in self.outputs if not self._is_constant(v)), "target")
            yield Node(name="target", op="input", module="", output_bytes=sum(t.nbytes for t in tensors(self.target)))
            yield Node(
                name="loss",
                op="loss",
                module="",
                inputs=sources,
                forward_s=forwards["loss"],
                backward_s=backwards.get("loss", 0.0),
                stash_bytes=stash.get("loss", 0),
                scratch_bytes=scratch.get("loss", 0),
            )

    def _is_constant(self, value: Value) -> bool:
        return self.traced.by_name[value.operator].constant

    def _shared(self) -> Iterator[SharedParameter]:
        for first in dict.fromkeys(self.traced.tied.values()):
            users = [op.name for op in self.computed if any(self.traced.tied[n] == first for n in op.parameters)]
            if len(users) > 1:
                yield SharedParameter(name=first, bytes=self.run.state[first].nbytes, nodes=tuple(users))

    def _hints(self, profile: Profile) -> dict[str, Any]:
        """`together` and `pin`: what the trace demands and what HINTS asks for."""
        hints = self.model_file.hints
        together = list(self.traced.together)
        for path in hints.get("no_split", ()):
            together.append(tuple(self._named(profile, path)))
        pin = {name: int(stage) for path, stage in hints.get("pin", {}).items() for name in self._named(profile, path)}
        return {"together": tuple(group for group in together if len(group) > 1), "pin": pin}

    def _named(self, profile: Profile, path: str) -> list[str]:
        names = profile.graph.expand([path])
        if names == [path] and path not in profile.by_name:
            raise ModelError(f"{self.model_file.path.name}: HINTS names {path!r}, which is no module of the model")
        return names


@contextmanager
def size_errors(model_file: ModelFile, batch_size: int) -> Iterator[None]:
    """Say what to do when a minibatch does not fit, or is too small to normalise over."""
    try:
        yield
    except PdtoolError:
        raise
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "allocate memory" in str(error):
            raise ModelError(
                f"{model_file.path.name}: a minibatch of {batch_size} does not fit in memory ({error})",
                "choose a smaller --batch-size",
            ) from error
        raise ModelError(f"{model_file.path.name}: {type(error).__name__}: {error}") from error
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise ModelError(
            f"{model_file.path.name}: a minibatch of {batch_size} is too small for batch normalisation ({error})",
            "choose a larger --batch-size",
        ) from error
