"""Links that messages share, on a clock.

Every member of every level has a link up and a link down, each of the level's bandwidth. A message from worker a to b
is on the way through the up links of a's members and the down links of b's, at all levels that the two do not share:

    4x4, worker 1 -> worker 6      device 1 up, server 0 up  ->  server 1 down, device 6 down

Messages on a link share it, as TCP streams do: first come first served would let one all-reduce of hundreds of
megabytes hold up every activation behind it. The shares are max-min fair (Bertsekas and Gallager, Data Networks,
section 6.5.2): no message can get more except from one that has no more. If another link slows a message, the others
get its unused share. Shares are computed once for all changes of the same moment.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from pdtool.artifacts.cluster import Cluster

_ROUNDING = 1 + 1e-12  # sums that come and go leave a rest
_MAX_REMEMBERED = 5_000


class EventQueue:
    """A clock that calls functions in order of time, and at equal times in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, float, Callable[[], None]]] = []
        self._number = count()

    def at(self, time: float, do: Callable[[], None]) -> None:
        """Call `do` at `time`."""
        heapq.heappush(self._events, (time, next(self._number), do))

    def after_this_moment(self, do: Callable[[], None]) -> None:
        """Call `do` after everything else of this moment; only one call may wait at a time."""
        heapq.heappush(self._events, (self.now, math.inf, do))

    def stop(self) -> None:
        """Drop everything that was to come."""
        self._events.clear()

    def run(self) -> None:
        """Call everything until nothing is left."""
        events, pop = self._events, heapq.heappop
        while events:
            self.now, _, do = pop(events)
            do()


@dataclass(eq=False, slots=True)
class Link:
    """One way, up or down, between a member of a level and the others.

    Attributes:
        flows: flows on it now, with the number of messages of each; `messages` in all.
        demand: bytes/s that they would use if each had its other links to itself.
        is_contended: whether it may slow one of them; if not, it makes none of them depend on the others.
        remaining, unfilled: while shares are computed, the bandwidth left and the messages without a share.
    """

    direction: str
    level: int
    member: int
    bandwidth: float
    flows: dict[Flow, int] = field(default_factory=dict)
    messages: int = 0
    demand: float = 0.0
    is_contended: bool = False
    remaining: float = 0.0
    unfilled: int = 0

    def add(self, flow: Flow, messages: int) -> None:
        """Put a flow on the link."""
        self.flows[flow] = messages
        self.messages += messages
        self.demand += messages * flow.max_rate
        self.is_contended = self.demand > self.bandwidth * _ROUNDING

    def remove(self, flow: Flow) -> None:
        """Take a flow off the link."""
        messages = self.flows.pop(flow)
        self.messages -= messages
        self.demand = self.demand - messages * flow.max_rate if self.flows else 0.0
        self.is_contended = self.demand > self.bandwidth * _ROUNDING


@dataclass(eq=False, kw_only=True, slots=True)
class Flow:
    """One message, or all messages that the members of a ring all-reduce send at once.

    Attributes:
        channel: flows of one channel go one after the other, over the same links.
        size_bytes: bytes to send over each of its links.
        links: number of its messages on each link.
        ended: called with the flow when the last byte has left; the latency comes on top.
        started_s, ended_s: when it got its channel, and when its last byte left.
        max_rate: bytes/s of one message with no other flow.
    """

    channel: Hashable
    size_bytes: float
    links: Mapping[Link, int]
    ended: Callable[[Flow], None]
    started_s: float = 0.0
    ended_s: float = 0.0
    max_rate: float = 0.0
    rate: float = 0.0
    left_bytes: float = 0.0
    since_s: float = 0.0
    wake_number: int = 0


