"""What only a whole plan shows: links that several stages share, round trips, rounds that wait for their replicas.

The search works stage by stage and cannot see these; it takes them to cost nothing. They tell how many minibatches in
flight a plan wants; what they cost, the simulator says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.profile import Profile
from pdtool.partition.cost import Load, Rules
from pdtool.partition.evaluate import shares_of
from pdtool.partition.simulator.planned import borders

Workers = Sequence[Sequence[int]]  # of each stage, replica k in copy k mod d


def link_loads(
    rules: Rules, profile: Profile, stages: Sequence[Collection[str]], work: Sequence[Load], workers: Workers
) -> list[NDArray[np.float64]]:
    """For each level, [members] seconds per minibatch of each member's link, the busier way of the two.

    Each member has one link, each way, for all that its workers send to or take from other members: tensors straight
    from the stage that makes them to each stage that takes them, gradients back, and of each ring that passes through
    it 2 (n-1)/n of the bytes, once a round.
    """
    parts = shares_of(rules, workers)
    seconds = []
    for depth, level in enumerate(rules.cluster.levels):
        loads = np.zeros((2, parts[0][depth].shape[-1]))  # out of each member, into it
        for border in borders(profile, stages):
            a, b = parts[border.source][depth], parts[border.destination][depth]
            forth, back = (np.stack([x * (1 - y), y * (1 - x)]).sum(axis=1) for x, y in ((a, b), (b, a)))
            loads += (forth * border.forward_bytes + back * border.backward_bytes) / rules.copies
        for s, load in enumerate(work):
            touched, n = parts[s][depth].any(axis=0), len(workers[s])
            own = 2 * (n - 1) / n * (load.parameter_bytes - load.tied_bytes) * (touched.sum() > 1)
            tied = load.tied_bytes * (rules.everywhere[depth] > 1)
            loads += touched * (own + tied) / rules.round_size(n // rules.copies)
        seconds.append(loads.max(axis=0) / level.bandwidth_bytes_per_s)
    return seconds


def waits(
    rules: Rules, work: Sequence[Load], workers: Workers, recompute: Sequence[bool], flight: Sequence[int], pace: float
) -> list[float]:
    """For each stage, seconds from a forward's start to the end of its backward, in a pipeline that keeps its pace.

    All later stages compute and messages take their way there and back; or rounds wait for their replicas, if that is
    longer (see `wanted_in_flight`). Queues before a busy link are not counted: the simulator does.

    Args:
        pace: seconds per minibatch.
    """
    sizes = [len(numbers) // rules.copies for numbers in workers]
    rounds = [pace * n * rules.copies for n in wanted_in_flight(sizes, flight)]
    trip = 0.0
    held: list[float] = []
    for s in reversed(range(len(work))):
        load = work[s]
        trip += load.forward_s * (1 + recompute[s]) + load.backward_s
        held.append(max(trip, rounds[s]))
        link = rules.cluster.link(workers[s - 1][0], workers[s][0]) if s else None
        if link:
            trip += (load.received_bytes + load.returned_bytes) / link.bandwidth_bytes_per_s + 2 * link.latency_s
    return held[::-1]


def bunch(replicas: int, after: int) -> int:
    """Minibatches that go over a border together, since the replicas of a stage work in step."""
    return max(replicas, after) if replicas % after == 0 or after % replicas == 0 else replicas + after


def wanted_in_flight(replicas: Sequence[int], flight: Sequence[int]) -> list[int]:
    """For each stage, minibatches in flight at all its replicas with which it never waits for others' rounds.

    A replicated stage updates when its last replica has done its part, so its minibatches come and go in bunches, and a
    stage before it must have one bunch more on its way. Found with the simulator: then the pace is kept, or nearly.
    Straight pipelines want p - s as ever.

    Args:
        flight: minibatches in flight at one replica of each stage, as the plan has them.
    """
    wanted = [replicas[-1]]
    for s in reversed(range(len(replicas) - 1)):
        wanted.append(flight[s + 1] * replicas[s + 1] + bunch(replicas[s], replicas[s + 1]))
    return wanted[::-1]
