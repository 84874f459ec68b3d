"""A plan beside those that everyone asks about, all simulated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.partition.rivals import known_plans
from pdtool.partition.simulator.planned import MOST_ACTIONS, enough, planned_job
from pdtool.partition.simulator.simulate import simulate, simulated_pace
from pdtool.partition.simulator.simulation import Simulation

CHOSEN, DATA_PARALLEL = "this plan", "data parallelism"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One plan, simulated.

    Attributes:
        memory_bytes: on the worker that needs most.
        sent_bytes: by all workers together for one minibatch.
        fits: whether the memory of a device is enough.
    """

    label: str
    config: str
    pace_s: float
    throughput_samples_per_s: float
    memory_bytes: int
    sent_bytes: float
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Plans beside each other; `left_out` names those that would take too long to simulate."""

    rows: tuple[Row, ...]
    left_out: tuple[str, ...]


def compare(profile: Profile, plan: Plan, found: Simulation) -> Comparison:
    """The plan, data parallelism, the straight pipeline, GPipe and model parallelism, each where there is one, and each
    in its steady state.

    Args:
        found: what the plan's own simulation said, with as many minibatches as that takes.
    """
    known = known_plans(profile, plan)
    small = [(label, rival) for label, rival in known if actions(rival) <= MOST_ACTIONS]
    rows = [_row(label, rival, simulate(planned_job(rival, profile))) for label, rival in small]
    own = _row(CHOSEN, plan, found)
    return Comparison(rows=(own, *rows), left_out=tuple(label for label, rival in known if (label, rival) not in small))


def actions(plan: Plan) -> int:
    """Forwards and backwards of a simulation, before its lists are made."""
    return 2 * enough(plan.shape()) * len(plan.stages)


def _row(label: str, plan: Plan, found: Simulation) -> Row:
    memory = max(share.memory_bytes for share in found.shares)
    return Row(
        label=label,
        config=plan.config,
        pace_s=found.pace_s,
        throughput_samples_per_s=found.throughput_samples_per_s,
        memory_bytes=memory,
        sent_bytes=found.sent_bytes,
        fits=memory <= (plan.cluster.memory_bytes or math.inf),
    )


@dataclass(frozen=True, kw_only=True)
class Point:
    """One bandwidth of a sweep; paces in seconds per minibatch."""

    bandwidth_bytes_per_s: float
    pace_s: float
    data_parallel_s: float

    @property
    def gain(self) -> float:
        """Over data parallelism."""
        return self.data_parallel_s / self.pace_s


def sweep(profile: Profile, plan: Plan, bandwidths: Sequence[float]) -> list[Point]:
    """The same plan, and data parallelism on all workers, at each bandwidth of the outermost level."""
    rival = next(other for label, other in known_plans(profile, plan) if label.startswith(DATA_PARALLEL))
    paces = [[simulated_pace(planned_job(at(one, rate), profile)) for rate in bandwidths] for one in (plan, rival)]
    return [
        Point(bandwidth_bytes_per_s=rate, pace_s=own, data_parallel_s=other)
        for rate, own, other in zip(bandwidths, *paces, strict=True)
    ]


def at(plan: Plan, bandwidth_bytes_per_s: float) -> Plan:
    """The plan with another bandwidth at the outermost level."""
    outer, *inner = plan.cluster.levels
    levels = (outer.model_copy(update={"bandwidth_bytes_per_s": bandwidth_bytes_per_s}), *inner)
    return plan.model_copy(update={"cluster": plan.cluster.model_copy(update={"levels": levels})})


def grid(low: float, high: float, points: int) -> list[float]:
    """Bandwidths from low to high, evenly on a logarithmic scale."""
    step = math.log(high / low) / (points - 1)
    return [low * math.exp(step * i) for i in range(points - 1)] + [high]


def crossings(points: Sequence[Point]) -> list[float]:
    """Bandwidths at which the gain passes 1, interpolated where both scales are logarithmic."""
    found = []
    for a, b in pairwise(points):
        if (a.gain - 1) * (b.gain - 1) < 0:
            share = math.log(a.gain) / (math.log(a.gain) - math.log(b.gain))
            ratio = b.bandwidth_bytes_per_s / a.bandwidth_bytes_per_s
            found.append(a.bandwidth_bytes_per_s * ratio**share)
    return found
