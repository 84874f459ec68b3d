"""Everything a worker needs before its first minibatch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from pdtool.errors import UsageError
from pdtool.frontend.graph_check import check_bundle
from pdtool.frontend.modelfile import ModelFile
from pdtool.run import checkpoint
from pdtool.run.border import Border
from pdtool.run.channels import Channels, Opening
from pdtool.run.data import Loader, Split
from pdtool.run.groups import Groups, make_groups, ranks_of
from pdtool.run.meter import Meter
from pdtool.run.optimize import Updater
from pdtool.run.part import Part
from pdtool.run.peers import tell
from pdtool.run.replicas import Replicas
from pdtool.run.spec import Place, RunSpec, places
from pdtool.run.stage import Precision, Stage, load_module
from pdtool.run.status import Status
from pdtool.run.tied import Tied
from pdtool.run.transport import Lane
from pdtool.run.watch import watched
from pdtool.run.wiring import Hop, Wire, describe_targets, dtype_of, hops, wires
from pdtool.schedule import PipelineShape, gradient_delays, is_asynchronous, tied_update_lag, total_in_flight

SPLITS = ("train", "valid")
WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(kw_only=True)
class Setup:
    """The parts of one worker.

    Attributes:
        shape: what the schedule is built for; stages that share a parameter update together.
        parts: the stages on this worker, by their number.
        canonical: parameter name -> its first name in the whole model, under which its optimizer state is kept.
        loaders: at the first stage, by split.
    """

    spec: RunSpec
    place: Place
    device: torch.device
    shape: PipelineShape
    file: ModelFile
    status: Status
    meter: Meter
    groups: Groups
    parts: dict[int, Part]
    canonical: dict[str, str]
    splits: dict[str, Split]
    loaders: dict[str, Loader] = field(default_factory=dict)

    @property
    def leads(self) -> bool:
        """Whether this worker speaks for its stages: it is their replica 0."""
        return self.place.replica == 0

    @property
    def last(self) -> Part | None:
        """The last stage of all, if it is on this worker."""
        return self.parts.get(len(self.shape.replicas) - 1)

    def state(self) -> dict[str, Tensor]:
        """This worker's share of a checkpoint: a stage's replica 0 writes it."""
        parts = self.parts.values() if self.leads else ()
        return {key: value for part in parts for key, value in part.state(self.canonical).items()}

    def load(self, folder: Path) -> None:
        """Take over parameters, buffers and optimizer state from a checkpoint of any plan of the same model.

        Raises:
            UsageError: the checkpoint is of another model.
        """
        for part in self.parts.values():
            self._load(part, folder)

    def _load(self, part: Part, folder: Path) -> None:
        keys = {self.canonical[name]: name for updater in part.updaters for name in updater.parameters}
        own = {f"model.{name}" for name in part.names}
        state = checkpoint.load(folder, lambda key: key in own or _parameter(key) in keys)
        part.stage.weights.use()
        current = part.stage.module.state_dict()
        with torch.no_grad():
            for name in part.names:
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
        for updater in part.updaters:
            updater.load(by_name)
        part.look_ahead()


def set_up(spec: RunSpec, rank: int, device: torch.device, local_workers: int) -> Setup:
    """Make every part; all workers call it together, after torch.distributed is up.

    Args:
        rank: in torch.distributed; `places` says which stages and replica that is.
        device: where this worker computes.
        local_workers: workers on this machine.
    """
    everyone = places(spec.plan)
    place = everyone[rank]
    status, meter = Status(spec.out, place), Meter(device)
    file = ModelFile.load(spec.model, trusted=spec.trusted, digests=spec.bundle.digests)
    shape = spec.plan.shape(tuple(tied.stages for tied in spec.bundle.tied))
    model = file.build(spec.seed)
    if rank % local_workers == 0:  # one worker of each machine: its workers read the same files
        check_bundle(file, model, spec.bundle)
    first: dict[int, str] = {}
    canonical = {name: first.setdefault(id(p), name) for name, p in model.named_parameters(remove_duplicate=False)}
    loaded = {
        s: _load_stage(spec, file, model, canonical, s, device) for s in shape.stages_on_same_workers(place.stage)
    }
    splits, loaders = _describe_data(spec, file, place.stage, leader=ranks_of(everyone, 0)[0])
    all_wires = wires(spec.bundle, describe_targets(splits["train"].leaves), WIRE_DTYPES.get(spec.wire_dtype))
    all_hops = hops(all_wires, [ranks_of(everyone, s % shape.pipeline_depth) for s in range(len(spec.plan.stages))])
    groups = make_groups(spec.plan, spec.bundle, everyone, device, spec.timeout_s, local_workers)
    channels = Opening(
        groups=groups,
        rank=rank,
        transport=spec.transport,
        batch_size=spec.plan.batch_size,
        in_flight=total_in_flight(shape.replicas[: shape.pipeline_depth], shape.in_flight),
        device=device,
        timeout_s=spec.timeout_s,
        waiting=meter.waiting,
    ).channels(all_hops)
    channels = watched(channels, all_hops, meter)
    delays = gradient_delays(spec.plan.schedule, shape)
    parts = {}
    for s, (stage, names, idle) in loaded.items():
        tied = _tied(spec, file, s, shape, stage, groups, meter, delays)
        shared = {id(t.parameter) for t in tied}
        own = {name: p for name, p in stage.weights.parameters.items() if id(p) not in shared}
        members = ranks_of(everyone, s % shape.pipeline_depth)
        replicas = Replicas(
            groups.replicas[s],
            len(members),
            own.values(),
            f"stage {s} (ranks {members})",
            device if groups.nccl else torch.device("cpu"),
            meter.averaging,
            meter.sent,
            meter.message,
        )
        parts[s] = Part(
            number=s,
            replica=place.replica,
            stage=stage,
            replicas=replicas,
            tied=tied,
            updater=Updater(file, own, spec.correction, delays[s]),
            border=_border(spec, s, all_wires, all_hops, channels, shape, device, meter),
            names=names,
            idle=idle,
        )
    return Setup(
        spec=spec,
        place=place,
        device=device,
        shape=shape,
        file=file,
        status=status,
        meter=meter,
        groups=groups,
        parts=parts,
        canonical=canonical,
        splits=splits,
        loaders=loaders,
    )


def _load_stage(
    spec: RunSpec, file: ModelFile, model: nn.Module, canonical: Mapping[str, str], s: int, device: torch.device
) -> tuple[Stage, list[str], dict[str, Tensor]]:
    """The stage, the names of its state that a checkpoint holds, and Part.idle."""
    kept = model.state_dict(keep_vars=True)
    module = load_module(spec.bundle, spec.bundle_dir, s, model).to(device)
    names = [name for name in module.state_dict() if name in kept]
    used = {name for described in spec.bundle.stages for name in (*described.parameters, *described.buffers)}
    home = {canonical.get(name, name): name for name in names}
    elsewhere = {canonical.get(name, name) for name in used}
    loss = file.loss if s == len(spec.plan.stages) - 1 else None
    outputs = [dtype_of(spec.bundle.by_name[name]) for name in spec.bundle.stages[s].outputs]
    stage = Stage(
        module,
        loss,
        recompute=spec.plan.stages[s].recompute,
        stashing=spec.plan.weights != "none",
        ahead=spec.correction is not None and spec.correction.ahead,
        precision=Precision(device, outputs) if spec.precision == "bf16" else None,
        compiled=spec.compiled,
    )
    idle: dict[str, Tensor] = {}
    for name in kept.keys() - used:
        first_name = canonical.get(name, name)
        if first_name in home:
            idle[name] = stage.weights.by_name[home[first_name]]
        elif s == 0 and first_name not in elsewhere:
            idle[name] = kept[name].detach()
    return stage, names, idle


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
    spec: RunSpec,
    file: ModelFile,
    s: int,
    shape: PipelineShape,
    stage: Stage,
    groups: Groups,
    meter: Meter,
    delays: Sequence[int],
) -> list[Tied]:
    """The tied parameters this stage holds, each with an updater of its own under the first holder's name."""
    out = []
    for described, group in zip(spec.bundle.tied, groups.tied, strict=True):
        own = dict(zip(described.stages, described.names, strict=True))
        if s in own:
            parameter = stage.weights.by_name[own[s]]
            first = min(own)
            updater = Updater(file, {own[first]: parameter}, spec.correction, delays[first])
            lag = tied_update_lag(shape, described.stages, s) if is_asynchronous(spec.plan.schedule) else 0
            out.append(
                Tied(
                    parameter,
                    updater,
                    group,
                    len(own),
                    lag,
                    own[first],
                    meter.averaging,
                    meter.sent,
                    meter.message,
                    first=first == s,
                )
            )
    return out


def _border(
    spec: RunSpec,
    s: int,
    all_wires: Sequence[Wire],
    all_hops: Sequence[Hop],
    channels: Channels,
    shape: PipelineShape,
    device: torch.device,
    meter: Meter,
) -> Border:
    """The two lanes of stage s: activations and data forward, gradients backward."""

    def lane(name: str) -> Lane:
        senders, receivers = channels.senders, channels.receivers
        here = [hop for hop in all_hops if hop.lane == name]
        return Lane(
            [(hop, receivers[hop.number]) for hop in here if hop.target == s and hop.number in receivers],
            [(hop, senders[hop.number]) for hop in here if hop.source == s and hop.number in senders],
            ahead=shape.in_flight[s % shape.pipeline_depth] + 1,
            waiting=meter.waiting,
            sent=meter.sent,
        )

    return Border(spec.bundle, s, all_wires, lane("forward"), lane("backward"), device)


def _parameter(key: str) -> str:
    """`optimizer.features.0.weight.exp_avg` -> `features.0.weight`; "" for other keys."""
    kind, _, rest = key.partition(".")
    return rest.rpartition(".")[0] if kind == "optimizer" else ""
