"""Where the workers of a probe meet: a store that knows who has answered, so that whoever does not can be named."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from pdtool.errors import WorkerDiedError

_GRACE_S = 1.0  # for others to notice that a wait has failed
_REMEDY = "see that it runs and can be reached, or give a longer --timeout"


class Meeting:
    """One worker's view of it. The workers take turns together: a turn ends when everyone has given a value.

    Args:
        store: a store of torch.distributed, on the machine of worker 0.
        timeout_s: how long two workers wait for each other; at the store each waits twice as long for all, so that
            one of those two speaks first.
    """

    def __init__(self, store: Any, rank: int, workers: int, timeout_s: float) -> None:
        self.store, self.rank, self.workers, self.timeout_s = store, rank, workers, timeout_s
        self.step = "coming together"
        self.turn = 0

    def everyone(self, value: object = None) -> list[Any]:
        """Everyone's value, by rank; raises WorkerDiedError naming those who gave none."""
        self.turn += 1
        return [json.loads(text) for text in self._answers(str(self.turn), value)]

    def leave(self) -> None:
        """Worker 0 goes last: the store, which the others may still be reading, can end with it."""
        with self.waiting_for([0]):
            if self.rank:
                self.store.set(self._key("left", self.rank), "")
            else:
                self._answers("left", None)

    @contextmanager
    def waiting_for(self, peers: Iterable[int], remedy: str = _REMEDY) -> Iterator[None]:
        """Make of what torch.distributed raises a WorkerDiedError: what was waited for, and which of `peers`."""
        try:
            yield
        except RuntimeError as error:
            silent: set[int] = set()
            with suppress(RuntimeError):  # the store may be what is lost
                silent = self._silent()
            others = sorted({*peers} - {self.rank})
            raise self._in_vain([peer for peer in others if peer in silent] or others or [0], remedy) from error

    def _answers(self, subject: str, value: object) -> list[bytes]:
        """What each worker has put into the store on a subject, this one included."""
        keys = [self._key(subject, rank) for rank in range(self.workers)]
        end, pause = time.monotonic() + 2 * self.timeout_s, 1e-3
        with self.waiting_for([0]):
            self.store.set(keys[self.rank], json.dumps(value))
            while not self.store.check(keys):
                if time.monotonic() > end:
                    raise self._in_vain([rank for rank, key in enumerate(keys) if not self.store.check([key])])
                time.sleep(pause)
                pause = min(0.02, 1.5 * pause)
            return list(self.store.multi_get(keys))

    def _silent(self) -> set[int]:
        """Who has neither given up the work of this turn nor finished it."""
        self.store.set(self._key(f"{self.turn} given up", self.rank), "")
        end = time.monotonic() + _GRACE_S
        while True:
            missing = {
                rank
                for rank in range(self.workers)
                if not any(
                    self.store.check([self._key(subject, rank)])
                    for subject in (str(self.turn + 1), f"{self.turn} given up")
                )
            }
            if not missing or time.monotonic() > end:
                return missing
            time.sleep(0.02)

    def _in_vain(self, whom: Sequence[int], remedy: str = _REMEDY) -> WorkerDiedError:
        ranks = f"worker{'s' * (len(whom) > 1)} {', '.join(map(str, whom))}"
        return WorkerDiedError(
            f"{self.step}: worker {self.rank} waited for {ranks} in vain (timeout {self.timeout_s:g} s)", remedy
        )

    @staticmethod
    def _key(subject: str, rank: int) -> str:
        return f"{subject}/{rank}"
