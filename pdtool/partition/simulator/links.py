"""Links that messages share, on a clock.

Every member of every level has a link up and a link down, each of the level's bandwidth. A message from worker a to b
is on the way through the up links of a's members and the down links of b's, at all levels that the two do not share:

    4x4, worker 1 -> worker 6      device 1 up, server 0 up  ->  server 1 down, device 6 down

Messages on a link share it, as TCP streams do: first come first served would let one all-reduce of hundreds of
megabytes hold up every activation behind it. The shares are max-min fair (Bertsekas and Gallager, Data Networks,
section 6.5.2): no message can have more without taking it from one that has no more, and what a message leaves unused
because another link holds it up goes to the others. All that changes at one moment changes the shares once.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from pdtool.cluster import Cluster

_TIGHT = 1 + 1e-12  # sums that come and go leave a rest
_MOST_REMEMBERED = 5_000


class Clock:
    """Events in order of time; those of one time in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, float, Callable[[], None]]] = []
        self._number = count()

    def at(self, time: float, do: Callable[[], None]) -> None:
        """Call `do` at `time`."""
        heapq.heappush(self._events, (time, next(self._number), do))

    def last(self, do: Callable[[], None]) -> None:
        """Call `do` when all else of this moment is done; one call at a time may wait for that."""
        heapq.heappush(self._events, (self.now, math.inf, do))

    def stop(self) -> None:
        """Forget all that was to come."""
        self._events.clear()

    def run(self) -> None:
        """Until nothing is left to do."""
        events, pop = self._events, heapq.heappop
        while events:
            self.now, _, do = pop(events)
            do()


@dataclass(eq=False, slots=True)
class Link:
    """One way, up or down, between a member of a level and the others.

    Attributes:
        flows: those on it now, with how many messages each; `messages` in all.
        wanted: bytes/s that they would take if each had its other links for itself.
        tight: whether it may hold up one of them; if not, none of them depends on the others for its sake.
        room, unfilled: bandwidth left, and messages without their share of it, while shares are worked out.
    """

    way: str
    level: int
    member: int
    bandwidth: float
    flows: dict[Flow, int] = field(default_factory=dict)
    messages: int = 0
    wanted: float = 0.0
    tight: bool = False
    room: float = 0.0
    unfilled: int = 0

    def add(self, flow: Flow, messages: int) -> None:
        """One more."""
        self.flows[flow] = messages
        self.messages += messages
        self.wanted += messages * flow.most
        self.tight = self.wanted > self.bandwidth * _TIGHT

    def remove(self, flow: Flow) -> None:
        """One less."""
        messages = self.flows.pop(flow)
        self.messages -= messages
        self.wanted = self.wanted - messages * flow.most if self.flows else 0.0
        self.tight = self.wanted > self.bandwidth * _TIGHT


@dataclass(eq=False, kw_only=True, slots=True)
class Flow:
    """One message, or one ring all-reduce: what all its members send at once.

    Attributes:
        channel: its flows go one after the other, over the same links; those of different channels at once.
        size_bytes: to send, over each of its links.
        links: with how many messages it is on each.
        ended: called with the flow when the last byte has left; the latency comes on top.
        started_s, ended_s: from when it had its channel for itself until its last byte had left.
        most: bytes/s of one message with no other flow beside it.
    """

    channel: Hashable
    size_bytes: float
    links: Mapping[Link, int]
    ended: Callable[[Flow], None]
    started_s: float = 0.0
    ended_s: float = 0.0
    most: float = 0.0
    rate: float = 0.0
    left_bytes: float = 0.0
    since_s: float = 0.0
    alarm: int = 0


