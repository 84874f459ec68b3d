"""Find where the user's code reads and changes attributes and variables, from its source and bytecode."""

from __future__ import annotations

import ast
import dis
import inspect
import textwrap
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

_GLOBALS = ("LOAD_GLOBAL",)  # of Python's bytecode
_READING = (*_GLOBALS, "LOAD_ATTR", "LOAD_METHOD")
_ADDING = {"append", "appendleft", "extend", "add", "update", "clear"}  # methods of containers
_CHANGING = _ADDING | {"insert", "remove", "discard", "pop", "popleft", "popitem", "setdefault", "sort", "reverse"}
_CHANGING |= {"difference_update", "intersection_update"}
_OF_CONTAINERS = {"fill", "rotate", "subtract"}  # other objects have methods of these names, too
_CONTAINERS = (list, dict, set, deque, np.ndarray)
_TENSORS = (Tensor, np.ndarray)
_INDEXED = (list, tuple, dict, nn.Sequential, nn.ModuleList, nn.ModuleDict)
# Of torch's functions that end in _, these change no values.
_NOT_IN_PLACE = {"requires_grad_", "share_memory_", "clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_"}
# Methods whose result shares memory with the object.
_SAME_MEMORY = {"setdefault", "detach", "view", "reshape", "flatten", "squeeze", "unsqueeze", "t"}
_BUILDING = {"__init__", "reset_parameters"}  # methods of a model that build it
_READING_SAMPLES = {"__getitem__", "__getitems__", "__iter__", "__next__"}  # methods of a dataset
_NOT_FORWARD = {"__repr__", "extra_repr", *_BUILDING}


@dataclass(frozen=True)
class Use:
    """One place in a function where an attribute or a variable is read or changed."""

    name: str
    is_variable: bool
    is_read: bool
    location: str


def bound_values(function: FunctionType | partial[Any]) -> dict[str, Any]:
    """Return what is bound to a function: the variables of its closure and its default arguments; to a partial, its
    function and its arguments.

    Names are in brackets, so that none is that of an attribute: `[calls]`, and of a partial `[0]`, and `[]` for its
    function.
    """
    if isinstance(function, partial):
        values = {"": function.func, **{str(i): each for i, each in enumerate(function.args)}, **function.keywords}
    else:
        defaults, code = function.__defaults__ or (), function.__code__
        names = code.co_varnames[: code.co_argcount]
        values = dict(zip(reversed(names), reversed(defaults), strict=False)) | (function.__kwdefaults__ or {})
        cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
        values |= {name: cell.cell_contents for name, cell in cells if cell != CellType()}  # one without a value yet
    return {f"[{name}]": value for name, value in values.items()}


def is_bound(name: str) -> bool:
    """Whether it is the name of a bound value, not of an attribute."""
    return name.startswith("[")


def set_in_closure(function: Any, name: str, value: Any) -> bool:
    """Set a variable of a function's closure; return whether it has it: a default argument cannot be replaced."""
    names = function.__code__.co_freevars if isinstance(function, FunctionType) else ()
    if name[1:-1] not in names or not is_bound(name):
        return False
    (function.__closure__ or ())[names.index(name[1:-1])].cell_contents = value
    return True


def user_classes(model: nn.Module) -> list[type]:
    """Return the classes of a model's modules and their bases, each once, without torch's and Python's own."""
    kinds = dict.fromkeys(kind for module in model.modules() for kind in type(module).__mro__)
    return [kind for kind in kinds if not is_of_torch(kind) and kind.__module__ != "builtins"]


