"""The options of `pdtool simulate` and `pdtool emulate`, which execute a plan without its cluster."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from pdtool.options import values
from pdtool.options.declaration import again, option
from pdtool.options.run_options import RunOptions
from pdtool.options.target import Target
from pdtool.options.values import Choice, Count, Factor, Text
from pdtool.schedule import DEFAULT_MICROBATCHES, RIVALS, schedule_names

_EVENLY = schedule_names(lambda kind: kind.equal_replicas, "and")
MAX_FACTOR = 1e6  # largest scale or slowdown of an emulation; more must be a slip

_computing = partial(option, section="Computing")


def _against(*names: str) -> Any:
    """Declare `--against`, the rivals of a plan."""
    others = ", ".join(name for name in RIVALS if name not in names)
    return option(
        "--against STRATEGY,...",
        Text(values.rivals, default=",".join(names)),
        f"Compare with the best plan of each of these strategies. Also possible: {others}. '' compares with none.",
        section="Output",
    )


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SimulateOptions:
    """How long a plan is simulated, and compared with which others."""

    minibatches: int | None = _computing(
        "--minibatches N", Count(unset="enough to fill, run steadily and drain"), "Length of the simulation."
    )
    schedule: str | None = again(
        RunOptions,
        "schedule",
        help=f"Try another order of work, as `run --schedule` would. {_EVENLY} need the same number of replicas for "
        f"each stage. With a flush, an update has as many minibatches as in the plan, or {DEFAULT_MICROBATCHES} if it "
        "sets no number.",
    )
    against: tuple[str, ...] = _against("data-parallel", "straight", "gpipe", "model-parallel")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class EmulateOptions:
    """How a plan is emulated."""

    against: tuple[str, ...] = _against("data-parallel")
    scale: float | None = _computing(
        "--scale S",
        Factor(1, MAX_FACTOR, unset="so that the cores of this machine can keep up"),
        "Divide bytes and bandwidths by S. Times stay the same.",
    )
    slowdown: float | None = _computing(
        "--slowdown T",
        Factor(1, MAX_FACTOR, unset="so that a minibatch takes 150 ms or more"),
        "Make everything take T times as long.",
    )
    compute: Literal["sleep", "real"] = _computing(
        "--compute",
        Choice(("sleep", "real"), default="sleep"),
        "Sleep for the times in the profile, or train the model on this CPU.",
    )
    model: str | None = again(RunOptions, "model")
    minibatches: int | None = _computing(
        "--minibatches N",
        Count(unset="enough for steady state"),
        "Minibatches in an epoch. Only those in steady state are timed.",
    )
    epochs: int | None = again(
        RunOptions,
        "epochs",
        value=Count(unset="1, or 2 with --compute real"),
        help="Maximum number of epochs. If there are several, the first one is a warm-up.",
    )
    target: Target | None = again(  # noqa: RUF009
        RunOptions,
        "target",
        help="With --compute real: train each plan until the validation reaches this, such as 'nll<=4' or "
        "'accuracy>=0.98'. Exit code 6 means that a plan never reached it.",
    )
    seed: int = again(RunOptions, "seed")
    timeout_s: float = again(RunOptions, "timeout_s")

    @property
    def epochs_in_all(self) -> int:
        """Epochs of each plan, with the default of `--epochs`."""
        return self.epochs or {"sleep": 1, "real": 2}[self.compute]
