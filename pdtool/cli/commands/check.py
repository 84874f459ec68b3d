"""`check`: compute a plan's figures and certificate again, or say which of its files are stale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdtool.cli.click_options import option
from pdtool.cli.command_line import command
from pdtool.cli.terminal import note, print_data, show
from pdtool.errors import ArtifactError, StaleError, UsageError, printable

if TYPE_CHECKING:
    from rich.text import Text

    from pdtool.artifacts.plan import Plan
    from pdtool.artifacts.profile import Profile
    from pdtool.planner.choice.plan_check import Finding

_EDITED = "# edited by hand\n"  # `pdtool partition` overwrites no plan with a comment
_MARKS = {True: ("✓", "green"), False: ("✗", "red"), None: ("–", "")}


@command(epilog="\b\nExamples:\n  pdtool check plans/mnist-2.yaml\n  pdtool check plans/mnist-2.yaml --update")
@click.argument("plan", required=False)
@option("--fresh", in_file=False, is_flag=True, help="Check only whether the files still belong to the current model.")
@option(
    "--update",
    in_file=False,
    is_flag=True,
    help="Write the new figures into the file of a plan, if you edited it or profiled again. Comments and order stay.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the findings as JSON on stdout.")
def check(plan: str | None, fresh: bool, update: bool, as_json: bool) -> None:
    """Compute PLAN's figures and certificate again.

    Prints one line for each check: the stages, the schedule, the memory, each figure, and the lower bound, for which it
    searches again. For an edited plan, it computes the figures of the edited version.

    Without PLAN, it takes the only plan in plans/.

    With --fresh, trace the current model and compare it with the profile, the plan and the stage files. Exit with 3 if
    one is stale.
    """
    from pdtool.api.inputs import given_or_only
    from pdtool.files import quoted

    path = given_or_only("plan", plan)
    if fresh and update:
        raise UsageError("--fresh and --update cannot be combined", "pass only one")
    if fresh:
        _check_freshness(path, as_json)
        return
    plan_there, profile = _read(path, update)
    _check_claims(path, plan_there, profile, as_json)
    if update:
        _update(path, plan_there, profile)
    elif plan_there.model or profile.model:
        note(f"the model was not checked: `pdtool check {quoted(path)} --fresh` compares it with the plan")


def _read(path: str, is_to_be_updated: bool) -> tuple[Plan, Profile]:
    """Read a plan and its profile; for --update, also a profile that was made again since."""
    from pdtool.api.inputs import of_profile_as_it_is, profile_of, read_profile, was_made_from
    from pdtool.artifacts.plan import Plan

    plan = Plan.load(path, may_be_pipe=True)
    if is_to_be_updated and not was_made_from(plan, profile := read_profile(plan, path)):
        return of_profile_as_it_is(plan, profile, path), profile
    return plan, profile_of(plan, path)


def _check_claims(path: str, plan: Plan, profile: Profile, as_json: bool) -> None:
    """Print whether each claim of the plan is true; raise ArtifactError for the first false one."""
    from pdtool.planner.choice.plan_check import check_plan

    false = _print(plan, list(check_plan(plan, profile)), as_json)
    if not false:
        return
    remedy = "fix it by hand or" if plan.edited else "do not rely on it:"
    remedy += " plan again with `pdtool partition`"
    words = false[0].words.partition("\n")[0]  # without the schedule's actions, which were printed
    raise ArtifactError(path, f"{words}{_and_more(false)}", remedy, field=false[0].field or false[0].claim)


def _update(path: str, plan: Plan, profile: Profile) -> None:
    """Write the figures of an edited plan into its file.

    Raises:
        UsageError: the plan is not a file, or is written in braces, as JSON.
    """
    from pdtool.artifacts.text_formats import FormatError, has_comments
    from pdtool.files import read_text, write_atomically
    from pdtool.planner.choice.plan_figures import refresh

    if path == "-":
        raise UsageError("--update writes into a file, but - is stdin", "name the plan's file")
    text = read_text(path)
    if not plan.edited:
        note(f"the figures in {path} are up to date: nothing to update")
        return
    mark = "" if has_comments(text) else _EDITED
    try:
        if text.startswith("{"):
            raise FormatError("JSON has no comments")
        updated = refresh(plan, profile).updated_text(mark + text)
    except FormatError:
        what = f"--update writes into YAML with a line for each key, but {path} is written in braces"
        raise UsageError(what, "write its keys on lines of their own, without braces") from None
    write_atomically(Path(path), updated)
    note(f"updated the figures in {path}")


def _check_freshness(path: str, as_json: bool) -> None:
    """Print which of the plan's files are stale; raise StaleError for the first stale one."""
    from pdtool.api.inputs import read_profile
    from pdtool.api.staleness import freshness_findings
    from pdtool.artifacts.plan import Plan

    plan = Plan.load(path, may_be_pipe=True)
    stale = _print(plan, list(freshness_findings(path, plan, read_profile(plan, path))), as_json)
    if stale:
        raise StaleError(path, f"{stale[0].claim}: {stale[0].words}{_and_more(stale)}", stale[0].remedy)


def _and_more(findings: Sequence[Finding]) -> str:
    return f" (and {len(findings) - 1} more)" if len(findings) > 1 else ""


def _print(plan: Plan, findings: Sequence[Finding], as_json: bool) -> list[Finding]:
    """Print the findings, and return the false ones."""
    if as_json:
        print_data({"plan": plan.name, "findings": [asdict(finding) for finding in findings]})
    else:
        show(*map(_line, findings), err=False)
    return [finding for finding in findings if finding.holds is False]


def _line(finding: Finding) -> Text:
    from rich.text import Text

    mark, claim = _MARKS[finding.holds], (printable(f" {finding.claim}"), "bold")
    return Text.assemble(mark, claim, printable(f": {finding.words}"))
