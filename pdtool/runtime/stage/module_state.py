"""The part of a checkpoint that a stage's module has: its parameters and persistent buffers, by their names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from pdtool.artifacts.bundle import Bundle
from pdtool.errors import FieldError
from pdtool.runtime.stage.averaging import without_repetition
from pdtool.runtime.stage.component import MODEL_KEY
from pdtool.runtime.stage.pipeline_stage import PipelineStage


class ModuleState:
    """The parameters and persistent buffers of a stage.

    It also writes what no stage reads: second names of the stage's parameters and buffers and, at the first stage, what
    no operator uses.

    Args:
        model_state: the whole model's.
        first_names: name of a parameter or buffer -> its first name in the model.
    """

    key = MODEL_KEY

    def __init__(
        self,
        stage: PipelineStage,
        bundle: Bundle,
        number: int,
        model_state: Mapping[str, Tensor],
        first_names: Mapping[str, str],
    ) -> None:
        self._stage = stage
        self.names: Sequence[str] = [name for name in stage.module.state_dict() if name in model_state]
        name_here = {first_names.get(name, name): name for name in self.names}
        held = stage.weights.by_name | dict(stage.module.named_buffers(remove_duplicate=False))
        used = {name for described in bundle.stages for name in (*described.parameters, *described.buffers)}
        used_first = {first_names.get(name, name) for name in used}
        self._unread: dict[str, Tensor] = {}
        for name in model_state.keys() - used:
            first_name = first_names.get(name, name)
            if first_name in name_here:
                self._unread[name] = held[name_here[first_name]]
            elif number == 0 and first_name not in used_first:
                self._unread[name] = model_state[name].detach()

    def state_dict(self) -> Iterator[tuple[str, str, Tensor]]:
        """Yield the newest values, by name."""
        state = self._stage.module.state_dict()
        for name in self.names:
            yield name, "", state[name]
        for name, value in self._unread.items():
            yield name, "", value

    def load_state_dict(self, state: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write the values into the newest parameters and buffers; raises FieldError where one has another shape."""
        self._stage.weights.bind_newest()
        current = self._stage.module.state_dict() | self._stage.weights.by_name
        for name in self.names:
            value, shape = state[name].get(""), list(current[name].shape)
            if value is None or list(value.shape) != shape:
                described = "none" if value is None else f"one of shape {list(value.shape)}"
                raise FieldError(f"{name} of shape {shape}", described)
            with torch.no_grad():
                without_repetition(current[name]).copy_(without_repetition(value, current[name]))
