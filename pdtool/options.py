"""The options of the commands as values: of each its default, and how what is given for it is read.

The command line shows them as flags (cli/click_options.py), and the functions of the API take them as keyword
arguments: both read and refuse a value in the same way. A field has the name of the keyword argument; None stands for
what the command says of an option that is not given. What reads a value raises UsageError.
"""

from __future__ import annotations

import difflib
import math
import operator
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from numbers import Integral, Number
from os import PathLike
from typing import Any, Literal, TypeVar

from pdtool.errors import UsageError, suggestion
from pdtool.machines import parse_endpoint
from pdtool.schedule import ONE_F_ONE_B, RIVALS, SCHEDULES, STRATEGIES
from pdtool.units import parse_seconds

OUTER_BANDWIDTH, INNER_BANDWIDTH = "10Gbit/s", "12GB/s"  # a common network card; PCI Express 3.0 x16
SAME_FOLDER = "the folder of -o"  # what --resume takes without a folder
_MAX_COUNT = 10**9
_MAX_MINIBATCHES = 10_000  # in an update; more is a slip
_MAX_LOADER_WORKERS = 1000  # more is a slip
_MIN_TIMEOUT_S = 0.001
_LOWER_IS_BETTER = ("loss", "perplexity")
_HIGHER_IS_BETTER = ("accuracy",)
_RELATIONS = {"<=": operator.le, ">=": operator.ge, "<": operator.lt, ">": operator.gt}
_TARGET = re.compile(r"\s*(?P<metric>[^<>=]*?)\s*(?P<relation><=|>=|<|>|=)(?P<value>.*)", re.DOTALL)

Options = TypeVar("Options")


@dataclass(frozen=True)
class Count:
    """A whole number of a range."""

    least: int = 1
    most: int = _MAX_COUNT

    def __call__(self, name: str, value: Any) -> int:
        """Read 8 or "8"; 2.7 and True are refused."""
        try:
            number = int(value) if isinstance(value, (Integral, str)) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None:
            raise UsageError(f"{name}={value!r:.80} is not a whole number", "give one, as 8")
        if not self.least <= number <= self.most:
            raise UsageError(f"{name}={value!r:.80}: {value!s:.80} is not in the range {self.least}<=x<={self.most}")
        return number


@dataclass(frozen=True)
class Factor:
    """A number from 1 to a million; what is no number is not in the range."""

    least: float = 1
    most: float = 1e6

    def __call__(self, name: str, value: Any) -> float:
        """Read 2.5 or "2.5"."""
        try:
            factor = float(value)
        except (TypeError, ValueError, OverflowError):
            factor = math.nan
        if not self.least <= factor <= self.most:
            raise UsageError(f"{name}={value!r:.80}: {value!s:.80} is not in the range {self.least}<=x<={self.most}")
        return factor


@dataclass(frozen=True)
class Choice:
    """One of several names."""

    names: tuple[str, ...]

    def __call__(self, name: str, value: Any) -> str:
        """Return one of the names as it is."""
        if not isinstance(value, str) or value not in self.names:
            raise UsageError(f"{name}={value!r:.80}: {value!r:.80} is not one of {', '.join(map(repr, self.names))}")
        return value


@dataclass(frozen=True)
class Text:
    """A text, which `parse` checks or turns into something else."""

    parse: Callable[[str], Any] = str

    def __call__(self, name: str, value: Any) -> Any:
        """Read a text; a number and a path are texts, too."""
        if isinstance(value, bool) or not isinstance(value, (str, Number, PathLike)):
            raise UsageError(f"{name}={value!r:.80} is not a text", "write it in quotes")
        return self.parse(str(value))


@dataclass(frozen=True)
class Flag:
    """Yes or no."""

    def __call__(self, name: str, value: Any) -> bool:
        """Return True or False as it is."""
        if not isinstance(value, bool):
            raise UsageError(f"{name}={value!r:.80} is not True or False")
        return value


def path(name: str, text: Any) -> str:
    """Refuse an empty path, such as that of a variable that is not set."""
    if str(text) == "":
        raise UsageError(f"{name} is empty", "name a file or folder, or leave the option out")
    return str(text)


