"""The rules of model.py: its functions, its constants, and which optimizers and losses a pipeline can use.

`HINTS` says which modules stay together, belong to a certain stage, or are opaque. The constants of training are
`MAX_GRAD_NORM`, `SCHEDULER_STEP` and `DROP_LAST`. An optimizer, loss or state_dict that a pipeline cannot use is
refused.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.autograd.graph import Node
from torch.optim import Optimizer, SparseAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils._python_dispatch import _disable_current_modes

from pdtool.artifacts.fields import MAX_WORKERS
from pdtool.errors import FieldError, ModelError, TraceError, suggestion
from pdtool.frontend.model_io import named_leaves, tensors_of
from pdtool.frontend.operators import registered_state
from pdtool.frontend.user_code import NO_CLOSURE
from pdtool.units import counted

WRITE_INTO_IT = "write the new values into that one, as in `buffer.copy_(values)`"  # a remedy
LEAVE_THE_MODE = "leave the modes as they are; to freeze a module, override its train() or call its eval() in model()"
DATA_FUNCTIONS = {"example_inputs": ("batch_size",), "dataset": ("split",)}
# Functions that take settings, and the arguments that pdtool passes them by position.
OWN_ARGUMENTS = {
    **DATA_FUNCTIONS,
    "collate": ("samples",),
    "sampler": ("dataset", "epoch"),
    "loss": ("output", "target"),
    "optimizer": ("named_parameters",),
    "scheduler": ("optimizer",),
    "metrics": ("output", "target"),
    "summarize_metrics": ("totals",),
    "after_update": ("named_parameters", "update"),
}


@dataclass(frozen=True)
class Hints:
    """What the user asks for.

    Attributes:
        no_split: paths of modules that stay in one stage.
        pin: path of a module -> index of its stage; a negative one counts from the end.
        opaque: paths of modules that are one operator each and never split.
    """

    no_split: tuple[str, ...] = ()
    pin: dict[str, int] = field(default_factory=dict)
    opaque: tuple[str, ...] = ()

    @classmethod
    def of(cls, hints: object) -> Hints:
        """Check what the user wrote; raises FieldError, whose text ends with the remedy."""
        if not isinstance(hints, dict):
            raise FieldError("HINTS", f'{hints!r:.80} is not a dict; write {{"no_split": [...], "pin": {{...}}}}')
        if unknown := [key for key in hints if key not in ("no_split", "pin", "opaque")]:
            raise FieldError("HINTS", f"has unknown keys {unknown!r:.80}; use no_split, pin and opaque")
        no_split, opaque = (_paths(key, hints.get(key, ())) for key in ("no_split", "opaque"))
        pin = hints.get("pin", {})
        if not isinstance(pin, dict):
            fault = f'{pin!r:.80} is not a dict of module paths and stages; write {{"head": -1}}'
            raise FieldError('HINTS["pin"]', fault)
        for path, stage in pin.items():
            if not isinstance(path, str):
                raise FieldError('HINTS["pin"]', f"{path!r:.80} is not a module path; write it as text")
            if not isinstance(stage, int) or isinstance(stage, bool) or abs(stage) >= MAX_WORKERS:
                fault = f"{stage!r:.80} is not a stage; write 0 for the first or -1 for the last"
                raise FieldError(f'HINTS["pin"][{path!r:.80}]', fault)
        return cls(no_split, dict(pin), opaque)


def unknown_module_remedy(path: str, modules: Iterable[str]) -> str:
    """Return a remedy for a path that no module of the model has."""
    paths = [module for module in modules if module]
    otherwise = f"name each module by its whole path, such as {', '.join(paths[:3])}; patterns do not work here"
    return suggestion(path, paths, otherwise)


def _paths(key: str, paths: object) -> tuple[str, ...]:
    if not isinstance(paths, (list, tuple)) or not all(isinstance(path, str) for path in paths):
        raise FieldError(f'HINTS["{key}"]', f'{paths!r:.80} is not a list of module paths; write ["block1"]')
    return tuple(paths)


@dataclass(frozen=True)
class TrainingOptions:
    """The constants of model.py that concern training.

    Attributes:
        max_grad_norm: `MAX_GRAD_NORM`: the norm of the gradients is clipped to this before each update.
        scheduler_step: `SCHEDULER_STEP`: the learning-rate schedule steps after each "update" or "epoch".
        drop_last: `DROP_LAST`: whether to leave out a short last minibatch of a training epoch.
    """

    max_grad_norm: float | None = None
    scheduler_step: str = "update"
    drop_last: bool = False

    @classmethod
    def of(cls, names: Mapping[str, Any]) -> TrainingOptions:
        """Check the user's constants, by name; raises FieldError, whose text ends with the remedy."""
        norm = names.get("MAX_GRAD_NORM")
        is_number = isinstance(norm, Real) and not isinstance(norm, bool)
        if norm is not None and not (is_number and 0 < norm <= sys.float_info.max):
            fault = f"{norm!r:.80} is not a positive finite number; write 1.0, or leave it out"
            raise FieldError("MAX_GRAD_NORM", fault)
        step = names.get("SCHEDULER_STEP", "update")
        if step not in ("update", "epoch"):
            raise FieldError("SCHEDULER_STEP", f'{step!r:.80} is unknown; write "update" or "epoch"')
        drop_last = names.get("DROP_LAST", False)
        if not isinstance(drop_last, bool):
            raise FieldError("DROP_LAST", f"{drop_last!r:.80} is neither True nor False; write one of them")
        return cls(None if norm is None else float(norm), str(step), drop_last)


