"""Write the model's output in a stage file, in the form for the user's loss: tuples, dicts and classes like its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch.utils._pytree import is_structseq_instance

from pdtool.frontend.model_io import children, global_name
from pdtool.frontend.operators import ByMode, Size, State, Value
from pdtool.generator.expressions import literal, sequence

_DATACLASS = """
@dataclass
class {name}:
    \"""What the model returns.\"""

{fields}

"""
_MAPPING = """
class {name}(dict):
    \"""What the model returns: output["{key}"], output.{key} or output[0].\"""

{left_out}    def __init__(self, fields):
        super().__init__(fields)
        self.__dict__.update(fields)

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

"""


def output_imports(output: Any) -> list[str]:
    """Return the import statements of Python's own library that the model's output needs, and an empty line."""
    containers = list(_containers(output))
    lines = [
        *(["from collections import namedtuple"] if any(map(_is_named_tuple, containers)) else []),
        *(["from dataclasses import dataclass"] if any(map(_is_plain_dataclass, containers)) else []),
    ]
    return [*lines, ""] if lines else []


def output_classes(output: Any) -> list[str]:
    """Return the lines that define classes like those in the model's output."""
    return [line for text in dict.fromkeys(map(_definition, _containers(output))) for line in text.splitlines()]


def output_class_names(output: Any) -> dict[str, str]:
    """Return the name of each class that `output_classes` defines -> `module:Class` of the one that it is like."""
    kinds = {type(value) for value in _containers(output) if _definition(value)}
    return {kind.__name__: name for kind in kinds if (name := global_name(kind))}


def output_text(value: Any, write: Callable[[Any], str]) -> str:
    """Return the expression of the model's output; `write` returns the text of a tensor or a constant."""
    inner, name = partial(output_text, write=write), type(value).__name__
    if isinstance(value, ByMode):
        return f"{inner(value.training)} if self.training else {inner(value.evaluation)}"
    if is_structseq_instance(value):
        return f"{type(value).__module__}.{name}({sequence(tuple(value), inner)})"
    if _is_named_tuple(value):
        return f"{name}({', '.join(map(inner, value))})"
    if isinstance(value, Mapping):
        items = ", ".join(f"{literal(key)}: {inner(item)}" for key, item in value.items())
        return f"{name}({{{items}}})" if _has_attributes(value) else f"{{{items}}}"
    if isinstance(value, (list, tuple)):
        return sequence(value, inner)
    if _is_plain_dataclass(value):
        return f"{name}({', '.join(f'{field}={inner(item)}' for field, item in _items(value) or ())})"
    return write(value)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """(key, value) pairs of a container; None for a tensor or a constant, and for their stand-ins in a graph."""
    return None if isinstance(value, (Value, State, Size, ByMode)) else children(value)


def _containers(value: Any) -> Iterator[Any]:
    """Yield all containers in the output, inner ones first."""
    if isinstance(value, ByMode):
        yield from (container for output in (value.training, value.evaluation) for container in _containers(output))
        return
    inner = _items(value)
    for _, child in inner or ():
        yield from _containers(child)
    if inner is not None:
        yield value


def _definition(value: Any) -> str:
    """The name of a container's class that the stage file must define, or ""."""
    name = type(value).__name__
    if _is_named_tuple(value):
        return f"{name} = namedtuple({literal(name)}, [{', '.join(map(literal, value._fields))}])\n\n"
    if _is_plain_dataclass(value):
        fields = "\n".join(f"    {field}: object" for field, _ in _items(value) or ())
        return _DATACLASS.format(name=name, fields=fields)
    if isinstance(value, Mapping) and _has_attributes(value):
        left_out = [name for name in getattr(type(value), "__dataclass_fields__", ()) if name not in value]
        return _MAPPING.format(
            name=name,
            key=next((key for key in value if key.isidentifier()), "name"),
            left_out=f"    {' = '.join(left_out)} = None\n\n" if left_out else "",
        )
    return ""


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _has_attributes(value: Mapping[Any, Any]) -> bool:
    """Whether it is more than a dict: a subclass, such as those of `transformers`, whose items are attributes, too."""
    return not type(value).__module__.startswith(("builtins", "collections")) and all(
        isinstance(key, str) for key in value
    )


def _is_plain_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, Mapping) and _items(value) is not None
