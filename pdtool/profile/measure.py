"""Measure each operator: replay the graph node by node, forward timed, backward by autograd.grad on that node alone."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.flop_counter import FlopCounterMode

from pdtool.artifacts.profile import Device, Node, Profile, SharedParameter
from pdtool.errors import ModelError, PdtoolError
from pdtool.frontend.modelfile import ModelFile
from pdtool.frontend.operators import Operator, Traced, Value
from pdtool.frontend.trace import trace
from pdtool.profile.execute import Environment, Executor, differentiable, filled, inplace_modules_off, tensors

_FEWEST, _MOST = 3, 15  # timed rounds
_BUDGET_S = 6.0  # for all rounds, as far as _FEWEST allows
Progress = Callable[[int, int], None]
Times = dict[str, float]


@dataclass(frozen=True)
class Clock:
    """Seconds that work takes on a device: CUDA events there, the processor's clock here."""

    device: torch.device

    def time(self, work: Callable[[], Any]) -> tuple[Any, Callable[[], float]]:
        """Result of `work`, and a function for its seconds, to be called when the device has come to rest."""
        if self.device.type != "cuda":
            start = time.perf_counter()
            result = work()
            seconds = time.perf_counter() - start
            return result, lambda: seconds
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        result = work()
        end.record()
        return result, lambda: float(begin.elapsed_time(end)) / 1e3

    def rest(self) -> None:
        """Wait until the device has done all its work."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure(
    model_file: ModelFile,
    *,
    batch_size: int,
    device: str = "cpu",
    threads: int | None = None,
    progress: Progress = lambda done, total: None,
) -> Profile:
    """Profile the model at `batch_size` on `device` of this machine.

    The loss and the optimizer step are profiled with it: the loss as a node of its own, the step as each node's
    update_s, shared out by parameter bytes.

    Args:
        threads: CPU threads to compute with; None: PyTorch's default.
        progress: called with (rounds done, rounds in all).

    Raises:
        TraceError: the model cannot be traced.
        ModelError: a minibatch does not fit in memory, or the user's functions fail.
    """
    where = torch.device(device)
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        with _memory_errors(model_file, batch_size):
            traced = trace(model_file.build(), model_file.example_inputs, batch_size, model_file.path)
            inplace_modules_off(traced.model)
            return _Measurement(model_file, traced, batch_size, where, progress).profile()
    finally:
        torch.set_num_threads(before)


class _Measurement:
    """One profile in the making."""

    def __init__(
        self, model_file: ModelFile, traced: Traced, batch_size: int, device: torch.device, progress: Progress
    ) -> None:
        self.model_file = model_file
        self.traced = traced
        self.batch = batch_size
        self.device = device
        self.progress = progress
        self.clock = Clock(device)
        self.run = Executor.of(traced, batch_size, device)
        self.with_loss = model_file.has("loss") and model_file.has("dataset")
        self.inputs = [t.to(device) for t in model_file.example_inputs(batch_size)]
        self.target: Any = None
        if self.with_loss:
            data, target = model_file.example_batch(batch_size)
            self.inputs = [t.to(device) for t in model_file.as_inputs(data)]
            self.target = pytree.tree_map(lambda t: t.to(device) if isinstance(t, Tensor) else t, target)

    def profile(self) -> Profile:
        """All of it."""
        stash, flops = self._survey()
        steps, forwards, backwards = self._rounds()
        update_s, state_bytes = self._optimizer()
        nodes = self._nodes(stash, flops, forwards, backwards, update_s)
        spent = sum(n.forward_s + n.backward_s + n.update_s for n in nodes)
        profile = Profile(
            name=self.model_file.name,
            model=self.model_file.ref,
            digests={self.model_file.ref.source: self.model_file.sha256},
            batch_size=self.batch,
            device=Device(name=_device_name(self.device), kind="measured"),
            step_s=steps + update_s,
            coverage=spent / (steps + update_s),
            optimizer_state_bytes=state_bytes,
            nodes=tuple(nodes),
            shared=tuple(self._shared()),
        )
        return profile.model_copy(update=self._hints(profile))

    def _rounds(self) -> tuple[float, Times, Times]:
        """Medians of (whole step, forward of each node, backward of each node).

        Whole steps and passes through the nodes take turns, so that both meet the same machine. A pass runs every node
        once, in order, so that caches are as in training; the first round is for warming up.
        """
        start = time.perf_counter()
        self._pass(), self._whole_step()
        count = max(_FEWEST, min(_MOST, int(_BUDGET_S / (time.perf_counter() - start))))
        steps, passes = [], []
        for done in range(count):
            self.progress(done, count)
            steps.append(self._whole_step())
            passes.append(self._pass())
        self.progress(count, count)
        forwards, backwards = (
            {name: statistics.median(times[kind][name] for times in passes) for name in passes[0][kind]}
            for kind in (0, 1)
        )
        engine_s = self._engine_s()
        return statistics.median(steps), forwards, {name: max(0.0, s - engine_s) for name, s in backwards.items()}

    def _engine_s(self) -> float:
        """Seconds that a call of autograd.grad takes by itself: a whole step pays it once, a pass at every node."""
        if self.device.type == "cuda":
            return 0.0  # events time the device's work only
        x = torch.zeros(1, requires_grad=True)
        call = partial(torch.autograd.grad, x.view(1), x, torch.ones(1), retain_graph=True)
        return statistics.median(self._seconds(call) for _ in range(100))

    def _pass(self) -> tuple[Times, Times]:
        """Seconds of every node's forward, in order, and then of every node's backward, in reverse order."""
        environment = self._environment()
        replayed: list[tuple[str, list[Tensor], list[Tensor]]] = []
        forwards: dict[str, Callable[[], float]] = {}
        for op in self._computed():
            inputs = self.run.fresh(op, environment)
            result, forwards[op.name] = self.clock.time(self.run.prepared(op, inputs))
            outputs = tensors(result)
            environment.update(zip(op.outputs, (t.detach() for t in outputs), strict=True))
            replayed.append((op.name, outputs, self.run.sources(op, inputs)))
        if self.with_loss:
            leaves, output = self._loss_inputs(environment)
            loss, forwards["loss"] = self.clock.time(lambda: self.model_file.loss(output, self.target))
            replayed.append(("loss", [loss], leaves))
        backwards: dict[str, Callable[[], float]] = {}
        while replayed:
            name, outputs, sources = replayed.pop()
            ends = differentiable(outputs)
            if ends and sources:
                gradients = [torch.ones_like(t) for t in ends]
                backward = partial(torch.autograd.grad, ends, sources, gradients, allow_unused=True)
                _, backwards[name] = self.clock.time(backward)
        self.clock.rest()
        return ({name: t() for name, t in forwards.items()}, {name: t() for name, t in backwards.items()})

    def _environment(self) -> Environment:
        """The model's inputs and the constants."""
        environment: Environment = {}
        inputs = iter(self.inputs)
        for op in self.traced.operators:
            if op.is_input:
                environment[op.outputs[0]] = next(inputs)
            elif op.constant:
                environment.update(zip(op.outputs, self.run(op, environment), strict=True))
        return environment

    def _computed(self) -> list[Operator]:
        return [op for op in self.traced.operators if not (op.is_input or op.constant)]

    def _whole_step(self) -> float:
        """Seconds of forward, loss and backward of the model itself."""
        parameters = [p for p in self.traced.model.parameters() if p.requires_grad]

        def step() -> None:
            output = self.traced.model(*self.inputs)
            if self.with_loss:
                scalars = [self.model_file.loss(output, self.target)]
            else:
                leaves = pytree.tree_leaves(dict(output) if isinstance(output, dict) else output)
                scalars = [t.sum() for t in leaves if isinstance(t, Tensor) and t.requires_grad]
            torch.autograd.grad(scalars, parameters, allow_unused=True)

        return self._seconds(step)

    def _seconds(self, work: Callable[[], Any]) -> float:
        _, seconds = self.clock.time(work)
        self.clock.rest()
        return seconds()

    def _optimizer(self) -> tuple[float, float]:
        """(seconds of one step over all parameters, bytes of state for each byte of parameters)."""
        if not self.model_file.has("optimizer"):
            return 0.0, 0.0
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
        seconds = statistics.median(self._seconds(optimizer.step) for _ in range(_FEWEST))
        state = sum(t.nbytes for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor) and t.dim())
        for _, parameter in named:
            parameter.grad = None
        return seconds, state / max(1, sum(p.nbytes for _, p in named))

    def _survey(self) -> tuple[dict[str, int], dict[str, int]]:
        """(stash bytes, flops) of each operator, from one forward of the whole graph with autograd.

        A storage that several operators save is counted once, at the first; parameters are not counted.
        """
        own = {p.untyped_storage().data_ptr() for p in self.run.state.values()}
        seen: set[int] = set()
        kept: list[Tensor] = []
        stash: dict[str, int] = {}
        flops: dict[str, int] = {}
        current = ""

        def note(tensor: Tensor) -> Tensor:
            pointer = tensor.untyped_storage().data_ptr()
            if pointer not in own and pointer not in seen:
                seen.add(pointer)
                kept.append(tensor)  # so that its address is not given to another
                stash[current] = stash.get(current, 0) + tensor.untyped_storage().nbytes()
            return tensor

        environment = self._environment()
        with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t), FlopCounterMode(display=False) as counter:
            for op in self._computed():
                current, before = op.name, counter.get_total_flops()
                environment.update(zip(op.outputs, self.run(op, environment), strict=True))
                flops[op.name] = counter.get_total_flops() - before
            if self.with_loss:
                current = "loss"
                self.model_file.loss(filled(self.traced.output, environment), self.target)
        return stash, flops

    def _nodes(
        self, stash: dict[str, int], flops: dict[str, int], forwards: Times, backwards: Times, update_s: float
    ) -> list[Node]:
        taken = {v for op in self.traced.operators for v in op.values} | set(self._outputs)
        all_bytes = max(1, sum(p.nbytes for p in self.traced.model.parameters()))
        charged: set[str] = set()
        nodes = []
        for op in self.traced.operators:
            if op.constant:
                continue
            names = {self.traced.tied[name] for name in op.parameters}
            share = sum(self.run.state[name].nbytes for name in names - charged) / all_bytes
            charged |= names
            outputs = [v for v in op.outputs if v in taken]
            nodes.append(Node(
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
                flops=flops.get(op.name, 0),
            ))  # fmt: skip
        if self.with_loss:
            targets = [t for t in pytree.tree_leaves(self.target) if isinstance(t, Tensor)]
            sources = (*dict.fromkeys(v.operator for v in self._outputs if not self._is_constant(v)), "target")
            nodes += [
                Node(name="target", op="input", module="", output_bytes=sum(t.nbytes for t in targets)),
                Node(name="loss", op="loss", module="", inputs=sources, forward_s=forwards["loss"],
                     backward_s=backwards.get("loss", 0.0), stash_bytes=stash.get("loss", 0)),
            ]  # fmt: skip
        return nodes

    @cached_property
    def _outputs(self) -> list[Value]:
        """The tensors that the model returns."""
        return [v for v in pytree.tree_leaves(self.traced.output) if isinstance(v, Value)]

    def _is_constant(self, value: Value) -> bool:
        return self.traced.by_name[value.operator].constant

    def _loss_inputs(self, environment: Environment) -> tuple[list[Tensor], Any]:
        """(leaves that a gradient comes back for, the model's output made of them)."""
        leaves = {v: environment[v].detach().requires_grad_(v.differentiable) for v in self._outputs}
        return [t for t in leaves.values() if t.requires_grad], filled(self.traced.output, leaves)

    def _shared(self) -> Iterator[SharedParameter]:
        for first in dict.fromkeys(self.traced.tied.values()):
            users = [op.name for op in self._computed() if any(self.traced.tied[n] == first for n in op.parameters)]
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
def _memory_errors(model_file: ModelFile, batch_size: int) -> Iterator[None]:
    """Say what to do when a minibatch does not fit."""
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


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    threads = torch.get_num_threads()
    return f"{names[0] if names else platform.machine()}, {threads} thread{'s' if threads > 1 else ''}"
