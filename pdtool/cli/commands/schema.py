"""`schema`: the JSON Schema of an artifact, for editors and validators."""

from __future__ import annotations

import json

import click

from pdtool.cli.command_line.help_sections import command
from pdtool.cli.console.terminal import write_stdout

KINDS = ("profile", "device", "cluster", "plan", "bundle", "report", "run", "emulation", "checkpoint")


@command(epilog="\b\nExamples:\n  pdtool schema plan\n  pdtool schema profile > profile.schema.json")
@click.argument("kind", type=click.Choice(KINDS))
def schema(kind: str) -> None:
    """Print the JSON Schema of an artifact."""
    from pdtool.artifacts import artifact_class

    content = {"$schema": "https://json-schema.org/draft/2020-12/schema", **artifact_class(kind).model_json_schema()}
    write_stdout(json.dumps(content, indent=2) + "\n")