def is_of_torch(value: Any) -> bool:
    """Whether it is a class, a function or a module of torch."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name).partition(".")[0] == "torch"


def uses_in(source: type | ModuleType) -> list[Use]:
    """Return where the functions in a class or file use attributes and variables; nothing if there is no source."""
    found: dict[int, Use] = {}
    tree, first, file = _tree(source)
    functions = [node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.Lambda))]
    for function in functions:
        if isinstance(function, ast.FunctionDef) and function.name in _NOT_FORWARD:
            continue
        nodes = [*ast.walk(function)]
        changed = {id(part) for node in nodes for part in _changed_by(node)}
        for node in nodes:
            match node:  # a text may be that of getattr
                case ast.Attribute(attr=name) | ast.Name(id=name) | ast.Constant(value=str(name)):
                    location = f"{file}:{first + node.lineno - 1}"
                    found[id(node)] = Use(name, isinstance(node, ast.Name), id(node) not in changed, location)
    return [*found.values()]


def _changed_by(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of `a.b[c]` that a statement changes without reading them: a.b and a, if the result is unused."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr=method))) if method in _ADDING:
            yield from _parts_of(target)
        case ast.Name() | ast.Attribute() | ast.Subscript() if isinstance(node.ctx, ast.Store | ast.Del):
            yield from _parts_of(node)


def _parts_of(target: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of `a.b[c]`, from the outside in: a.b and a."""
    while True:
        match target:
            case ast.Call(func=ast.Attribute(value=inner, attr=method)) if method in _SAME_MEMORY:
                target = inner
            case ast.Attribute(value=inner) | ast.Subscript(value=inner):
                yield target
                target = inner
            case _:
                yield target
                return


def _called_on(call: ast.Call, file: ModuleType) -> Iterator[ast.AST]:
    """Yield the parts of `a.b` that a call changes: a.b and a.

    These are `a.b.pop()` if a.b is a container, and by the names of torch's functions `a.b.add_(1)`, `torch.relu_(a.b)`
    and `torch.add(1, 2, out=a.b)`.
    """
    written = [keyword.value for keyword in call.keywords if keyword.arg == "out"]
    match call.func:
        case ast.Attribute(value=target, attr=method):
            part = next(_parts_of(target))
            value = _value(part, file)
            if isinstance(value, _CONTAINERS) or (isinstance(part, ast.Subscript) and method not in _OF_CONTAINERS):
                yield from _parts_of(target) if method in _CHANGING | _OF_CONTAINERS else ()
            if _is_in_place(method):
                is_function = isinstance(value, ModuleType | type)
                written += call.args[:1] if is_function and is_of_torch(value) else [target] * (not is_function)
        case ast.Name(id=name) if _is_in_place(name) and is_of_torch(_value(call.func, file)):
            written += call.args[:1]
    for tensor in written:
        parts = [*_parts_of(tensor)]
        if _may_be_tensor(parts[0], file):
            yield from parts


def _is_in_place(method: str) -> bool:
    """Whether a function of torch with this name changes the values of its first argument."""
    return method.endswith("_") and not method.endswith("__") and method not in _NOT_IN_PLACE


def _may_be_tensor(part: ast.AST, file: ModuleType) -> bool:
    """Whether `a.b[c]` may be a tensor or array in the memory of a: not if its value in the file is something else, or
    if `c` may itself be a tensor, with which `a.b[c]` is a copy."""
    if isinstance(part, ast.Subscript):
        return isinstance(part.slice, ast.Constant | ast.Slice) or not isinstance(_value(part.value, file), _TENSORS)
    value = _value(part, file)
    return value is None or isinstance(value, _TENSORS)


def _all_changed_by(node: ast.AST, file: ModuleType) -> Iterator[ast.AST]:
    """Yield what `_changed_by` does, and what a call changes that reads it, too."""
    yield from _changed_by(node)
    if isinstance(node, ast.Call):
        yield from _called_on(node, file)


def _value(part: ast.AST, file: ModuleType) -> Any:
    """The present value of `a.b` or `a[0]` in a file; None if it has none."""
    match part:
        case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
            of = _value(inner, file)
            with suppress(LookupError, TypeError):
                return of[key] if type(of) in _INDEXED else None
        case ast.Name(id=name):
            return getattr(file, name, None)
        case ast.Attribute(value=inner, attr=name):
            of = _value(inner, file)
            if isinstance(of, ModuleType | Tensor):
                with suppress(Exception):  # of a module that imports its parts when they are asked for
                    return getattr(of, name, None)
            held: dict[str, Any] = of._parameters | of._buffers | of._modules if isinstance(of, nn.Module) else {}
            return held[name] if name in held else inspect.getattr_static(of, name, None)  # which runs no property
    return None


