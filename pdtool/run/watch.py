"""Channels whose messages stand in the trace."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from torch import Tensor

from pdtool.run.channel import Receiver, Sender
from pdtool.run.channels import Channels
from pdtool.run.meter import Meter
from pdtool.run.wiring import Hop


def _taker(hop: Hop) -> str:
    """`for 1F`, the name of a message without its minibatch: what takes it."""
    return f"for {hop.target}{'F' if hop.lane == 'forward' else 'B'}"


class WatchedSender:
    """Tells the meter of what `inner` sends."""

    def __init__(self, inner: Sender, hop: Hop, meter: Meter) -> None:
        self.inner, self.meter, self.name = inner, meter, _taker(hop)
        self.finish = inner.finish

    def send(self, minibatch: int, tensors: Sequence[Tensor]) -> int:
        """As `inner` does."""
        start = perf_counter()
        size = self.inner.send(minibatch, tensors)
        self.meter.message("send", f"{self.name}{minibatch}", start, perf_counter(), size)
        return size


class WatchedReceiver:
    """Tells the meter of what `inner` receives."""

    def __init__(self, inner: Receiver, hop: Hop, meter: Meter) -> None:
        self.inner, self.meter, self.name = inner, meter, _taker(hop)
        self.expect = inner.expect

    def receive(self, minibatch: int) -> list[Tensor]:
        """As `inner` does."""
        start = perf_counter()
        tensors = self.inner.receive(minibatch)
        size = sum(tensor.nbytes for tensor in tensors)
        self.meter.message("receive", f"{self.name}{minibatch}", start, perf_counter(), size)
        return tensors


def watched(channels: Channels, hops: Sequence[Hop], meter: Meter) -> Channels:
    """The same channels, watched; not those between two stages of one worker, where nothing travels."""
    far = {hop.number: hop for hop in hops if hop.sender != hop.receiver}
    senders, receivers = dict(channels.senders), dict(channels.receivers)
    senders |= {n: WatchedSender(inner, far[n], meter) for n, inner in senders.items() if n in far}
    receivers |= {n: WatchedReceiver(inner, far[n], meter) for n, inner in receivers.items() if n in far}
    return Channels(senders, receivers)
