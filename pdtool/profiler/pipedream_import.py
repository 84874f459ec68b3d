"""Import the profiles that PipeDream published (`graph.txt`). Nothing here needs torch.

A line is a node or an edge. Sizes are in bytes, times in milliseconds. A size can be a list to sum up:

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

import networkx as nx

from pdtool.artifacts.artifact import title
from pdtool.artifacts.device import Device, find_device
from pdtool.artifacts.profile import Node, Profile
from pdtool.errors import ArtifactError

DEVICE, _DEVICE_IN_TABLE = "V100 (published by PipeDream)", "v100"  # the paper's V100 have 16 GB (section 5.1)
_MAX_SAMPLES = 10**9
DEFAULT_BATCH = 128  # the batch size of most of PipeDream's own profiles
_FLOAT_BYTES = 4
_MAX_NUMBER = 1e12  # of milliseconds and of bytes
_NODE = re.compile(
    r"(node[0-9]{1,18}) -- (([^()\x00-\x1f]{1,100}?)(?:\([^\x00-\x1f]*)?) -- forward_compute_time=([^,]+), "
    r"backward_compute_time=([^,]+), activation_size=([^,]+), parameter_size=([^,]+?)(?: -- stage_id=[0-9]+)?"
)
# Operators that write into the memory of their input, or return a part of it.
_ALIAS = re.compile(r"(View|Size|__getitem__)\b|.*\(.*\binplace\b")
_EDGE = re.compile(r"\t(node[0-9]{1,18}) -- (node[0-9]{1,18})")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]*)?(e[+-]?[0-9]{1,3})?")


@dataclass(frozen=True, kw_only=True)
class _NodeLine:
    """A node as its line describes it.

    Attributes:
        number: number of the line.
        output_bytes: one entry per output tensor.
    """

    number: int
    description: str
    output_bytes: tuple[int, ...]
    node: Node
    inputs: list[str] = field(default_factory=list)


def read_pipedream_profile(text: str, path: str, *, name: str, batch_size: int | None = None) -> tuple[Profile, str]:
    """Read the text of a `graph.txt`; say where its batch size comes from, in words ("" when it was given).

    The file lacks the times of the optimizer and of a whole step, which stay 0. It also lacks the stash: `stash_bytes`
    is the node's own output, as in PipeDream's planner, or 0 if that lies in another node's memory. Inputs cost
    nothing, because their time is that of loading. The memory is that of the paper's V100, from the table of devices.

    Args:
        path: path of the text, for errors and for the digest.
        batch_size: samples in the minibatch; None: from the shapes, or else 128.

    Raises:
        ArtifactError: a line is malformed, a node stands twice, an edge leads nowhere or the graph has a cycle.
        UsageError: a profile cannot have that name.
    """
    lines = _parse(text, path)
    samples, batch_source = (batch_size, "") if batch_size else _batch_size(lines)
    device = find_device(_DEVICE_IN_TABLE)
    profile = Profile(
        name=title(name),
        model=None,
        digests={path: hashlib.sha256(text.encode()).hexdigest()},
        batch_size=samples,
        device=Device(name=DEVICE, kind="measured", memory_bytes=device.memory_bytes),
        reserved_bytes=device.reserved_bytes,
        step_s=0.0,
        coverage=0.0,
        nodes=tuple(_node(lines[key]) for key in _ordered(lines, path)),
    )
    profile.check()
    return profile, batch_source


def _parse(text: str, path: str) -> dict[str, _NodeLine]:
    """Return the nodes by name, with their edges; a node's line may come after edges that name it."""
    nodes: dict[str, _NodeLine] = {}
    edges: dict[tuple[str, str], int] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.removesuffix("\r")
        if match := _EDGE.fullmatch(line):
            if edges.setdefault((match[1], match[2]), number) != number:
                raise _fault(path, number, f"the edge {match[1]} -- {match[2]} appears twice")
        elif match := _NODE.fullmatch(line):
            if match[1] in nodes:
                raise _fault(path, number, f"{match[1]} appears twice (first in line {nodes[match[1]].number})")
            nodes[match[1]] = _line(match, number, path)
        elif line:
            raise _fault(path, number, f"is neither a node nor an edge: {line[:60]!r}")
    for (source, target), number in edges.items():
        for end in (source, target):
            if end not in nodes:
                raise _fault(path, number, f"the edge {source} -- {target} names {end}, which is not a node")
        nodes[target].inputs.append(source)
    if not nodes:
        raise ArtifactError(path, "has no nodes", "name a graph.txt of PipeDream's profiler")
    connected = {end for edge in edges for end in edge}
    for key, node in nodes.items():
        if key not in connected and len(nodes) > 1:
            raise _fault(path, node.number, f"no edge leads from or to {key} (is the file cut off?)")
    return nodes