def changed_in_training(
    model: nn.Module, file: ModuleType, functions: Collection[str], *, after_dataset: bool = False
) -> Iterator[tuple[str, str, str]]:
    """Yield (line, function, variable) for each variable that a function of the user's file changes, or a function or
    class that it uses, and forward reads.

    Stage files have the value that it had when the model was traced.

    Args:
        functions: names of the functions that are called during training.
        after_dataset: whether the model is traced after dataset() was called, so that of what it uses only the methods
            that read samples count.
    """
    kinds = user_classes(model)
    helpers = {each for kind in kinds if kind.__module__ == file.__name__ for each in _used_by(kind, file)} - {*kinds}
    attributes_read = {name for kind in kinds for name in names_read(kind)}
    constants = {*_constants_of([*kinds, *helpers])}
    for name in filter(partial(hasattr, file), functions):
        keys = constants if name in ("optimizer", "dataset") else None
        used = {each for each in _used_by(getattr(file, name), file) if each.__module__ == file.__name__} - {*kinds}
        only_samples = name == "dataset" and after_dataset
        for each in sorted(used, key=attrgetter("__qualname__")):
            if only_samples and not isinstance(each, type):
                continue
            # a helper may keep a cache, which it alone reads
            read = {variable for reader in {*kinds, *helpers} - {each} for variable in names_read(reader, _GLOBALS)}
            earlier = vars(each).keys() - _READING_SAMPLES if only_samples else _BUILDING if name != "optimizer" else ()
            changed = _changed_in(each, earlier, file, kinds, read, attributes_read, keys)
            yield from ((line, name, variable) for line, variable in changed)


def _changed_in(
    source: type | FunctionType,
    earlier: Collection[str],
    file: ModuleType,
    kinds: Collection[type],
    read: set[str],
    attributes_read: set[str],
    keys: set[Any] | None,
) -> Iterator[tuple[str, str]]:
    """Yield (line, variable) for each variable of the file that a function or class changes and that is `read`, or of
    which an attribute is.

    Args:
        earlier: methods of a class that are called before the model is traced.
        keys: constants that may be keys, if an entry or attribute of a variable only counts where it is read itself:
            optimizer() and a dataset may set other entries of a common table of settings. None: all count.
    """
    tree, first, file_name = _tree(source)
    for function in tree.body[:1]:
        if not isinstance(function, ast.FunctionDef | ast.ClassDef):
            continue
        of_class = function.body if isinstance(function, ast.ClassDef) else []
        methods = [each for each in of_class if isinstance(each, ast.FunctionDef) and each.name in earlier]
        skipped = {id(node) for method in methods for node in ast.walk(method)}
        for node in ast.walk(function):
            if not isinstance(node, ast.expr) or id(node) in skipped:
                continue
            parts = [*_all_changed_by(node, file)]
            if not parts or not isinstance(owner := parts[-1], ast.Name) or not _is_global(owner.id, function, file):
                continue  # parts of CONFIG.rates["low"] = 1: CONFIG.rates and CONFIG
            attributes = {part.attr for part in parts if isinstance(part, ast.Attribute)}
            value = getattr(file, owner.id, None)
            match parts[0]:
                case ast.Attribute(value=of, attr="requires_grad") if isinstance(_value(of, file), Tensor):
                    continue  # stages follow it
                case ast.Subscript(slice=ast.Constant(value=key)) if keys is not None and key not in keys:
                    continue
                case ast.Attribute(attr=attribute) if keys is not None and attribute not in attributes_read:
                    continue
            is_state = isinstance(value, nn.Module) and isinstance(_value(parts[0], file), Tensor)
            if is_state and isinstance(node, ast.Call):
                continue  # stages have the parameters and buffers of the model themselves
            is_owner = value in kinds if isinstance(value, type) else isinstance(value, (nn.Module, ModuleType))
            if owner.id in read or (is_owner and not attributes_read.isdisjoint(attributes)):
                changed = parts[0] if isinstance(node, ast.Call) else node
                yield f"{file_name}:{first + node.lineno - 1}", ast.unparse(changed)


