"""A user's file: calling its functions, and errors that name the line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from pdtool.artifacts.envelope import ModelRef
from pdtool.errors import ModelError
from pdtool.frontend.user_code import definition_line, error_at


@dataclass(frozen=True)
class UserFile:
    """A file of the user's, imported.

    Attributes:
        ref: where it came from.
        path: its source file.
        module: the imported module.
    """

    ref: ModelRef
    path: Path
    module: ModuleType

    def has(self, function: str) -> bool:
        """Whether the file defines `function`."""
        return callable(vars(self.module).get(function))

    def function(self, name: str) -> Callable[..., Any]:
        """Return a function of the file; raises ModelError, which lists those that there are."""
        if not self.has(name):
            functions = (value for value in vars(self.module).values() if inspect.isfunction(value))
            defined = ", ".join(f.__name__ for f in functions if f.__module__ == self.module.__name__)
            raise ModelError(f"{self.path.name} has no function {name}()", f"it defines: {defined or 'no functions'}")
        return getattr(self.module, name)  # type: ignore[no-any-return]

    def call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Return what a function of the user's returns; raises ModelError with the line where it fails."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            name = getattr(function, "__name__", type(function).__name__)  # nn.CrossEntropyLoss() has none
            raise self.error_at(error, f"{name}()") from error

    def call_with_settings(self, name: str, argument: Any) -> Any:
        """Call a function of the file with its one argument, and with those settings that it has parameters for."""
        function, settings = self.function(name), self.ref.settings
        parameters = list(inspect.signature(function).parameters)[1:] if settings else []
        return self.call(function, argument, **{key: settings[key] for key in parameters if key in settings})

    def error(self, what: str, remedy: str = "") -> ModelError:
        """Make an error whose text begins with the file's name."""
        return ModelError(f"{self.path.name}: {what}", remedy)

    def error_in(self, function: str, what: str, remedy: str = "") -> ModelError:
        """Make an error of what a function returned; its text begins with the line where the function is defined."""
        return ModelError(f"{definition_line(self.function(function), self.path)}{what}", remedy)

    def error_at(self, error: Exception, what: str) -> ModelError:
        """Make an error of what `what`, a part of the user's code, raised; its text begins with the line."""
        return error_at(self.path, error, what)
