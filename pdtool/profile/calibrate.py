"""Fit a device's factors, by kind of operator, to a profile measured on it."""

from __future__ import annotations

import re
from pathlib import Path

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.device import OperatorKind
from pdtool.artifacts.profile import Node, Profile
from pdtool.errors import ArtifactError

_KINDS: tuple[tuple[OperatorKind, re.Pattern[str]], ...] = (
    ("conv", re.compile(r"[Cc]onv")),
    ("rnn", re.compile(r"LSTM|GRU|RNN|^(lstm|gru|rnn_)")),
    ("norm", re.compile(r"[Nn]orm")),
    ("embedding", re.compile(r"[Ee]mbedding")),
    ("matmul", re.compile(r"[Ll]inear|[Aa]ttention|matmul|einsum|(^|add|b)(mm|mv)$")),
)


def operator_kind(op: str) -> OperatorKind:
    """Return the kind of an operator, whose operators share a factor: `conv` for Conv2d."""
    return next((kind for kind, pattern in _KINDS if pattern.search(op)), "elementwise")


def measured_model(profile: Profile, path: Path | str) -> ModelRef:
    """Return the model of a measured profile; raises ArtifactError when its operators were not measured by pdtool."""
    if profile.device.kind != "measured" or profile.model is None:
        remedy = "calibrate with a profile made with --device cpu or cuda"
        raise ArtifactError(path, "holds no times that pdtool measured", remedy, field="device.kind")
    if profile.compiled:
        what = "was measured with --compile: its operators have no times of their own"
        raise ArtifactError(path, what, "calibrate with a profile made without", field="compiled")
    return profile.model


def fit_factors(measured: Profile, estimated: Profile, path: Path | str) -> dict[OperatorKind, float]:
    """Divide measured by estimated seconds for each kind of operator; a kind that took no time is left out.

    Args:
        path: of the measured profile, for errors.

    Raises:
        ArtifactError: the two are not of the same operators.
    """
    _check_same_nodes(measured, estimated, path)
    estimated_s, measured_s = _seconds_by_kind(estimated), _seconds_by_kind(measured)
    kinds = [kind for kind, seconds in estimated_s.items() if seconds and measured_s.get(kind)]
    return {kind: measured_s[kind] / estimated_s[kind] for kind in kinds}


def _check_same_nodes(measured: Profile, estimated: Profile, path: Path | str) -> None:
    for index, (profiled, node) in enumerate(zip(measured.nodes, estimated.nodes, strict=False)):
        if _identity(profiled) != _identity(node):
            what = f"is {profiled.op} {profiled.name!r} where the model has {node.op} {node.name!r}, or of another size"
            raise ArtifactError(path, what, "measure the model again", field=f"nodes[{index}]")
    if len(measured.nodes) != len(estimated.nodes):
        what = f"has {len(measured.nodes)} nodes, the model has {len(estimated.nodes)}"
        raise ArtifactError(path, what, "measure the model again", field="nodes")


def _identity(node: Node) -> tuple[object, ...]:
    return node.name, node.op, node.inputs, node.output_bytes, node.parameter_bytes


def _seconds_by_kind(profile: Profile) -> dict[OperatorKind, float]:
    sums: dict[OperatorKind, float] = {"update": sum(node.update_s for node in profile.nodes)}
    for node in profile.nodes:
        kind = operator_kind(node.op)
        sums[kind] = sums.get(kind, 0.0) + node.forward_s + node.backward_s
    return sums
