"""Types of option values (a number, a name, a text): how to read one, its default, and words for a missing default.

A value is a text from the command line, or any object passed to a function of the API. Readers take the option's name
for their errors, and raise UsageError.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Number
from os import PathLike
from typing import Any

from pdtool.errors import UsageError, suggestion
from pdtool.machines import parse_endpoint
from pdtool.schedule import RIVALS
from pdtool.units import parse_seconds

_MIN_TIMEOUT_S = 0.001


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class OptionValue:
    """The type of an option's value.

    Attributes:
        default: in the user's notation; None if there is none.
        unset: words for the command's behaviour without a default.
    """

    default: Any = None
    unset: str = ""

    def read(self, name: str, value: Any) -> Any:
        """Read a value of the option `name`; raises UsageError."""
        raise NotImplementedError


@dataclass(frozen=True)
class Range(OptionValue):
    """A number of a range."""

    least: float = 1
    most: float = 10**9

    def check(self, name: str, number: float, value: Any) -> None:
        """Raise UsageError if a number read from `value` is not in the range; nan never is."""
        if not self.least <= number <= self.most:
            what = f"{name}={value!r:.80}: {value!s:.80} is not in the range {self.least}<=x<={self.most}"
            raise UsageError(what)


class Factor(Range):
    """A number of a range, whole or not."""

    def read(self, name: str, value: Any) -> float:
        """Read 2.5 or "2.5"."""
        try:
            factor = float(value)
        except (TypeError, ValueError, OverflowError):
            factor = math.nan
        self.check(name, factor, value)
        return factor


class Count(Range):
    """A whole number of a range."""

    def read(self, name: str, value: Any) -> int:
        """Read 8 or "8"; 2.7 and True are refused."""
        try:
            number = int(value) if isinstance(value, (Integral, str)) and not isinstance(value, bool) else None
        except ValueError:
            number = None
        if number is None:
            raise UsageError(f"{name}={value!r:.80} is not a whole number", "pass a whole number, such as 8")
        self.check(name, number, value)
        return number


@dataclass(frozen=True)
class Choice(OptionValue):
    """One of several names."""

    names: tuple[str, ...]

    def read(self, name: str, value: Any) -> str:
        """Return one of the names unchanged."""
        if not isinstance(value, str) or value not in self.names:
            raise UsageError(f"{name}={value!r:.80}: {value!r:.80} is not one of {', '.join(map(repr, self.names))}")
        return value


class Flag(OptionValue):
    """Yes or no."""

    def read(self, name: str, value: Any) -> bool:
        """Return True or False unchanged."""
        if not isinstance(value, bool):
            raise UsageError(f"{name}={value!r:.80} is not True or False")
        return value


class Texts(OptionValue):
    """The texts of a repeatable option."""

    def read(self, name: str, value: Any) -> tuple[str, ...]:
        """Return them unchanged."""
        return tuple(value)


@dataclass(frozen=True)
class Text(OptionValue):
    """A text, which `parse` checks or converts; `parse` also takes the option's name.

    Attributes:
        without: value of the flag without a text; "": a text must follow.
    """

    parse: Callable[[str, str], Any] = lambda name, text: text
    without: str = ""

    def read(self, name: str, value: Any) -> Any:
        """Read a text; a number and a path also count as texts."""
        if isinstance(value, bool) or not isinstance(value, (str, Number, PathLike)):
            raise UsageError(f"{name}={value!r:.80} is not a string", "pass one as on the command line")
        return self.parse(name, str(value))


def path(name: str, text: str) -> str:
    """Refuse an empty path, such as from an unset variable."""
    if text == "":
        raise UsageError(f"{name} is empty", "name a file or folder, or leave the option out")
    return text


def file_path(name: str, text: str) -> str:
    """Refuse an empty path and a folder, also one that is only to come: `plans/`."""
    if os.path.isdir(path(name, text)) or text.endswith("/"):
        raise UsageError(f"{name} {text} is a folder", "name a file in it, or leave the option out")
    return text


def timeout(name: str, text: str) -> float:
    """Read `60s` or `60` as seconds, and check that these leave time to answer."""
    seconds = parse_seconds(f"{text}s" if re.fullmatch(r"[0-9.]+", text) else text)
    if seconds < _MIN_TIMEOUT_S:
        raise UsageError(
            f"{name} {text} is too short for a worker to answer", f"pass {_MIN_TIMEOUT_S:g}s or more, such as 60s"
        )
    return seconds


def endpoint(name: str, text: str) -> str:
    """Check `host:port`, and return it unchanged."""
    if text:
        parse_endpoint(text)
    return text


def rivals(name: str, text: str) -> tuple[str, ...]:
    """Split the names of strategies, and check that plans can be compared with each."""
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    if unknown := [each for each in names if each not in RIVALS]:
        remedy = f"{suggestion(unknown[0], RIVALS)} choose from {', '.join(RIVALS)}".lstrip()
        raise UsageError(f"{name} {unknown[0]!r} is not a strategy to compare with", remedy)
    return names


def replicas(name: str, text: str) -> tuple[int, ...]:
    """Read `15-1`."""
    if not re.fullmatch(r"[1-9][0-9]{0,17}(-[1-9][0-9]{0,17})*", text):  # the cluster or the digits limit it
        what = f"{name} {text!r:.80} is not a list of workers per stage"
        raise UsageError(what, "write 15-1 for 15 workers and then one")
    return tuple(map(int, text.split("-")))


def share(name: str, text: str) -> float:
    """Read `3%` or `0.03`."""
    try:
        part = float(text.removesuffix("%")) / (100 if text.endswith("%") else 1)
    except ValueError:
        part = -1.0
    if not 0 <= part < 1:
        raise UsageError(f"{name} {text!r} is not a percentage below 100%", "write 3% or 0.03")
    return part