def timeout(text: str) -> str:
    """Check a `--timeout`, and return it as it is."""
    if parse_seconds(text) < _MIN_TIMEOUT_S:
        raise UsageError(f"--timeout {text} leaves no time to answer", f"give {_MIN_TIMEOUT_S:g}s or more, as 60s")
    return text


def endpoint(text: str) -> str:
    """Check `host:port`, and return it as it is."""
    if text:
        parse_endpoint(text)
    return text


def rivals(text: str) -> tuple[str, ...]:
    """Split the names of strategies, of which each is one that plans are compared with."""
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    if unknown := [name for name in names if name not in RIVALS]:
        remedy = f"{suggestion(unknown[0], RIVALS)}choose of {', '.join(RIVALS)}"
        raise UsageError(f"--against {unknown[0]!r} is no strategy to compare with", remedy)
    return names


def replicas(text: str) -> tuple[int, ...]:
    """Read `15-1`."""
    if not re.fullmatch(r"[1-9][0-9]{0,17}(-[1-9][0-9]{0,17})*", text):  # the cluster is the limit, or the digits are
        raise UsageError(
            f"--replicas {text!r:.80} is no number of workers for each stage", "write 15-1 for 15 workers and then one"
        )
    return tuple(map(int, text.split("-")))


def share(text: str) -> float:
    """Read `3%` or `0.03`."""
    try:
        value = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise UsageError(f"--simplest {text!r} is not a share below 100%", "write 3% or 0.03")
    return value


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
        match = _TARGET.fullmatch(text)
        try:
            value = float(match["value"]) if match else float("nan")
        except ValueError:
            value = float("nan")
        if match is None or not match["metric"].isprintable() or not match["metric"] or not math.isfinite(value):
            raise UsageError(
                f"target {text!r} is not METRIC=NUMBER; <, <=, > and >= may stand for =",
                "write accuracy=0.98, loss=0.5 or nll<=4",
            )
        return cls(match["metric"], match["relation"], value)

    def __str__(self) -> str:
        return f"{self.metric}{self.relation}{self.value:g}"

    @property
    def effective_relation(self) -> str:
        """The relation that is tested: `=` stands for `<=` or `>=`."""
        if self.relation != "=":
            return self.relation
        return "<=" if self.metric in _LOWER_IS_BETTER else ">="

    @property
    def interpretation(self) -> str | None:
        """How `=` was read, for the user to check; None where it says itself what is meant."""
        if self.relation != "=":
            return None
        effective = self.effective_relation
        text = f"target {self} is read as {self.metric} {effective} {self.value:g}"
        if self.metric in (*_LOWER_IS_BETTER, *_HIGHER_IS_BETTER):
            return text
        return f"{text}; write {self.metric}<={self.value:g} if less is better"

    def is_reached(self, metrics: Mapping[str, float], undefined: Collection[str] = ()) -> bool:
        """Whether the metrics of a validation reach the target.

        Args:
            undefined: metrics that have no figure in it, and so reach nothing.

        Raises:
            UsageError: the model does not report this metric.
        """
        if self.metric in undefined:
            return False
        if self.metric not in metrics:
            raise UsageError(
                f"target {self}: the model reports no metric {self.metric!r}",
                f"{suggestion(self.metric, metrics)}it reports: {', '.join(metrics)}",
            )
        return bool(_RELATIONS[self.effective_relation](metrics[self.metric], self.value))


TARGET = Text(Target.parse)


def option(default: Any, read: Callable[[str, Any], Any]) -> Any:
    """Make a field of an options class."""
    return field(default=default, metadata={"read": read})


def reader(options: type[Any], name: str) -> Any:
    """Return what reads the option of a name; raises KeyError for one that `options` does not have."""
    return next(f.metadata["read"] for f in fields(options) if f.name == name)


