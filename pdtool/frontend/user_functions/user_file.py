"""A user's file: calling its functions, and errors that name the line."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from pdtool.artifacts.artifact import ModelRef
from pdtool.errors import ModelError
from pdtool.frontend.training_contract import takes_total
from pdtool.frontend.user_code import definition_line, error_at

Setting = str | int | float | bool
DATA_FUNCTIONS = {"example_inputs": 1, "dataset": 1}
# Functions that take settings besides what pdtool passes them, so many arguments.
OWN_ARGUMENTS = {
    **DATA_FUNCTIONS,
    "collate": 1,
    "sampler": 2,
    "loss": 2,
    "optimizer": 1,
    "scheduler": 1,
    "metrics": 2,
    "summarize_metrics": 1,
    "after_update": 2,
}


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

    def call_with_settings(self, name: str, *arguments: Any) -> Any:
        """Call a function of the file with its arguments, and with those settings that it has parameters for."""
        return self.call(self.function(name), *arguments, **self.settings_of(name))

    def settings_of(self, name: str) -> dict[str, Setting]:
        """Return the settings that a function of OWN_ARGUMENTS takes; none where the file does not define it."""
        if name not in self._settings_of:
            settings = self.ref.settings
            taken = self.parameters(name) if settings and self.has(name) else ()
            self._settings_of[name] = {key: settings[key] for key in taken if key in settings}
        return self._settings_of[name]

    def parameters(self, name: str) -> tuple[str, ...]:
        """Return the names of those parameters of a function that a setting may be for: not of what pdtool passes."""
        try:
            parameters = list(inspect.signature(self.function(name)).parameters.values())[OWN_ARGUMENTS[name] :]
        except (TypeError, ValueError):  # of a function in C
            return ()
        if name == "scheduler" and takes_total(self.function(name)):
            parameters = parameters[1:]
        return tuple(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))

    @cached_property
    def _settings_of(self) -> dict[str, dict[str, Setting]]:
        """The settings that functions take, by function: some are called for each minibatch."""
        return {}

    def error(self, what: str, remedy: str = "") -> ModelError:
        """Make an error whose text begins with the file's name."""
        return ModelError(f"{self.path.name}: {what}", remedy)

    def error_in(self, function: str, what: str, remedy: str = "") -> ModelError:
        """Make an error of what a function returned; its text begins with the line where the function is defined."""
        return ModelError(f"{definition_line(self.function(function), self.path)}{what}", remedy)

    def error_at(self, error: Exception, what: str) -> ModelError:
        """Make an error of what `what`, a part of the user's code, raised; its text begins with the line."""
        return error_at(self.path, error, what)
