"""`metrics.jsonl`: a line for each update and each validation, written by one worker of the last stage.

A line is the JSON of its fields. The user's metrics have a field of their own, and may have any name but `loss`. To add
a column, add a field to a line here and write it in the worker (runtime/worker/worker.py).
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError

from pdtool.artifacts.artifact import FrozenModel
from pdtool.artifacts.fields import Number, first_fault
from pdtool.errors import ArtifactError, PdtoolError
from pdtool.files import PROCESS_REMEDY, replacing, write_remedy

_POLL_S = 0.1
_FLUSH_S = 0.1  # between writes, if updates take less
_MIN_INTERVAL_S = 1e-9  # so that a rate is finite
_DIGITS = 3  # of times and rates, after the point
_TAIL_BYTES = 65_536  # at the end of the file, enough for its last lines


class UpdateLine(FrozenModel):
    """An update; older lines lack the fields with a default.

    Attributes:
        step: updates so far, in all epochs.
        samples: samples of this update.
        loss: the training loss, the mean over these samples.
        time: Unix time, in seconds.
        lr: learning rate of the first parameter group; None if unknown.
        samples_per_s: since the line before, or the beginning of the epoch.
    """

    model_config = ConfigDict(extra="ignore")

    split: Literal["train"] = "train"
    epoch: Number
    step: Number
    samples: Number = 0
    loss: float
    time: float = 0.0
    lr: float | None = None
    samples_per_s: float | None = None


class ValidationLine(FrozenModel):
    """A validation; `loss` is the validation loss, other fields are as for an update.

    Attributes:
        metrics: the user's metrics; in older files they stand beside the fields.
    """

    split: Literal["valid"] = "valid"
    epoch: Number
    step: Number
    time: float = 0.0
    loss: float
    metrics: dict[str, float] = Field(default_factory=dict)

    @property
    def figures(self) -> dict[str, float]:
        """The loss, and the user's metrics."""
        return {"loss": self.loss, **self.metrics}


MetricsLine = UpdateLine | ValidationLine
_LINE: TypeAdapter[MetricsLine] = TypeAdapter(Annotated[MetricsLine, Field(discriminator="split")])


class MetricsLog:
    """Appends lines to metrics.jsonl; a resumed run first drops lines of epochs that it trains again.

    Lines in quick succession are written together, so that an update costs microseconds and not a write.

    Raises:
        ArtifactError: the file of the resumed run holds something other than metrics.
    """

    def __init__(self, path: Path, *, epochs_done: int) -> None:
        self._path = path
        kept = [text for text, line in _lines(path) if line.epoch <= epochs_done] if epochs_done else []
        with replacing(path) as file:  # another file, so that a reader sees where the new lines begin
            file.writelines(text + b"\n" for text in kept)
        self._file = path.open("a", encoding="utf-8")
        self._unwritten: list[MetricsLine] = []
        self._flushed_s = self._update_s = -math.inf  # of time.perf_counter

    def epoch_begins(self) -> None:
        """Start the clock for `rate`."""
        self._update_s = time.perf_counter()

    def rate(self, samples: int) -> float:
        """Return the samples per second of an update that ends now, since the one before or the epoch's beginning."""
        since_s, self._update_s = self._update_s, time.perf_counter()
        return round(samples / max(self._update_s - since_s, _MIN_INTERVAL_S), _DIGITS)

    def add(self, line: MetricsLine) -> None:
        """Add a line, and write due lines; a validation is due at once. Raises PdtoolError."""
        self._unwritten.append(line)
        if isinstance(line, ValidationLine) or time.perf_counter() - self._flushed_s >= _FLUSH_S:
            self._flush()

    def close(self) -> None:
        """Write the remaining lines, and close the file; raises as `add` does."""
        try:
            if self._unwritten:
                self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        """Write all lines, which readers see at once."""
        if not os.fstat(self._file.fileno()).st_nlink:
            raise PdtoolError(
                f"{self._path} was removed while the run wrote to it",
                "start the run again in another folder, and do not remove that one",
            )
        lines, self._unwritten = self._unwritten, []
        try:
            self._file.writelines(json.dumps(vars(line)) + "\n" for line in lines)
            self._file.flush()
        except OSError as error:
            with suppress(OSError):
                self._file.close()  # else `close` would try to write the rest, and raise over this error
            raise PdtoolError(f"{self._path} cannot be written ({error.strerror})", write_remedy(error)) from error
        self._flushed_s = time.perf_counter()


