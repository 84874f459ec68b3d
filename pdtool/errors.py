"""The errors that pdtool raises on purpose: what is wrong, with the values, and what to do about it.

Each class has the exit code of the program that it ends. The functions make the parts of a message. `describe_error`
describes an error from other code. `suggestion` guesses the intended name. `printable` escapes control characters,
because names may come from strangers and texts from users' exceptions.
"""

from __future__ import annotations

import difflib
import re
import traceback
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar

# Control characters (C0 but tab and line feed, DEL, C1), line separators, marks that reverse the direction of writing,
# surrogates, and noncharacters, which XML forbids.
_MAX_TEXT = 2000  # characters of an error from other code
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufeff\ufffe\uffff]"
)


class PdtoolError(Exception):
    """Base of all expected errors; `cli` prints its text and exits with its `exit_code`.

    Args:
        what: what is wrong, with the values that show it.
        remedy: what to do; an imperative clause, or empty.
    """

    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(what, remedy)
        self.what = what
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}; {self.remedy}" if self.remedy else self.what

    def __repr__(self) -> str:  # not from args: where a worker failed is added to `what` later
        return f"{type(self).__name__}({self.what!r}, {self.remedy!r})"

    @property
    def fields(self) -> dict[str, Any]:
        """The further attributes of its class, by name."""
        return {name: value for name, value in vars(self).items() if name not in ("what", "remedy")}

    def __reduce__(self) -> tuple[Any, ...]:
        return revived, (type(self).__name__, self.what, self.remedy, self.fields)


class UsageError(PdtoolError):
    """An argument or option is wrong, or does not go with another."""

    exit_code = 2


class ModelError(PdtoolError):
    """The user's model.py lacks something, or its results cannot be used."""


class TraceError(ModelError):
    """The model cannot be traced by torch.export, or its graph cannot be read.

    Args:
        location: `file.py:12` in the user's code, or "" if unknown.
        module: path of the module that causes it; None if unknown, "" for the model itself.
    """

    def __init__(self, what: str, remedy: str = "", *, location: str = "", module: str | None = None) -> None:
        super().__init__(f"{location}: {what}" if location else what, remedy)
        self.location = location
        self.module = module


class PartialWriteError(TraceError):
    """The model writes into part of a tensor in place, so its graph must be made functional."""


class ArtifactError(PdtoolError):
    """A file that pdtool reads is truncated, altered, of an unknown format, or inconsistent."""

    exit_code = 3

    def __init__(self, path: Path | str, what: str, remedy: str = "", *, field: str = "") -> None:
        where = f"{path}: {field}" if field else str(path)
        super().__init__(f"{where}: {what}", remedy)
        self.path = path
        self.fault = what
        self.field = field


class FieldError(ValueError):
    """A fault in the content of an artifact; the reader of the file turns it into an ArtifactError.

    Args:
        field: where the fault is, as `stages[2].workers`.
    """

    def __init__(self, field: str, what: str) -> None:
        super().__init__(field, what)
        self.field, self.what = field, what

    def __str__(self) -> str:
        return self.what


class StaleError(ArtifactError):
    """An artifact was made from an input that has changed since."""


class NoPlanError(PdtoolError):
    """No plan satisfies the constraints."""

    exit_code = 4


class ScheduleError(PdtoolError):
    """A list of actions breaks a rule of schedules; its text ends with the grid of actions, the fault marked."""

    exit_code = 3

    def __str__(self) -> str:
        fault, *grid = self.what.split("\n", 1)
        return "\n".join([str(PdtoolError(fault, self.remedy)), *grid])


class WorkerDiedError(PdtoolError):
    """A worker process ended before its work did, or it or its machine does not answer."""

    exit_code = 5


class TargetMissedError(PdtoolError):
    """The epochs ended before the target metric was reached."""

    exit_code = 6


def revived(name: str, what: str, remedy: str, fields: Mapping[str, Any]) -> PdtoolError:
    """Rebuild an error from another process, from the name of its class and its `fields`.

    An error of an unknown class becomes a WorkerDiedError.
    """
    kinds: list[type[PdtoolError]] = [PdtoolError]
    for each in kinds:
        kinds += each.__subclasses__()  # the loop comes to them, too
    kind = next((each for each in kinds if each.__name__ == name), WorkerDiedError)
    error = kind.__new__(kind)  # its constructor would compose `what` again
    PdtoolError.__init__(error, what, remedy)
    vars(error).update(fields)
    return error


def describe_error(error: BaseException) -> str:
    """Return `ValueError: text`, even if printing an error of other code fails."""
    try:
        text = str(error)
    except BaseException:  # of any kind, as the error itself may be
        text = "its text cannot be read"
    if len(text) > _MAX_TEXT:
        text = f"{text[:_MAX_TEXT]}... ({len(text)} characters)"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def refused_exit(error: BaseException) -> ModelError:
    """Return the error for user code that called sys.exit(), or raised something else that is no Exception."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    what = f"{describe_error(error)} was raised, which is not an Exception"
    if isinstance(error, SystemExit):
        what = f"sys.exit({error.code!r}) was called"
    return ModelError(f"{Path(frame.filename).name}:{frame.lineno}: {what}", "raise an error in the model file instead")


def with_article(noun: str) -> str:
    """Return `a plan` or `an emulation`."""
    return f"{'an' if noun[0] in 'aeiouAEIO' else 'a'} {noun}"


def suggestion(name: str, known: Iterable[str], otherwise: str = "") -> str:
    """Return `did you mean v100?`, also for `V100`, or something else where no known name is near."""
    in_lower_case = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), in_lower_case, n=1)
    return f"did you mean {in_lower_case[near[0]]}?" if near else otherwise


def printable(text: str) -> str:
    """Return the text with control characters written as `\\x1b` and `\\u202e`."""
    return _UNPRINTABLE.sub(lambda found: ascii(found[0])[1:-1], text)
