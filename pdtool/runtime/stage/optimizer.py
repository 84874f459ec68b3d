"""The user's optimizer and learning-rate schedule over some of the parameters, with its state by name.

`NamedOptimizer` calls optimizer() of model.py with all parameters of the model, as a plain training loop does, so it
gets the user's parameter groups. Each part of the model then keeps its own parameters, in the same groups.
`LearningRateSchedule` steps the user's schedule after each update, or at the end of each epoch.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.utils._python_dispatch import TorchDispatchMode

from pdtool.errors import FieldError, ModelError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.random_numbers import derive_seed, seed_generators
from pdtool.frontend.update_proof import (
    NAMES_OF_GROUP,
    keep_parameters,
    own_zero_grad,
    schedules_by_user_code,
    set_mode,
    user_code_in_step,
)
from pdtool.frontend.variable_uses import names_used
from pdtool.runtime.corrections import CompensatedSteps, DelayCompensation
from pdtool.runtime.stage.component import pack, unpack
from pdtool.runtime.stage.optimizer_state import NO_STATE, OptimizerState, is_plain

_MAX_SETTINGS = 500


class NamedOptimizer:
    """Steps some of the parameters, and saves and loads its state under their names.

    Args:
        model_parameters: all parameters of the model, each once, by their names there; optimizer()'s argument. Those
            that are not among `parameters` may be fake tensors.
        parameters: those to step here, by their names in a stage.
        length: length of the run, in updates of these parameters.
        first_names: the names of parameters in checkpoints, if they differ.
        compensation: correction for steps that come `delay` updates late.
        seed: seed of the run. The user's own optimizer and after_update() draw random numbers that depend only on it,
            the update and the parameters: equal at all replicas and holders, and in a resumed run.

    Attributes:
        optimizer: None if the user's optimizer takes none of the parameters.
        names: the names that the parameters are saved under.
        settings: its class and the values of its parameter groups as optimizer() makes them, for comparison.
        schedule: schedule of its learning rate.
        steps: the optimizer's steps, corrected for their delay.
        updates: steps taken, including those of the runs that this one resumed.
        is_by_user_code: whether code outside torch takes part in an update and may change parameters.
    """

    key = "optimizer"

    def __init__(
        self,
        file: ModelFile,
        model_parameters: Mapping[str, nn.Parameter],
        parameters: Mapping[str, nn.Parameter],
        length: RunLength | None = None,
        compensation: DelayCompensation | None = None,
        delay: int = 0,
        seed: int = 0,
        first_names: Mapping[str, str] | None = None,
    ) -> None:
        self._file, self.parameters = file, dict(parameters)
        self._saved = {(first_names or {}).get(name, name): p for name, p in parameters.items()}
        self.names = self._saved.keys()
        self._seed = derive_seed(seed, "update", *parameters)
        self.updates, self._resumed_after = 0, -1
        self._has_after_update = file.has("after_update")
        made = None
        if parameters or self._has_after_update:
            made = _user_optimizer(file, model_parameters, self.parameters)
        self._named = {name: made for name, value in vars(file.module).items() if made and value is made}
        trains = made and (any(group["params"] for group in made.param_groups) or _may_add_groups(file))
        self.optimizer = made if trains else None
        self.settings = {"optimizer()": _settings_of(self.optimizer)} if self.optimizer else {}
        stepped = list(self.parameters.values()) if self.optimizer else []
        self.steps = CompensatedSteps(compensation, stepped, delay)
        is_step_by_user = self.optimizer is not None and bool(user_code_in_step(file, self.optimizer))
        self._may_draw = is_step_by_user or self._has_after_update
        self.schedule = LearningRateSchedule(file, self.optimizer, length or RunLength(), seed)
        self.is_by_user_code = self._may_draw or self.schedule.is_by_user_code
        self._first_trained = {name: p.requires_grad for name, p in self._saved.items()}
        self._groups = len(self._param_groups)
        self._state = OptimizerState(file, self.optimizer, steps_by_user=is_step_by_user) if self.optimizer else None

    @property
    def _param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups if self.optimizer else []

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the first parameter group; None if there is none, or if it is on a GPU."""
        rate = next((group.get("lr") for group in self._param_groups), None)
        if isinstance(rate, Tensor) and rate.device.type == "cpu":
            rate = float(rate)
        return rate if isinstance(rate, (int, float)) else None

    def step(self) -> None:
        """Take one step with the gradients of the parameters, call after_update(), and clear the gradients.

        Raises:
            ModelError: the optimizer or the learning-rate schedule cannot be stepped after each update.
        """
        if self._may_draw and self.parameters:
            device = next(iter(self.parameters.values())).device
            seed_generators(derive_seed(self._seed, self.updates), device)
        if self.optimizer:
            try:
                self.steps.step(self.optimizer, self.updates)
            except Exception as error:
                name = type(self.optimizer).__name__
                if isinstance(error, KeyError) and self.updates == self._resumed_after:
                    what = f"{name} looks for {error} in its state, but the run to resume was trained without it"
                    remedy = f"give {name} the settings of that run, or start a new run"
                    raise self._file.error_in("optimizer", what, remedy) from error
                raise self._file.error_at(error, f"step {self.updates} of {name}") from error
        self.updates += 1
        if self._has_after_update:
            vars(self._file.module).update(self._named)  # this worker may have made several optimizers
            self._file.after_update(list(self.parameters.items()), self.updates)
        self.schedule.update_done()
        self._keep_own_parameters()
        if self.optimizer:
            try:
                own_zero_grad(self.optimizer)
            except Exception as error:
                raise self._file.error_at(error, f"{type(self.optimizer).__name__}.zero_grad()") from error
        for parameter in self.parameters.values():  # also for those that the user's optimizer does not take
            parameter.grad = None

    def _keep_own_parameters(self) -> None:
        """Leave out the parameters of a newly added group that are not stepped here."""
        if self.optimizer and len(self._param_groups) != self._groups:
            keep_parameters(self.optimizer, {id(p) for p in self.parameters.values()})
            self._groups = len(self._param_groups)

    def set_mode(self, *, training: bool) -> None:
        """Put an optimizer with modes, as schedule-free ones, into training or evaluation mode.

        It may change the values of the parameters. Raises ModelError.
        """
        if self.optimizer:
            try:
                set_mode(self.optimizer, training=training)
            except Exception as error:
                what = f"{type(self.optimizer).__name__}.{'train' if training else 'eval'}()"
                raise self._file.error_at(error, what) from error

    def fault(self, fault: FieldError) -> ModelError:
        """Make the error for user code that changed a parameter; it names the function."""
        function = "after_update" if self.updates and self._has_after_update else "optimizer"
        return self._file.error_in(function, f"the parameter {fault.field} {fault}")

    def state_dict(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the checkpoint's content: for each parameter the updates, its state, and whether the user's code has
        frozen or unfrozen it since optimizer() was called."""
        records = self._state.records(self._saved.values(), self.schedule.sets) if self._state else {}
        for name, parameter in self._saved.items():
            record = {"updates": self.updates, **records.get(parameter, NO_STATE)}
            if parameter.requires_grad != self._first_trained[name]:
                record["is_trained"] = parameter.requires_grad
            record |= self.steps.state_dict(parameter)
            yield from ((name, entry, tensor) for entry, tensor in pack(record))

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the saved state; the learning-rate schedule catches up."""
        records = {self._saved[name]: unpack(entries) for name, entries in state.items()}
        self.updates = self._resumed_after = next((record["updates"] for record in records.values()), 0)
        self.schedule.catch_up(self.updates)
        self._keep_own_parameters()
        for parameter, record in records.items():
            parameter.requires_grad_(record.get("is_trained", parameter.requires_grad))
            self.steps.load_state_dict(parameter, record)
        if self._state:
            self._state.load(records)


def _settings_of(optimizer: Optimizer) -> str:
    """The settings of an optimizer, as `Adam(lr=0.1, ...)`; a digest stands for what is too long."""
    groups = dict.fromkeys(map(_plain_values, optimizer.param_groups))
    return _shortened(f"{type(optimizer).__name__}({'; '.join(groups)})")


def _schedule_settings(scheduler: object) -> str:
    """The settings of a learning-rate schedule, as `SequentialLR(...) of LinearLR(...) of StepLR(...)`.

    What a function computes is not known. A schedule of the user's own gives only its name, because it may keep what
    differs between workers, such as a time.
    """
    is_of_torch = type(scheduler).__module__ == "torch.optim.lr_scheduler"
    attributes: dict[str, Any] = vars(scheduler) if is_of_torch else {}
    parts = [
        f"{type(scheduler).__name__}({_plain_values(attributes)})",
        *map(_schedule_settings, attributes.get("_schedulers", ())),
    ]
    return _shortened(" of ".join(parts))


def _plain_values(settings: Mapping[str, Any]) -> str:
    """`key=value, ...` of what is plain and public in a parameter group, or in a schedule's attributes."""
    public = sorted(key for key in settings if key not in NAMES_OF_GROUP and key[0] != "_")
    return ", ".join(f"{key}={settings[key]!r}" for key in public if is_plain(settings[key]))


def _shortened(text: str) -> str:
    return text if len(text) < _MAX_SETTINGS else f"{text[:_MAX_SETTINGS]}... {derive_seed(text):x}"


@contextmanager
def without_changes(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Undo what user code in this context does to parameters: their values, and the hooks of their gradients.

    A worker with several optimizers calls optimizer() for each, with all parameters; a plain loop calls it once.
    """
    before = [
        (p, p.data, p.detach().clone(), p._backward_hooks, {**(p._backward_hooks or {})})
        for p in parameters
        if not (p.is_meta or isinstance(p, FakeTensor))  # which have no values
    ]
    yield
    for parameter, memory, values, hooks, content in before:
        parameter.data = memory.copy_(values)
        if hooks is not None:
            hooks.clear()
            hooks.update(content)
        parameter._backward_hooks = hooks


def _user_optimizer(
    file: ModelFile, model_parameters: Mapping[str, nn.Parameter], kept: Mapping[str, nn.Parameter]
) -> Optimizer:
    """The user's optimizer for only the kept parameters; its groups may be empty.

    Raises:
        ModelError: it cannot be used, or reads values of parameters.
    """
    with _MissingReads() as missing:  # type: ignore[no-untyped-call]
        try:
            optimizer = file.optimizer(list(model_parameters.items()))
        except ModelError:
            if not missing.is_read:
                raise
    if missing.is_read:  # even if it has caught the error
        what = "optimizer() reads the values of parameters, but a worker has only those of its own stages"
        raise file.error(what, "use only names, shapes and types of parameters")
    keep_parameters(optimizer, {id(p) for p in kept.values()})
    return optimizer


def _may_add_groups(file: ModelFile) -> bool:
    """Whether the user's functions may add a parameter group during training, also to an optimizer that has none."""
    functions = filter(file.has, ("optimizer", "scheduler", "after_update"))
    return any("add_param_group" in names_used(file.module, function) for function in functions)


class _MissingReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Detects whether code reads the values of parameters that this worker does not have."""

    is_read = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except DataDependentOutputException:
            self.is_read = True
            raise


@dataclass(frozen=True)
class RunLength:
    """The length of a run, for schedules that end with it.

    Attributes:
        epochs: total, including those of the runs that it resumes.
        updates: updates of the optimizer in all epochs.
        losses_before: validation loss of each epoch of the runs that it resumes.
    """

    epochs: int = 1
    updates: int = 1
    losses_before: Sequence[float] = ()


class LearningRateSchedule:
    """The user's schedule; does nothing without one, or without an optimizer.

    It steps after each update, or with `SCHEDULER_STEP = "epoch"` at the end of each epoch. ReduceLROnPlateau steps at
    the end of each epoch, with the loss of its validation.

    Attributes:
        settings: its class and its numbers as scheduler() makes it, for comparison.
    """

    def __init__(self, file: ModelFile, optimizer: Optimizer | None, length: RunLength, seed: int = 0) -> None:
        self._file, self._length = file, length
        self._seed, self._taken = seed, 0  # steps taken
        self._watched = optimizer.param_groups if optimizer and user_code_in_step(file, optimizer) else []
        self._set_by_it: set[str] = set()  # keys of parameter groups that its steps have set
        self._set_by_others: set[str] = set()  # keys set between its steps
        self._seen: list[dict[str, Any]] = []  # content of the parameter groups at the last call of `_add_changed`
        self._add_changed(self._set_by_others)
        is_by_epoch = file.training.scheduler_step == "epoch"
        self._steps = length.epochs if is_by_epoch else length.updates
        if file.has("scheduler"):
            self._seed_step()
        self._scheduler = file.scheduler(optimizer, self._steps) if optimizer else None
        self._add_changed(self._set_by_it)
        self.is_by_user_code = schedules_by_user_code(self._scheduler)
        self._takes_loss = isinstance(self._scheduler, ReduceLROnPlateau)
        self._is_by_epoch = is_by_epoch or self._takes_loss
        name = f"scheduler() for {self._steps} steps"
        self.settings = {name: _schedule_settings(self._scheduler)} if self._scheduler else {}

    @property
    def length_warning(self) -> str:
        """Say if OneCycleLR was made for a different number of steps than the run will take; else ""."""
        if not isinstance(self._scheduler, OneCycleLR) or self._scheduler.total_steps == self._steps:
            return ""
        return (
            f"OneCycleLR was made for {self._scheduler.total_steps} steps, but the run will take {self._steps}: let "
            "scheduler(optimizer, total_updates) pass total_steps=total_updates"
        )

    def update_done(self) -> None:
        """Step a schedule of updates; raises ModelError if it cannot be stepped."""
        if not self._is_by_epoch:
            self._step()

    def epoch_done(self, validation_loss: float) -> None:
        """Step a schedule of epochs; raises ModelError if it cannot be stepped."""
        if self._is_by_epoch:
            self._step(*([validation_loss] if self._takes_loss else []))

    def catch_up(self, updates: int) -> None:
        """Repeat the steps taken before a checkpoint was written.

        If a schedule knows the length of the run, it goes to the same fraction of it, because another plan may have
        updated the weights more or less often.

        Args:
            updates: updates of the optimizer until then.
        """
        losses = self._length.losses_before
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step")
            if self._file.scheduler_takes_total:
                updates = self._length.updates * len(losses) // self._length.epochs
            for _ in range(updates):
                self.update_done()
            for loss in losses:
                self.epoch_done(loss)

    def _add_changed(self, keys: set[str]) -> None:
        """Add to `keys` all keys whose values in the parameter groups have changed since the last call."""
        now = [dict(group) for group in self._watched]
        for group, before in zip(now, self._seen, strict=False):
            keys |= {key for key, value in group.items() if value is not before.get(key)}
        self._seen = now

    @property
    def sets(self) -> set[str]:
        """Keys of parameter groups that only the schedule sets; recorded if the optimizer's steps may set some too."""
        return self._set_by_it - self._set_by_others

    def _seed_step(self) -> None:
        """Let the user's code draw the same numbers in all stages and replicas, and in a resumed run."""
        seed_generators(derive_seed(self._seed, "scheduler", self._taken))

    def _step(self, *metrics: Any) -> None:
        if not self._scheduler:
            return
        self._add_changed(self._set_by_others)
        self._taken += 1
        if self.is_by_user_code:
            self._seed_step()
        try:
            self._scheduler.step(*metrics)
            self._add_changed(self._set_by_it)
        except Exception as error:
            what = f"the learning-rate schedule {type(self._scheduler).__name__}"
            raise self._file.error_at(error, what) from error
