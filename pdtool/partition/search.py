"""From a profile to the plan: the fastest, or the simplest that is nearly as fast, beside the rivals it beat."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count

import numpy as np

from pdtool.artifacts.plan import ClusterSpec, Plan, Predicted, Rival, Stage, Why
from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster
from pdtool.errors import NoPlanError, UsageError
from pdtool.partition.cost import Costs, Rules, evaluate, in_flight
from pdtool.partition.dynamic import Array, Dynamic
from pdtool.partition.space import Space, build_space
from pdtool.partition.tables import Tables
from pdtool.schedule import NAMES
from pdtool.units import format_bytes, format_seconds

_ROUGH_CUTS = 48
_SLACK = 1 + 1e-9  # sums taken in another order differ in the last digits


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for.

    Attributes:
        schedule, microbatches: see artifacts.plan.Plan.
        workers: use at most so many, the first ones; None: all. Fewer are used where that is faster.
        straight: one stage on every worker, none replicated.
        max_stages: no more stages than that; None: no limit.
        simplest: prefer fewer stages (data parallelism first) within this fraction of the best pace.
    """

    schedule: str = "1f1b"
    microbatches: int = 1
    workers: int | None = None
    straight: bool = False
    max_stages: int | None = None
    simplest: float = 0.03


@dataclass(frozen=True)
class Candidate:
    """One plan: its stages' nodes, their contiguous workers from 0 on, what they cost."""

    stages: Sequence[Sequence[str]]
    workers: Sequence[Sequence[int]]
    costs: Costs

    @property
    def config(self) -> str:
        """`15-1`; long ones are counted."""
        sizes = [len(numbers) for numbers in self.workers]
        return "-".join(map(str, sizes)) if len(sizes) <= 16 else f"{len(sizes)} stages on {sum(sizes)} workers"


