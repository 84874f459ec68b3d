"""`diff`: what differs between two plans, two profiles or two runs."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.terminal import show, write_stdout
from pdtool.errors import ArtifactError, UsageError, with_article

if TYPE_CHECKING:
    from pdtool.artifacts.artifact import Artifact
    from pdtool.artifacts.plan import Plan
    from pdtool.artifacts.profile import Profile
    from pdtool.cli.console.table import Lines
    from pdtool.cli.plans.differences import FieldDifference, MovedOperators

_MAX_OPERATORS = 12  # of two profiles that are listed


@command(
    epilog="\b\nExamples:\n  pdtool diff plans/digits-3.yaml plans/mine.yaml\n"
    "  pdtool diff runs/digits-3 runs/digits-3.2 --json"
)
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option("--exit-code", is_flag=True, help="Exit with 1 where they differ, and with 0 only where they do not.")
@click.option("--json", "as_json", is_flag=True, help="Print the differences as JSON on stdout.")
@click.pass_context
def diff(ctx: click.Context, first: str, second: str, exit_code: bool, as_json: bool) -> None:
    """Print what differs between A and B, two artifacts of one kind.

    Of plans: cluster, schedule, stages and what they hold, predicted times and memory; a plan that was edited by hand
    is compared as it is now. Of profiles: the operators. Of runs: what was measured. Times are per minibatch. Names,
    digests and reasons are left out.

    The exit code is 0 whether they differ or not, but for --exit-code; 3 where one of them cannot be used.
    """
    from pdtool.cli.plans.differences import differences

    a, b = _loaded(first), _loaded_beside(second, first)
    if a.KIND != b.KIND:
        raise UsageError(
            f"{first} is {with_article(a.KIND)} and {second} {with_article(b.KIND)}", "name two artifacts of one kind"
        )
    found, moved = differences(a, b), _moved(a, b, first, second)
    is_same = not found and not moved
    if as_json:
        data = {"kind": a.KIND, "a": first, "b": second, "is_same": is_same}
        data |= {"differences": [{**asdict(one), "change": one.change} for one in found]}
        write_stdout(json.dumps(data | {"moved": [asdict(one) for one in moved]}, indent=1) + "\n")
    else:
        show(f"A: {first}{_config(a)}", f"B: {second}{_config(b)}", *_view(found, moved), err=False)
    if exit_code and not is_same:
        ctx.exit(1)


def _loaded(file: str) -> Artifact:
    """Read an artifact, a plan edited by hand as it is now; raises ArtifactError where it cannot be."""
    from pdtool.artifacts import load_any
    from pdtool.cli.plans.edited_plan import as_it_is

    artifact, fault = as_it_is(load_any(file), file)
    if fault:
        raise fault
    return artifact


def _loaded_beside(file: str, other: str) -> Artifact:
    if file == other == "-":
        raise UsageError("A and B would both come from stdin", "name a file for one of them")
    return _loaded(file)


def _config(artifact: Artifact) -> str:
    from pdtool.artifacts.plan import Plan

    if not isinstance(artifact, Plan):
        return ""
    return f": {artifact.config} on {artifact.cluster.cluster().topology}, schedule {artifact.schedule}"


def _moved(a: Artifact, b: Artifact, first: str, second: str) -> list[MovedOperators]:
    """The operators that are in another stage, where both are plans."""
    from pdtool.artifacts.plan import Plan
    from pdtool.cli.plans.differences import moved_operators

    if not isinstance(a, Plan) or not isinstance(b, Plan):
        return []
    return moved_operators(a, b, _common_profile(a, b, first, second))


def _common_profile(a: Plan, b: Plan, first: str, second: str) -> Profile | None:
    """The profile that both plans were made from; None where it is not one, or cannot be read."""
    from pdtool.cli.inputs import profile_of, was_made_from

    try:
        profile = profile_of(a, first)
    except ArtifactError:
        return None
    return profile if was_made_from(b, profile) else None


def _view(found: list[FieldDifference], moved: list[MovedOperators]) -> Lines:
    """Show the fields that differ, of many operators the largest changes, and the operators that are elsewhere."""
    from pdtool.cli.console.table import abbreviated, table

    operators = sorted((one for one in found if one.field.startswith("operators.")), key=_size, reverse=True)
    others = [one for one in found if one not in operators and not one.is_of_one_alone]
    listed = others + operators[:_MAX_OPERATORS]
    if not found and not moved:
        yield "no difference"
    if listed:
        rows = [[one.label, one.written(one.first), one.written(one.second), _percent(one.change)] for one in listed]
        yield table(("", "A", "B", "change"), rows)
    if len(operators) > _MAX_OPERATORS:
        yield f"({len(operators) - _MAX_OPERATORS} more figures of operators differ less; --json has them all)"
    for one in moved:
        yield f"in stage {one.first} of A, in stage {one.second} of B: {abbreviated(one.operators)}"


def _size(difference: FieldDifference) -> float:
    """How much a figure of an operator differs; one that only one profile has differs most."""
    values = (difference.first, difference.second)
    return abs(values[0] - values[1]) if all(type(value) in (int, float) for value in values) else float("inf")


def _percent(change: float | None) -> str:
    return "" if change is None else f"{change:+.1%}"
