"""The time per minibatch of a placement in steady state, where a simulation does not take too long."""

from __future__ import annotations

import math

from pdtool.artifacts.cluster import Cluster
from pdtool.artifacts.profile import Profile
from pdtool.errors import ScheduleError
from pdtool.partition.placement import Placement
from pdtool.partition.simulator.engine import simulated_time_s
from pdtool.partition.simulator.job import SimulationJob, action_count

_MAX_ACTIONS_TIMES_WORKERS = 300_000  # about half a second
PATIENT = 7.0  # times that, for a single plan: some seconds


def steady_state_s(
    placement: Placement, profile: Profile, cluster: Cluster, limit_s: float = math.inf, *, patience: float = 1.0
) -> float | None:
    """Return the seconds per minibatch in steady state, infinite above the limit; None where the simulation would take
    too long, or the placement cannot be executed.

    Args:
        patience: how many times as long as usual the simulation may take.
    """
    if is_too_large(placement, patience):
        return None
    try:
        return simulated_time_s(SimulationJob.of(placement, profile, cluster), limit_s)
    except ScheduleError:
        return None


def is_too_large(placement: Placement, patience: float = 1.0) -> bool:
    """Whether a simulation would take too long."""
    return action_count(placement) * placement.used_workers > _MAX_ACTIONS_TIMES_WORKERS * patience
