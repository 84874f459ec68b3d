"""Read and write the text formats of artifacts, JSON and YAML; reading is strict, so that each text has one meaning.

Workers also send each other JSON, of a type that both know.
"""

from __future__ import annotations

import json
import math
import re
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeVar

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from pdtool.artifacts.fields import first_fault
from pdtool.errors import FieldError

_EXPONENTIAL = r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"
_MAX_DEPTH = 30  # artifacts have a depth of about six
_MAX_INTEGER = 10**30
_MAX_NUMBER_CHARACTERS = 1000
_MAX_YAML_CHARACTERS = 5_000_000  # PyYAML takes up to a minute for them; a large artifact has one million
_TEXT_TAG, _MERGE_TAG = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_SURROGATE = re.compile("[\ud800-\udfff]")
_MESSAGE = ConfigDict(
    strict=True, ser_json_inf_nan="constants", ser_json_bytes="base64", val_json_bytes="base64", extra="forbid"
)
_T = TypeVar("_T")


class FormatError(ValueError):
    """A text is not valid JSON or YAML; the message says where."""


def read_json(text: str) -> Any:
    """Read JSON, without repeated keys.

    Raises:
        FormatError: it is not valid.
        FieldError: it holds a value that no artifact has (see `check_plain`).
    """
    try:
        content = json.loads(text, object_pairs_hook=_unrepeated)
    except RecursionError:
        raise FormatError("it is nested too deeply") from None
    except ValueError as error:
        raise FormatError(str(error)) from error
    check_plain(content)
    return content


def write_message(value: _T, kind: type[_T]) -> bytes:
    """Write a message to another worker, as JSON; its texts must be Unicode.

    Args:
        kind: its type, of numbers, texts, bytes, None, containers, dataclasses and artifacts.
    """
    return _adapter(kind).dump_json((value,), warnings="error")  # type: ignore[arg-type]


def read_message(content: bytes, kind: type[_T]) -> _T:
    """Read a message of a type; raises FormatError if it is not of that type. Nothing in it is executed."""
    adapter: TypeAdapter[tuple[_T]] = _adapter(kind)  # type: ignore[arg-type]
    try:
        return adapter.validate_json(content)[0]
    except ValidationError as error:
        field, what = first_fault(error)
        raise FormatError(f"{field}: {what}" if field else what) from error


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    """Return the adapter that writes and reads a type, inside a tuple because a dataclass alone takes no
    configuration."""
    return TypeAdapter(tuple[kind], config=_MESSAGE)


