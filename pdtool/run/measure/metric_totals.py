"""The loss and the user's metrics of a validation: added up over the minibatches, then over the workers."""

from __future__ import annotations

import math
from typing import Any

from pdtool.errors import PdtoolError
from pdtool.frontend.model_file import ModelFile
from pdtool.run.processes.collectives import all_gather


class MetricTotals:
    """Sums and counts by name; those of a worker without the last stage stay empty."""

    def __init__(self, file: ModelFile) -> None:
        self._file = file
        self._totals: dict[str, tuple[Any, float]] = {}

    def add(self, output: Any, target: Any, samples: int) -> None:
        """Add a minibatch: what the model and the dataset give for it, and its number of samples."""
        loss = float(self._file.loss(output, target))
        metrics = {"loss": (loss * samples, float(samples)), **self._file.metrics(output, target)}
        self._totals = _sum([self._totals, metrics])

    def summarize(self, group: Any, where: str) -> dict[str, float]:
        """Return the loss and the figures over all workers of `group`, on each of them.

        Args:
            where: which validation it is, for an error.

        Raises:
            PdtoolError: one of them is not a number.
        """
        totals = _sum(all_gather(self._totals, group, "the validation metrics"))  # in order: the same on all
        loss, samples = totals.pop("loss")
        figures = {"loss": loss / samples} | self._file.summarize_metrics(totals)
        for name, value in figures.items():
            if not math.isfinite(value):
                raise PdtoolError(f"{where} gives {name} {value}", "try a lower learning rate")
        return figures


def _sum(parts: list[dict[str, tuple[Any, float]]]) -> dict[str, tuple[Any, float]]:
    total: dict[str, tuple[Any, float]] = {}
    for part in parts:
        for name, (value, count) in part.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = (before[0] + value, before[1] + count)
    return total
