"""Arguments and options that several commands share, each defined once."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import click

from pdtool.errors import UsageError, suggestion
from pdtool.machines import parse_endpoint
from pdtool.schedule import POLICIES, RIVALS
from pdtool.units import parse_seconds

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

PLANNED = "what the plan says"  # what an option that is not given stands for
_MAX_COUNT = 10**9
_MAX_MINIBATCHES = 10_000  # in an update; more is a slip
_MIN_TIMEOUT_S = 0.001
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


def option_values(command: click.Command, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all options of a command: those given, read as on the command line, and its defaults.

    Args:
        given: by parameter, as `batch_size`; None stands for the default.

    Raises:
        TypeError: the command has no such option.
        UsageError: a value is not one that the option takes.
    """
    context = command.make_context(command.name, ["-"] * any(isinstance(p, click.Argument) for p in command.params))
    params = {param.name: param for param in command.params if isinstance(param, click.Option)}
    values = {name: value for name, value in context.params.items() if name in params}
    for name, value in given.items():
        if name not in values:
            close = difflib.get_close_matches(name, values, n=1)
            hint = f"did you mean {close[0]}?" if close else f"choose of {', '.join(values)}"
            raise TypeError(f"{command.name}() has no option {name!r}; {hint}")
        if isinstance(params[name].type, click.types.IntParamType) and not _is_whole(value):
            raise UsageError(f"{name}={value!r} is not a whole number", "give one, as 8")
        try:
            values[name] = values[name] if value is None else params[name].process_value(context, value)
        except click.ClickException as error:
            raise UsageError(f"{name}={value!r}: {error.format_message()}") from error
    return values


def _is_whole(value: Any) -> bool:
    """Whether a value can be that of a counting option; click itself reads 2.7 as 2, and True as 1."""
    return value is None or (isinstance(value, (str, Integral)) and not isinstance(value, bool))


def file_name(name: str) -> str:
    """Make a file name of an artifact's name; a name in an artifact never leads to another folder."""
    return re.sub(r"[^A-Za-z0-9_.+-]", "_", name).lstrip(".") or "unnamed"


def count(
    *names: str, help: str, default: int | None = None, unset: str = "", within: click.IntRange | None = None
) -> Decorator:
    """Define an option that takes a whole number.

    Args:
        unset: what a command takes without a default, in words.
        within: the numbers allowed; from 1 to a billion if not given.
    """
    kind = within or click.IntRange(1, _MAX_COUNT)
    return click.option(*names, type=kind, default=default, show_default=unset or True, metavar="N", help=help)


def choice(*names: str, choices: Sequence[str], help: str, unset: str = "") -> Decorator:
    """Define an option that takes one of `choices`, and the first of them where it is not given.

    Args:
        unset: what a command takes instead of the first, in words.
    """
    kind, default = click.Choice(choices), None if unset else choices[0]
    return click.option(*names, type=kind, default=default, show_default=unset or True, help=help)


def output(help: str) -> Decorator:
    """Define `-o`, the file that a command writes."""
    return click.option("-o", "--output", metavar="PATH", callback=_path, help=help)


def _path(ctx: click.Context, parameter: click.Parameter, text: str | None) -> str | None:
    """Refuse an empty path, such as that of a variable that is not set; raises UsageError."""
    if text == "":
        raise UsageError(f"{parameter.opts[0]} is empty", "name a file or folder, or leave the option out")
    return text


def topology(*, required: bool) -> Decorator:
    """Define `--topology`, the sizes of a cluster's levels."""
    help = "Workers: sizes of the nested levels, the outermost first; 4x4 is 4 servers of 4 devices."
    return click.option("--topology", required=required, metavar="NxM", help=help)


def device(help: str) -> Decorator:
    """Define `--device` of commands that compute on this machine."""
    return choice("--device", choices=("auto", "cpu", "cuda"), help=help)


def timeout(default: str) -> Decorator:
    """Define `--timeout` of workers, and of machines, that wait for each other."""
    help = "How long a worker or machine waits for another."
    return click.option("--timeout", default=default, callback=_timeout, metavar="TIME", help=help)


