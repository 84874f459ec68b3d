"""Messages in a simulation: straight to each stage that takes a tensor, as soon as that stage has asked for it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from pdtool.partition.simulator.job import SimulationJob
from pdtool.partition.simulator.network import Flow, Network
from pdtool.partition.simulator.recorder import Consumer, NullRecorder
from pdtool.schedule import Action, ActionKind

_Turn = tuple[int, bool, int]  # worker, whether gradients, how many it takes before


class MessageDelivery:
    """The tensors and gradients under way between the workers.

    Attributes:
        turn: when the worker that takes the tensors does so, in its list.
        asked: turns that each worker has asked for, of tensors and of gradients.
        held: messages that nobody has asked for yet.
        outgoing: (stage, gradients?) -> the stages that take what it makes, and the bytes of each.
        arrived: messages so far; departed_s: when the last was sent.
        needs: (stage, gradients?) -> messages for each minibatch.
        resume: called with each worker that may have waited for a message.
    """

    def __init__(
        self,
        job: SimulationJob,
        stage_workers: list[list[int]],
        network: Network,
        recorder: NullRecorder,
        resume: Callable[[int], None],
    ) -> None:
        self.job, self.stage_workers, self.network, self.recorder = job, stage_workers, network, recorder
        self.resume = resume
        self.turn: dict[Consumer, int] = {}
        self.asked: Counter[tuple[int, bool]] = Counter()
        self.held: dict[_Turn, list[Flow]] = {}
        for w, ((stage, _), actions) in enumerate(zip(job.shape.stage_replicas(), job.lists, strict=True)):
            forwards = [a for a in actions if a.kind is ActionKind.FORWARD]
            backwards = [a for a in actions if a.kind.sends_gradients]
            for is_gradient, consumers in ((False, forwards), (True, backwards)):
                self.turn |= {(a.stage, is_gradient, a.minibatch): n for n, a in enumerate(consumers)}
                self.asked[w, is_gradient] = job.shape.in_flight[stage] + 1
        self.arrived: Counter[Consumer] = Counter()
        self.departed_s: dict[Consumer, float] = {}
        self.outgoing: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        for edge in job.edges:
            self.outgoing.setdefault((edge.source, False), []).append((edge.destination, edge.forward_bytes))
            if edge.has_gradient:
                self.outgoing.setdefault((edge.destination, True), []).append((edge.source, edge.backward_bytes))
        self.needs = Counter(
            (to, is_gradient) for (_, is_gradient), takers in self.outgoing.items() for to, _ in takers
        )

    def ready(self, action: Action) -> float | None:
        """Return when the last tensor that the action takes was sent; None while one has not arrived."""
        if action.kind is ActionKind.BACKWARD_WEIGHT:
            return 0.0
        is_gradient = action.kind is not ActionKind.FORWARD
        key = (action.stage, is_gradient, action.minibatch)
        return self.departed_s.get(key, 0.0) if self.arrived[key] == self.needs[action.stage, is_gradient] else None

    def take(self, w: int, action: Action) -> None:
        """The worker has what the action takes: it asks for one more."""
        is_gradient = action.kind.sends_gradients
        if is_gradient or action.kind is ActionKind.FORWARD:
            for flow in self.held.pop((w, is_gradient, self.asked[w, is_gradient]), ()):
                self.network.send(flow)
            self.asked[w, is_gradient] += 1

    def send_results(self, w: int, action: Action) -> None:
        """Send everything that an action of worker `w` has made."""
        if action.kind is ActionKind.FORWARD or action.kind.sends_gradients:
            is_gradient = action.kind is not ActionKind.FORWARD
            for stage, size_bytes in self.outgoing.get((action.stage, is_gradient), ()):
                self._send(w, (stage, is_gradient, action.minibatch), size_bytes)

    def _send(self, w: int, consumer: Consumer, size_bytes: int) -> None:
        stage, is_gradient, minibatch = consumer
        to = self.stage_workers[stage][minibatch % len(self.stage_workers[stage])]
        self.departed_s[consumer] = self.network.clock.now
        if to == w:
            self._deliver(to, consumer)
            return
        links, latency_s = self.network.path(self.job.workers[w], self.job.workers[to])
        ended = partial(self._sent, w, to, consumer, latency_s)
        flow = Flow(channel=(w, to, is_gradient), size_bytes=size_bytes, links=dict.fromkeys(links, 1), ended=ended)
        if self.turn[consumer] < self.asked[to, is_gradient]:
            self.network.send(flow)
        else:
            self.held.setdefault((to, is_gradient, self.turn[consumer]), []).append(flow)

    def _sent(self, w: int, to: int, consumer: Consumer, latency_s: float, flow: Flow) -> None:
        self.recorder.message(w, to, consumer, flow, latency_s)
        self.network.clock.at(self.network.clock.now + latency_s, partial(self._deliver, to, consumer))

    def _deliver(self, to: int, consumer: Consumer) -> None:
        self.arrived[consumer] += 1
        self.resume(to)
