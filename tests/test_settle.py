"""What the simulator has the last word on: which plan is taken, how many minibatches it has in flight, what it says."""

from __future__ import annotations

import random

from graphs import random_profile

from pdtool.cluster import make_cluster
from pdtool.errors import NoPlanError
from pdtool.partition.attempt import as_plan
from pdtool.partition.evaluate import Way
from pdtool.partition.paces import simulated
from pdtool.partition.planning import make_plan
from pdtool.partition.rivals import known
from pdtool.partition.search import Options, Search
from pdtool.partition.settle import bound_s

MARGIN, SEEDS = Options().simplest, 40
WINDOW = 1.01  # a simulation sees some 32 minibatches of its steady state; the first and the last may be early or late


def question(seed):
    """A search, every other with larger tensors and slow links between servers, so that links are what counts."""
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(2, 8))
    if seed % 2:
        nodes = [n.model_copy(update={"output_bytes": n.output_bytes * 9}) for n in profile.nodes]
        profile = profile.model_copy(update={"nodes": tuple(nodes)})
    sizes = rng.choice([(3,), (4,), (2, 2), (2, 3), (3, 2), (2, 4), (2, 2, 2)])
    rates = sorted(rng.choice([300.0, 1e3, 5e3, 1e5]) for _ in sizes)
    cluster = make_cluster(
        sizes,
        rates,
        latencies=[rng.choice([0.0, 0.05, 0.4]) for _ in sizes],
        memory_bytes=rng.choice([None, None, 40_000, 90_000]),
    )
    return Search(profile, cluster, Options())


def pace_of(search, plan):
    """Simulated, as the schedule has it; None where it cannot be."""
    return simulated(as_plan(search.profile, "-", search.cluster, plan), search.profile)


def settled_and_asked(seed):
    """The search, the plan, and what everyone asks about besides: (label, candidate), as far as it fits."""
    search = question(seed)
    plan = make_plan(search.profile, "p", search.cluster)
    asked = [(label, rival) for label, rival in known(search, Way()) if rival.way.schedule == "1f1b"]
    return search, plan, [(label, rival) for label, rival in asked if search.fits(rival)]


def test_nothing_that_everyone_asks_about_is_simulated_faster():
    """Not at all where it has no more stages, not by more than the margin where it has; each is simulated anew here."""
    seen, beaten = 0, []
    for seed in range(SEEDS):
        try:
            search, plan, asked = settled_and_asked(seed)
        except NoPlanError:
            continue
        for label, rival in asked:
            pace = pace_of(search, rival)
            allowed = 1.0 if len(rival.stages) <= len(plan.stages) else 1 + MARGIN
            seen += 1
            if pace is not None and plan.predicted.simulated_s > pace * allowed * WINDOW:
                beaten.append((seed, label, pace, plan.config, plan.predicted.simulated_s))
    assert beaten == []
    assert seen > 3 * SEEDS / 2


def test_where_the_formulas_are_far_off_the_best_of_each_number_of_copies_is_looked_at():
    """Where the plan comes out more than a tenth slower than the formulas' optimum, no layout's optimum is faster."""
    seen = 0
    for seed in range(SEEDS):
        search = question(seed)
        try:
            chosen, _ = search.best()
        except NoPlanError:
            continue
        plan = make_plan(search.profile, "p", search.cluster)
        if plan.predicted.simulated_s <= chosen.costs.bottleneck_s * 1.1:
            continue
        for layout in search.layouts:
            attempt = search.attempt(layout, Way())
            if attempt.fastest.pace_s == float("inf"):
                continue
            rival = attempt.traced(attempt.fastest)
            pace = pace_of(search, rival)
            seen += rival.way.copies > 1
            told = f"seed {seed}: {rival.config} {pace} s, {plan.config} {plan.predicted.simulated_s} s"
            assert pace is None or plan.predicted.simulated_s <= pace * (1 + MARGIN) ** 2, told
    assert seen > 10


def test_no_plan_is_simulated_faster_than_its_bound():
    """Or a plan could be passed over for one that is slower."""
    shared = 0
    for seed in range(SEEDS):
        search = question(seed)
        rng = random.Random(seed)
        for layout in rng.sample(search.layouts, min(3, len(search.layouts))):
            attempt = search.attempt(layout, Way())
            if attempt.fastest.pace_s < float("inf"):
                plan = attempt.traced(attempt.fastest)
                pace = pace_of(search, plan)
                shared += bound_s(search, plan) > plan.costs.bottleneck_s * 1.01
                assert pace is None or bound_s(search, plan) <= pace * WINDOW, f"seed {seed}: {plan.config}"
    assert shared > 5, "links that several stages share are what the formulas leave out"
