"""Fit a device's factors to what was measured on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from pdtool.artifacts.device import OperatorKind
from pdtool.artifacts.envelope import ModelRef
from pdtool.artifacts.profile import Node, Profile
from pdtool.errors import ArtifactError

_KINDS: tuple[tuple[OperatorKind, re.Pattern[str]], ...] = (
    ("conv", re.compile(r"[Cc]onv")),
    ("rnn", re.compile(r"LSTM|GRU|RNN|^(lstm|gru|rnn_)")),
    ("norm", re.compile(r"[Nn]orm")),
    ("embedding", re.compile(r"[Ee]mbedding")),
    ("matmul", re.compile(r"[Ll]inear|[Aa]ttention|matmul|einsum|(^|add|b)(mm|mv)$")),
)


def kind_of(op: str) -> OperatorKind:
    """The kind of an operator that shares a factor with its like: `conv` for Conv2d."""
    return next((kind for kind, pattern in _KINDS if pattern.search(op)), "elementwise")


def measurable(profile: Profile, path: Path | str) -> ModelRef:
    """The model that the profile was measured with; raises ArtifactError where it was not, or not by pdtool."""
    if profile.device.kind != "measured" or profile.model is None:
        raise ArtifactError(
            path,
            "holds no times that pdtool measured",
            "calibrate with a profile made with --device cpu or cuda",
            field="device.kind",
        )
    return profile.model


def fit(measured: Profile, estimated: Profile, path: Path | str) -> dict[OperatorKind, float]:
    """Measured over estimated seconds, summed over the operators of each kind; a kind that took no time is left out.

    Args:
        path: of the measured profile, for errors.

    Raises:
        ArtifactError: the two are not of the same operators.
    """
    _same_nodes(measured, estimated, path)
    before, after = _sums(estimated), _sums(measured)
    return {kind: after[kind] / before[kind] for kind in before if before[kind] and after.get(kind)}


def _same_nodes(measured: Profile, estimated: Profile, path: Path | str) -> None:
    for index, (found, node) in enumerate(zip(measured.nodes, estimated.nodes, strict=False)):
        if _identity(found) != _identity(node):
            raise ArtifactError(
                path,
                f"is {found.op} {found.name!r} where the model has {node.op} {node.name!r}, or of another size",
                "measure the model again",
                field=f"nodes[{index}]",
            )
    if len(measured.nodes) != len(estimated.nodes):
        raise ArtifactError(
            path,
            f"has {len(measured.nodes)} nodes, the model has {len(estimated.nodes)}",
            "measure the model again",
            field="nodes",
        )


def _identity(node: Node) -> tuple[object, ...]:
    return node.name, node.op, node.inputs, node.output_bytes, node.parameter_bytes


def _sums(profile: Profile) -> dict[OperatorKind, float]:
    sums: dict[OperatorKind, float] = {}
    for kind, spent in _spent(profile):
        sums[kind] = sums.get(kind, 0.0) + spent
    return sums


def _spent(profile: Profile) -> Iterator[tuple[OperatorKind, float]]:
    for node in profile.nodes:
        yield kind_of(node.op), node.forward_s + node.backward_s
        yield "update", node.update_s