def read_options(command: str, options: type[Options], given: Mapping[str, Any]) -> Options:
    """Return the options of a command: those given, each read by its field, and the defaults of the others.

    Args:
        command: its name, for errors.
        given: by keyword, as `batch_size`; None stands for the default.

    Raises:
        TypeError: the command has no such option.
        UsageError: a value is not one that the option takes.
    """
    names = [f.name for f in fields(options)]  # type: ignore[arg-type]
    for name in (name for name in given if name not in names):
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose of {', '.join(names)}"
        raise TypeError(f"{command}() has no option {name!r}; {hint}")
    return options(**{name: reader(options, name)(name, value) for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class ProfileOptions:
    """How a model is profiled."""

    model_settings: tuple[str, ...] = option((), lambda name, settings: tuple(settings))
    batch_size: int = option(32, Count())
    device: str = option("auto", Text())
    threads: int | None = option(None, Count())
    precision: Literal["fp32", "tf32", "bf16", "fp16"] | None = option(None, Choice(("fp32", "tf32", "bf16", "fp16")))
    compiled: bool = option(False, Flag())
    calibrate: str | None = option(None, Text())


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """For which cluster, and how, a profile is partitioned."""

    topology: str | None = option(None, Text())
    cluster: str | None = option(None, Text())
    bandwidth: str | None = option(None, Text())
    latency: str | None = option(None, Text())
    memory: str | None = option(None, Text())
    workers: int | None = option(None, Count())
    replicas: tuple[int, ...] | None = option(None, Text(replicas))
    strategy: str = option("auto", Choice(tuple(STRATEGIES)))
    straight: bool = option(False, Flag())
    schedule: str | None = option(None, Choice((*SCHEDULES, "auto")))
    microbatches: int | None = option(None, Count(1, _MAX_MINIBATCHES))
    global_batch_size: int | None = option(None, Count())
    chunks: int = option(2, Count(2, 100))
    recompute: bool = option(True, Flag())
    cost_model: str = option("ours", Choice(("ours", "pipedream", "pipedream-free")))
    simplest: float = option(0.03, Text(share))
    max_cuts: int = option(1200, Count(100, 100_000))


@dataclass(frozen=True, kw_only=True)
class SimulateOptions:
    """How long, and beside what, a plan is simulated."""

    minibatches: int | None = option(None, Count())
    schedule: str | None = option(None, Choice(tuple(SCHEDULES)))
    against: tuple[str, ...] = option(("data-parallel", "straight", "gpipe", "model-parallel"), Text(rivals))


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a plan is trained."""

    output: str | None = option(None, path)
    epochs: int = option(1, Count())
    steps: int | None = option(None, Count())
    target: Target | None = option(None, TARGET)  # noqa: RUF009
    seed: int = option(0, Count(0, 2**63 - 1))
    resume: str | None = option(None, Text())
    device: Literal["auto", "cpu", "cuda"] = option("auto", Choice(("auto", "cpu", "cuda")))
    timeout: str = option("300s", Text(timeout))
    schedule: str | None = option(None, Choice(tuple(SCHEDULES)))
    microbatches: int | None = option(None, Count(1, _MAX_MINIBATCHES))
    weights: str | None = option(None, Choice(ONE_F_ONE_B.policy_names))
    update_every: int | None = option(None, Count(1, _MAX_MINIBATCHES))
    correction: str | None = option(None, Text())
    precision: Literal["fp32", "bf16"] = option("fp32", Choice(("fp32", "bf16")))
    transport: Literal["auto", "gloo", "shared"] = option("auto", Choice(("auto", "gloo", "shared")))
    wire_dtype: Literal["fp32", "fp16", "bf16"] = option("fp32", Choice(("fp32", "fp16", "bf16")))
    loader_workers: int | None = option(None, Count(0, _MAX_LOADER_WORKERS))
    threads: int | None = option(None, Count())
    log_every: int | None = option(None, Count())
    compiled: bool = option(False, Flag())
    trust: bool = option(False, Flag())
    nnodes: int = option(1, Count())
    node_rank: int = option(0, Count(0))
    rdzv_endpoint: str = option("", Text(endpoint))


@dataclass(frozen=True, kw_only=True)
class EmulateOptions:
    """How a plan is emulated."""

    against: tuple[str, ...] = option(("data-parallel",), Text(rivals))
    scale: float | None = option(None, Factor())
    slowdown: float | None = option(None, Factor())
    compute: Literal["sleep", "real"] = option("sleep", Choice(("sleep", "real")))
    minibatches: int | None = option(None, Count())
    epochs: int | None = option(None, Count())
    target: Target | None = option(None, TARGET)  # noqa: RUF009
    seed: int = option(0, Count(0, 2**63 - 1))
    timeout: str = option("300s", Text(timeout))
