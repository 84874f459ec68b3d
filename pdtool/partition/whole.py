"""What only a whole plan shows: links that several stages share, round trips, rounds that wait for their replicas.

The search works stage by stage and cannot see these; it takes them to cost nothing. They tell how many minibatches in
flight a plan wants; what they cost, the simulator says.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
from numpy.typing import NDArray

from pdtool.artifacts.profile import Profile
from pdtool.partition.cost import Load, Rules, shares
from pdtool.partition.simulator.planned import borders, tied_bytes

Workers = Sequence[Sequence[int]]  # of each stage, replica k in copy k mod d
Share = NDArray[np.float64]


def link_loads(
    rules: Rules, profile: Profile, stages: Sequence[Collection[str]], work: Sequence[Load], workers: Workers
) -> list[NDArray[np.float64]]:
    """For each level, [members] seconds per minibatch of each member's link, the busier way of the two.

    Each member has one link, each way, for all that its workers send to or take from other members: tensors straight
    from the stage that makes them to each stage that takes them, gradients back, and of each ring that passes through
    it 2 (n-1)/n of the bytes, once a round.
    """
    sent = borders(profile, stages)
    meeting = [_meeting(rules, workers[border.source], workers[border.destination]) for border in sent]
    held = [_held(rules, numbers, 1) for numbers in workers]
    rings = _rings(rules, profile, stages, work, workers)
    seconds = []
    for depth, level in enumerate(rules.cluster.levels):
        loads = np.zeros((2, held[0][depth].shape[-1]))  # out of each member, into it
        for border, (ours, theirs) in zip(sent, meeting, strict=True):
            a, b = ours[depth], theirs[depth]
            forth, back = (np.stack([x * (1 - y), y * (1 - x)]).mean(axis=1) for x, y in ((a, b), (b, a)))
            loads += forth * border.forward_bytes + back * border.backward_bytes
        for members, size, every in rings:
            touched = np.any([held[s][depth] for s in members], axis=(0, 1))
            n = sum(len(workers[s]) for s in members)
            loads += touched * (touched.sum() > 1) * 2 * (n - 1) / n * size / every
        seconds.append(loads.max(axis=0) / level.bandwidth_bytes_per_s)
    return seconds


def _rings(
    rules: Rules, profile: Profile, stages: Sequence[Collection[str]], work: Sequence[Load], workers: Workers
) -> list[tuple[Sequence[int], int, int]]:
    """(stages, bytes, minibatches in a round) of what is averaged: by the replicas of a stage what it alone holds, by
    those of several what they all hold; then they all update after the same number of minibatches."""
    sizes = [len(numbers) for numbers in workers]
    tied = tied_bytes(profile, stages)
    every = [rules.round_size(n // rules.copies) for n in sizes]
    for group in tied if rules.schedule == "1f1b" else ():
        for s in group:
            every[s] = math.lcm(*(sizes[other] for other in group))
    own = [((s,), load.parameter_bytes - load.tied_bytes, every[s]) for s, load in enumerate(work)]
    return [*own, *((group, size, every[group[0]]) for group, size in tied.items())]


def _meeting(rules: Rules, ours: Sequence[int], theirs: Sequence[int]) -> tuple[list[Share], list[Share]]:
    """For two stages, of each class of replicas that exchange minibatches, and of each level: see `_held`.

    Minibatch i is at replica i mod r of both: replicas of n and m meet where their numbers are alike modulo the
    greatest common divisor, all of them equally often.
    """
    classes = math.gcd(len(ours), len(theirs))
    return _held(rules, ours, classes), _held(rules, theirs, classes)


def _held(rules: Rules, numbers: Sequence[int], classes: int) -> list[Share]:
    """For each level, [classes, members] share on each member of the workers whose positions are alike modulo that."""
    held = np.zeros((classes, rules.cluster.workers))
    held[np.arange(len(numbers)) % classes, list(numbers)] = 1
    return shares(rules.cluster, held)


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
