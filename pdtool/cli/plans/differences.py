"""What differs between two artifacts of one kind, field by field; and which operators are in another stage."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pdtool.artifacts.artifact import Artifact
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.cli.console.plan_view import ranges
from pdtool.units import format_bytes
from pdtool.units import format_rate
from pdtool.units import format_seconds

_NOT_COMPARED = {"format", "tool_version", "digests", "sha256", "name", "why", "nodes", "plan_sha256", "proof"}
# How people call the figures whose names say too little.
_IN_WORDS = {
    "predicted.bottleneck_s": "time by the formulas",
    "predicted.simulated_s": "time, simulated",
    "predicted.data_parallel_s": "data parallelism's time",
    "predicted.throughput_samples_per_s": "samples/s, predicted",
    "predicted.gain_over_data_parallel": "× data parallelism",
    "predicted.samples_per_update": "samples per update",
    "predicted.data_parallel_samples_per_update": "data parallelism's samples per update",
    "predicted.traffic_bytes": "sent per minibatch",
    "throughput_samples_per_s": "samples/s",
    "measured.bottleneck_s": "time, measured",
    "measured.throughput_samples_per_s": "samples/s, steady",
}
_OF_STAGE = re.compile(r"(?P<what>stage)s\[(?P<number>\d+)\]\.(?P<name>\w+)")
_OF_LEVEL = re.compile(r"cluster\.(?P<what>level)s\[(?P<number>\d+)\]\.(?P<name>\w+)")
_LISTED = re.compile(r"predicted\.(?P<name>\w+)\[(?P<number>\d+)\]")
_ROUNDING = 1e-9  # sums taken in another order differ in the last digits


@dataclass(frozen=True, kw_only=True)
class FieldDifference:
    """A field that differs.

    Attributes:
        field: where it stands, as `stages[0].in_flight`.
        first, second: its values; None where an artifact does not have it.
    """

    field: str
    first: Any
    second: Any

    @property
    def change(self) -> float | None:
        """By which fraction the second figure is larger than the first; None for numbers of things, and from zero."""
        values = (self.first, self.second)
        is_figure = any(type(value) is float for value in values) or self._name.endswith("_bytes")
        if not is_figure or not all(type(value) in (int, float) for value in values) or self.first <= 0:
            return None
        return float(self.second / self.first - 1)

    @property
    def label(self) -> str:
        """The field in words: `stage 0 in flight`, `stage 0 memory`."""
        if self.field in _IN_WORDS:
            return _IN_WORDS[self.field]
        if found := _OF_STAGE.fullmatch(self.field) or _OF_LEVEL.fullmatch(self.field):
            return f"{found['what']} {found['number']} {_without_unit(found['name'])}"
        if found := _LISTED.fullmatch(self.field):
            return f"stage {found['number']} {_without_unit(found['name'])}"
        return _without_unit(self.field.replace(".", " "))

    @property
    def is_of_one_alone(self) -> bool:
        """Whether it only says that a part, which the other artifact lacks, has nothing there: no replicas to average
        gradients with, no latency."""
        is_of_part = any(pattern.fullmatch(self.field) for pattern in (_OF_STAGE, _OF_LEVEL, _LISTED))
        return is_of_part and None in (self.first, self.second) and not (self.first or self.second)

    @property
    def _name(self) -> str:
        """The last name in the field, which says the unit."""
        return self.field.rpartition("[")[0] if self.field.endswith("]") else self.field

    def written(self, value: Any) -> str:
        """A value of the field, with its unit."""
        if value is None:
            return "–"
        name = self._name
        if isinstance(value, (list, tuple)):
            return ranges(value)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return str(value)
        for suffix, write in (("_samples_per_s", "{:.4g}".format), ("_bytes_per_s", format_rate)):
            if name.endswith(suffix):
                return write(value)
        if name.endswith("_bytes"):
            return format_bytes(value)
        if name.endswith("_s"):
            return format_seconds(value)
        return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class MovedOperators:
    """Operators that are in stage `first` of one plan and in stage `second` of the other."""

    first: int
    second: int
    operators: tuple[str, ...]


def differences(first: Artifact, second: Artifact) -> list[FieldDifference]:
    """Return the fields that differ, in the order in which they stand in the artifact.

    Left out are names, digests and reasons; of plans also the operators of the stages (see `moved_operators`).
    """
    values = [dict(_fields(_content(artifact))) for artifact in (first, second)]
    parts = list(type(first).model_fields)
    fields = sorted({**values[0], **values[1]}, key=lambda field: _position(field, parts))
    found = (FieldDifference(field=field, first=values[0].get(field), second=values[1].get(field)) for field in fields)
    return [difference for difference in found if not _is_same(difference.first, difference.second)]


def moved_operators(first: Plan, second: Plan, profile: Profile | None) -> list[MovedOperators]:
    """Return the operators that stand in a stage of another number.

    Args:
        profile: that both plans are of, which tells the operators of a module; None: names are compared as they stand.
    """
    stages = [_stage_of(plan, profile) for plan in (first, second)]
    moves: dict[tuple[int, int], list[str]] = {}
    for name, stage in stages[0].items():
        if stages[1].get(name, stage) != stage:
            moves.setdefault((stage, stages[1][name]), []).append(name)
    compress = profile.graph.compress if profile else list
    return [MovedOperators(first=a, second=b, operators=tuple(compress(names))) for (a, b), names in moves.items()]


def _without_unit(name: str) -> str:
    for suffix in ("_bytes_per_s", "_bytes", "_s"):
        name = name.removesuffix(suffix)
    return name.replace("_", " ")


def _stage_of(plan: Plan, profile: Profile | None) -> dict[str, int]:
    stages: Sequence[Sequence[str]] = [stage.nodes for stage in plan.stages]
    if profile:
        stages = plan.stage_nodes(profile)
    return {name: s for s, names in enumerate(stages) for name in names}


def _content(artifact: Artifact) -> dict[str, Any]:
    """The fields of an artifact; the operators of a profile by name."""
    content = artifact.model_dump(mode="json")
    if isinstance(artifact, Profile):
        content["operators"] = {node.pop("name"): node for node in content["nodes"]}
    return content


def _fields(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (where it stands, value) of each field with a value of its own; a list of numbers of workers is one."""
    for name, value in content.items():
        if name in _NOT_COMPARED:
            continue
        if isinstance(value, list) and name != "workers":
            value = {f"[{number}]": entry for number, entry in enumerate(value)}
        where = f"{prefix}{name}" if name.startswith("[") or not prefix else f"{prefix}.{name}"
        if isinstance(value, Mapping):
            yield from _fields(value, where)
        else:
            yield where, value


def _position(field: str, parts: Sequence[str]) -> int:
    """Where the part of an artifact that a field is of stands in it."""
    part = re.split(r"[.\[]", field)[0]
    return parts.index(part) if part in parts else len(parts)


def _is_same(first: Any, second: Any) -> bool:
    if type(first) in (int, float) and type(second) in (int, float):
        return math.isclose(first, second, rel_tol=_ROUNDING)
    return bool(first == second)
