"""Model of a worker, with the values of its own stages, and the stage modules that take their tensors from it.

`WorkerModel` builds the model without the values of other stages if it can. `load_stage_module` loads a stage file with
the parameters and buffers of the model. `equalize_weights` gives all copies of a parameter equal initial values: in the
replicas of a stage, and in stages that share it.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.plan import Plan
from pdtool.errors import ArtifactError, ModelError, PdtoolError, StaleError, TraceError, describe_error
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import tensors_in
from pdtool.frontend.model_rules import LEAVE_THE_MODE, WRITE_INTO_IT, has_values_of
from pdtool.frontend.operators import empty_in_same_place, first_names, named_state, registered_state
from pdtool.frontend.user_modules import import_file, user_modules_importable
from pdtool.runtime.groups import PeerErrorContext, ProcessGroups, all_gather
from pdtool.runtime.worker.partial_build import build_partially

_SMALL_BYTES = 4e9


@dataclass(frozen=True)
class WorkerModel:
    """A model with the values of some stages.

    Attributes:
        file, seed: the file and seed that it was built from.
        model: its tensors have the values of the whole model, or are on the meta device if no stage of this worker
            uses them.
        outline: the same model with all parameters on the meta device; None if the model was built as a whole.
        why_whole: why it was, although this worker does not have all stages; "" otherwise.
    """

    file: ModelFile
    seed: int
    model: nn.Module
    outline: nn.Module | None = None
    why_whole: str = ""

    @cached_property
    def first_names(self) -> dict[str, str]:
        """Name of a parameter or buffer -> its first name in the model, under which optimizer state is saved."""
        return first_names(registered_state(self.model))

    @classmethod
    def build(
        cls, file: ModelFile, seed: int, bundle: Bundle, stages: Collection[int], *, as_a_whole: bool = False
    ) -> WorkerModel:
        """Build the model for a worker that has `stages`; as a whole if that is asked for, or if it needs all values.

        Raises:
            ModelError: the user's function fails, or returns parameters of an earlier call.
        """
        why_whole = ""
        if len(stages) < len(bundle.stages) and not as_a_whole:
            try:
                outline, model = build_partially(
                    lambda: file.build(seed), lambda built: _stage_tensors(built, bundle, stages)
                )
                return cls(file, seed, model, outline)
            except Exception as error:  # the user's code may also fail because values are missing
                why_whole = str(error) if isinstance(error, PdtoolError) else describe_error(error)
        model = file.build(seed)
        if why_whole and any(parameter.is_meta for parameter in model.parameters()):
            what = f"{file.ref.function}() returns parameters that it made in an earlier call"
            raise file.error(what, "make a new model in each call")
        return cls(file, seed, model, why_whole=why_whole)

    def check(self, check: Callable[[nn.Module], None]) -> None:
        """Let `check` trace the model, first without the values of parameters; if that fails, with them.

        Raises:
            StaleError, TraceError: from `check` of the whole model.
        """
        if self.outline is None:
            check(self.model)
            return
        try:
            check(_allocated(self.outline))
        except (StaleError, TraceError):  # perhaps because values are missing: tracing calls opaque modules
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


def is_small(plan: Plan) -> bool:
    """Return whether each worker may simply build the whole model, which is faster and calls model() only once."""
    return plan.predicted is not None and sum(plan.memory_needed) < _SMALL_BYTES


def _stage_tensors(model: nn.Module, bundle: Bundle, stages: Collection[int]) -> list[Tensor]:
    """The tensors of a model that some stages use; for the first stage also the saved ones that no stage uses."""
    state = named_state(model)
    names = [name for s in stages for name in (*bundle.stages[s].parameters, *bundle.stages[s].buffers)]
    tensors = [state[name] for name in names if name in state]  # load_stage_module reports a missing one
    if 0 in stages:
        used = {id(state.get(name)) for stage in bundle.stages for name in (*stage.parameters, *stage.buffers)}
        tensors += [tensor for tensor in model.state_dict(keep_vars=True).values() if id(tensor) not in used]
    for path in (path for s in stages for path in bundle.stages[s].opaque):
        for inner in model.get_submodule(path).modules():  # what it holds in lists and dicts as well
            tensors += tensors_in(dict(vars(inner)))
    return tensors


def _allocated(model: nn.Module) -> nn.Module:
    """Give meta tensors memory, which the system provides only when it is written."""
    allocated: dict[int, Tensor] = {}
    storages: dict[int, torch.UntypedStorage] = {}

    def allocate(tensor: Tensor) -> Tensor:
        if id(tensor) not in allocated:
            memory = empty_in_same_place(tensor, storages, torch.device("cpu"))
            is_parameter = isinstance(tensor, nn.Parameter)
            allocated[id(tensor)] = nn.Parameter(memory, tensor.requires_grad) if is_parameter else memory
        return allocated[id(tensor)]

    for module in model.modules():
        held: dict[str, Any] = {**vars(module), **module._parameters, **module._buffers}
        for name, value in held.items():
            if isinstance(value, Tensor) and value.is_meta:
                setattr(module, name, allocate(value))
    return model


def load_stage_module(
    bundle: Bundle, folder: Path, stage: int, model: nn.Module, named: Path | None = None
) -> nn.Module:
    """Import the stage's class and give it the parameters and buffers of `model`, by name, without copying them.

    Args:
        named: the user's name for `folder`, for errors.

    Raises:
        StaleError: a file differs from what codegen wrote.
        ArtifactError: it cannot be imported, or the parameters of the stage are not the model's.
    """
    bundle.check_files(folder)
    described = bundle.stages[stage]
    path = (named or folder) / described.file
    try:
        with user_modules_importable():
            code = import_file(f"pdtool_stage_{stage}", folder / described.file)
        kind = getattr(code, described.class_name)
        with torch.device("meta"):  # its values are those of the model
            module: nn.Module = kind(model) if described.opaque else kind()
    except Exception as error:
        what = f"cannot be used ({describe_error(error)})"
        raise ArtifactError(path, what, "fix it, or write it again with `pdtool codegen`") from error
    _take_over(module, named_state(model), path)
    for opaque in described.opaque:
        inner = module.get_submodule(opaque)
        if not isinstance(inner, torch.jit.ScriptModule):  # which takes no hooks
            inner.register_forward_hook(partial(_check_outputs, bundle, opaque))
    return module.train()


class ModelTensors:
    """The parameters and buffers of the user's model, through which the user's functions may read and change them.

    Those of this worker's stages are the stages' own tensors, so a change in place is a change of the stage. A tensor
    or a module that takes the place of one would be lost. Its modules are in the mode of the phase, as in a plain loop,
    but for those of a module with a train() of its own. User code that changes the mode of one would not change that of
    its stage.

    Args:
        stages: the worker's stage modules, by number, when they have just been loaded; they then move to `device`.
    """

    def __init__(
        self, built: WorkerModel, bundle: Bundle, stages: Mapping[int, nn.Module], device: torch.device
    ) -> None:
        self._file, model = built.file, built.model
        opaque = {
            id(m) for s in stages for path in bundle.stages[s].opaque for m in model.get_submodule(path).modules()
        }
        own, moved = set[int](), dict[str, Tensor]()
        for stage in stages.values():
            own |= {*map(id, named_state(stage).values())}
            moved |= named_state(stage.to(device))
        self._places: list[tuple[str, dict[str, Any], str, Tensor | nn.Module]] = []
        self._in_mode = [*_following_mode(model, opaque)]
        for path, owner in model.named_modules():
            if id(owner) in opaque or isinstance(owner, torch.jit.ScriptModule):
                continue
            for held in (owner._parameters, owner._buffers, owner._modules, vars(owner)):
                for key, value in held.items():
                    name, is_own = f"{path}.{key}".removeprefix("."), id(value) in own
                    if is_own:
                        held[key] = value = moved.get(name, value)
                    if is_own or (held is not vars(owner) and value is not None):
                        self._places.append((name, held, key, value))

        self.set_mode(True)

    def set_mode(self, training: bool) -> None:
        """Put the model into training or evaluation mode, as a phase begins."""
        self._is_training = training
        for _, module in self._in_mode:
            module.training = training

    def check_mode(self) -> None:
        """Check, as a phase ends, that no module is in another mode; raises ModelError."""
        for path, module in self._in_mode:
            if module.training != self._is_training:
                phase, now = ("training", "evaluation") if self._is_training else ("a validation", "training")
                what = f"{path or 'the model'} was put into {now} mode during {phase}, but stages keep their modes"
                raise self._file.error(what, LEAVE_THE_MODE)

    def check(self) -> None:
        """Check that each is in its place, or one with the same values, which it then replaces; raises ModelError."""
        for name, held, key, value in self._places:
            other = held.get(key)
            if other is value:
                continue
            if not (isinstance(other, Tensor) and isinstance(value, Tensor) and has_values_of(other, value)):
                kind = "module" if isinstance(value, nn.Module) else "tensor"
                is_there = f"another {kind} is in the place of {name} in the model now"
                what = f"{name} is no longer in the model" if other is None else is_there
                raise self._file.error(f"{what}, but its stage keeps the {kind} that it had", WRITE_INTO_IT)
            held[key] = value


def _following_mode(module: nn.Module, opaque: Collection[int], path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield (path, module) of the modules whose mode is that of the model: those in no opaque module, and in none with
    a train() of its own."""
    has_own = "train" in vars(module) or type(module).train is not nn.Module.train
    if not (has_own or id(module) in opaque or isinstance(module, torch.jit.ScriptModule)):
        yield path, module
        for name, child in module.named_children():
            yield from _following_mode(child, opaque, f"{path}.{name}".removeprefix("."))


