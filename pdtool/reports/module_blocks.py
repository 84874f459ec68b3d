"""Collapse an operator graph into few blocks, modules where they are whole, so that it can be taken in at a glance."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pdtool.artifacts.profile import Node, Profile
from pdtool.graph import Graph

MAX_BLOCKS = 24


@dataclass(frozen=True)
class ModuleBlock:
    """Operators of one stage that are drawn as one.

    Attributes:
        name: path of the module, or of the costliest operator.
        what: the operator's kind, or how many operators there are.
        seconds: forward and backward of one minibatch, on one worker.
        inputs: positions of the blocks whose outputs it takes, all before it.
    """

    name: str
    what: str
    stage: int
    nodes: tuple[str, ...]
    seconds: float
    parameter_bytes: int
    inputs: tuple[int, ...]


@dataclass(frozen=True)
class _Group:
    """Atoms (operators with what belongs to them) of one stage, with `depth` leading parts of their paths in common."""

    atoms: tuple[tuple[str, ...], ...]
    path: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        return [name for atom in self.atoms for name in atom]


def module_blocks(profile: Profile, stages: Sequence[Collection[str]], most: int = MAX_BLOCKS) -> list[ModuleBlock]:
    """Return about `most` blocks, or one for each stage if those are more, in topological order.

    The costliest modules are opened first, as long as the blocks are not too many. An operator without parameters, such
    as a ReLU, belongs to the one before it where nothing else takes that one's output.
    """
    stage_of = _stages_of(profile, stages)
    atoms = _atoms(profile, stage_of)
    groups = [_Group(tuple(atom for atom in atoms if stage_of[atom[0]] == s)) for s in range(len(stages))]
    return _blocks(profile, stage_of, _opened(profile, groups, most))


def _stages_of(profile: Profile, stages: Sequence[Collection[str]]) -> dict[str, int]:
    """Return the stage of each operator; of an input the first that takes it, for no stage sends inputs to another."""
    stage_of = {name: s for s, names in enumerate(stages) for name in names}
    for node in profile.nodes:
        if node.op == "input":
            users = profile.graph.consumers[node.name]
            stage_of[node.name] = min((stage_of[user] for user in users), default=stage_of[node.name])
    return stage_of


def _opened(profile: Profile, groups: list[_Group], most: int) -> list[_Group]:
    """Open the costliest group, again and again, that still fits."""
    groups, closed = [*groups], set[_Group]()
    while True:
        candidates = [group for group in groups if len(group.atoms) > 1 and group not in closed]
        if not candidates:
            return groups
        costliest = max(candidates, key=lambda group: _seconds(profile, group.names))
        parts = _parts(profile.graph, costliest)
        position = groups.index(costliest)
        if len(groups) - 1 + len(parts) <= most:
            groups[position : position + 1] = parts
        else:
            closed.add(costliest)


def _parts(graph: Graph, group: _Group) -> list[_Group]:
    """Divide a group by the next part of its atoms' paths; one operator with a path of its own is a part by itself."""
    depth = len(group.path) + 1
    parts: dict[tuple[str, ...], list[tuple[str, ...]]] = {}
    for atom in group.atoms:
        parts.setdefault(_path(graph, atom[0])[:depth], []).append(atom)
    opened = [_Group(tuple(atoms), path) for path, atoms in parts.items()]
    if len(opened) == 1 and len(opened[0].path) == depth:
        return _parts(graph, opened[0])
    return opened if len(opened) > 1 else [_Group((atom,), group.path) for atom in group.atoms]


def _path(graph: Graph, name: str) -> tuple[str, ...]:
    """Return the parts of an operator's module path, and its own name unless it is that module."""
    module = graph.modules[name]
    parts = tuple(module.split(".")) if module else ()
    return parts if name == module else (*parts, name)


def _atoms(profile: Profile, stage_of: dict[str, int]) -> list[tuple[str, ...]]:
    """Join operators without parameters to the only one before them, if they are its only user and beside it."""
    graph, first_of = profile.graph, dict[str, str]()
    atoms: dict[str, list[str]] = {}
    for name, inputs in graph.inputs.items():
        before = inputs[0] if len(set(inputs)) == 1 else None
        joins = (
            before is not None
            and not profile.by_name[name].parameter_bytes
            and profile.by_name[before].op != "input"
            and len(graph.consumers[before]) == 1
            and stage_of[before] == stage_of[name]
            and _path(graph, before)[:-1] == _path(graph, name)[:-1]
        )
        first_of[name] = first_of[before] if joins and before is not None else name
        atoms.setdefault(first_of[name], []).append(name)
    return [tuple(names) for names in atoms.values()]


def _blocks(profile: Profile, stage_of: dict[str, int], groups: Sequence[_Group]) -> list[ModuleBlock]:
    """Make blocks of groups; groups that need each other become one, so that no edge goes backwards."""
    merged = profile.graph.contracted([group.names for group in groups])
    merged.sort(key=lambda names: stage_of[names[0]])  # keeps the order within a stage
    number = {name: i for i, names in enumerate(merged) for name in names}
    blocks = []
    for i, names in enumerate(merged):
        inputs = {number[source] for name in names for source in profile.graph.inputs[name]} - {i}
        costliest = max((profile.by_name[name] for name in names), key=_cost)
        path = ".".join(_common_path(profile.graph, names))
        of_module = profile.graph.members.get(path, set[str]())
        is_module = (
            len(names) > 1
            and bool(path)
            and all(name in names for name in of_module if stage_of[name] == stage_of[names[0]])
        )
        blocks.append(
            ModuleBlock(
                name=path if is_module else costliest.name,
                what=f"{len(names)} operators" if is_module else _kinds(costliest, len(names)),
                stage=stage_of[names[0]],
                nodes=tuple(names),
                seconds=_seconds(profile, names),
                parameter_bytes=profile.parameter_bytes(names),
                inputs=tuple(sorted(inputs)),
            )
        )
    return blocks


def _common_path(graph: Graph, names: Sequence[str]) -> tuple[str, ...]:
    """Return the path of the innermost module that holds all these operators."""
    first, last = (pick(_path(graph, name) for name in names) for pick in (min, max))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return tuple(part for part, _ in same)


def _kinds(costliest: Node, operators: int) -> str:
    return costliest.op if operators == 1 else f"{costliest.op} +{operators - 1}"


def _cost(node: Node) -> tuple[bool, float]:
    """What has parameters comes before what has none: a convolution names its block, not the ReLU after it."""
    return node.parameter_bytes > 0, node.forward_s + node.backward_s


def _seconds(profile: Profile, names: Collection[str]) -> float:
    return sum(profile.by_name[name].forward_s + profile.by_name[name].backward_s for name in names)
