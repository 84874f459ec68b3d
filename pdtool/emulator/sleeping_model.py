"""A model for emulation that sleeps as long as the operators of a profile compute, and sends as many bytes.

`write_sleeping_model` writes its model.py and stage files. They import `SleepingModel` and the other modules from here.
A minibatch is one sample of bytes that nobody reads. Their number already follows the plan's wire format, and they are
sent unchanged.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from string import Template
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from pdtool.artifacts.bundle import Bundle, StageModule, TensorSpec, TiedParameter
from pdtool.artifacts.plan import Plan, Predicted
from pdtool.artifacts.profile import Node, Profile
from pdtool.files import file_sha256, write_atomically

_HOST_AHEAD_S = 5e-4  # this far ahead of its device, a host's work between two operators costs no time
_SEGMENTS = 16  # segments of a stage: how finely gradients become ready during its backward
_FLOAT_BYTES = 4
MODEL_FILE = "model.py"  # in the folder that is written


class Segment(NamedTuple):
    """Consecutive operators of one stage.

    Attributes:
        forward_s, backward_s, update_s: their seconds.
        floats: size of their parameters that no other stage holds, in numbers of 4 bytes.
        shared: name -> size of each parameter that other stages also hold.
    """

    forward_s: float
    backward_s: float
    update_s: float
    floats: int
    shared: Mapping[str, int] = {}


class SleepingDevice:
    """A device on which one thing is computed after the other, each for a given time."""

    def __init__(self) -> None:
        self._free_s = 0.0

    def compute(self, seconds: float) -> None:
        """Return when the device has computed for `seconds`, starting now or when it becomes free."""
        now_s = time.perf_counter()
        begin_s = self._free_s if now_s - self._free_s < _HOST_AHEAD_S else now_s
        self._free_s = begin_s + seconds
        time.sleep(max(0.0, self._free_s - now_s))


_DEVICE = SleepingDevice()  # of this process


class _Compute(torch.autograd.Function):
    """Takes the time of a segment; its result stands for the output and is never read."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, segment: Segment, *parameters: Tensor) -> Tensor:
        ctx.segment, ctx.parameters = segment, parameters
        _DEVICE.compute(segment.forward_s)
        return torch.zeros_like(token)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        made = [torch.zeros_like(parameter) for parameter in ctx.parameters]
        _DEVICE.compute(ctx.segment.backward_s)
        return torch.zeros_like(gradients[0]), None, *made


class _Receive(torch.autograd.Function):
    """Takes the tensors that a stage receives; their gradients have the same sizes."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        ctx.inputs = inputs
        return torch.zeros(1, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return tuple(
            torch.zeros_like(x) if needed else None for x, needed in zip(ctx.inputs, ctx.needs_input_grad, strict=True)
        )


class _Send(torch.autograd.Function):
    """Makes a tensor that a stage sends, of [1, floats]."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, floats: int) -> Tensor:
        return torch.zeros(1, floats)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return torch.zeros(1, 1), None


class SleepingSegment(nn.Module):
    """Takes the time of a segment while it trains, and none in a validation."""

    def __init__(self, segment: Segment) -> None:
        super().__init__()
        self.segment = segment
        self.weight = nn.Parameter(torch.zeros(max(1, segment.floats)))  # so that it has a backward
        for name, floats in segment.shared.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(floats)))

    def forward(self, token: Tensor) -> Tensor:
        """Return a token for the next segment, [1, 1]."""
        if not self.training:
            return token
        computed: Tensor = _Compute.apply(token, self.segment, *self.parameters())  # type: ignore[no-untyped-call]
        return computed


class SleepingModel(nn.Sequential):
    """All segments of a model; a shared parameter is the same tensor in each segment that has it.

    Args:
        segments: name -> segment, of all stages.
    """

    def __init__(self, segments: Mapping[str, Segment]) -> None:
        super().__init__()
        first: dict[str, nn.Parameter] = {}
        for name, segment in segments.items():
            module = SleepingSegment(segment)
            for shared in segment.shared:
                module.register_parameter(shared, first.setdefault(shared, module.get_parameter(shared)))
            self.add_module(name, module)


