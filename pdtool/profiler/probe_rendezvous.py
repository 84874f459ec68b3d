"""The rendezvous of the probe's workers, which names workers that do not answer."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pdtool.artifacts.text_formats import FormatError, read_message, write_message
from pdtool.errors import WorkerDiedError

_REMEDY = "check that it runs and can be reached, or pass a longer --timeout"


class Rendezvous:
    """One worker's view of the store where all workers meet.

    The store knows who has answered, so it can name the others. The workers go through the same turns: a turn ends when
    all have given a value.

    Args:
        store: a store of torch.distributed, on the machine of worker 0.
        workers: number of workers in all.
        timeout_s: how long two workers wait for each other; at the store each waits twice as long for all, so that one
            of those two reports first.

    Attributes:
        step: what is being measured, for errors.
    """

    def __init__(self, store: Any, rank: int, workers: int, timeout_s: float) -> None:
        self.store, self.rank, self._workers, self._timeout_s = store, rank, workers, timeout_s
        self.step = "coming together"
        self._turn = 0

    def exchange(self, value: object = None, kind: Any = None) -> list[Any]:
        """Return the values of all workers, by rank.

        Args:
            kind: their type, as `write_message` takes it.

        Raises:
            WorkerDiedError: some gave none, or one of another type; it names them.
        """
        self._turn += 1
        values = []
        for rank, answer in enumerate(self._answers(str(self._turn), write_message(value, kind))):
            try:
                values.append(read_message(answer, kind))
            except FormatError as error:
                what = f"{self.step}: the answer of worker {rank} cannot be read ({error})"
                remedy = "make sure that only the workers can reach these ports (SECURITY.md)"
                raise WorkerDiedError(what, remedy) from error
        return values

    def leave(self) -> None:
        """End the rendezvous. Worker 0 goes last, because the store ends with it and others may still read it."""
        with self.waiting_for([0]):
            if self.rank:
                self.store.set(f"left/{self.rank}", "")
            else:
                self._answers("left", b"")

    @contextmanager
    def waiting_for(self, peers: Iterable[int], remedy: str = _REMEDY) -> Iterator[None]:
        """Turn errors of torch.distributed into a WorkerDiedError that names the step and the `peers`."""
        try:
            yield
        except RuntimeError as error:
            raise self._timeout_error(sorted({*peers} - {self.rank}) or [0], remedy) from error

    def _answers(self, subject: str, content: bytes) -> list[bytes]:
        """Each worker's value in the store on a subject, including this one's."""
        keys = [f"{subject}/{rank}" for rank in range(self._workers)]
        deadline_s, pause_s = time.monotonic() + 2 * self._timeout_s, 1e-3
        with self.waiting_for([0]):
            self.store.set(keys[self.rank], content)
            while not self.store.check(keys):
                if time.monotonic() > deadline_s:
                    raise self._timeout_error([rank for rank, key in enumerate(keys) if not self.store.check([key])])
                time.sleep(pause_s)
                pause_s = min(0.02, 1.5 * pause_s)
            return list(self.store.multi_get(keys))

    def _timeout_error(self, peers: Sequence[int], remedy: str = _REMEDY) -> WorkerDiedError:
        ranks = f"worker{'s' * (len(peers) > 1)} {', '.join(map(str, peers))}"
        what = f"{self.step}: worker {self.rank} waited for {ranks}, which did not answer within {self._timeout_s:g} s"
        return WorkerDiedError(what, remedy)
