"""metrics.jsonl: one line per update and one per validation, written by one worker of the last stage."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FILE = "metrics.jsonl"


class Log:
    """Appends lines; those of epochs that a resumed run does again are dropped first."""

    def __init__(self, out: Path, *, done: int) -> None:
        path = out / FILE
        kept = [line for line in read(path) if line["epoch"] <= done] if done else []
        self._file = path.open("w", encoding="utf-8", buffering=1)
        for line in kept:
            self.write(line)

    def write(self, line: dict[str, Any]) -> None:
        """One line, visible to readers at once."""
        self._file.write(json.dumps(line) + "\n")

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def read(path: Path) -> list[dict[str, Any]]:
    """All whole lines; [] when there is no file."""
    if not path.is_file():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


@contextmanager
def following(out: Path, on_event: Callable[[dict[str, Any]], None] | None, *, after: int) -> Iterator[None]:
    """Call `on_event` in a thread with each line of epochs later than `after`, as it is written."""
    if on_event is None:
        yield
        return
    path, seen, done = out / FILE, 0, threading.Event()

    def follow() -> None:
        nonlocal seen
        while True:
            last = done.wait(0.1)
            lines = [line for line in read(path) if line["epoch"] > after]
            for line in lines[seen:]:
                on_event(line)
            seen = max(seen, len(lines))
            if last:
                return

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