def _constants_of(sources: Iterable[type | FunctionType]) -> Iterator[Any]:
    """Yield the texts and numbers in the code of functions and methods."""
    for source in sources:
        methods = vars(source).values() if isinstance(source, type) else [source]
        codes = [inspect.unwrap(method).__code__ for method in methods if isinstance(method, FunctionType)]
        for code in codes:  # which grows
            codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
            yield from (constant for constant in code.co_consts if isinstance(constant, str | int))


def collected(file: ModuleType, function: str, reader: str, *, builds: bool = False) -> Iterator[tuple[str, str]]:
    """Yield (line, variable) for each variable of the user's file that a function changes and another one reads.

    Either may do so in functions and classes of the file that it uses. Those that both use do not count: they may keep
    a cache. `optimizer` is called before training, so as a reader of what training changes it stands for the classes
    that it uses.

    Args:
        builds: whether `reader` builds the model, so that of its classes only the methods that do so count.
    """
    changing, reading = _used_by(getattr(file, function), file), _used_by(getattr(file, reader), file, builds=builds)
    if reader == "optimizer" and function != "dataset":
        reading = {each for each in reading if isinstance(each, type)}
    tree, _, file_name = _tree(file)
    read = {
        name
        for each in reading - changing
        for name in {*names_read(each, _GLOBALS, builds=builds)} - _only_changed(tree, each.__name__)
    }
    changers = {each.__name__ for each in changing - reading}
    kinds = ast.FunctionDef | ast.ClassDef
    for defined in (node for node in tree.body if isinstance(node, kinds) and node.name in changers):
        for node in ast.walk(defined):
            for part in _all_changed_by(node, file):
                if isinstance(part, ast.Name) and part.id in read and _is_global(part.id, defined, file):
                    yield f"{file_name}:{part.lineno}", part.id
    if not builds and reader != "optimizer":
        yield from _collected_in_objects(file, function, reader)


def _only_changed(tree: ast.Module, name: str) -> set[str]:
    """Return the variables that a function or class of a file changes without reading them, such as a list of logs."""
    defined = [n for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name == name]
    nodes = [node for each in defined for node in ast.walk(each)]
    changed = {id(part): part for node in nodes for part in _changed_by(node)}
    read = {node.id for node in nodes if isinstance(node, ast.Name) and id(node) not in changed}
    return {part.id for part in changed.values() if isinstance(part, ast.Name)} - read


def _collected_in_objects(file: ModuleType, function: str, reader: str) -> Iterator[tuple[str, str]]:
    """Do `collected` for objects of the file's classes: `function` calls a method that sets what `reader` reads."""
    changing, reading = names_used(file, function), names_used(file, reader)
    tree, _, file_name = _tree(file)
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    for variable in sorted(changing & reading):
        kind = type(getattr(file, variable, None))
        if kind.__module__ != file.__name__ or kind.__name__ not in classes:
            continue
        methods = {node.name: node for node in classes[kind.__name__].body if isinstance(node, ast.FunctionDef)}
        read_by = [node for name in methods.keys() & reading for node in ast.walk(methods[name])]
        read = reading | {node.attr for node in read_by if isinstance(node, ast.Attribute)}
        for name in sorted(methods.keys() & changing - reading - _BUILDING):
            for part in (part for node in ast.walk(methods[name]) for part in _all_changed_by(node, file)):
                match part:
                    case ast.Attribute(value=ast.Name(id=owner), attr=attribute) if attribute in read:
                        if owner == next((argument.arg for argument in methods[name].args.args), None):
                            yield f"{file_name}:{part.lineno}", f"{variable}.{attribute}"