def _check_outputs(bundle: Bundle, path: str, module: nn.Module, args: object, output: Any) -> None:
    """Hook of an opaque module: refuse sizes that differ from the trace's, which the stage may have as constants.
    Raises ModelError."""
    shapes = [tuple(tensor.shape) for tensor in tensors_in(output)]
    if not bundle.fits_opaque(path, shapes):
        traced = ", ".join(str([*shape]).replace("'", "") for shape in bundle.opaque_outputs[path][0])
        raise ModelError(
            f"{path} returns {', '.join(str([*shape]) for shape in shapes)}, but in the trace it returned {traced}, "
            "and these sizes are constants in the stage files",
            "let it return the same sizes for all samples, or move what uses its output into it",
        )


def _take_over(module: nn.Module, state: Mapping[str, Tensor], path: Path) -> None:
    """Replace parameters and buffers of `module` by those of the same name in `state`, so that what is tied stays tied.

    A tensor that is a mere attribute of the model is a buffer of its stage.
    """
    for prefix, owner in module.named_modules():
        for key, value in [*owner._parameters.items(), *owner._buffers.items()]:
            name = f"{prefix}.{key}" if prefix else key
            original = state.get(name)
            if value is None and original is None:
                continue
            if _description(value) != _description(original):
                what = f"its {name} is {_description(value)}, but the model's is {_description(original)}"
                raise ArtifactError(path, what, "run `pdtool codegen` again")
            setattr(owner, key, original)  # nn.LSTM makes its list of weights here


