"""The search: exact dynamic programming over (cut, workers, replicas), from the last stage to the first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.plan import ClusterSpec, Plan, Predicted, Rival, Stage, Why
from pdtool.artifacts.profile import Profile
from pdtool.cluster import Cluster, Level
from pdtool.errors import NoPlanError, UsageError
from pdtool.partition import cost
from pdtool.partition.space import Space
from pdtool.units import format_bytes, format_seconds

_TIES = 1e-9  # relative: two plans this close are equally fast


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked for.

    Attributes:
        workers: how many to use at most; None: all of the cluster.
        straight: exactly one worker for each stage, no replicas.
        schedule, microbatches: see artifacts.plan.Plan.
        simplest: the plan with the fewest stages within this fraction of the fastest is chosen.
    """

    workers: int | None = None
    straight: bool = False
    schedule: str = "1f1b"
    microbatches: int = 1
    simplest: float = 0.03


@dataclass(frozen=True)
class Choice:
    """A plan found: (from cut, to cut, replicas) of each stage, and its first worker."""

    stages: tuple[tuple[int, int, int], ...]
    first_worker: int

    @property
    def replicas(self) -> tuple[int, ...]:
        """Of each stage."""
        return tuple(r for _, _, r in self.stages)

    def workers(self) -> list[list[int]]:
        """Contiguous, stage after stage."""
        placed, at = [], self.first_worker
        for r in self.replicas:
            placed.append(list(range(at, at + r)))
            at += r
        return placed


class Search:
    """Dynamic programming over suffixes of the graph.

    best[m][r][i] is the best pace of all nodes outside cut i on the last m workers, when the first of these stages
    has r replicas. It is the minimum over the cut j where that stage ends of

        max( stage(i, j, r),  min over r' of max( border(j, r, r'), best[m − r][r'][j] ) )

    Knowing m, the stage's place in the cluster is known, so the links are those really shared, and so is its number
    of minibatches in flight, ceil(m / r) (schedule.default_in_flight), so memory is exact. O(n² W² + n W³) for n cuts
    and W workers. It promises the optimum of this space; contiguous workers and cuts of a coarsened graph bound it.
    """

    def __init__(self, profile: Profile, cluster: Cluster, space: Space, options: Options) -> None:
        self.profile = profile
        self.cluster = cluster
        self.space = space
        self.options = options
        self.total = options.workers or cluster.workers
        self._paces: dict[tuple[int, Level | None], cost.Array] = {}

    def run(self, limit: float | None = None) -> Choice | None:
        """The fastest plan; with `limit`, the fewest stages (then the fastest) among those not slower than it.

        None when no plan fits.
        """
        table: dict[tuple[int, int], _Row] = {}
        for m in range(1, self.total + 1):
            for r in (1,) if self.options.straight else range(1, m + 1):
                rest = self._rest(table, m, r, limit)
                pace = _within(np.maximum(self._stage(m, r), rest.pace[None, :]), limit)
                to = np.argmin(_key(pace, rest.count[None, :], limit), axis=1)
                rows = np.arange(len(to))
                table[m, r] = _Row(pace[rows, to], rest.count[to] + 1, to, rest.replicas[to])
        ends = [
            (_key(row.pace[0], row.count[0], limit), m, r)
            for (m, r), row in table.items()
            if not self.options.straight or m == self.total
        ]
        fastest = min(ends, default=(np.inf, 0, 0))[0]
        if not np.isfinite(fastest):
            return None
        _, m, r = min((m, m, r) for key, m, r in ends if key <= fastest * (1 + _TIES))
        return self._read(table, m, r)

    def _stage(self, m: int, r: int) -> cost.Array:
        """(cuts, cuts) pace of a stage on workers [W − m, W − m + r); infinite where it may not be."""
        first = self.total - m
        pace = self._pace(r, self.cluster.span(first, first + r))
        if self.cluster.memory_bytes is None:
            return pace
        memory = cost.memory_bytes(
            self.space.parameters, self.space.stash, self.space.received, self._in_flight(m, r),
            self.profile.optimizer_state_bytes,
        )  # fmt: skip
        return np.where(memory <= self.cluster.memory_bytes, pace, np.inf)

    def _pace(self, r: int, link: Level | None) -> cost.Array:
        """(cuts, cuts) pace of a stage of r replicas joined by `link`; the same wherever such a link is."""
        if (r, link) not in self._paces:
            space, widest = self.space, self.cluster.span(0, self.cluster.workers)
            allreduce = cost.allreduce_s(space.parameters, r, link) + np.where(
                space.tied > 0, cost.tied_s(space.tied, r, widest), 0.0
            )
            pace = cost.stage_s(cost.compute_s(space.seconds, r), allreduce)
            self._paces[r, link] = np.where(space.inside, pace, np.inf)
        return self._paces[r, link]

    def _in_flight(self, m: int, r: int) -> int:
        """Of a stage with r replicas where it and the later stages have m workers."""
        return cost.in_flight(self.options.schedule, (r, *[1] * (m - r)), self.options.microbatches)[0]

    def _rest(self, table: dict[tuple[int, int], _Row], m: int, r: int, limit: float | None) -> _Row:
        """The best that can follow a stage of r replicas that ends at cut j, its border included."""
        n, first = len(self.space.cuts), self.total - m
        rest = _Row(np.full(n, np.inf), np.zeros(n), np.zeros(n, dtype=int), np.zeros(n, dtype=int))
        if m == r:
            rest.pace[-1] = 0.0
        for following in range(1, m - r + 1):
            row = table.get((m - r, following))
            if row:
                link = self.cluster.span(first, first + r + following)
                border = cost.transfer_s(self.space.activations, self.space.gradients, link)
                pace = _within(np.maximum(border, row.pace), limit)
                better = _key(pace, row.count, limit) < _key(rest.pace, rest.count, limit)
                rest.pace[better], rest.count[better] = pace[better], row.count[better]
                rest.replicas[better] = following
        return rest

    def _read(self, table: dict[tuple[int, int], _Row], m: int, r: int) -> Choice:
        stages, i, first = [], 0, self.total - m
        while r:
            row = table[m, r]
            j, following = int(row.to[i]), int(row.replicas[i])
            stages.append((i, j, r))
            i, m, r = j, m - r, following
        return Choice(tuple(stages), first)


