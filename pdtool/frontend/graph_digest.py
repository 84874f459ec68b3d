"""Digest a traced operator graph: what a profile, a plan and stage files are made for.

What counts is everything that a stage file or a placement follows from:

- each operator in order: its name, module path, ATen overload or module type, and its arguments (strides,
  probabilities, constants, sizes), those that differ between training and evaluation with both values; of a leaf module
  also its constructor arguments. An argument with the default of its schema or constructor is left out, so that a
  release of torch that adds an option changes nothing;
- the connections: which operator takes which output, and what the model returns;
- the shape of each tensor as a function of the minibatch's size, its dtype, and whether a gradient flows through it;
- the parameters and buffers that operators use: names, shapes, dtypes, which of them are trainable or persistent, and
  which are tied;
- of an opaque module, the source of its class and of the classes of the modules inside it, without comments; of an
  autograd.Function its source;
- groups of operators that share changing state, and so must stand in one stage.

What does not count: the values of parameters and buffers, which the model brings along at each run; parameters that no
operator uses; where a line stands in the source, comments, and anything else in the file; the loss, the optimizer and
the dataset, which belong to the run; HINTS, which are wishes for the partitioner, recorded in the profile as `together`
and `pin`.

The digest is the same in every process and for every minibatch size that the model is traced with. It must stay the
same in later versions of pdtool as well, or they would refuse the artifacts written before.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from functools import cache
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from pdtool.frontend.leaf_modules import constructor_arguments
from pdtool.frontend.model_io import children
from pdtool.frontend.operators import (
    LAYOUT_ARGUMENTS,
    ByMode,
    Operator,
    Size,
    State,
    Traced,
    Value,
    is_default,
    is_persistent,
)
from pdtool.frontend.user_code import user_module

# A size is told by its values here: its expression may be written in another way by another version of torch.
_BATCH_SIZES = (2, 3, 5, 64, 1009)


def graph_sha256(traced: Traced) -> str | None:
    """SHA-256 of the operator graph, in hex; None when it holds a constant whose value a fake tensor hides."""
    arguments = [(op.args, op.kwargs) for op in traced.operators]
    if any(isinstance(leaf, FakeTensor) for leaf in pytree.tree_leaves((arguments, traced.output))):
        return None
    content = {
        "operators": [_operator(op, traced.model) for op in traced.operators],
        "output": _plain(traced.output),
        "parameters": _parameters(traced),
        "buffers": _buffers(traced),
        "together": traced.together,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _operator(op: Operator, model: nn.Module) -> dict[str, Any]:
    """One operator as plain data for JSON."""
    content = {
        "name": op.name,
        "op": op.op,
        "module": op.module,
        "outputs": [[_plain(value.shape), str(value.dtype), value.differentiable] for value in op.outputs],
        "structure": _plain(op.structure),
        "args": _plain(op.args),
    }
    if op.branch:
        content |= {"training": [_operator(part, model) for part in op.branch.training]}
        content |= {"evaluation": [_operator(part, model) for part in op.branch.evaluation]}
        content |= {"results": _plain(op.branch.results)}
    elif op.target is not None:
        arguments = op.target._schema.arguments
        changed = [a.name for a in arguments if not is_default(op.kwargs[a.name], a) and a.name not in LAYOUT_ARGUMENTS]
        content |= {"target": str(op.target), "kwargs": {name: _plain(op.kwargs[name]) for name in changed}}
    elif op.function:
        content |= {"source": [_source(op.function)]}
    elif not op.is_input:
        module = model.get_submodule(op.module)
        if op.opaque:
            content |= {"source": [_source(kind) for kind in dict.fromkeys(type(m) for m in module.modules())]}
        else:
            content |= {"constructor": {name: _plain(value) for name, value, _ in constructor_arguments(module)}}
        content |= {"kwargs": {name: _plain(value) for name, value in op.kwargs.items()}}
    return content


def _source(kind: type) -> list[str]:
    """The name of a class, and its source where it is there and not torch's: comments and layout make no difference."""
    text = f"{user_module(kind.__module__)}.{kind.__qualname__}"
    if kind.__module__.startswith("torch."):
        return [text]
    try:
        return [text, ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(kind))))]
    except (OSError, TypeError, SyntaxError):
        return [text]


def _parameters(traced: Traced) -> dict[str, Any]:
    """Parameter -> what is known of it without its values, with the first used name of the same parameter."""
    used = list(dict.fromkeys(name for op in traced.operators for name in op.parameters))
    first: dict[str, str] = {}
    content = {}
    for name in used:
        parameter = traced.model.get_parameter(name)
        tied = first.setdefault(traced.tied[name], name)
        content[name] = [list(parameter.shape), str(parameter.dtype), parameter.requires_grad, tied]
    return content


def _buffers(traced: Traced) -> dict[str, Any]:
    content = {}
    for name in {name for op in traced.operators for name in op.buffers}:
        path, _, last = name.rpartition(".")
        owner = traced.model.get_submodule(path)
        buffer = getattr(owner, last)
        content[name] = [list(buffer.shape), str(buffer.dtype), is_persistent(owner, last)]
    return content


def _plain(value: Any) -> Any:
    """An argument as nested lists of texts and numbers, each with its kind, so that 1, 1.0, True and "1" differ."""
    match value:
        case Value():
            return ["value", value.operator, value.index]
        case State():
            return ["state", value.name]
        case Size():
            return ["size", *_sizes(value.expression)]
        case ByMode():
            return ["by mode", _plain(value.training), _plain(value.evaluation)]
        case Tensor():
            return ["tensor", str(value.dtype), list(value.shape), repr(value.tolist())]
        case torch.device():
            return ["device"]  # a stage computes where its input is
        case list() | tuple():
            return ["list" if isinstance(value, list) else "tuple", *(_plain(item) for item in value)]
        case dict():
            return ["dict", *([_plain(key), _plain(item)] for key, item in value.items())]
        case _ if children(value) is not None:
            return ["dataclass", *([key, _plain(item)] for key, item in children(value) or ())]
        case None | bool() | int() | float() | complex() | str():
            return [type(value).__name__, repr(value)]
        case torch.dtype() | torch.memory_format() | torch.layout():
            return ["torch", str(value)]
        case _:
            return ["object", type(value).__qualname__]


@cache
def _sizes(expression: sympy.Expr) -> list[int]:
    return [Size(expression).at(batch) for batch in _BATCH_SIZES]
