"""An option is declared once, as a field of a dataclass: its flag, its type, its help, and its effects.

The command line makes its flags and help from the fields (cli/click_options.py). The API's functions take them as
keyword arguments. Both read and refuse a value in the same way. The fields also define which options may stand in
pdtool.toml, which must be equal on all machines of a run, which `pdtool train` has, and which make an artifact stale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar, get_args

from pdtool.errors import suggestion
from pdtool.options.values import OptionValue

Section = Literal["Model", "Cluster", "Plan", "Training", "Computing", "Machines", "Output"]
SECTIONS: tuple[Section, ...] = get_args(Section)  # in the order of `--help`

Options = TypeVar("Options")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class Option:
    """The declaration of an option; its name is that of the field.

    Attributes:
        usage: its flags, and the placeholder of its value in `--help`: `--device NAME`; `-o, --output PATH`.
        value: its type and default.
        help: an imperative sentence.
        section: section of `--help`.
        keyword: its name in the API, if that is not the field's name.
        in_file: whether it may stand in pdtool.toml. Options about trust, replacing, output paths and connections may
            not, because the file may be a stranger's.
        same: whether all machines of a run must agree on it.
        artifact: the kind of artifact that it changes; an artifact made with another value is stale.
        of_plan: whether it replaces the plan's value.
        excludes: names of options that make no sense with it; on the command line it overrides these in pdtool.toml.
    """

    usage: str
    value: OptionValue
    help: str
    section: Section
    keyword: str = ""
    in_file: bool = True
    same: bool = False
    artifact: Literal["", "profile", "plan"] = ""
    of_plan: bool = False
    excludes: tuple[str, ...] = ()

    @property
    def flags(self) -> list[str]:
        """The names on the command line: `-o` and `--output`."""
        return [word.rstrip(",") for word in self.usage.split() if word.startswith("-")]

    @property
    def flag(self) -> str:
        """The long name, as users know it: `--batch-size`."""
        return self.flags[-1].partition("/")[0]

    def switched(self, *, on: bool) -> str:
        """The flag that switches it on or off: `--compile` or `--no-compile`."""
        flag, _, opposite = self.usage.partition("/")
        return flag if on else opposite

    @property
    def metavar(self) -> str | None:
        """The placeholder of the value."""
        return " ".join(word for word in self.usage.split() if not word.startswith("-")) or None

    @property
    def default(self) -> Any:
        """The default, read like any value."""
        return None if self.value.default is None else self.value.read(self.flag, self.value.default)

    def field(self) -> Any:
        """Make a field of an options class."""
        return field(default=self.default, metadata={"option": self})


def option(usage: str, value: OptionValue, help: str, **others: Any) -> Any:
    """Declare an option, as a field of an options class; see `Option`."""
    return Option(usage=usage, value=value, help=help, **others).field()


def again(options: type[Any], name: str, **changes: Any) -> Any:
    """Declare the option of another options class as a field of this one, possibly with changes."""
    return replace(declared(options)[name], **changes).field()


def declared(options: type[Any]) -> dict[str, Option]:
    """Return the options of an options class, by name."""
    return {each.name: each.metadata["option"] for each in fields(options)}


def common_fields(options: Any, of: type[Any]) -> dict[str, Any]:
    """Return the values in `options` for the fields of its base class `of`."""
    return {each.name: getattr(options, each.name) for each in fields(of)}


def read_options(command: str, options: type[Options], given: Mapping[str, Any]) -> Options:
    """Return the options of a command: those given, each read by its field, and the defaults of the others.

    Args:
        command: its name, for errors.
        given: by keyword, as `batch_size`; None stands for the default.

    Raises:
        TypeError: the command has no such option.
        UsageError: a value is not one that the option takes.
    """
    names = {option.keyword or name: (name, option) for name, option in declared(options).items()}
    read = {}
    for keyword, value in given.items():
        if keyword not in names:
            flag = f"--{keyword.replace('_', '-')}"  # --cost is the keyword cost_model
            same = next((known for known, (_, option) in names.items() if flag in option.flags), "")
            hint = f"did you mean {same}?" if same else suggestion(keyword, names, f"choose from {', '.join(names)}")
            raise TypeError(f"{command}() has no option {keyword!r}; {hint}")
        if value is not None:
            name, option = names[keyword]
            read[name] = option.value.read(keyword, value)
    return options(**read)
