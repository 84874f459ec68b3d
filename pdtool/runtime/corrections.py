"""Corrections for late gradients (--correction), and how they change the optimizer's steps.

An asynchronous pipeline applies a gradient tau updates after its forward; tau is the delay of the stage in steady
state. `DelayCompensation` lists the methods with their sources, and `CompensatedSteps` takes the steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdtool.errors import UsageError

_NESTEROV_GAIN = 0.9


@dataclass(frozen=True)
class DelayCompensation:
    """The method that the user asked for with --correction; `value` is K or G.

    lr-discount[=K]     lr / tau^p with p = max(0, 1 - t/K) at update t; without K always p = 1
                        (Yang et al., "PipeMare", MLSys'21, section 3.1; without K Zhang et al., IJCAI'16, section 3.2)
    weight-prediction   forwards read w + tau d, where d is the last step: the weights that the gradient will meet
                        (Chen et al., "SpecTrain", 2018, equation 4: there d is -lr times the momentum, which equals
                        SGD's last step; for Adam it is the prediction of Guan et al., "XPipe", 2019, section 3.2)
    nesterov[=G]        d <- G d + (1 - G) step, w <- w + d, and forwards read w + G d; G is 0.9 unless given
                        (Ajanthan et al., ICML'25: look-ahead as a correction of delay, with the gradient discounted by
                        1 - G; here for the step of any optimizer)

    tau is the delay of the stage in steady state, in updates. The first two do nothing at a stage without delay; the
    first does nothing at a delay of 1 either.
    """

    kind: str
    value: float | None = None

    @property
    def least_delay(self) -> int:
        """The delay, in updates, from which on the method changes anything."""
        return {"lr-discount": 2, "weight-prediction": 1}.get(self.kind, 0)

    @classmethod
    def parse(cls, text: str) -> DelayCompensation:
        """Read what `str` writes; raises UsageError."""
        kind, equals, value = text.partition("=")
        try:
            number = float(value) if equals else None
        except ValueError:
            number = math.nan
        is_valid = {
            "lr-discount": number is None or 0 < number < math.inf,
            "weight-prediction": number is None,
            "nesterov": number is None or 0 <= number < 1,
        }
        if not is_valid.get(kind):
            remedy = "pass lr-discount, lr-discount=UPDATES, weight-prediction, nesterov, or nesterov=G with 0 <= G < 1"
            raise UsageError(f"correction {text!r} is unknown", remedy)
        return cls(kind, number)

    @property
    def extrapolates_weights(self) -> bool:
        """Whether forwards read weights that differ from the optimizer's."""
        return self.kind != "lr-discount"

    def __str__(self) -> str:
        return self.kind if self.value is None else f"{self.kind}={self.value:g}"


class CompensatedSteps:
    """The steps of one optimizer, compensated for their delay.

    Args:
        method: None takes plain steps.
        parameters: the parameters that the optimizer steps; frozen ones no longer move.
        delay: tau, in updates.

    """

    def __init__(self, method: DelayCompensation | None, parameters: Sequence[nn.Parameter], delay: int) -> None:
        self._kind, self._value = (method.kind, method.value) if method else ("", None)
        self._delay = delay
        self._gain = _NESTEROV_GAIN if self._value is None else self._value
        self._factor = {"weight-prediction": float(delay), "nesterov": self._gain}.get(self._kind, 0.0)
        self._extrapolated = list(parameters) if self._factor else []
        self._last_steps: dict[nn.Parameter, Tensor] = {}  # d, unless the method does not extrapolate weights
        self._select_parameters()

    def step(self, optimizer: Optimizer, update: int) -> None:
        """Take step number `update` (from 0) with the gradients of the parameters."""
        if self._kind == "lr-discount" and self._delay > 1:
            self._discounted_step(optimizer, update)
        elif self._extrapolated:
            self._recorded_step(optimizer)
        else:
            optimizer.step()

    def _recorded_step(self, optimizer: Optimizer) -> None:
        """Take a step and keep it, to extrapolate the weights."""
        self._select_parameters()
        before = [p.detach().clone() for p in self._last_steps]
        optimizer.step()
        with torch.no_grad():
            for (p, last_step), old in zip(self._last_steps.items(), before, strict=True):
                if self._kind == "nesterov":
                    last_step.mul_(self._gain).add_(p - old, alpha=1 - self._gain)
                else:
                    torch.sub(p, old, out=last_step)
            if self._kind == "nesterov":  # all at the end: parameters may share memory
                for (p, last_step), old in zip(self._last_steps.items(), before, strict=True):
                    torch.add(old, last_step, out=p.data)

    def _select_parameters(self) -> None:
        """Keep the last steps of trained parameters, and start new ones for parameters that have become trainable."""
        trained = [p for p in self._extrapolated if p.requires_grad]
        self._last_steps = {p: self._last_steps[p] if p in self._last_steps else torch.zeros_like(p) for p in trained}

    def _discounted_step(self, optimizer: Optimizer, update: int) -> None:
        power = 1.0 if self._value is None else max(0.0, 1 - update / self._value)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / self._delay**power
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def extrapolated_weights(self) -> Mapping[nn.Parameter, Tensor]:
        """Return the tensor that forwards read instead of a parameter, of its shape."""
        return {p: p.detach() + self._factor * last_step for p, last_step in self._last_steps.items()}

    def state_dict(self, parameter: nn.Parameter) -> dict[str, Tensor]:
        """Return the correction's state for a parameter, for the optimizer's record of it in a checkpoint."""
        return {"last_step": self._last_steps[parameter]} if parameter in self._last_steps else {}

    def load_state_dict(self, parameter: nn.Parameter, record: Mapping[str, Any]) -> None:
        """Load that state from the optimizer's `record` in a checkpoint."""
        if parameter in self._last_steps and "last_step" in record:
            self._last_steps[parameter].copy_(record["last_step"])
