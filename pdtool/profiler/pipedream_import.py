"""Import the profiles that PipeDream published (`graph.txt`). Nothing here needs torch.

A line is a node or an edge. Sizes are in bytes, times in milliseconds. A size can be a list to sum up:

    node7 -- LSTM(2048, 1024) -- forward_compute_time=3.190, backward_compute_time=5.348, \
activation_size=[6291456.0; 131072.0], parameter_size=50364416.000
    <TAB>node6 -- node7

Source: github.com/msr-fiddle/pipedream, graph/graph.py (Node.from_str, Graph.from_str).
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import networkx as nx

from pdtool.artifacts.artifact import fields_checked, title
from pdtool.artifacts.device import Device, find_device
from pdtool.artifacts.profile import Node, Profile
from pdtool.errors import ArtifactError

DEVICE, _DEVICE_IN_TABLE = "V100 (published by PipeDream)", "v100"  # the paper's V100 have 16 GB (section 5.1)
_MAX_SAMPLES = 10**9
DEFAULT_BATCH = 128  # the batch size of most of PipeDream's own profiles
_FLOAT_BYTES = 4
_NUMBER = r"[0-9]+(?:\.[0-9]*)?(?:e[+-]?[0-9]{1,2})?"
_SIZE = rf"({_NUMBER}|\[{_NUMBER}(?:; *{_NUMBER})*\])"
_NODE = re.compile(
    r"(node[0-9]{1,18}) -- (([^()\x00-\x1f]{1,100}?)(?:\([^\x00-\x1f]*)?) -- "
    rf"forward_compute_time=({_NUMBER}), backward_compute_time=({_NUMBER}), "
    rf"activation_size={_SIZE}, parameter_size={_SIZE}(?: -- stage_id=[0-9]+)?"
)
# Operators that write into the memory of their input, or return a part of it.
_ALIAS = re.compile(r"(View|Size|__getitem__)\b|.*\(.*\binplace\b")
_EDGE = re.compile(r"\t(node[0-9]{1,18}) -- (node[0-9]{1,18})")


@dataclass(frozen=True)
class _NodeLine:
    """A node as its line describes it, without its edges.

    Attributes:
        number: number of the line.
        output_bytes: one entry per output tensor.
    """

    number: int
    description: str
    output_bytes: list[float]
    node: Node


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
    graph = _parse(text, path)
    lines: list[_NodeLine] = [graph.nodes[name]["line"] for name in _ordered(graph, path)]
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
        nodes=tuple(_node(line, sorted(graph.predecessors(line.node.name), key=_index)) for line in lines),
    )
    profile.check()
    return profile, batch_source


def _parse(text: str, path: str) -> nx.DiGraph[str]:
    """Return the graph; a node has its `line`, which may come after edges that name it, and an edge its `number`."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    lines: dict[str, _NodeLine] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if match := _EDGE.fullmatch(line):
            graph.add_edge(match[1], match[2], number=number)
        elif match := _NODE.fullmatch(line):
            if match[1] in lines:
                raise _fault(path, number, f"{match[1]} appears twice (first in line {lines[match[1]].number})")
            lines[match[1]] = _line(match, number, path)
        elif line:
            raise _fault(path, number, f"is neither a node nor an edge: {line[:60]!r}")
    for source, target, number in graph.edges(data="number"):
        for end in (source, target):
            if end not in lines:
                raise _fault(path, number, f"the edge {source} -- {target} names {end}, which is not a node")
    if not lines:
        raise ArtifactError(path, "has no nodes", "name a graph.txt of PipeDream's profiler")
    for name, node_line in lines.items():
        if name not in graph and len(lines) > 1:
            raise _fault(path, node_line.number, f"no edge leads from or to {name} (is the file cut off?)")
        graph.add_node(name, line=node_line)
    return graph


def _line(match: re.Match[str], number: int, path: str) -> _NodeLine:
    name, description, op, forward_ms, backward_ms, *sizes = match.groups()
    output_bytes, parameter_bytes = ([float(size) for size in text.strip("[]").split(";")] for text in sizes)
    output_size: Any = sum(output_bytes)  # a Node checks that it is whole
    parameter_size: Any = sum(parameter_bytes)
    with fields_checked(lambda fault: _fault(path, number, fault)):
        node = Node(
            name=name,
            op=op.strip(),
            module=name,
            forward_s=float(forward_ms) / 1e3,
            backward_s=float(backward_ms) / 1e3,
            output_bytes=output_size,
            gradient_bytes=output_size,
            parameter_bytes=parameter_size,
            stash_bytes=0 if _ALIAS.match(description) else output_size,
        )
    return _NodeLine(number, description, output_bytes, node)


def _fault(path: str, line: int, what: str) -> ArtifactError:
    return ArtifactError(path, what, "give a graph.txt of PipeDream's profiler", field=f"line {line}")


def _ordered(graph: nx.DiGraph[str], path: str) -> list[str]:
    """Order the nodes topologically, with ties by number, whatever the order of the lines."""
    try:
        return list(nx.lexicographical_topological_sort(graph, key=_index))
    except nx.NetworkXUnfeasible:
        cycle = [source for source, _ in nx.find_cycle(graph)]
        what = f"the edges make a cycle: {' -- '.join([*cycle, cycle[0]])}"
        raise _fault(path, graph.nodes[cycle[0]]["line"].number, what) from None


def _index(name: str) -> int:
    return int(name.removeprefix("node"))


def _node(line: _NodeLine, inputs: Sequence[str]) -> Node:
    """Return the node with its edges; an input costs nothing."""
    if not inputs and re.fullmatch(r"Input[0-9]*", line.description):
        return Node(name=line.node.name, op="input", module=line.node.module, output_bytes=line.node.output_bytes)
    return line.node.model_copy(update={"inputs": tuple(inputs)})


def _batch_size(lines: Sequence[_NodeLine]) -> tuple[int, str]:
    """Derive the samples in a minibatch from float32 sizes; return them and their source in words.

    The state of an LSTM has samples × hidden numbers whatever the length of its sequences. The output of a Linear after
    a View has samples × out_features. All LSTMs of a file must agree, or without LSTMs all such Linears.
    """
    # (operator, number of its outputs, index of the one whose size tells, words)
    kinds = [(r"LSTM\([0-9]+, ([0-9]+)\)", 3, 1, "the state of")]
    if any(line.node.op == "View" for line in lines):
        kinds.append((r"Linear\(.*out_features=([0-9]+).*\)", 1, 0, "the output of"))
    for pattern, outputs, index, what in kinds:
        lines_by_samples = {}
        for line in lines:
            match = re.fullmatch(pattern, line.description)
            if match and int(match[1]) and len(line.output_bytes) == outputs:
                lines_by_samples[line.output_bytes[index] / (_FLOAT_BYTES * int(match[1]))] = line
        if len(lines_by_samples) == 1:
            [(samples, line)] = lines_by_samples.items()
            if samples == int(samples) and 0 < samples <= _MAX_SAMPLES:
                return int(samples), f"from {what} {line.description} in line {line.number}"
    return DEFAULT_BATCH, "assumed: no shape in the file shows it"