def read_yaml(text: str) -> Any:
    """Read YAML as the safe loader does, without aliases and repeated keys; raises as `read_json` does."""
    if len(text) > _MAX_YAML_CHARACTERS:
        raise FormatError(f"it has {len(text)} characters, more than {_MAX_YAML_CHARACTERS}")
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except RecursionError:
        raise FormatError("it is nested too deeply") from None
    except (yaml.YAMLError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        # PyYAML's parser accepts some texts that its constructors fail on, such as a date of month 13.
        where = re.sub(r'in "<(unicode|byte) string>", ', "at ", str(error))
        raise FormatError(" ".join(where.split())) from error
    check_plain(content)
    return content


def write_json(content: Any) -> str:
    """Write JSON in which control characters of all kinds are escaped."""
    text = json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    return re.sub("[\x7f-\x9f\u2028\u2029]", lambda found: f"\\u{ord(found[0]):04x}", text)


def write_yaml(content: Any) -> str:
    """Write YAML that ends with `...`."""
    return _dumped(content, explicit_end=True)


def has_comments(text: str) -> bool:
    """Whether YAML has a comment, which pdtool never writes unasked."""
    return "#" in text and any("#" in line for line in _between_tokens(text, 0, len(text)))


def with_values(text: str, values: Mapping[str, Any]) -> str:
    """Return YAML in which some keys of its mapping have other values.

    Everything else stays the same: comments, order and blank lines. Comments inside a changed value move below it. New
    keys are added at the end, with the text's line endings.

    Raises:
        FormatError: the text is not a YAML mapping over several lines.
    """
    root, content = yaml.compose(text, Loader=_StrictLoader), read_yaml(text)
    if not isinstance(root, yaml.MappingNode) or root.flow_style:
        raise FormatError("it is not a mapping over several lines")
    changed = {name: value for name, value in values.items() if name not in content or content[name] != value}
    indent = " " * root.start_mark.column
    styles = {name: None if isinstance(value, dict | list) else False for name, value in changed.items()}
    blocks = {name: textwrap.indent(_dumped({name: changed[name]}, styles[name]), indent) for name in changed}
    end = text.find("\n", _end(text, root)) + 1
    text = text[:end] + "".join(blocks[name] for name in blocks if name not in content) + text[end:]
    for key, old in reversed(root.value):
        if key.value in blocks:
            begin, end = key.start_mark.index, _end(text, old)
            inside = [line[line.find("#") :].rstrip() for line in _between_tokens(text, begin, end) if "#" in line]
            text = text[:begin] + f"\n{indent}".join([blocks[key.value].strip(), *inside]) + text[end:]
    return text.replace("\r\n", "\n").replace("\n", "\r\n") if "\r\n" in text else text


def _between_tokens(text: str, begin: int, end: int) -> Iterator[str]:
    """Yield the lines between the tokens of a part of YAML: spaces and comments."""
    position = begin
    for token in yaml.scan(text, Loader=_StrictLoader):
        if token.start_mark.index >= begin:
            yield from text[position : min(token.start_mark.index, end)].splitlines()
            position = max(begin, token.end_mark.index)
        if position >= end:
            return


def _end(text: str, node: yaml.Node) -> int:
    """Return where a node's text ends; for several lines, PyYAML's mark is after the spaces and comments that
    follow."""
    if isinstance(node, yaml.CollectionNode) and not node.flow_style and node.value:
        last = node.value[-1]
        return _end(text, last[1] if isinstance(node, yaml.MappingNode) else last)
    return node.start_mark.index + len(text[node.start_mark.index : node.end_mark.index].rstrip(" \t\r\n"))


def _dumped(content: Any, flow_style: bool | None = None, **layout: Any) -> str:
    """Write YAML, in which `flow_style` None puts a mapping or a list of scalars, and nothing else, on one line."""
    style: dict[str, Any] = {"default_flow_style": flow_style, "width": 120, "sort_keys": False, "allow_unicode": True}
    return str(yaml.dump(content, None, _Dumper, **style, **layout))


def check_plain(content: Any, field: str = "", depth: int = 0) -> None:
    """Refuse values that pdtool never writes: dates, sets, bytes, NaN, 1e999, surrogates, keys that are not text.

    Args:
        field: place of the content in an artifact, `depth` levels deep.

    Raises:
        FieldError: it names the field.
    """
    if fault := _fault(content) or (f"is nested more than {_MAX_DEPTH} deep" if depth > _MAX_DEPTH else ""):
        raise FieldError(field, fault)
    if isinstance(content, dict):
        for key, value in content.items():
            if fault := _fault(key) if isinstance(key, str) else f"{key!r:.40} is a key but not text; put it in quotes":
                raise FieldError(field, fault)
            check_plain(value, f"{field}.{key:.80}" if field else key[:80], depth + 1)
    elif isinstance(content, list):
        for index, value in enumerate(content):
            check_plain(value, f"{field}[{index}]", depth + 1)


def _fault(value: Any) -> str:
    """Say what is wrong with a value by itself; "" if nothing is."""
    if isinstance(value, str):
        return "" if value.isascii() or not _SURROGATE.search(value) else f"{value!r:.80} has a lone surrogate"
    if value is None or isinstance(value, (bool, list, dict)):
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{value} is not a finite number"
    if isinstance(value, int):
        text = str(value) if abs(value) > _MAX_INTEGER else ""
        return f"{text[:12]}... has {len(text)} digits, more than {len(str(_MAX_INTEGER)) - 1}" if text else ""
    return f"{value!r:.80} is neither text nor a number; put it in quotes"


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        [(repeated, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise ValueError(f"key {repeated[:80]!r} appears twice")
    return content


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that quotes texts which `_StrictLoader` would read as a number."""


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses aliases (no billion laughs) and repeated keys, and reads 1e9 as a number.

    YAML 1.2 does so too; for PyYAML, which reads YAML 1.1, only 1.0e+9 is a number.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            line = self.get_event().start_mark.line + 1  # type: ignore[no-untyped-call]
            raise yaml.YAMLError(f"an alias: write its value instead (line {line})")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        line = node.start_mark.line + 1
        if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
            raise yaml.YAMLError(f"a key is not text (line {line})")
        if any(key.tag == _MERGE_TAG for key, _ in node.value):
            raise yaml.YAMLError(f"artifacts cannot merge keys with `<<` (line {line})")
        lines: dict[str, int] = {}
        for key, _ in node.value:
            here = key.start_mark.line + 1
            if key.value in lines:
                raise yaml.YAMLError(f"key {key.value[:80]!r} appears twice (lines {lines[key.value]} and {here})")
            lines[key.value] = here
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        if node.tag != _TEXT_TAG and len(node.value) > _MAX_NUMBER_CHARACTERS:
            raise yaml.YAMLError(
                f"a number is too long (line {node.start_mark.line + 1}): {len(node.value)} characters"
            )
        return super().construct_scalar(node)


for _class in (_Dumper, _StrictLoader):
    _class.add_implicit_resolver("!exponential", re.compile(_EXPONENTIAL), list("+-.0123456789"))
_StrictLoader.add_constructor("!exponential", lambda loader, node: float(node.value))