@dataclass(frozen=True)
class _Row:
    """For each cut: the best pace, its number of stages, where the first stage ends, replicas of the next (0: none)."""

    pace: cost.Array
    count: cost.Array
    to: NDArray[np.int_]
    replicas: NDArray[np.int_]


def _key(pace: cost.Array, count: cost.Array, limit: float | None) -> cost.Array:
    """What is minimised: the pace, or the number of stages and then the pace when every pace is within `limit`."""
    return pace if limit is None else count * (2 * limit + 1e-12) + pace


def _within(pace: cost.Array, limit: float | None) -> cost.Array:
    return pace if limit is None else np.where(pace <= limit, pace, np.inf)


def make_plan(profile: Profile, profile_path: str, cluster: Cluster, options: Options) -> Plan:
    """The best plan, with its predictions and the rivals it beat.

    Raises:
        NoPlanError: nothing fits: too little memory, or more stages wanted than operators.
        UsageError: options that contradict the cluster or each other.
    """
    _check(cluster, options)
    space = Space.of(profile)
    search = Search(profile, cluster, space, options)
    fastest = search.run()
    if fastest is None:
        raise _explain(profile, cluster, space, search)
    costs = _costs(search, fastest)
    limit = costs.bottleneck_s / cost.flush_factor(options.schedule, len(fastest.stages), options.microbatches)
    simplest = search.run(limit * (1 + options.simplest)) or fastest
    chosen = _shifted(search, simplest)
    return _plan(profile, profile_path, search, chosen, _rivals(search, fastest, chosen))


def refresh(plan: Plan, profile: Profile) -> Plan:
    """A plan edited by hand, with its predictions computed anew."""
    costs = cost.evaluate(
        profile,
        plan.cluster.cluster(),
        plan.stage_nodes(profile),
        [stage.workers for stage in plan.stages],
        flight=[stage.in_flight for stage in plan.stages],
        schedule=plan.schedule,
        microbatches=plan.microbatches,
    )
    alone = _data_parallel(profile, plan.cluster.cluster(), plan.cluster.cluster().workers, plan.schedule)
    bare = plan.model_copy(update={"predicted": None, "why": Why(bottleneck=costs.bottleneck)})
    return _predicted(bare, costs, alone.bottleneck_s)


