"""Links that messages share, on a clock.

Every member of every level has a link up and a link down, each of the level's bandwidth. A message from worker a to b
is on the way through the up links of a's members and the down links of b's, at all levels that the two do not share:

    4x4, worker 1 -> worker 6      device 1 up, server 0 up  ->  server 1 down, device 6 down

Messages on a link share it, as TCP streams do: first come first served would let one all-reduce of hundreds of
megabytes hold up every activation behind it. The shares are max-min fair (Bertsekas and Gallager, Data Networks,
section 6.5.2): no message can have more without taking it from one that has no more, and what a message leaves unused
because another link holds it up goes to the others.
"""

from __future__ import annotations

import heapq
from collections import Counter, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import count

from pdtool.cluster import Cluster

Link = tuple[str, int, int]  # "up" or "down", level, member


class Clock:
    """Events in order of time; those of one time in the order in which they were set."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()

    def at(self, time: float, do: Callable[[], None]) -> None:
        """Call `do` at `time`."""
        heapq.heappush(self._events, (time, next(self._number), do))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._events:
            self.now, _, do = heapq.heappop(self._events)
            do()


@dataclass(eq=False, kw_only=True)
class Flow:
    """One message, or one ring all-reduce: what all its members send at once.

    Attributes:
        channel: its flows go one after the other, those of different channels at once.
        size_bytes: to send, over each of its links.
        links: with how many messages it is on each.
        ended: called with the flow when the last byte has left; the latency comes on top.
        started_s, ended_s: from when it had its channel for itself until its last byte had left.
    """

    channel: Hashable
    size_bytes: float
    links: Mapping[Link, int]
    ended: Callable[[Flow], None]
    started_s: float = 0.0
    ended_s: float = 0.0
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
        self._bandwidths = [level.bandwidth_bytes_per_s for level in cluster.levels]
        self._on: dict[Link, dict[Flow, None]] = {}  # a set in order
        self._channels: dict[Hashable, deque[Flow]] = {}

    def path(self, a: int, b: int) -> tuple[list[Link], float]:
        """The links from worker a to worker b, and the latency: that of the slowest level on the way."""
        if (a, b) not in self._paths:
            crossed = [(depth, below) for depth, below in enumerate(self._below) if a // below != b // below]
            up: list[Link] = [("up", depth, a // below) for depth, below in crossed]
            down: list[Link] = [("down", depth, b // below) for depth, below in crossed]
            late = max((self.cluster.levels[depth].latency_s for depth, _ in crossed), default=0.0)
            self._paths[a, b] = up + down, late
        return self._paths[a, b]

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
        for link in flow.links:
            self._on.setdefault(link, {})[flow] = None
        self._share(flow.links)

    def _end(self, flow: Flow) -> None:
        flow.ended_s = self.clock.now
        if flow.rate:
            for link in flow.links:
                del self._on[link][flow]
            self._share(flow.links)
        queue = self._channels[flow.channel]
        queue.popleft()
        if queue:
            self._start(queue[0])
        flow.ended(flow)

    def _share(self, links: Iterable[Link]) -> None:
        """Give all flows that depend on these links, at any distance, their new rates, and set their alarms."""
        now = self.clock.now
        for flow, rate in self._fair(self._together(links)).items():
            if rate != flow.rate:
                flow.left_bytes -= flow.rate * (now - flow.since_s)
                flow.rate, flow.since_s = rate, now
                flow.alarm += 1
                self.clock.at(now + max(flow.left_bytes, 0.0) / rate, partial(self._ring, flow, flow.alarm))

    def _together(self, links: Iterable[Link]) -> dict[Flow, None]:
        """The flows on these links, those on the links of those, and so on."""
        found: dict[Flow, None] = {}
        seen = dict.fromkeys(links)
        queue = list(seen)
        for link in queue:
            for flow in self._on[link]:
                if flow not in found:
                    found[flow] = None
                    queue += [other for other in flow.links if other not in seen]  # the loop comes to them, too
                    seen |= dict.fromkeys(flow.links)
        return found

    def _fair(self, flows: Collection[Flow]) -> dict[Flow, float]:
        """Fill all flows alike until a link is full; those on it have their rate, the others go on."""
        if len(flows) == 1:
            return {flow: min(self._bandwidths[link[1]] / n for link, n in flow.links.items()) for flow in flows}
        load: Counter[Link] = Counter()
        for flow in flows:
            load.update(flow.links)
        room = {link: self._bandwidths[link[1]] for link in load}
        rates: dict[Flow, float] = {}
        rate = 0.0
        while load:
            full = min(load, key=lambda link: room[link] / load[link])
            rate = max(rate, room[full] / load[full])  # it only grows, but for rounding
            for flow in [flow for flow in self._on[full] if flow not in rates]:
                rates[flow] = rate
                for link, messages in flow.links.items():
                    room[link] = max(0.0, room[link] - messages * rate)
                    load[link] -= messages
            load = +load  # those without flows to fill are done
        return rates

    def _ring(self, flow: Flow, alarm: int) -> None:
        if alarm == flow.alarm:  # or else its rate has changed since
            self._end(flow)
