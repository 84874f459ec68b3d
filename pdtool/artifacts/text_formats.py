"""The text formats of artifacts, JSON and YAML: read strictly, so that each text has one meaning, and written."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import yaml

from pdtool.errors import FieldError

_EXPONENTIAL = r"[-+]?([0-9]+(\.[0-9]*)?|\.[0-9]+)[eE][-+]?[0-9]+$"
_MAX_DEPTH = 30  # artifacts have a depth of about six
_MAX_INTEGER = 10**30
_MAX_NUMBER_CHARACTERS = 1000
_MAX_YAML_CHARACTERS = 5_000_000  # PyYAML takes up to a minute for them; a large artifact has one million
_TEXT_TAG, _MERGE_TAG = "tag:yaml.org,2002:str", "tag:yaml.org,2002:merge"
_SURROGATE = re.compile("[\ud800-\udfff]")


class FormatError(ValueError):
    """A text is not whole JSON or YAML; the message says where."""


def read_json(text: str) -> Any:
    """Read JSON, without repeated keys.

    Raises:
        FormatError: it is not whole.
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


def read_yaml(text: str) -> Any:
    """Read YAML as the safe loader does, without aliases and repeated keys; raises as `read_json` does."""
    if len(text) > _MAX_YAML_CHARACTERS:
        raise FormatError(f"it has {len(text)} characters, more than {_MAX_YAML_CHARACTERS}")
    try:
        content = yaml.load(text, Loader=_StrictLoader)
    except RecursionError:
        raise FormatError("it is nested too deeply") from None
    except (yaml.YAMLError, TypeError, ValueError, ArithmeticError, AttributeError, LookupError) as error:
        # What PyYAML's parser lets through its constructors stumble over, as over a date of month 13.
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
    return yaml.dump(
        content,
        None,
        _Dumper,
        sort_keys=False,
        allow_unicode=True,
        width=120,
        default_flow_style=None,
        explicit_end=True,
    )


def check_plain(content: Any, depth: int = 0) -> None:
    """Refuse what pdtool never writes: dates, sets, bytes, NaN, 1e999, half a character, keys that are no text.

    Raises:
        FieldError: it names the field.
    """
    if fault := _fault(content) or (f"is nested more than {_MAX_DEPTH} deep" if depth > _MAX_DEPTH else ""):
        raise FieldError("", fault)
    if isinstance(content, dict):
        for key, value in content.items():
            if fault := _fault(key) if isinstance(key, str) else f"{key!r:.40} is a key, but no text; put it in quotes":
                raise FieldError("", fault)
            with _within(f"{key:.80}"):
                check_plain(value, depth + 1)
    elif isinstance(content, list):
        for index, value in enumerate(content):
            with _within(f"[{index}]"):
                check_plain(value, depth + 1)


@contextmanager
def _within(outer: str) -> Iterator[None]:
    try:
        yield
    except FieldError as error:
        between = "." if error.field and not error.field.startswith("[") else ""
        raise FieldError(f"{outer}{between}{error.field}", str(error)) from None


def _fault(value: Any) -> str:
    """Say what is wrong with a value by itself; empty when nothing is."""
    if isinstance(value, str):
        return "" if value.isascii() or not _SURROGATE.search(value) else f"{value!r:.80} holds half a character"
    if value is None or isinstance(value, (bool, list, dict)):
        return ""
    if isinstance(value, float):
        return "" if math.isfinite(value) else f"{value} is no finite number"
    if isinstance(value, int):
        text = str(value) if abs(value) > _MAX_INTEGER else ""
        return f"{text[:12]}... has {len(text)} digits, more than {len(str(_MAX_INTEGER)) - 1}" if text else ""
    return f"{value!r:.80} is neither text nor a number; put it in quotes"


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        raise ValueError(f"key {_repeated(key for key, _ in pairs)!r} stands twice")
    return content


def _repeated(keys: Iterable[str]) -> str:
    return str(Counter(keys).most_common(1)[0][0])[:80]


class _Dumper(yaml.SafeDumper):
    """A SafeDumper that quotes texts which `_StrictLoader` would read as a number."""


class _StrictLoader(yaml.SafeLoader):
    """A SafeLoader that refuses aliases (no billion laughs) and repeated keys, and reads 1e9 as a number.

    So does YAML 1.2; to PyYAML, which reads YAML 1.1, only 1.0e+9 is a number.
    """

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("aliases are not used in artifacts")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> Any:
        line = node.start_mark.line + 1
        if not all(isinstance(key, yaml.ScalarNode) for key, _ in node.value):
            raise yaml.YAMLError(f"a key is no text (line {line})")
        if any(key.tag == _MERGE_TAG for key, _ in node.value):
            raise yaml.YAMLError(f"keys are not merged in artifacts (line {line})")
        keys = [key.value for key, _ in node.value]
        if len(set(keys)) < len(keys):
            raise yaml.YAMLError(f"key {_repeated(keys)!r} stands twice (line {line})")
        return super().construct_mapping(node, deep)

    def construct_scalar(self, node: Any) -> Any:
        if node.tag != _TEXT_TAG and len(node.value) > _MAX_NUMBER_CHARACTERS:
            raise yaml.YAMLError(f"a number of {len(node.value)} characters (line {node.start_mark.line + 1})")
        return super().construct_scalar(node)


def _exponential(loader: _StrictLoader, node: yaml.ScalarNode) -> float:
    return float(node.value)


for _class in (_Dumper, _StrictLoader):
    _class.add_implicit_resolver("!exponential", re.compile(_EXPONENTIAL), list("+-.0123456789"))
_StrictLoader.add_constructor("!exponential", _exponential)
