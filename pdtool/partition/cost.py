"""Every cost formula, once, with its source. All take numbers or numpy arrays, so search and evaluate share them.

    F, B, U   seconds of forward, backward and optimizer step of a stage's operators, for one minibatch
    r         replicas of the stage, on contiguous workers
    w         minibatches in flight at one replica
    P         bytes of the stage's parameters
    A, G      bytes of the activations that cross a border forwards, and of their gradients
    L         the slowest link that the message has to cross: bandwidth (bytes/s, each way) and latency

Seconds are per minibatch of the whole pipeline in steady state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster, Level
from pdtool.schedule import default_in_flight

Array = NDArray[np.float64]
Number = TypeVar("Number", float, Array)


def compute_s(seconds: Number, replicas: int) -> Number:
    """(F + B + U) / r: each replica takes every r-th minibatch, and one update per round of r.

    PipeDream, SOSP'19, section 3.1, the first term of T(i→j, m).
    """
    return seconds / replicas


def allreduce_s(parameter_bytes: Number, replicas: int, link: Level | None) -> Number:
    """Ring all-reduce of the gradients once per round of r minibatches: 2(r−1)/r · P / bandwidth, over r.

    PipeDream, SOSP'19, section 3.1, charges 2(r−1)P/B to the round; that is the traffic of all replicas together.
    A ring moves 2(r−1)/r · P over each link (Patarasuk and Yuan, 2009), which is what Gloo and NCCL measure.
    """
    if replicas == 1 or link is None:
        return parameter_bytes * 0.0
    transfer = 2 * (replicas - 1) / replicas * parameter_bytes / link.bandwidth_bytes_per_s
    return (transfer + 2 * (replicas - 1) * link.latency_s) / replicas


def stage_s(compute: Number, allreduce: Number) -> Number:
    """max of the two: the all-reduce overlaps with the backward passes (PipeDream, SOSP'19, section 3.1)."""
    return cast(Number, np.maximum(compute, allreduce))


def transfer_s(activation_bytes: Number, gradient_bytes: Number, link: Level | None) -> Number:
    """Activations one way, gradients the other: (A + G) / bandwidth, latency twice.

    PipeDream, SOSP'19, section 3.1: 2·a/B, with A = G = a.
    """
    if link is None:
        return (activation_bytes + gradient_bytes) * 0.0
    return (activation_bytes + gradient_bytes) / link.bandwidth_bytes_per_s + 2 * link.latency_s


def tied_s(tied_bytes: Number, replicas: int, link: Level | None) -> Number:
    """Sending the gradient of a parameter that another stage holds too, and taking the other's, once a round."""
    return transfer_s(tied_bytes, tied_bytes, link) / replicas


def memory_bytes(
    parameter_bytes: Number, stash_bytes: Number, input_bytes: Number, in_flight: int, optimizer_state: float
) -> Number:
    """P·(w versions + 1 gradient + optimizer state) + w·(stash + received activations), on one worker.

    PipeDream, SOSP'19, section 3.3 (one weight version and one activation stash per minibatch in flight).
    """
    return parameter_bytes * (in_flight + 1 + optimizer_state) + in_flight * (stash_bytes + input_bytes)


def flush_factor(schedule: str, stages: int, microbatches: int) -> float:
    """(M + p − 1) / M: a flushing schedule idles (p−1)(F+B) per M microbatches (GPipe, NeurIPS'19, section 2.3)."""
    return 1.0 if schedule == "1f1b" else (microbatches + stages - 1) / microbatches


def in_flight(schedule: str, replicas: Sequence[int], microbatches: int) -> tuple[int, ...]:
    """Minibatches in flight at one replica of each stage."""
    if schedule == "1f1b":
        return default_in_flight(replicas)
    each = [-(-microbatches // r) for r in replicas]
    if schedule == "gpipe":
        return tuple(each)
    return tuple(min(a, b) for a, b in zip(default_in_flight(replicas), each, strict=True))


@dataclass(frozen=True)
class Costs:
    """What one plan costs; see artifacts.plan.Predicted for the fields."""

    bottleneck_s: float
    compute_s: tuple[float, ...]
    allreduce_s: tuple[float, ...]
    transfer_s: tuple[float, ...]
    memory_bytes: tuple[int, ...]
    traffic_bytes: int

    @property
    def bottleneck(self) -> str:
        """What sets the pace, in words."""
        terms = {
            **{f"compute of stage {s}": t for s, t in enumerate(self.compute_s)},
            **{f"gradient synchronisation of stage {s}": t for s, t in enumerate(self.allreduce_s)},
            **{f"transfer between stages {s} and {s + 1}": t for s, t in enumerate(self.transfer_s)},
        }
        return max(terms, key=terms.__getitem__)


def evaluate(
    profile: Profile,
    cluster: Cluster,
    stages: Sequence[Sequence[str]],
    workers: Sequence[Sequence[int]],
    *,
    flight: Sequence[int],
    schedule: str = "1f1b",
    microbatches: int = 1,
) -> Costs:
    """Cost of any plan: `stages` are node names, `workers` the workers of each, `flight` minibatches in flight."""
    compute, allreduce, transfer, memory = [], [], [], []
    place = {name: s for s, names in enumerate(stages) for name in names}
    widest = cluster.span(0, cluster.workers)
    for s, names in enumerate(stages):
        held = set(names)
        nodes = [profile.by_name[name] for name in names]
        replicas = len(workers[s])
        parameters = profile.parameter_bytes(held)
        link = cluster.span(min(workers[s]), max(workers[s]) + 1)
        tied = sum(t.bytes for t in profile.shared if held & set(t.nodes) and not held >= set(t.nodes))
        compute.append(compute_s(sum(n.forward_s + n.backward_s + n.update_s for n in nodes), replicas))
        allreduce.append(
            allreduce_s(float(parameters), replicas, link) + tied_s(float(tied), replicas, widest if tied else None)
        )
        before = [n for n in profile.nodes if place[n.name] < s]
        received = sum(n.output_bytes for n in before if any(c in held for c in profile.graph.consumers[n.name]))
        memory.append(memory_bytes(
            float(parameters), float(sum(n.stash_bytes for n in nodes)), float(received), flight[s],
            profile.optimizer_state_bytes,
        ))  # fmt: skip
        if s:
            both = (*workers[s - 1], *workers[s])
            alive = [n for n in before if any(place[c] >= s for c in profile.graph.consumers[n.name])]
            sizes = float(sum(n.output_bytes for n in alive)), float(sum(n.gradient_bytes for n in alive))
            transfer.append(transfer_s(*sizes, cluster.span(min(both), max(both) + 1)))
    pace = max(float(t) for t in (*map(max, compute, allreduce), *transfer))
    return Costs(
        bottleneck_s=pace * flush_factor(schedule, len(stages), microbatches),
        compute_s=tuple(map(float, compute)),
        allreduce_s=tuple(map(float, allreduce)),
        transfer_s=tuple(map(float, transfer)),
        memory_bytes=tuple(round(m) for m in memory),
        traffic_bytes=_traffic(profile, place, stages, workers, schedule, microbatches),
    )


def _traffic(
    profile: Profile,
    place: dict[str, int],
    stages: Sequence[Sequence[str]],
    workers: Sequence[Sequence[int]],
    schedule: str,
    microbatches: int,
) -> int:
    """Bytes that all workers send for one minibatch: every tensor once to each stage that takes it, and all-reduces."""
    total = 0.0
    for node in profile.nodes:
        takers = {place[c] for c in profile.graph.consumers[node.name]} - {place[node.name]}
        total += len(takers) * (node.output_bytes + node.gradient_bytes)
    for names, ws in zip(stages, workers, strict=True):
        round_size = len(ws) if schedule == "1f1b" else microbatches
        total += 2 * (len(ws) - 1) * profile.parameter_bytes(set(names)) / round_size
    return round(total)
