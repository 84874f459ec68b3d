"""The model as one worker builds it: with the values of its own stages, where they can be had without all others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.errors import PdtoolError, StaleError, TraceError, describe_error
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.operators import named_state
from pdtool.run.startup.partial_build import build_partially

_SMALL_BYTES = 4e9  # of the memory of all stages together


def is_small(plan: Plan) -> bool:
    """Return whether each worker can as well build the whole model: sooner, and model() is called only once."""
    return plan.predicted is not None and sum(plan.predicted.memory_bytes) < _SMALL_BYTES


@dataclass(frozen=True)
class WorkerModel:
    """A model with the values of some stages.

    Attributes:
        file, seed: what it was built of.
        model: its tensors have the values of the whole model, or are on the meta device if no stage of this worker
            uses them.
        outline: the same model with all parameters on the meta device; None where the model was built as a whole.
        why_whole: why it was, although this worker has not all stages; "" otherwise.
    """

    file: ModelFile
    seed: int
    model: nn.Module
    outline: nn.Module | None = None
    why_whole: str = ""

    @classmethod
    def build(
        cls, file: ModelFile, seed: int, bundle: Bundle, stages: Collection[int], *, as_a_whole: bool = False
    ) -> WorkerModel:
        """Build the model for a worker that has `stages`; as a whole where that is asked for, or it needs all values.

        Raises:
            ModelError: the user's function fails, or returns what it made before.
        """
        why_whole = ""
        if len(stages) < len(bundle.stages) and not as_a_whole:
            try:
                outline, model = build_partially(
                    lambda: file.build(seed), lambda built: _stage_tensors(built, bundle, stages)
                )
                return cls(file, seed, model, outline)
            except Exception as error:  # of the user's code as well, which may fail for lack of values
                why_whole = str(error) if isinstance(error, PdtoolError) else describe_error(error)
        model = file.build(seed)
        if why_whole and any(parameter.is_meta for parameter in model.parameters()):
            what = f"{file.ref.function}() returns parameters that it made when it was called before"
            raise file.error(what, "let it make a new model each time it is called")
        return cls(file, seed, model, why_whole=why_whole)

    def check(self, check: Callable[[nn.Module], None]) -> None:
        """Let `check` trace the model; without the values of parameters, as long as it finds nothing wrong.

        Raises:
            StaleError, TraceError: what `check` raises of the whole model.
        """
        if self.outline is None:
            check(self.model)
            return
        try:
            check(_allocated(self.outline))
        except (StaleError, TraceError):  # perhaps for lack of values: to trace an opaque module it is called
            check(self.file.build(self.seed))

    def optimizer_parameters(self) -> dict[str, nn.Parameter]:
        """Return all parameters by name, as optimizer() takes them: those on the meta device as fake CPU tensors.

        A fake tensor takes no memory, and an optimizer that reads its values fails.
        """
        mode = FakeTensorMode(allow_non_fake_inputs=True)

        def fake(parameter: nn.Parameter) -> nn.Parameter:
            with mode:
                values = torch.empty_like(parameter, device="cpu")
            return nn.Parameter(values, parameter.requires_grad)

        return {name: fake(p) if p.is_meta else p for name, p in self.model.named_parameters()}


def _stage_tensors(model: nn.Module, bundle: Bundle, stages: Collection[int]) -> list[Tensor]:
    """The tensors of a model that some stages use; for the first stage also the saved ones that no stage uses."""
    state = named_state(model)
    names = [name for s in stages for name in (*bundle.stages[s].parameters, *bundle.stages[s].buffers)]
    tensors = [state[name] for name in names if name in state]  # one that is missing is found by load_stage_module
    if 0 in stages:
        used = {id(state.get(name)) for stage in bundle.stages for name in (*stage.parameters, *stage.buffers)}
        tensors += [tensor for tensor in model.state_dict(keep_vars=True).values() if id(tensor) not in used]
    for path in (path for s in stages for path in bundle.stages[s].opaque):
        tensors += _tensors_inside(model.get_submodule(path))
    return tensors


def _tensors_inside(module: nn.Module) -> Iterator[Tensor]:
    """All tensors that a module and those in it hold, in lists and dicts as well."""
    for inner in module.modules():
        yield from (leaf for leaf in pytree.tree_leaves(dict(vars(inner))) if isinstance(leaf, Tensor))


def _allocated(model: nn.Module) -> nn.Module:
    """Give the tensors on the meta device memory, which the system provides only once something is written there."""
    allocated: dict[int, Tensor] = {}

    def allocate(tensor: Tensor) -> Tensor:
        if id(tensor) not in allocated:
            memory = torch.empty_like(tensor, device="cpu")
            is_parameter = isinstance(tensor, nn.Parameter)
            allocated[id(tensor)] = nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
        return allocated[id(tensor)]

    for module in model.modules():
        held: dict[str, Any] = {**vars(module), **module._parameters, **module._buffers}
        for name, value in held.items():
            if isinstance(value, Tensor) and value.is_meta:
                setattr(module, name, allocate(value))
    return model
