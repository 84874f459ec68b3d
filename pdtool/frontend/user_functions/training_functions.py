"""What the user's file says of training: `loss`, `optimizer`, `scheduler`, `metrics` and others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from pdtool.errors import FieldError
from pdtool.frontend.training_contract import TrainingOptions, check_optimizer, takes_total
from pdtool.frontend.user_functions.user_file import UserFile

RESERVED_METRICS = {"split", "epoch", "step", "loss"}  # a line of metrics.jsonl has them beside the user's metrics
_MAX_METRIC_NAME = 100
NamedParameters = Iterable[tuple[str, nn.Parameter]]


class TrainingFunctions(UserFile):
    """The functions and constants of a user's file that say how to train."""

    @cached_property
    def training(self) -> TrainingOptions:
        """The constants of training, checked."""
        try:
            return TrainingOptions.of(vars(self.module))
        except FieldError as fault:
            raise self.error(f"{fault.field}: {fault}") from fault

    def loss(self, output: Any, target: Any) -> Tensor:
        """Return the user's loss: a tensor of one element, the mean over the minibatch."""
        value = self.call_with_settings("loss", output, target)
        if not isinstance(value, Tensor) or value.numel() != 1:
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise self.error_in("loss", f"loss() returned {shape}, not a scalar tensor")
        return value

    def optimizer(self, named_parameters: NamedParameters) -> Optimizer:
        """Make the user's optimizer over all parameters of the model, under their original names."""
        returned = self.call_with_settings("optimizer", named_parameters)
        try:
            return check_optimizer(returned)
        except FieldError as fault:
            raise self.error_in("optimizer", f"{fault.field} {fault}") from fault

    def scheduler(self, optimizer: Optimizer, total_steps: int) -> LRScheduler | None:
        """Make the user's learning-rate schedule; None without one.

        Args:
            total_steps: how often it will be stepped in the whole run, for a scheduler() that asks for it.
        """
        if not self.has("scheduler"):
            return None
        total = [total_steps] if self.scheduler_takes_total else []
        scheduler = self.call_with_settings("scheduler", optimizer, *total)
        if not callable(getattr(scheduler, "step", None)):
            raise self.error(f"scheduler() returned {type(scheduler).__name__}, not an LRScheduler")
        return scheduler  # type: ignore[no-any-return]

    @property
    def scheduler_takes_total(self) -> bool:
        """Whether scheduler() asks for `total_steps`."""
        return self.has("scheduler") and takes_total(self.module.scheduler)

    def after_update(self, named_parameters: NamedParameters, update: int) -> None:
        """Call the user's function, if there is one, with parameters after their update number `update`, from 1."""
        if self.has("after_update"):
            with torch.no_grad():
                self.call_with_settings("after_update", named_parameters, update)

    def metrics(self, output: Any, target: Any) -> dict[str, tuple[Any, float]]:
        """Return the user's metrics as {name: (sum, count)}; {} without any.

        A sum is a number, or for `summarize_metrics` also a tensor of any shape, then on the CPU.
        """
        if not self.has("metrics"):
            return {}
        returned = self.call_with_settings("metrics", output, target)
        as_sum = _tensor_or_number if self.has("summarize_metrics") else float
        try:
            metrics = {str(name): (as_sum(total), float(number)) for name, (total, number) in returned.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            remedy = "return {name: (sum, count)}; sums that are tensors need a function summarize_metrics"
            raise self.error_in("metrics", f"metrics() returned {returned!r:.200}", remedy) from error
        self._check_metric_names("metrics", metrics)
        return metrics

    def summarize_metrics(self, totals: Mapping[str, tuple[Any, float]]) -> dict[str, float]:
        """Return the figures of a validation: the means, or what the user's function makes of the totals.

        Args:
            totals: what `metrics` returned, {name: (sum, count)}, added up over all minibatches.
        """
        if not self.has("summarize_metrics"):
            return {name: total / count if count else 0.0 for name, (total, count) in totals.items()}
        returned = self.call_with_settings("summarize_metrics", dict(totals))
        try:
            figures = {str(name): float(value) for name, value in returned.items()}
        except (AttributeError, TypeError, ValueError, RuntimeError) as error:
            raise self.error_in(
                "summarize_metrics", f"summarize_metrics() returned {returned!r:.200}", "return {name: number}"
            ) from error
        self._check_metric_names("summarize_metrics", figures)
        return figures

    def _check_metric_names(self, function: str, names: Iterable[str]) -> None:
        for name in names:
            if not 0 < len(name) <= _MAX_METRIC_NAME or not name.isprintable():
                short = repr(name if len(name) <= _MAX_METRIC_NAME else name[:_MAX_METRIC_NAME] + "…")
                remedy = f"use 1 to {_MAX_METRIC_NAME} printable characters"
                raise self.error(f"{function}() names {short}, which cannot be printed in a table", remedy)
            if name in RESERVED_METRICS:
                raise self.error(f"{function}() names {name!r}, which pdtool logs itself", "rename it")


def _tensor_or_number(total: Any) -> Any:
    """A sum as it is added up and sent to other workers."""
    return total.detach().cpu() if isinstance(total, Tensor) else float(total)
