"""How late the gradients of each stage are."""

from __future__ import annotations

from pdtool.schedule.build import build
from pdtool.schedule.shape import PipelineShape, total_in_flight
from pdtool.schedule.stash_tracker import StashTracker
from pdtool.schedule.versions import forward_versions


def gradient_delays(schedule: str, shape: PipelineShape) -> list[int]:
    """For each stage, the most updates between the weights that a forward reads and the same minibatch's backward."""
    enough = 2 * max(*shape.update_every, total_in_flight(shape.replicas[: shape.pipeline_depth], shape.in_flight)) + 1
    lists = build(schedule, shape, enough)
    found = [0] * len(shape.replicas)
    for own, actions, (stage, _) in zip(
        forward_versions(lists, shape.weights), lists, shape.stage_replicas(), strict=True
    ):
        held = StashTracker(own)
        for action in actions:
            held.apply(action)
        for s in shape.stages_on_same_workers(stage):
            found[s] = max(found[s], held.delay)
    return found
