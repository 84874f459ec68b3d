"""The user's modules: model.py under the name that Python gives it, and its imports from its folder.

Python finds modules by name. If two model files in one process both import a net.py from their own folders, the second
would get the first one's net.py. An edited net.py would not be read again. Here each model file finds the same modules
as in a process of its own. At the end, the calling program's modules are restored.

Python takes the bytecode of a file in __pycache__ if the file has the same size and was last changed in the same
second. After a quick edit, that is the code before the edit. So the user's files are compiled again if their bytecode
is not certainly newer.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import sysconfig
import time
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import cache
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any
from weakref import WeakKeyDictionary

from pdtool.files import file_sha256
from pdtool.host import process_start_s

_ALIASES = f"{__name__}."  # prefix for model files whose own name a library has
__path__ = sys.path  # where a process that such a file spawns finds it by that name
_LIBRARIES = ("/site-packages/", "/dist-packages/", *(sysconfig.get_path(k) for k in ("stdlib", "platstdlib")))
_MIN_AGE_S = 2.0  # of a file when its bytecode was written, so that later edits show
CODE = (type, FunctionType, MethodType, BuiltinFunctionType, ModuleType, staticmethod, classmethod, property)
_Stamp = tuple[int, int]

_imported: dict[Path, tuple[Path, str]] = {}  # model file -> its folder, and the name that it has
_kept: dict[Path, dict[str, ModuleType]] = {}  # model file -> modules from its folder that it has imported
_libraries: dict[str, ModuleType] = {}  # those found so far in files of libraries
_stamps: WeakKeyDictionary[ModuleType, _Stamp] = WeakKeyDictionary()  # of a module's file when it was imported


def module_name(path: Path) -> str:
    """Return the name under which a model file is imported: Python's, unless a library has it."""
    name = path.stem
    is_library = name in sys.modules and not _place(name, sys.modules[name])
    if is_library or name in sys.stdlib_module_names or "." in name:
        return f"{_ALIASES}{name.replace('.', '_')}"
    return name


def user_module(name: str) -> str:
    """Return the name of the user's module as its own files import it: `random` for random.py."""
    return name.removeprefix(_ALIASES)


@contextmanager
def user_modules_importable() -> Iterator[None]:
    """Make stage files able to import from the users' files by their own names."""
    aliases = {name: module for name, module in sys.modules.items() if name.startswith(_ALIASES)}
    files = {user_module(name): module for name, module in aliases.items() if user_module(name) != "torch"}
    before = {name: sys.modules[name] for name in files if name in sys.modules}
    sys.modules.update(files)
    try:
        yield
    finally:
        sys.modules.update(before)
        for name in files.keys() - before.keys():
            del sys.modules[name]


def user_modules() -> dict[str, ModuleType]:
    """Return the user's modules that this process has imported, by name."""
    return {name: sys.modules[name] for name in _places()}


def imported_digests() -> dict[str, str]:
    """Return the digest of each of the user's files that this process has imported, by its module's name."""
    places = {user_module(name): place for name, place in _places().items()}
    return {name: file_sha256(place) for name, place in places.items() if place.is_file()}


def files_and_classes(kinds: Collection[type]) -> list[ModuleType | type]:
    """Return what all models of a process share: the files that define these classes outside torch, the user's files
    that these import, and the classes defined in them."""
    names = [*dict.fromkeys(base.__module__ for kind in kinds for base in kind.__mro__)]
    names = [name for name in names if name.partition(".")[0] not in ("torch", *sys.stdlib_module_names)]
    for name in names:  # which grows
        file = sys.modules.get(name)
        imported = {_module_of(value) for value in [*vars(file).values()]} if file else set()
        names += [n for n in imported.difference(names) if n in sys.modules and _place(n, sys.modules[n])]
    files = {id(file): file for name in names if (file := sys.modules.get(name))}
    inside = [value for file in files.values() for value in [*vars(file).values()] if isinstance(value, type)]
    inside += [base for kind in kinds for base in kind.__mro__]  # classes in functions, too
    classes = {id(k): k for k in inside if k.__module__ in names and isinstance(k, Hashable)}
    return [*files.values(), *(kind for kind in classes.values() if not issubclass(kind, Enum))]  # Python changes it


def _module_of(value: object) -> str:
    """The name of a module, or of the one that defines a class or function; "" of other values."""
    if isinstance(value, ModuleType):
        return value.__name__
    return value.__module__ or "" if isinstance(value, (type, FunctionType)) else ""


def variables(owner: ModuleType | type) -> dict[str, object]:
    """Return the values that a file or class holds: no functions, classes, modules or private names of Python."""
    held = [*vars(owner).items()]
    return {name: value for name, value in held if not name.startswith("__") and not isinstance(value, CODE)}


def begin_import(path: Path, folder: Path, name: str = "") -> None:
    """Make a model file find its modules as in a process of its own.

    Modules already loaded by it or by the calling program stay, unless one of their files has changed.

    Args:
        folder: the folder to put first on sys.path.
        name: a module to load anew in any case.
    """
    if _finder_of_user in sys.path_hooks:
        importlib.invalidate_caches()
    else:
        _set_path_hooks([_finder_of_user, *sys.path_hooks])
    places = _places()
    own = _below([folder], places) | _kept.get(path, {})
    for other in places:
        spec = PathFinder.find_spec(other.partition(".")[0], [str(folder)])
        if other in own or (spec and spec.loader):
            del sys.modules[other]
    own.pop(name, None)
    if all(map(_is_as_imported, own.values())):
        sys.modules.update(own)
    _imported[path] = folder, name


