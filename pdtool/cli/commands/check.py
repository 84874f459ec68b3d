"""`check`: compute a plan's figures and certificate again."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from pdtool.cli import options
from pdtool.cli.console.terminal import show
from pdtool.errors import ArtifactError

if TYPE_CHECKING:
    from pdtool.artifacts.plan import Plan
    from pdtool.partition.checker.check import Finding

_MARKS = {True: "[green]✓[/green]", False: "[red]✗[/red]", None: "–"}


@click.command(epilog="\b\nExamples:\n  pdtool check plans/digits-3.yaml\n  pdtool check plans/digits-3.yaml --json")
@click.argument("plan", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print what was found as JSON on stdout.")
def check(plan: str | None, as_json: bool) -> None:
    """Compute PLAN's figures and certificate again, by other code.

    One line for each claim: the stages, the schedule, the memory, each figure, and that nothing easily found is faster
    than the lower bound.
    """
    from pdtool.cli.inputs import read
    from pdtool.partition.checker.check import Check

    path = options.candidate("plan", plan)
    chosen, profile = read(path)
    findings = list(Check(chosen, profile).findings())
    if as_json:
        click.echo(json.dumps({"plan": chosen.name, "findings": [asdict(one) for one in findings]}, indent=1))
    else:
        from rich.markup import escape
        from rich.text import Text

        lines = (f"{_MARKS[one.holds]} [bold]{one.claim}[/bold]: {escape(one.words)}" for one in findings)
        show(*(Text.from_markup(line) for line in lines), err=False)
    _judge(path, chosen, findings)


def _judge(path: str, plan: Plan, findings: Sequence[Finding]) -> None:
    """Raises ArtifactError for the first claim that does not hold."""
    failed = [one for one in findings if one.holds is False]
    if not failed:
        return
    more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
    if plan.edited:
        remedy = "codegen, simulate and run compute them again; `pdtool partition` makes a plan with a certificate"
    else:
        remedy = "do not rely on it; plan again with `pdtool partition`"
    raise ArtifactError(path, f"{failed[0].words}{more}", remedy, field=failed[0].field or failed[0].claim)
