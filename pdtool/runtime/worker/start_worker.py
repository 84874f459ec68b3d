"""Start of a worker, in phases that each return what the next ones need: place, model, data, stage modules, stages.

All workers start together, after torch.distributed is initialized, and wait for each other in each phase.
`StageBuilder` builds the worker's stage replicas.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product

import torch
from torch import nn

from pdtool.artifacts.plan import ASKED_AHEAD
from pdtool.artifacts.run_dir import Checkpoint, CheckpointManifest, RunDir
from pdtool.errors import printable
from pdtool.frontend.graph_digest import check_bundle
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import dtype_of
from pdtool.frontend.random_numbers import OperatorSeeds
from pdtool.frontend.variable_uses import collected
from pdtool.runtime.config import RunConfig
from pdtool.runtime.groups import all_gather, broadcast, check_agreement, make_process_groups, user_code_settings
from pdtool.runtime.loading.minibatch_loader import MinibatchLoader
from pdtool.runtime.loading.minibatch_source import MinibatchSource, usable_workers
from pdtool.runtime.loading.minibatches import DatasetSplit, TrainingData
from pdtool.runtime.memory import expand_segments
from pdtool.runtime.messages.open_channels import Channels, open_channels
from pdtool.runtime.messages.routes import describe_targets, list_edges, list_routes
from pdtool.runtime.messages.stage_io import StageIO
from pdtool.runtime.meter import WorkerMeter
from pdtool.runtime.ranks import assign_ranks
from pdtool.runtime.stage.averaging import ReplicaAverager
from pdtool.runtime.stage.component import ModuleState
from pdtool.runtime.stage.kept_values import KeptValues
from pdtool.runtime.stage.losses import LossReader
from pdtool.runtime.stage.optimizer import NamedOptimizer, RunLength, without_changes
from pdtool.runtime.stage.pipeline_stage import Autocast, PipelineStage
from pdtool.runtime.stage.stage_replica import ClippedUpdates, StageReplica
from pdtool.runtime.stage.tied_parameters import TiedParameterSync
from pdtool.runtime.status import Status
from pdtool.runtime.worker import checkpoint
from pdtool.runtime.worker.last_minibatch import check_last_minibatch, check_single_samples
from pdtool.runtime.worker.run_report import Progress
from pdtool.runtime.worker.worker import Place, Worker
from pdtool.runtime.worker.worker_model import ModelTensors, WorkerModel, equalize_weights, is_small, load_stage_module
from pdtool.schedule import gradient_delays, tied_update_lag
from pdtool.units import counted

_SPLITS = ("train", "valid")
_COUNTING = 0.5  # the part of --timeout in which a validation set without a length is counted


def start_worker(config: RunConfig, rank: int, device: torch.device, local_workers: int) -> Worker:
    """Build everything that a worker trains with.

    Args:
        rank: in torch.distributed; `assign_ranks` says which stages and replica that is.
        device: where this worker computes.
        local_workers: number of workers on this machine.

    Raises:
        PeerError: a worker does not come.
        StaleError: the model's operators have changed since the stage files were made.
        PdtoolError: the model, its dataset, a stage file or the checkpoint to resume from is faulty.
    """
    place = Place(
        assignment=assign_ranks(config.plan)[rank],
        device=device,
        local_workers=local_workers,
        meter=WorkerMeter(device),
        groups=make_process_groups(config, device),
    )
    model, different = build_model(config, place)
    data, source = open_data(config, place, model.file)
    modules, tensors = load_modules(config, place, model, different)
    check_last_minibatch(modules, config.bundle, data.epoch_samples, device)
    check_single_samples(config.bundle, data.epoch_samples, data.splits["valid"].samples or 0)
    resumed = RunDir(config.resume).latest_checkpoint() if config.resume else None
    progress = read_progress(resumed.manifest(), data) if resumed else Progress()
    stages = StageBuilder(config, place, model, modules, tensors, data, source, progress).build()
    if resumed:
        resume(config, place, data, stages, resumed)
    tied = {name: first for name, first in model.first_names.items() if name != first}
    return Worker(config, place, data, stages, progress, tied)


def build_model(config: RunConfig, place: Place) -> tuple[WorkerModel, list[str]]:
    """Build the model, and check that the stage files were made for it.

    Returns:
        The model, and the names of parameters and buffers whose initial values differed between workers.
    """
    bundle, groups = config.bundle, place.groups
    Status.of_this_process.set("the loading of the model")
    file = ModelFile.load(config.model, trusted=config.trusted, digests=bundle.digests)
    stages = config.shape.stages_on_same_workers(place.assignment.stage)
    built = WorkerModel.build(file, config.seed, bundle, stages, as_a_whole=is_small(config.plan))
    different = equalize_weights(built, bundle, stages, groups) if config.resume is None else []
    # One worker per machine checks the files, which all of its workers read: the last one, as the first opens the data.
    if place.assignment.rank % place.local_workers == place.local_workers - 1:
        built.check(lambda model: check_bundle(file, model, bundle, config.check_stage_files))
    return built, different


def load_modules(
    config: RunConfig, place: Place, built: WorkerModel, different: Sequence[str]
) -> tuple[dict[int, nn.Module], ModelTensors]:
    """Wait until the stage files are checked, and load those of this worker's stages.

    Returns:
        The modules of the stages by number, on the worker's device; and the model's tensors, which they share.
    """
    Status.of_this_process.set("the loading of the stages")
    reasons = all_gather(printable(built.why_whole), str, place.groups.world, "the check of the stage files")
    folder, named = config.stage_files or config.bundle_dir, config.bundle_dir
    stages = config.shape.stages_on_same_workers(place.assignment.stage)
    modules = {s: load_stage_module(config.bundle, folder, s, built.model, named) for s in stages}
    tensors = ModelTensors(built, config.bundle, modules, place.device)
    if place.assignment.rank == 0:
        _warn_of_model(built, config, reasons, different)
    return modules, tensors


def _warn_of_model(built: WorkerModel, config: RunConfig, reasons: Sequence[str], different: Sequence[str]) -> None:
    """Warn about what model.py should do differently.

    Args:
        reasons: for each worker, why it had to build more of the model than it trains; "" if it had not.
        different: parameters and buffers whose initial values differed between replicas or tied copies.
    """
    whole = [reason for reason in reasons if reason]
    if whole:
        sys.stderr.write(
            f"warning: {len(whole)} of {len(reasons)} workers built the whole model at the start, not only their "
            f"stages, and each needed the memory for it: {printable(whole[0])}\n"
        )
    if different:
        names = ", ".join(different[:5]) + " and others" * (len(different) > 5)
        sys.stderr.write(
            f"warning: model() gave {names} different values on some workers, which now use those of the first. Draw "
            "initial weights from the generators of torch, numpy or random, which pdtool seeds\n"
        )
    own = {id(parameter) for parameter in built.model.parameters()}
    for name, module in built.file.modules.items() if len(config.plan.stages) > 1 else ():
        if any(id(parameter) in own for parameter in module.parameters()):
            sys.stderr.write(
                f"warning: {name}, at the top of {built.file.path.name}, refers to the model. A worker has the newest "
                "weights of its own stages only, so use only the model's output in loss() and metrics(), and only the "
                "given parameters in after_update()\n"
            )


def open_data(config: RunConfig, place: Place, file: ModelFile) -> tuple[TrainingData, MinibatchSource | None]:
    """Open the datasets at the first stage, and tell all workers what they need to know about them.

    Returns:
        The run's data, and at the first stage the source of minibatches.
    """
    Status.of_this_process.set("the loading of the data")
    bundle, first_rank = config.bundle, place.groups.replicas[0].ranks[0]
    inputs = [bundle.by_name[name] for name in bundle.inputs]
    loaders = {
        name: MinibatchLoader(file, name, inputs, bundle.arguments, seed=config.seed)
        for name in (_SPLITS if place.assignment.stage == 0 else ())
    }
    source, workers = None, 0
    if loaders:
        workers, warning = usable_workers(config.loader_workers, loaders.values())
        if workers and (changed := _changed_by_updates(file)):
            workers = 0
            warning = f"{changed}, and loader workers would not see this. So the worker itself loads the data"
        if warning and place.is_replica_0:
            sys.stderr.write(f"warning: {warning}\n")
        source = MinibatchSource(
            loaders,
            workers,
            timeout_s=config.timeout_s,
            pins_memory=place.device.type == "cuda",
            keeps_workers=not file.has("sampler"),
        )
    count_s = config.timeout_s * _COUNTING  # the others wait for this one meanwhile
    described = {name: loader.describe(count_s) for name, loader in loaders.items()}
    if loaders:
        loaders["valid"].try_first_minibatch(config.plan.batch_size)
    splits = broadcast(described, dict[str, DatasetSplit], first_rank, "the description of the data")

    def sampled(epoch: int) -> Sequence[int]:
        """Call each worker's sampler(), which may tell its dataset the epoch; the first worker's chooses for all."""
        own = loaders["train"].order_by_sampler(config.seed, epoch) if loaders else []
        return broadcast(own, list[int], first_rank, "the order of the samples")

    sampler = sampled if file.has("sampler") else None
    check_length = loaders["train"].check_length if loaders else None
    return TrainingData(config, file, splits, sampler, check_length=check_length, loader_workers=workers), source


def _changed_by_updates(file: ModelFile) -> str:
    """Say where updates change a variable that the data depend on; "" if they do not."""
    changing, reading = (filter(file.has, names) for names in (("after_update", "scheduler"), ("collate", "dataset")))
    for function, reader in product(changing, reading):
        for line, variable in collected(file.module, function, reader):
            return f"{line}: {function}() changes {variable}, which {reader}() or what it returns reads"
    return ""


@dataclass
class StageBuilder:
    """Opens the channels to other workers, and builds the stage replicas of this one."""

    config: RunConfig
    place: Place
    model: WorkerModel
    modules: Mapping[int, nn.Module]
    tensors: ModelTensors
    data: TrainingData
    source: MinibatchSource | None
    progress: Progress

    def __post_init__(self) -> None:
        model, plan = self.model, self.config.plan
        self._shape, self._file, self._first_names = self.config.shape, model.file, model.first_names
        self._model_state, self._model_parameters = model.model.state_dict(keep_vars=True), model.optimizer_parameters()
        self._has_called_optimizer = False
        self._delays, self._is_late = gradient_delays(plan.kind, self._shape), not plan.kind.flushes
        self._updates = ClippedUpdates(
            self._file.training.max_grad_norm,
            self.place.groups.world if not self._is_late and len(plan.stages) > 1 else None,
            stages=len(self.modules),
            is_replica_0=self.place.is_replica_0,
            meter=self.place.meter,
        )

    def build(self) -> dict[int, StageReplica]:
        """Build the replicas, by the stage's number; all workers call it together."""
        Status.of_this_process.set("the building of the stages")
        channels = self._open_channels()
        expand_segments(self.place.device)
        memory = self.place.meter.memory
        memory.received_bytes, memory.sent_bytes = channels.device_bytes, channels.sent_bytes
        memory.limit_bytes = self.config.plan.cluster.memory_bytes
        stages = {s: self._replica(s, module, channels) for s, module in self.modules.items()}
        settings = user_code_settings(self._file.training)
        for optimizer in (replica.optimizer for replica in stages.values()):
            settings |= optimizer.schedule.settings | optimizer.settings
        check_agreement(settings, self.place.groups.world, missing=None)
        warning = next(replica.optimizer.schedule.length_warning for replica in stages.values())
        if warning and self.place.assignment.rank == 0:
            sys.stderr.write(f"warning: {warning}\n")
        return stages

    def _open_channels(self) -> Channels:
        config, shape, groups = self.config, self._shape, self.place.groups
        targets = describe_targets(self.data.splits["train"].leaves)
        edges, optional = list_edges(config.bundle, targets), config.bundle.optional_gradients
        ranks = [replicas.ranks for replicas in groups.replicas]
        routes = list_routes(edges, ranks, optional_gradients=optional, wire_dtype=config.plan.wire_dtype)
        in_flight = [w * r for w, r in zip(shape.in_flight, shape.replicas[: shape.pipeline_depth], strict=True)]
        return open_channels(routes, groups, config, in_flight, self.place.meter)

    def _replica(self, s: int, module: nn.Module, channels: Channels) -> StageReplica:
        """Build this worker's replica of stage `s` from its module."""
        config, meter, device = self.config, self.place.meter, self.place.device
        stage = self._pipeline_stage(s, module)
        with stage.weights.noticing_kept_memory():
            tied = self._tied(s, stage)
            tied_ids = {id(t.parameter) for t in tied}
            untied = {name: p for name, p in stage.weights.parameters.items() if id(p) not in tied_ids}
            optimizer = self._optimizer(untied, s)
        in_flight = self._shape.in_flight[s % self._shape.pipeline_depth]
        replicas = self.place.groups.replicas[s]
        return StageReplica(
            stage=stage,
            io=StageIO(config.bundle, s, channels, prefetch=in_flight + ASKED_AHEAD, device=device, meter=meter),
            source=self.source if s == 0 else None,
            averager=ReplicaAverager(replicas, untied.values(), meter, config.bucket_bytes),
            optimizer=optimizer,
            tied=tied,
            kept=KeptValues(
                self._file, self.model.model, [each.parameters for each in config.bundle.stages], s, device
            ),
            module_state=ModuleState(stage, config.bundle, s, self._model_state, self._first_names),
            updates=self._updates,
            losses=LossReader(device) if s == len(config.plan.stages) - 1 else None,
            meter=meter,
            check_model=self.tensors.check,
            set_model_mode=self.tensors.set_mode,
            check_model_mode=self.tensors.check_mode,
            frozen_in_stages=self._frozen_in_stages(s, untied),
        )

    def _frozen_in_stages(self, s: int, untied: Iterable[str]) -> set[str]:
        """See StageReplica.frozen_in_stages."""
        first_names = self._first_names
        others = [stage.parameters for other, stage in enumerate(self.config.bundle.stages) if other != s]
        held = {first_names.get(name, name) for parameters in others for name in parameters}
        return {name for name in untied if first_names.get(name, name) in held}

    def _pipeline_stage(self, s: int, module: nn.Module) -> PipelineStage:
        config, device = self.config, self.place.device
        compensation = config.delay_compensation
        outputs = [config.bundle.by_name[name] for name in config.bundle.stages[s].outputs]
        is_last = s == len(config.plan.stages) - 1
        return PipelineStage(
            module,
            self._file.loss if is_last else None,
            recompute=config.plan.stages[s].recompute,
            stashing=self._shape.weights.stashes,
            extrapolates=compensation is not None and compensation.extrapolates_weights,
            autocast=Autocast(device, [dtype_of(output) for output in outputs]) if config.precision == "bf16" else None,
            compiled=config.compiled,
            seeds=OperatorSeeds(s, device),
            without_gradient={i: o.name for i, o in enumerate(outputs) if not (o.gradient or o.detached)},
            modules_of_loss=self._file.modules.values() if is_last else (),
            output_classes=config.bundle.output_classes,
        )

    def _tied(self, s: int, stage: PipelineStage) -> list[TiedParameterSync]:
        """The tied parameters of a stage, each with an optimizer of its own under the first holder's name."""
        tied = []
        max_norm = self._file.training.max_grad_norm if self._is_late else None
        for described, group in zip(self.config.bundle.tied, self.place.groups.tied, strict=True):
            names = dict(zip(described.stages, described.names, strict=True))
            if s in names:
                first = min(names)
                sync = TiedParameterSync(
                    optimizer=self._optimizer({names[first]: stage.weights.by_name[names[s]]}, first),
                    group=group,
                    holders=len(names),
                    lag=tied_update_lag(self._shape, described.stages, s) if self._is_late else 0,
                    is_first=first == s,
                    max_norm=max_norm,
                    meter=self.place.meter,
                )
                tied.append(sync)
        return tied

    def _optimizer(self, parameters: Mapping[str, nn.Parameter], s: int) -> NamedOptimizer:
        config = self.config
        updates = config.epochs * math.ceil(self.data.epoch_minibatches / self._shape.update_every[s])
        with without_changes(self._model_parameters.values()) if self._has_called_optimizer else nullcontext():
            self._has_called_optimizer = True
            return NamedOptimizer(
                self._file,
                self._model_parameters,
                parameters,
                RunLength(config.epochs, updates, list(self.progress.validation_losses)),
                config.delay_compensation,
                self._delays[s],
                config.seed,
                self._first_names,
            )