def _description(value: Tensor | None) -> str:
    """`float32[4, 16]`, or `missing`."""
    return "missing" if value is None else f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"


def equalize_weights(built: WorkerModel, bundle: Bundle, stages: Iterable[int], groups: ProcessGroups) -> list[str]:
    """Give parameters and buffers that differ between copies the values of the first worker that holds them; raises
    PeerError.

    The seeds of torch, numpy and Python make copies equal, unless model() draws from another source. Workers compare
    digests, so that only different values travel. All workers call it together, before any forward, which may change
    weights.

    Args:
        built: in CPU memory.
        stages: this worker's stages.

    Returns:
        On every worker, the names of all tensors that differed anywhere.
    """
    state, first_names = named_state(built.model), built.first_names
    names_of = [{first_names.get(n, n): n for n in (*stage.parameters, *stage.buffers)} for stage in bundle.stages]
    is_shared = max(Counter(chain(*names_of)).values(), default=0) > 1
    if not is_shared and all(len(group.ranks) == 1 for group in groups.replicas):  # nothing has a copy
        return []
    own = {first: state[name] for s in stages for first, name in names_of[s].items() if name in state}
    listed = {name: _digest(tensor) for name, tensor in own.items()}
    digests = all_gather(listed, dict[str, str], groups.world, "the digests of the initial weights")
    different = []
    for name in dict.fromkeys(name for held in digests for name in held):
        holders = [rank for rank, held in enumerate(digests) if name in held]
        if len({digests[rank][name] for rank in holders}) > 1:
            different.append(name)
            _broadcast(own.get(name), state[name], holders[0], groups.world)
    return different


def _digest(tensor: Tensor) -> str:
    content = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return hashlib.sha256(content.view(torch.uint8).numpy().data).hexdigest()


def _broadcast(own: Tensor | None, described: Tensor, source: int, world: Any) -> None:
    """Give a worker's own tensor the values at rank `source`; workers without it drop them.

    Args:
        described: a tensor of its shape and dtype, maybe on the meta device.
    """
    values = torch.empty(described.shape, dtype=described.dtype) if own is None else own.detach().cpu().contiguous()
    with PeerErrorContext(f"the initial weights did not arrive from rank {source}", source):
        dist.broadcast(values, source, group=world)
    if own is not None:
        with torch.no_grad():
            own.copy_(values)
