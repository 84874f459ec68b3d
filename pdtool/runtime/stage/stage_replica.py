"""A replica of one stage on this worker: its computation, its messages, and its updates.

A worker has one; with chunks it has several. Numbers in comments are those of the drawing in worker/worker.py.
`ClippedUpdates` updates the stages of a worker, with their gradients clipped by a norm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from pdtool.errors import FieldError
from pdtool.runtime.groups import PeerErrorContext
from pdtool.runtime.loading.minibatch_source import MinibatchSource
from pdtool.runtime.loading.minibatches import DataPass
from pdtool.runtime.messages.stage_io import StageIO
from pdtool.runtime.meter import WorkerMeter
from pdtool.runtime.stage.averaging import ReplicaAverager
from pdtool.runtime.stage.component import Component, ModuleState
from pdtool.runtime.stage.kept_values import KeptValues
from pdtool.runtime.stage.losses import LossReader, MetricTotals, RoundLoss
from pdtool.runtime.stage.optimizer import NamedOptimizer
from pdtool.runtime.stage.pipeline_stage import PipelineStage
from pdtool.runtime.stage.tied_parameters import TiedParameterSync
from pdtool.schedule import ActionKind


@dataclass(kw_only=True)
class StageReplica:
    """A replica of one stage on this worker.

    Attributes:
        source: loads the minibatches; None except at the first stage.
        averager: averages over all replicas of the stage.
        optimizer: optimizer of the parameters that are not tied.
        tied: the tied parameters of the stage.
        updates: takes the updates of this worker's stages.
        losses: losses of the minibatches; None except at the last stage.
        check_model: raises ModelError if user code has put another tensor in the place of one of the model.
        set_model_mode: puts the user's model into training or evaluation mode.
        check_model_mode: raises ModelError if user code has put a module of the model into another mode.
        frozen_in_stages: parameters that other stages also hold and whose gradients nobody sums, because model() froze
            them.
    """

    stage: PipelineStage
    io: StageIO
    source: MinibatchSource | None
    averager: ReplicaAverager
    optimizer: NamedOptimizer
    tied: list[TiedParameterSync]
    module_state: ModuleState
    kept: KeptValues
    updates: ClippedUpdates
    losses: LossReader | None
    meter: WorkerMeter
    check_model: Callable[[], None] = lambda: None
    set_model_mode: Callable[[bool], None] = lambda training: None
    check_model_mode: Callable[[], None] = lambda: None
    frozen_in_stages: Collection[str] = ()
    _round: dict[int, float] = field(default_factory=dict)  # minibatch of the round -> weight
    _is_first_step: bool = True

    def __post_init__(self) -> None:
        self._is_by_user_code = any(optimizer.is_by_user_code for optimizer in self._optimizers)
        self._hooked = {name for name, p in self.stage.weights.parameters.items() if p._backward_hooks}
        self.adopt_changes()

    def begin_phase(self, data: DataPass, own: range, reads: Iterator[int] | None = None) -> None:
        """Begin an epoch of training, or a validation; the pipeline is empty.

        Args:
            own: the minibatches of this replica, in order.
            reads: see WeightVersions.begin_phase.
        """
        self._minibatches, self._own, self._is_training = data.minibatches, own, data.split_name == "train"
        self.stage.module.train(self._is_training)
        self.set_model_mode(self._is_training)
        for optimizer in self._optimizers:
            optimizer.set_mode(training=self._is_training)
        self.adopt_changes()
        self.stage.weights.begin_phase(reads)
        self.stage.seeds.begin_phase(data.run_seed, data.split_name, data.epoch)
        self.io.begin_phase(data, self.source, own, own if self._is_training else ())

    def forward(self, minibatch: int) -> None:
        """Receive or load the inputs of a minibatch, compute the outputs and send them; at the last stage the loss."""
        self._take_due_tied_steps()
        inputs, target = self.io.receive_inputs(minibatch)  # (1)
        outputs = self.stage.forward(minibatch, inputs, target)  # (2)
        self.io.send_outputs(minibatch, outputs)  # (3)
        if self.losses:
            self.losses.add(minibatch, outputs[0])
            self.meter.loss_computed(minibatch)

    def backward(self, minibatch: int, kind: ActionKind, *, ends_round: bool) -> None:
        """Receive the gradients of the outputs, compute those of inputs and parameters, and send those of the inputs.

        Args:
            kind: the whole backward, or one of the two parts of a zero-bubble schedule.
            ends_round: whether the update of the stage comes right after it.
        """
        self._take_due_tied_steps()
        weight = self._minibatches.weight(minibatch)
        on_gradient = self.averager.gradient_ready if ends_round and self.averager.sums_in_backward else None
        if kind.sends_gradients:
            output_gradients = self.io.receive_gradients(minibatch)  # (4)
            if kind.completes_backward:
                gradients = self.stage.backward(minibatch, output_gradients, weight, on_gradient)  # (5), begins (7)
            else:
                gradients = self.stage.backward_input(minibatch, output_gradients)  # (5), of the inputs
            self.io.send_gradients(minibatch, gradients)  # (6)
        else:
            self.stage.backward_weight(minibatch, weight, on_gradient)  # (5), of the parameters; begins (7)
        if kind.completes_backward:
            self._round[minibatch] = weight

    def update(self, epoch: int) -> RoundLoss | None:
        """End a round: average its gradients over the replicas, sum those of tied parameters, and step.

        Returns:
            At the last stage the loss of a round over the replicas: of this round, or on a GPU of the one before.

        Raises:
            PdtoolError: a loss is not a number.
            PeerError: another replica is lost.
        """
        self._take_due_tied_steps()
        loss = None
        if self.losses:
            rate = next((rate for o in self._optimizers if (rate := o.learning_rate) is not None), None)
            loss = self.losses.end_round(self.optimizer.updates + 1, self._round, epoch, rate)
        weight = sum(self._round.values())
        self._round.clear()
        for tied in self.tied:
            tied.start_sum(weight)
        loss = self.averager.average_gradients(weight, loss)  # (7)
        self.updates.update(self)  # (8)
        return loss

    def evaluate(self, minibatch: int, totals: MetricTotals) -> None:
        """Compute with the newest weights, in evaluation mode; at the last stage add loss and metrics to `totals`."""
        inputs, target = self.io.receive_inputs(minibatch)  # (1)
        outputs = self.stage.evaluate(minibatch, inputs)  # (2)
        self.io.send_outputs(minibatch, outputs)  # (3)
        if self.losses:
            loss = self.stage.loss(outputs[0], target)
            totals.add(loss, outputs[0], target, self._minibatches.samples(minibatch))

    def end_phase(self) -> RoundLoss | None:
        """End an epoch or a validation; the pipeline is empty after its last action.

        After training, take the steps of tied parameters that are still due, and make the replicas' buffers equal.

        Returns:
            At the last stage the loss of the last round over the replicas, if it is still unread.

        Raises:
            PdtoolError: it is not a number.
        """
        loss = self.losses.end_epoch() if self.losses else None
        self.io.end_phase()
        self.check_model_mode()
        if not self._is_training:
            self.stage.module.train()  # eval() of an opaque module may have changed its weights, which are saved next
            return None
        self.stage.weights.bind_newest()
        self._take_due_tied_steps(is_drained=True)
        self.adopt_changes()
        self.averager.average_buffers(dict(self.stage.module.named_buffers()), len(self._own))
        return self.averager.sum_loss(loss) if loss else None

    def step(self) -> None:
        """Step to a new weight version with the gradients of the round; tied parameters step by themselves."""
        try:
            self.stage.weights.prepare_update()
        except FieldError as fault:
            raise self.optimizer.fault(fault) from fault
        with self.stage.weights.noticing_kept_memory() if self._is_first_step else nullcontext():
            self.optimizer.step()
        self._is_first_step = False
        self.updated()

    def _take_due_tied_steps(self, *, is_drained: bool = False) -> None:
        """Take the steps of tied parameters that are due, before the stage's next action.

        They are not part of the update, because another holder may wait for this worker's other stages.
        """
        for tied in self.tied:
            while tied.has_step_due(is_drained=is_drained):
                tied.take_sum()
                tied.optimizer.step()
                self.updated()

    def epoch_done(self, validation_loss: float) -> None:
        """Step learning-rate schedules of epochs."""
        for optimizer in self._optimizers:
            optimizer.schedule.epoch_done(validation_loss)
        self.adopt_changes()

    @property
    def components(self) -> list[Component]:
        """The components of the checkpoint; the module and kept values are read last, because a schedule that catches
        up may change them."""
        return [*self._optimizers, self.module_state, self.kept]

    @property
    def saved_components(self) -> list[Component]:
        """The components that write their part; the first holder writes the optimizer state of a tied parameter."""
        copies = [tied.optimizer for tied in self.tied if not tied.is_first]
        return [component for component in self.components if component not in copies]

    @property
    def _optimizers(self) -> list[NamedOptimizer]:
        return [self.optimizer, *(tied.optimizer for tied in self.tied)]

    def updated(self) -> None:
        """After an update, let forwards read the new parameters; updates by torch alone need no check."""
        if self._is_by_user_code:
            self.adopt_changes()
        else:
            self._extrapolate_weights()

    def adopt_changes(self) -> None:
        """After user code, let forwards read the new parameters.

        Raises:
            ModelError: it changed a parameter or a buffer in a way that training cannot follow.
        """
        self.check_model()
        try:
            if self.stage.weights.adopt_changes():
                self._check_trained()
                self.averager.select_parameters()
        except FieldError as fault:
            raise self.optimizer.fault(fault) from fault
        self._extrapolate_weights()

    def _extrapolate_weights(self) -> None:
        """Let forwards read the weights that the correction extrapolates, if it does."""
        if self.stage.weights.extrapolates:
            values = {key: value for o in self._optimizers for key, value in o.steps.extrapolated_weights().items()}
            self.stage.weights.set_extrapolated(values)

    def _check_trained(self) -> None:
        """Check that all parameters trained now can be: no stage has the whole gradient of one that several hold.
        Raises FieldError."""
        tied = {id(tied.parameter) for tied in self.tied}
        for name, parameter in self.stage.weights.parameters.items():
            if parameter._backward_hooks and id(parameter) in tied:
                what = "has a gradient hook, but several stages share this parameter, each with a part of its gradient"
                raise FieldError(name, f"{what}; in HINTS no_split, name a module that contains all its uses")
            if parameter._backward_hooks and name not in self._hooked:
                what = "gets a gradient hook during training, but a resumed run would not have it"
                raise FieldError(name, f"{what}; register it in optimizer()")
            if parameter.requires_grad and name in self.frozen_in_stages:
                what = (
                    "was frozen in model() and is trained now, but several stages hold it and nothing sums its gradient"
                )
                remedy = "leave it trainable in model(), and freeze it in optimizer() if it begins frozen"
                raise FieldError(name, f"{what}; {remedy}")


class ClippedUpdates:
    """Updates the stages of this worker, with gradients clipped by their norm (`MAX_GRAD_NORM` of model.py).

    With a flush all stages update at the same moment. The norm is that of all parameters of the model, as in
    torch.nn.utils.clip_grad_norm_ in a plain loop: one worker of each stage adds its part, and a parameter that several
    stages hold counts once.

    Without a flush stages update at different moments, so there is no common norm. Each stage clips its gradients by
    their own norm. A tied parameter's gradient is clipped by itself, because its copies take the same steps at
    different moments. Gradients that a plain loop would not clip are not clipped here either.

    Args:
        max_norm: None clips nothing.
        group: gloo group of all workers, which update at the same moment; None if they do not.
        stages: number of stages of this worker.
        is_replica_0: whether this worker adds the norms of its stages to the sum; other replicas have the same norms.
    """

    def __init__(
        self, max_norm: float | None, group: Any, *, stages: int, is_replica_0: bool, meter: WorkerMeter
    ) -> None:
        self._max_norm, self._group = max_norm, group
        self._stages, self._is_replica_0, self._meter = stages, is_replica_0, meter
        self._waiting: list[StageReplica] = []

    def update(self, replica: StageReplica) -> None:
        """Update a stage whose gradients are averaged, or wait to update all the worker's stages together."""
        if not self._max_norm:
            replica.step()
        elif not self._group:
            nn.utils.clip_grad_norm_(replica.averager.parameters, self._max_norm)
            replica.step()
        else:
            self._waiting.append(replica)
            if len(self._waiting) == self._stages:
                self._update_together(self._max_norm)

    def _update_together(self, max_norm: float) -> None:
        """Update all stages of the worker at the end of its round, when no other worker needs anything from it."""
        counted: list[nn.Parameter] = []
        held: list[nn.Parameter] = []
        for replica in self._waiting:
            for tied in replica.tied:
                tied.take_sum()
            own = replica.averager.parameters
            counted += [*own, *(tied.parameter for tied in replica.tied if tied.is_first)]
            held += [*own, *(tied.parameter for tied in replica.tied)]
        nn.utils.clip_grads_with_norm_(held, max_norm, self._norm_over_stages(counted))
        for replica in self._waiting:
            replica.step()
            for tied in replica.tied:
                tied.optimizer.step()
            replica.updated()
        self._waiting.clear()

    def _norm_over_stages(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """The norm of the gradients of all stages, a scalar."""
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients).double().item() if self._is_replica_0 else 0.0
        total = torch.tensor(norm**2, dtype=torch.float64)
        with self._meter.averaging, PeerErrorContext("the norm of the gradients was not summed over all workers"):
            dist.all_reduce(total, group=self._group)
        self._meter.count_sent(total.nbytes)
        return total.sqrt()