def kept_between_calls(
    file: ModuleType, functions: Collection[str], modules: Mapping[str, ModuleType]
) -> Iterator[tuple[str, str, str]]:
    """Yield (line, name of the module, variable) for each variable that one of these functions changes and one reads,
    or functions and classes that they use: what one call leaves there, the next one may read. An assignment that does
    not read the variable keeps nothing.

    Args:
        modules: the user's modules, by name.
    """
    used = {each for function in functions for each in _used_by(getattr(file, function), file, modules)}
    for name in sorted({each.__module__ for each in used} & modules.keys()):
        names = {each.__name__ for each in used if each.__module__ == name}
        yield from ((line, name, variable) for line, variable in _kept_in(modules[name], names))


def _kept_in(module: ModuleType, names: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield (line, variable) for each variable that these functions and classes of a module change and read."""
    tree, _, file_name = _tree(module)
    functions = [n for top in tree.body for n in (ast.walk(top) if isinstance(top, ast.FunctionDef) else [top])]
    defined = [n for n in functions if isinstance(n, ast.FunctionDef | ast.ClassDef) and n.name in names]
    nodes = [(node, each) for each in defined for node in ast.walk(each)]
    changed = {id(part): (part, each) for node, each in nodes for part in _all_changed_by(node, module)}
    changed |= {id(part): (part, each) for node, each in nodes for part in _changed_by_callee(node, module)}
    only_changed = {id(part) for node, _ in nodes for part in _changed_by(node)}
    read = {node.id for node, _ in nodes if isinstance(node, ast.Name) and id(node) not in only_changed}
    augmented = [part for node, _ in nodes if isinstance(node, ast.AugAssign) for part in _parts_of(node.target)]
    read |= {part.id for part in augmented if isinstance(part, ast.Name)}
    anew = {
        id(t) for node, _ in nodes if isinstance(node, ast.Assign) for t in node.targets if not _is_in(node.value, t)
    }
    for part, each in changed.values():
        if not isinstance(part, ast.Name) or id(part) in anew:
            continue
        if part.id in read and _is_global(part.id, each, module):
            yield f"{file_name}:{part.lineno}", part.id


def _changed_by_callee(node: ast.AST, module: ModuleType) -> Iterator[ast.AST]:
    """Yield the parts of each argument of a call that the called function changes, if it is the user's, heapq's or
    next()."""
    if not isinstance(node, ast.Call):
        return
    function = _value(node.func, module)
    is_next = isinstance(node.func, ast.Name) and node.func.id == "next"
    if is_next or (isinstance(function, BuiltinFunctionType) and function.__module__ in ("_heapq", "_bisect")):
        yield from (part for argument in node.args[:1] for part in _parts_of(argument))
    if isinstance(function, FunctionType) and (defined := _tree(function)[0].body):
        changed = {p.id for n in ast.walk(defined[0]) for p in _all_changed_by(n, module) if isinstance(p, ast.Name)}
        arguments = [*zip(function.__code__.co_varnames, node.args, strict=False)]
        for name, argument in arguments + [(keyword.arg, keyword.value) for keyword in node.keywords]:
            yield from _parts_of(argument) if name in changed else ()


def variables_used(file: ModuleType, function: str, modules: Mapping[str, ModuleType]) -> Iterator[tuple[str, str]]:
    """Yield (name of the module, variable) for each variable that a function reads, or functions and classes that it
    uses.

    Args:
        modules: the user's modules, by name.
    """
    for each in _used_by(getattr(file, function), file, modules):
        yield from ((module.__name__, name) for module, name in _variables_read(each, file, modules))


def names_used(file: ModuleType, function: str) -> set[str]:
    """Return the variables and attributes that a function of the user's file reads, or what it uses of the file."""
    return {name for each in _used_by(getattr(file, function), file) for name in names_read(each)}


def _is_in(value: ast.AST, target: ast.AST) -> bool:
    """Whether an expression reads the variable that is assigned."""
    return any(isinstance(n, ast.Name) and isinstance(target, ast.Name) and n.id == target.id for n in ast.walk(value))


def _used_by(
    source: Any, file: ModuleType, modules: Mapping[str, ModuleType] | None = None, *, builds: bool = False
) -> set[type | FunctionType]:
    """Return a function, or the class of a callable object or bound method, with the functions and classes of its file
    that it uses.

    Args:
        modules: the user's modules, by name: then with those of all these, and with the classes of objects.
    """
    used = [*_code_of(source, of_objects=True)]
    for each in used:  # which grows
        variables = _variables_read(each, file, modules or {file.__name__: file}, builds=builds)
        values = [getattr(module, name) for module, name in variables]
        values += bound_values(each).values() if isinstance(each, FunctionType) else ()  # such as what it decorates
        code = {n for value in values for n in _code_of(value, of_objects=bool(modules))}
        used += {n for n in code if n.__module__ in (modules or [file.__name__])} - {*used}
    return {*used}


def _code_of(value: Any, *, of_objects: bool) -> Iterator[type | FunctionType]:
    """Yield a function or class, those in a partial and, if asked for, the class of an object or bound method."""
    match value:
        case type() | FunctionType():
            yield value
        case MethodType():
            yield from _code_of(value.__self__, of_objects=of_objects)
        case partial():
            yield from (code for each in bound_values(value).values() for code in _code_of(each, of_objects=of_objects))
        case _ if of_objects:
            yield type(value)


def _variables_read(
    source: type | FunctionType, file: ModuleType, modules: Mapping[str, ModuleType], *, builds: bool = False
) -> Iterator[tuple[ModuleType, str]]:
    """Yield (module, variable) for each variable that a function or class reads: in its own module, or as an attribute
    of another one of these modules."""
    own = modules.get(source.__module__, file)
    for name in names_read(source, _GLOBALS, builds=builds):
        if hasattr(own, name):
            yield own, name
        other = getattr(own, name, None)
        if isinstance(other, ModuleType) and other.__name__ in modules:
            yield from ((other, attribute) for attribute in names_read(source) if hasattr(other, attribute))


def _is_global(name: str, function: ast.FunctionDef | ast.ClassDef, file: ModuleType) -> bool:
    """Whether a name in a function is that of a variable of its file."""
    nodes = [*ast.walk(function)]
    if any(isinstance(node, ast.Global) and name in node.names for node in nodes):
        return True
    assigned = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return name not in assigned | {node.arg for node in nodes if isinstance(node, ast.arg)} and hasattr(file, name)


def names_read(
    source: type | Callable[..., Any], operations: Collection[str] = _READING, *, builds: bool = False
) -> Iterator[str]:
    """Yield the variables of files, and the attributes, that a function or a class's methods read by `operations`.

    Args:
        builds: whether those methods of a class count that build an object, instead of all others.
    """
    methods = [source]
    if isinstance(source, type):
        methods = [f for name, f in vars(source).items() if (name in _BUILDING if builds else name not in _NOT_FORWARD)]
    functions = [f for method in methods if isinstance(method, FunctionType) for f in (method, inspect.unwrap(method))]
    codes = [function.__code__ for function in functions if isinstance(function, FunctionType)]
    for code in codes:  # which grows
        codes += [constant for constant in code.co_consts if isinstance(constant, CodeType)]
        yield from (each.argval for each in dis.get_instructions(code) if each.opname in operations)


def _tree(source: type | ModuleType | FunctionType) -> tuple[ast.Module, int, str]:
    """Return the syntax tree of a class or file, its first line and the file's name; an empty tree if it has none."""
    try:
        lines, first = inspect.getsourcelines(source)
        return ast.parse(textwrap.dedent("".join(lines))), max(first, 1), Path(inspect.getsourcefile(source) or "").name
    except (OSError, TypeError, SyntaxError):
        return ast.Module([], []), 1, ""