class SleepingStage(SleepingModel):
    """A stage of segments, which a generated file defines.

    Attributes:
        SEGMENTS: name -> segment, in order.
        SENDS: floats of each tensor that it sends, and whether a gradient comes back; empty for the last stage.
    """

    SEGMENTS: ClassVar[Mapping[str, Segment]] = {}
    SENDS: ClassVar[Sequence[tuple[int, bool]]] = ()

    def __init__(self) -> None:
        super().__init__(self.SEGMENTS)

    def forward(self, *inputs: Tensor) -> Tensor | tuple[Tensor, ...]:
        """Take tensors from other stages; return the tensors for other stages, or the model's output, [1, 1]."""
        token: Tensor = super().forward(_Receive.apply(*inputs))  # type: ignore[no-untyped-call]
        if not self.SENDS:
            return token
        sent: tuple[Tensor, ...] = tuple(
            _Send.apply(token if gradient else token.detach(), floats)  # type: ignore[no-untyped-call]
            for floats, gradient in self.SENDS
        )
        return sent[0] if len(sent) == 1 else sent


class SleepingSGD(torch.optim.Optimizer):
    """An optimizer whose step takes the time of its segments' updates, and changes nothing."""

    def __init__(self, named_parameters: Iterable[tuple[str, nn.Parameter]], segments: Mapping[str, Segment]) -> None:
        groups = []
        for name, parameter in named_parameters:
            segment, _, kind = name.rpartition(".")
            groups.append({"params": [parameter], "update_s": segments[segment].update_s if kind == "weight" else 0.0})
        super().__init__(groups, {"update_s": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no optimizer here takes a closure
        """Sleep."""
        _DEVICE.compute(sum(group["update_s"] for group in self.param_groups if group["params"]))
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=0.0)


def empty_samples(count: int) -> Dataset[Any]:
    """Return a dataset of `count` pairs of a number and a target."""
    return TensorDataset(torch.zeros(count, 1), torch.zeros(count, dtype=torch.long))


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """How an emulation scales the cluster that it emulates.

    Attributes:
        scale: bytes and bandwidths are divided by it; times stay the same.
        slowdown: times are multiplied by it, and bandwidths divided once more.
    """

    scale: float = 1.0
    slowdown: float = 1.0

    def floats(self, size_bytes: int) -> int:
        """Number of floats that stand for so many bytes; at least one."""
        return max(1, round(size_bytes / self.scale / _FLOAT_BYTES))


def write_sleeping_model(
    folder: Path, plan: Plan, profile: Profile, scaling: Scaling, minibatches: int
) -> tuple[Plan, Bundle]:
    """Write model.py and the bundle of a plan into `folder`.

    Args:
        minibatches: in an epoch.

    Returns:
        The same plan, with a minibatch of one sample, and the bundle.
    """
    segments = _segments(profile, plan.stage_nodes(profile), scaling)
    title = f"Sleeps in place of {plan.name} ({plan.config}): bytes / {scaling.scale:g}, times x {scaling.slowdown:g}"
    every = {name: segment for stage in segments for name, segment in stage.items()}
    valid = max(stage.replicas for stage in plan.stages)
    _write(
        folder / MODEL_FILE, "sleeping_model.py.in", every, " " * 4, title=title, minibatches=minibatches, valid=valid
    )
    tensors = list(sleeping_tensors(plan, profile, scaling))
    modules = [_write_stage(folder, title, s, stage, tensors) for s, stage in enumerate(segments)]
    bundle = Bundle(
        name=plan.name,
        batch_size=1,
        proof="shapes",
        inputs=("x",),
        stages=tuple(modules),
        tensors=tuple(tensors),
        tied=tuple(_tied(segments)),
    )
    bundle.check()
    bundle.save(folder / Bundle.FILE)
    predicted = plan.predicted and _scaled(plan.predicted, plan.batch_size, scaling)
    changes = {"batch_size": 1, "model": None, "predicted": predicted, "wire_dtype": "fp32"}
    return plan.model_copy(update=changes), bundle


def _scaled(predicted: Predicted, batch_size: int, scaling: Scaling) -> Predicted:
    """Return the emulation's predictions; its minibatches of `batch_size` samples are one sample each."""
    slowdown = scaling.slowdown
    whole = ("bottleneck_s", "simulated_s", "data_parallel_s", "one_worker_s")
    of_stages = ("compute_s", "allreduce_s", "transfer_s")
    return predicted.model_copy(
        update={
            **{name: time_s and slowdown * time_s for name in whole for time_s in [getattr(predicted, name)]},
            **{name: tuple(slowdown * time_s for time_s in getattr(predicted, name)) for name in of_stages},
            "throughput_samples_per_s": predicted.throughput_samples_per_s / batch_size / slowdown,
            "memory_bytes": tuple(round(size_bytes / scaling.scale) for size_bytes in predicted.memory_bytes),
            "traffic_bytes": round(predicted.traffic_bytes / scaling.scale),
        }
    )


def _segments(profile: Profile, stages: Sequence[Sequence[str]], scaling: Scaling) -> list[dict[str, Segment]]:
    """The segments of each stage, by names unique in the model."""
    stage_of = {name: s for s, nodes in enumerate(stages) for name in nodes}
    holders = [{stage_of[name] for name in shared.nodes} for shared in profile.shared]
    numbers = count()
    made = []
    for nodes in stages:
        segments: dict[str, Segment] = {}
        before: set[str] = set()
        for group in _groups([profile.by_name[name] for name in nodes]):
            upto = before | {node.name for node in group}
            tied = {
                f"shared_{i}": shared.bytes
                for i, shared in enumerate(profile.shared)
                if len(holders[i]) > 1 and before.isdisjoint(shared.nodes) and not upto.isdisjoint(shared.nodes)
            }
            new_bytes = profile.parameter_bytes(upto) - profile.parameter_bytes(before)
            segments[f"segment_{next(numbers)}"] = Segment(
                forward_s=sum(node.forward_s for node in group) * scaling.slowdown,
                backward_s=sum(node.backward_s for node in group) * scaling.slowdown,
                update_s=sum(node.update_s for node in group) * scaling.slowdown,
                floats=scaling.floats(new_bytes - sum(tied.values())),
                shared={name: scaling.floats(size_bytes) for name, size_bytes in tied.items()},
            )
            before = upto
        made.append(segments)
    return made


def _groups(nodes: Sequence[Node]) -> Iterator[list[Node]]:
    """Divide the operators of a stage into consecutive groups of about equally long backwards."""
    longest_s = sum(node.backward_s for node in nodes) / _SEGMENTS
    group: list[Node] = []
    for node in nodes:
        group.append(node)
        if sum(each.backward_s for each in group) > longest_s:
            yield group
            group = []
    if group:
        yield group


def sleeping_tensors(plan: Plan, profile: Profile, scaling: Scaling) -> Iterator[TensorSpec]:
    """Yield the model's input, and each stage's messages: every output once to each stage that takes it."""
    yield TensorSpec(name="x", producer=-1, consumers=(0,), shape=("batch", 1), dtype="float32", gradient=False)
    stage_of = {name: s for s, nodes in enumerate(plan.stage_nodes(profile)) for name in nodes}
    profile = profile.sent_as(plan.wire_dtype)
    for number, node in enumerate(profile.nodes):
        source = stage_of[node.name]
        takers = tuple(sorted({stage_of[taker] for taker in profile.graph.consumers[node.name]} - {source}))
        sent_bytes, returned_bytes = profile.sent_bytes(node.name)
        with_gradient = min(returned_bytes, sent_bytes)
        for name, size_bytes, gradient in (
            (f"t{number}", with_gradient, True),
            (f"n{number}", sent_bytes - with_gradient, False),
        ):
            if takers and size_bytes:
                yield TensorSpec(
                    name=name,
                    producer=source,
                    consumers=takers,
                    shape=("batch", scaling.floats(size_bytes)),
                    dtype="float32",
                    gradient=gradient,
                )


def _write_stage(
    folder: Path, title: str, s: int, segments: Mapping[str, Segment], tensors: Sequence[TensorSpec]
) -> StageModule:
    sent = [tensor for tensor in tensors if tensor.producer == s]
    sends = [(int(tensor.shape[1]), tensor.gradient) for tensor in sent]
    path = folder / f"stage_{s}.py"
    _write(path, "sleeping_stage.py.in", segments, " " * 8, title=title, stage=s, sends=sends)
    return StageModule(
        file=path.name,
        class_name=f"Stage{s}",
        sha256=file_sha256(path),
        inputs=tuple(tensor.name for tensor in tensors if s in tensor.consumers),
        outputs=tuple(tensor.name for tensor in sent),
        parameters=tuple(f"{name}.{kind}" for name, each in segments.items() for kind in ("weight", *each.shared)),
    )


def _write(path: Path, template: str, segments: Mapping[str, Segment], indent: str, **values: Any) -> None:
    """Write a file from a template that lies beside this file."""
    text = Path(__file__).with_name(template).read_text(encoding="utf-8")
    listed = "\n".join(f"{indent}{name!r}: {segment!r}," for name, segment in segments.items())
    write_atomically(path, Template(text).substitute(values, segments=listed))


def _tied(segments: Sequence[Mapping[str, Segment]]) -> Iterator[TiedParameter]:
    """The parameters that several stages hold."""
    names: dict[str, dict[int, str]] = {}
    for s, stage in enumerate(segments):
        for name, segment in stage.items():
            for shared in segment.shared:
                names.setdefault(shared, {})[s] = f"{name}.{shared}"
    for held in names.values():
        yield TiedParameter(stages=tuple(held), names=tuple(held.values()))
