"""A replica of one stage on this worker: its computation, its messages, and its updates.

A worker has one; with chunks it has several. `ClippedUpdates` updates the stages of a worker, with
their gradients clipped by a norm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdtool.errors import FieldError, UsageError
from pdtool.runtime.groups import PeerErrorContext
from pdtool.runtime.messages.stage_io import StageIO
from pdtool.runtime.meter import WorkerMeter
from pdtool.runtime.stage.averaging import ReplicaAverager, clip, scale, squared_norm, without_repetition
from pdtool.runtime.stage.losses import LossReader, RoundLoss
from pdtool.runtime.stage.optimizer import NamedOptimizer
from pdtool.runtime.stage.optimizer_state import unpack
from pdtool.runtime.stage.pipeline_stage import PipelineStage
from pdtool.runtime.stage.tied_parameters import TiedParameterSync

ReadTensors = Callable[[Callable[[str], bool]], Mapping[str, Tensor]]  # of a checkpoint, those whose key is wanted


@dataclass(kw_only=True)
class StageReplica:
    """A replica of one stage on this worker.

    Attributes:
        averager: averages over all replicas of the stage.
        optimizer: of the parameters that are not tied.
        tied: the tied parameters of the stage.
        saved_names: parameters and persistent buffers of the stage that a checkpoint holds.
        unused_state: what else of the model's state a checkpoint holds, by name: second names of this stage's own
            parameters and buffers and, at the first stage, what no operator uses.
        losses: of the minibatches, at the last stage.
        frozen_in_stages: parameters that other stages hold as well, and that nothing sums, as model() left them frozen.
    """

    stage: PipelineStage
    io: StageIO
    averager: ReplicaAverager
    optimizer: NamedOptimizer
    tied: list[TiedParameterSync]
    saved_names: list[str]
    unused_state: dict[str, Tensor]
    losses: LossReader
    frozen_in_stages: Collection[str] = ()
    _round: dict[int, float] = field(default_factory=dict)  # minibatch of the round -> weight
    _is_first_step: bool = True

    def __post_init__(self) -> None:
        self._is_by_user_code = any(optimizer.is_by_user_code for optimizer in self._optimizers)
        self._hooked = {name for name, p in self.stage.weights.parameters.items() if p._backward_hooks}
        self.adopt_changes()

    def backward_done(self, minibatch: int, weight: float) -> None:
        """Add a minibatch to the round.

        Args:
            weight: its samples over those of a full minibatch.
        """
        self._round[minibatch] = weight

    def end_round(self, epoch: int) -> RoundLoss | None:
        """Average the gradients of a round over the replicas, and start summing those of tied parameters.

        Returns:
            The loss of a round over the replicas: of this one, on a GPU of the one before; None where none can be read.

        Raises:
            PdtoolError: a loss is not a number.
            PeerError: another replica is lost.
        """
        optimizer = self.optimizer
        loss = self.losses.end_round(optimizer.updates + 1, self._round, epoch, optimizer.learning_rate)
        weight = sum(self._round.values())
        self._round.clear()
        for tied in self.tied:
            tied.start_sum(weight)
        return self.averager.average_gradients(weight, loss)

    def step(self) -> None:
        """Step to a new weight version with the gradients of the round; tied parameters have steps of their own."""
        try:
            self.stage.weights.prepare_update()
        except FieldError as fault:
            raise self.optimizer.fault(fault) from fault
        if self._is_first_step:
            self._is_first_step = False
            with self.stage.weights.noticing_kept_memory():
                self.optimizer.step()
        else:
            self.optimizer.step()
        self.updated()

    def take_due_tied_steps(self) -> None:
        """Take the steps of tied parameters that are due, before the stage's next action.

        Not in the update itself: another holder may wait for what this worker's other stages have yet to do.
        """
        for tied in self.tied:
            while tied.is_step_due:
                tied.take_sum()
                tied.step()
                self.updated()

    def end_epoch(self, minibatches: int) -> RoundLoss | None:
        """Take the steps of tied parameters that are still due, and make the replicas' buffers equal.

        The pipeline is empty.

        Args:
            minibatches: of the epoch that this replica computed.

        Returns:
            The loss of the last round over the replicas, where it was not read in the round itself.

        Raises:
            PdtoolError: it is not a number.
        """
        loss = self.losses.end_epoch()
        self.io.end_phase()
        self.stage.weights.bind_newest()
        for tied in self.tied:
            while not tied.is_drained:
                tied.take_sum()
                tied.step()
        self.adopt_changes()
        self.averager.average_buffers(dict(self.stage.module.named_buffers()), minibatches)
        return self.averager.sum_loss(loss) if loss else None

    def epoch_done(self, validation_loss: float) -> None:
        """Step learning-rate schedules of epochs."""
        for optimizer in self._optimizers:
            optimizer.epoch_done(validation_loss)
        self.adopt_changes()

    def set_mode(self, *, training: bool) -> None:
        """Put the module, and an optimizer that has modes, into that of training or of evaluation; between phases."""
        self.stage.module.train(training)
        for optimizer in self._optimizers:
            optimizer.set_mode(training=training)
        self.adopt_changes()

    def state(self, canonical: Mapping[str, str]) -> dict[str, Tensor]:
        """Return this stage's part of a checkpoint; the state of a tied parameter's optimizer is its first holder's.

        Args:
            canonical: parameter name -> its first name in the whole model.
        """
        module_state = self.stage.module.state_dict()
        state = {f"model.{name}": module_state[name] for name in self.saved_names}
        state |= {f"model.{name}": value for name, value in self.unused_state.items()}
        for optimizer in (self.optimizer, *(tied.optimizer for tied in self.tied if tied.holders.is_first)):
            state |= optimizer.state(canonical)
        return state

    def load(
        self, folder: Path, read: ReadTensors, canonical: Mapping[str, str], validation_losses: Sequence[float]
    ) -> None:
        """Take over what `state` returned from a checkpoint, also of another plan.

        Args:
            folder: of the checkpoint, for errors.
            read: returns its tensors whose key is wanted.
            canonical: parameter name -> its first name in the whole model.
            validation_losses: of each epoch until then.

        Raises:
            UsageError: the checkpoint is of another model.
        """
        names = {canonical[name]: name for optimizer in self._optimizers for name in optimizer.parameters}
        model_keys = {f"model.{name}" for name in self.saved_names}
        saved = read(lambda key: key in model_keys or _is_optimizer_key(key, names))
        records = {name: unpack(saved, f"optimizer.{first}") for first, name in names.items()}
        for optimizer in self._optimizers:
            optimizer.load({name: records[name] for name in optimizer.parameters}, validation_losses)
        self.adopt_changes()
        self.stage.weights.bind_newest()
        self._load_module(saved, folder)  # last: a schedule that catches up may have changed weights
        self._extrapolate_weights()

    def _load_module(self, saved: Mapping[str, Tensor], folder: Path) -> None:
        current = self.stage.module.state_dict()
        for name in self.saved_names:
            value, shape = saved.get(f"model.{name}"), list(current[name].shape)
            if value is None or list(value.shape) != shape:
                described = "none" if value is None else f"one of shape {list(value.shape)}"
                raise UsageError(
                    f"the model has {name} of shape {shape}, the checkpoint {folder} {described}",
                    "resume from a run of the same model",
                )
            with torch.no_grad():
                without_repetition(current[name]).copy_(without_repetition(value, current[name]))

    @property
    def _optimizers(self) -> list[NamedOptimizer]:
        return [self.optimizer, *(tied.optimizer for tied in self.tied)]

    def updated(self) -> None:
        """After an update, let forwards read what it made of the parameters; what torch does alone needs no look."""
        if self._is_by_user_code:
            self.adopt_changes()
        else:
            self._extrapolate_weights()

    def adopt_changes(self) -> None:
        """After user code, let forwards read what it made of the parameters.

        Raises:
            ModelError: it did to one what training cannot follow.
        """
        try:
            if self.stage.weights.adopt_changes():
                self._check_trained()
                self.averager.select_parameters()
        except FieldError as fault:
            raise self.optimizer.fault(fault) from fault
        self._extrapolate_weights()

    def _extrapolate_weights(self) -> None:
        """Let forwards read what the delay compensation says."""
        values = {key: value for o in self._optimizers for key, value in o.steps.extrapolated_weights().items()}
        self.stage.weights.set_extrapolated(values)

    def _check_trained(self) -> None:
        """Check that what is trained now can be: no stage has the whole gradient of a parameter that several hold.

        Raises:
            FieldError: it cannot be.
        """
        tied = {id(tied.parameter) for tied in self.tied}
        for name, parameter in self.stage.weights.parameters.items():
            if parameter._backward_hooks and id(parameter) in tied:
                what = "has a hook on its gradient, and several stages hold it, each with a part of the gradient"
                raise FieldError(name, f"{what}; keep them in one stage with HINTS no_split")
            if parameter._backward_hooks and name not in self._hooked:
                what = "gets a hook on its gradient during training, which a resumed run would not have"
                raise FieldError(name, f"{what}; register it in optimizer()")
            if parameter.requires_grad and name in self.frozen_in_stages:
                what = "is frozen in model() and held by several stages, so that nothing sums its gradient"
                raise FieldError(name, f"{what}; let model() leave it to be trained, and freeze it in optimizer()")


def _is_optimizer_key(key: str, names: Container[str]) -> bool:
    """Whether a key is of the optimizer's state of one of these parameters, none of whose names begins another."""
    kind, *parts = key.split(".")
    return kind == "optimizer" and any(".".join(parts[:n]) in names for n in range(1, len(parts) + 1))


