"""Find the module that torch.export cannot see through: it becomes opaque, a single operator that is never split."""

from __future__ import annotations

import inspect
import os
import random
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NamedTuple
from unittest.mock import patch

import sympy
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointFunction

from pdtool.errors import TraceError
from pdtool.frontend.leaf_calls import OWN_MODULE, LeafCall
from pdtool.frontend.leaf_modules import is_leaf
from pdtool.frontend.model_rules import hook_on_parameter
from pdtool.frontend.user_code import line_of

_TORCH = f"{os.path.dirname(torch.__file__)}/"
_USES_DATA = re.compile(r"\.data\b(?!\s*\()")
_DRAWING = "random randint randrange uniform choice choices sample shuffle gauss getrandbits"
_DRAWING_NUMPY = "rand randn random randint uniform normal choice permutation shuffle binomial"
_SEEDING = "manual_seed seed set_rng_state fork_rng"  # of torch.random


def failing_module(error: BaseException, model: nn.Module) -> str | None:
    """Return the path of the innermost module whose code raised `error`; "" for the model; None when there is none.

    If a leaf module fails, its caller is to blame.
    """
    paths = _paths(model)
    cause: BaseException | None = error
    while cause:
        found = [path for frame, _ in walk_tb(cause.__traceback__) if (path := _path(frame, paths)) is not None]
        if found:
            return found[-1]
        cause = cause.__cause__ or cause.__context__
    return None


def modules_using_data(model: nn.Module) -> list[str]:
    """The paths of modules whose forward uses `.data`, which torch.export traces into tensors without values; without
    one, of those that use it in another method."""
    in_forward, elsewhere = [], []
    for path, module in model.named_modules():
        kind = type(module)
        try:
            if _USES_DATA.search(inspect.getsource(kind.forward)):
                in_forward.append(path)
            elif kind.__module__.partition(".")[0] != "torch" and _USES_DATA.search(inspect.getsource(kind)):
                elsewhere.append(path)
        except (OSError, TypeError):
            continue
    return in_forward or elsewhere


class FixedSize(NamedTuple):
    """Code that is valid for some minibatch sizes only, such as `range(len(x))`.

    Attributes:
        module: path of the module whose forward it is.
        location: `file.py:12` there.
    """

    module: str
    location: str


@contextmanager
def fixed_sizes(model: nn.Module) -> Iterator[list[FixedSize]]:
    """Record code that is valid for some minibatch sizes only, during the export."""
    paths = _paths(model)
    found: list[FixedSize] = []

    def noting(guard: Callable[[SymNode, str, int], Any]) -> Callable[[SymNode, str, int], Any]:
        def noted(node: SymNode, file: str, line: int) -> Any:
            guards: list[Any] = node.shape_env.guards if node.shape_env else []
            before = len(guards)
            result = guard(node, file, line)
            is_new = any(not _compares_minibatch_sizes(guard.expr) for guard in guards[before:])
            for frame, _ in walk_stack(sys._getframe(1)) if is_new else ():
                if (path := _path(frame, paths)) is not None:  # the innermost module that is running
                    found.append(FixedSize(path, line_of(frame)))
                    break
            return result

        return noted

    with patch.multiple(SymNode, guard_int=noting(SymNode.guard_int), guard_bool=noting(SymNode.guard_bool)):
        yield found


def _compares_minibatch_sizes(expression: Any) -> bool:
    """Whether it says no more than that two inputs have as many samples."""
    return isinstance(expression, sympy.Eq) and all(side.is_Symbol for side in expression.args)


def _paths(model: nn.Module) -> dict[int, str]:
    """The paths of the model's modules, but for leaf modules, by the id of their attributes.

    If a module is called under two names, torch.export runs another object that shares its attributes.
    """
    return {id(vars(m)): path for path, m in model.named_modules() if not (path and is_leaf(m))}


def _path(frame: FrameType, paths: Mapping[int, str]) -> str | None:
    """The path of the module whose method a frame runs."""
    arguments = frame.f_code.co_varnames[: frame.f_code.co_argcount]  # of which the first is usually called self
    return paths.get(id(getattr(frame.f_locals.get(arguments[0]), "__dict__", None))) if arguments else None


