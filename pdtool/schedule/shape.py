"""The shape of a pipeline: its stages, their replicas, and the bounds that a schedule keeps.

The shape also tells when a schedule is in steady state: after the pipeline has filled, and before it drains.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pdtool.schedule.policies import WeightPolicy

_MIN_STEADY = 32  # minibatches
_LONGEST_PERIOD = 512  # minibatches


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """The stages, replicas and bounds that a schedule is built for.

    Attributes:
        replicas: r[s], for each stage.
        in_flight: w[s], for each stage; with chunks for each worker, over all its chunks.
        update_every: k[s], minibatches in one update of stage s, over all its replicas.
        chunks: v, stages on one worker: of p v stages, worker k holds k, k + p, k + 2p, ...
        weights: the policy.
    """

    replicas: tuple[int, ...]
    in_flight: tuple[int, ...]
    update_every: tuple[int, ...]
    weights: WeightPolicy
    chunks: int = 1

    @property
    def pipeline_depth(self) -> int:
        """p: the number of stages that do not share their workers with an earlier stage."""
        return len(self.replicas) // self.chunks

    @property
    def representative_minibatches(self) -> int:
        """How many minibatches show everything that an epoch of any length does.

        The lists of a longer epoch only repeat a whole period more often. We may leave out repetitions. At a period's
        end the same is in flight as at its beginning, each minibatch later by the period. An action waits only for
        actions of its minibatch or its round, so it can run if the same action a period earlier could. So one whole
        period after the pipeline has filled is enough, plus one minibatch, which makes the last round short. With a
        flush the period is a round.
        """
        filling, period = _filling(self), math.lcm(*self.update_every, *self.replicas)
        return filling + max(filling, period if period <= _LONGEST_PERIOD else 0) + 1

    def stage_replicas(self) -> Iterator[tuple[int, int]]:
        """Yield (stage, replica) of each worker's list, in order; with chunks the first stage on that worker."""
        return ((s, k) for s, r in enumerate(self.replicas[: self.pipeline_depth]) for k in range(r))

    def stages_on_same_workers(self, stage: int) -> range:
        """Return all stages on the workers of `stage`."""
        return range(stage % self.pipeline_depth, len(self.replicas), self.pipeline_depth)

    def versions(self, stage: int) -> int:
        """Return the maximal number of weight versions at one replica of a stage, the newest included."""
        in_flight = self.in_flight[stage % self.pipeline_depth]
        first = self.replicas[0] * self.in_flight[0]
        return int(self.weights.max_versions(self.replicas[stage], in_flight, self.update_every[stage], first))


def tied_update_lag(shape: PipelineShape, holders: Sequence[int], stage: int) -> int:
    """Return by how many rounds `stage` runs ahead of the first holder f of a tied parameter (runtime/stage).

    ceil((r[f] w[f] - r[s] w[s]) / k), at least 0.
    """
    first, this = (shape.replicas[s] * shape.in_flight[s] for s in (min(holders), stage))
    return max(0, math.ceil((first - this) / shape.update_every[stage]))


def steady_run(shape: PipelineShape, steady: int = _MIN_STEADY) -> int:
    """Return the minibatches to fill the pipeline, keep it in steady state for whole periods, and drain it.

    Args:
        steady: least number of minibatches in steady state.
    """
    periods = math.ceil(max(steady, _period(shape)) / _period(shape))
    return 2 * _filling(shape) + periods * _period(shape)


def steady_minibatches(minibatches: int, shape: PipelineShape) -> range:
    """Return the minibatches of whole periods between filling and draining, in the order in which they end; maybe
    none."""
    first = _filling(shape)
    return range(first, first + (minibatches - 2 * first) // _period(shape) * _period(shape))


def _filling(shape: PipelineShape) -> int:
    """Return how many minibatches begin before the pipeline is in steady state."""
    in_flight = (w * r for w, r in zip(shape.in_flight, shape.replicas, strict=False))
    return max(*in_flight, *shape.update_every)


def _period(shape: PipelineShape) -> int:
    """Return the minibatches after which a schedule repeats itself."""
    common = math.lcm(*shape.update_every)
    return common if common <= _LONGEST_PERIOD else max(shape.update_every)
