"""Print the tables of docs/table1-differences.md: `python tests/table1_differences.py`, in about half a minute.

The profiles are those that PipeDream published; clusters are those of the paper's section 5.1 at their nominal
bandwidths. Nothing is fitted.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pdtool.artifacts.cluster import Cluster, make_cluster
from pdtool.artifacts.plan import PlanOptions
from pdtool.artifacts.profile import Profile
from pdtool.planner.choice.in_flight import with_fewest_in_flight
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.placement import Placement
from pdtool.planner.plan_cost import Candidate, CostModelName, Evaluator
from pdtool.planner.simulator.engine import steady_state_s
from pdtool.profiler.pipedream_import import read_pipedream_profile
from pdtool.schedule import ExecutionConfig

PUBLISHED = Path(__file__).resolve().parents[2] / "shared" / "data" / "pipedream"
MARGIN = PlanOptions().simplest
GPU_BYTES = 16 * 10**9 - 2**30  # a V100's, less the reserve
GB = 1e9
INSIDE = {4: 12 * GB, 8: 20 * GB}  # PCI Express 3.0 x16; NVLink as PipeDream's authors state it (20 to 25 GB/s)
BETWEEN = {4: 1.25 * GB, 8: 3.125 * GB}  # 10 and 25 Gbit/s


def servers(count: int, gpus: int, scale: float = 1.0, inside_scale: float = 1.0) -> Cluster:
    """Servers of 4 GPUs (the paper's cluster A) or 8 (B), with links `scale` times as fast."""
    rates = (BETWEEN[gpus] * scale, INSIDE[gpus] * inside_scale)
    return make_cluster((count, gpus), rates, memory_bytes=GPU_BYTES)


def published(name: str) -> Profile:
    """The profile as it was published."""
    text = (PUBLISHED / f"{name}.graph.txt").read_text()
    return read_pipedream_profile(text, name, name=name)[0]


def at_twice_the_minibatch(profile: Profile) -> Profile:
    """The same with twice the samples: times and activations doubled, weights as they are."""
    fields = ("forward_s", "backward_s", "output_bytes", "gradient_bytes", "stash_bytes")
    nodes = [node.model_copy(update={field: 2 * getattr(node, field) for field in fields}) for node in profile.nodes]
    return with_nodes(profile, nodes, 2 * profile.batch_size)


def with_nodes(profile: Profile, nodes: Iterable[object], batch_size: int) -> Profile:
    """The profile with other nodes, checked anew."""
    fields = {name: getattr(profile, name) for name in Profile.model_fields}
    return Profile.model_validate(fields | {"nodes": tuple(nodes), "batch_size": batch_size})


def with_backwards_moved(profile: Profile) -> Profile:
    """GNMT-8 with the backward of two nodes where it belongs: see the text."""
    moves = {"node4": -6.621e-3, "node5": 6.621e-3, "node44": -10.584e-3, "node48": 10.584e-3}
    nodes = [n.model_copy(update={"backward_s": n.backward_s + moves.get(n.name, 0.0)}) for n in profile.nodes]
    return with_nodes(profile, nodes, profile.batch_size)


def with_first_convolution_shorter(profile: Profile) -> Profile:
    """AlexNet with a first convolution whose forward takes half as long as its backward, not 3.5 times as long."""
    nodes = [n.model_copy(update={"forward_s": n.backward_s / 2}) if n.name == "node2" else n for n in profile.nodes]
    return with_nodes(profile, nodes, profile.batch_size)


@dataclass(frozen=True)
class Case:
    """A profile on a cluster."""

    profile: Profile
    cluster: Cluster

    def evaluator(self, cost_model: CostModelName = "ours") -> Evaluator:
        """The formulas."""
        return Evaluator(self.profile, self.cluster, PlanOptions(cost_model=cost_model))

    def simulated_s(self, placement: Placement) -> float:
        """Seconds per minibatch in the simulation."""
        return steady_state_s(placement, self.profile, self.cluster) or math.inf

    def data_parallel(self) -> Candidate:
        """One stage on all workers."""
        return self.evaluator().data_parallel(self.cluster.workers, ExecutionConfig())

    def planned(self, *, straight: bool = False, cost_model: CostModelName = "ours") -> Candidate:
        """What is planned, by default by pdtool's formulas; on 12 workers at most where no stage may be replicated."""
        workers = min(self.cluster.workers, 12) if straight else None
        options = PlanOptions(straight=straight, workers=workers, cost_model=cost_model)
        placement = Placement.of(make_plan(self.profile, "p", self.cluster, options), self.profile)
        plan = Candidate(placement=placement, cost=self.evaluator().cost(placement))
        return with_fewest_in_flight(self.evaluator(), plan, MARGIN)[0] if cost_model != "ours" else plan

    def cut_before(self, names: Sequence[str], replicas: Sequence[int]) -> Candidate:
        """A plan by hand, on the last workers: stages begin at these nodes; the fewest minibatches in flight."""
        nodes = list(self.profile.graph.names)
        borders = [0, *map(nodes.index, names), len(nodes)]
        first = self.cluster.workers - sum(replicas)
        starts = [first + sum(replicas[:s]) for s in range(len(replicas))]
        stages = [nodes[a:b] for a, b in pairwise(borders)]
        workers = [range(start, start + count) for start, count in zip(starts, replicas, strict=True)]
        plan = self.evaluator().place(stages, workers, ExecutionConfig())
        return with_fewest_in_flight(self.evaluator(), plan, MARGIN)[0]

    def gain(self, placement: Placement) -> float:
        """Over data parallelism, both simulated."""
        return self.simulated_s(self.data_parallel().placement) / self.simulated_s(placement)

    def terms(self, label: str, plan: Candidate) -> list[str]:
        """A row: the largest of each term, the time by our formulas and under other assumptions, and the simulation."""
        cost = plan.cost
        both_ways = 2 * max(cost.transfer_s, default=0.0)
        in_sequence = [c + a for c, a in zip(cost.compute_s, cost.allreduce_s, strict=True)]
        original = self.evaluator("pipedream").cost(plan.placement)
        seconds = [
            max(cost.compute_s),
            max(cost.allreduce_s),
            max(cost.transfer_s, default=0.0),
            cost.time_per_minibatch_s,
            max([*in_sequence, *cost.transfer_s]),
            max(cost.time_per_minibatch_s, both_ways),
            original.time_per_minibatch_s,
            self.simulated_s(plan.placement),
        ]
        gain, memory = f"{self.gain(plan.placement):.2f}", f"{max(cost.memory_bytes) / GB:.1f}"
        return [label, plan.placement.config, *map(milliseconds, seconds), gain, memory]


TERMS = (
    "plan, configuration, compute, all-reduce, border, formulas, no overlap, half duplex, PipeDream's formulas, "
    "simulated, gain, GB"
)


def milliseconds(seconds: float) -> str:
    return f"{seconds * 1e3:.1f}"


def table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Print a table in Markdown."""
    lines = [columns, ["---"] * len(columns), *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    sys.stdout.write(f"\n{title}\n\n{text}\n")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the paper's Table 1: its plan and its gain in epoch time."""

    profile: str
    servers: int
    gpus: int
    plan: str
    gain: float

    @property
    def cluster(self) -> str:
        """The paper's letter."""
        return "A" if self.gpus == 4 else "B"

    @property
    def title(self) -> str:
        """`GNMT-8 on 3x4 (A)`."""
        return f"{NAMES[self.profile]} on {self.servers}x{self.gpus} ({self.cluster})"


NAMES = {"gnmt8": "GNMT-8", "alexnet": "AlexNet"}
ROWS = (
    Row(profile="gnmt8", servers=1, gpus=4, plan="straight", gain=1.5),
    Row(profile="gnmt8", servers=3, gpus=4, plan="straight", gain=2.95),
    Row(profile="gnmt8", servers=2, gpus=8, plan="16", gain=1.0),
    Row(profile="alexnet", servers=4, gpus=4, plan="15-1", gain=4.92),
    Row(profile="alexnet", servers=2, gpus=8, plan="15-1", gain=2.04),
)
MOVED = "backwards moved"


def profiles() -> dict[tuple[str, str], Profile]:
    """Each model's profile by variant: as published, and what the text changes of it, one thing at a time."""
    gnmt, alexnet = published("gnmt8"), published("alexnet")
    return {
        ("gnmt8", "32"): gnmt,
        ("gnmt8", f"32, {MOVED}"): with_backwards_moved(gnmt),
        ("gnmt8", "64"): at_twice_the_minibatch(gnmt),
        ("gnmt8", f"64, {MOVED}"): at_twice_the_minibatch(with_backwards_moved(gnmt)),
        ("alexnet", "256"): alexnet,
        ("alexnet", "256, first convolution 3.2 ms"): with_first_convolution_shorter(alexnet),
    }


def overview(known: dict[tuple[str, str], Profile]) -> Iterable[list[str]]:
    """For each row and variant: data parallelism, the straight pipeline, pdtool's plan and the paper's gain."""
    for row in ROWS:
        for (name, variant), profile in known.items():
            if name == row.profile:
                case = Case(profile, servers(row.servers, row.gpus))
                straight, planned = case.planned(straight=True).placement, case.planned().placement
                alike_s = case.simulated_s(case.data_parallel().placement)
                times = map(milliseconds, (alike_s, case.simulated_s(straight), case.simulated_s(planned)))
                gains = (f"{case.gain(placement):.2f}" for placement in (straight, planned))
                yield [row.title, variant, *times, planned.config, *gains, f"{row.plan}: {row.gain}"]


def original_answers() -> Iterable[list[str]]:
    """What PipeDream's own optimizer answers on the same profiles."""
    shapes = {f"{row.servers}x{row.gpus}{row.cluster}" for row in ROWS}
    for row in json.loads((PUBLISHED / "reference.json").read_text())["rows"]:
        if row["profile"] in NAMES and row["shape"] in shapes:
            activations = "charged" if row["activation_compression_ratio"] else "free"
            time, gain = milliseconds(row["bottleneck_s"]), f"{row['gain_over_dp']:.2f}"
            yield [NAMES[row["profile"]], row["shape"], activations, row["config"], time, gain]


def gnmt_plans(case: Case) -> Iterable[list[str]]:
    """The terms of data parallelism, of the fastest straight pipeline, of PipeDream's and of pdtool's plan."""
    yield case.terms("data parallelism", case.data_parallel())
    yield case.terms("straight", case.planned(straight=True))
    yield case.terms("by PipeDream's formulas", case.planned(cost_model="pipedream"))
    yield case.terms("by pdtool", case.planned())


def alexnet_plans(case: Case) -> Iterable[list[str]]:
    """The terms of plans that differ in the workers of the convolutions and of the classifiers."""
    yield case.terms("data parallelism", case.data_parallel())
    for replicas in ((15, 1), (14, 1, 1), (12, 1, 1)):
        borders = ["node18", "node21"] if case.cluster.below[0] == 4 else ["node18", "node19"]
        yield case.terms("by hand", case.cut_before(borders[: len(replicas) - 1], replicas))
    yield case.terms("by pdtool", case.planned())


def bandwidths(known: dict[tuple[str, str], Profile]) -> Iterable[list[str]]:
    """With which bandwidth data parallelism is as slow as the paper's gain over our simulation of its plan tells."""
    for row in ROWS[:2] + ROWS[3:]:
        profile = known[row.profile, "64" if row.profile == "gnmt8" else "256"]
        case = Case(profile, servers(row.servers, row.gpus))
        plan = case.planned(straight=True) if row.plan == "straight" else case.cut_before(["node18"], (15, 1))
        wanted_s = row.gain * case.simulated_s(plan.placement)
        nominal = (INSIDE if row.servers == 1 else BETWEEN)[row.gpus]
        yield [
            row.title,
            plan.placement.config,
            milliseconds(case.simulated_s(plan.placement)),
            f"{case.gain(plan.placement):.2f}",
            f"{row.gain}",
            f"{rate(nominal)} {'inside' if row.servers == 1 else 'between'} servers",
            rate(nominal * data_parallel_scale(row, profile, wanted_s)),
        ]


def data_parallel_scale(row: Row, profile: Profile, wanted_s: float) -> float:
    """The factor on the bandwidth with which data parallelism takes `wanted_s` per minibatch, by bisection."""
    low, high = 0.02, 2.0
    for _ in range(16):
        middle = math.sqrt(low * high)
        scales = {"inside_scale" if row.servers == 1 else "scale": middle}
        case = Case(profile, servers(row.servers, row.gpus, **scales))
        is_slower = case.simulated_s(case.data_parallel().placement) > wanted_s
        low, high = (middle, high) if is_slower else (low, middle)
    return low


def rate(bytes_per_s: float) -> str:
    return f"{bytes_per_s * 8 / GB:.3g} Gbit/s"


def main() -> None:
    """Print all tables."""
    if not PUBLISHED.is_dir():
        raise SystemExit(
            f"there is no {PUBLISHED}: put gnmt8.graph.txt and alexnet.graph.txt of msr-fiddle/pipedream there"
        )
    known = profiles()
    table(
        "Overview",
        (
            "row",
            "minibatch",
            "DP ms",
            "straight ms",
            "pdtool ms",
            "pdtool's plan",
            "gain of straight",
            "gain of pdtool",
            "paper",
        ),
        overview(known),
    )
    table(
        "PipeDream's optimizer",
        ("profile", "cluster", "activations", "configuration", "ms", "gain"),
        original_answers(),
    )
    columns = TERMS.split(", ")
    for variant in ("32", "64"):
        for count, gpus in ((3, 4), (2, 8)):
            case = Case(known["gnmt8", variant], servers(count, gpus))
            table(f"GNMT-8 on {count}x{gpus}, minibatch {variant}", columns, gnmt_plans(case))
    for count, gpus in ((4, 4), (2, 8)):
        table(f"AlexNet on {count}x{gpus}", columns, alexnet_plans(Case(known["alexnet", "256"], servers(count, gpus))))
    columns = [
        "row",
        "paper's plan",
        "simulated",
        "gain",
        "gain in the paper",
        "nominal bandwidth",
        "of data parallelism",
    ]
    table("The bandwidth that data parallelism had, by the paper's gain", columns, bandwidths(known))


if __name__ == "__main__":
    main()
