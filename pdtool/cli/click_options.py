"""The declared options of the commands (pdtool/options), as click's options.

`options_of` gives a command all options of a dataclass, `option_of` one of them. `option` and `flag` define options of
a single command that the API does not have.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pdtool.options.declaration import Option, Options, declared
from pdtool.options.run_options import RunOptions, excluded_by
from pdtool.options.values import Choice, Count, Factor, Flag, OptionValue, Text, Texts, file_path
from pdtool.schedule import SCHEDULES

if TYPE_CHECKING:
    from click.types import OptionHelpExtra

_LARGE = 10**6  # a limit that nobody reaches
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


class CommandOption(click.Option):
    """An option of a command of pdtool.

    Args:
        section: section of `--help`; "Options" stands at the top.
        in_file: whether it may stand in pdtool.toml.
        declared: its declaration, unless it is defined only here.
    """

    def __init__(
        self,
        *names: Any,
        section: str = "Options",
        in_file: bool = True,
        declared: Option | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(*names, **settings)
        self.section, self.in_file, self.declared = section, in_file, declared

    def get_help_extra(self, ctx: click.Context) -> OptionHelpExtra:
        """Write ranges and defaults in words."""
        extra = super().get_help_extra(ctx)
        if isinstance(self.show_default, str):
            extra["default"] = self.show_default
        if "range" in extra and isinstance(self.type, click.IntRange | click.FloatRange):
            least, most = self.type.min, self.type.max
            extra["range"] = f"at least {least:g}" if most is None or most >= _LARGE else f"{least:g} to {most:g}"
        return extra


option = partial(click.option, cls=CommandOption)


def options_of(options: type[Any]) -> Decorator:
    """Give a command the options of a dataclass; the command gets an instance of it as `asked`."""
    names = declared(options)

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def asking(*arguments: Any, **given: Any) -> Any:
            asked = options(**{name: given.pop(name) for name in names})
            return command(*arguments, asked=asked, **given)

        with_options: Callable[..., Any] = asking
        for name in reversed(names):
            with_options = option_of(options, name)(with_options)
        return with_options

    return decorate


def option_of(options: type[Any], name: str, *, required: bool = False, **changes: Any) -> Decorator:
    """Give a command one option of a dataclass, under the name of the field.

    Args:
        changes: changes of its declaration: another `help` or `value`.
    """
    asked = replace(declared(options)[name], **changes)
    default = asked.value.default
    return option(
        *asked.flags,
        name,
        declared=asked,
        section=asked.section,
        in_file=asked.in_file,
        required=required,
        show_default=asked.value.unset or default != "",
        help=asked.help,
        **({} if default is None else {"default": default}),
        **_kind(asked),
    )


def _kind(asked: Option) -> dict[str, Any]:
    """Return click's type for an option's value; click words its own errors."""
    match asked.value:
        case Count(least=least, most=most):
            return {"type": click.IntRange(int(least), int(most)), "metavar": asked.metavar}
        case Factor(least=least, most=most):
            read = partial(_read, asked.value)  # click accepts nan in any range
            return {"type": click.FloatRange(least, most), "callback": read, "metavar": asked.metavar}
        case Choice(names=names):
            return {"type": click.Choice(names)}
        case Flag():
            return {"is_flag": True}
        case Texts():
            return {"multiple": True, "metavar": asked.metavar}
        case Text(without=without):
            optional_value = {"is_flag": False, "flag_value": without} if without else {}
            return {"callback": partial(_read, asked.value), "metavar": asked.metavar, **optional_value}
    raise AssertionError(asked.value)


def _read(value: OptionValue, ctx: click.Context, parameter: click.Parameter, given: Any) -> Any:
    return None if given is None else value.read(parameter.opts[0], given)


def output_file(help: str) -> Decorator:
    """Define `-o`, the file that a command writes."""
    return option_of(RunOptions, "output", value=Text(file_path), help=help)


def output_folder(help: str) -> Decorator:
    """Define `-o`, the folder that a command writes."""
    return option_of(RunOptions, "output", help=help)


def flag(*names: str, help: str) -> Decorator:
    """Define a flag about a command's output, which the API does not have."""
    return option(*names, section="Output", is_flag=True, help=help)


as_json = flag("--json", "as_json", help="Print the result on stdout, as JSON.")


def is_asked_for(context: click.Context, name: str) -> bool:
    """Return whether an option was given, on the command line, by pdtool.toml or by the environment."""
    return context.get_parameter_source(name) not in (None, ParameterSource.DEFAULT)


def typed(context: click.Context) -> set[str]:
    """Return the names of the options on the command line."""
    return {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def prefer_typed(context: click.Context) -> None:
    """Let an option on the command line override options of pdtool.toml that exclude it."""
    declarations = {p.name: p.declared for p in context.command.params if isinstance(p, CommandOption) and p.declared}
    typed_names, schedule = typed(context), context.params.get("schedule")
    pairs = {(name, other) for name, declared in declarations.items() for other in declared.excludes}
    pairs |= {(other, name) for name, other in pairs}
    pairs |= {("schedule", other) for other in (excluded_by(schedule) if schedule in SCHEDULES else ())}
    for name, other in pairs:
        if name in typed_names and context.get_parameter_source(other or "") is ParameterSource.DEFAULT_MAP:
            context.params[other or ""] = declarations[other].default
            context.set_parameter_source(other or "", ParameterSource.DEFAULT)


def makes_artifact(param: click.Parameter) -> bool:
    """Return whether an option changes the artifact that its command writes."""
    return isinstance(param, CommandOption) and param.declared is not None and param.declared.artifact != ""


def asked_in(context: click.Context, options: type[Options]) -> Options:
    """Return the options of a dataclass with a command's values."""
    return options(**{name: context.params[name] for name in declared(options)})