@contextmanager
def undoing_imports() -> Iterator[None]:
    """Undo at the end the changes of the user's imports to sys.modules, sys.path and sys.argv."""
    modules, path, argv, outer = sys.modules.copy(), sys.path[:], sys.argv, _imported.copy()
    hooks = sys.path_hooks[:]
    _imported.clear()
    try:
        yield
    finally:
        added = [Path(entry).resolve() for entry in sys.path if entry not in path]
        for file, (folder, name) in _imported.items():
            own = {
                n: m for n, m in _below([folder, *added], _places()).items() if n != name and modules.get(n) is not m
            }
            for module in own.values():
                _stamps.setdefault(module, _stamp(module))
            _kept[file] = own
            for loaded in (*own, name):
                sys.modules.pop(loaded, None)
        sys.modules.update(modules)
        sys.path[:], sys.argv = path, argv
        if sys.path_hooks != hooks:
            _set_path_hooks(hooks)
        _imported.clear()
        _imported.update(outer)


def import_file(name: str, path: Path) -> ModuleType:
    """Import a file as the module `name`, as it is now."""
    spec = importlib.util.spec_from_file_location(name, path, loader=_CurrentSource(name, str(path)))
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pickling and dataclasses look the module up by name
    spec.loader.exec_module(module)
    return module


class _CurrentSource(SourceFileLoader):
    """Loads a file as it is now: its bytecode only if that is certainly newer than the file's last change."""

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the compiled file, and write its bytecode only if that will be certainly newer."""
        try:
            written_s = os.stat(importlib.util.cache_from_source(self.path)).st_mtime
        except (OSError, NotImplementedError):
            written_s = time.time()
        if written_s < os.stat(self.path).st_ctime + _MIN_AGE_S:
            return self.source_to_code(self.get_data(self.path), self.path)
        return super().get_code(fullname)


def _finder_of_user(folder: str) -> FileFinder:
    """Find the modules of a folder that is not a library's; raises ImportError for all others."""
    if is_of_library(f"{folder}/") or not os.path.isdir(folder):
        raise ImportError("no folder of the user", path=folder)
    return FileFinder(folder, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_CurrentSource, SOURCE_SUFFIXES))


def _set_path_hooks(hooks: list[Any]) -> None:
    """Set sys.path_hooks; finders of libraries stay if the hooks differ in `_finder_of_user` only, which has none."""
    before, after = ([hook for hook in each if hook is not _finder_of_user] for each in (sys.path_hooks, hooks))
    sys.path_hooks[:] = hooks
    if before != after:
        sys.path_importer_cache.clear()
    for folder, finder in [*sys.path_importer_cache.items()]:
        if not finder or not is_of_library(f"{folder}/"):
            del sys.path_importer_cache[folder]


def _below(folders: Iterable[Path], places: Mapping[str, Path]) -> dict[str, ModuleType]:
    """Those of the user's modules whose files lie in or below these folders, which are absolute and without links."""
    return {n: sys.modules[n] for n, p in places.items() if any(p.is_relative_to(folder) for folder in folders)}


def _places() -> dict[str, Path]:
    """The place of each of the user's modules; those of libraries, which are thousands, are looked at once."""
    places = {}
    for name, module in [*sys.modules.items()]:
        if _libraries.get(name) is module:
            continue
        if place := _place(name, module):
            places[name] = place
        elif isinstance(module, ModuleType) and is_of_library(str(vars(module).get("__file__"))):
            _libraries[name] = module
    return places


def _place(name: str, module: ModuleType) -> Path | None:
    """The file of a module, or the folder of a package without one; None if it is not the user's own."""
    if name.startswith(("pdtool.", "__")) or name == "pdtool" or not isinstance(module, ModuleType):
        return None
    values = vars(module)
    place = values.get("__file__") or next(iter(values.get("__path__") or ()), None)
    if not isinstance(place, str) or is_of_library(place):
        return None
    return Path(place).resolve()


@cache  # a process has thousands of modules, and asks of all of them several times
def is_of_library(place: str) -> bool:
    """Whether a file is a library's, or a folder whose path ends with a slash."""
    return any(library in place for library in _LIBRARIES)


def _is_as_imported(module: ModuleType) -> bool:
    """Whether a module's file is certainly the one that it was imported from."""
    stamp = _stamp(module)
    return stamp == _stamps[module] if module in _stamps else stamp[0] < process_start_s() * 1e9


def _stamp(module: ModuleType) -> _Stamp:
    """When a module's file was last changed, in ns since 1970, and its size; (0, 0) of a package without a file."""
    file = vars(module).get("__file__")
    try:
        return (stat.st_ctime_ns, stat.st_size) if file and (stat := Path(file).stat()) else (0, 0)
    except OSError:
        return (sys.maxsize, 0)
