"""metrics.jsonl: one line per update and one per validation, written by one worker of the last stage."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pdtool.errors import PdtoolError

METRICS_FILE = "metrics.jsonl"
_POLL_S = 0.1


class MetricsLog:
    """Appends lines to metrics.jsonl; of a resumed run, lines of epochs that it trains again are dropped first."""

    def __init__(self, out: Path, *, epochs_done: int) -> None:
        self._path = path = out / METRICS_FILE
        kept = [line for line in read_metrics(path) if line["epoch"] <= epochs_done] if epochs_done else []
        self._file = path.open("w", encoding="utf-8", buffering=1)
        for line in kept:
            self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """Write one line, which readers see at once.

        Raises:
            PdtoolError: the file was removed.
        """
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise PdtoolError(f"{self._path} was removed while the run wrote it", "leave it, and start the run again")
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return all complete lines; [] when there is no file."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@contextmanager
def following_metrics(out: Path, on_line: Callable[[dict[str, Any]], None], *, after: int) -> Iterator[None]:
    """Call `on_line` in a thread with each line of epochs later than `after`, as it is written."""
    path, seen, is_over = out / METRICS_FILE, 0, threading.Event()

    def follow() -> None:
        nonlocal seen
        while True:
            is_last = is_over.wait(_POLL_S)
            lines = [line for line in read_metrics(path) if line["epoch"] > after]
            for line in lines[seen:]:
                on_line(line)
            seen = max(seen, len(lines))
            if is_last:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
