"""Builds the stage replicas of a worker from the modules of their stages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pdtool.frontend.model_io import dtype_of
from pdtool.frontend.random_numbers import OperatorSeeds
from pdtool.run.config import RunConfig
from pdtool.run.measure.meter import WorkerMeter
from pdtool.run.measure.round_losses import LossReader
from pdtool.run.messages.open_channels import Channels
from pdtool.run.messages.stage_io import StageIO
from pdtool.run.processes.process_groups import ProcessGroups
from pdtool.run.stage import Autocast, PipelineStage
from pdtool.run.stage_replica import StageReplica
from pdtool.run.startup.worker_model import WorkerModel
from pdtool.run.weights.learning_rate import RunLength
from pdtool.run.weights.optimizer import NamedOptimizer
from pdtool.run.weights.replica_averager import ReplicaAverager
from pdtool.run.weights.tied_parameters import TiedHolders, TiedParameterSync
from pdtool.schedule import PipelineShape, gradient_delays, is_asynchronous, tied_update_lag


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
        self._delays = gradient_delays(self.config.plan.schedule, self.shape)

    def build(self, s: int, module: nn.Module) -> StageReplica:
        """Build this worker's replica of stage `s` from its module."""
        stage = self._pipeline_stage(s, module)
        tied = self._tied(s, stage)
        tied_ids = {id(t.parameter) for t in tied}
        untied = {name: p for name, p in stage.weights.parameters.items() if id(p) not in tied_ids}
        in_flight = self.shape.in_flight[s % self.shape.pipeline_depth]
        saved_names = [name for name in module.state_dict() if name in self._model_state]
        return StageReplica(
            stage=stage,
            io=StageIO(
                self.config.bundle, s, self.channels, prefetch=in_flight + 1, device=self.device, meter=self.meter
            ),
            averager=ReplicaAverager(self.groups.replicas[s], untied.values(), self.meter, self.config.bucket_bytes),
            optimizer=self._optimizer(untied, s),
            tied=tied,
            saved_names=saved_names,
            unused_state=self._unused_state(s, stage, saved_names),
            losses=LossReader(self.device),
        )

    def _pipeline_stage(self, s: int, module: nn.Module) -> PipelineStage:
        config, device = self.config, self.device
        compensation = config.delay_compensation
        output_dtypes = [dtype_of(config.bundle.by_name[name]) for name in config.bundle.stages[s].outputs]
        return PipelineStage(
            module,
            self.built.file.loss if s == len(config.plan.stages) - 1 else None,
            recompute=config.plan.stages[s].recompute,
            stashing=config.plan.weights != "none",
            extrapolates=compensation is not None and compensation.extrapolates_weights,
            autocast=Autocast(device, output_dtypes) if config.precision == "bf16" else None,
            compiled=config.compiled,
            seeds=OperatorSeeds(s, device),
        )

    def _tied(self, s: int, stage: PipelineStage) -> list[TiedParameterSync]:
        """The tied parameters of a stage, each with an optimizer of its own under the first holder's name."""
        tied, is_late = [], is_asynchronous(self.config.plan.schedule)
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