def _check(cluster: Cluster, options: Options) -> None:
    if options.workers is not None and not 1 <= options.workers <= cluster.workers:
        raise UsageError(f"--workers {options.workers}: the cluster has {cluster.workers}", "give 1 to that many")
    if options.schedule == "1f1b" and options.microbatches != 1:
        raise UsageError(
            f"--microbatches {options.microbatches} with schedule 1f1b, which has none",
            "choose --schedule 1f1b-flush or gpipe",
        )
    if options.simplest < 0:
        raise UsageError(f"--simplest {options.simplest:.0%} is negative", "give a share such as 3%")


def _costs(search: Search, choice: Choice) -> cost.Costs:
    flight = cost.in_flight(search.options.schedule, choice.replicas, search.options.microbatches)
    return cost.evaluate(
        search.profile,
        search.cluster,
        [search.space.nodes(i, j) for i, j, _ in choice.stages],
        choice.workers(),
        flight=flight,
        schedule=search.options.schedule,
        microbatches=search.options.microbatches,
    )


def _data_parallel(profile: Profile, cluster: Cluster, workers: int, schedule: str) -> cost.Costs:
    """All workers replicate the whole model."""
    names = profile.graph.names
    return cost.evaluate(profile, cluster, [names], [range(workers)], flight=[1], schedule=schedule)


def _shifted(search: Search, choice: Choice) -> Choice:
    """The same plan on the first workers instead of the last, when some stay idle and that is no worse."""
    moved = Choice(choice.stages, 0)
    worse = _costs(search, moved).bottleneck_s > _costs(search, choice).bottleneck_s * (1 + _TIES)
    return choice if worse else moved


def _rivals(search: Search, fastest: Choice, chosen: Choice) -> list[tuple[str, float, str]]:
    """(plan, bottleneck, why it lost) of the plans that everyone asks about."""
    pace = _costs(search, chosen).bottleneck_s
    rivals = []

    def add(name: str, costs: cost.Costs | None, missing: str = "") -> None:
        if costs is None:
            rivals.append((name, 0.0, missing))
            return
        limit = search.cluster.memory_bytes
        most = max(costs.memory_bytes)
        if limit is not None and most > limit:
            why = f"needs {format_bytes(most)} of memory on a worker, which has {format_bytes(limit)}"
        elif costs.bottleneck_s < pace * (1 - _TIES):
            why = f"{1 - costs.bottleneck_s / pace:.1%} faster, but has more stages (--simplest 0% takes it)"
        else:
            why = f"{costs.bottleneck} takes {format_seconds(costs.bottleneck_s)}"
        rivals.append((name, costs.bottleneck_s, why))

    one_stage = len(chosen.stages) == 1
    if not (one_stage and chosen.replicas[0] == search.total):
        add(f"data parallelism ({search.total})",
            _data_parallel(search.profile, search.cluster, search.total, search.options.schedule))  # fmt: skip
    if chosen.stages != fastest.stages:
        add("-".join(map(str, fastest.replicas)), _costs(search, fastest))
    if not (set(chosen.replicas) == {1} and len(chosen.stages) == search.total) and search.total > 1:
        straight = Search(search.profile, search.cluster, search.space, replace(search.options, straight=True)).run()
        add(f"straight pipeline ({search.total} stages)", _costs(search, straight) if straight else None,
            "the model has too few places to cut, or a stage does not fit in memory")  # fmt: skip
    seconds = float(search.space.seconds[0, -1])
    if len(chosen.stages) > 1 or chosen.replicas[0] > 1:
        rivals.append(("one worker", seconds, f"all the compute takes {format_seconds(seconds)}"))
    return rivals


