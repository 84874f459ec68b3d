"""`--target`: the metric of the validation at which a run stops."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from pdtool.errors import UsageError, suggestion
from pdtool.units import format_metric

_LOWER_IS_BETTER = ("loss", "perplexity")
_HIGHER_IS_BETTER = ("accuracy",)
_RELATIONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}


@dataclass(frozen=True)
class Target:
    """A metric of the validation at which a run stops: `accuracy=0.98`, `nll<=4`.

    Attributes:
        relation: `<=`, `>=`, `<`, `>` or `=`; `=` is read as `<=` for loss and perplexity, else as `>=`.
    """

    metric: str
    relation: str
    value: float

    @classmethod
    def parse(cls, text: str) -> Target:
        """Read what `str` writes; raises UsageError."""
        try:
            metric, relation, number = re.split("([<>]=?|=)", text, maxsplit=1)
            value = float(number)
        except ValueError:  # there is no relation, or no number after it
            metric, relation, value = "", "", math.nan
        metric = metric.strip()
        if not metric or not metric.isprintable() or not math.isfinite(value):
            what = f"target {text!r} is not METRIC=NUMBER, where = can also be <, <=, > or >="
            raise UsageError(what, "write accuracy=0.98, loss=0.5 or nll<=4")
        return cls(metric, relation, value)

    def __str__(self) -> str:
        return f"{self.metric}{self.relation}{self._number}"

    @property
    def _number(self) -> str:
        """The value with all its digits: `0.98`, `4`."""
        return repr(self.value).removesuffix(".0")

    @property
    def effective_relation(self) -> str:
        """The relation that is tested: `=` stands for `<=` or `>=`."""
        if self.relation != "=":
            return self.relation
        return "<=" if self.metric in _LOWER_IS_BETTER else ">="

    @property
    def interpretation(self) -> str | None:
        """Say how `=` was read, for the user to check; None if the relation was explicit."""
        if self.relation != "=":
            return None
        effective = self.effective_relation
        text = f"target {self} is read as {self.metric} {effective} {self._number}"
        if self.metric in (*_LOWER_IS_BETTER, *_HIGHER_IS_BETTER):
            return text
        return f"{text}; write {self.metric}<={self._number} if lower is better"

    def doubt(self, metrics: Mapping[str, float]) -> str:
        """Ask whether a share was meant if the target is above 1 for a metric between 0 and 1; "" otherwise.

        Args:
            metrics: metrics before training.
        """
        now = metrics.get(self.metric, math.nan)
        if not (self.effective_relation.startswith(">") and self.value > 1 and 0 <= now <= 1):
            return ""
        share = replace(self, value=self.value / 100)
        return (
            f"target {self}: {self.metric} is {format_metric(now)} before training; if it is a fraction (at most 1), "
            f"it never reaches the target: pass --target '{share}'"
        )

    def is_reached(self, metrics: Mapping[str, float], undefined: Collection[str] = ()) -> bool:
        """Whether the metrics of a validation reach the target.

        Args:
            undefined: metrics without a figure, which do not reach the target.

        Raises:
            UsageError: the model does not report this metric.
        """
        if self.metric in undefined:
            return False
        if self.metric not in metrics:
            what = f"target {self}: the model reports no metric {self.metric!r}"
            raise UsageError(what, f"{suggestion(self.metric, metrics)} it reports: {', '.join(metrics)}".lstrip())
        return bool(_RELATIONS[self.effective_relation](metrics[self.metric], self.value))
