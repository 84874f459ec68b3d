"""Compare a model with the operator graph that an artifact was made for."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.profile import Node, Profile
from pdtool.errors import StaleError
from pdtool.files import file_sha256
from pdtool.frontend.graph_digest import graph_sha256
from pdtool.frontend.model_source import find_source
from pdtool.frontend.modelfile import ModelFile
from pdtool.frontend.operators import OWN_NODES, Operator, Traced
from pdtool.frontend.tracing.trace import trace_file
from pdtool.units import format_bytes


def check_profile(traced: Traced, profile: Profile, source: str) -> None:
    """Check that `profile` was taken of this model; one that records no graph passes.

    Args:
        source: the model's file, for the error.

    Raises:
        StaleError: the graphs differ; it says where, as far as the profile tells.
    """
    if profile.graph_sha256 not in (None, graph_sha256(traced)):
        raise StaleError(source, first_difference(profile, traced, source), "profile and partition it again")


def check_bundle(
    model_file: ModelFile, model: nn.Module, bundle: Bundle, check_files: Callable[[Traced], None] | None = None
) -> None:
    """Trace `model` and check that the stage files were made of it; a bundle that records no graph passes.

    The random state of torch, numpy and Python stays as it was. It takes as long as tracing: 0.5 s for a small model,
    2 s for one of 200 operators.

    Args:
        check_files: compares the stage files with the traced model; raises StaleError.

    Raises:
        StaleError: the graphs differ, or the files do.
        TraceError: the model cannot be traced as it is now.
    """
    if bundle.graph_sha256 is None and check_files is None:
        return
    with _random_state_kept():
        traced = trace_file(model_file, model, bundle.batch_size)
    if bundle.graph_sha256 not in (None, graph_sha256(traced)):
        raise StaleError(
            model_file.ref.source,
            "the model's operators are not those that the plan and its stage files were made for",
            "`pdtool check --fresh` says where they differ; undo it, or profile and partition the model again",
        )
    if check_files:
        check_files(traced)


def first_difference(profile: Profile, traced: Traced, source: str) -> str:
    """Say in words where the model differs from its profile, and whether its file, `source`, is as it was."""
    difference = _first_difference(profile, traced)
    if profile.digests.get(source) != file_sha256(find_source(source)):
        return difference
    return (
        f"{difference}; {source} itself is as it was, so a module that it imports, a setting or a library has changed, "
        "or the model is not built alike each time"
    )


def _first_difference(profile: Profile, traced: Traced) -> str:
    """The first operator that is another one, or what is left.

    A profile knows names, kinds, connections and sizes; of arguments and constants it holds the digest only.
    """
    nodes = [node for node in profile.nodes if node.name in traced.by_name or not OWN_NODES.fullmatch(node.name)]
    operators = [op for op in traced.operators if not op.constant]
    for node, op in zip(nodes, operators, strict=False):
        if difference := _difference(node, op, traced, profile):
            return difference
    if len(nodes) > len(operators):
        return f"operator {nodes[len(operators)].name} is in the profile and no longer in the model"
    if len(nodes) < len(operators):
        return f"operator {operators[len(nodes)].name} is in the model and not in the profile"
    return "an argument of an operator, a constant, a shape or a tie between parameters is not as it was profiled"


def _difference(node: Node, op: Operator, traced: Traced, profile: Profile) -> str:
    """What differs between a node of the profile and the operator in its place; "" for nothing that a profile knows."""
    if node.name != op.name:
        return f"where the profile has operator {node.name}, the model has {op.name}"
    if node.op != op.op:
        return f"operator {op.name} is {node.op} in the profile and {op.op} in the model"
    sources = tuple(dict.fromkeys(v.operator for v in op.values if not traced.by_name[v.operator].constant))
    if node.inputs != sources:
        return f"operator {op.name} takes {_listed(node.inputs)} in the profile and {_listed(sources)} in the model"
    if profile.device.kind == "estimated":
        return ""  # maybe for parameters of another type
    parameters = {traced.tied[name]: traced.model.get_parameter(name) for name in op.parameters}
    parameter_bytes = sum(parameter.nbytes for parameter in parameters.values())
    if node.parameter_bytes != parameter_bytes:
        return (
            f"the parameters of operator {op.name} have {format_bytes(node.parameter_bytes)} in the profile and "
            f"{format_bytes(parameter_bytes)} in the model"
        )
    return ""


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) or "nothing"


@contextmanager
def _random_state_kept() -> Iterator[None]:
    """Give back the random state of this process, whatever example_inputs draws from; that of CUDA is left alone."""
    numpy: Any = sys.modules.get("numpy")
    states = random.getstate(), numpy and numpy.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(states[0])
    if numpy:
        numpy.random.set_state(states[1])
