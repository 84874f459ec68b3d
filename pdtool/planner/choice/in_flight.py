"""How many minibatches in flight a plan gets when messages take time, links are shared and rounds wait.

If messages took no time, the schedule's own number would keep all workers busy (PipeDream, section 3.2). Without a
flush, each further minibatch costs memory and delays gradients by one more update. A plan gets more only if they fit
and the simulation shows a gain of at least IN_FLIGHT_MARGIN, or if it then replaces a plan with more stages or workers
(see `selection`). With a flush they cost only memory: a plan gets the fewest that make it fastest.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache, partial

from pdtool.planner.choice.local_search import LocalSearch
from pdtool.planner.formulas import TOLERANCE, StageMemory
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import Candidate, Evaluator, link_times_s
from pdtool.planner.simulator.engine import is_too_large, steady_state_s
from pdtool.planner.simulator.job import simulation_effort
from pdtool.planner.stage_costs import StageLoad, stage_loads

IN_FLIGHT_MARGIN = 0.1  # fraction of the time per minibatch that fewer minibatches in flight may cost
_MAX_FACTOR = 2  # times what the schedule wants
# With a flush
_NEGLIGIBLE = 1e-4  # fraction of the time per minibatch: a smaller gain is not worth a minibatch in flight
_MIN_TRIES, _MAX_TRIES = 4, 60
_MAX_EFFORT = 150_000  # actions times workers of all tries together: about a quarter of a second


def with_fewest_in_flight(
    evaluator: Evaluator,
    candidate: Candidate,
    margin: float,
    *,
    enough_s: float = 0.0,
    limit_s: float = math.inf,
    patience: float = 1.0,
) -> tuple[Candidate, float]:
    """Simulate a plan with the most minibatches in flight, and unless that is too slow, with few, then with more and
    more; return it with the fewest that lose no more than IN_FLIGHT_MARGIN, and its seconds per minibatch then.

    If no simulation is possible, return the plan with the schedule's own number, and infinity.

    Args:
        margin: fraction of the time per minibatch; for smaller gains no more minibatches are tried.
        enough_s: seconds per minibatch that the plan cannot beat; close to it the search stops.
        limit_s: seconds per minibatch above which times do not matter and may be returned as infinite.
        patience: factor on the usual time limit of each simulation.
    """
    placement = candidate.placement
    if evaluator.options.in_flight or not placement.execution.has_choice_in_flight:
        return candidate, _simulated_s(evaluator, candidate.placement, limit_s, patience)
    if placement.execution.kind.flushes:
        deepened, time_s = with_fastest_in_flight(evaluator, placement, enough_s, limit_s, patience)
        return evaluator.with_in_flight(candidate, deepened.in_flight), time_s
    choices = _choices(evaluator, candidate, margin)
    while len(choices) > 1 and not _can_be_simulated(choices[-1].placement, patience):
        del choices[-1]
    *fewer, most = choices
    most_s = _simulated_s(evaluator, most.placement, limit_s * (1 + IN_FLIGHT_MARGIN), patience)
    if most_s == math.inf:  # fewer are no faster
        return candidate, math.inf
    simulated = []
    for choice in fewer:
        time_s = _simulated_s(evaluator, choice.placement, most_s * (1 + IN_FLIGHT_MARGIN), patience)
        simulated.append((choice, time_s))
        if time_s <= enough_s * (1 + margin):
            break  # more in flight bring nothing
    simulated.append((most, most_s))
    fastest_s = min(time_s for _, time_s in simulated)
    return next(choice for choice in simulated if choice[1] <= fastest_s * (1 + IN_FLIGHT_MARGIN))


def with_fewest_below(
    evaluator: Evaluator, candidate: Candidate, limit_s: float, most: int
) -> tuple[Candidate, float] | None:
    """Return a plan without a flush with the fewest minibatches in flight that take less than `limit_s`, and its time;
    None if none do.

    Args:
        most: minibatches in flight at all replicas of the first stage of a copy.
    """
    placement = candidate.placement
    execution = placement.execution
    is_fixed = not execution.has_choice_in_flight or execution.kind.flushes or execution.copies > 1
    if is_fixed or evaluator.options.in_flight:
        return None

    @cache
    def deepened(first: int) -> tuple[Candidate, float]:
        deeper = evaluator.with_in_flight(candidate, execution.in_flight_from(placement.replicas, first))
        return deeper, _simulated_s(evaluator, deeper.placement, limit_s) if evaluator.fits(deeper) else math.inf

    numbers = range(placement.in_flight[0], most // placement.replicas_per_copy[0] + 1)  # the schedule's own may do
    if not numbers or deepened(numbers[-1])[1] == math.inf:
        return None
    return deepened(numbers[bisect_left(numbers, True, key=lambda first: deepened(first)[1] < math.inf)])


def with_wanted_in_flight(evaluator: Evaluator, placement: Placement) -> Placement:
    """Return a placement with the numbers in flight that were asked for. If none were asked for and it flushes, use
    those that make it fastest."""
    execution, replicas = placement.execution, placement.replicas[: placement.pipeline_depth]
    if not execution.has_choice_in_flight:
        return placement
    if evaluator.options.in_flight:
        return placement.with_in_flight(execution.in_flight_from(replicas, evaluator.options.in_flight))
    return with_fastest_in_flight(evaluator, placement)[0] if execution.kind.flushes else placement


def with_fastest_in_flight(
    evaluator: Evaluator, placement: Placement, enough_s: float = 0.0, limit_s: float = math.inf, patience: float = 1.0
) -> tuple[Placement, float]:
    """Find the fewest minibatches in flight that make a flushing plan fastest; return it with its seconds per
    minibatch.

    First, find the fewest that are as fast as the most that fit in memory, with evenly fewer at each later stage
    (ScheduleKind.deepening). Then try one more or one fewer at each stage, as long as that is faster: this adapts to
    long messages. A test tries all numbers for random pipelines of two and three stages: none are faster.

    Args: see `with_fewest_in_flight`.
    """

    def simulate(numbers: tuple[int, ...], _: float) -> float:
        return _simulated_s(evaluator, placement.with_in_flight(numbers), limit_s, patience)

    max_tries = max(_MIN_TRIES, min(_MAX_TRIES, _MAX_EFFORT // simulation_effort(placement)))
    deepened = _deepened(placement, largest := _largest(evaluator, placement))
    tried = LocalSearch(deepened[0], simulate, max_tries, min_gain=_NEGLIGIBLE, size=sum)
    tried.add(deepened[0])

    def is_fast(numbers: tuple[int, ...]) -> bool:
        tried.add(numbers)
        return tried.times_s.get(numbers, math.inf) * (1 - _NEGLIGIBLE) <= tried.fastest_s < math.inf

    if tried.fastest_s > enough_s * TOLERANCE:
        tried.add(deepened[-1])
        bisect_left(deepened, True, key=is_fast)
        tried.climb(partial(_near, largest), enough_s=enough_s * TOLERANCE)
    return placement.with_in_flight(tried.best), tried.fastest_s


def _deepened(placement: Placement, largest: Sequence[int]) -> list[tuple[int, ...]]:
    """Return more and more in flight, from the usual numbers to the largest, in growing steps."""
    replicas, more, deepened = placement.replicas[: placement.pipeline_depth], 0, []
    while more <= len(replicas) * max(largest):
        deepened.append(tuple(map(min, placement.execution.deeper_in_flight(replicas, more), largest)))
        more += 1 + more // 4
    return list(dict.fromkeys([*deepened, tuple(largest)]))


def _largest(evaluator: Evaluator, placement: Placement) -> tuple[int, ...]:
    """Return the most for each stage that an update has and memory allows, but no fewer than usual. With chunks, count
    each of a worker's chunks as large as its largest."""
    limit, depth = evaluator.cluster.memory_bytes, placement.pipeline_depth
    replicas = placement.replicas[:depth]
    most, usual = placement.execution.max_in_flight(replicas), placement.execution.usual_in_flight(replicas)
    loads = stage_loads(evaluator.profile, placement.stages)
    ratio = evaluator.profile.optimizer_state_bytes
    held = [StageMemory.of(load, ratio, twice) for load, twice in zip(loads, placement.recompute, strict=True)]
    numbers = []
    for s, w in enumerate(usual):
        parts = held[s::depth]
        minibatch_bytes = max(part.minibatch_bytes for part in parts)
        largest = most[s]
        if limit is not None and minibatch_bytes:
            largest = min(largest, (limit - sum(part.peak_bytes(1, 0) for part in parts)) // minibatch_bytes)
        numbers.append(max(w, int(largest)))
    return tuple(numbers)


def _near(largest: Sequence[int], numbers: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Yield the numbers with one more or one fewer at one stage."""
    for s, w in enumerate(numbers):
        for changed in (w + 1, w - 1):
            if 1 <= changed <= largest[s]:
                yield (*numbers[:s], changed, *numbers[s + 1 :])


def _can_be_simulated(placement: Placement, patience: float) -> bool:
    return not is_too_large(placement, patience) and placement.is_executable


def _simulated_s(evaluator: Evaluator, placement: Placement, limit_s: float, patience: float = 1.0) -> float:
    """Simulated seconds per minibatch; infinite above the limit, and if the plan cannot be executed."""
    profile, cluster = evaluator.profile, evaluator.cluster
    time_s = steady_state_s(placement, profile, cluster, limit_s, patience=patience)
    return time_s if time_s is not None and time_s < limit_s and placement.is_executable else math.inf


def _choices(evaluator: Evaluator, candidate: Candidate, margin: float) -> list[Candidate]:
    """Return the plan with the schedule's own number in flight, with enough to hide its round trips, and with the most
    that are ever tried. Each comes once, from few to many, as far as memory goes."""
    placement = candidate.placement
    default = placement.in_flight
    model = evaluator.model_of(placement.workers, placement.execution)
    limit = evaluator.cluster.memory_bytes or math.inf
    loads = stage_loads(evaluator.profile, placement.stages)
    largest = [
        next((n for n in range(_MAX_FACTOR * w, w, -1) if model.memory_bytes(load, r, n, recompute) <= limit), w)
        for load, r, w, recompute in zip(loads, placement.replicas_per_copy, default, placement.recompute, strict=True)
    ]
    wanted = _wanted(evaluator, candidate, loads, largest, margin)
    largest = _decreasing(placement, [*largest[:-1], default[-1]])
    choices = {default, tuple(wanted), tuple(_decreasing(placement, wanted)), tuple(largest)}
    return [evaluator.with_in_flight(candidate, numbers) for numbers in sorted(choices, key=lambda n: (sum(n), n))]


def _wanted(
    evaluator: Evaluator, candidate: Candidate, loads: Sequence[StageLoad], largest: Sequence[int], margin: float
) -> list[int]:
    """Return round trip over time per minibatch for each stage, at most `largest`: as many in flight hide the trip.

    A round trip is from a forward's start to the end of its backward: all later stages compute, and messages travel
    there and back. If rounds wait longer for their replicas, that counts instead (see `_hiding_rounds`). Queues at a
    busy link are left to the simulator.
    """
    placement, in_flight = candidate.placement, list(candidate.placement.in_flight)
    workers, replicas = placement.workers, placement.replicas_per_copy
    links_s = link_times_s(evaluator, placement, loads)
    time_s = max(candidate.time_per_minibatch_s, *(float(times_s.max()) for times_s in links_s))
    trip_s = 0.0
    for s in reversed(range(len(in_flight) if time_s else 0)):  # what a stage wants depends on those after it
        trip_s += loads[s].forward_s * (1 + placement.recompute[s]) + loads[s].backward_s
        round_s = time_s * _hiding_rounds(replicas[s:], in_flight[s:]) * placement.execution.copies
        hidden_s = len(workers[s]) * time_s * (1 + margin) * TOLERANCE
        in_flight[s] = max(in_flight[s], min(math.ceil(max(trip_s, round_s) / hidden_s), largest[s]))
        link = evaluator.cluster.link(workers[s - 1][0], workers[s][0]) if s else None
        if link:
            trip_s += link.time_s(loads[s].received_bytes + loads[s].returned_bytes, messages=2)
    return in_flight


def _hiding_rounds(replicas: Sequence[int], in_flight: Sequence[int]) -> int:
    """Return the minibatches in flight at all replicas of a stage so that it never waits for others' rounds.

    A replicated stage updates when its last replica is done, so its minibatches come and go in groups. An earlier stage
    must have one more group on its way. In simulations that keeps the time, or nearly. Straight pipelines need p - s as
    usual.

    Args:
        replicas, in_flight: of the stage and all later ones; in flight at one replica of each.
    """
    r, *later = replicas
    if not later:
        return r
    group = max(r, later[0]) if r % later[0] == 0 or later[0] % r == 0 else r + later[0]
    return in_flight[1] * later[0] + group


def _decreasing(placement: Placement, in_flight: Sequence[int]) -> list[int]:
    """Give no stage more in flight than the stage before it: if one lacks memory, all later ones have less to do."""
    replicas = placement.replicas
    numbers = [in_flight[0]]
    for s in range(1, len(in_flight)):
        numbers.append(max(1, min(in_flight[s], numbers[-1] * replicas[s - 1] // replicas[s])))
    return numbers
