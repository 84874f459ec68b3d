"""Everything a worker needs before its first minibatch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from pdtool.errors import UsageError
from pdtool.frontend.modelfile import ModelFile
from pdtool.run import checkpoint
from pdtool.run.border import Border
from pdtool.run.data import Loader, Split
from pdtool.run.groups import Groups, make_groups, ranks_of
from pdtool.run.meter import Meter
from pdtool.run.optimize import Updater
from pdtool.run.peers import tell
from pdtool.run.replicas import Replicas
from pdtool.run.spec import Place, RunSpec, places
from pdtool.run.stage import Stage, load_module
from pdtool.run.status import Status
from pdtool.run.tied import Tied
from pdtool.run.transport import Lane, Route
from pdtool.run.wiring import Wire, describe_targets, wires
from pdtool.schedule import Shape, lag_of

SPLITS = ("train", "valid")


@dataclass(kw_only=True)
class Setup:
    """The parts of one worker.

    Attributes:
        shape: what the schedule is built for; stages that share a parameter update together.
        names: parameters and persistent buffers of the stage that a checkpoint holds.
        canonical: parameter name -> its first name in the whole model, under which its optimizer state is kept.
        idle: what else of the model's state a checkpoint holds: second names of this stage's own parameters and, at
            the first stage, what no operator uses.
        loaders: at the first stage, by split.
    """

    spec: RunSpec
    place: Place
    device: torch.device
    shape: Shape
    file: ModelFile
    status: Status
    meter: Meter
    stage: Stage
    groups: Groups
    replicas: Replicas
    border: Border
    updater: Updater
    tied: list[Tied]
    names: list[str]
    canonical: dict[str, str]
    idle: dict[str, Tensor]
    splits: dict[str, Split]
    loaders: dict[str, Loader] = field(default_factory=dict)

    @property
    def leads(self) -> bool:
        """Whether this worker speaks for its stage: it is replica 0."""
        return self.place.replica == 0

    def state(self) -> dict[str, Tensor]:
        """This worker's part of a checkpoint: a stage's replica 0 writes it, the first holder of a tied parameter
        its optimizer state."""
        if not self.leads:
            return {}
        own = self.stage.module.state_dict()
        state = {f"model.{name}": own[name] for name in self.names}
        state |= {f"model.{name}": value for name, value in self.idle.items()}
        owned = [tied.updater for tied in self.tied if tied.first]
        for updater in (self.updater, *owned):
            state |= {f"optimizer.{self.canonical[name]}.{key}": value for name, key, value in updater.state()}
        return state

    def load(self, folder: Path) -> None:
        """Take over parameters, buffers and optimizer state from a checkpoint of any plan of the same model.

        Raises:
            UsageError: the checkpoint is of another model.
        """
        updaters = [self.updater, *(tied.updater for tied in self.tied)]
        keys = {self.canonical[name]: name for updater in updaters for name in updater.parameters}
        own = {f"model.{name}" for name in self.names}
        state = checkpoint.load(folder, lambda key: key in own or _parameter(key) in keys)
        current = self.stage.module.state_dict()
        with torch.no_grad():
            for name in self.names:
                saved = state.get(f"model.{name}")
                if saved is None or saved.shape != current[name].shape:
                    found = "none" if saved is None else f"one of shape {list(saved.shape)}"
                    raise UsageError(
                        f"the model has {name} of shape {list(current[name].shape)}, the checkpoint {folder} {found}",
                        "resume from a run of the same model",
                    )
                current[name].copy_(saved)
        by_name: dict[str, dict[str, Tensor]] = {}
        for key, value in state.items():
            if key not in own:
                by_name.setdefault(keys[_parameter(key)], {})[key.rpartition(".")[2]] = value
        for updater in updaters:
            updater.load(by_name)


def set_up(spec: RunSpec, rank: int, device: torch.device, local_workers: int) -> Setup:
    """Make every part; all workers call it together, after torch.distributed is up.

    Args:
        rank: in torch.distributed; `places` says which stage and replica that is.
        device: where this worker computes.
        local_workers: workers on this machine.
    """
    everyone = places(spec.plan)
    place = everyone[rank]
    status, meter = Status(spec.out, place), Meter(device)
    file = ModelFile.load(spec.model, trusted=spec.trusted, digests=dict(spec.bundle.digests))
    s, last = place.stage, len(spec.plan.stages) - 1
    shape = spec.plan.shape(tuple(tied.stages for tied in spec.bundle.tied))
    stage, names, canonical, idle = _load_stage(spec, file, s, device, is_last=s == last)
    splits, loaders = _describe_data(spec, file, s, leader=ranks_of(everyone, 0)[0])
    described = describe_targets(splits["train"].leaves)
    all_wires = wires(spec.bundle, described)
    groups = make_groups(spec.plan, spec.bundle, everyone, all_wires, device, spec.timeout_s, local_workers)
    members = ranks_of(everyone, s)
    tied = _tied(spec, file, place, shape, stage, groups, meter)
    shared = {id(t.parameter) for t in tied}
    own = {name: p for name, p in stage.weights.parameters.items() if id(p) not in shared}
    replicas = Replicas(
        groups.replicas[s], len(members), own.values(), f"stage {s} (ranks {members})",
        device if groups.nccl else torch.device("cpu"), meter.waiting, meter.sent,
    )  # fmt: skip
    border = _border(spec, everyone, place, all_wires, groups, shape, device, meter)
    return Setup(
        spec=spec, place=place, device=device, shape=shape, file=file, status=status, meter=meter, stage=stage,
        groups=groups, replicas=replicas, border=border,
        updater=Updater(file, own), tied=tied, names=names, canonical=canonical, idle=idle, splits=splits,
        loaders=loaders,
    )  # fmt: skip


def _load_stage(
    spec: RunSpec, file: ModelFile, s: int, device: torch.device, *, is_last: bool
) -> tuple[Stage, list[str], dict[str, str], dict[str, Tensor]]:
    """The stage, the names of its state that a checkpoint holds, every parameter's first name, and Setup.idle."""
    model = file.build(spec.seed)
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    kept = model.state_dict(keep_vars=True)
    module = load_module(spec.bundle, spec.bundle_dir, s, model).to(device)
    names = [name for name in module.state_dict() if name in kept]
    used = {name for described in spec.bundle.stages for name in (*described.parameters, *described.buffers)}
    home = {canonical.get(name, name): name for name in names}
    elsewhere = {canonical.get(name, name) for name in used}
    recompute = spec.plan.stages[s].recompute
    stage = Stage(module, file.loss if is_last else None, recompute=recompute)
    idle: dict[str, Tensor] = {}
    for name in kept.keys() - used:
        first_name = canonical.get(name, name)
        if first_name in home:
            idle[name] = stage.weights.by_name[home[first_name]]
        elif s == 0 and first_name not in elsewhere:
            idle[name] = kept[name].detach()
    return stage, names, canonical, idle


