"""Weight policies: the version of the weights that each minibatch is computed with, from the action lists alone.

A policy also says how many versions a stage holds at most, and after how many minibatches a stage updates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pdtool.schedule.action import ActionKind, Actions

ForwardVersions = dict[tuple[int, int], int]  # (stage, minibatch) -> updates of the stage that its forward sees


def _newest(lists: Sequence[Actions]) -> list[ForwardVersions]:
    """Return for each worker the versions that are the newest when a forward runs."""
    newest: list[ForwardVersions] = []
    for actions in lists:
        updates: Counter[int] = Counter()
        newest.append({})
        for action in actions:
            if action.kind is ActionKind.UPDATE:
                updates[action.stage] += 1
            elif action.kind is ActionKind.FORWARD:
                newest[-1].setdefault((action.stage, action.minibatch), updates[action.stage])
    return newest


def _newest_of_first_stage(lists: Sequence[Actions]) -> list[ForwardVersions]:
    """Return for each worker the versions that the first stage had when the minibatch's forward ran there."""
    newest = _newest(lists)
    first = {i: version for versions in newest for (stage, i), version in versions.items() if stage == 0}
    return [{key: first.get(key[1], version) for key, version in versions.items()} for versions in newest]


def _one_update_late(lists: Sequence[Actions]) -> list[ForwardVersions]:
    """Return for each worker version j - 1 for the minibatches of round j."""
    late = []
    for actions, versions in zip(lists, _newest(lists), strict=True):
        rounds: dict[int, int] = {}  # of each stage, that of the update after the current action
        for action in reversed(actions):
            if action.kind is ActionKind.UPDATE:
                rounds[action.stage] = action.minibatch
            elif action.kind.completes_backward:
                versions[action.stage, action.minibatch] = max(0, rounds.get(action.stage, 0) - 1)
        late.append(versions)
    return late


def total_in_flight(replicas: Sequence[int], in_flight: Sequence[int]) -> int:
    """Return the minibatches in flight at all replicas of the stage that has the most."""
    return max(w * r for w, r in zip(in_flight, replicas, strict=True))


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightPolicy:
    """Which version of the weights each minibatch is computed with.

    Attributes:
        name: in plans, and for `--weights`.
        words: whose weights they are, for help.
        forward_versions: the version that every forward of each worker reads: how many updates of its stage precede it.
        max_versions: of (r, w, k, minibatches in flight at all replicas of the first stage), the maximal number of
            versions at one replica of a stage, the newest included.
        intervals: of (r, w) of all stages, k for each stage, unless another is asked for.
        stashes: whether old versions are kept for the backwards that need them.
    """

    name: str
    words: str
    forward_versions: Callable[[Sequence[Actions]], list[ForwardVersions]] = _newest
    max_versions: Callable[[int, int, int, int], int]
    intervals: Callable[[Sequence[int], Sequence[int]], list[int]] = lambda r, w: list(r)
    stashes: bool = True


# PipeDream, SOSP'19, section 3.3. Between two updates a replica does k/r backwards, so of w minibatches in flight no
# more than that many were begun with the same weights.
STASH = WeightPolicy(
    name="stash",
    words="those of its forward",
    max_versions=lambda r, w, k, first: min(w, 1 + math.ceil((w - 1) / max(1, k // r))),
)
# The same section. All stages must update after the same number of minibatches, and those in flight at the first stage
# count everywhere.
VERTICAL_SYNC = WeightPolicy(
    name="vertical-sync",
    words="of its first stage's forward",
    forward_versions=_newest_of_first_stage,
    max_versions=lambda r, w, k, first: 1 + math.ceil((first - 1) / k),
    intervals=lambda r, w: [math.lcm(*r)] * len(r),
)
# The newest when its forward runs, and the newest when its backward runs, which may be another.
NONE = WeightPolicy(name="none", words="whatever is newest", max_versions=lambda r, w, k, first: 1, stashes=False)
# Narayanan et al., ICML'21, section 3.1: one update late everywhere. k is at least all that is in flight, so that a
# third version is never begun.
TWO_BW = WeightPolicy(
    name="2bw",
    words="those of the update before, at every stage",
    forward_versions=_one_update_late,
    max_versions=lambda r, w, k, first: 2,
    intervals=lambda r, w: [total_in_flight(r, w)] * len(r),
)
# The newest; nothing is in flight when it changes.
FLUSH = WeightPolicy(name="flush", words="the newest", max_versions=lambda r, w, k, first: 1)

WEIGHT_POLICIES = {policy.name: policy for policy in (STASH, VERTICAL_SYNC, NONE, TWO_BW, FLUSH)}
