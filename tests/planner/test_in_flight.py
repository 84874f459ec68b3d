"""How many minibatches in flight a plan that flushes gets: as many as make it fastest, as far as memory goes."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest
from conftest import of_the_day
from graphs import chain, random_cluster, random_profile, with_nodes

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import PlanOptions
from pdtool.errors import NoPlanError, UsageError
from pdtool.options.plan_options import PartitionOptions
from pdtool.planner.choice.in_flight import with_fastest_in_flight, with_fewest_in_flight
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.choice.plan_check import check_plan
from pdtool.planner.choice.strategies import PLANNERS
from pdtool.planner.choice.without_formulas import even_pieces
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import Evaluator
from pdtool.planner.simulator import engine
from pdtool.planner.simulator.engine import simulate, steady_state_s
from pdtool.planner.simulator.job import SimulationJob, simulation_effort
from pdtool.schedule import SCHEDULES, ExecutionConfig

ROUNDING = 1.001  # less is not worth a minibatch in flight
MARGIN = 1 + PlanOptions().simplest


def network(rng: random.Random, workers: int, memory_bytes: int | None = None):
    """A profile without pins, and a cluster on which messages take from nothing to longer than a stage computes."""
    profile = random_profile(rng, rng.randint(2 * workers, 9))
    profile = profile.model_copy(update={"pin": {}, "shared": (), "together": ()})
    profile = with_nodes(profile, [node.model_copy(update={"module": ""}) for node in profile.nodes])
    bandwidth, latency = rng.choice([300.0, 1e3, 5e3, 1e5]), rng.choice([0.0, 0.4])
    return profile, make_cluster((workers,), (bandwidth,), latencies=[latency], memory_bytes=memory_bytes)


def placed(profile, workers: int, execution: ExecutionConfig) -> Placement:
    """Even pieces of the model, on one worker each, or on each worker as many as the schedule has chunks."""
    stages = even_pieces(profile, workers * execution.chunks)
    numbers = tuple((worker,) for worker in range(workers)) * execution.chunks
    no_recompute = (False,) * len(stages)
    placement = Placement(stages=stages, workers=numbers, in_flight=(), recompute=no_recompute, execution=execution)
    return placement.with_usual_in_flight()


def memory_bytes(placement: Placement, profile, cluster) -> int:
    """Of the fullest worker, as simulated."""
    return max(usage.memory_bytes for usage in simulate(SimulationJob.of(placement, profile, cluster)).workers)


@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize("limited", [False, True], ids=["any memory", "limit of memory"])
def test_no_other_numbers_in_flight_are_faster(limited):
    """All of them were tried; under a limit of memory all that fit."""
    rng, more = random.Random(5), 0
    for seed in range(24):
        workers = 2 + seed % 2
        profile, cluster = network(rng, workers)
        execution = ExecutionConfig.of_schedule("1f1b-flush", rng.choice([3, 4]))
        usual = placed(profile, workers, execution)
        all_numbers = list(product(range(1, execution.microbatches + 1), repeat=workers))
        if limited:
            deepest = usual.with_in_flight([execution.microbatches] * workers)
            least, most = (memory_bytes(p, profile, cluster) for p in (usual, deepest))
            cluster = make_cluster((workers,), (300.0,), memory_bytes=int(least + rng.random() * (most - least)))
        chosen, time_s = with_fastest_in_flight(Evaluator(profile, cluster), usual)
        assert time_s == steady_state_s(chosen, profile, cluster)
        assert not limited or memory_bytes(chosen, profile, cluster) <= cluster.memory_bytes
        others = [p for numbers in all_numbers if (p := usual.with_in_flight(numbers)).is_executable]
        fitting = (p for p in others if not limited or memory_bytes(p, profile, cluster) <= cluster.memory_bytes)
        times_s = [steady_state_s(p, profile, cluster) for p in fitting]
        assert time_s <= min(times_s) * ROUNDING, (seed, chosen.in_flight)
        more += chosen.in_flight[0] > usual.in_flight[0]
    assert more > 4


@pytest.mark.parametrize("schedule", ["zb-h1", "interleaved"])
def test_more_in_flight_make_the_other_flushing_schedules_faster(schedule):
    """Never slower than the numbers that they are defined with, and faster on a slow network."""
    rng, gains = random.Random(2), []
    for _ in range(12):
        profile, cluster = network(rng, 2)
        usual = placed(profile, 2, ExecutionConfig.of_schedule(schedule, 6, 2 if schedule == "interleaved" else 1))
        chosen, time_s = with_fastest_in_flight(Evaluator(profile, cluster), usual)
        assert chosen.is_executable
        gains.append(steady_state_s(usual, profile, cluster) / time_s)
    assert min(gains) >= 1
    assert max(gains) > 1.1


def test_cuts_are_searched_together_with_the_numbers_in_flight():
    """Of straight pipelines on slow links: all cuts, each with the numbers in flight that are best there, are seldom
    faster than the plan by more than its margin."""
    rng, ratios = random.Random(7), []
    for _ in range(16):
        workers, operators = rng.choice([2, 2, 3]), rng.randint(4, 7)
        net = chain([rng.uniform(0.2, 2) for _ in range(operators)], parameters=20_000)
        sizes = [rng.choice([0, 200, 1000, 2000, 4000]) for _ in net.nodes]
        changes = [{"output_bytes": size, "gradient_bytes": size} for size in [0, *sizes[1:]]]
        net = with_nodes(net, [n.model_copy(update=c) for n, c in zip(net.nodes, changes, strict=True)])
        cluster = make_cluster((workers,), (rng.choice([500.0, 2000.0, 8000.0]),), latencies=[rng.choice([0.0, 0.3])])
        microbatches = rng.choice([4, 6])
        plan = make_plan(net, "p", cluster, PlanOptions(schedule="1f1b-flush", microbatches=microbatches))
        evaluator, execution = Evaluator(net, cluster), ExecutionConfig.of_schedule("1f1b-flush", microbatches)
        best_s, names = plan.predicted.simulated_s, net.graph.names
        for stages in range(2, workers + 1):
            for inner in combinations(range(2, len(names)), stages - 1):
                pieces = [names[a:b] for a, b in pairwise([0, *inner, len(names)])]
                placement = evaluator.place(pieces, [[s] for s in range(stages)], execution).placement
                best_s = min(best_s, with_fastest_in_flight(evaluator, placement, limit_s=best_s)[1])
        ratios.append(plan.predicted.simulated_s / best_s)
    assert max(ratios) < 1.1
    assert sum(ratio > MARGIN * ROUNDING for ratio in ratios) <= len(ratios) / 8


def test_a_flush_is_never_slower_than_gpipe():
    """As many minibatches in an update, the best plan of each, simulated."""
    seen, seeds = 0, of_the_day(20, days=2)
    for seed in seeds:
        rng = random.Random(300 + seed)
        workers = rng.choice([2, 3, 4])
        profile, cluster = network(rng, workers, rng.choice([None, 40_000]))
        options = {"microbatches": rng.choice([4, 6, 8])}
        try:
            gpipe = make_plan(
                profile, "p", cluster, PlanOptions(strategy="gpipe", schedule="gpipe", straight=True, **options)
            )
        except NoPlanError:
            continue
        flush = make_plan(profile, "p", cluster, PlanOptions(schedule="1f1b-flush", **options))
        seen += 1
        assert flush.predicted.simulated_s <= gpipe.predicted.simulated_s * MARGIN * ROUNDING, (
            flush.config,
            gpipe.config,
        )
    assert seen > len(seeds) / 2


@pytest.mark.parametrize("schedule", ["1f1b", "1f1b-flush", "2bw", "zb-h1", "interleaved"])
def test_a_number_that_is_asked_for_is_taken(schedule):
    """At the first stage; the plan records it, claims no bound, and all that it says is true."""
    net, cluster = chain([1.0] * 6, stash=100), make_cluster((3,), (1e12,))
    options = PlanOptions(schedule=schedule, straight=True, in_flight=7)
    if options.schedule in SCHEDULES and SCHEDULES[schedule].flushes:
        options = replace(options, microbatches=8)
    if schedule == "interleaved":
        with pytest.raises(
            UsageError, match=r"--in-flight 2 is not enough for schedule interleaved: 0F2 puts 3 .*larger"
        ):
            make_plan(net, "p", cluster, replace(options, in_flight=2))
        options = replace(options, in_flight=12)
    plan = make_plan(net, "p", cluster, options)
    assert plan.stages[0].in_flight == options.in_flight == plan.asked.in_flight
    assert [finding for finding in check_plan(plan, net) if finding.holds is False] == []
    fewer = replace(cluster, memory_bytes=900)
    if schedule == "1f1b-flush":
        assert make_plan(net, "p", fewer, replace(options, in_flight=None)).stages[0].in_flight < 7
        with pytest.raises(
            NoPlanError, match="fits with 7 minibatches in flight; pass fewer, or leave --in-flight out"
        ):
            make_plan(net, "p", fewer, replace(options, recompute=False))


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"schedule": "gpipe"}, "schedule gpipe keeps all microbatches of an update in flight; leave --in-flight"),
        ({"strategy": "gpipe"}, "schedule gpipe keeps all microbatches of an update in flight; leave --in-flight"),
        (
            {"strategy": "model-parallel"},
            "--strategy model-parallel sets the number of minibatches in flight itself; leave --in-flight 3 out",
        ),
    ],
)
def test_a_number_that_cannot_be_chosen_is_refused(asked, match):
    asked = PartitionOptions(in_flight=3, **asked)
    with pytest.raises(UsageError, match=match):
        PLANNERS[asked.strategy].options(asked, 3)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("schedule", ["zb-h1", "2bw"])
def test_the_borders_of_a_schedule_without_formulas_are_its_own(schedule):
    """No other border of two stages is faster under it. The schedule that its plans come from may have another one."""
    moved = 0
    for seed in range(12):
        profile, cluster = network(random.Random(seed), 2)
        microbatches = 4 if SCHEDULES[schedule].flushes else 1
        options = PlanOptions(schedule=schedule, microbatches=microbatches, replicas=(1, 1))
        plan = make_plan(profile, "p", cluster, options)
        origin = make_plan(profile, "p", cluster, replace(options, schedule=SCHEDULES[schedule].planned_as.name))
        moved += origin.stages[0].nodes != plan.stages[0].nodes
        names = [name for name in profile.graph.names if name not in {n.name for n in profile.nodes if n.op == "input"}]
        chosen = Placement.of(plan, profile)
        for size in range(1, len(names)):
            inputs = [name for name in profile.graph.names if name not in names]
            stages = ((*inputs, *names[:size]), tuple(names[size:]))
            if any(profile.graph.stage_faults(stages)):
                continue
            other = replace(chosen, stages=stages)
            time_s = steady_state_s(other, profile, cluster)
            assert plan.predicted.simulated_s <= time_s * ROUNDING, f"seed {seed}: {names[size]}, {time_s} s"
    assert moved


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("schedule", ["interleaved", "looped-bfs"])
def test_no_operator_moved_over_a_border_of_chunks_makes_them_faster(schedule):
    """Even pieces are where their borders begin; moving them pays on some networks."""
    moved = 0
    for seed in range(8):
        profile, cluster = network(random.Random(seed), 2)
        plan = make_plan(profile, "p", cluster, PlanOptions(schedule=schedule, microbatches=4, chunks=2))
        chosen, even = Placement.of(plan, profile), even_pieces(profile, 4)
        moved += steady_state_s(replace(chosen, stages=even), profile, cluster) > plan.predicted.simulated_s * ROUNDING
        for border in range(1, 4):
            before, after = chosen.stages[border - 1 : border + 1]
            for pair in ((before[:-1], (before[-1], *after)), ((*before, after[0]), after[1:])):
                stages = (*chosen.stages[: border - 1], *pair, *chosen.stages[border + 1 :])
                if all(pair) and not any(profile.graph.stage_faults(stages)):
                    time_s = steady_state_s(replace(chosen, stages=stages), profile, cluster)
                    assert plan.predicted.simulated_s <= time_s * ROUNDING, f"seed {seed}: {border}, {time_s} s"
    assert moved


def test_a_plan_is_simulated_though_more_in_flight_would_wait_in_a_circle():
    """With a limit of memory, the most for each stage that fit may not be executable together: 22 % slower."""
    rng = random.Random(417)
    profile, cluster = random_profile(rng, rng.randint(2, 8)), random_cluster(rng)
    if rng.random() < 0.5:
        nodes = [node.model_copy(update={"output_bytes": 9 * node.output_bytes}) for node in profile.nodes]
        profile = with_nodes(profile, nodes)
    assert make_plan(profile, "p", cluster, PlanOptions()).predicted.simulated_s < 3.7


def test_a_plan_is_simulated_though_more_in_flight_would_take_too_long(monkeypatch):
    profile, cluster = chain([1.0] * 6, crossing=300), make_cluster((3,), (300.0,))
    evaluator = Evaluator(profile, cluster, PlanOptions())
    plan = placed(profile, 3, ExecutionConfig.of_schedule("1f1b", 1))
    candidate = evaluator.place(plan.stages, plan.workers, plan.execution)
    deeper, _ = with_fewest_in_flight(evaluator, candidate, 0.03)
    assert deeper.placement.in_flight > candidate.placement.in_flight, "this hides messages"
    monkeypatch.setattr(engine, "_MAX_ACTIONS_TIMES_WORKERS", simulation_effort(candidate.placement))
    chosen, time_s = with_fewest_in_flight(evaluator, candidate, 0.03)
    assert chosen == candidate
    assert time_s < math.inf
