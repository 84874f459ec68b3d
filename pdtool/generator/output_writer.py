"""Write what the model returns, as the user's loss takes it: tuples and dicts, and classes like those of the model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import is_structseq_instance

from pdtool.frontend.model_io import children
from pdtool.frontend.operators import ByMode, Size, State, Value
from pdtool.generator.expressions import literal

_MAPPING = """
class {name}(dict):
    \"""What the model returns: output["{key}"], output.{key} or output[0].\"""

{left_out}    def __init__(self, fields):
        super().__init__(fields)
        self.__dict__.update(fields)

    def __getitem__(self, key):
        return super().__getitem__(key) if isinstance(key, str) else tuple(self.values())[key]

"""
_DATACLASS = """
@dataclass
class {name}:
    \"""What the model returns.\"""

{fields}

"""


@dataclass(frozen=True)
class OutputWriter:
    """Writes the output of the last stage.

    Attributes:
        output: what the model returns, in containers of its own types; None for a stage that is not the last.
        write: gives the text of a tensor or a constant.
    """

    output: Any
    write: Callable[[Any], str]

    def imports(self) -> list[str]:
        """Return the import statements of Python's own library, and an empty line."""
        containers = self._containers()
        lines = [
            *(["from collections import namedtuple"] if any(map(_is_named_tuple, containers)) else []),
            *(["from dataclasses import dataclass"] if any(map(_is_plain_dataclass, containers)) else []),
        ]
        return [*lines, ""] if lines else []

    def classes(self) -> list[str]:
        """Return the lines that define classes like those that the model returns."""
        texts = dict.fromkeys(_definition(container) for container in self._containers())
        return [line for text in texts for line in text.splitlines()]

    def text(self) -> str:
        """Return the expression of the whole output."""
        return self._text(self.output)

    def _containers(self) -> list[Any]:
        return list(_containers(self.output))

    def _text(self, value: Any) -> str:
        if isinstance(value, ByMode):
            return f"{self._text(value.training)} if self.training else {self._text(value.evaluation)}"
        if is_structseq_instance(value):
            return f"{type(value).__module__}.{type(value).__name__}(({self._texts(value)}))"
        if _is_named_tuple(value):
            return f"{type(value).__name__}({self._texts(value)})"
        if isinstance(value, Mapping):
            items = ", ".join(f"{literal(key)}: {self._text(item)}" for key, item in value.items())
            return f"{type(value).__name__}({{{items}}})" if _has_attributes(value) else f"{{{items}}}"
        if isinstance(value, list):
            return f"[{self._texts(value)}]"
        if isinstance(value, tuple):
            return f"({self._texts(value)}{',' if len(value) == 1 else ''})"
        if _is_plain_dataclass(value):
            items = ", ".join(f"{name}={self._text(item)}" for name, item in _items(value) or ())
            return f"{type(value).__name__}({items})"
        return self.write(value)

    def _texts(self, values: Any) -> str:
        return ", ".join(self._text(value) for value in values)


def _items(value: Any) -> list[tuple[Any, Any]] | None:
    """(key, value) of what a container holds; None for a tensor or a constant, and what stands for one in a graph."""
    return None if isinstance(value, (Value, State, Size, ByMode)) else children(value)


def _containers(value: Any) -> Iterator[Any]:
    """Yield all containers in the output, those inside before those that hold them."""
    if isinstance(value, ByMode):
        yield from (container for output in (value.training, value.evaluation) for container in _containers(output))
        return
    inner = _items(value)
    for _, child in inner or ():
        yield from _containers(child)
    if inner is not None:
        yield value


def _definition(value: Any) -> str:
    """The class of a container that Python has none for, or ""."""
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