class Network:
    """All links of a cluster, and the messages on them."""

    def __init__(self, cluster: Cluster, clock: EventQueue) -> None:
        self.cluster, self.clock = cluster, clock
        self._paths: dict[tuple[int, int], tuple[list[Link], float]] = {}
        self._links: dict[tuple[str, int, int], Link] = {}
        self._channels: dict[Hashable, deque[Flow]] = {}
        # rates by the channels that share links: in a pipeline they come again and again
        self._shares: dict[Collection[Hashable], dict[Hashable, float]] = {}
        self._begun: list[Flow] = []  # since rates were last computed
        self._changed: dict[Link, None] = {}  # contended links with other flows than then

    def path(self, a: int, b: int) -> tuple[list[Link], float]:
        """The links from worker a to worker b, and the latency: that of the slowest level on the way."""
        if (a, b) not in self._paths:
            crossed = [(depth, below) for depth, below in enumerate(self.cluster.below) if a // below != b // below]
            up = [self._link("up", depth, a // below) for depth, below in crossed]
            down = [self._link("down", depth, b // below) for depth, below in crossed]
            latency_s = max((self.cluster.levels[depth].time_s(0) for depth, _ in crossed), default=0.0)
            self._paths[a, b] = up + down, latency_s
        return self._paths[a, b]

    def _link(self, direction: str, level: int, member: int) -> Link:
        bandwidth = self.cluster.levels[level].bandwidth_bytes_per_s
        return self._links.setdefault((direction, level, member), Link(direction, level, member, bandwidth))

    def send(self, flow: Flow) -> None:
        """Start a flow, or queue it in its channel."""
        queue = self._channels.setdefault(flow.channel, deque())
        queue.append(flow)
        if len(queue) == 1:
            self._start(flow)

    def _start(self, flow: Flow) -> None:
        flow.started_s = flow.since_s = self.clock.now
        flow.left_bytes = flow.size_bytes
        if flow.size_bytes <= 0:
            self.clock.at(self.clock.now, partial(self._wake, flow, flow.wake_number))
            return
        flow.max_rate = min(link.bandwidth / n for link, n in flow.links.items())
        self._share_after_this_moment()
        self._begun.append(flow)
        for link, n in flow.links.items():
            link.add(flow, n)
            if link.is_contended:
                self._changed[link] = None

    def _end(self, flow: Flow) -> None:
        flow.ended_s = self.clock.now
        if flow.rate:
            for link in flow.links:
                if link.is_contended:
                    self._share_after_this_moment()
                    self._changed[link] = None
                link.remove(flow)
        queue = self._channels[flow.channel]
        queue.popleft()
        if queue:
            self._start(queue[0])
        flow.ended(flow)

    def _share_after_this_moment(self) -> None:
        """Recompute the rates after everything else of this moment."""
        if not self._begun and not self._changed:
            self.clock.after_this_moment(self._share)

    def _share(self) -> None:
        """Set the rates and ends of all flows that began or that depend on changed links."""
        now = self.clock.now
        flows, links = _connected(self._begun, self._changed)
        self._begun, self._changed = [], {}
        busy = frozenset([flow.channel for flow in flows])
        if busy not in self._shares:
            if len(self._shares) > _MAX_REMEMBERED:
                self._shares.clear()
            self._shares[busy] = {flow.channel: rate for flow, rate in _max_min_fair_rates(flows, links).items()}
        rates = self._shares[busy]
        for flow in flows:
            rate = rates[flow.channel]
            if rate != flow.rate:
                flow.left_bytes -= flow.rate * (now - flow.since_s)
                flow.rate, flow.since_s = rate, now
                flow.wake_number += 1
                self.clock.at(now + max(flow.left_bytes, 0.0) / rate, partial(self._wake, flow, flow.wake_number))

    def _wake(self, flow: Flow, wake_number: int) -> None:
        if wake_number == flow.wake_number:  # or else its rate has changed since
            self._end(flow)


def _connected(flows: Iterable[Flow], links: Iterable[Link]) -> tuple[Collection[Flow], list[Link]]:
    """Return these flows and all flows connected to them or to these links by contended links; and those links."""
    connected = dict.fromkeys(flows)
    visited = dict.fromkeys(links)
    for flow in connected:
        visited |= dict.fromkeys(link for link in flow.links if link.is_contended)
    queue = list(visited)
    for link in queue:
        for flow in link.flows:
            if flow not in connected:
                connected[flow] = None
                for neighbour in flow.links:
                    if neighbour.is_contended and neighbour not in visited:
                        visited[neighbour] = None
                        queue.append(neighbour)  # the loop comes to it, too
    return connected, [link for link in visited if link.is_contended]


def _max_min_fair_rates(flows: Collection[Flow], links: list[Link]) -> dict[Flow, float]:
    """Raise the rates of all flows equally until some reach their maximum or fill a link. Fix these, and continue with
    the others.

    Args:
        links: the contended links of these flows, and no others.
    """
    for link in links:
        link.remaining, link.unfilled = link.bandwidth, link.messages
    rates: dict[Flow, float] = {}
    rate = 0.0
    waiting = list(flows)
    while links:
        shares = [link.remaining / link.unfilled for link in links]
        share, max_rate = min(shares), min(flow.max_rate for flow in waiting)
        if share < max_rate:
            rate = max(rate, share)  # it only grows, but for rounding
            full = [link for link, each in zip(links, shares, strict=True) if each == share]
            filled = {flow: rate for link in full for flow in link.flows if flow not in rates}
        else:
            filled = {flow: max_rate for flow in waiting if flow.max_rate == max_rate}
        rates |= filled
        for flow, flow_rate in filled.items():
            for link, messages in flow.links.items():
                if link.is_contended:
                    link.unfilled -= messages
                    remaining = link.remaining - messages * flow_rate
                    link.remaining = remaining if remaining > 0.0 else 0.0
        waiting = [flow for flow in waiting if flow not in rates]
        links = [link for link in links if link.unfilled]  # those without flows to fill are done
    return rates | {flow: flow.max_rate for flow in waiting}