@contextmanager
def untraceable_refused() -> Iterator[None]:
    """Refuse code that torch.export would trace wrongly without an error.

    These are gradients taken in forward, hooks on tensors, seeds of torch's generator, and random numbers from Python
    and numpy, which would be drawn once and for all. An autograd.Function stays one operator, except reentrant
    checkpointing, which is left out.
    """
    with ExitStack() as stack:
        stack.enter_context(_functions_kept())
        stack.enter_context(patch.object(torch.autograd, "grad", _refusing("torch.autograd.grad")))
        for name in ("register_hook", "retain_grad"):
            stack.enter_context(patch.object(Tensor, name, _refusing(f"Tensor.{name}")))
        for module, names in (("random", _DRAWING), ("numpy.random", _DRAWING_NUMPY)):
            for name in names.split() if module in sys.modules else ():
                stack.enter_context(patch.object(sys.modules[module], name, _refusing(f"{module}.{name}")))
        for name in _SEEDING.split():
            refusing = _refusing(f"torch.{name}", unless_by_torch=getattr(torch.random, name))
            for owner in (torch, torch.random):
                if hasattr(owner, name):
                    stack.enter_context(patch.object(owner, name, refusing))
        state, seed = random.getstate(), torch.default_generator.initial_seed()
        yield
        if torch.default_generator.initial_seed() != seed:  # by a name that was imported before
            raise TraceError("forward seeds torch's generator, which tracing cannot see", OWN_MODULE)
        if random.getstate() != state:
            what = "forward uses Python's random numbers, which tracing would turn into constants"
            remedy = "draw into a tensor with torch's generator, or move the call into a module of its own"
            raise TraceError(what, remedy)


@contextmanager
def caught_errors_raised() -> Iterator[None]:
    """Raise at the end the error about a value that a trace does not have, if code outside torch has caught it.

    In `try: if x.max() > 2: ...`, the trace would otherwise always take the way of the `except`.
    """
    made: list[BaseException] = []
    make = ShapeEnv._make_data_dependent_error

    def recorded(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    with patch.object(ShapeEnv, "_make_data_dependent_error", recorded):
        yield
    for error in made:
        trace = error.__traceback__  # which begins where it was caught
        if trace and not trace.tb_frame.f_code.co_filename.startswith(_TORCH):
            raise error


def _refusing(name: str, unless_by_torch: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Return a function that raises if it is called while a model is traced.

    Args:
        unless_by_torch: what it does if torch itself calls it, for the export.
    """

    def refused(*args: Any, **kwargs: Any) -> Any:
        if unless_by_torch and not _is_called_in_forward(sys._getframe(1)):
            return unless_by_torch(*args, **kwargs)
        if isinstance(next(iter(args), None), nn.Parameter):
            raise hook_on_parameter(line_of(sys._getframe(1)))
        raise TraceError(f"forward calls {name}, which tracing cannot see", OWN_MODULE)

    return refused


def _is_called_in_forward(frame: FrameType) -> bool:
    """Whether code outside torch and pdtool, or torch's for it, calls a function."""
    names = (each.f_globals.get("__name__", "") for each, _ in walk_stack(frame))
    return not next(name for name in names if not name.startswith(("torch.", "contextlib"))).startswith("pdtool.")


@contextmanager
def _functions_kept() -> Iterator[None]:
    """Keep each autograd.Function of the user one operator, because torch.export would lose its backward."""
    apply = vars(Function)["apply"]

    def kept(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if cls is CheckpointFunction:  # the plan decides about recomputation
            function, _, *inputs = args
            return function(*inputs)
        if cls.__module__.startswith("torch."):
            return apply.__get__(None, cls)(*args, **kwargs)
        if vars(sys.modules[cls.__module__]).get(cls.__name__) is not cls:
            what = f"{cls.__name__} has a backward of its own, and a stage file cannot import it from {cls.__module__}"
            raise TraceError(what, "define it at the top level of the file")
        return LeafCall("", apply.__get__(None, cls), (args, {}), function=cls).as_operator()

    with patch.object(Function, "apply", classmethod(kept)):
        yield


def without_inner(reasons: Mapping[str, str]) -> dict[str, str]:
    """Leave out modules that are inside another of these modules."""
    return {
        path: reason for path, reason in reasons.items() if not any(path.startswith(f"{other}.") for other in reasons)
    }
