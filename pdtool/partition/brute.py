"""The oracle of the tests: the best pace by looking at every plan.

Shares with the search what a plan costs (`evaluate`) and where pipelines may lie (`layouts`), not how it is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster
from pdtool.partition.evaluate import Costs, Way, evaluate
from pdtool.partition.layout import Layout, layouts

Placed = tuple[list[list[str]], list[int]]  # nodes and replicas of each stage


def plans(profile: Profile, workers: int, straight: bool = False) -> Iterator[Placed]:
    """Every plan on exactly `workers` workers that keeps the rules of `space.build_space`; exponentially many."""
    for stages in _divisions(profile, []):
        if _lawful(profile, stages):
            for ends in combinations(range(1, workers), len(stages) - 1):
                replicas = [b - a for a, b in zip([0, *ends], [*ends, workers], strict=True)]
                if not straight or max(replicas) == 1:
                    yield stages, replicas


def best(
    profile: Profile, cluster: Cluster, way: Way, *, straight: bool = False, max_stages: int | None = None
) -> tuple[float, Placed | None]:
    """(bottleneck in seconds, plan) of the fastest that fits in memory."""
    found: tuple[float, Placed | None] = (float("inf"), None)
    for layout in [Layout.of(cluster)] if straight else layouts(cluster, cluster.workers):
        fewest = layout.workers if straight or way.cost != "ours" else 1
        for workers in range(fewest, layout.workers + 1):
            for stages, replicas in plans(profile, workers, straight):
                costs = cost_of(profile, layout, stages, replicas, way)
                fits = cluster.memory_bytes is None or max(costs.memory_bytes) <= cluster.memory_bytes
                if fits and costs.bottleneck_s < found[0] and len(stages) <= (max_stages or len(stages)):
                    found = costs.bottleneck_s, (stages, replicas)
    return found


def cost_of(
    profile: Profile, layout: Layout, stages: Sequence[Sequence[str]], replicas: Sequence[int], way: Way
) -> Costs:
    """Cost of stages on contiguous workers of each copy, the last ones."""
    idle = layout.workers - sum(replicas)
    first = [idle + sum(replicas[:s]) for s in range(len(replicas))]
    copies = 1 if len(stages) == 1 else layout.copies
    placed = [
        [layout.place(copy, worker) for worker in range(a, a + r) for copy in range(layout.copies)]
        for a, r in zip(first, replicas, strict=True)
    ]
    return evaluate(profile, layout.cluster, stages, placed, replace(way, copies=copies))


def _divisions(profile: Profile, done: list[list[str]]) -> Iterator[list[list[str]]]:
    """Every way to go on from the stages already made: any set of nodes that needs nothing outside comes next."""
    inside = {name for nodes in done for name in nodes}
    left = [name for name in profile.graph.names if name not in inside]
    if not left:
        yield done
    for size in range(1, len(left) + 1):
        for nodes in combinations(left, size):
            if all(source in inside or source in nodes for name in nodes for source in profile.graph.inputs[name]):
                yield from _divisions(profile, [*done, list(nodes)])


def _lawful(profile: Profile, stages: Sequence[Sequence[str]]) -> bool:
    """Groups unbroken, pins kept, inputs in the first stage, the loss in the last, an operator in each."""
    stage_of = {name: s for s, nodes in enumerate(stages) for name in nodes}
    places = {node.name: 0 for node in profile.nodes if node.op == "input"}
    places |= {node.name: -1 for node in profile.nodes if node.op == "loss"}
    computing = {stage_of[node.name] for node in profile.nodes if node.op not in ("input", "loss")}
    return (
        (len(stages) == 1 or len(computing) == len(stages))
        and all(stage_of[name] == pin % len(stages) for name, pin in (places | profile.pin).items())
        and all(len({stage_of[name] for name in group}) == 1 for group in profile.together if group)
    )
