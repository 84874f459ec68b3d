"""Start of a worker: everything that it works with, built before its first minibatch.

`WorkerContext` goes through the phases of a start: process groups, model, data, channels, stages. `StageBuilder` builds
the worker's stage replicas. `check_last_minibatch` finds at the start what would fail at the end of the first epoch.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pdtool.artifacts.bundle import Bundle, TensorSpec
from pdtool.errors import ModelError, printable
from pdtool.frontend.graph_digest import check_bundle
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import dtype_of
from pdtool.frontend.random_numbers import OperatorSeeds
from pdtool.runtime.config import RunConfig, assign_ranks
from pdtool.runtime.groups import ProcessGroups, all_gather, broadcast, make_process_groups
from pdtool.runtime.loading.minibatch_loader import VALIDATION_PASS, MinibatchLoader
from pdtool.runtime.loading.minibatch_source import MinibatchSource, usable_workers
from pdtool.runtime.loading.minibatches import (
    DataPass,
    DatasetSplit,
    Minibatches,
    SplitData,
    epochs_go_on,
    sample_order,
    samples_in_epoch,
)
from pdtool.runtime.messages.open_channels import Channels, open_channels
from pdtool.runtime.messages.routes import describe_targets, list_edges, list_routes
from pdtool.runtime.messages.stage_io import StageIO
from pdtool.runtime.meter import WorkerMeter
from pdtool.runtime.stage.averaging import ReplicaAverager
from pdtool.runtime.stage.losses import LossReader
from pdtool.runtime.stage.optimizer import NamedOptimizer, RunLength
from pdtool.runtime.stage.pipeline_stage import Autocast, PipelineStage, as_tuple
from pdtool.runtime.stage.stage_replica import ClippedUpdates, StageReplica
from pdtool.runtime.stage.tied_parameters import TiedHolders, TiedParameterSync
from pdtool.runtime.status import Status
from pdtool.runtime.worker import checkpoint
from pdtool.runtime.worker.worker_model import (
    WorkerModel,
    digest_weights,
    equalize_weights,
    is_small,
    load_stage_module,
)
from pdtool.schedule import PipelineShape, gradient_delays, tied_update_lag

_SPLITS = ("train", "valid")
_COUNTING = 0.5  # the part of --timeout in which a validation set without a length is counted
_WIRE_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_REFUSED = "Expected more than 1 value per channel"  # of torch.nn.functional.batch_norm


class WorkerContext:
    """What a worker works with. All workers build theirs together, after torch.distributed is initialized.

    Args:
        rank: in torch.distributed; `assign_ranks` says which stages and replica that is.
        device: where this worker computes.
        local_workers: number of workers on this machine.

    Attributes:
        shape: what the schedule is built for.
        canonical: name of a parameter or buffer -> its first name in the whole model, under which the optimizer state
            of a parameter is saved.
        loaders: at the first stage, by the name of the split.
        source: of the minibatches, at the first stage.
        splits: by name.
        epoch_samples: samples of the training set in an epoch.
        received_device_bytes: memory of its GPU that messages come into.
        stages: its replicas of stages, by the stage's number.
        updates: updates them.

    Raises:
        PeerError: a worker does not come.
        StaleError: the model's operators are not those that the stage files were made for.
        PdtoolError: the model, its dataset or a stage file is not as it should be.
    """

    def __init__(self, config: RunConfig, rank: int, device: torch.device, local_workers: int) -> None:
        self.config, self.device, bundle = config, device, config.bundle
        self.local_workers = local_workers
        self.assignment = assign_ranks(config.plan)[rank]
        self.status, self.meter = Status(config.out, self.assignment), WorkerMeter(device)
        self.groups = make_process_groups(config, device)
        self.status.set("the loading of the model")
        self.file = ModelFile.load(config.model, trusted=config.trusted, digests=bundle.digests)
        options = self.file.training
        self.shape = config.shape
        own_stages = self.shape.stages_on_same_workers(self.assignment.stage)
        built = WorkerModel.build(self.file, config.seed, bundle, own_stages, as_a_whole=is_small(config.plan))
        digests = digest_weights(built.model, bundle, own_stages, self.groups) if config.resume is None else {}
        if rank % local_workers == 0:  # one worker of each machine: its workers read the same files
            built.check(lambda model: check_bundle(self.file, model, bundle, config.check_stage_files))
        self._warn_of_whole_models(
            all_gather(printable(built.why_whole), str, self.groups.world, "the check of the stage files")
        )
        model = built.model
        first: dict[int, str] = {}
        tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
        self.canonical = {name: first.setdefault(id(tensor), name) for name, tensor in tensors}
        modules = {s: load_stage_module(bundle, config.bundle_dir, s, model).to(device) for s in own_stages}
        if config.resume is None:
            self._equalize(modules, digests)
        self.status.set("the loading of the data")
        inputs = [bundle.by_name[name] for name in bundle.inputs]
        loaded = _SPLITS if self.assignment.stage == 0 else ()
        self.loaders = {
            name: MinibatchLoader(self.file, name, inputs, bundle.arguments, seed=config.seed) for name in loaded
        }
        self.source = self._minibatch_source() if self.loaders else None
        count_s = config.timeout_s * _COUNTING  # the others wait for this one meanwhile
        described = {name: loader.describe(count_s).as_data() for name, loader in self.loaders.items()}
        source = self.groups.replicas[0].ranks[0]
        received = broadcast(described, dict[str, SplitData], source, "the description of the data")
        self.splits = {name: DatasetSplit.of(data) for name, data in received.items()}
        self._chosen = len(self._sampled(1)) if self.file.has("sampler") else self.splits["train"].samples
        self.epoch_samples = samples_in_epoch(self._chosen, config, drop_last=options.drop_last)
        self._epochs_go_on = epochs_go_on(self.splits["train"], config)
        check_last_minibatch(modules, bundle, self.epoch_samples, device)
        self.status.set("the building of the stages")
        channels = self._channels()
        self.received_device_bytes = channels.device_bytes
        builder = StageBuilder(
            config=config,
            built=built,
            canonical=self.canonical,
            shape=self.shape,
            groups=self.groups,
            channels=channels,
            device=device,
            meter=self.meter,
            epoch_samples=self.epoch_samples,
        )
        self.stages = {s: builder.build(s, module) for s, module in modules.items()}
        updates_together = config.plan.kind.flushes and len(self.shape.replicas) > 1
        self.updates = ClippedUpdates(
            options.max_grad_norm,
            self.groups.world if updates_together else None,
            stages=len(self.stages),
            is_replica_0=self.is_replica_0,
            meter=self.meter,
        )
        self._warn_of_schedule()
        self._warn_of_globals(model)

    def _channels(self) -> Channels:
        config, shape, groups = self.config, self.shape, self.groups
        targets = describe_targets(self.splits["train"].leaves)
        edges = list_edges(config.bundle, targets, _WIRE_DTYPES.get(config.wire_dtype))
        ranks = [replicas.ranks for replicas in groups.replicas]
        routes = list_routes(edges, ranks, optional_gradients=config.bundle.optional_gradients)
        in_flight = [w * r for w, r in zip(shape.in_flight, shape.replicas[: shape.pipeline_depth], strict=True)]
        return open_channels(routes, groups, config, in_flight, self.meter)

    def _minibatch_source(self) -> MinibatchSource:
        workers, warning = usable_workers(self.config.loader_workers, self.loaders.values())
        if warning and self.is_replica_0:
            sys.stderr.write(f"warning: {warning}\n")
        return MinibatchSource(
            self.loaders,
            workers,
            timeout_s=self.config.timeout_s,
            pins_memory=self.device.type == "cuda",
            keeps_workers=not self.file.has("sampler"),
        )

    def _equalize(self, modules: Mapping[int, nn.Module], digests: Mapping[tuple[int, str], str]) -> None:
        """Let replicas and tied copies begin alike; worker 0 says so where they did not."""
        different = equalize_weights(modules, digests, self.config.bundle.tied, self.groups)
        if different and self.assignment.rank == 0:
            names = ", ".join(different[:5]) + " and others" * (len(different) > 5)
            sys.stderr.write(
                f"warning: model() gave {names} other values on some workers, which now have those of the first: draw "
                "initial weights from the generators of torch, numpy or random, which pdtool seeds\n"
            )

    def _warn_of_whole_models(self, reasons: Sequence[str]) -> None:
        """Say at worker 0 which workers had to build more of the model than they train."""
        ranks = [rank for rank, reason in enumerate(reasons) if reason]
        if ranks and self.assignment.rank == 0:
            sys.stderr.write(
                f"warning: {len(ranks)} of {len(reasons)} workers built the whole model at the start, not only their "
                f"stages, and each needed the memory for it: {printable(reasons[ranks[0]])}\n"
            )

    def _warn_of_schedule(self) -> None:
        """Say once, at worker 0, that a learning-rate schedule has another length than the run."""
        if self.assignment.rank == 0:
            warnings = [replica.optimizer.schedule_warning for replica in self.stages.values()]
            sys.stderr.writelines(f"warning: {warning}\n" for warning in filter(None, warnings[:1]))

    def _warn_of_globals(self, model: nn.Module) -> None:
        """Say once, at worker 0, that functions of model.py reach the model by a global name, where it has stages."""
        own = {id(parameter) for parameter in model.parameters()}
        for name, module in self.file.modules.items() if len(self.shape.replicas) > 1 else ():
            if self.assignment.rank == 0 and any(id(parameter) in own for parameter in module.parameters()):
                sys.stderr.write(
                    f"warning: {name}, at the top of {self.file.path.name}, holds the model: a worker has the newest "
                    "weights of its own stages only, so let loss() and metrics() use what the model returns\n"
                )

    def sample_order(self, epoch: int, trained: int) -> Sequence[int]:
        """Return the samples of an epoch, in order; the same on all workers, which call it together.

        Args:
            trained: samples of all epochs before, which a stream that goes on from epoch to epoch has given.

        Raises:
            ModelError: sampler() chooses another number of samples than in the first epoch.
        """
        if self.file.has("sampler"):
            order = self._sampled(epoch)
        elif self._chosen is None or self.splits["train"].is_stream:
            first = trained if self._epochs_go_on else 0
            return range(first, first + self.epoch_samples)
        else:
            order = sample_order(self.config.seed, epoch, self._chosen)
        if len(order) != self._chosen:
            what = f"sampler() gives {len(order)} samples in epoch {epoch}, and {self._chosen} in epoch 1"
            raise self.file.error(what, "return as many in each, which the schedule of the run rests on")
        return order[: self.epoch_samples]

    def data_pass(self, split: str, epoch: int, minibatches: Minibatches) -> DataPass:
        """Return an epoch of training ("train"), or the validation after it ("valid")."""
        stream_pass = VALIDATION_PASS if split == "valid" else None if self._epochs_go_on else epoch
        return DataPass(split, self.splits[split], minibatches, self.config.seed, epoch, stream_pass)

    def _sampled(self, epoch: int) -> list[int]:
        """The samples that sampler() chooses for the first worker.

        Each worker that loads asks its own sampler(), which may tell its dataset the epoch.
        """
        source = self.groups.replicas[0].ranks[0]
        own = self.loaders["train"].sample_order(self.config.seed, epoch) if self.loaders else []
        return broadcast(own, list[int], source, "the order of the samples")

    @property
    def is_replica_0(self) -> bool:
        """Whether this worker writes the checkpoints and metrics of its stages."""
        return self.assignment.replica == 0

    @property
    def last_stage(self) -> StageReplica | None:
        """The last stage of all, if it is on this worker."""
        return self.stages.get(len(self.shape.replicas) - 1)

    def states(self) -> dict[int, dict[str, Tensor]]:
        """Return what this worker writes of a checkpoint: the state of each of its stages, if it is replica 0."""
        return {s: replica.state(self.canonical) for s, replica in self.stages.items() if self.is_replica_0}

    def load(self, folder: Path, validation_losses: Sequence[float]) -> None:
        """Take over parameters, buffers and optimizer state from a checkpoint of any plan of the same model.

        Args:
            validation_losses: of each epoch until then.

        Raises:
            UsageError: the checkpoint is of another model.
        """
        for replica in self.stages.values():
            replica.load(folder, partial(checkpoint.load, folder), self.canonical, validation_losses)


@dataclass(kw_only=True)
class StageBuilder:
    """Builds the stage replicas of a worker.

    Attributes:
        built: the model that the modules of the stages take their tensors from.
        canonical: see WorkerContext.
        epoch_samples: samples of the training set in an epoch.
    """

    config: RunConfig
    built: WorkerModel
    canonical: Mapping[str, str]
    shape: PipelineShape
    groups: ProcessGroups
    channels: Channels
    device: torch.device
    meter: WorkerMeter
    epoch_samples: int

    def __post_init__(self) -> None:
        self._model_state = self.built.model.state_dict(keep_vars=True)
        self._model_parameters = self.built.optimizer_parameters()
        self._delays = gradient_delays(self.config.plan.kind, self.shape)

    def build(self, s: int, module: nn.Module) -> StageReplica:
        """Build this worker's replica of stage `s` from its module."""
        stage = self._pipeline_stage(s, module)
        with stage.weights.noticing_kept_memory():
            tied = self._tied(s, stage)
            tied_ids = {id(t.parameter) for t in tied}
            untied = {name: p for name, p in stage.weights.parameters.items() if id(p) not in tied_ids}
            optimizer = self._optimizer(untied, s)
        in_flight = self.shape.in_flight[s % self.shape.pipeline_depth]
        saved_names = [name for name in module.state_dict() if name in self._model_state]
        return StageReplica(
            stage=stage,
            io=StageIO(
                self.config.bundle, s, self.channels, prefetch=in_flight + 1, device=self.device, meter=self.meter
            ),
            averager=ReplicaAverager(self.groups.replicas[s], untied.values(), self.meter, self.config.bucket_bytes),
            optimizer=optimizer,
            tied=tied,
            saved_names=saved_names,
            unused_state=self._unused_state(s, stage, saved_names),
            losses=LossReader(self.device),
            frozen_in_stages=self._frozen_in_stages(s, untied),
        )

    def _frozen_in_stages(self, s: int, untied: Iterable[str]) -> set[str]:
        """See StageReplica.frozen_in_stages."""
        others = [stage.parameters for other, stage in enumerate(self.config.bundle.stages) if other != s]
        held = {self.canonical.get(name, name) for parameters in others for name in parameters}
        return {name for name in untied if self.canonical.get(name, name) in held}

    def _pipeline_stage(self, s: int, module: nn.Module) -> PipelineStage:
        config, device = self.config, self.device
        compensation = config.delay_compensation
        outputs = [config.bundle.by_name[name] for name in config.bundle.stages[s].outputs]
        is_last = s == len(config.plan.stages) - 1
        return PipelineStage(
            module,
            self.built.file.loss if is_last else None,
            recompute=config.plan.stages[s].recompute,
            stashing=self.shape.weights.stashes,
            extrapolates=compensation is not None and compensation.extrapolates_weights,
            autocast=Autocast(device, [dtype_of(output) for output in outputs]) if config.precision == "bf16" else None,
            compiled=config.compiled,
            seeds=OperatorSeeds(s, device),
            without_gradient={i: output.name for i, output in enumerate(outputs) if not output.gradient},
            modules_of_loss=self.built.file.modules.values() if is_last else (),
        )

    def _tied(self, s: int, stage: PipelineStage) -> list[TiedParameterSync]:
        """The tied parameters of a stage, each with an optimizer of its own under the first holder's name."""
        tied, is_late = [], not self.config.plan.kind.flushes
        for described, group in zip(self.config.bundle.tied, self.groups.tied, strict=True):
            names = dict(zip(described.stages, described.names, strict=True))
            if s in names:
                first = min(names)
                lag = tied_update_lag(self.shape, described.stages, s) if is_late else 0
                holders = TiedHolders(group, len(names), lag, is_first=first == s)
                optimizer = self._optimizer({names[first]: stage.weights.by_name[names[s]]}, first)
                max_norm = self.built.file.training.max_grad_norm if is_late else None
                tied.append(TiedParameterSync(optimizer, holders, self.meter, max_norm))
        return tied

    def _optimizer(self, parameters: Mapping[str, nn.Parameter], s: int) -> NamedOptimizer:
        config = self.config
        minibatches = math.ceil(self.epoch_samples / config.plan.batch_size)
        updates = config.epochs * math.ceil(minibatches / self.shape.update_every[s])
        return NamedOptimizer(
            self.built.file,
            self._model_parameters,
            parameters,
            RunLength(config.epochs, updates),
            config.delay_compensation,
            self._delays[s],
            config.seed,
        )

    def _unused_state(self, s: int, stage: PipelineStage, saved_names: Sequence[str]) -> dict[str, Tensor]:
        """See StageReplica.unused_state."""
        canonical = self.canonical
        used = {name for d in self.config.bundle.stages for name in (*d.parameters, *d.buffers)}
        name_here = {canonical.get(name, name): name for name in saved_names}
        held = stage.weights.by_name | dict(stage.module.named_buffers(remove_duplicate=False))
        used_canonical = {canonical.get(name, name) for name in used}
        unused: dict[str, Tensor] = {}
        for name in self._model_state.keys() - used:
            first_name = canonical.get(name, name)
            if first_name in name_here:
                unused[name] = held[name_here[first_name]]
            elif s == 0 and first_name not in used_canonical:
                unused[name] = self._model_state[name].detach()
        return unused


