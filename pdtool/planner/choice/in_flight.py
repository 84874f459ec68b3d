"""How many minibatches in flight a plan gets, where messages take time, links are shared and rounds wait.

The schedule's own number keeps all later workers busy when nothing does (PipeDream, section 3.2). Each more is one more
update of delay, and memory: a plan gets more only where the simulation shows that they shorten its time by
IN_FLIGHT_MARGIN, and as far as memory goes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pdtool.planner.formulas import TOLERANCE, CostModel
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import Candidate, Evaluator, link_times_s
from pdtool.planner.simulator.engine import steady_state_s
from pdtool.planner.stage_costs import StageLoad, stage_loads

IN_FLIGHT_MARGIN = 0.1  # fraction of the time per minibatch that fewer minibatches in flight may cost
_MAX_FACTOR = 2  # times what the schedule wants


def with_fewest_in_flight(
    evaluator: Evaluator,
    candidate: Candidate,
    margin: float,
    *,
    enough_s: float = 0.0,
    limit_s: float = math.inf,
    patience: float = 1.0,
) -> tuple[Candidate, float]:
    """Simulate a plan with more and more minibatches in flight; return it with the fewest that lose no more than
    IN_FLIGHT_MARGIN, and its seconds per minibatch then.

    Where no simulation is possible, that is the plan with the schedule's own number, and infinity.

    Args:
        margin: fraction of the time per minibatch that is too little to look for more minibatches in flight.
        enough_s: seconds per minibatch that the plan cannot beat: as soon as it comes near, more bring nothing.
        limit_s: seconds per minibatch above which a time does not matter, and may be given as infinite.
        patience: how many times as long as usual each simulation may take.
    """
    simulated: list[tuple[Candidate, float]] = []
    fastest_s = math.inf
    for choice in _choices(evaluator, candidate, margin):
        time_s = _simulated_s(evaluator, choice, limit_s * (1 + IN_FLIGHT_MARGIN), patience)
        is_slower = fastest_s <= time_s and fastest_s < math.inf
        simulated.append((choice, time_s))
        fastest_s = min(fastest_s, time_s)
        if time_s <= enough_s * (1 + margin) or is_slower:
            break  # more in flight bring nothing
    return next(choice for choice in simulated if choice[1] <= fastest_s * (1 + IN_FLIGHT_MARGIN))


def _simulated_s(evaluator: Evaluator, candidate: Candidate, limit_s: float, patience: float) -> float:
    """Simulated seconds per minibatch; infinite above the limit, and where the plan cannot be executed."""
    profile, cluster = evaluator.profile, evaluator.cluster
    time_s = steady_state_s(candidate.placement, profile, cluster, limit_s, patience=patience)
    return time_s if time_s is not None and time_s < limit_s and candidate.placement.is_executable else math.inf


def _choices(evaluator: Evaluator, candidate: Candidate, margin: float) -> list[Candidate]:
    """Return the plan with the schedule's own number of minibatches in flight, with what its round trips want, and with
    as many as are ever tried: each once, from few to many, all as far as memory goes."""
    placement = candidate.placement
    if placement.execution.kind.flushes:
        return [candidate]
    default = placement.in_flight
    model = evaluator.model_of(placement.workers, placement.execution)
    loads = stage_loads(evaluator.profile, placement.stages)
    largest = [
        _within_memory(model, load, _MAX_FACTOR * w, w, recompute)
        for load, w, recompute in zip(loads, default, placement.recompute, strict=True)
    ]
    wanted = _wanted(evaluator, candidate, loads, margin)
    largest = _decreasing(placement, [*largest[:-1], default[-1]])
    choices = {default, tuple(wanted), tuple(_decreasing(placement, wanted)), tuple(largest)}
    return [evaluator.with_in_flight(candidate, numbers) for numbers in sorted(choices, key=lambda n: (sum(n), n))]


def _wanted(evaluator: Evaluator, candidate: Candidate, loads: Sequence[StageLoad], margin: float) -> list[int]:
    """Round trip over time per minibatch, for each stage: those in flight during it hide it."""
    placement, in_flight = candidate.placement, list(candidate.placement.in_flight)
    model = evaluator.model_of(placement.workers, placement.execution)
    links_s = link_times_s(evaluator, placement, loads)
    time_s = max(candidate.time_per_minibatch_s, *(float(times_s.max()) for times_s in links_s))
    for s in reversed(range(len(in_flight))):  # from the end: what a stage wants depends on those after it
        round_trip_s = _round_trips_s(model, loads, placement.with_in_flight(in_flight), time_s)[s]
        hidden_s = len(placement.workers[s]) * time_s * (1 + margin) * TOLERANCE
        enough = math.ceil(round_trip_s / hidden_s) if time_s else in_flight[s]
        enough = min(enough, _MAX_FACTOR * in_flight[s])
        in_flight[s] = _within_memory(model, loads[s], enough, in_flight[s], placement.recompute[s])
    return in_flight


def _round_trips_s(model: CostModel, loads: Sequence[StageLoad], placement: Placement, time_s: float) -> list[float]:
    """For each stage, seconds from a forward's start to the end of its backward, in a pipeline that keeps `time_s` per
    minibatch.

    All later stages compute and messages take their way there and back; or rounds wait for their replicas, if that is
    longer (see `_hiding_rounds`). Queues before a busy link are not counted: the simulator does.
    """
    copies, workers = placement.execution.copies, placement.workers
    hiding = _hiding_rounds(placement.replicas_per_copy, placement.in_flight)
    rounds_s = [time_s * count * copies for count in hiding]
    trip_s = 0.0
    round_trips_s: list[float] = []
    for s in reversed(range(len(loads))):
        load = loads[s]
        trip_s += load.forward_s * (1 + placement.recompute[s]) + load.backward_s
        round_trips_s.append(max(trip_s, rounds_s[s]))
        link = model.cluster.link(workers[s - 1][0], workers[s][0]) if s else None
        if link:
            trip_s += link.time_s(load.received_bytes + load.returned_bytes, messages=2)
    return round_trips_s[::-1]


def _hiding_rounds(replicas: Sequence[int], in_flight: Sequence[int]) -> list[int]:
    """For each stage, minibatches in flight at all its replicas with which it never waits for others' rounds.

    A replicated stage updates when its last replica has done its part, so its minibatches come and go in groups, and a
    stage before it must have one group more on its way. Observed with the simulator: then the time is kept, or nearly.
    Straight pipelines want p - s as ever.

    Args:
        in_flight: minibatches in flight at one replica of each stage, as the plan has them.
    """
    wanted = [replicas[-1]]
    for s in reversed(range(len(replicas) - 1)):
        r, after = replicas[s], replicas[s + 1]
        group = max(r, after) if r % after == 0 or after % r == 0 else r + after
        wanted.append(in_flight[s + 1] * after + group)
    return wanted[::-1]


def _within_memory(model: CostModel, load: StageLoad, wanted: int, minimum: int, recompute: bool) -> int:
    """Return as many as memory allows of `wanted`, but not less than `minimum`."""
    limit = model.cluster.memory_bytes
    while wanted > minimum and limit is not None and model.memory_bytes(load, wanted, recompute) > limit:
        wanted -= 1
    return max(wanted, minimum)


def _decreasing(placement: Placement, in_flight: Sequence[int]) -> list[int]:
    """No stage has more in flight than the stage before it: where one lacks memory, all after it have less to do."""
    replicas = placement.replicas
    numbers = [in_flight[0]]
    for s in range(1, len(in_flight)):
        numbers.append(max(1, min(in_flight[s], numbers[-1] * replicas[s - 1] // replicas[s])))
    return numbers