def state_fault(model: nn.Module, state: object) -> str:
    """Say why checkpoints cannot have a model's state_dict, and what to do; "" if they can.

    They save parameters and buffers under their own names, so state_dict() may leave out only what is not trained.
    """
    if not isinstance(state, Mapping):
        return f"is a {type(state).__name__}, not a dict of tensors; leave state_dict() as torch has it"
    known = registered_state(model)
    for name, value in state.items():
        if not isinstance(value, Tensor):
            what = f"has {name}, a {type(value).__name__} and not a tensor"
            return (
                f"{what}; leave out the get_extra_state() or state_dict() that adds it, or keep the value in a buffer"
            )
        if name not in known:
            what = f"has {name}, but no parameter or buffer has this name, so checkpoints would not have its values"
            return f"{what}; leave out the hook, wrapper, get_extra_state() or state_dict() that adds or renames it"
        if not has_values_of(value, known[name]):
            what = (
                f"has other values for {name} than the model's tensor of this name, which checkpoints and exports save"
            )
            return f"{what}; leave out the hook or state_dict() that changes it"
    saved = {id(known[name]) for name in state}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and id(parameter) not in saved:
            what = f"lacks {name}, a trained parameter, so checkpoints would lose it"
            return f"{what}; leave out the hook or state_dict() that drops it"
    return ""


def target_fault(target: Any, of_one: Any, samples: int) -> tuple[str, str] | None:
    """Return what is wrong with a target that has not one row for each sample, and a remedy; None if nothing is.

    Args:
        of_one: the target of one sample.
    """
    parts, parts_of_one = (
        [each for _, each in named_leaves(t, "target") if each is not None] for t in (target, of_one)
    )
    if len(parts) != len(parts_of_one) and all(isinstance(part, (Tensor, Real)) for part in parts):
        what = f"gives a target of {counted(len(parts), 'part')} for {samples} samples"
        what += f", but of {counted(len(parts_of_one), 'part')} for one sample"
        remedy = "give all targets the same containers and keys, and None in the same places"
        if len(parts) == samples * len(parts_of_one):
            remedy = (
                "let collate() make one tensor of the samples' targets: torch.stack(), or torch.tensor() of numbers"
            )
        return what, remedy
    remedy = "give targets one row per sample, and pad to a fixed length"
    for part, part_of_one in zip(parts, parts_of_one, strict=False):
        if isinstance(part, Tensor) and isinstance(part_of_one, Tensor):
            if part.is_nested:
                return "gives a nested tensor as target", remedy
            shape, of_one_shape = [*part.shape], [*part_of_one.shape]
            if of_one_shape[:1] != [1]:
                return f"gives a target of shape {of_one_shape} for one sample", remedy
            if shape != [samples, *of_one_shape[1:]]:
                given = f"gives a target of shape {shape} for {samples} samples"
                return f"{given}, but of shape {of_one_shape} for one sample", remedy
    return None


def has_values_of(tensor: Tensor, registered: Tensor) -> bool:
    """Whether a tensor has the values of a parameter or buffer, perhaps in another dtype or on another device; True if
    one of them has no values that can be compared."""
    with DisableTorchFunction(), _disable_current_modes():  # a partial build shows a meta tensor as one on the CPU
        if tensor is registered or not all(map(_is_comparable, (tensor, registered))):
            return True
        if tensor.shape != registered.shape:
            return False
        expected = registered.detach().to(tensor.device, tensor.dtype)
        return bool(((tensor == expected) | ((tensor != tensor) & (expected != expected))).all())  # NaN


def _is_comparable(tensor: Tensor) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter)  # a fake tensor is not
    return is_plain and tensor.layout is torch.strided and not (tensor.is_meta or tensor.is_quantized)


