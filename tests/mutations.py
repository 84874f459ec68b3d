"""Hypothesis strategies for artifacts that a stranger damaged or forged: valid ones, changed in structure and text."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import samples
import yaml
from graphs import chain
from hypothesis import strategies as st

from pdtool.artifacts.artifact import Artifact
from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.device import TABLE, Devices
from pdtool.artifacts.plan import Plan, PlanOptions
from pdtool.artifacts.profile import Profile
from pdtool.planner.choice.make_plan import make_plan

ROOT = Path(__file__).parent.parent
PROFILE = chain([1e-3, 2e-3, 3e-3, 1e-3, 2e-3, 1e-3], parameters=1000, crossing=500, stash=700)
PROFILE_PATH = "net.json"


def _plan(topology: tuple[int, ...], **options: Any) -> Plan:
    cluster = make_cluster(topology, [1e9] * len(topology), memory_bytes=10**6)
    return make_plan(PROFILE, PROFILE_PATH, cluster, PlanOptions(**options))


def _valid() -> dict[str, list[Artifact]]:
    examples: list[Artifact] = [
        PROFILE,
        _plan((2,)),
        _plan((2, 2)),
        _plan((3,), straight=True),
        _plan((2,), schedule="interleaved", microbatches=4),
        _plan((2,), schedule="2bw"),
        _plan((4,), schedule="1f1b-flush", microbatches=4),
        Profile.load(ROOT / "profiles" / "mnist.json"),
        Devices.load(TABLE),
        *samples.ALL,
    ]
    kinds: dict[str, list[Artifact]] = {}
    for artifact in examples:
        kinds.setdefault(artifact.KIND, []).append(artifact)
    return kinds


VALID = _valid()
_TEXTS = (
    "",
    "x",
    "a.b",
    "..",
    "/dev/zero",
    "\x1b[2J",
    "[/b]",
    "nan",
    "1e9",
    "ä\u202e",
    "x" * 500,
    "x" * 501,
    "batch",
    "'\"",
    "-",
)
_NUMBERS = (0, 1, -1, 2, 3, 7, 100, 9999, 10**5, 10**9, 10**15, 10**18, 10**31, -(10**18), 2**63, 10**400)
_FLOATS = (0.0, -0.0, 0.5, -1.5, 1e-324, 5e-324, 1e-31, 1e-30, 1e-9, 1e9, 1e18, 1e30, 1e100, 1e308, 2.0)
_NOT_FINITE = (float("nan"), float("inf"), -float("inf"))
_VALUES = (None, True, False, [], {}, [[]], {"a": {}}, *_TEXTS, *_NUMBERS, *_FLOATS, *_NOT_FINITE)
_CHANGES = ("value", "value", "scale", "drop", "take", "repeat", "rename", "retype", "nest", "swap")
_TIMES = (2, 3, 10, 300)
_DEPTHS = (5, 25, 40, 100)


def places(content: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key or index) of every value in the content."""
    members = content.items() if isinstance(content, dict) else enumerate(content)
    for key, value in list(members):
        yield content, key
        if isinstance(value, (dict, list)):
            yield from places(value)


def _nested(value: Any, depth: int) -> Any:
    for _ in range(depth):
        value = [value] if depth % 2 else {"a": value}
    return value


@st.composite
def contents(draw: st.DrawFn, artifact: Artifact) -> Any:
    """The content of an artifact with one to three changes of its structure, half of them gentle."""
    content = json.loads(artifact.model_dump_json(exclude={"sha256"}))
    is_gentle = draw(st.booleans())
    for _ in range(draw(st.integers(1, 3))):
        if spots := list(places(content)):
            container, key = _one_of(draw, spots)
            (_change_a_little if is_gentle else _change)(draw, container, key, spots)
    return content


def _one_of(draw: st.DrawFn, values: list[Any]) -> Any:
    return values[draw(st.integers(0, len(values) - 1))]


def _change_a_little(draw: st.DrawFn, container: Any, key: Any, spots: list[tuple[Any, Any]]) -> None:
    """Give a value another of its type: a number, another value of the artifact, another order, a piece less."""
    value = container[key]
    alike = [other[name] for other, name in spots if type(other[name]) is type(value) and other[name] != value]
    match value:
        case bool():
            container[key] = not value
        case int():
            container[key] = abs(draw(st.sampled_from((value + 1, value - 1, value * 2, value * 1000, 0, 1, 5, 10**9))))
        case float():
            container[key] = draw(st.sampled_from((value * 2, value * 1e-6, value * 1e6, 0.0, 1e-30, 1e9, 1e18)))
        case list() if value and isinstance(value[0], (int, str, dict)):
            container[key] = draw(st.permutations(value[:9])) + value[9:] if draw(st.booleans()) else value[:-1]
        case str() if alike:
            container[key] = _one_of(draw, alike)


