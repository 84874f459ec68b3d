"""Which minibatches of an epoch are in steady state: after the pipeline has filled, and before it drains."""

from __future__ import annotations

import math

from pdtool.schedule.shape import PipelineShape

_MIN_STEADY = 32  # minibatches
_LONGEST_PERIOD = 512  # minibatches


def _filling(shape: PipelineShape) -> int:
    """Return the minibatches that are begun before the pipeline is in steady state."""
    in_flight = (w * r for w, r in zip(shape.in_flight, shape.replicas, strict=False))
    return max(*in_flight, *shape.update_every)


def _period(shape: PipelineShape) -> int:
    """Return the minibatches after which a schedule repeats itself."""
    common = math.lcm(*shape.update_every)
    return common if common <= _LONGEST_PERIOD else max(shape.update_every)


def steady_run(shape: PipelineShape, steady: int = _MIN_STEADY) -> int:
    """Return the minibatches to fill the pipeline, see it in steady state for whole periods, and drain it.

    Args:
        steady: minibatches to see in steady state, at least.
    """
    periods = math.ceil(max(steady, _period(shape)) / _period(shape))
    return 2 * _filling(shape) + periods * _period(shape)


def steady_minibatches(minibatches: int, shape: PipelineShape) -> range:
    """Return as many minibatches, in the order in which they end, as there are in whole periods between filling and
    draining; there may be none."""
    first = _filling(shape)
    return range(first, first + (minibatches - 2 * first) // _period(shape) * _period(shape))
