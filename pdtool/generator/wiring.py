"""Assign operators, parameters and buffers to stages, and tensors to the stages that take them."""

from __future__ import annotations

import keyword
import re
from collections.abc import Container, Sequence
from dataclasses import dataclass
from functools import cached_property

from pdtool.artifacts.bundle import TensorSpec, TiedParameter
from pdtool.errors import ArtifactError, TraceError
from pdtool.frontend.operators import OWN_NODES, Operator, Size, Traced, Value, unique_name, values_in

_Shape = tuple[int | str | None, ...]  # as in bundle.yaml; None: a dimension that is not linear in the minibatch size
_RESERVED = {"self", "torch", "nn", "F", "batch", "device", "target", "loss", "seed_operator", *keyword.kwlist}
_AFFINE = re.compile(r"([0-9]+\*)?batch([+-][0-9]+)?")


@dataclass(frozen=True)
class Wiring:
    """A traced model cut into stages.

    Attributes:
        traced: the model.
        stages: names of the operators of each stage, without constants and model inputs.
    """

    traced: Traced
    stages: Sequence[Sequence[str]]

    @classmethod
    def of(cls, traced: Traced, stages: Sequence[Sequence[str]]) -> Wiring:
        """Cut the model into `stages`, which may also name inputs, loss and target.

        Raises:
            ArtifactError: the stages do not hold the operators of this model.
        """
        in_model = {op.name for op in traced.operators if not op.constant}
        in_stages = {n for stage in stages for n in stage if n in in_model or not OWN_NODES.fullmatch(n)}
        if in_model != in_stages:
            unmatched = sorted(in_model ^ in_stages)[:3]
            what = f"the model's operators differ from the profile's (such as {', '.join(unmatched)})"
            raise ArtifactError("plan", what, "profile the model again, with this version of torch")
        compute = {op.name for op in traced.operators if not op.is_input}
        return cls(traced, [[name for name in stage if name in compute] for stage in stages])

    def check_outputs(self) -> None:
        """Check that a later stage uses some output of every computing stage but the last.

        Raises:
            ArtifactError: none uses a stage's outputs; it would only write buffers and get no gradient.
        """
        for stage, names in enumerate(self.stages[:-1]):
            if names and not self.outputs(stage):
                operators = [self.traced.by_name[name] for name in names]
                where = next((f"{op.location}: " for op in operators if op.location), "")
                what = f"{where}no later stage uses an output of stage {stage} ({', '.join(names[:3])})"
                raise ArtifactError("plan", what, "move its operators into another stage, or partition again")

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """Operator -> stage; -1 for a model input."""
        inputs = {op.name: -1 for op in self.traced.operators if op.is_input}
        return inputs | {name: s for s, names in enumerate(self.stages) for name in names}

    def operators(self, stage: int) -> list[Operator]:
        """Return the operators of a stage in order, with the constants that it needs among them."""
        needed = set(self.stages[stage])
        if stage == len(self.stages) - 1:
            needed |= {v.operator for v in self.output_values if self.traced.by_name[v.operator].constant}
        for op in reversed(self.traced.operators):
            if op.name in needed:
                needed |= {v.operator for v in op.values if self.traced.by_name[v.operator].constant}
        return [op for op in self.traced.operators if op.name in needed]

    @cached_property
    def output_values(self) -> list[Value]:
        """The tensors that the model returns."""
        return values_in(self.traced.output)

    @property
    def has_optional_gradients(self) -> bool:
        """Whether a tensor may get no gradient in some minibatch.

        The loss may ignore one of several outputs, and so everything that only that output needs. User code that pdtool
        does not look into may ignore an input, and so may one of the two modes of an operator.
        """
        later = {name for names in self.stages[1:] for name in names}
        may_ignore = any(op.opaque or op.function or op.branch for op in self.traced.operators if op.name in later)
        outputs = sum(value.differentiable for value in self.output_values) + len(self.traced.output_state)
        return may_ignore or outputs > 1

    @cached_property
    def consumers(self) -> dict[Value, list[int]]:
        """Tensor -> the later stages that take it; the last stage takes the model's outputs. Unused model inputs are
        included."""
        users: dict[Value, set[int]] = {}
        for stage in range(len(self.stages)):
            for op in self.operators(stage):
                for value in op.values:
                    users.setdefault(value, set()).add(stage)
        for value in self.output_values:
            users.setdefault(value, set()).add(len(self.stages) - 1)
        order = [v for op in self.traced.operators if not op.constant for v in op.outputs if v in users or op.is_input]
        return {v: sorted(users.get(v, set()) - {self.stage_of[v.operator]}) for v in order}

    def inputs(self, stage: int) -> list[Value]:
        """Return the tensors that the stage's forward takes, in the order of its arguments."""
        return [value for value, stages in self.consumers.items() if stage in stages]

    def outputs(self, stage: int) -> list[Value]:
        """Return the tensors that the stage's forward returns, in order; none for the last stage, which returns the
        model's output."""
        return [value for value, stages in self.consumers.items() if stages and self.stage_of[value.operator] == stage]

    @cached_property
    def names(self) -> dict[Value, str]:
        """Tensor -> a Python identifier of its own."""
        taken = set(_RESERVED)
        names = {}
        for op in self.traced.operators:
            inner = [value for part in op.parts for value in part.outputs] if op.branch else []
            for value in (*op.outputs, *inner):
                base = re.sub(r"\W", "_", value.operator).replace("__or__", "or_").replace("__and__", "and_")
                base = f"m{base}" if base[0].isdigit() else base
                names[value] = unique_name(f"{base}_{value.index}" if value.index else base, taken, first=2)
        return names

    def parameters(self, stage: int) -> list[str]:
        """Return the names of the parameters that the stage uses, tied ones under each of their names."""
        return self._state(stage, [name for op in self.operators(stage) for name in op.parameters], self.traced.tied)

    def buffers(self, stage: int) -> list[str]:
        """Return the names of the buffers that the stage uses."""
        names = dict(self.traced.model.named_buffers(remove_duplicate=False))
        return self._state(stage, [name for op in self.operators(stage) for name in op.buffers], names)

    def _state(self, stage: int, used: list[str], kind: Container[str]) -> list[str]:
        """The state of this kind that the stage's operators use, each once, or that the last stage returns."""
        returned = [name for name in self.traced.output_state if name in kind] if stage == len(self.stages) - 1 else []
        return list(dict.fromkeys([*used, *returned]))

    @cached_property
    def tied(self) -> list[TiedParameter]:
        """Trainable parameters that several stages hold, each under its own name there."""
        holders: dict[str, dict[int, str]] = {first: {} for first in self.traced.tied.values()}
        for stage in range(len(self.stages)):
            for name in self.parameters(stage):
                holders[self.traced.tied[name]].setdefault(stage, name)
        return [
            TiedParameter(stages=tuple(names), names=tuple(names.values()))
            for first, names in holders.items()
            if len(names) > 1 and self.traced.model.get_parameter(first).requires_grad
        ]

    def tensors(self) -> list[TensorSpec]:
        """Return the tensors between stages or from the data, for bundle.yaml."""
        return [
            TensorSpec(
                name=self.names[value],
                producer=self.stage_of[value.operator],
                consumers=tuple(stages),
                shape=tuple(self._dim(dim, value) for dim in value.shape),
                dtype=str(value.dtype).removeprefix("torch."),
                gradient=value in self.traced.with_gradient,
                detached=value.differentiable and value not in self.traced.with_gradient,
            )
            for value, stages in self.consumers.items()
            if stages or self.stage_of[value.operator] < 0
        ]

    def opaque_outputs(self) -> dict[str, tuple[tuple[_Shape, ...], ...]]:
        """Return, for each call of an opaque module, the shapes of the tensors that it returns."""
        shapes: dict[str, tuple[tuple[_Shape, ...], ...]] = {}
        for call in (part for op in self.traced.operators for part in op.parts if part.opaque):
            of_call = tuple(tuple(map(_known_dim, value.shape)) for value in call.outputs)
            shapes[call.module] = (*shapes.get(call.module, ()), of_call)
        return shapes

    def _dim(self, dim: int | Size, value: Value) -> int | str:
        known = _known_dim(dim)
        if known is not None:
            return known
        raise TraceError(
            f"a tensor that crosses a stage border has a dimension of {dim}, which is not linear in the minibatch size",
            "in HINTS no_split, name a module that contains the operators that compute and use this tensor",
            location=self.traced.by_name[value.operator].location,
        )


def _known_dim(dim: int | Size) -> int | str | None:
    """Return a dimension as bundle.yaml has it; None if it is not linear in the minibatch size."""
    text = str(dim).replace(" ", "")
    if isinstance(dim, int):
        return dim
    return text if _AFFINE.fullmatch(text) else None
