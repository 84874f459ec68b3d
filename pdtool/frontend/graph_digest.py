"""Detect whether a model has changed since an artifact was made, by the digest of its operator graph.

A profile, a plan and stage files record the digest. Where it differs, `first_difference` says which operator changed.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import sympy
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.profile import Node, Profile
from pdtool.errors import StaleError
from pdtool.files import file_sha256
from pdtool.frontend.leaf_modules import constructor_arguments
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import children
from pdtool.frontend.operators import (
    LAYOUT_ARGUMENTS,
    OWN_NODES,
    ByMode,
    Operator,
    Size,
    State,
    Traced,
    Value,
    is_default,
    is_persistent,
)
from pdtool.frontend.random_numbers import random_state_kept
from pdtool.frontend.tracing import trace_file
from pdtool.frontend.user_code import find_source
from pdtool.frontend.user_modules import user_module
from pdtool.units import format_bytes

# Sizes count by their values here: another version of torch may write the same expression differently.
_BATCH_SIZES = (2, 3, 5, 64, 1009)


def graph_sha256(traced: Traced) -> str | None:
    """Return the SHA-256 of the operator graph, in hex; None when a fake tensor hides the value of a constant.

    The digest is the same in every process and for every minibatch size that the model is traced with. It must stay the
    same in later versions of pdtool as well, or they would refuse older artifacts. It covers everything that stage
    files and placements depend on:

    - each operator in order: its name, module path, ATen overload or module type, and its arguments (strides,
      probabilities, constants, sizes), with both values if training and evaluation differ; for a leaf module also its
      constructor arguments. Arguments with their default value are left out, so that a release of torch that adds an
      option changes nothing;
    - the connections: which operator takes which output, and what the model returns;
    - the shape of each tensor as a function of the minibatch's size, its dtype, and whether a gradient flows through;
    - the parameters and buffers that operators use: names, shapes, dtypes, which of them are trainable or persistent,
      and which are tied;
    - for an opaque module, the source of its class and of the classes of the modules inside it, without comments; for
      an autograd.Function its source;
    - groups of operators that share changing state, and so must stand in one stage.

    It does not cover the values of parameters and buffers, which come from the model in each run; parameters that no
    operator uses; line numbers, comments, and anything else in the file; the loss, the optimizer and the dataset, which
    belong to the run; HINTS, which are for the partitioner and recorded in the profile as `together` and `pin`.
    """
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
    """The name of a class, and its source without comments and layout unless it is torch's or missing."""
    text = f"{user_module(kind.__module__)}.{kind.__qualname__}"
    if kind.__module__.startswith("torch."):
        return [text]
    try:
        return [text, ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(kind))))]
    except (OSError, TypeError, SyntaxError):
        return [text]


def _parameters(traced: Traced) -> dict[str, Any]:
    """Parameter -> its properties without its values, with the first used name of the same parameter."""
    first: dict[str, str] = {}
    content = {}
    for name in dict.fromkeys(name for op in traced.operators for name in op.parameters):
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


def check_profile(traced: Traced, profile: Profile, source: str) -> None:
    """Check that `profile` was made from this model; a profile that records no graph passes.

    Args:
        source: the model's file, for the error.

    Raises:
        StaleError: the graphs differ; it says where if the profile tells.
    """
    if profile.graph_sha256 not in (None, graph_sha256(traced)):
        raise StaleError(source, first_difference(profile, traced, source), "profile and partition it again")


def check_bundle(
    model_file: ModelFile, model: nn.Module, bundle: Bundle, check_files: Callable[[Traced], None] | None = None
) -> None:
    """Trace `model` and check that the stage files were made from it; a bundle that records no graph passes.

    This keeps the random state of torch, numpy and Python. It takes as long as tracing: 0.5 s for a small model, 2 s
    for one of 200 operators.

    Args:
        check_files: compares the stage files with the traced model; raises StaleError.

    Raises:
        StaleError: the graphs differ, or the files do.
        TraceError: the model cannot be traced as it is now.
    """
    if bundle.graph_sha256 is None and check_files is None:
        return
    with random_state_kept():  # of a copy: a worker's own file must not keep the training set in memory
        traced = trace_file(replace(model_file), model, bundle.batch_size)
    if bundle.graph_sha256 not in (None, graph_sha256(traced)):
        raise StaleError(
            model_file.ref.source,
            "the model's operators have changed since the plan and its stage files were made",
            "`pdtool check --fresh` shows where they differ. Undo the change, or profile and partition again",
        )
    if check_files:
        check_files(traced)


def first_difference(profile: Profile, traced: Traced, source: str) -> str:
    """Say in words where the model differs from its profile, and whether its file, `source`, is unchanged."""
    difference = _first_difference(profile, traced)
    if profile.digests.get(source) != file_sha256(find_source(source)):
        return difference
    return (
        f"{difference}. {source} itself is unchanged, so a module that it imports, a setting or a library has changed, "
        "or the model is built differently each time"
    )


def _first_difference(profile: Profile, traced: Traced) -> str:
    """The first operator that differs, or else the remaining cause.

    A profile records names, kinds, connections and sizes. Arguments and constants are only in the digest.
    """
    nodes = [node for node in profile.nodes if node.name in traced.by_name or not OWN_NODES.fullmatch(node.name)]
    operators = [op for op in traced.operators if not op.constant]
    for node, op in zip(nodes, operators, strict=False):
        if difference := _difference(node, op, traced, profile):
            return difference
    if len(nodes) > len(operators):
        return f"operator {nodes[len(operators)].name} is in the profile but no longer in the model"
    if len(nodes) < len(operators):
        return f"operator {operators[len(nodes)].name} is in the model but not in the profile"
    return "an argument of an operator, a constant, a shape or a tie between parameters has changed since the profile"


def _difference(node: Node, op: Operator, traced: Traced, profile: Profile) -> str:
    """The difference between a profile's node and the operator in its place; "" if the profile records none."""
    if node.name != op.name:
        return f"the model has operator {op.name} where the profile has {node.name}"
    if node.op != op.op:
        return f"operator {op.name} is {node.op} in the profile and {op.op} in the model"
    sources = traced.sources(op.values)
    if node.inputs != sources:
        return f"operator {op.name} takes {_listed(node.inputs)} in the profile and {_listed(sources)} in the model"
    if profile.device.kind == "estimated":
        return ""  # maybe for parameters of another type
    parameters = {traced.tied[name]: traced.model.get_parameter(name) for name in op.parameters}
    parameter_bytes = sum(parameter.nbytes for parameter in parameters.values())
    profiled_bytes = node.parameter_bytes + node.frozen_bytes
    if profiled_bytes != parameter_bytes:
        return (
            f"the parameters of operator {op.name} have {format_bytes(profiled_bytes)} in the profile and "
            f"{format_bytes(parameter_bytes)} in the model"
        )
    return ""


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"
