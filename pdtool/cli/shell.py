"""`schema` and `completion`: what editors and shells ask for."""

from __future__ import annotations

import json

import click

KINDS = ("profile", "device", "cluster", "plan", "bundle", "report")


@click.command(epilog="\b\nExamples:\n  pdtool schema plan\n  pdtool schema profile > profile.schema.json")
@click.argument("kind", type=click.Choice(KINDS))
def schema(kind: str) -> None:
    """Print the JSON Schema of an artifact."""
    from pdtool.cli.show import artifact_class

    content = {"$schema": "https://json-schema.org/draft/2020-12/schema", **artifact_class(kind).model_json_schema()}
    click.echo(json.dumps(content, indent=2))


@click.command(
    epilog="\b\nExamples:\n  pdtool completion bash >> ~/.bashrc\n"
    "  pdtool completion fish > ~/.config/fish/completions/pdtool.fish"
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes pdtool's commands in SHELL."""
    from click.shell_completion import get_completion_class

    found = get_completion_class(shell)
    assert found  # the choices are click's own
    click.echo(found(ctx.find_root().command, {}, "pdtool", "_PDTOOL_COMPLETE").source())
