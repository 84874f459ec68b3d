"""Weight policies: which weight version each minibatch is computed with, from the action lists alone.

A policy also says how many versions a stage holds at most, and after how many minibatches it updates.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from operator import mul
from typing import Any

from pdtool.schedule.action import Action, ActionKind

ForwardVersion = tuple[tuple[int, int], int]  # (stage, minibatch), and how many updates of the stage its forward sees
Number = Any  # one number, or a numpy array of them
ForwardVersions = dict[tuple[int, int], int]  # the same of several forwards


def _newest(
    workers: Sequence[Iterable[Action]], worker: int, replicas: Sequence[int], update_every: Sequence[int]
) -> Iterator[ForwardVersion]:
    """Yield the version that is the newest when a forward runs."""
    updates: Counter[int] = Counter()
    for action in workers[worker]:
        if action.kind is ActionKind.UPDATE:
            updates[action.stage] += 1
        elif action.kind is ActionKind.FORWARD:
            yield (action.stage, action.minibatch), updates[action.stage]


def _newest_of_first_stage(
    workers: Sequence[Iterable[Action]], worker: int, replicas: Sequence[int], update_every: Sequence[int]
) -> Iterator[ForwardVersion]:
    """Yield the version that the first stage had when the minibatch's forward ran there.

    It follows the first stage's actions as far as this worker has come.
    """
    first = [_newest(workers, replica, replicas, update_every) for replica in range(replicas[0])]
    at_first: dict[int, int] = {}  # of minibatches of this worker that it has not come to
    for (stage, i), version in _newest(workers, worker, replicas, update_every):
        while i not in at_first and (found := next(first[i % replicas[0]], None)):
            (_, j), first_version = found
            if (j - i) % replicas[stage] == 0:  # it is this worker's, too
                at_first[j] = first_version
        yield (stage, i), at_first.pop(i, version)


def _one_update_late(
    workers: Sequence[Iterable[Action]], worker: int, replicas: Sequence[int], update_every: Sequence[int]
) -> Iterator[ForwardVersion]:
    """Yield version j - 1 for the minibatches of round j, whatever is the newest."""
    for action in workers[worker]:
        if action.kind is ActionKind.FORWARD:
            number = action.minibatch // update_every[action.stage]
            yield (action.stage, action.minibatch), max(0, number - 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class WeightPolicy:
    """Which weight version each minibatch is computed with; a copy, or one from a pickle, is the policy itself.

    Attributes:
        name: in plans, and for `--weights`.
        words: whose weights they are, for help.
        reads: of (the actions of all workers, the number of one, r and k of all stages), the version that each of its
            forwards reads, in order: how many updates of its stage precede it. Made as it is asked for, from actions
            as far as it must see them.
        max_versions: of (r, w, k, minibatches in flight at all replicas of the first stage), the maximal number of
            versions at one replica of a stage, the newest included. For stashing r, w and k may be arrays.
        intervals: of (r, w) of all stages, k for each stage, unless another is asked for.
        stashes: whether old versions are kept for the backwards that need them.
    """

    name: str
    words: str
    reads: Callable[[Sequence[Iterable[Action]], int, Sequence[int], Sequence[int]], Iterator[ForwardVersion]] = _newest
    max_versions: Callable[[Number, Number, Number, int], Number]
    intervals: Callable[[Sequence[int], Sequence[int]], list[int]] = lambda r, w: list(r)
    stashes: bool = True

    @property
    def reads_newest(self) -> bool:
        """Whether each forward reads the newest version at its time."""
        return self.reads is _newest

    def forward_versions(
        self, lists: Sequence[Iterable[Action]], replicas: Sequence[int], update_every: Sequence[int]
    ) -> list[ForwardVersions]:
        """Return for each worker what `reads` says of all its forwards.

        Args:
            lists: the actions of all workers.
            replicas, update_every: r[s] and k[s], for each stage.
        """
        versions: list[ForwardVersions] = [{} for _ in lists]
        for worker, own in enumerate(versions):
            for forward, version in self.reads(lists, worker, replicas, update_every):
                own.setdefault(forward, version)  # of one that is listed twice the first counts
        return versions

    def __reduce__(self) -> tuple[Any, ...]:
        return _policy_named, (self.name,)


def _policy_named(name: str) -> WeightPolicy:
    return WEIGHT_POLICIES[name]


def smaller(a: Number, b: Number) -> Number:
    """Return the smaller one, of arrays too."""
    return a - (a > b) * (a - b)


def ceil_div(a: Number, b: Number) -> Number:
    """Return a / b, rounded up; of whole numbers, and arrays of them."""
    return -(-a // b)


# PipeDream, SOSP'19, section 3.3. Between two updates a replica does k/r backwards, so at most that many of w
# minibatches in flight began with the same weights.
STASH = WeightPolicy(
    name="stash",
    words="those of its forward",
    max_versions=lambda r, w, k, first: smaller(w, 1 + ceil_div(w - 1, k // r + (k < r))),
)
# The same section. All stages must update after the same number of minibatches, and those in flight at the first stage
# count everywhere.
VERTICAL_SYNC = WeightPolicy(
    name="vertical-sync",
    words="those of the first stage's forward",
    reads=_newest_of_first_stage,
    max_versions=lambda r, w, k, first: 1 + ceil_div(first - 1, k),
    intervals=lambda r, w: [math.lcm(*r)] * len(r),
)
# The newest version at the forward, and the newest at the backward, which may differ.
NONE = WeightPolicy(name="none", words="the newest ones", max_versions=lambda r, w, k, first: 1, stashes=False)
# Narayanan et al., ICML'21, section 3.1: one update late everywhere. k is at least the number in flight, over all
# replicas of the stage that has the most, so that a third version never begins.
TWO_BW = WeightPolicy(
    name="2bw",
    words="those of the update before, at every stage",
    reads=_one_update_late,
    max_versions=lambda r, w, k, first: 2,
    intervals=lambda r, w: [max(map(mul, r, w))] * len(r),
)
# The newest; nothing is in flight when it changes.
FLUSH = WeightPolicy(name="flush", words="the newest", max_versions=lambda r, w, k, first: 1)

WEIGHT_POLICIES = {policy.name: policy for policy in (STASH, VERTICAL_SYNC, NONE, TWO_BW, FLUSH)}
