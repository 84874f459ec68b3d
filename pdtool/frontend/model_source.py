"""Which file is the user's model.py, and importing it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from pdtool.artifacts.artifact import ModelRef, fields_checked
from pdtool.artifacts.text_formats import check_plain
from pdtool.errors import FieldError, ModelError, UsageError
from pdtool.frontend.user_code import error_at, in_zoo, module_name


def parse_ref(text: str, settings: Iterable[str] = ()) -> ModelRef:
    """Read `model.py`, `model.py:vgg16` or `package.module:vgg16` and settings `layers=12`; raises UsageError."""
    source, _, function = text.rpartition(":") if ":" in text else (text, "", "model")
    if not function.isidentifier() or not function.isascii():
        raise UsageError(f"{function!r} in {text!r} is not the name of a function", "write model.py:function")
    with fields_checked(lambda fault: UsageError(f"model {text!r:.80}: {fault}", "give it another path or name")):
        return ModelRef(source=source, function=function, settings=parse_settings(settings))


def parse_settings(settings: Iterable[str]) -> dict[str, str | int | float | bool]:
    """Read settings such as `layers=12`, as numbers where they are some; raises UsageError."""
    values: dict[str, str | int | float | bool] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not equals or not key.isidentifier():
            raise UsageError(f"setting {setting!r} is not NAME=VALUE", "write --set layers=12")
        values[key] = _literal(value)
        try:
            check_plain(values[key])
        except FieldError as fault:
            raise UsageError(f"--set {key}: {fault}", "give a number that a float holds, or a text") from None
    return values


def find_source(source: str) -> Path:
    """Find the file of `model.py` or `package.module`, without importing it; raises UsageError."""
    if os.path.isfile(source) and not source.endswith(".py"):
        remedy = "name the Python file with model(); a profile is for `pdtool partition`, a plan for codegen and run"
        raise UsageError(f"model {source!r} is not a Python file", remedy)
    names = source.split(".")
    if source.endswith(".py") or "/" in source or not all(name.isidentifier() for name in names):
        path = Path(source)
    else:
        roots = [Path.cwd(), *(Path(entry) for entry in sys.path if entry)]
        candidates = (root.joinpath(*names).with_suffix(".py") for root in roots)
        path = next((file for file in candidates if os.path.isfile(file)), Path(*names).with_suffix(".py"))
    if not os.path.isfile(path):  # unlike Path.is_file(), it takes any text
        remedy = "name a Python file, or a module as package.module"
        raise UsageError(f"model {source!r}: there is no file {path}", remedy)
    return path


def model_name(path: Path, function: str) -> str:
    """Name a model by its file and, unless that is `model`, its function."""
    return path.stem if function == "model" else f"{path.stem}-{function}"


def is_local(path: Path, folder: Path | None = None) -> bool:
    """Whether a file is under a folder, by default the current one, or one of pdtool's own zoo."""
    return in_zoo(path) or path.resolve().is_relative_to((folder or Path.cwd()).resolve())


def check_local(path: Path) -> None:
    """Check a model file that an artifact names, not the user; raises UsageError for one that is not local."""
    if not is_local(path):
        what = f"the artifact names the model {str(path)!r}, outside the current folder"
        raise UsageError(what, "check that file, then name it yourself with --model")


def import_source(source: str, path: Path) -> ModuleType:
    """Import the file that `find_source` found; raises ModelError."""
    is_module = not source.endswith(".py") and "/" not in source
    # A file imports its neighbours, as `python model.py` would.
    sys.path.insert(0, str(Path.cwd() if is_module else path.resolve().parent))
    try:
        if is_module:
            return importlib.import_module(source)
        spec = importlib.util.spec_from_file_location(module_name(path), path.resolve())
        assert spec
        assert spec.loader
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # pickling and dataclasses look the module up by name
        spec.loader.exec_module(module)
        return module
    except SyntaxError as error:
        file = Path(error.filename or source)  # the model's own, or one that it imports
        name = source if file.resolve() == path.resolve() else file.name
        line = f":{error.lineno}" if error.lineno else ""
        raise ModelError(f"{name}{line}: {error.msg}") from error
    except Exception as error:
        raise error_at(path, error, "importing it") from error
    finally:
        sys.path.pop(0)


def _literal(text: str) -> str | int | float | bool:
    try:
        value = ast.literal_eval(text.capitalize() if text in ("true", "false") else text)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return text
    return value if isinstance(value, (int, float, str)) else text
