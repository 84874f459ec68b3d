"""The operator graph of a model, and where it may be cut into stages.

A *cut* is a downset: a set of nodes that holds every predecessor of its members. A stage is the difference of two
cuts, one inside the other, so the stages in order never send anything backwards.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from pdtool.errors import FieldError, suggestion

if TYPE_CHECKING:
    import networkx as nx  # workers do not need it: 12 MB and a tenth of a second


@dataclass(frozen=True)
class Graph:
    """Nodes in topological order, each with its module path and the nodes whose output it takes.

    Attributes:
        inputs: node name -> names of the nodes it takes tensors from; the order of the keys is topological.
        modules: node name -> path of the module it belongs to ("" is the model itself).

    Raises:
        FieldError: the nodes are not in topological order, or take an unknown node.
    """

    inputs: Mapping[str, Sequence[str]]
    modules: Mapping[str, str]

    def __post_init__(self) -> None:
        seen: set[str] = set()
        for index, (name, sources) in enumerate(self.inputs.items()):
            for source in sources:
                if source not in seen:
                    later = "comes after it (a cycle, or not in topological order)"
                    fault = later if source in self.inputs else "is not a node"
                    raise FieldError(f"nodes[{index}].inputs", f"node {name!r} takes {source!r}, which {fault}")
            seen.add(name)

    @property
    def names(self) -> list[str]:
        """All nodes, in topological order."""
        return list(self.inputs)

    @cached_property
    def consumers(self) -> Mapping[str, Sequence[str]]:
        """Node name -> the nodes that take its output."""
        out: dict[str, list[str]] = {name: [] for name in self.inputs}
        for name, sources in self.inputs.items():
            for source in dict.fromkeys(sources):
                out[source].append(name)
        return out

    def contracted(self, groups: Iterable[Collection[str]]) -> list[list[str]]:
        """Return blocks of nodes that no cut may separate, in topological order of the blocks.

        Each group becomes one block with all nodes on paths between its members, because a block must be convex. An
        edge from each member to the next, and back to the first, makes all of them strongly connected. Overlapping
        groups are joined.
        """
        import networkx as nx

        joined: nx.DiGraph[str] = nx.DiGraph()
        joined.add_nodes_from(self.inputs)
        joined.add_edges_from((source, name) for name, sources in self.inputs.items() for source in sources)
        for group in groups:
            nx.add_cycle(joined, group)
        condensed = nx.condensation(joined)
        position = {name: i for i, name in enumerate(self.inputs)}
        blocks = {i: sorted(names, key=position.__getitem__) for i, names in condensed.nodes(data="members")}
        order = nx.lexicographical_topological_sort(condensed, key=lambda i: position[blocks[i][0]])
        return [blocks[i] for i in order]

    def stage_faults(self, stages: Sequence[Collection[str]]) -> list[str]:
        """Say what is wrong with `stages` as a partition of this graph; nothing if it is one.

        Every node must be in exactly one stage, and no tensor may go to an earlier stage.
        """
        faults = []
        stage_of: dict[str, int] = {}
        for index, nodes in enumerate(stages):
            for name in nodes:
                if name not in self.inputs:
                    meant = suggestion(name, [*self.inputs, *self.members], "see the names in the profile")
                    faults.append(f"stage {index} names {name!r}, which the profile does not have ({meant})")
                elif name in stage_of:
                    faults.append(f"{name!r} is in stage {stage_of[name]} and in stage {index}")
                stage_of[name] = index
        faults += [f"{name!r} is in no stage" for name in self.inputs if name not in stage_of]
        if not faults:
            faults += [
                f"{name!r} in stage {stage_of[name]} takes {source!r} from the later stage {stage_of[source]}"
                for name, sources in self.inputs.items()
                for source in sources
                if stage_of[source] > stage_of[name]
            ]
        return faults

    def compress(self, nodes: Collection[str]) -> list[str]:
        """Write a set of nodes as module paths for complete modules, and as node names otherwise."""
        chosen = set(nodes)
        complete = {m for m in self.members if m and self.members[m] <= chosen}
        names = [name for name in self.inputs if name in chosen]
        return list(dict.fromkeys(next((m for m in _prefixes(self.modules[n]) if m in complete), n) for n in names))

    def expand(self, entries: Iterable[str]) -> list[str]:
        """Return the nodes behind entries of `compress`, in topological order; keep unknown entries."""
        wanted: set[str] = set()
        unknown = []
        for entry in entries:
            if entry in self.members and entry:
                wanted |= self.members[entry]
            elif entry in self.inputs:
                wanted.add(entry)
            else:
                unknown.append(entry)
        return [name for name in self.inputs if name in wanted] + unknown

    @cached_property
    def members(self) -> Mapping[str, set[str]]:
        """Module path -> all nodes in it, at any depth."""
        members: dict[str, set[str]] = {}
        for name, module in self.modules.items():
            for prefix in _prefixes(module):
                members.setdefault(prefix, set()).add(name)
        return members


def _prefixes(path: str) -> list[str]:
    """Return `a`, `a.b` and `a.b.c` for `a.b.c`."""
    return list(accumulate(path.split("."), "{}.{}".format)) if path else []
