"""Arguments and options that several commands share, each defined once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

from pdtool.errors import UsageError

_KINDS = {"profile": ("profiles", "*.json", "pdtool profile"), "plan": ("plans", "*.yaml", "pdtool partition")}


def candidate(kind: str, given: str | None) -> str:
    """Return the path given, or else the only profile in `profiles/` or plan in `plans/`.

    Raises:
        UsageError: there is none, or there are several, which are listed.
    """
    if given:
        return given
    folder, pattern, maker = _KINDS[kind]
    paths = sorted(str(path) for path in Path(folder).glob(pattern))
    if not paths:
        raise UsageError(f"no {kind} is named and {folder}/ holds none", f"name one, or write one with `{maker}`")
    if len(paths) > 1:
        raise UsageError(f"no {kind} is named and {folder}/ holds {len(paths)}", f"name one of {', '.join(paths)}")
    return paths[0]


def file_name(name: str) -> str:
    """Make a file name of an artifact's name; a name in an artifact never leads to another folder."""
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", name).lstrip(".") or "unnamed"


def output(help: str) -> Callable[[Any], Any]:
    """Define `-o`, the file that a command writes."""
    return click.option("-o", "--output", metavar="PATH", help=help)


def topology(*, required: bool) -> Callable[[Any], Any]:
    """Define `--topology`, the sizes of a cluster's levels."""
    return click.option(
        "--topology",
        required=required,
        metavar="NxM",
        help="Workers: sizes of the nested levels, the outermost first; 4x4 is 4 servers of 4 devices.",
    )


def timeout(default: str) -> Callable[[Any], Any]:
    """Define `--timeout` of workers that wait for each other."""
    return click.option(
        "--timeout", default=default, show_default=True, metavar="TIME", help="How long a worker waits for another."
    )


as_json = click.option("--json", "as_json", is_flag=True, help="Print the artifact itself on stdout.")


def schedule(names: Sequence[str], default: str | None) -> Callable[[Any], Any]:
    """Define `--schedule`; with the default None a command keeps what the plan says."""
    auto = "; auto takes the fastest, flushing ones only with --microbatches" if "auto" in names else ""
    return click.option(
        "--schedule",
        type=click.Choice(names),
        default=default,
        show_default=default or "what the plan says",
        help="Order of work: 1f1b and 2bw never stop (old weights are kept); the others empty the pipeline to update"
        f"{auto}.",
    )


def weights(command: Callable[..., Any]) -> Callable[..., Any]:
    """Define `--weights` and `--update-every`, which belong to schedules without a flush."""
    for option in (
        click.option(
            "--update-every",
            type=click.IntRange(min=1, max=10_000),
            metavar="N",
            show_default="what the plan says",
            help="Minibatches in one update of every stage, without a flush.",
        ),
        click.option(
            "--weights",
            type=click.Choice(["stash", "vertical-sync", "none"]),
            show_default="what the plan says",
            help="Weights of a minibatch under 1f1b: those of its forward (stash), of its first stage's forward "
            "(vertical-sync), or whatever is newest (none).",
        ),
    ):
        command = option(command)
    return command


def microbatches(default: str) -> Callable[[Any], Any]:
    """Define `--microbatches`, the size of an update of a flushing schedule."""
    return click.option(
        "--microbatches",
        type=click.IntRange(min=1, max=10_000),
        metavar="N",
        show_default=default,
        default=None,
        help="Minibatches in one update of a flushing schedule.",
    )


def machines(command: Callable[..., Any]) -> Callable[..., Any]:
    """Define `--nnodes`, `--node-rank` and `--rdzv-endpoint`, for a launch over several machines."""
    for option in (
        click.option("--rdzv-endpoint", default="", metavar="HOST:PORT", help="Where the machines meet, on machine 0."),
        click.option(
            "--node-rank", type=click.IntRange(min=0), default=0, show_default=True, metavar="K", help="This machine."
        ),
        click.option(
            "--nnodes", type=click.IntRange(min=1), default=1, show_default=True, metavar="N", help="Machines."
        ),
    ):
        command = option(command)
    return command
