"""The borders of a plan lie where modules begin and end, as far as the margin allows."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from conftest import of_the_day
from graphs import chain, random_profile, with_nodes

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import PlanOptions
from pdtool.planner.choice import border_moves
from pdtool.planner.choice.border_moves import move_to_module_borders
from pdtool.planner.choice.borders import modules_divided
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.choice.selection import select
from pdtool.planner.search.cuts import find_cuts
from pdtool.planner.search.search import PlanSearch
from pdtool.planner.simulator.engine import steady_state_s

SECONDS = [1.0, 0.98, 0.02, 1.0, 1.0]
MODULES = ["layers.0.attention", "layers.0.mlp", "layers.1.norm", "layers.1.attention", "layers.1.mlp"]


def two_layers():
    """A chain of two layers whose fastest border is behind the norm of the second one; averaging takes far too long."""
    return in_modules(chain(SECONDS, parameters=100_000), MODULES)


def in_modules(profile, modules):
    """A chain whose nodes, but for its input, are of these modules."""
    pairs = zip(profile.nodes, ["", *modules], strict=True)
    return with_nodes(profile, [node.model_copy(update={"module": module}) for node, module in pairs])


@pytest.mark.parametrize(
    ("simplest", "first_stage", "time_s"),
    [(0.03, ["x", "layers.0"], 2.02), (0.005, ["x", "layers.0", "layers.1.norm"], 2.0)],
)
def test_a_border_inside_of_a_layer_moves_between_two_layers_within_the_margin(simplest, first_stage, time_s):
    plan = make_plan(two_layers(), "p", make_cluster((2,), [1e3]), PlanOptions(simplest=simplest))
    assert plan.config == "1-1"
    assert list(plan.stages[0].nodes) == first_stage
    assert plan.predicted.simulated_s == pytest.approx(time_s, rel=0.01)


@pytest.mark.parametrize("options", [PlanOptions(simplest=0.0), PlanOptions(straight=True)])
def test_it_stays_where_the_fastest_plan_is_asked_for(options):
    plan = make_plan(two_layers(), "p", make_cluster((2,), [1e3]), options)
    assert list(plan.stages[0].nodes) == ["x", "layers.0", "layers.1.norm"]


def test_modules_are_counted_at_any_depth():
    profile = two_layers()
    cuts = find_cuts(profile)
    counts = {int(cut.sum()): int(n) for cut, n in zip(cuts.inside, modules_divided(cuts), strict=True)}
    assert counts == {0: 0, 2: 2, 3: 1, 4: 2, 5: 2, 6: 0}  # `layers` alone between the two layers


def test_any_plan_keeps_its_margin_and_divides_no_more_modules():
    moved_plans = 0
    for seed in {*of_the_day(92, days=8), 60, 90}:  # where borders do move
        rng = random.Random(seed)
        profile = random_profile(rng, rng.randint(4, 10))
        cluster = make_cluster(
            (rng.choice([3, 4]),), [rng.choice([300.0, 3e3, 1e5])], memory_bytes=rng.choice([None, 90_000])
        )
        search = PlanSearch(profile, cluster, PlanOptions(simplest=0.2))
        optima = search.fastest_plans()
        if not optima:
            continue
        chosen = select(search, optima, [])
        moved = move_to_module_borders(search, chosen)
        before, after = (divided(profile, plan.candidate.placement.stages) for plan in (chosen, moved))
        assert all(b <= a for a, b in zip(before, after, strict=True)), seed
        assert profile.graph.stage_faults(moved.candidate.placement.stages) == [], seed
        assert search.evaluator.fits(moved.candidate), seed
        if moved.simulated_s is not None:
            assert moved.simulated_s <= chosen.limit_s, seed
            assert moved.simulated_s == steady_state_s(moved.candidate.placement, profile, cluster), seed
        moved_plans += before != after
    assert moved_plans


def test_borders_that_cannot_all_move_at_once_move_one_after_the_other(monkeypatch):
    """With the plan in which both borders have moved called too slow, one of them moves."""
    seconds = [1.0, 0.98, 0.02, 1.0, 0.98, 0.02, 1.0, 1.0]
    modules = ["0.attention", "0.mlp", "1.norm", "1.attention", "1.mlp", "2.norm", "2.attention", "2.mlp"]
    profile = in_modules(chain(seconds, parameters=100_000), [f"layers.{module}" for module in modules])
    search = PlanSearch(profile, make_cluster((3,), [1e3]), PlanOptions(simplest=0.03))
    chosen = select(search, search.fastest_plans(), [])
    stages = chosen.candidate.placement.stages
    assert borders_moved(stages, move_to_module_borders(search, chosen)) == 2
    simulated = border_moves._simulated

    def one_at_most(search, selected, moved):
        return (
            simulated(search, selected, moved)
            if borders_moved(stages, replace(selected, candidate=moved)) <= 1
            else None
        )

    monkeypatch.setattr(border_moves, "_simulated", one_at_most)
    moved = move_to_module_borders(search, chosen)
    assert borders_moved(stages, moved) == 1
    assert sum(divided(profile, moved.candidate.placement.stages)) < sum(divided(profile, stages))


def borders_moved(stages, selected):
    """How many borders of a plan are not where they were."""
    held, held_before = set(), set()
    moved = 0
    for before, after in zip(stages[:-1], selected.candidate.placement.stages[:-1], strict=True):
        held_before |= set(before)
        held |= set(after)
        moved += held != held_before
    return moved


def divided(profile, stages):
    """For each border, the modules with operators on both sides; counted anew."""
    counts = []
    for border in range(1, len(stages)):
        earlier = {name for nodes in stages[:border] for name in nodes}
        counts.append(sum(bool(names & earlier) and not names <= earlier for names in profile.graph.members.values()))
    return counts