def _change(draw: st.DrawFn, container: Any, key: Any, spots: list[tuple[Any, Any]]) -> None:
    value = container[key]
    match draw(
        st.sampled_from(["value", "value", "scale", "drop", "take", "repeat", "rename", "retype", "nest", "swap"])
    ):
        case "value":
            container[key] = copy.deepcopy(draw(st.sampled_from(_VALUES)))
        case "scale" if isinstance(value, (int, float)):
            container[key] = value * draw(st.sampled_from((-1, 0, 2, 10, 1000, 10**6, 10**12, 1e-12, 1e200)))
        case "drop":
            del container[key]
        case "take":  # another value of the same artifact: wrong references, wrong kinds
            other, name = _one_of(draw, spots)
            if name in other if isinstance(other, dict) else name < len(other):
                container[key] = copy.deepcopy(other[name])
        case "repeat" if isinstance(value, list) and value:
            container[key] = (value * draw(st.sampled_from(_TIMES)))[:2000]
        case "rename" if isinstance(container, dict):
            container[draw(st.sampled_from(("x", "format", "name", "", "sha256", f"{key}_", key[:-1])))] = (
                container.pop(key)
            )
        case "retype":
            container[key] = draw(st.sampled_from((str(value), [value], {"a": value}, repr(value), bool(value))))
        case "nest":
            container[key] = _nested(value, draw(st.sampled_from(_DEPTHS)))
        case "swap" if isinstance(value, list):
            container[key] = draw(st.permutations(value[:9])) + value[9:]


def _sealed(artifact: Artifact, content: Any) -> Any:
    """With the digests that it would have, had pdtool written it."""
    if isinstance(content.get("predicted"), dict) and artifact.KIND == "plan":
        skipped = {"format", "tool_version", "sha256", "name", "model", "profile", "predicted", "why"}
        text = json.dumps({k: v for k, v in content.items() if k not in skipped}, sort_keys=True)
        content["predicted"]["plan_sha256"] = hashlib.sha256(text.encode()).hexdigest()
    if not artifact.SEALED:
        return content
    text = json.dumps({k: v for k, v in content.items() if k != "sha256"}, sort_keys=True, ensure_ascii=False)
    return {**content, "sha256": hashlib.sha256(text.encode(errors="replace")).hexdigest()}


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


def _encoded(draw: st.DrawFn, artifact: Artifact, content: Any) -> bytes:
    if artifact.KIND in ("profile", "report") or draw(st.integers(0, 9)) == 0:
        return json.dumps(content, ensure_ascii=draw(st.booleans())).encode(errors="surrogateescape")
    dumper = _Dumper if draw(st.integers(0, 9)) else yaml.SafeDumper  # the second writes aliases
    try:
        return yaml.dump(content, None, dumper, explicit_end=True, allow_unicode=True, sort_keys=False).encode()
    except (RecursionError, ValueError):  # too deep for the writer, or a number with more digits than Python writes
        return b"[" * 10_000


@st.composite
def damaged_texts(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes that were cut, flipped, inserted, repeated or left out."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        end = min(len(data), at + draw(st.integers(1, 40)))
        match draw(st.sampled_from(["cut", "flip", "insert", "repeat", "drop"])):
            case "cut":
                data = data[:at]
            case "flip" if data:
                data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
            case "insert":
                data = data[:at] + draw(st.binary(max_size=8) | st.sampled_from(_SYNTAX)) + data[at:]
            case "repeat":
                data = data[:end] + data[at:end] * draw(st.sampled_from(_TIMES)) + data[end:]
            case "drop":
                data = data[:at] + data[end:]
    return data


_SYNTAX = (
    *(b"[" * 2000, b"{a: " * 500, b"- " * 300, b"1:1" * 900, b"0x" + b"f" * 5000, b"9" * 5000),
    *(b"&x ", b"*x ", b"? ", b": ", b"<<: ", b"=", b"~", b"\t", b"|2\n", b"NaN", b"1:2:3", b"2020-13-45"),
    *(b"!!python/name:os.system ", b"!!binary ", b"!!set {a}", b"!!timestamp x", b"!!float x"),
    *(b"\n...\n---\n", b"%YAML 9.9\n", b"\xff\xfe", b"\xef\xbb\xbf", b"\x00", b"\x1b[2J", b"\\ud800"),
)


@dataclass(frozen=True)
class Forged:
    """An input: what it was made from, and the bytes of the file."""

    artifact: Artifact
    data: bytes


@st.composite
def forged(draw: st.DrawFn, kind: str) -> Forged:
    """A file of a kind that a stranger made: changed, sealed again, and now and then damaged as text."""
    artifact = draw(st.sampled_from(VALID[kind]))
    if draw(st.integers(0, 4)) == 0:
        return Forged(artifact, draw(damaged_texts(artifact.dump().encode())))
    content = draw(contents(artifact))
    with contextlib.suppress(ValueError, RecursionError):  # where no digest can be computed
        content = _sealed(artifact, content)
    data = _encoded(draw, artifact, content)
    return Forged(artifact, draw(damaged_texts(data)) if draw(st.integers(0, 4)) == 0 else data)
