"""Schedules: what each worker does, in which order, as plain data; other folders import all of it from here.

A schedule is one list of actions per worker, stage by stage, replica by replica: a "2-1" plan has three lists.

    p: number of stages        r[s]: replicas of stage s      n: number of minibatches
    w[s]: minibatches in flight at one replica of stage s     k: minibatches in one update of a stage
    v: chunks a worker (interleaved only; then p counts workers, and there are p v stages)

Minibatch i is computed at stage s by replica i mod r[s] (round-robin; PipeDream, SOSP'19, section 3.2).
"""

from __future__ import annotations

from pdtool.schedule.action import Action, ActionKind, Actions, grid
from pdtool.schedule.execution import check_executable, draw, gradient_delays, timeline, validate
from pdtool.schedule.kinds import (
    POLICIES,
    SCHEDULES,
    SEARCHED_SCHEDULES,
    build,
    default_in_flight,
    default_shape,
    is_asynchronous,
    pipeline_shape,
)
from pdtool.schedule.policies import ForwardVersions, StashTracker, forward_versions
from pdtool.schedule.shape import PipelineShape, steady_minibatches, steady_run, tied_update_lag, total_in_flight
from pdtool.schedule.strategies import RIVALS, STRATEGIES, Strategy

__all__ = [
    "POLICIES",
    "RIVALS",
    "SCHEDULES",
    "SEARCHED_SCHEDULES",
    "STRATEGIES",
    "Action",
    "ActionKind",
    "Actions",
    "ForwardVersions",
    "PipelineShape",
    "StashTracker",
    "Strategy",
    "build",
    "check_executable",
    "default_in_flight",
    "default_shape",
    "draw",
    "forward_versions",
    "gradient_delays",
    "grid",
    "is_asynchronous",
    "pipeline_shape",
    "steady_minibatches",
    "steady_run",
    "tied_update_lag",
    "timeline",
    "total_in_flight",
    "validate",
]