class Links:
    """All links of a cluster."""

    def __init__(self, cluster: Cluster, clock: Clock) -> None:
        self.cluster, self.clock = cluster, clock
        self._below = cluster.below
        self._paths: dict[tuple[int, int], tuple[list[Link], float]] = {}
        self._links: dict[tuple[str, int, int], Link] = {}
        self._channels: dict[Hashable, deque[Flow]] = {}
        # rates by the channels that share links: in a pipeline they come again and again
        self._shares: dict[Collection[Hashable], dict[Hashable, float]] = {}
        self._begun: list[Flow] = []  # since rates were last worked out
        self._changed: dict[Link, None] = {}  # tight links with other flows than then

    def path(self, a: int, b: int) -> tuple[list[Link], float]:
        """The links from worker a to worker b, and the latency: that of the slowest level on the way."""
        if (a, b) not in self._paths:
            crossed = [(depth, below) for depth, below in enumerate(self._below) if a // below != b // below]
            up = [self._link("up", depth, a // below) for depth, below in crossed]
            down = [self._link("down", depth, b // below) for depth, below in crossed]
            late = max((self.cluster.levels[depth].latency_s for depth, _ in crossed), default=0.0)
            self._paths[a, b] = up + down, late
        return self._paths[a, b]

    def _link(self, way: str, level: int, member: int) -> Link:
        bandwidth = self.cluster.levels[level].bandwidth_bytes_per_s
        return self._links.setdefault((way, level, member), Link(way, level, member, bandwidth))

    def send(self, flow: Flow) -> None:
        """Start a flow, or let it wait behind those of its channel."""
        queue = self._channels.setdefault(flow.channel, deque())
        queue.append(flow)
        if len(queue) == 1:
            self._start(flow)

    def _start(self, flow: Flow) -> None:
        flow.started_s = flow.since_s = self.clock.now
        flow.left_bytes = flow.size_bytes
        if flow.size_bytes <= 0:
            self.clock.at(self.clock.now, partial(self._ring, flow, flow.alarm))
            return
        flow.most = min(link.bandwidth / n for link, n in flow.links.items())
        self._soon()
        self._begun.append(flow)
        for link, n in flow.links.items():
            link.add(flow, n)
            if link.tight:
                self._changed[link] = None

    def _end(self, flow: Flow) -> None:
        flow.ended_s = self.clock.now
        if flow.rate:
            for link in flow.links:
                if link.tight:
                    self._soon()
                    self._changed[link] = None
                link.remove(flow)
        queue = self._channels[flow.channel]
        queue.popleft()
        if queue:
            self._start(queue[0])
        flow.ended(flow)

    def _soon(self) -> None:
        """Work out the rates anew when all that happens at this moment has happened."""
        if not self._begun and not self._changed:
            self.clock.last(self._share)

    def _share(self) -> None:
        """Give all flows that begun, or that depend on links that changed, their rates, and set their alarms."""
        now = self.clock.now
        flows, links = _together(self._begun, self._changed)
        self._begun, self._changed = [], {}
        busy = frozenset([flow.channel for flow in flows])
        if busy not in self._shares:
            if len(self._shares) > _MOST_REMEMBERED:
                self._shares.clear()
            self._shares[busy] = {flow.channel: rate for flow, rate in _fair(flows, links).items()}
        rates = self._shares[busy]
        for flow in flows:
            rate = rates[flow.channel]
            if rate != flow.rate:
                flow.left_bytes -= flow.rate * (now - flow.since_s)
                flow.rate, flow.since_s = rate, now
                flow.alarm += 1
                self.clock.at(now + max(flow.left_bytes, 0.0) / rate, partial(self._ring, flow, flow.alarm))

    def _ring(self, flow: Flow, alarm: int) -> None:
        if alarm == flow.alarm:  # or else its rate has changed since
            self._end(flow)


def _together(flows: Iterable[Flow], links: Iterable[Link]) -> tuple[Collection[Flow], list[Link]]:
    """These flows, those on these links, on the tight links of those, and so on; and all the tight links."""
    found = dict.fromkeys(flows)
    seen = dict.fromkeys(links)
    for flow in found:
        seen |= dict.fromkeys(link for link in flow.links if link.tight)
    queue = list(seen)
    for link in queue:
        for flow in link.flows:
            if flow not in found:
                found[flow] = None
                for other in flow.links:
                    if other.tight and other not in seen:
                        seen[other] = None
                        queue.append(other)  # the loop comes to it, too
    return found, [link for link in seen if link.tight]


def _fair(flows: Collection[Flow], links: list[Link]) -> dict[Flow, float]:
    """Fill all flows alike until some have the most they can, or links are full; those on them have their rate, the
    others go on.

    Args:
        links: the tight ones that these flows are on, and no others.
    """
    for link in links:
        link.room, link.unfilled = link.bandwidth, link.messages
    rates: dict[Flow, float] = {}
    rate = 0.0
    waiting = list(flows)
    while links:
        shares = [link.room / link.unfilled for link in links]
        share, least = min(shares), min(flow.most for flow in waiting)
        if share < least:
            rate = max(rate, share)  # it only grows, but for rounding
            full = [link for link, each in zip(links, shares, strict=True) if each == share]
            filled = {flow: rate for link in full for flow in link.flows if flow not in rates}
        else:
            filled = {flow: least for flow in waiting if flow.most == least}
        rates |= filled
        for flow, own in filled.items():
            for link, messages in flow.links.items():
                if link.tight:
                    link.unfilled -= messages
                    room = link.room - messages * own
                    link.room = room if room > 0.0 else 0.0
        waiting = [flow for flow in waiting if flow not in rates]
        links = [link for link in links if link.unfilled]  # those without flows to fill are done
    return rates | {flow: flow.most for flow in waiting}
