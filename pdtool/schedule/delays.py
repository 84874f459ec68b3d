"""How late the gradients of each stage are."""

from __future__ import annotations

from pdtool.schedule.build import build
from pdtool.schedule.held import Held
from pdtool.schedule.shape import Shape, all_in_flight
from pdtool.schedule.versions import reads


def delays_of(schedule: str, shape: Shape) -> list[int]:
    """For each stage, the most updates between the weights that a forward reads and the same minibatch's backward."""
    enough = 2 * max(*shape.update_every, all_in_flight(shape.replicas[: shape.places], shape.in_flight)) + 1
    lists = build(schedule, shape, enough)
    found = [0] * len(shape.replicas)
    for own, actions, (stage, _) in zip(reads(lists, shape.weights), lists, shape.slots(), strict=True):
        held = Held(own)
        for action in actions:
            held.take(action)
        for s in shape.stages_at(stage):
            found[s] = max(found[s], held.delay)
    return found
