"""Schedules: what each worker does, in which order, as plain data. Other folders import everything from here.

A schedule is one list of actions per worker, stage by stage, replica by replica: a "2-1" plan has three lists.

    p: number of stages        r[s]: replicas of stage s      n: number of minibatches
    w[s]: minibatches in flight at one replica of stage s     k: minibatches in one update of a stage
    v: chunks a worker (of a chunked schedule; then p counts workers, and there are p v stages)

Minibatch i is computed at stage s by replica i mod r[s] (round-robin; PipeDream, SOSP'19, section 3.2).
"""

from __future__ import annotations

from pdtool.schedule.action import Action, ActionKind, Actions, grid
from pdtool.schedule.execution import StashTracker, check_executable, draw, gradient_delays, timeline
from pdtool.schedule.execution_config import DEFAULT_MICROBATCHES, ExecutionConfig
from pdtool.schedule.kinds import ONE_F_ONE_B, SCHEDULES, ScheduleKind, WorkerActions, schedule_names
from pdtool.schedule.policies import WEIGHT_POLICIES, ForwardVersions, ceil_div
from pdtool.schedule.shape import PipelineShape, steady_minibatches, steady_run, tied_update_lag
from pdtool.schedule.strategies import BASELINES, RIVALS, STRATEGIES, Strategy
