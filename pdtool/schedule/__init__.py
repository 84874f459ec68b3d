"""Schedules: what each worker does, in which order, as plain data.

A schedule is one list of actions per worker. Workers are listed stage by stage, replica by replica, so a
"2-1" plan has three lists. The simulator and the worker execute the same lists.

    p: number of stages        r[s]: replicas of stage s      n: number of minibatches
    w[s]: minibatches in flight at one replica of stage s     k: minibatches in one update of a stage
    v: chunks a worker (interleaved only; then p counts workers, and there are p v stages)

Minibatch i is computed at stage s by replica i mod r[s] (round-robin; PipeDream, SOSP'19, section 3.2).
"""

from __future__ import annotations

from pdtool.schedule.action import Action, Actions, Kind
from pdtool.schedule.build import NAMES, SCHEDULES, build
from pdtool.schedule.delays import delays_of
from pdtool.schedule.draw import draw
from pdtool.schedule.grid import grid
from pdtool.schedule.held import Held
from pdtool.schedule.shape import Shape, all_in_flight, default_in_flight, lag_of, usual_shape
from pdtool.schedule.timeline import timeline
from pdtool.schedule.validate import validate
from pdtool.schedule.versions import POLICIES, Reads, flows, reads

__all__ = [
    "NAMES",
    "POLICIES",
    "SCHEDULES",
    "Action",
    "Actions",
    "Held",
    "Kind",
    "Reads",
    "Shape",
    "all_in_flight",
    "build",
    "default_in_flight",
    "delays_of",
    "draw",
    "flows",
    "grid",
    "lag_of",
    "reads",
    "timeline",
    "usual_shape",
    "validate",
]
