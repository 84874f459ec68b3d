"""The user's optimizer and learning-rate scheduler over some of the parameters, with its state by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdtool.errors import ModelError
from pdtool.frontend.modelfile import ModelFile
from pdtool.run.weights.delay_compensation import CompensatedSteps, DelayCompensation

_LAST_STEP = "last_step"  # key of the delay compensation's state in a checkpoint
_NUMBER = ":number"  # suffix of a key whose value is a Python number


class NamedOptimizer:
    """Steps some of the parameters, and saves and loads its state under their names.

    Args:
        parameters: by their names in the original model.
        compensation: for steps that come `delay` updates late.

    Attributes:
        steps: the optimizer's steps, compensated for their delay.
        updates: steps taken, including those of the runs that this one resumed.
    """

    def __init__(
        self,
        file: ModelFile,
        parameters: Mapping[str, nn.Parameter],
        compensation: DelayCompensation | None = None,
        delay: int = 0,
    ) -> None:
        self._file, self.parameters = file, dict(parameters)
        self.updates = 0
        self.optimizer = _user_optimizer(file, self.parameters)
        stepped = list(self.parameters.values()) if self.optimizer else []
        self.steps = CompensatedSteps(compensation, stepped, delay)
        self._scheduler = file.scheduler(self.optimizer) if self.optimizer else None

    def step(self) -> None:
        """Take one step with the gradients of the parameters, and clear them.

        Raises:
            ModelError: the optimizer or the learning-rate scheduler cannot be stepped after each update.
        """
        if self.optimizer:
            try:
                self.steps.step(self.optimizer, self.updates)
            except Exception as error:
                raise self._file.error_at(error, f"step {self.updates} of {type(self.optimizer).__name__}") from error
            self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        self._step_scheduler()

    def _step_scheduler(self) -> None:
        if self._scheduler:
            name = type(self._scheduler).__name__
            try:
                self._scheduler.step()
            except TypeError as error:
                raise self._file.error(
                    f"the learning-rate schedule {name} cannot be stepped ({error})",
                    "use one that is stepped after each update, without a metric",
                ) from error
            except Exception as error:
                raise self._file.error_at(error, f"the learning-rate schedule {name}") from error

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield (parameter, key, value): momentum and the like, and the number of updates; numbers as tensors."""
        for name, parameter in self.parameters.items():
            yield name, "updates", torch.tensor(self.updates)
            state = self.optimizer.state.get(parameter, {}) if self.optimizer else {}
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield name, key, value
                elif isinstance(value, (int, float)):
                    yield name, f"{key}{_NUMBER}", torch.tensor(value)
            if parameter in self.steps.last_steps:
                yield name, _LAST_STEP, self.steps.last_steps[parameter]

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take over what `state` yielded, as {parameter: {key: value}}; the scheduler catches up by `updates` steps."""
        for name, parameter in self.parameters.items():
            for key, value in state.get(name, {}).items():
                self._load_value(parameter, key, value)
        if self._scheduler:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step")
                for _ in range(self.updates):
                    self._step_scheduler()

    def _load_value(self, parameter: nn.Parameter, key: str, value: Tensor) -> None:
        if key == "updates":
            self.updates = int(value)
        elif key == _LAST_STEP:
            if parameter in self.steps.last_steps:
                self.steps.last_steps[parameter].copy_(value)
        elif self.optimizer and key.endswith(_NUMBER):
            self.optimizer.state[parameter][key.removesuffix(_NUMBER)] = value.item()
        elif self.optimizer:
            # Adam and its kind keep their step counts on the CPU
            self.optimizer.state[parameter][key] = value if value.dim() == 0 else value.to(parameter.device)


def _user_optimizer(file: ModelFile, parameters: Mapping[str, nn.Parameter]) -> Optimizer | None:
    """The user's optimizer; None where nothing is trained: all is frozen, or it takes none of these parameters."""
    if not any(p.requires_grad for p in parameters.values()):
        return None
    try:
        return file.optimizer(list(parameters.items()))
    except ModelError as error:
        if "empty parameter list" in str(error.__cause__):
            return None
        raise