def _timeout(ctx: click.Context, parameter: click.Parameter, text: str) -> str:
    """Check a `--timeout`, and return it as it is; raises UsageError."""
    if parse_seconds(text) < _MIN_TIMEOUT_S:
        raise UsageError(f"--timeout {text} leaves no time to answer", f"give {_MIN_TIMEOUT_S:g}s or more, as 60s")
    return text


model = click.option("--model", metavar="FILE", show_default=PLANNED, help="Model file, when it has moved since.")


def settings(help: str) -> Decorator:
    """Define `--set`, settings of the functions of model.py."""
    return click.option("--set", "model_settings", multiple=True, metavar="NAME=VALUE", help=help)


target = click.option(
    "--target",
    metavar="METRIC<=VALUE",
    help="Stop when the validation reaches it, as 'nll<=4' or 'accuracy>=0.98' (also <, > and =, where = means at most "
    "for loss and perplexity, else at least); exit with 6 when it does not.",
)
seed = click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, help="Fixes everything drawn.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print the artifact itself on stdout.")


def schedule(names: Sequence[str], *, unset: str = "") -> Decorator:
    """Define `--schedule`, by default the first of `names`, or what `unset` says."""
    help = "Order of work: 1f1b and 2bw never stop (old weights are kept); the others empty the pipeline to update"
    auto = "; auto takes the fastest, flushing ones only with --microbatches" if "auto" in names else ""
    return choice("--schedule", choices=names, help=f"{help}{auto}.", unset=unset)


def against(default: str) -> Decorator:
    """Define `--against`, the rivals of a plan."""
    help = "Compare with the best plans of these strategies of `pdtool partition`"
    others = ", ".join(name for name in RIVALS if name not in default.split(","))
    return click.option(
        "--against",
        default=default,
        callback=_rivals,
        metavar="STRATEGY,...",
        help=f"{help}; also {others}; '' is none.",
    )


def _rivals(ctx: click.Context, parameter: click.Parameter, text: str) -> tuple[str, ...]:
    """Split the names of strategies; raises UsageError for one that no plan is compared with."""
    names = tuple(dict.fromkeys(filter(None, text.split(","))))
    if unknown := [name for name in names if name not in RIVALS]:
        remedy = f"{suggestion(unknown[0], RIVALS)}choose of {', '.join(RIVALS)}"
        raise UsageError(f"--against {unknown[0]!r} is no strategy to compare with", remedy)
    return names


def microbatches(unset: str) -> Decorator:
    """Define `--microbatches`, the size of an update of a flushing schedule."""
    help = "Minibatches in one update of a flushing schedule."
    return count("--microbatches", help=help, unset=unset, within=click.IntRange(1, _MAX_MINIBATCHES))


def weights(command: Callable[..., Any]) -> Callable[..., Any]:
    """Define `--weights` and `--update-every`, which belong to schedules without a flush."""
    help = "Minibatches in one update of every stage, without a flush."
    command = count("--update-every", help=help, unset=PLANNED, within=click.IntRange(1, _MAX_MINIBATCHES))(command)
    help = (
        "Weights of a minibatch under 1f1b: those of its forward (stash), of its first stage's forward "
        "(vertical-sync), or whatever is newest (none)."
    )
    return choice("--weights", choices=POLICIES["1f1b"], help=help, unset=PLANNED)(command)


def _checked_endpoint(context: click.Context, parameter: click.Parameter, endpoint: str) -> str:
    if endpoint:
        parse_endpoint(endpoint)
    return endpoint


def machines(command: Callable[..., Any]) -> Callable[..., Any]:
    """Define `--nnodes`, `--node-rank` and `--rdzv-endpoint`, for a launch over several machines."""
    for option in (
        click.option(
            "--rdzv-endpoint",
            default="",
            show_default=False,
            metavar="HOST:PORT",
            callback=_checked_endpoint,
            help="Where the machines meet, on machine 0.",
        ),
        click.option("--node-rank", type=click.IntRange(0, _MAX_COUNT), default=0, metavar="K", help="This machine."),
        count("--nnodes", help="Machines.", default=1),
    ):
        command = option(command)
    return command
