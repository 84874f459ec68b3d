"""The plans that everyone asks about: data parallelism, the straight pipeline, GPipe, model parallelism."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pdtool.artifacts.plan import Plan, Rival
from pdtool.artifacts.profile import Profile
from pdtool.partition.attempt import Candidate, as_plan
from pdtool.partition.cost import SLACK
from pdtool.partition.evaluate import Way, evaluate
from pdtool.partition.flight import wanted
from pdtool.partition.layout import MOST_WORKERS, Layout
from pdtool.partition.search import Options, Search
from pdtool.units import format_bytes, format_seconds

_MICROBATCHES = 4  # in one update of GPipe, for each stage: its paper's advice (section 2.3)
_OTHERS = 2  # rivals besides the known ones


def rivals(
    search: Search, chosen: Candidate, asked: Sequence[tuple[str, Candidate]], others: Sequence[Candidate]
) -> Iterator[Rival]:
    """What everyone asks about (`known`), then the two fastest of `others`; each once, never the chosen one."""
    seen = [chosen]
    more = [(other.config, other) for other in others]
    left = _OTHERS
    for label, rival in [*asked, *more]:
        named = label != rival.config
        if any(_same(rival, other) for other in seen) or not (named or left):
            continue
        seen.append(rival)
        left -= not named
        other = f", {rival.way.schedule}" if rival.way.schedule != chosen.way.schedule and not named else ""
        yield Rival(plan=label + other, bottleneck_s=rival.costs.bottleneck_s, why=_why_not(search, rival, chosen))


def _same(a: Candidate, b: Candidate) -> bool:
    return (a.config, a.way.schedule, _one_by_one(a)) == (b.config, b.way.schedule, _one_by_one(b))


def _one_by_one(plan: Candidate) -> bool:
    return set(plan.costs.in_flight) == {1}


def known(search: Search, way: Way) -> Iterator[tuple[str, Candidate]]:
    """Label and plan of each, on the workers that may be used; the straight ones on as many as there are stages."""
    alone = replace(way, copies=1)
    yield f"data parallelism ({search.workers})", search.data_parallel(alone)
    pipeline = straight(search, alone)
    if pipeline:
        depth = len(pipeline.stages)
        yield f"straight pipeline ({depth} stages)", pipeline
        gpipe = replace(alone, schedule="gpipe", microbatches=_MICROBATCHES * depth)
        yield f"GPipe ({depth} stages, {gpipe.microbatches} microbatches)", again(search, pipeline, gpipe)
        yield f"model parallelism ({depth} stages)", again(search, pipeline, alone, flight=[1] * depth)
    yield "one worker", one_worker(search, alone)


def one_worker(search: Search, way: Way) -> Candidate:
    """All on the first."""
    return again(search, replace(search.data_parallel(way), workers=[[0]]), way)


def straight(search: Search, way: Way) -> Candidate | None:
    """The fastest pipeline of one worker a stage on as many workers as the model can be cut for; None: none fits."""
    depth = min(search.workers, search.whole.most_stages, search.options.max_stages or search.workers, MOST_WORKERS)
    attempt = search.attempt(Layout.of(search.cluster, depth), way, straight=True)
    found = attempt.fastest
    return attempt.traced(found) if depth > 1 and found.pace_s < float("inf") else None


def again(search: Search, plan: Candidate, way: Way, flight: Sequence[int] | None = None) -> Candidate:
    """The same stages run another way."""
    recompute = None if flight is None else [False] * len(plan.stages)
    costs = evaluate(search.profile, search.cluster, plan.stages, plan.workers, way, flight=flight, recompute=recompute)
    return replace(plan, way=way, costs=costs)


def _why_not(search: Search, rival: Candidate, chosen: Candidate) -> str:
    memory, limit = max(rival.costs.memory_bytes), search.cluster.memory_bytes
    if limit is not None and memory > limit:
        stage = rival.costs.memory_bytes.index(memory)
        return f"does not fit: stage {stage} needs {format_bytes(memory)}, a worker has {format_bytes(limit)}"
    gain = chosen.costs.bottleneck_s - rival.costs.bottleneck_s
    if gain <= 0:
        return rival.costs.bottleneck
    if gain <= search.options.simplest * rival.costs.bottleneck_s * SLACK:
        return f"{format_seconds(gain)} faster, within the margin of {search.options.simplest:.1%}, but not as simple"
    most = search.options.max_stages or len(rival.stages)
    if search.options.straight or len(rival.stages) > most or rival.way.schedule != chosen.way.schedule:
        return f"{format_seconds(gain)} faster, but not what was asked for"
    return f"{format_seconds(gain)} faster by these formulas, which hide what the simulation shows"


def known_plans(profile: Profile, plan: Plan) -> list[tuple[str, Plan]]:
    """The same as whole plans, for the cluster and the formulas of `plan`, with the minibatches in flight they want."""
    search = Search(profile, plan.cluster.cluster(), Options())
    made = []
    for label, rival in known(search, Way()):
        if label != "one worker":
            best = rival if _one_by_one(rival) else wanted(profile, search.cluster, rival, search.options.simplest)
            made.append((label, as_plan(profile, plan.profile, search.cluster, best)))
    return made
