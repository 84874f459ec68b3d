"""A project and its shell: `init` writes a first model.py, `makefile` names the rules for Make, `schema` prints what an
artifact holds, `completion` makes a shell complete commands, `help` explains one.
"""

from __future__ import annotations

from pathlib import Path

import click
from click.shell_completion import get_completion_class

from pdtool.cli.click_options import option
from pdtool.cli.command_line import command
from pdtool.cli.terminal import note, print_data, write_stdout
from pdtool.errors import UsageError, suggestion

STARTER = Path(__file__).parent.parent / "starter"
_FILES = {  # path in the user's folder -> its initial text
    "model.py": "model.py.in",
    "pdtool.toml": "pdtool.toml.in",
    "Makefile": "Makefile.in",
    ".gitignore": "gitignore.in",
    ".github/workflows/pdtool.yml": "workflow.yml",
}
RULES = STARTER / "pdtool.mk"
KINDS = ("profile", "device", "cluster", "plan", "bundle", "report", "run", "emulation", "checkpoint")


@command(
    epilog="\b\nExamples:\n  pdtool completion bash >> ~/.bashrc\n"
    "  pdtool completion fish > ~/.config/fish/completions/pdtool.fish"
)
@click.argument("shell", type=click.Choice(("bash", "zsh", "fish")))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script that completes pdtool's commands in SHELL."""
    completion_class = get_completion_class(shell)
    assert completion_class  # the choices are click's own
    write_stdout(completion_class(ctx.find_root().command, {}, "pdtool", "_PDTOOL_COMPLETE").source() + "\n")


@command("help", epilog="\b\nExamples:\n  pdtool help\n  pdtool help partition")
@click.argument("name", required=False, metavar="[COMMAND]")
@click.pass_context
def help_(ctx: click.Context, name: str | None) -> None:
    """Print the help of COMMAND, or list all commands."""
    root = ctx.find_root()
    group = root.command
    assert isinstance(group, click.Group)
    if name is None:
        write_stdout(group.get_help(root) + "\n")
        return
    if name not in group.commands:
        remedy = suggestion(name, group.commands, "`pdtool help` lists the commands")
        raise UsageError(f"there is no command {name!r:.80}", remedy)
    with click.Context(group.commands[name], info_name=name, parent=root) as sub:
        write_stdout(group.commands[name].get_help(sub) + "\n")


@command(epilog="\b\nExamples:\n  pdtool init\n  pdtool init myproject")
@click.argument("folder", type=click.Path(path_type=Path, file_okay=False), default=".", required=False)
@option("--force", in_file=False, is_flag=True, help="Replace existing files.")
def init(folder: Path, force: bool) -> None:
    """Start a project with a model.py that trains as it is.

    Writes into FOLDER, by default the current one: a model.py that explains every function, a pdtool.toml with defaults
    for the commands, a Makefile, a .gitignore, and a job for GitHub Actions. Keeps existing files.
    """
    from pdtool.files import quoted, write_atomically

    for name, starter in _FILES.items():
        path = folder / name
        if path.exists() and not force:
            note(f"kept the existing {path} (--force replaces it)")
            continue
        write_atomically(path, (STARTER / starter).read_text(encoding="utf-8"))
        note(f"wrote {path}")
    where = "" if folder == Path() else f"cd {quoted(folder)} && "
    note(f"next: {where}pdtool train model.py")


@command(
    epilog="\b\nExamples:\n  pdtool makefile\n  pdtool makefile -v\n"
    "\n\b\nIn a shell, and in a Makefile of your own:\n"
    "  make -f $(pdtool makefile) plans/mymodel-2.yaml\n  include $(shell pdtool makefile)"
)
def makefile() -> None:
    """Print the path of pdtool's rules for make.

    The rules make profiles/NAME.json, plans/NAME-TOPOLOGY.yaml, the stage files and the run from any NAME.py, and
    make again only what is stale. Comments at the top of the file explain the variables.
    """
    write_stdout(f"{RULES}\n")


@command(epilog="\b\nExamples:\n  pdtool schema plan\n  pdtool schema profile > profile.schema.json")
@click.argument("kind", type=click.Choice(KINDS))
def schema(kind: str) -> None:
    """Print the JSON Schema of an artifact."""
    from pdtool.artifacts import artifact_class

    content = {"$schema": "https://json-schema.org/draft/2020-12/schema", **artifact_class(kind).model_json_schema()}
    print_data(content, indent=2)
