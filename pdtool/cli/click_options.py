"""The options of commands as click has them: those that several commands share are defined here, each once.

What an option takes, and its default, are those of its field in pdtool/options.py where a function of the API has it,
too. Here it gets its flags and its help.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from click.core import ParameterSource

from pdtool import options as values
from pdtool.options import RunOptions, reader
from pdtool.schedule import ONE_F_ONE_B, RIVALS, schedule_names

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]

PLANNED = "what the plan says"  # what an option that is not given stands for
ASKED_FOR = (ParameterSource.COMMANDLINE, ParameterSource.DEFAULT_MAP, ParameterSource.ENVIRONMENT)
_NOT_OF_A_FILE = {"output", "as_json", "if_stale"}  # options that say nothing of what stands in it


def asked_for(context: click.Context) -> dict[str, Any]:
    """Return the options of a command that were given, wherever."""
    names = {param.name for param in context.command.params if isinstance(param, click.Option)} - _NOT_OF_A_FILE
    given = {name: value for name, value in context.params.items() if name in names}
    return {name: value for name, value in given.items() if context.get_parameter_source(name) in ASKED_FOR}


def count(
    *names: str,
    help: str,
    of: type[Any] | None = None,
    default: int | None = None,
    unset: str = "",
    metavar: str | None = "N",
) -> Decorator:
    """Define an option that takes a whole number.

    Args:
        of: the options of whose field of this name it is; None: a number from 1 to a billion.
        default: of an option without a field.
        unset: what a command takes without a default, in words.
    """
    within = reader(of, _parameter(names)) if of else values.Count()
    default = getattr(of, _parameter(names)) if of else default
    kind = click.IntRange(within.least, within.most)
    return click.option(*names, type=kind, default=default, show_default=unset or True, metavar=metavar, help=help)


def choice(*names: str, of: type[Any], help: str, unset: str = "") -> Decorator:
    """Define an option that takes one of the names of its field in `of`.

    Args:
        unset: what a command takes without a default, in words.
    """
    kind, default = click.Choice(reader(of, _parameter(names)).names), getattr(of, _parameter(names))
    return click.option(*names, type=kind, default=default, show_default=unset or True, help=help)


def text(*names: str, of: type[Any], **shown: Any) -> Decorator:
    """Define an option that takes a text, which its field in `of` reads.

    Args:
        shown: of click.option: `help`, `metavar`, `default`, `show_default`, `type`.
    """
    read = reader(of, _parameter(names))

    def callback(ctx: click.Context, parameter: click.Parameter, given: Any) -> Any:
        return None if given is None else read(parameter.opts[0], given)

    return click.option(*names, callback=callback, **shown)


def _parameter(names: Sequence[str]) -> str:
    """Return the name of an option's parameter, as click does: `max_cuts` of ("--cuts", "max_cuts")."""
    return next((name for name in names if name.isidentifier()), names[-1].lstrip("-").replace("-", "_"))


def output(help: str) -> Decorator:
    """Define `-o`, the file or folder that a command writes."""
    return text("-o", "--output", of=RunOptions, metavar="PATH", help=help)


def topology(*, required: bool) -> Decorator:
    """Define `--topology`, the sizes of a cluster's levels."""
    help = "Workers: sizes of the nested levels, the outermost first; 4x4 is 4 servers of 4 devices."
    return click.option("--topology", required=required, metavar="NxM", help=help)


def device(help: str) -> Decorator:
    """Define `--device` of commands that compute on this machine."""
    return choice("--device", of=RunOptions, help=help)


def timeout(default: str = RunOptions.timeout) -> Decorator:
    """Define `--timeout` of workers, and of machines, that wait for each other."""
    help = "How long a worker or machine waits for another."
    return text("--timeout", of=RunOptions, default=default, metavar="TIME", help=help)


model = click.option("--model", metavar="FILE", show_default=PLANNED, help="Model file, when it has moved since.")


def settings(help: str) -> Decorator:
    """Define `--set`, settings of the functions of model.py."""
    return click.option("--set", "model_settings", multiple=True, metavar="NAME=VALUE", help=help)


target = text(
    "--target",
    of=RunOptions,
    metavar="METRIC<=VALUE",
    help="Stop when the validation reaches it, as 'nll<=4' or 'accuracy>=0.98' (also <, > and =, where = means at most "
    "for loss and perplexity, else at least); exit with 6 when it does not.",
)
seed = count("--seed", of=RunOptions, metavar=None, help="Fixes everything drawn.")
as_json = click.option("--json", "as_json", is_flag=True, help="Print the artifact itself on stdout.")


def schedule(of: type[Any], *, unset: str) -> Decorator:
    """Define `--schedule`, by default what `unset` says."""
    running = schedule_names(lambda kind: not kind.flushes, "and")
    help = f"Order of work: {running} never stop (old weights are kept); the others empty the pipeline to update"
    has_auto = "auto" in reader(of, "schedule").names
    auto = "; auto takes the fastest, flushing ones only with --microbatches" if has_auto else ""
    return choice("--schedule", of=of, help=f"{help}{auto}.", unset=unset)


def against(of: type[Any]) -> Decorator:
    """Define `--against`, the rivals of a plan."""
    help = "Compare with the best plans of these strategies of `pdtool partition`"
    default = of.against
    others = ", ".join(name for name in RIVALS if name not in default)
    help = f"{help}; also {others}; '' is none."
    return text("--against", of=of, default=",".join(default), metavar="STRATEGY,...", help=help)


def microbatches(of: type[Any], *, unset: str) -> Decorator:
    """Define `--microbatches`, the size of an update of a flushing schedule."""
    return count("--microbatches", of=of, help="Minibatches in one update of a flushing schedule.", unset=unset)


def weights(command: Callable[..., Any]) -> Callable[..., Any]:
    """Define `--weights` and `--update-every`, which belong to schedules without a flush."""
    help = "Minibatches in one update of every stage, without a flush."
    command = count("--update-every", of=RunOptions, help=help, unset=PLANNED)(command)
    *policies, last = (f"{policy.words} ({policy.name})" for policy in ONE_F_ONE_B.policies)
    help = f"Weights of a minibatch under {ONE_F_ONE_B.name}: {', '.join(policies)}, or {last}."
    return choice("--weights", of=RunOptions, help=help, unset=PLANNED)(command)


def machines(command: Callable[..., Any]) -> Callable[..., Any]:
    """Define `--nnodes`, `--node-rank` and `--rdzv-endpoint`, for a launch over several machines."""
    for option in (
        text(
            "--rdzv-endpoint",
            of=RunOptions,
            default=RunOptions.rdzv_endpoint,
            show_default=False,
            metavar="HOST:PORT",
            help="Where the machines meet, on machine 0.",
        ),
        count("--node-rank", of=RunOptions, metavar="K", help="This machine."),
        count("--nnodes", of=RunOptions, help="Machines."),
    ):
        command = option(command)
    return command
