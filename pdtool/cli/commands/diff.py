"""`diff`: the differences between two plans, two profiles or two runs.

`differences` compares any two artifacts of one kind field by field, without names, digests and reasons.
`moved_operators` says which operators are in another stage, which the fields of two plans do not show.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import click

from pdtool.cli.command_line import command
from pdtool.cli.terminal import print_data, show
from pdtool.errors import ArtifactError, UsageError, with_article
from pdtool.units import format_bytes, format_number, format_rate, format_seconds

if TYPE_CHECKING:
    from pdtool.artifacts.artifact import Artifact
    from pdtool.artifacts.plan import Plan
    from pdtool.artifacts.profile import Profile
    from pdtool.cli.table import Lines


_MAX_OPERATORS = 12  # listed operators of two profiles
_NOT_COMPARED = {"format", "tool_version", "digests", "sha256", "name", "asked", "why", "nodes", "plan_sha256", "proof"}
# Words for figures whose names say too little.
_IN_WORDS = {
    "predicted.bottleneck_s": "time by the formulas",
    "predicted.simulated_s": "time, simulated",
    "predicted.data_parallel_s": "data parallelism's time",
    "predicted.throughput_samples_per_s": "samples/s, predicted",
    "predicted.gain_over_data_parallel": "times as fast as data parallelism",
    "predicted.samples_per_update": "samples per update",
    "predicted.data_parallel_samples_per_update": "data parallelism's samples per update",
    "predicted.traffic_bytes": "sent per minibatch",
    "throughput_samples_per_s": "samples/s",
    "measured.bottleneck_s": "time, measured",
    "measured.throughput_samples_per_s": "samples/s, measured",
}
_OF_STAGE = r"(?P<what>stage)s\[(?P<number>\d+)\]\.(?P<name>\w+)"
_OF_LEVEL = r"cluster\.(?P<what>level)s\[(?P<number>\d+)\]\.(?P<name>\w+)"
_LISTED = r"predicted\.(?P<name>\w+)\[(?P<number>\d+)\]"
_WRITERS = {  # unit of a figure, by the end of its field; the first match
    "_samples_per_s": format_number,
    "_bytes_per_s": format_rate,
    "_bytes": format_bytes,
    "_s": format_seconds,
}
_ROUNDING = 1e-9  # sums taken in another order differ in the last digits


@command(
    epilog="\b\nExamples:\n  pdtool diff plans/mnist-2.yaml plans/mine.yaml\n"
    "  pdtool diff runs/mnist-2 runs/mnist-2.2 --json"
)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--exit-code", is_flag=True, help="Exit with 1 if they differ, and with 0 if they do not.")
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON on stdout.")
@click.pass_context
def diff(ctx: click.Context, first: str, second: str, exit_code: bool, as_json: bool) -> None:
    """Compare A and B, two files of the same kind.

    It compares the cluster, schedule, stages, operators and predictions of plans, the operators of profiles, and the
    measurements of runs. For an edited plan, it compares the edited version. Times are per minibatch. Names, digests
    and the reasons for a plan (`why`) are left out.

    Without --exit-code, the exit code is 0 even if they differ. In any case it is 3 if one of them cannot be used.
    """
    if first == second == "-":
        raise UsageError("A and B would both come from stdin", "name a file for one of them")
    a, b = _loaded(first), _loaded(second)
    if a.KIND != b.KIND:
        what = f"{first} is {with_article(a.KIND)} and {second} {with_article(b.KIND)}"
        raise UsageError(what, "name two files of the same kind")
    found, moved = differences(a, b), _moved(a, b, first)
    is_same = not found and not moved
    if as_json:
        data = {"kind": a.KIND, "a": first, "b": second, "is_same": is_same}
        data |= {"differences": [{**asdict(one), "change": one.change} for one in found]}
        print_data(data | {"moved": [asdict(one) for one in moved]})
    else:
        show(f"A: {first}{_config(a)}", f"B: {second}{_config(b)}", *_view(found, moved), err=False)
    if exit_code and not is_same:
        ctx.exit(1)


def _loaded(file: str) -> Artifact:
    """Read an artifact, and give an edited plan new figures; raises ArtifactError if that is impossible."""
    from pdtool.api.inputs import as_it_is
    from pdtool.artifacts import load_any

    artifact, fault = as_it_is(load_any(file), file)
    if fault:
        raise fault
    return artifact


def _config(artifact: Artifact) -> str:
    from pdtool.artifacts.plan import Plan

    if not isinstance(artifact, Plan):
        return ""
    return f": {artifact.config} on {artifact.cluster.topology}, schedule {artifact.schedule}"


def _moved(a: Artifact, b: Artifact, first: str) -> list[MovedOperators]:
    """The operators that are in another stage, if both are plans; `first` is the path of the first."""
    from pdtool.api.inputs import profile_of, was_made_from
    from pdtool.artifacts.plan import Plan

    if not isinstance(a, Plan) or not isinstance(b, Plan):
        return []
    try:
        profile = profile_of(a, first)
    except ArtifactError:
        return moved_operators(a, b, None)
    return moved_operators(a, b, profile if was_made_from(b, profile) else None)


def _view(found: list[FieldDifference], moved: list[MovedOperators]) -> Lines:
    """Show the fields that differ, only the largest changes of many operators, and the operators that moved."""
    from pdtool.cli.table import Table, abbreviated

    operators = _largest_first([one for one in found if one.field.startswith("operators.")])
    others = [one for one in found if one not in operators and not one.is_of_one_alone]
    listed = others + operators[:_MAX_OPERATORS]
    if not found and not moved:
        yield "no difference"
    if listed:
        rows = [[one.label, one.written(one.first), one.written(one.second), _percent(one.change)] for one in listed]
        yield Table(("", "A", "B", "change"), rows)
    if len(operators) > _MAX_OPERATORS:
        yield f"({len(operators) - _MAX_OPERATORS} more figures of operators differ less; --json has them all)"
    for one in moved:
        yield f"in stage {one.first} of A, in stage {one.second} of B: {abbreviated(one.operators)}"


def _largest_first(operators: Sequence[FieldDifference]) -> list[FieldDifference]:
    """Sort figures of operators by how much they differ: times as a share of the sum of such times, bytes of such
    bytes. One that is missing in a profile differs most."""
    totals: defaultdict[str, float] = defaultdict(float)
    for one in operators:
        totals[one.kind] += sum(abs(value) for value in one.numbers)

    def share(one: FieldDifference) -> float:
        if len(one.numbers) < 2:
            return math.inf
        return abs(one.numbers[0] - one.numbers[1]) / totals[one.kind]

    return sorted(operators, key=share, reverse=True)


def _percent(change: float | None) -> str:
    return "" if change is None else f"{change:+z.1%}"


@dataclass(frozen=True, kw_only=True)
class FieldDifference:
    """A field that differs.

    Attributes:
        field: its name, as `stages[0].in_flight`.
        first, second: its values; None if an artifact does not have it.
    """

    field: str
    first: Any
    second: Any

    @property
    def change(self) -> float | None:
        """By which fraction the second figure is larger than the first; None for counts, and from zero."""
        values = (self.first, self.second)
        is_figure = any(type(value) is float for value in values) or self._name.endswith("_bytes")
        if not is_figure or not all(type(value) in (int, float) for value in values) or self.first <= 0:
            return None
        return float(self.second / self.first - 1)

    @property
    def numbers(self) -> list[float]:
        """Those of its two values that are numbers."""
        return [value for value in (self.first, self.second) if type(value) in (int, float)]

    @property
    def kind(self) -> str:
        """The field without the operator that it belongs to: `forward_s`."""
        return self._name.rpartition(".")[2]

    @property
    def label(self) -> str:
        """The field in words: `stage 0 in flight`, `stage 0 memory`."""
        if self.field in _IN_WORDS:
            return _IN_WORDS[self.field]
        if found := re.fullmatch(_OF_STAGE, self.field) or re.fullmatch(_OF_LEVEL, self.field):
            return f"{found['what']} {found['number']} {_without_unit(found['name'])}"
        if found := re.fullmatch(_LISTED, self.field):
            return f"stage {found['number']} {_without_unit(found['name'])}"
        return _without_unit(self.field.replace(".", " "))

    @property
    def is_of_one_alone(self) -> bool:
        """True if only one artifact has the field, and its value there is empty or zero: no replicas to average
        gradients with, no latency."""
        is_of_part = any(re.fullmatch(pattern, self.field) for pattern in (_OF_STAGE, _OF_LEVEL, _LISTED))
        return is_of_part and None in (self.first, self.second) and not (self.first or self.second)

    @property
    def _name(self) -> str:
        """The last name in the field, which shows the unit."""
        return self.field.rpartition("[")[0] if self.field.endswith("]") else self.field

    def written(self, value: Any) -> str:
        """A value of the field, with its unit."""
        if value is None:
            return "–"
        if isinstance(value, (list, tuple)):
            from pdtool.cli.artifact_views import ranges

            return ranges(value)
        if type(value) not in (int, float):
            return str(value)
        for suffix, write in _WRITERS.items():
            if self._name.endswith(suffix):
                return write(value)
        return format_number(value) if isinstance(value, float) else str(value)


@dataclass(frozen=True, kw_only=True)
class MovedOperators:
    """Operators in stage `first` of one plan and in stage `second` of the other."""

    first: int
    second: int
    operators: tuple[str, ...]


def differences(first: Artifact, second: Artifact) -> list[FieldDifference]:
    """Return the fields that differ, in the artifact's order.

    Leave out names, digests and reasons, and for plans the operators of the stages (see `moved_operators`).
    """
    values = [dict(_fields(_content(artifact))) for artifact in (first, second)]
    parts = list(type(first).model_fields)
    fields = sorted({**values[0], **values[1]}, key=lambda field: _position(field, parts))
    found = (FieldDifference(field=field, first=values[0].get(field), second=values[1].get(field)) for field in fields)
    return [difference for difference in found if not _is_same(difference.first, difference.second)]


def moved_operators(first: Plan, second: Plan, profile: Profile | None) -> list[MovedOperators]:
    """Return the operators whose stage number differs.

    Args:
        profile: the profile of both plans, which lists the operators of a module; None: compare names unchanged.
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
    stages = plan.stage_nodes(profile) if profile else [stage.nodes for stage in plan.stages]
    return {name: s for s, names in enumerate(stages) for name in names}


def _content(artifact: Artifact) -> dict[str, Any]:
    """The fields of an artifact, also one that its file leaves out; the operators of a profile by name."""
    from pdtool.artifacts.plan import Plan
    from pdtool.artifacts.profile import Profile

    content = artifact.model_dump(mode="json")
    if isinstance(artifact, Plan):
        content["wire_dtype"] = artifact.wire_dtype
    if isinstance(artifact, Profile):
        content["operators"] = {node.pop("name"): node for node in content["nodes"]}
    return content


def _fields(content: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of each field with a simple value; a list of worker numbers counts as one."""
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
    """Return the position of a field's part in the artifact."""
    part = re.split(r"[.\[]", field)[0]
    return parts.index(part) if part in parts else len(parts)


def _is_same(first: Any, second: Any) -> bool:
    if type(first) in (int, float) and type(second) in (int, float):
        return math.isclose(first, second, rel_tol=_ROUNDING)
    return bool(first == second)
