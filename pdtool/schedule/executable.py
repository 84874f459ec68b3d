"""Whether a schedule can be executed to its end, with the numbers of minibatches in flight that a plan gives."""

from __future__ import annotations

from pdtool.errors import ScheduleError
from pdtool.schedule.builders import build
from pdtool.schedule.shape import PipelineShape, default_shape, total_in_flight
from pdtool.schedule.validate import validate


def check_executable(schedule: str, shape: PipelineShape, microbatches: int = 1) -> None:
    """Build the action lists for filling, steady state and draining, and validate them.

    Raises:
        ScheduleError: the schedule deadlocks or breaks a bound; the text says which numbers in flight would not.
    """
    replicas = shape.replicas[: shape.pipeline_depth]
    minibatches = 2 * max(*shape.update_every, total_in_flight(replicas, shape.in_flight)) + 1
    try:
        validate(build(schedule, shape, minibatches), shape, minibatches)
    except ScheduleError as error:
        default = default_shape(schedule, replicas, microbatches, shape.chunks)
        wanted = ", ".join(map(str, default.in_flight))
        raise ScheduleError(error.what, f"give the stages in_flight {wanted}, as {schedule} wants") from error
