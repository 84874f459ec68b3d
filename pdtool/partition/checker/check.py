"""Whether what a plan says of itself is true.

The figures are recomputed (recount.py) and compared. The certificate cannot be proved again without the search, but it
can be refuted: by a plan that is faster than its lower bound.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from pdtool.artifacts.plan import Plan, Predicted, Why
from pdtool.artifacts.profile import Profile
from pdtool.errors import ArtifactError, ScheduleError
from pdtool.partition.checker.recount import Division, Recount
from pdtool.partition.checker.walk import Walk
from pdtool.units import format_bytes, format_seconds

_SAME = 1e-9  # relative: sums taken in another order differ in the last digits
_PLAUSIBLE = 0.95  # of the slowest stage: a simulation looks at some thirty minibatches between two others


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One claim of a plan.

    Attributes:
        claim: what was looked at.
        holds: None where that cannot be said.
        words: what was found.
        field: of the plan, where a figure stands there.
        stored, recomputed: of that figure, where they differ.
    """

    claim: str
    holds: bool | None
    words: str
    field: str = ""
    stored: Any = None
    recomputed: Any = None


@dataclass(frozen=True)
class Check:
    """All that can be said against a plan; `findings` in the order in which they are best read."""

    plan: Plan
    profile: Profile

    def findings(self) -> Iterator[Finding]:
        """Ends early where the stages are no division of the profile: then there are no figures."""
        try:
            division = Division.of(self.plan, self.profile)
        except ArtifactError as error:
            yield Finding(claim="stages", holds=False, words=error.what.partition(": stages: ")[2], field="stages")
            return
        nodes = len(self.profile.nodes)
        yield Finding(
            claim="stages",
            holds=True,
            words=f"each of {nodes} operators in one of {len(division.stages)}, "
            "nothing is sent backwards, groups and pins are kept",
        )
        yield self._schedule()
        own = Recount(self.profile, self.plan.cluster.cluster(), division)
        yield self._memory(own)
        if self.plan.edited or not self.plan.predicted:  # the second for the type checker: without figures it is edited
            yield Finding(
                claim="figures",
                holds=False,
                field="predicted",
                recomputed=own.bottleneck_s(),
                words="those of another plan, this one was edited by hand since; as it is now it takes "
                f"{format_seconds(own.bottleneck_s())} per minibatch",
            )
            return
        yield from self._figures(own, self.plan.predicted)
        yield from self._certificate(own)

    def _schedule(self) -> Finding:
        flight = ", ".join(str(stage.in_flight) for stage in self.plan.stages)
        try:
            self.plan.check_schedule()
        except ScheduleError as error:
            return Finding(claim="schedule", holds=False, words=str(error), field="stages", stored=flight)
        words = f"{self.plan.schedule} runs to its end with {flight} minibatches in flight"
        return Finding(claim="schedule", holds=True, words=words)

    def _memory(self, own: Recount) -> Finding:
        needs = [own.memory_bytes(s) for s in own.order]
        worst, limit = max(own.order, key=needs.__getitem__), own.cluster.memory_bytes
        words = f"stage {worst} needs most, {format_bytes(needs[worst])} on a worker that has "
        words += "no limit" if limit is None else format_bytes(limit)
        return Finding(
            claim="memory",
            holds=own.fits(),
            words=words,
            field=f"stages[{worst}]",
            stored=limit,
            recomputed=needs[worst],
        )

    def _figures(self, own: Recount, stored: Predicted) -> Iterator[Finding]:
        if stored.simulated_s is not None:
            yield self._simulated(own, stored.simulated_s)
        pace = own.bottleneck_s()
        expected = pace if stored.simulated_s is None else stored.simulated_s
        recomputed = {
            "bottleneck_s": pace,
            "throughput_samples_per_s": self.profile.batch_size / expected if expected else 0.0,
            "compute_s": [own.compute_s(s) for s in own.order],
            "allreduce_s": [own.allreduce_s(s) for s in own.order],
            "transfer_s": [own.transfer_s(s) for s in own.order[1:]],
            "memory_bytes": [own.memory_bytes(s) for s in own.order],
            "traffic_bytes": own.traffic_bytes(),
        }
        for name, figure in recomputed.items():
            yield _compared(name, getattr(stored, name), figure)
        gains = [alone.bottleneck_s() / pace if pace else 1.0 for alone in self._alone(own, own.cluster.workers)]
        if stored.simulated_s is not None and stored.data_parallel_s is not None:
            gains = [stored.data_parallel_s / stored.simulated_s if stored.simulated_s else 1.0]
        name = "gain_over_data_parallel"
        found = [_compared(name, getattr(stored, name), gain) for gain in gains]
        yield next((one for one in found if one.holds), found[0])

    def _simulated(self, own: Recount, stored: float) -> Finding:
        """No simulation is faster than the passes of its slowest stage (`pdtool simulate` makes it again)."""
        least = max(own.passes_s(s) for s in own.order)
        return Finding(
            claim="simulated_s",
            holds=stored >= least * _PLAUSIBLE,
            field="predicted.simulated_s",
            stored=stored,
            recomputed=least,
            words=f"{format_seconds(stored)}, and the slowest stage computes {format_seconds(least)}",
        )

    def _alone(self, own: Recount, workers: int) -> list[Recount]:
        """Data parallelism; and once more where it fits only if it recomputes: a plan does not say whether it may."""
        flight = math.ceil(self.plan.microbatches / workers) if self.plan.schedule == "gpipe" else 1
        whole = replace(
            own.plan,
            stages=[[node.name for node in self.profile.nodes]],
            workers=[range(workers)],
            flight=[flight],
            recompute=[False],
            copies=1,
        )
        kept, again = (Recount(self.profile, own.cluster, replace(whole, recompute=[v])) for v in (False, True))
        return [kept, again] if again.fits() and not kept.fits() else [kept]

    def _certificate(self, own: Recount) -> Iterator[Finding]:
        why, pace = self.plan.why, own.bottleneck_s()
        if not why or why.lower_bound_s is None:
            yield Finding(claim="lower bound", holds=None, words="none is claimed")
            return
        bound = why.lower_bound_s
        floor = sum(node.forward_s + node.backward_s for node in self.profile.nodes) / own.cluster.workers
        words = f"no plan takes less than {format_seconds(bound)}, it says; this one takes {format_seconds(pace)}"
        if bound < floor * (1 - _SAME):
            words += f"; a weak claim, all workers computing all the time take {format_seconds(floor)}"
        yield _bounded("lower bound", bound, pace, words)
        gap = max(0.0, pace / bound - 1) if bound else 0.0
        same = why.gap is not None and abs(why.gap - gap) <= _SAME * (1 + gap)
        words = f"this plan is {gap:.2%} slower than the lower bound" + f", it says {why.gap}" * (not same)
        yield Finding(claim="gap", holds=same, words=words, field="why.gap", stored=why.gap, recomputed=gap)
        yield self._simple_plans(own, why, bound)
        yield self._neighbours(own, bound)

    def _simple_plans(self, own: Recount, why: Why, bound: float) -> Finding:
        """Data parallelism on all the workers that the certificate is for, and one worker.

        Where the plan itself lists one of them as faster, more was asked for than speed (`--straight`), and the bound
        is for what was asked.
        """
        claimed = [int(number) for number in re.findall(r"(\d+) workers", why.proof)[-1:]] or [own.cluster.workers]
        workers = min(own.cluster.workers, max(*claimed, sum(map(len, own.plan.workers))))
        simple = {"one worker": 1} if own.ours else {}  # PipeDream's optimizer must use all
        simple[f"data parallelism ({workers})"] = workers
        plans = {label: self._alone(own, n)[0] for label, n in simple.items()}
        paces = {label: plan.bottleneck_s() for label, plan in plans.items() if plan.fits()}
        if not paces:
            return Finding(claim="simple plans", holds=None, words="neither data parallelism nor one worker fits")
        label = min(paces, key=paces.__getitem__)
        words = f"{label} takes {format_seconds(paces[label])}"
        faster = {name for name, pace in paces.items() if pace < bound * (1 - _SAME)}
        if faster and faster <= {rival.plan for rival in why.rivals if rival.bottleneck_s < bound}:
            words += ", less than the lower bound, but the plan says so: it is not what was asked for"
            return Finding(claim="simple plans", holds=None, words=words)
        return _bounded("simple plans", bound, paces[label], words)

    def _neighbours(self, own: Recount, bound: float) -> Finding:
        walk = Walk(self.profile, own.cluster)
        pace = walk.go(own.plan)
        if pace is None:
            return Finding(claim="neighbours", holds=None, words=f"not tried, there are more than {walk.most}")
        words = f"{walk.tried} plans tried with operators or replicas moved over a border"
        words += f"; the fastest takes {format_seconds(pace)}" if pace < math.inf else "; none fits" * (walk.tried > 0)
        return _bounded("neighbours", bound, pace, words)


def _bounded(claim: str, bound: float, pace: float, words: str) -> Finding:
    """Whether a pace that can be had leaves the lower bound true."""
    holds = pace >= bound * (1 - _SAME)
    return Finding(
        claim=claim,
        holds=holds,
        words=words,
        field="why.lower_bound_s",
        stored=bound,
        recomputed=None if math.isinf(pace) else pace,
    )


def _compared(name: str, stored: Any, recomputed: Any) -> Finding:
    """A figure or one for each stage; bytes may differ by one, they are rounded up."""
    many = isinstance(recomputed, list)
    old, new = (list(stored), recomputed) if many else ([stored], [recomputed])
    least = 1.0 if name.endswith("_bytes") else 0.0
    pairs = zip(old, new, strict=False)
    holds = len(old) == len(new) and all(abs(a - b) <= max(least, _SAME * max(abs(a), abs(b))) for a, b in pairs)
    words = "as recomputed" if holds else f"the plan says {stored}, recomputed it is {recomputed}"
    return Finding(
        claim=name, holds=holds, words=words, field=f"predicted.{name}", stored=stored, recomputed=recomputed
    )
