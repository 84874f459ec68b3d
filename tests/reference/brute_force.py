"""The oracle of the search: the best time by looking at every plan.

It shares with the search what a plan costs (`Evaluator`) and where pipelines may lie (`layouts`), not how it is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations

from pdtool.artifacts.profile import Profile
from pdtool.planner.plan_cost import Candidate, Evaluator
from pdtool.planner.search.layouts import Layout, layouts
from pdtool.schedule import ExecutionConfig

Division = tuple[list[list[str]], list[int]]  # nodes and replicas of each stage


def divisions(profile: Profile, workers: int, straight: bool = False) -> Iterator[Division]:
    """Yield every plan on exactly `workers` workers that keeps the rules of find_cuts; exponentially many."""
    for stages in _ordered_partitions(profile, []):
        if _is_lawful(profile, stages):
            for ends in combinations(range(1, workers), len(stages) - 1):
                replicas = [b - a for a, b in zip([0, *ends], [*ends, workers], strict=True)]
                if not straight or max(replicas) == 1:
                    yield stages, replicas


def fastest(evaluator: Evaluator, execution: ExecutionConfig, *, straight: bool = False) -> Candidate | None:
    """Return the fastest plan that fits in memory."""
    plans = every_plan(evaluator, execution, straight=straight)
    return min(plans, key=lambda plan: plan.time_per_minibatch_s, default=None)


def every_plan(
    evaluator: Evaluator, execution: ExecutionConfig, *, straight: bool = False, depth: int | None = None
) -> Iterator[Candidate]:
    """Yield every plan that fits in memory.

    Args:
        straight: of one worker a stage.
        depth: then, so many stages; None: as many as there are workers.
    """
    cluster, profile = evaluator.cluster, evaluator.profile
    all_workers = evaluator.options.cost_model != "ours"
    found = layouts(cluster, cluster.workers, all_workers=all_workers)
    for layout in [Layout.whole(cluster, depth or cluster.workers)] if straight else found:
        for spare in range(layout.spare + 1):
            used = replace(layout, workers=layout.workers - spare)
            for workers in range(used.workers if straight or all_workers else 1, used.workers + 1):
                for stages, replicas in divisions(profile, workers, straight):
                    plan = placed(evaluator, used, stages, replicas, execution)
                    has_one_each = max(plan.placement.replicas) <= (execution.update_every or cluster.workers)
                    if has_one_each and evaluator.fits(plan):
                        yield plan


def placed(
    evaluator: Evaluator,
    layout: Layout,
    stages: Sequence[Sequence[str]],
    replicas: Sequence[int],
    execution: ExecutionConfig,
) -> Candidate:
    """Place stages on contiguous workers of each copy, the last ones."""
    idle = layout.workers - sum(replicas)
    first = [idle + sum(replicas[:s]) for s in range(len(replicas))]
    workers = [
        [layout.worker(copy, position) for position in range(a, a + r) for copy in range(layout.copies)]
        for a, r in zip(first, replicas, strict=True)
    ]
    copies = 1 if len(stages) == 1 else layout.copies
    return evaluator.place(stages, workers, replace(execution, copies=copies))


def _ordered_partitions(profile: Profile, done: list[list[str]]) -> Iterator[list[list[str]]]:
    """Every way to go on from the stages already made: any set of nodes that needs nothing outside comes next."""
    inside = {name for nodes in done for name in nodes}
    outside = [name for name in profile.graph.names if name not in inside]
    if not outside:
        yield done
    for size in range(1, len(outside) + 1):
        for nodes in combinations(outside, size):
            if all(source in inside or source in nodes for name in nodes for source in profile.graph.inputs[name]):
                yield from _ordered_partitions(profile, [*done, list(nodes)])


def _is_lawful(profile: Profile, stages: Sequence[Sequence[str]]) -> bool:
    """Groups unbroken, pins kept, inputs in the first stage, the loss in the last, an operator in each."""
    stage_of = {name: s for s, nodes in enumerate(stages) for name in nodes}
    pins = {node.name: 0 for node in profile.nodes if node.op == "input"}
    pins |= {node.name: -1 for node in profile.nodes if node.op == "loss"}
    computing = {stage_of[node.name] for node in profile.nodes if node.op not in ("input", "loss")}
    return (
        (len(stages) == 1 or len(computing) == len(stages))
        and all(stage_of[name] == pin % len(stages) for name, pin in (pins | profile.pin).items())
        and all(len({stage_of[name] for name in group}) == 1 for group in profile.together if group)
    )