def check_last_minibatch(modules: Mapping[int, nn.Module], bundle: Bundle, samples: int, device: torch.device) -> None:
    """Check that the last minibatch of an epoch is one that can be trained with.

    If it has one sample, batch norm finds a single value per channel, and squeeze() takes the dimension of the samples
    away.

    Args:
        modules: of stages, by their number.
        samples: of an epoch.

    Raises:
        ModelError: it has one sample, of which a batch norm would see a single value per channel, or a stage makes
            a tensor of another shape than the bundle says.
    """
    size = bundle.batch_size
    if (samples - 1) % size:
        return
    what = f"the last of an epoch's minibatches has one sample ({samples} samples in minibatches of {size})"
    remedy = "set DROP_LAST = True in model.py to leave a short last minibatch out"
    for s, module in modules.items():
        spec = bundle.stages[s]
        inputs, expected = ([bundle.by_name[name] for name in names] for names in (spec.inputs, spec.outputs))
        try:
            shapes = _shapes_of_single_sample(module, inputs, device)
        except ValueError as error:
            if _REFUSED in str(error):
                why = "in which a batch norm finds a single value per channel, which it cannot be trained with"
                remedy = remedy if size > 1 else "profile and plan with a larger --batch-size"
                raise ModelError(f"{what}, {why}", remedy) from error
            continue
        except Exception:
            continue  # training finds it
        for tensor, shape in zip(expected, shapes, strict=False):
            if shape != tensor.sizes(1):
                why = f"of which {spec.file} makes {tensor.name} of shape {list(shape)}, not {list(tensor.sizes(1))}"
                raise ModelError(f"{what}, {why}", f"give squeeze() its dimension; or {remedy}")


def _shapes_of_single_sample(
    module: nn.Module, inputs: Sequence[TensorSpec], device: torch.device
) -> list[tuple[int, ...]]:
    """Run a copy of a stage's module on one sample, with tensors without content; return the shapes of its outputs."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    tensors = {id(t): fake.from_tensor(t) for t in (*module.parameters(), *module.buffers())}
    with fake, torch.no_grad():
        copied = copy.deepcopy(module, tensors)  # what deepcopy finds there it does not copy
        returned = copied(*(torch.zeros(spec.sizes(1), dtype=dtype_of(spec), device=device) for spec in inputs))
    return [tuple(tensor.shape) for tensor in as_tuple(returned) if isinstance(tensor, Tensor)]
