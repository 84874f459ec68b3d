"""`diff`: the differences between two plans, two profiles or two runs.

`differences` compares any two artifacts of one kind field by field, without names, digests and reasons.
`moved_operators` says which operators are in another stage, which the fields of two plans do not show.
"""

from __future__ import annotations

import math
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
_WITH_OWN_NAMES = {"operators", "metrics", "settings"}  # whose entries are named by the user
# Words for figures whose names say too little.
_IN_WORDS = {
    "predicted.bottleneck_s": "time, predicted",
    "predicted.simulated_s": "time, simulated",
    "predicted.data_parallel_s": "data parallelism's time",
    "predicted.data_parallel_fits": "whether data parallelism fits",
    "predicted.one_worker_s": "one worker's time",
    "predicted.throughput_samples_per_s": "samples/s of the plan",
    "predicted.gain_over_data_parallel": "times as fast as data parallelism",
    "predicted.samples_per_update": "samples per update",
    "predicted.data_parallel_samples_per_update": "data parallelism's samples per update",
    "predicted.traffic_bytes": "sent per minibatch",
    "throughput_samples_per_s": "samples/s, with fill and drain",
    "measured.bottleneck_s": "time, measured",
    "measured.throughput_samples_per_s": "samples/s, measured",
}
_WRITERS = {  # unit of a figure, by the end of its name; the first match
    "_samples_per_s": format_number,
    "_bytes_per_s": format_rate,
    "_bytes": format_bytes,
    "_s": format_seconds,
}
_ROUNDING = 1e-9  # sums taken in another order differ in the last digits
_Path = tuple[str | int, ...]  # names, and numbers in lists: ("stages", 0, "in_flight")


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

    If one of them cannot be used, the exit code is 3. Otherwise it is 0, even if they differ, unless you pass
    --exit-code.
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
        data |= {"differences": [one.as_data() for one in found], "moved": [asdict(one) for one in moved]}
        print_data(data)
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

    operators = _largest_first([one for one in found if one.is_of_operator])
    others = [one for one in found if not one.is_of_operator and not one.is_of_one_alone]
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
        totals[one.name] += sum(abs(value) for value in one.numbers)

    def share(one: FieldDifference) -> float:
        if len(one.numbers) < 2:
            return math.inf
        return abs(one.numbers[0] - one.numbers[1]) / totals[one.name]

    return sorted(operators, key=share, reverse=True)


def _percent(change: float | None) -> str:
    return "" if change is None else f"{change:+z.1%}"


@dataclass(frozen=True, kw_only=True)
class FieldDifference:
    """A field that differs.

    Attributes:
        path: where it is in the artifact.
        first, second: its values; None if an artifact does not have it.
    """

    path: _Path
    first: Any
    second: Any

    @property
    def field(self) -> str:
        """The path as text: `stages[0].in_flight`."""
        return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in self.path).removeprefix(".")

    @property
    def name(self) -> str:
        """The last name in the path, which shows the unit: `forward_s`."""
        return next(part for part in reversed(self.path) if isinstance(part, str))

    @property
    def is_of_operator(self) -> bool:
        """Whether it is a figure of an operator of a profile."""
        return self.path[0] == "operators"

    @property
    def change(self) -> float | None:
        """By which fraction the second figure is larger than the first; None for counts, and from zero."""
        values = (self.first, self.second)
        is_figure = any(type(value) is float for value in values) or self.name.endswith("_bytes")
        if not is_figure or not all(type(value) in (int, float) for value in values) or self.first <= 0:
            return None
        return float(self.second / self.first - 1)

    @property
    def numbers(self) -> list[float]:
        """Those of its two values that are numbers."""
        return [value for value in (self.first, self.second) if type(value) in (int, float)]

    @property
    def label(self) -> str:
        """The field in words: `stage 0 in flight`, `stage 0 memory`."""
        part = self._part
        if self.name.endswith("_by_epoch") and isinstance(self.path[-1], int):
            return f"{self.name.removesuffix('_by_epoch')} of epoch {self.path[-1] + 1}"
        return _IN_WORDS.get(self.field) or _without_unit(f"{part} {self.name}" if part else self.field)

    @property
    def is_of_one_alone(self) -> bool:
        """True if only one artifact has the field, and its value there is empty or zero: no replicas to average
        gradients with, no latency."""
        return bool(self._part) and None in (self.first, self.second) and not (self.first or self.second)

    @property
    def _part(self) -> str:
        """The stage or level that the field belongs to; "" if none."""
        match self.path:
            case ("stages", int(stage), _) | ("predicted", _, int(stage)):
                return f"stage {stage}"
            case "cluster", "levels", int(level), _:
                return f"level {level}"
        return ""

    def as_data(self) -> dict[str, Any]:
        """What --json prints of it."""
        return {"field": self.field, "first": self.first, "second": self.second, "change": self.change}

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
            if self.name.endswith(suffix):
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
    order = {part: position for position, part in enumerate(type(first).model_fields)}
    paths = sorted({**values[0], **values[1]}, key=lambda path: order.get(str(path[0]), len(order)))
    found = (FieldDifference(path=path, first=values[0].get(path), second=values[1].get(path)) for path in paths)
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
    for suffix in _WRITERS:
        name = name.removesuffix(suffix)
    return name.translate(str.maketrans("_.", "  "))


def _stage_of(plan: Plan, profile: Profile | None) -> dict[str, int]:
    stages = plan.stage_nodes(profile) if profile else [stage.nodes for stage in plan.stages]
    return {name: s for s, names in enumerate(stages) for name in names}


def _content(artifact: Artifact) -> dict[str, Any]:
    """The fields of an artifact, also one that its file leaves out; the operators of a profile by name."""
    from pdtool.artifacts.plan import Plan
    from pdtool.artifacts.profile import Node, Profile

    content = artifact.model_dump(mode="json")
    if isinstance(artifact, Plan):
        content["wire_dtype"] = artifact.wire_dtype
    if isinstance(artifact, Profile):
        zeros = {name: 0 for name, field in Node.model_fields.items() if field.default == 0}
        content["operators"] = {node.pop("name"): zeros | node for node in content["nodes"]}
    return content


def _fields(value: Any, path: _Path = ()) -> Iterator[tuple[_Path, Any]]:
    """Yield (path, value) of each field with a simple value; a list of worker numbers counts as one."""
    if isinstance(value, list) and path[-1] != "workers":
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        for name, entry in value.items():
            if name not in _NOT_COMPARED or (path and path[-1] in _WITH_OWN_NAMES):
                yield from _fields(entry, (*path, name))
    else:
        yield path, value


def _is_same(first: Any, second: Any) -> bool:
    if type(first) in (int, float) and type(second) in (int, float):
        return math.isclose(first, second, rel_tol=_ROUNDING)
    return bool(first == second)
