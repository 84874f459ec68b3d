"""The user's optimizer and learning-rate schedule over some of the parameters, with its state by name."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdtool.errors import ModelError
from pdtool.frontend.modelfile import ModelFile
from pdtool.run.correct import Correction, Steps

LAST = "last_step"  # key of a correction's memory


class Updater:
    """Steps some parameters.

    Args:
        correction, delay: of steps that come `delay` updates late.

    Attributes:
        updates: steps taken, those of the runs that this one resumed included.
    """

    def __init__(
        self,
        file: ModelFile,
        parameters: Mapping[str, nn.Parameter],
        correction: Correction | None = None,
        delay: int = 0,
    ) -> None:
        self.parameters = dict(parameters)
        self.updates = 0
        self.optimizer = _optimizer(file, self.parameters)
        self.steps = Steps(correction, list(self.parameters.values()) if self.optimizer else [], delay)
        self.scheduler = file.scheduler(self.optimizer) if self.optimizer else None

    def step(self) -> None:
        """One optimizer step with the gradients that are there, which are then cleared."""
        if self.optimizer:
            self.steps.take(self.optimizer, self.updates)
            self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        if self.scheduler:
            try:
                self.scheduler.step()
            except TypeError as error:
                raise ModelError(
                    f"the learning-rate schedule {type(self.scheduler).__name__} cannot be stepped ({error})",
                    "use one that is stepped after each update, without a metric",
                ) from error

    @property
    def _last(self) -> dict[int, Tensor]:
        return {id(p): last for p, last in zip(self.steps.parameters, self.steps.last, strict=True)}

    def state(self) -> Iterator[tuple[str, str, Tensor]]:
        """(parameter, key, value): momentum and the like, and the number of updates; numbers as tensors."""
        for name, parameter in self.parameters.items():
            yield name, "updates", torch.tensor(self.updates)
            state = self.optimizer.state.get(parameter, {}) if self.optimizer else {}
            for key, value in state.items():
                if isinstance(value, Tensor):
                    yield name, key, value
                elif isinstance(value, (int, float)):
                    yield name, f"{key}:number", torch.tensor(value)
            if id(parameter) in self._last:
                yield name, LAST, self._last[id(parameter)]

    def load(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Inverse of `state`, from {parameter: {key: value}}; the schedule is run on to the number of updates."""
        for name, parameter in self.parameters.items():
            for key, value in state.get(name, {}).items():
                if key == "updates":
                    self.updates = int(value)
                elif key == LAST:
                    if id(parameter) in self._last:
                        self._last[id(parameter)].copy_(value)
                elif self.optimizer and key.endswith(":number"):
                    self.optimizer.state[parameter][key.removesuffix(":number")] = value.item()
                elif self.optimizer:
                    # Adam and its kind keep their step counts on the CPU
                    self.optimizer.state[parameter][key] = value if value.dim() == 0 else value.to(parameter.device)
        if self.scheduler:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=".*lr_scheduler.step.*before.*optimizer.step")
                for _ in range(self.updates):
                    self.scheduler.step()


def _optimizer(file: ModelFile, parameters: Mapping[str, nn.Parameter]) -> Optimizer | None:
    """The user's, or none where nothing is to be trained: all is frozen, or the user picks none of these."""
    if not any(p.requires_grad for p in parameters.values()):
        return None
    try:
        return file.optimizer(list(parameters.items()))
    except ModelError as error:
        if "empty parameter list" in str(error.__cause__):
            return None
        raise
