"""Print how often a narrower option finds a faster plan than the planner does by itself: `make bench-choice`.

Random profiles of 3 to 12 operators on 2 to 6 workers. The plan of each is compared, by `simulated_s`, with those of
narrower options: --strategy straight, pipeline and data-parallel, each --workers, each --replicas of up to five
workers.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import combinations, pairwise
from multiprocessing import Pool
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))

from graphs import random_profile, with_nodes

from pdtool.artifacts.cluster import Cluster, make_cluster
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import NoPlanError, UsageError
from pdtool.options.plan_options import PartitionOptions
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.choice.strategies import PLANNERS

TOPOLOGIES = ((2,), (3,), (4,), (5,), (6,), (2, 2), (3, 2), (2, 3))
MAX_LOSS = 0.031  # of the time per minibatch; 3 % of it is what `--simplest` may cost
_MAX_REPLICAS = 5


def question(seed: int) -> tuple[Profile, Cluster]:
    """A random profile and cluster; tensors and links such that messages matter in most of them."""
    rng = random.Random(seed)
    profile = random_profile(rng, rng.randint(3, 12))
    larger = rng.choice([1, 1, 3, 9])
    nodes = [node.model_copy(update={"output_bytes": larger * node.output_bytes}) for node in profile.nodes]
    sizes = rng.choice(TOPOLOGIES)
    rates = sorted(rng.choice([3e2, 1e3, 3e3, 1e4, 1e6]) for _ in sizes)
    latencies = [rng.choice([0.0, 0.0, 0.05]) for _ in sizes]
    memory_bytes = rng.choice([None, None, None, 60_000])
    return with_nodes(profile, nodes), make_cluster(sizes, rates, latencies=latencies, memory_bytes=memory_bytes)


def narrower(workers: int) -> Iterator[tuple[str, PartitionOptions]]:
    """Each narrower option with its name."""
    for strategy in ("straight", "pipeline", "data-parallel"):
        yield f"--strategy {strategy}", PartitionOptions(strategy=strategy)
    for number in range(1, workers):
        yield f"--workers {number}", PartitionOptions(workers=number)
    for used in range(1, min(workers, _MAX_REPLICAS) + 1):
        for stages in range(1, used + 1):
            for inner in combinations(range(1, used), stages - 1):
                replicas = tuple(b - a for a, b in pairwise([0, *inner, used]))
                yield f"--replicas {'-'.join(map(str, replicas))}", PartitionOptions(replicas=replicas)


def planned(profile: Profile, cluster: Cluster, asked: PartitionOptions) -> Plan | None:
    """The plan that is chosen; None where there is none."""
    with suppress(NoPlanError, UsageError):
        strategy = "straight" if asked.straight else asked.strategy
        return make_plan(profile, "p", cluster, PLANNERS[strategy].options(asked, cluster.workers))
    return None


def compared(seed: int) -> tuple[int, float, str, int, float]:
    """(seed, the largest loss, of which option, options compared, seconds to plan)."""
    profile, cluster = question(seed)
    start = time.perf_counter()
    plan = planned(profile, cluster, PartitionOptions())
    seconds = time.perf_counter() - start
    losses = [(0.0, "")]
    if plan and plan.predicted and plan.predicted.simulated_s:
        own_s = plan.predicted.simulated_s
        for name, asked in narrower(cluster.workers):
            rival = planned(profile, cluster, asked)
            if rival and rival.predicted and rival.predicted.simulated_s:
                loss = own_s / rival.predicted.simulated_s - 1
                losses.append(
                    (loss, f"{plan.config} {own_s:.4g} s, {name}: {rival.config} {rival.predicted.simulated_s:.4g} s")
                )
    return seed, *max(losses), len(losses) - 1, seconds


def main() -> None:
    """Compare, and print whatever is worse as soon as it is found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profiles", type=int, default=1065, metavar="N")
    parser.add_argument("--first", type=int, default=0, metavar="SEED")
    parser.add_argument("--processes", type=int, default=2, metavar="N")
    arguments = parser.parse_args()
    seeds = range(arguments.first, arguments.first + arguments.profiles)
    found = []
    with Pool(arguments.processes) as pool:
        for each in pool.imap_unordered(compared, seeds):
            found.append(each)
            seed, loss, what, _, _ = each
            if loss > MAX_LOSS:
                sys.stdout.write(f"seed {seed}: {loss:.1%} slower: {what}\n")
            if len(found) % 50 == 0:
                sys.stderr.write(f"{len(found)} of {len(seeds)} profiles\n")
    worse = [entry for entry in found if entry[1] > MAX_LOSS]
    options, seconds = sum(entry[3] for entry in found), sum(entry[4] for entry in found)
    sys.stdout.write(
        f"{len(found)} profiles, {options} narrower options: {len(worse)} profiles with one that is more than "
        f"{MAX_LOSS:.1%} faster, {sum(entry[1] > 0.1 for entry in worse)} more than 10 %; planning took "
        f"{seconds / len(found) * 1e3:.0f} ms on average, {max(entry[4] for entry in found):.2f} s at most\n"
    )


if __name__ == "__main__":
    main()