def _plan(
    profile: Profile, path: str, search: Search, choice: Choice, rivals: Sequence[tuple[str, float, str]]
) -> Plan:
    costs = _costs(search, choice)
    flight = cost.in_flight(search.options.schedule, choice.replicas, search.options.microbatches)
    note = f"; {search.space.coarsened}, so a faster plan may exist" if search.space.coarsened else ""
    plan = Plan(
        name=f"{profile.name}-{search.cluster.topology}",
        digests={**profile.digests, path: profile.content_sha256},
        model=profile.model,
        profile=path,
        batch_size=profile.batch_size,
        cluster=ClusterSpec.of(search.cluster),
        schedule=search.options.schedule,  # type: ignore[arg-type]  # one of schedule.NAMES, checked by the model
        weights="stash" if search.options.schedule == "1f1b" else "flush",
        microbatches=search.options.microbatches,
        stages=tuple(
            Stage(
                nodes=tuple(profile.graph.compress(search.space.nodes(i, j))),
                replicas=r,
                workers=tuple(workers),
                in_flight=w,
            )
            for (i, j, r), workers, w in zip(choice.stages, choice.workers(), flight, strict=True)
        ),
        why=Why(
            bottleneck=f"{costs.bottleneck}{note}",
            rivals=tuple(Rival(plan=name, bottleneck_s=pace, why=why) for name, pace, why in rivals),
        ),
    )
    alone = _data_parallel(profile, search.cluster, search.total, search.options.schedule)
    return _predicted(plan, costs, alone.bottleneck_s)


def _predicted(plan: Plan, costs: cost.Costs, data_parallel_s: float) -> Plan:
    pace = costs.bottleneck_s
    return plan.model_copy(update={"predicted": Predicted(
        bottleneck_s=pace,
        throughput_samples_per_s=plan.batch_size / pace if pace else 0.0,
        gain_over_data_parallel=data_parallel_s / pace if pace else 1.0,
        compute_s=costs.compute_s,
        allreduce_s=costs.allreduce_s,
        transfer_s=costs.transfer_s,
        memory_bytes=costs.memory_bytes,
        traffic_bytes=costs.traffic_bytes,
        plan_sha256=plan.plan_sha256,
    )})  # fmt: skip


def _explain(profile: Profile, cluster: Cluster, space: Space, search: Search) -> NoPlanError:
    """Why nothing fits, and the smallest change that would."""
    cuts, total = len(space.blocks), search.total
    deepest = _deepest(space)
    if search.options.straight and total > deepest:
        return NoPlanError(
            f"a straight pipeline on {total} workers needs {total} stages, but the model can be cut into {deepest}",
            f"use --workers {deepest}, or allow replicas by leaving --straight out",
        )
    limit = cluster.memory_bytes
    if limit is None:
        return NoPlanError(f"no plan keeps the pinned modules in place ({cuts} groups of operators)", "mend HINTS pin")
    roomy = replace(cluster, memory_bytes=None)
    choice = Search(profile, roomy, space, search.options).run()
    if choice is None:
        return NoPlanError(f"no plan keeps the pinned modules in place ({cuts} groups of operators)", "mend HINTS pin")
    needs = _smallest_need(profile, roomy, space, search.options)
    memory = _costs(Search(profile, roomy, space, search.options), choice).memory_bytes
    stage = max(range(len(memory)), key=memory.__getitem__)
    return NoPlanError(
        f"no plan on {total} worker(s) fits in {format_bytes(limit)}: the fastest needs {format_bytes(memory[stage])} "
        f"for its stage {stage}, {format_bytes(memory[stage] - limit)} more than there is",
        f"give each worker at least {format_bytes(needs)}, more workers, or profile a smaller minibatch",
    )


def _smallest_need(profile: Profile, cluster: Cluster, space: Space, options: Options) -> int:
    """The least memory per worker (to 1 %) with which some plan fits, by bisection."""
    low, high = 0.0, float(max(1.0, 1e3 * (space.parameters[0, -1] + space.stash[0, -1] + 1)))
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        fits = Search(profile, replace(cluster, memory_bytes=int(middle)), space, options).run()
        low, high = (low, middle) if fits else (middle, high)
    return int(high * 1.01)


def _deepest(space: Space) -> int:
    """The most stages that the graph can be cut into."""
    depth = np.zeros(len(space.cuts), dtype=int)
    for j in range(1, len(space.cuts)):
        before = np.flatnonzero(space.inside[:, j])
        depth[j] = 1 + depth[before].max() if len(before) else 0
    return int(depth[-1])