@dataclass(frozen=True)
class Search:
    """Everything that may be asked of one profile on one cluster; raises UsageError for options that make no sense."""

    profile: Profile
    cluster: Cluster
    options: Options

    def __post_init__(self) -> None:
        wants = self.options
        if wants.schedule not in NAMES:
            raise UsageError(f"schedule {wants.schedule!r} is unknown", f"choose one of {', '.join(NAMES)}")
        if wants.microbatches < 1 or (wants.schedule == "1f1b" and wants.microbatches != 1):
            raise UsageError(f"--microbatches {wants.microbatches} with schedule {wants.schedule}",
                             "give 1 or more to 1f1b-flush or gpipe; 1f1b has none")  # fmt: skip
        if not 1 <= self.workers <= self.cluster.workers:
            raise UsageError(f"--workers {self.workers}: the cluster has {self.cluster.workers}",
                             f"give between 1 and {self.cluster.workers}")  # fmt: skip
        if wants.max_stages is not None and wants.max_stages < (self.workers if wants.straight else 1):
            least = f"straight pipeline on {self.workers} workers" if wants.straight else "plan"
            raise UsageError(f"a {least} cannot have at most {wants.max_stages} stages", "raise the number of stages")
        if not 0 <= wants.simplest < float("inf"):
            raise UsageError(f"a margin of {wants.simplest} for the simplest plan", "give 0 or more, such as 0.03")

    @property
    def workers(self) -> int:
        """All that may be used."""
        return self.cluster.workers if self.options.workers is None else self.options.workers

    @cached_property
    def space(self) -> Space:
        return build_space(self.profile)

    @cached_property
    def tables(self) -> Tables:
        return Tables(self.profile, self.space)

    @cached_property
    def most_stages(self) -> int:
        """That a plan may have."""
        return min(self.options.max_stages or self.workers, self.space.most_stages)

    def dynamic(
        self,
        workers: int,
        bound: float = np.inf,
        *,
        straight: bool = False,
        least_memory: bool = False,
        tables: Tables | None = None,
    ) -> Dynamic:
        """The recurrence on the first `workers` workers."""
        rules = Rules(
            cluster=self.cluster, schedule=self.options.schedule, microbatches=self.options.microbatches,
            optimizer_state_bytes=self.profile.optimizer_state_bytes, workers=range(workers),
        )  # fmt: skip
        return Dynamic(tables or self.tables, rules, straight, bound * _SLACK, least_memory)

    def solutions(self, dynamic: Dynamic) -> Iterator[tuple[float, list[Array]]]:
        """(pace with fill and drain, layers to trace) of the best plan of at most 1, 2, ... stages."""
        for stages in range(1, min(self.most_stages, dynamic.workers) + 1):
            if self.space.positional:
                layers = dynamic.exactly(stages)
            else:
                dynamic.layer(stages)
                layers = dynamic.layers[: stages + 1]
            yield float(layers[-1][0, 0, 0]) * dynamic.factor(stages), layers

    def fastest(self, dynamic: Dynamic) -> tuple[float, list[Array]]:
        """The best of all `solutions`; without looking at each number of stages where nothing depends on it."""
        if self.options.schedule == "1f1b" and not self.space.positional and self.most_stages >= dynamic.workers:
            return float(dynamic.free[0, 0, 0]), [dynamic.free]
        best: tuple[float, list[Array]] = (np.inf, [])
        floor = float(dynamic.free[0, 0, 0])
        for stages, (pace, layers) in enumerate(self.solutions(dynamic), 1):
            best = min(best, (pace, layers), key=lambda found: found[0])
            if floor * dynamic.factor(stages + 1) >= best[0]:
                break  # more stages cannot win it back
        return best

    def candidate(self, stages: Sequence[Sequence[str]], replicas: Sequence[int]) -> Candidate:
        """Any stages on contiguous workers."""
        ends = np.cumsum(replicas).tolist()
        workers = [range(end - r, end) for end, r in zip(ends, replicas, strict=True)]
        costs = evaluate(self.profile, self.cluster, stages, workers,
                         schedule=self.options.schedule, microbatches=self.options.microbatches)  # fmt: skip
        return Candidate(stages, workers, costs)

    def traced(self, dynamic: Dynamic, layers: list[Array]) -> Candidate:
        """The plan behind a value of the recurrence."""
        pieces = dynamic.trace(layers)
        held = [set(self.space.nodes(p.before, p.after)) for p in pieces]
        stages = [[name for name in self.profile.graph.names if name in nodes] for nodes in held]
        return self.candidate(stages, [p.replicas for p in pieces])

    def best(self) -> tuple[Candidate, list[Candidate]]:
        """The plan to take, and the fastest for each number of workers that was looked at.

        Raises:
            NoPlanError: there is none.
        """
        margin = 1 + self.options.simplest
        straight = self.options.straight
        if straight:
            self._enough_operators()
        work = float(self.tables.forward_backward_s[-1])
        pace, tried = self._rough(), []
        for workers in [self.workers] if straight else range(self.workers, 0, -1):
            if work / workers > pace * margin:
                break  # fewer workers cannot even compute that fast
            dynamic = self.dynamic(workers, pace * margin, straight=straight)
            found = self.fastest(dynamic)
            if np.isfinite(found[0]):
                tried.append((dynamic, found))
            pace = min(pace, found[0])
        if not tried:
            raise self._nothing_fits()
        others = [self.traced(dynamic, layers) for dynamic, (_, layers) in tried]
        return self._simplest([dynamic for dynamic, _ in tried], pace * margin) if not straight else others[0], others

    def _rough(self) -> float:
        """A pace that can be had, found in a small part of the space, so that the search can leave out most of it."""
        cuts = len(self.space.inside)
        some = np.unique(np.linspace(0, cuts - 1, max(_ROUGH_CUTS, self.workers + 1)).astype(int))
        tables = Tables(self.profile, replace(self.space, inside=self.space.inside[some]))
        return self.fastest(self.dynamic(self.workers, straight=self.options.straight, tables=tables))[0]

    def _simplest(self, dynamics: Sequence[Dynamic], bound: float) -> Candidate:
        """Fewest stages first, then the best pace, then the fewest workers."""
        ladders = [(dynamic, self.solutions(dynamic)) for dynamic in reversed(dynamics)]
        for _ in count():
            step = [(dynamic, found) for dynamic, ladder in ladders if (found := next(ladder, None))]
            dynamic, (pace, layers) = min(step, key=lambda entry: entry[1][0])
            if pace <= bound * (1 + 1e-12):
                return self.traced(dynamic, layers)
        raise AssertionError("the bound is that of a plan found before")

    def _enough_operators(self) -> None:
        if self.workers > self.space.most_stages:
            raise NoPlanError(
                f"a straight pipeline on {self.workers} workers needs {self.workers} stages, but the model can be cut "
                f"into {self.space.most_stages} at most", f"give --workers {self.space.most_stages}",
            )  # fmt: skip

    def _nothing_fits(self) -> NoPlanError:
        """Why: from the plan whose most loaded worker needs the least memory."""
        sizes = [self.workers] if self.options.straight else range(self.workers, 0, -1)
        dynamics = [self.dynamic(n, straight=self.options.straight, least_memory=True) for n in sizes]
        found = [(dynamic, *self.fastest(dynamic)) for dynamic in dynamics]
        dynamic, need, layers = min(found, key=lambda entry: entry[1])
        limit = self.cluster.memory_bytes
        if not np.isfinite(need) or limit is None:
            return NoPlanError("no division into stages keeps every pinned node where it is pinned",
                               "loosen HINTS pin, or allow another number of stages")  # fmt: skip
        least = self.traced(dynamic, layers)
        memory = least.costs.memory_bytes
        stage = memory.index(max(memory))
        return NoPlanError(
            f"no plan fits: the one that needs the least memory, {least.config}, lacks "
            f"{format_bytes(memory[stage] - limit)} in stage {stage}, which needs {format_bytes(memory[stage])} "
            f"on a worker that has {format_bytes(limit)}",
            f"give each worker at least {memory[stage]} bytes, or use more workers or smaller minibatches",
        )


