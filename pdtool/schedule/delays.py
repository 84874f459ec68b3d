"""How late the gradients of each stage are, in updates."""

from __future__ import annotations

from pdtool.schedule.builders import build
from pdtool.schedule.shape import PipelineShape
from pdtool.schedule.stash_tracker import StashTracker
from pdtool.schedule.versions import forward_versions


def gradient_delays(schedule: str, shape: PipelineShape) -> list[int]:
    """Return for each stage the most updates between a forward's weights and the same minibatch's backward."""
    lists = build(schedule, shape, shape.representative_minibatches)
    versions = forward_versions(lists, shape.weights)
    delays = [0] * len(shape.replicas)
    for worker_versions, actions, (stage, _) in zip(versions, lists, shape.stage_replicas(), strict=True):
        tracker = StashTracker(worker_versions)
        for action in actions:
            tracker.apply(action)
        for s in shape.stages_on_same_workers(stage):
            delays[s] = max(delays[s], tracker.delay)
    return delays