def read_progress(manifest: CheckpointManifest, data: TrainingData) -> Progress:
    """Return how far the run of a checkpoint was; older checkpoints lack some figures of each epoch."""
    epochs, metrics = manifest.epoch, manifest.metrics
    losses = manifest.validation_losses or [metrics.get("loss", 0.0)] * epochs
    samples = manifest.samples or [data.epoch_samples] * epochs
    return Progress(list(manifest.minibatches or [0] * epochs), list(samples), list(losses), metrics)


def resume(
    config: RunConfig, place: Place, data: TrainingData, stages: Mapping[int, StageReplica], resumed: Checkpoint
) -> None:
    """Load the checkpoint that the run resumes into the stages; any plan of the same model may have made it."""
    checkpoint.load(resumed.path, [component for replica in stages.values() for component in replica.components])
    manifest = resumed.manifest()
    for s, replica in stages.items():
        replica.adopt_changes()
        if not replica.optimizer.names:  # nothing of it is in the checkpoint, but it counts the updates
            every = config.shape.update_every[s]
            replica.optimizer.updates = sum(math.ceil(minibatches / every) for minibatches in manifest.minibatches)
    lost_here = [name for replica in stages.values() for name in replica.kept.lost]
    lost = dict.fromkeys(itertools.chain(*all_gather(lost_here, list[str], place.groups.world, "what was loaded")))
    if place.assignment.rank == 0:
        warn_of_length(config, data, manifest)
        if lost:
            sys.stderr.write(
                f"warning: the checkpoint lacks values of {' and '.join(lost)}, so the resumed run begins with those "
                "that the file sets. A checkpoint holds numbers, texts, tensors and containers of these, and for "
                "another plan only what did not differ between its stages\n"
            )