def optimizer_fault(returned: object) -> str:
    """Say why the result of optimizer() cannot be used, and what can; "" if it can."""
    if isinstance(returned, (list, tuple, dict)):
        return (
            f"returned {len(returned)} values in a {type(returned).__name__}, but an update is one step of one "
            "optimizer. Models that several optimizers train in turn (GANs) cannot be pipelined; "
            "return one optimizer, with a parameter group for each learning rate or weight decay"
        )
    if not isinstance(returned, Optimizer):
        return f"returned {type(returned).__name__}, not an Optimizer; return one"
    if isinstance(returned, SparseAdam):
        return (
            "returned SparseAdam, which takes sparse gradients only, but stages compute dense ones, even if an "
            "Embedding has sparse=True; use Adam or SGD"
        )
    closure = inspect.signature(type(returned).step).parameters.get("closure")
    if closure and closure.default is inspect.Parameter.empty:
        return (
            f"returned {type(returned).__name__}, whose step needs a closure that computes the loss again, but "
            f"{NO_CLOSURE}"
        )
    return ""


def schedule_fault(returned: object) -> str:
    """Say why the result of scheduler() cannot be used, and what can; "" if it can."""
    step: Any = getattr(returned, "step", None)
    name = type(returned).__name__
    if not callable(step):
        return f"returned {name}, not an LRScheduler; return one"
    try:
        inspect.signature(step).bind(*([0.0] if isinstance(returned, ReduceLROnPlateau) else []))
    except TypeError as error:
        return f"returned {name}, which cannot be stepped ({error}); return one whose step() needs no argument"
    except ValueError:  # Python cannot tell
        pass
    return ""


def check_gradient(loss: Tensor, output: Any) -> None:
    """Check that a training step leads from the loss back to an output that can be trained; raises ModelError."""
    if loss.requires_grad or not torch.is_grad_enabled():
        return
    if any(tensor.requires_grad for tensor in tensors_of(output)):
        remedy = "compute it from the model's output without detach(), item(), argmax() or torch.no_grad()"
        raise ModelError("loss() returned a tensor without a gradient, so nothing can be trained", remedy)


def check_loss_parameters(loss: Tensor, known: Collection[Tensor], weights: Iterable[Tensor] = ()) -> None:
    """Check that the loss of the first minibatch depends on no parameter of its own, which no stage would train, and
    that loss() has called no backward itself; raises ModelError.

    Args:
        known: the tensors that may get a gradient from the loss: parameters of the model, and leaves of its output.
        weights: the model's own parameters if a stage computes with others, which are `known`.
    """
    if any(tensor.is_leaf and tensor.grad is not None for tensor in known):
        what = "loss() calls backward() itself, but earlier stages would not get its gradients"
        raise ModelError(what, "return the sum of all losses instead")
    own = {id(leaf): leaf for leaf in graph_leaves(loss)}
    for tensor in known:
        own.pop(id(tensor), None)
    for weight in (weight for weight in weights if id(weight) in own):
        raise ModelError(
            f"loss() reads weights of the model from a variable, such as one of shape {list(weight.shape)}, but no "
            "gradient gets to them there",
            "for a penalty on weights, use weight_decay in optimizer(), or let forward return it with the output",
        )
    for leaf in own.values():
        raise ModelError(
            f"loss() depends on a parameter of its own, of shape {list(leaf.shape)}, which no stage trains",
            "move it into the model and return it as part of the output, or set requires_grad=False on it",
        )


def graph_leaves(tensor: Tensor) -> list[Tensor]:
    """Return the leaves of a tensor's autograd graph: parameters and inputs that get a gradient from it."""
    if tensor.grad_fn is None:
        return [tensor] if tensor.requires_grad else []
    return [node.variable for node in autograd_graph([tensor.grad_fn]) if hasattr(node, "variable")]


def autograd_graph(outputs: Iterable[Node]) -> dict[Node, list[Node]]:
    """Return `outputs` and every node below them -> the nodes right below it. As long as this holds them, equal nodes
    are identical."""
    graph: dict[Node, list[Node]] = {}
    todo = list(outputs)
    while todo:
        node = todo.pop()
        if node not in graph:
            graph[node] = [child for child, _ in node.next_functions if child is not None]
            todo += graph[node]
    return graph


def hook_on_parameter(location: str) -> TraceError:
    """Return the error for a forward that puts a hook on a parameter, at the line `file.py:12`."""
    what = "forward puts a hook on a parameter, but stages have tensors of their own and would lose it"
    remedy = "change gradients in the optimizer's step, or with MAX_GRAD_NORM"
    return TraceError(what, remedy, location=location, module="")


def takes_total(scheduler: Callable[..., Any]) -> bool:
    """Whether scheduler() takes the total number of steps: a second argument without a default, or of that name."""
    parameters = inspect.signature(scheduler).parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    second = positional[1] if len(positional) > 1 else None
    return second is not None and (second.default is second.empty or second.name == "total_updates")
