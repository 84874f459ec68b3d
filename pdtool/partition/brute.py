"""The oracle: every plan of a small graph on a small cluster, one by one. For tests; exponential."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster
from pdtool.partition import cost


def best(
    profile: Profile, cluster: Cluster, workers: int, schedule: str = "1f1b", microbatches: int = 1
) -> float | None:
    """The least bottleneck over all partitions and replications, by enumeration; None when nothing fits in memory.

    Stages are ordered sets of nodes that never send backwards, inputs in the first; a plan uses the last m workers.
    """
    paces = []
    for stages in _partitions(profile):
        for replicas in _compositions(workers, len(stages)):
            first = workers - sum(replicas)
            places = [range(first + sum(replicas[:s]), first + sum(replicas[: s + 1])) for s in range(len(stages))]
            flight = cost.in_flight(schedule, replicas, microbatches)
            costs = cost.evaluate(profile, cluster, stages, places, flight=flight)
            if cluster.memory_bytes is None or max(costs.memory_bytes) <= cluster.memory_bytes:
                paces.append(costs.bottleneck_s)
    return min(paces, default=None)


def _partitions(profile: Profile) -> Iterator[list[list[str]]]:
    """All lists of non-empty stages that hold every node once and send only forwards."""
    inputs = {node.name for node in profile.nodes if node.op == "input"}
    names = [name for name in profile.graph.names if name not in inputs]

    def extend(done: set[str], stages: list[list[str]]) -> Iterator[list[list[str]]]:
        rest = [name for name in names if name not in done]
        if not rest:
            yield stages
            return
        for bits in range(1, 1 << len(rest)):
            stage = [name for b, name in enumerate(rest) if bits >> b & 1]
            held = done | set(stage) | inputs
            if all(source in held for name in stage for source in profile.graph.inputs[name]):
                own = [*sorted(inputs), *stage] if not stages else stage
                if all(not set(group) & set(stage) or set(group) <= set(own) for group in profile.together):
                    yield from extend(done | set(stage), [*stages, own])

    yield from extend(set(), [])


def _compositions(workers: int, parts: int) -> Iterator[Sequence[int]]:
    """All tuples of `parts` positive numbers whose sum is at most `workers`."""
    if not parts:
        yield ()
        return
    for first in range(1, workers - parts + 2):
        for rest in _compositions(workers - first, parts - 1):
            yield (first, *rest)
