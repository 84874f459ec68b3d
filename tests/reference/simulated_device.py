"""A GPU that runs what it was told in any order that CUDA allows, so that an event that nobody waits for is found.

It takes the place of torch.cuda's streams and events. Copies within `with torch.cuda.stream(...)` are enqueued instead
of done; `run` then does one thing after the other, of a stream chosen at random among those that wait for no event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class Event:
    """As torch.cuda.Event: whoever waits for it waits for its last record until then."""

    def __init__(self, interprocess: bool = False) -> None:
        self.recorded = self.passed = 0

    def record(self, stream: Stream) -> None:
        self.recorded += 1
        self._device = stream.device
        stream.enqueue(self._pass)

    def synchronize(self) -> None:
        while not self.query():
            assert self._device.step(), "the device waits for what nobody has told it to do"

    def query(self) -> bool:
        return self.passed == self.recorded

    def _pass(self) -> None:
        self.passed += 1


class Stream:
    """As torch.cuda.Stream: its work is done in order."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device, self._work = device, deque[tuple[Callable[[], object], Event | None, int]]()
        device.streams.append(self)

    def enqueue(self, work: Callable[[], object]) -> None:
        self._work.append((work, None, 0))

    def wait_event(self, event: Event) -> None:
        self._work.append((lambda: None, event, event.recorded))

    def wait_stream(self, other: Stream) -> None:
        event = Event()
        event.record(other)
        self.wait_event(event)

    @property
    def is_ready(self) -> bool:
        """Whether its next work can be done."""
        return bool(self._work) and (self._work[0][1] is None or self._work[0][1].passed >= self._work[0][2])

    def step(self) -> None:
        self._work.popleft()[0]()


class SimulatedDevice:
    """Streams of two workers on one device.

    Args:
        seed: of the order in which it works.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.streams: list[Stream] = []
        self.compute = Stream(self)  # of the worker that acts at the moment

    def install(self, monkeypatch: Any) -> None:
        """Take the place of torch.cuda's streams and events."""
        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(self))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.compute)
        monkeypatch.setattr(torch.cuda, "stream", self._enqueued_on)

    def step(self) -> bool:
        """Do one thing, if any can be done."""
        ready = [stream for stream in self.streams if stream.is_ready]
        if ready:
            self._random.choice(ready).step()
        return bool(ready)

    def run(self, steps: int | None = None) -> None:
        """Do so many things, or all."""
        while steps != 0 and self.step():
            steps = None if steps is None else steps - 1

    @contextmanager
    def _enqueued_on(self, stream: Stream) -> Iterator[None]:
        with _Enqueued(stream):
            yield


class _Enqueued(TorchDispatchMode):
    """Enqueues copies; nothing else may happen meanwhile."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.copy_.default, func
        self._stream.enqueue(lambda: func(*args))
        return args[0]