def warn_of_length(config: RunConfig, data: TrainingData, manifest: CheckpointManifest) -> None:
    """Warn if epochs, or a learning-rate schedule that knows its length, continue with another length."""
    now = data.epoch_minibatches
    before = next(reversed(manifest.minibatches), 0) or now
    if before != now:
        sys.stderr.write(
            f"warning: an epoch had {before} minibatches before and now has {now}. If you did not intend this, check "
            "--steps, the training set and the batch size\n"
        )
    by_epoch = data.file.training.scheduler_step == "epoch"
    other_length = "" if by_epoch or before == now else f" of {before} minibatches"
    epochs_before = manifest.epochs or config.epochs
    if data.file.scheduler_takes_total and (epochs_before != config.epochs or other_length):
        same = [f"epochs of {before} minibatches"] if other_length else []
        if epochs_before != config.epochs:
            same.append(f"--epochs {epochs_before}")
        remedy = f". To keep the old schedule, use {' and '.join(same)}" if epochs_before > manifest.epoch else ""
        old, new = (counted(epochs, "epoch") for epochs in (epochs_before, config.epochs))
        sys.stderr.write(
            f"warning: the learning-rate schedule was made for {old}{other_length}. From epoch {manifest.epoch + 1} "
            f"on, it continues as a schedule of {new}: learning rates differ{remedy}\n"
        )
