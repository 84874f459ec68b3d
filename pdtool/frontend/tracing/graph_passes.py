"""Passes over the operators that were read: drop dead ones, mark constants, group those that share state, find ties."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from pdtool.frontend.operators import Operator, values_in


def drop_dead_operators(operators: Sequence[Operator], output: Any, changed_buffers: Collection[str]) -> list[Operator]:
    """Keep the model inputs, and the operators that the output or a changed buffer depends on."""
    used = {value.operator for value in values_in(output)}
    kept = []
    for op in reversed(operators):
        if op.is_input or op.name in used or not set(op.buffers).isdisjoint(changed_buffers):
            kept.append(op)
            used |= {value.operator for value in op.values}
    return kept[::-1]


def mark_constants(operators: Sequence[Operator], changed_buffers: Collection[str]) -> list[Operator]:
    """Set `constant` on the ATen operators that only constants and unchanging buffers go into."""
    constants: set[str] = set()
    for op in operators:
        if op.target is None or torch.Tag.nondeterministic_seeded in op.target.tags:
            continue
        stateful = op.parameters or not set(op.buffers).isdisjoint(changed_buffers)
        if not stateful and all(value.operator in constants for value in op.values):
            constants.add(op.name)
    return [replace(op, constant=op.name in constants) for op in operators]


def operators_sharing_state(
    operators: Sequence[Operator], changed_buffers: Collection[str]
) -> tuple[tuple[str, ...], ...]:
    """Group the names of operators that use a buffer which one of them changes, or that call one opaque module."""
    users: dict[str, list[str]] = {}
    for op in operators:
        if op.opaque:
            users.setdefault(op.module, []).append(op.name)
        for name in op.buffers:
            if name in changed_buffers and not op.constant:
                users.setdefault(name, []).append(op.name)
    return tuple(dict.fromkeys(tuple(names) for names in users.values() if len(names) > 1))


def first_names(parameters: Mapping[str, nn.Parameter]) -> dict[str, str]:
    """Map each name of a parameter to the first name of the same parameter."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(parameter), name) for name, parameter in parameters.items()}