def _describe_data(
    spec: RunSpec, file: ModelFile, s: int, *, leader: int
) -> tuple[dict[str, Split], dict[str, Loader]]:
    """The first stage's workers open the data; one of them tells the others what they must know of it."""
    by_name = spec.bundle.by_name
    inputs = [by_name[name] for name in spec.bundle.inputs]
    loaders = {split: Loader(file, split, inputs) for split in SPLITS} if s == 0 else {}
    described = {split: loader.describe() for split, loader in loaders.items()}
    return tell(described, leader, "the description of the data"), loaders


def _tied(
    spec: RunSpec, file: ModelFile, place: Place, shape: Shape, stage: Stage, groups: Groups, meter: Meter
) -> list[Tied]:
    """The tied parameters this stage holds, each with an updater of its own under the first holder's name."""
    out = []
    for described, group in zip(spec.bundle.tied, groups.tied, strict=True):
        own = dict(zip(described.stages, described.names, strict=True))
        if place.stage in own:
            parameter = stage.weights.by_name[own[place.stage]]
            first = min(own)
            updater = Updater(file, {own[first]: parameter})
            lag = lag_of(shape, described.stages, place.stage) if spec.plan.schedule == "1f1b" else 0
            out.append(Tied(parameter, updater, group, len(own), lag, own[first], meter.waiting, meter.sent,
                            first=first == place.stage))  # fmt: skip
    return out


def _border(
    spec: RunSpec, everyone: Sequence[Place], place: Place, all_wires: Sequence[Wire], groups: Groups, shape: Shape,
    device: torch.device, meter: Meter,
) -> Border:  # fmt: skip
    """The two lanes: activations and data forward, gradients backward."""
    s = place.stage
    members = [ranks_of(everyone, stage) for stage in range(len(spec.plan.stages))]
    # when a minibatch is this many older than the one computed now, its messages were received: the first stage
    # computes no forward before the backward of the one r[0] w[0] earlier
    keep = 1 + math.ceil(max(r * w for r, w in zip(shape.replicas, shape.in_flight, strict=True)) / len(members[s]))

    def lane(name: str, into: list[tuple[Wire, int]], out: list[tuple[Wire, int]]) -> Lane:
        route = Route(
            rank=lambda stage, i: members[stage][i % len(members[stage])],
            group=lambda sender, receiver: groups.lane(name, sender, receiver),
        )
        return Lane(name, place.rank, route, into, out, ahead=shape.in_flight[s] + 1, keep=keep, device=device,
                    staged=device.type == "cuda" and not groups.nccl,
                    waiting=meter.waiting, sent=meter.sent)  # fmt: skip

    into = [(wire, wire.source) for wire in all_wires if wire.destination == s]
    out = [(wire, wire.destination) for wire in all_wires if wire.source == s]
    back_into, back_out = ([end for end in ends if end[0].tensor.gradient] for ends in (out, into))
    return Border(spec.bundle, s, all_wires, lane("forward", into, out), lane("backward", back_into, back_out), device)


def _parameter(key: str) -> str:
    """`optimizer.features.0.weight.exp_avg` -> `features.0.weight`; "" for other keys."""
    kind, _, rest = key.partition(".")
    return rest.rpartition(".")[0] if kind == "optimizer" else ""
