"""pdtool: turn an ordinary PyTorch model into a pipeline-parallel training job.

`pdtool.profile(...)`, `.partition`, `.simulate`, `.check`, `.codegen` and `.run` are the commands in Python: see
pdtool/api.py, which is imported when one of them is first called. Types: `__init__.pyi`.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import Any

__version__ = "0.1.0"

_PACKAGES = ()  # of this name is a function of the API, and the package behind it
_FUNCTIONS = ("run", "codegen", "partition", "profile", "simulate", "check")


class _CallablePackage(ModuleType):
    """A package that can be called: `pdtool.run(plan)`; what is in it is imported as from any other."""

    def __call__(self, *args: Any, **options: Any) -> Any:
        return self.__wrapped__(*args, **options)

    @property
    def __wrapped__(self) -> Any:  # what inspect.signature and notebooks show
        return getattr(import_module("pdtool.api"), self.__name__.rpartition(".")[2])


class _Pdtool(ModuleType):
    """This package, whose subpackages of the names of commands can be called as soon as something imports them."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _PACKAGES and isinstance(value, ModuleType):
            value.__class__ = _CallablePackage
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Pdtool


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"pdtool.{name}")
    if name in _FUNCTIONS:
        return getattr(import_module("pdtool.api"), name)
    raise AttributeError(f"module 'pdtool' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_PACKAGES, *_FUNCTIONS})