def _line(match: re.Match[str], number: int, path: str) -> _NodeLine:
    values: dict[str, list[float]] = {}
    for key, text in zip(("forward", "backward", "activation_size", "parameter_size"), match.groups()[3:], strict=True):
        items = text.removeprefix("[").removesuffix("]").split(";") if re.fullmatch(r"\[.*\]", text) else [text]
        values[key] = [_number(item.strip(), key, number, path) for item in items]
        is_size = key.endswith("size")
        if not is_size and len(items) > 1:
            raise _fault(path, number, f"{key} {text!r} is not one number")
        if is_size and any(v != int(v) for v in values[key]):
            raise _fault(path, number, f"{key} {text!r} is not whole bytes")
    output_bytes = tuple(map(int, values["activation_size"]))
    node = Node(
        name=match[1],
        op=match[3].strip(),
        module=match[1],
        forward_s=values["forward"][0] / 1e3,
        backward_s=values["backward"][0] / 1e3,
        output_bytes=sum(output_bytes),
        gradient_bytes=sum(output_bytes),
        parameter_bytes=sum(map(int, values["parameter_size"])),
        stash_bytes=0 if _ALIAS.match(match[2]) else sum(output_bytes),
    )
    return _NodeLine(number=number, description=match[2], output_bytes=output_bytes, node=node)


def _number(text: str, key: str, line: int, path: str) -> float:
    value = float(text) if _NUMBER.fullmatch(text) else math.nan
    if not math.isfinite(value):
        raise _fault(path, line, f"{key} {text[:40]!r} is not a finite number of 0 or more")
    if value > _MAX_NUMBER or 0 < value < 1 / _MAX_NUMBER:
        limits = f"0, or from {1 / _MAX_NUMBER:g} to {_MAX_NUMBER:g}"
        raise _fault(path, line, f"{key} {text[:40]!r} is not plausible: {limits}")
    return value


def _fault(path: str, line: int, what: str) -> ArtifactError:
    return ArtifactError(path, what, "give a graph.txt of PipeDream's profiler", field=f"line {line}")


def _ordered(nodes: Mapping[str, _NodeLine], path: str) -> list[str]:
    """Order the nodes topologically, with ties by number, whatever the order of the lines."""
    graph = nx.DiGraph((source, key) for key, node in nodes.items() for source in node.inputs)
    graph.add_nodes_from(nodes)
    try:
        return list(nx.lexicographical_topological_sort(graph, key=_index))
    except nx.NetworkXUnfeasible:
        cycle = [source for source, _ in nx.find_cycle(graph)]
        what = f"the edges make a cycle: {' -- '.join([*cycle, cycle[0]])}"
        raise _fault(path, nodes[cycle[0]].number, what) from None


def _index(key: str) -> int:
    return int(key.removeprefix("node"))


def _node(line: _NodeLine) -> Node:
    """Return the node with its edges; an input costs nothing."""
    if not line.inputs and re.fullmatch(r"Input[0-9]*", line.description):
        return Node(name=line.node.name, op="input", module=line.node.module, output_bytes=line.node.output_bytes)
    return line.node.model_copy(update={"inputs": tuple(sorted(line.inputs, key=_index))})


def _batch_size(nodes: Mapping[str, _NodeLine]) -> tuple[int, str]:
    """Derive the samples in a minibatch from float32 sizes; return them and their source in words.

    The state of an LSTM has samples × hidden numbers whatever the length of its sequences. The output of a Linear after
    a View has samples × out_features. All LSTMs of a file must agree, or without LSTMs all such Linears.
    """
    # (operator, number of its outputs, index of the one whose size tells, words)
    kinds = [(r"LSTM\([0-9]+, ([0-9]+)\)", 3, 1, "the state of")]
    if any(line.node.op == "View" for line in nodes.values()):
        kinds.append((r"Linear\(.*out_features=([0-9]+).*\)", 1, 0, "the output of"))
    for pattern, outputs, index, what in kinds:
        lines_by_samples = {}
        for line in nodes.values():
            match = re.fullmatch(pattern, line.description)
            if match and int(match[1]) and len(line.output_bytes) == outputs:
                lines_by_samples[line.output_bytes[index] / (_FLOAT_BYTES * int(match[1]))] = line
        if len(lines_by_samples) == 1:
            [(samples, line)] = lines_by_samples.items()
            if samples == int(samples) and 0 < samples <= _MAX_SAMPLES:
                return int(samples), f"from {what} {line.description} in line {line.number}"
    return DEFAULT_BATCH, "assumed: no shape in the file shows it"
