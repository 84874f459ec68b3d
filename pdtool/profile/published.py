"""A profile as PipeDream published them (`graph.txt`) -> a Profile. Nothing here needs torch.

A line is a node or an edge; sizes are in bytes, times in milliseconds, and a size can be a list to be summed:

    node7 -- LSTM(2048, 1024) -- forward_compute_time=3.190, backward_compute_time=5.348, \
activation_size=[6291456.0; 131072.0], parameter_size=50364416.000
    <TAB>node6 -- node7

Source: github.com/msr-fiddle/pipedream, graph/graph.py (Node.from_str, Graph.from_str).
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter
from heapq import heappop, heappush

from pdtool.artifacts.envelope import title
from pdtool.artifacts.profile import Device, Node, Profile
from pdtool.errors import ArtifactError

DEVICE = "V100 (published by PipeDream)"
DEFAULT_BATCH = 128  # what PipeDream's own profiles were mostly taken at
_FLOAT_BYTES = 4
_NODE = re.compile(
    r"(node[0-9]{1,18}) -- (([^()\x00-\x1f]{1,100}?)(?:\([^\x00-\x1f]*)?) -- forward_compute_time=([^,]+), "
    r"backward_compute_time=([^,]+), activation_size=([^,]+), parameter_size=([^,]+?)(?: -- stage_id=[0-9]+)?"
)
_EDGE = re.compile(r"\t(node[0-9]{1,18}) -- (node[0-9]{1,18})")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?(e[+-]?[0-9]{1,3})?")


@dataclass(frozen=True, kw_only=True)
class _Line:
    """A node as its line says it; `sizes` in bytes, one per output tensor."""

    number: int
    description: str
    op: str
    forward_s: float
    backward_s: float
    sizes: tuple[int, ...]
    parameter_bytes: int
    inputs: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Published:
    """What was read, and where its batch size comes from, in words ("" when it was given)."""

    profile: Profile
    batch_from: str


def read_published(text: str, path: str, *, name: str, batch_size: int | None = None) -> Published:
    """Read the text of a `graph.txt`; `path` is named in errors and beside the digest.

    The file tells neither what a backward keeps (`stash_bytes` is the node's own output, as PipeDream's planner has
    it) nor the optimizer's part, nor a whole step: these stay 0. Inputs cost nothing: their time is that of loading.

    Args:
        batch_size: None: as the shapes tell, or else 128.

    Raises:
        ArtifactError: a line is malformed, a node stands twice, an edge leads nowhere or the graph has a cycle.
        UsageError: the name cannot be that of a profile.
    """
    lines = _parse(text, path)
    found, batch_from = (batch_size, "") if batch_size else _batch_size(lines)
    profile = Profile(
        name=title(name),
        model=None,
        digests={path: hashlib.sha256(text.encode()).hexdigest()},
        batch_size=found,
        device=Device(name=DEVICE, kind="measured"),
        step_s=0.0,
        coverage=0.0,
        nodes=tuple(_node(key, lines[key]) for key in _ordered(lines, path)),
    )
    profile.check()
    return Published(profile=profile, batch_from=batch_from)


def _parse(text: str, path: str) -> dict[str, _Line]:
    """Nodes by name, with their edges; nodes may stand after edges that name them."""
    nodes: dict[str, _Line] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if match := _EDGE.fullmatch(line):
            if edges.setdefault((match[1], match[2]), number) != number:
                raise _fault(path, number, f"the edge {match[1]} -- {match[2]} stands twice")
        elif match := _NODE.fullmatch(line):
            if match[1] in nodes:
                raise _fault(path, number, f"{match[1]} stands twice (first in line {nodes[match[1]].number})")
            nodes[match[1]] = _line(match, number, path)
        elif line:
            raise _fault(path, number, f"is neither a node nor an edge: {line[:60]!r}")
    for (source, target), number in edges.items():
        for end in (source, target):
            if end not in nodes:
                raise _fault(path, number, f"the edge {source} -- {target} names {end}, which is no node")
        nodes[target].inputs.append(source)
    if not nodes:
        raise ArtifactError(path, "has no nodes", "name a graph.txt as PipeDream's profiler writes it")
    joined = {end for edge in edges for end in edge}
    for key, node in nodes.items():
        if key not in joined and len(nodes) > 1:
            raise _fault(path, node.number, f"no edge leads from or to {key} (is the file cut off?)")
    return nodes


def _line(match: re.Match[str], number: int, path: str) -> _Line:
    values: dict[str, list[float]] = {}
    for key, text in zip(("forward", "backward", "activation_size", "parameter_size"), match.groups()[3:], strict=True):
        listed = text.removeprefix("[").removesuffix("]").split(";") if re.fullmatch(r"\[.*\]", text) else [text]
        values[key] = [_number(part.strip(), key, number, path) for part in listed]
        whole = key.endswith("size") or len(listed) == 1
        if not whole or (key.endswith("size") and any(v != int(v) for v in values[key])):
            raise _fault(path, number, f"{key} {text!r} is not {'whole bytes' if whole else 'one number'}")
    return _Line(
        number=number,
        description=match[2],
        op=match[3].strip(),
        forward_s=values["forward"][0] / 1e3,
        backward_s=values["backward"][0] / 1e3,
        sizes=tuple(map(int, values["activation_size"])),
        parameter_bytes=sum(map(int, values["parameter_size"])),
    )


def _number(text: str, key: str, line: int, path: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise _fault(path, line, f"{key} {text[:40]!r} is not a number from 0 up")
    return value


def _fault(path: str, line: int, what: str) -> ArtifactError:
    return ArtifactError(path, what, "give a graph.txt as PipeDream's profiler writes it", field=f"line {line}")


def _ordered(nodes: Mapping[str, _Line], path: str) -> list[str]:
    """Topological, and by number where that leaves a choice: the order of the lines does not matter."""
    sorter = TopologicalSorter({key: node.inputs for key, node in nodes.items()})
    try:
        sorter.prepare()
    except CycleError as error:
        raise _fault(
            path, nodes[error.args[1][0]].number, f"the edges make a cycle: {' -- '.join(error.args[1])}"
        ) from None
    ready: list[tuple[int, str]] = []
    order = []
    while sorter.is_active():
        for key in sorter.get_ready():
            heappush(ready, (_index(key), key))
        _, key = heappop(ready)
        order.append(key)
        sorter.done(key)
    return order


def _index(key: str) -> int:
    return int(key.removeprefix("node"))


def _node(key: str, line: _Line) -> Node:
    size = sum(line.sizes)
    if not line.inputs and re.fullmatch(r"Input[0-9]*", line.description):
        return Node(name=key, op="input", module=key, output_bytes=size)
    return Node(
        name=key,
        op=line.op,
        module=key,
        inputs=tuple(sorted(line.inputs, key=_index)),
        forward_s=line.forward_s,
        backward_s=line.backward_s,
        output_bytes=size,
        gradient_bytes=size,
        parameter_bytes=line.parameter_bytes,
        stash_bytes=size,
    )


def _batch_size(nodes: Mapping[str, _Line]) -> tuple[int, str]:
    """(samples in a minibatch, where that is seen), from float32 sizes.

    The state of an LSTM has samples × hidden numbers whatever the length of its sequences; the output of a Linear has
    samples × out_features where it comes after a View. All that a file has of the first kind, or else of the second,
    must agree.
    """
    flattened = any(line.op == "View" for line in nodes.values())
    kinds = [(r"LSTM\([0-9]+, ([0-9]+)\)", 3, 1, "the state of")]
    if flattened:
        kinds.append((r"Linear\(.*out_features=([0-9]+).*\)", 1, 0, "the output of"))
    for pattern, tensors, which, what in kinds:
        seen = {}
        for line in nodes.values():
            match = re.fullmatch(pattern, line.description)
            if match and int(match[1]) and len(line.sizes) == tensors:
                seen[line.sizes[which] / (_FLOAT_BYTES * int(match[1]))] = line
        if len(seen) == 1:
            batch, line = next(iter(seen.items()))
            if batch == int(batch) > 0:
                return int(batch), f"from {what} {line.description} in line {line.number}"
    return DEFAULT_BATCH, "assumed: no shape in the file tells it"
