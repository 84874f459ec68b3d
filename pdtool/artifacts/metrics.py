"""`metrics.jsonl`: a line for each update and each validation, written by one worker of the last stage.

A line of an update has `epoch`, `step`, `samples`, `loss` (the training loss, the mean over these samples), `time`
(Unix time, in seconds), `lr` (of the first parameter group; null where it is not known) and `samples_per_s` (since the
line before, or the beginning of the epoch).
A line of a validation has `epoch`, `step`, `time`, `loss` (the validation loss) and the metrics.
"""

from __future__ import annotations

import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pdtool.errors import ArtifactError, PdtoolError
from pdtool.files import replacing

METRICS_FILE = "metrics.jsonl"
_POLL_S = 0.1
_FLUSH_S = 0.1  # between writes, while updates take less
_MIN_INTERVAL_S = 1e-9  # so that a rate is finite
_DIGITS = 3  # of times and rates, after the point


class MetricsLog:
    """Appends lines to metrics.jsonl; of a resumed run, lines of epochs that it trains again are dropped first.

    Lines that come quickly are written together, so that an update costs a microsecond, and no write.

    Raises:
        ArtifactError: the file of the run that is resumed holds something else than metrics.
    """

    def __init__(self, out: Path, *, epochs_done: int) -> None:
        self._path = out / METRICS_FILE
        kept = [line for line in read_metrics(self._path) if line["epoch"] <= epochs_done] if epochs_done else []
        with replacing(self._path) as file:  # another file, so that a reader sees where the new lines begin
            file.write("".join(map(_as_line, kept)).encode())
        self._file = self._path.open("a", encoding="utf-8")
        self._unwritten: list[dict[str, Any]] = []
        self._flushed_s = self._update_s = -math.inf  # of time.perf_counter

    def epoch_begins(self) -> None:
        """Take the time from now on for `samples_per_s`."""
        self._update_s = time.perf_counter()

    def add_update(self, *, epoch: int, step: int, loss: float, lr: float | None, samples: float) -> None:
        """Add a line for an update, and write what is due; raises PdtoolError when the file cannot be written.

        Args:
            loss: mean over the samples of the update.
        """
        now_s = time.perf_counter()
        rate = samples / max(now_s - self._update_s, _MIN_INTERVAL_S)
        self._update_s = now_s
        self._unwritten.append(
            {
                "split": "train",
                "epoch": epoch,
                "step": step,
                "samples": round(samples),
                "loss": loss,
                "time": round(time.time(), _DIGITS),
                "lr": lr,
                "samples_per_s": round(rate, _DIGITS),
            }
        )
        if now_s - self._flushed_s >= _FLUSH_S:
            self._flush()

    def add_validation(self, epoch: int, step: int, metrics: Mapping[str, float]) -> None:
        """Write a line for a validation, after all before it; errors as of `add_update`."""
        line = {"split": "valid", "epoch": epoch, "step": step, "time": round(time.time(), _DIGITS)}
        self._unwritten.append({**line, **metrics})
        self._flush()

    def close(self) -> None:
        """Write what is left, and close the file; errors as of `add_update`."""
        try:
            if self._unwritten:
                self._flush()
        finally:
            self._file.close()

    def _flush(self) -> None:
        """Write all lines, which readers see at once."""
        if not os.fstat(self._file.fileno()).st_nlink:
            raise PdtoolError(f"{self._path} was removed while the run wrote to it", "leave the run's folder alone")
        lines, self._unwritten = self._unwritten, []
        try:
            self._file.write("".join(map(_as_line, lines)))
            self._file.flush()
        except OSError as error:
            raise PdtoolError(f"{self._path} cannot be written ({error.strerror})", "free some space") from error
        self._flushed_s = time.perf_counter()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines; [] when there is no file.

    Raises:
        ArtifactError: a line is not what a run writes.
    """
    if not path.is_file():
        return []
    return [_parse(line, path, number) for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1)]


class GrowingFile:
    """Reads what is appended to a file, which may not exist yet; what it holds already is left out.

    When another file has taken its place, that is read from its beginning.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode, self._offset_bytes = 0, 0
        with suppress(OSError):
            status = path.stat()
            self._inode, self._offset_bytes = status.st_ino, status.st_size

    def new_lines(self) -> list[bytes]:
        """Return the complete lines that were appended since the last call."""
        try:
            if not self._path.is_file():  # a FIFO would be waited for
                return []
            with self._path.open("rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset_bytes = inode, 0
                file.seek(self._offset_bytes)
                appended = file.read()
        except OSError:
            return []
        complete = appended[: appended.rfind(b"\n") + 1]
        self._offset_bytes += len(complete)
        return complete.splitlines()


@contextmanager
def following_metrics(
    out: Path, on_line: Callable[[dict[str, Any]], None] | None, *, after: int, poll_s: float | None = None
) -> Iterator[None]:
    """Call `on_line` in a thread with each line of epochs later than `after`, soon after it is written.

    Args:
        poll_s: seconds between two looks at the file.
    """
    if on_line is None:
        yield
        return
    path, is_over = out / METRICS_FILE, threading.Event()
    file = GrowingFile(path)

    def follow() -> None:
        is_last = False
        while not is_last:
            is_last = is_over.wait(poll_s or _POLL_S)
            for line in file.new_lines():
                with suppress(ArtifactError):  # not written by this run
                    metrics = _parse(line, path)
                    if metrics["epoch"] > after:
                        on_line(metrics)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _as_line(content: dict[str, Any]) -> str:
    return json.dumps(content) + "\n"


def _parse(line: bytes, path: Path, number: int = 0) -> dict[str, Any]:
    try:
        content = json.loads(line)
        if isinstance(content, dict) and isinstance(content.get("epoch"), int):
            return content
        reason = "no object with an epoch"
    except (ValueError, RecursionError) as error:
        reason = str(error)[:200]
    remedy = "remove this line, or the file: a run needs none to go on"
    raise ArtifactError(path, f"is not a line of metrics ({reason})", remedy, field=f"line {number}")