def make_plan(profile: Profile, profile_path: str, cluster: Cluster, options: Options | None = None) -> Plan:
    """The best plan for `profile` on `cluster`, with its figures and its rivals.

    Raises:
        UsageError: the options make no sense together or on this cluster.
        NoPlanError: no plan fits the memory, the pins or the number of operators.
    """
    search = Search(profile, cluster, options or Options())
    chosen, others = search.best()
    wants = search.options
    replicas = [len(numbers) for numbers in chosen.workers]
    flight = in_flight(wants.schedule, replicas, wants.microbatches)
    plan = Plan.model_validate({
        "name": f"{profile.name}-{cluster.topology}",
        "model": profile.model,
        "profile": str(profile_path),
        "digests": {**profile.digests, str(profile_path): profile.content_sha256},
        "batch_size": profile.batch_size,
        "cluster": ClusterSpec.of(cluster),
        "schedule": wants.schedule,
        "weights": "stash" if wants.schedule == "1f1b" else "flush",
        "microbatches": wants.microbatches,
        "stages": tuple(
            Stage(nodes=tuple(profile.graph.compress(nodes)), replicas=len(numbers), workers=tuple(numbers),
                  in_flight=w)
            for nodes, numbers, w in zip(chosen.stages, chosen.workers, flight, strict=True)
        ),
    })  # fmt: skip
    note = f"; {search.space.coarsened}" if search.space.coarsened else ""
    why = Why(bottleneck=chosen.costs.bottleneck + note, rivals=tuple(_rivals(search, chosen, others)))
    return plan.model_copy(update={"why": why, "predicted": _predicted(plan, profile, chosen.costs)})


