"""Corrections for gradients that come late: an asynchronous pipeline applies them tau updates after their forward.

    lr-discount[=K]     lr / tau^p with p = max(0, 1 - t/K) at update t; without K always p = 1
                        (Yang et al., "PipeMare", MLSys'21, section 3.1; without K Zhang et al., IJCAI'16, section 3.2)
    weight-prediction   forwards see w + tau d, where d is the last step: the weights that the gradient will meet
                        (Chen et al., "SpecTrain", 2018, equation 4: there d is -lr times the momentum, which is what
                        SGD's last step is; for Adam it is what Guan et al., "XPipe", 2019, section 3.2 predict with)
    nesterov[=G]        d <- G d + (1 - G) step, w <- w + d, and forwards see w + G d; G is 0.9 unless given
                        (Ajanthan et al., ICML'25: look-ahead as a correction of delay, with the gradient discounted by
                        1 - G; here for the step of any optimizer)

tau is the delay of the stage in steady state; a stage without delay is left alone by the first two, and by the first
one also a stage with a delay of 1.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pdtool.errors import UsageError


@dataclass(frozen=True)
class Correction:
    """What the user asked for; `value` is K or G."""

    kind: str
    value: float | None = None

    @classmethod
    def parse(cls, text: str) -> Correction:
        """Inverse of `str`; raises UsageError."""
        kind, equals, value = text.partition("=")
        try:
            number = float(value) if equals else None
        except ValueError:
            number = math.nan
        good = {
            "lr-discount": number is None or 0 < number < math.inf,
            "weight-prediction": number is None,
            "nesterov": number is None or 0 <= number < 1,
        }
        if not good.get(kind):
            raise UsageError(
                f"correction {text!r} is unknown",
                "give lr-discount, lr-discount=UPDATES, weight-prediction, nesterov, or nesterov=G with 0 <= G < 1",
            )
        return cls(kind, number)

    @property
    def ahead(self) -> bool:
        """Whether forwards see other weights than those that the optimizer holds."""
        return self.kind != "lr-discount"

    def __str__(self) -> str:
        return self.kind if self.value is None else f"{self.kind}={self.value:g}"


class Steps:
    """Takes the steps of one optimizer, corrected.

    Args:
        parameters: that it steps.
        delay: tau, in updates.

    Attributes:
        last: d of each parameter, where it is needed.
        ahead: forwards see w + ahead * d; 0: they see w.
    """

    def __init__(self, correction: Correction | None, parameters: Sequence[nn.Parameter], delay: int) -> None:
        self.kind, self.delay = correction.kind if correction else "", delay
        self.value = correction.value if correction else None
        self.gain = (0.9 if self.value is None else self.value) if self.kind == "nesterov" else 0.0
        self.ahead = {"weight-prediction": float(delay), "nesterov": self.gain}.get(self.kind, 0.0)
        self.parameters = [p for p in parameters if p.requires_grad] if self.ahead else []
        self.last = [torch.zeros_like(p) for p in self.parameters]

    def take(self, optimizer: Optimizer, number: int) -> None:
        """Step number `number` (from 0) with the gradients that are there."""
        if self.kind == "lr-discount" and self.delay > 1:
            self._discounted(optimizer, number)
            return
        before = [p.detach().clone() for p in self.parameters]
        optimizer.step()
        with torch.no_grad():
            for p, old, last in zip(self.parameters, before, self.last, strict=True):
                if self.kind == "nesterov":
                    last.mul_(self.gain).add_(p - old, alpha=1 - self.gain)
                    torch.add(old, last, out=p.data)
                else:
                    torch.sub(p, old, out=last)

    def _discounted(self, optimizer: Optimizer, number: int) -> None:
        power = 1.0 if self.value is None else max(0.0, 1 - number / self.value)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] / self.delay**power
        optimizer.step()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def seen(self) -> Mapping[int, Tensor]:
        """What forwards see instead of a parameter, by its id."""
        return {id(p): p.detach() + self.ahead * last for p, last in zip(self.parameters, self.last, strict=True)}
