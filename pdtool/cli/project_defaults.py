"""A project's defaults of options: `pdtool.toml`, or `[tool.pdtool]` in `pyproject.toml`, of the current folder.

A table for each command, with the long names of its options. The command line overrides them.

    [partition]
    topology = "4x4"
    bandwidth = "10Gbit/s,12GB/s"
    straight = true

    [profile]
    set = { width = 64 }
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from pdtool.errors import ArtifactError, printable, suggestion

_OWN_FILE, _SHARED_FILE = "pdtool.toml", "pyproject.toml"
_OF_ONE_COMMAND_LINE = ("help", "quiet", "verbose")


@dataclass(frozen=True)
class ProjectDefaults:
    """The defaults that a file gives.

    Attributes:
        path: path of the file; None if there is none.
        tables: values by command and by parameter, as click's `default_map` takes them.
    """

    path: Path | None = None
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def load(cls, given: str | None, commands: Mapping[str, click.Command]) -> ProjectDefaults:
        """Read the file that `--config` names; else the one of the current folder, if there is any.

        Raises:
            ArtifactError: it cannot be read, or holds a command, an option or a value that pdtool does not know.
        """
        path = Path(given) if given is not None else _of_current_folder()
        if path is None:
            return cls()
        content: Any = _toml(path)
        if path.name == _SHARED_FILE:
            tools = content.get("tool")
            content = tools.get("pdtool") if isinstance(tools, dict) else None
            if not isinstance(content, dict):
                if given is None:
                    return cls()
                raise ArtifactError(path, "has no [tool.pdtool]", "add it, or name another file with --config")
        return cls(path, {name: _table(path, name, values, commands) for name, values in content.items()})

    def sentence(self, command: click.Command, error: str, typed: Collection[str]) -> str:
        """Say which of the options named in an error come from the file, not from `typed` ones; "" for none."""
        long_names = {param.name: param.opts[-1].removeprefix("--") for param in command.params}
        of_file = {long_names[name]: value for name, value in self.tables.get(command.name or "", {}).items()}
        named = {name: value for name, value in of_file.items() if name in error and f"--{name}" not in typed}
        options = ", ".join(f"{name} = {value!r}" for name, value in named.items())
        return f"{self.path} gives {command.name} these options: {options}" if options else ""


def _of_current_folder() -> Path | None:
    """Find the current folder's pdtool.toml, or a pyproject.toml that may have a [tool.pdtool]."""
    own, shared = Path(_OWN_FILE), Path(_SHARED_FILE)
    if own.is_file() or own.is_symlink():  # a link to nothing is an error, not a missing file
        return own
    return shared if shared.is_file() and b"pdtool" in shared.read_bytes() else None


def _toml(path: Path) -> dict[str, Any]:
    import tomllib  # imported here, because most folders have no such file

    from pdtool.files import read_text

    text = read_text(path, "name a TOML file with --config", may_be_pipe=True)
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # the first also for a number with thousands of digits
        remedy = "fix it: a valid file has `[partition]` in one line and `topology = 4` in the next"
        raise ArtifactError(path, f"is not TOML ({error})", remedy) from error


def _table(path: Path, name: str, values: Any, commands: Mapping[str, click.Command]) -> dict[str, Any]:
    """Check the table of one command, and name its values as click does."""
    if name not in commands:
        raise _unknown(path, name, "command", commands)
    if not isinstance(values, dict):
        raise ArtifactError(
            path,
            f"is {values!r:.80}, not a table of options",
            f"write a line [{name}] and the options below it",
            field=name,
        )
    options = {
        option.removeprefix("--"): (param, is_on)
        for param in commands[name].params
        if isinstance(param, click.Option) and param.name not in _OF_ONE_COMMAND_LINE
        for names, is_on in ((param.opts, True), (param.secondary_opts, False))
        for option in names
        if option.startswith("--")
    }
    table = {}
    for key, value in values.items():
        if key.replace("_", "-") not in options:
            allowed = [option for option, (param, _) in options.items() if getattr(param, "in_file", True)]
            raise _unknown(path, f"{name}.{key}", "option", allowed)
        param, is_on = options[key.replace("_", "-")]
        if not getattr(param, "in_file", True):
            raise ArtifactError(path, "is for the command line only", "leave it out here", field=f"{name}.{key}")
        if param.name in table:
            raise ArtifactError(path, "is set twice", "remove one of them", field=f"{name}.{key}")
        table[param.name or ""] = _value(path, f"{name}.{key}", value, param, is_on)
    return table


def _unknown(path: Path, key: str, what: str, known: Iterable[str]) -> ArtifactError:
    name = key.rpartition(".")[2]
    remedy = suggestion(name.replace("_", "-"), known, f"choose from {', '.join(known)}")
    return ArtifactError(path, f"there is no such {what}", remedy, field=printable(key))


def _value(path: Path, key: str, value: Any, param: click.Option, is_on: bool) -> Any:
    """Write a value as on the command line, so that it is read and refused in the same way."""
    if param.is_flag:
        if not isinstance(value, bool):
            raise ArtifactError(path, f"is {value!r:.80}", "write true or false", field=key)
        return value is is_on
    if isinstance(value, dict) and param.multiple:
        value = [f"{name}={each}" for name, each in value.items()]
    values = value if isinstance(value, list) else [value]
    if not (values or param.multiple) or not all(
        isinstance(each, (str, int, float)) and not isinstance(each, bool) for each in values
    ):
        raise ArtifactError(path, f"is {value!r:.80}", "write a string or a number", field=key)
    texts = [str(each) for each in values]
    return texts if param.multiple else ",".join(texts)
