"""What is simulated: action lists, what each action takes, and what goes between stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pdtool.cluster import Cluster
from pdtool.schedule import ActionKind, Actions, PipelineShape


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one stage costs on one worker.

    Attributes:
        seconds: of each kind of action.
        weight_bytes: of one version of the weights.
        kept_bytes: of each minibatch in flight.
        fixed_bytes: gradients, optimizer state, and what is needed while computing.
        averaged_bytes: of gradients, over the replicas, in each round.
    """

    seconds: Mapping[ActionKind, float]
    weight_bytes: int = 0
    kept_bytes: int = 0
    fixed_bytes: int = 0
    averaged_bytes: int = 0


@dataclass(frozen=True, kw_only=True)
class Border:
    """What one stage sends another for each minibatch, and whether gradients come back for it."""

    source: int
    destination: int
    forward_bytes: int = 0
    backward_bytes: int = 0
    returns: bool = True


@dataclass(frozen=True, kw_only=True)
class Tied:
    """A parameter of several stages: its gradient is summed over all their replicas once a round (run/tied.py).

    Attributes:
        lags: for each of the stages, rounds between a gradient and its step.
    """

    stages: tuple[int, ...]
    lags: tuple[int, ...]
    size_bytes: int


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is simulated.

    Attributes:
        lists: of actions, one per worker, in the order of shape.stage_replicas().
        workers: their numbers in the cluster.
        stages: what each costs.
        batch_size: samples in a minibatch.
    """

    shape: PipelineShape
    lists: Sequence[Actions]
    workers: Sequence[int]
    cluster: Cluster
    stages: Sequence[Work]
    borders: Sequence[Border]
    tied: Sequence[Tied] = ()
    batch_size: int = 1