def refresh(plan: Plan, profile: Profile) -> Plan:
    """The same plan with figures for what it says now: after an edit by hand, or under another schedule.

    Raises:
        ArtifactError: its stages do not fit the profile.
    """
    costs = evaluate(
        profile, plan.cluster.cluster(), plan.stage_nodes(profile), [stage.workers for stage in plan.stages],
        schedule=plan.schedule, microbatches=plan.microbatches, flight=[stage.in_flight for stage in plan.stages],
    )  # fmt: skip
    why = Why(bottleneck=costs.bottleneck)
    return plan.model_copy(update={"why": why, "predicted": _predicted(plan, profile, costs)})


def _predicted(plan: Plan, profile: Profile, costs: Costs) -> Predicted:
    """The gain is over data parallelism on all workers of the cluster, whether or not that fits in memory."""
    cluster = plan.cluster.cluster()
    alone = evaluate(profile, cluster, [profile.graph.names], [range(cluster.workers)],
                     schedule=plan.schedule, microbatches=plan.microbatches)  # fmt: skip
    pace = costs.bottleneck_s
    return Predicted(
        bottleneck_s=pace,
        throughput_samples_per_s=plan.batch_size / pace if pace else 0.0,
        gain_over_data_parallel=alone.bottleneck_s / pace if pace else 1.0,
        compute_s=costs.compute_s,
        allreduce_s=costs.allreduce_s,
        transfer_s=costs.transfer_s,
        memory_bytes=costs.memory_bytes,
        traffic_bytes=costs.traffic_bytes,
        plan_sha256=plan.plan_sha256,
    )


def _rivals(search: Search, chosen: Candidate, others: Sequence[Candidate]) -> Iterator[Rival]:
    """What everyone asks about, then the two fastest of `others`; each configuration once, never the chosen one."""
    names = search.profile.graph.names
    known = [(f"data parallelism ({search.workers})", search.candidate([names], [search.workers]))]
    depth = min(search.workers, search.space.most_stages)
    straight = search.dynamic(depth, straight=True)
    found = search.fastest(straight) if depth <= search.most_stages else (np.inf, [])
    if depth > 1 and np.isfinite(found[0]):
        pipeline = search.traced(straight, found[1])
        known.append((f"straight pipeline ({depth} stages)", pipeline))
        yield Rival(
            plan=f"model parallelism ({depth} stages)",
            bottleneck_s=sum(pipeline.costs.compute_s) + sum(pipeline.costs.transfer_s),
            why="one minibatch in flight: every stage waits for all others",
        )
    known.append(("one worker", search.candidate([names], [1])))
    seen = {chosen.config}
    rest = sorted(others, key=lambda other: (other.costs.bottleneck_s, other.config))
    for label, rival in [*known, *((other.config, other) for other in rest)]:
        if rival.config not in seen and len(seen) < len(known) + 3:
            yield Rival(plan=label, bottleneck_s=rival.costs.bottleneck_s, why=_why_not(search, rival, chosen))
        seen.add(rival.config)


def _why_not(search: Search, rival: Candidate, chosen: Candidate) -> str:
    memory, limit = max(rival.costs.memory_bytes), search.cluster.memory_bytes
    if limit is not None and memory > limit:
        stage = rival.costs.memory_bytes.index(memory)
        return f"does not fit: stage {stage} needs {format_bytes(memory)}, a worker has {format_bytes(limit)}"
    gain = chosen.costs.bottleneck_s - rival.costs.bottleneck_s
    if gain <= 0:
        return rival.costs.bottleneck
    if gain <= search.options.simplest * rival.costs.bottleneck_s * _SLACK:
        return f"{format_seconds(gain)} faster, within the margin of {search.options.simplest:.1%}, but not as simple"
    return f"{format_seconds(gain)} faster, but not what was asked for"