def unix_time() -> float:
    """Return the time of a line."""
    return round(time.time(), _DIGITS)


def read_metrics(path: Path) -> list[MetricsLine]:
    """Return all complete lines; [] if there is no file.

    Raises:
        ArtifactError: a line is not what a run writes.
    """
    return [line for _, line in _lines(path)]


def last_update(path: Path) -> UpdateLine | None:
    """Return a file's last line about an update; None if there is none."""
    if not path.is_file():  # a FIFO would block, a device has no end
        return None
    with suppress(OSError), path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        for text in reversed(file.read().split(b"\n")):
            with suppress(ArtifactError):
                line = _parse(text, path)
                if isinstance(line, UpdateLine):
                    return line
    return None


class GrowingFile:
    """Reads lines appended to a file, which may not exist yet; skips its present content.

    If another file takes its place, read that from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset_bytes = 0, 0
        with suppress(OSError):
            status = path.stat()
            self._inode, self._offset_bytes = status.st_ino, status.st_size

    def new_lines(self) -> list[bytes]:
        """Return the complete lines that were appended since the last call."""
        if not self._path.is_file():  # a FIFO would block
            return []
        appended = b""
        with suppress(OSError), self._path.open("rb") as file:
            inode = os.fstat(file.fileno()).st_ino
            if inode != self._inode:
                self._inode, self._offset_bytes = inode, 0
            file.seek(self._offset_bytes)
            appended = file.read()
        complete = appended[: appended.rfind(b"\n") + 1]
        self._offset_bytes += len(complete)
        return complete.splitlines()


@contextmanager
def following_metrics(
    path: Path, on_line: Callable[[MetricsLine], None] | None, *, after: int, poll_s: float | None = None
) -> Iterator[None]:
    """Call `on_line` in a thread with each line of epochs later than `after`, soon after it is written.

    Args:
        poll_s: seconds between two looks at the file.
    """
    if on_line is None:
        yield
        return
    file, is_over = GrowingFile(path), threading.Event()

    def follow() -> None:
        is_last = False
        while not is_last:
            is_last = is_over.wait(poll_s or _POLL_S)
            for text in file.new_lines():
                with suppress(ArtifactError):  # not written by this run
                    line = _parse(text, path)
                    if line.epoch > after:
                        on_line(line)

    thread = threading.Thread(target=follow, daemon=True)
    try:
        thread.start()
    except RuntimeError as error:
        raise PdtoolError(f"the run cannot be followed ({error})", PROCESS_REMEDY) from error
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _lines(path: Path) -> Iterator[tuple[bytes, MetricsLine]]:
    """Yield the complete lines of a file, as text and parsed; none if there is no file."""
    if path.is_file():
        for number, text in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
            yield text, _parse(text, path, number)


def _parse(text: bytes, path: Path, number: int = 0) -> MetricsLine:
    try:
        content = json.loads(text)
        is_valid = isinstance(content, dict) and content.get("split") == "valid"
        if is_valid and not isinstance(content.get("metrics"), dict):  # an older file
            own = ValidationLine.model_fields.keys() - {"metrics"}
            content["metrics"] = {name: content.pop(name) for name in [*content] if name not in own}
        return _LINE.validate_python(content)
    except ValidationError as error:
        reason = ": ".join(filter(None, first_fault(error)))
    except (ValueError, RecursionError) as error:
        reason = str(error)[:200]
    remedy = "remove this line or the file: a run can continue without it"
    raise ArtifactError(path, f"is not a line of metrics ({reason})", remedy, field=f"line {number}")