class ClippedUpdates:
    """Updates the stages of this worker, with gradients clipped by their norm (`MAX_GRAD_NORM` of model.py).

    With a flush all stages update at the same moment, and the norm is that of all parameters of the model, as
    torch.nn.utils.clip_grad_norm_ computes it in a plain loop: one worker of each stage adds its part, and a parameter
    that several stages hold counts once.

    Without a flush stages update at different moments, so there is no common norm. The gradients of a stage are clipped
    by the norm of these alone; those of a tied parameter, whose copies take the same steps at different moments, by
    their own. What a plain loop would not clip is not clipped here either.

    Args:
        max_norm: None clips nothing.
        group: gloo group of all workers, which update at the same moment; None when stages do not.
        stages: number of stages of this worker.
        is_replica_0: whether this worker adds the norms of its stages to the sum; other replicas have the same ones.
    """

    def __init__(
        self, max_norm: float | None, group: Any, *, stages: int, is_replica_0: bool, meter: WorkerMeter
    ) -> None:
        self._max_norm, self._group = max_norm, group
        self._stages, self._is_replica_0, self._meter = stages, is_replica_0, meter
        self._waiting: list[StageReplica] = []

    def update(self, replica: StageReplica) -> None:
        """Update a stage, whose gradients are averaged; together with the worker's other stages where these count."""
        if not self._max_norm:
            replica.step()
        elif not self._group:
            clip(replica.averager.parameters, self._max_norm)
            replica.step()
        else:
            self._waiting.append(replica)
            if len(self._waiting) == self._stages:
                self._update_together(self._max_norm)

    def _update_together(self, max_norm: float) -> None:
        """Update all stages of the worker, at the end of its round: no other worker needs anything more of it."""
        counted: list[nn.Parameter] = []
        held: list[nn.Parameter] = []
        for replica in self._waiting:
            for tied in replica.tied:
                tied.take_sum()
            own = replica.averager.parameters
            counted += [*own, *(tied.parameter for tied in replica.tied if tied.holders.is_first)]
            held += [*own, *(tied.parameter for tied in replica.tied)]
        norm = math.sqrt(self._sum_over_stages(counted))
        scale(held, norm, max_norm)
        for replica in self._waiting:
            replica.step()
            for tied in replica.tied:
                tied.step()
            replica.updated()
        self._waiting.clear()

    def _sum_over_stages(self, parameters: Iterable[nn.Parameter]) -> float:
        own = squared_norm(parameters) if self._is_replica_0 else 0.0
        total = torch.tensor(own, dtype=torch.float64)
        with self._meter.averaging, PeerErrorContext("the norm of the gradients was not summed over all workers"):
            dist.all_reduce(total, group=self._group)
        self._meter.count_sent(total.nbytes)
        return total.item()
