"""Drawings of a model by stage: its blocks as SVG, and its operators in DOT, the language of Graphviz.

`module_blocks` collapses the operators into few blocks, modules where they are whole, which can be taken in at a
glance. They stand from left to right, in lines, as a text does, each coloured by its stage and as high as it costs.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Node, Profile
from pdtool.errors import printable
from pdtool.graph import Graph
from pdtool.reports.picture import Picture, fitted, stage_class
from pdtool.units import format_bytes, format_seconds

_BOX_WIDTHS = (104, 100, 96, 92, 88, 84)  # pixels; the widest with which the lines are as few as with any
_GAP, _BORDER_GAP = 22, 64  # pixels, between columns of one stage, and of two
_MIN_HEIGHT, _EXTRA_HEIGHT = 42, 54  # pixels, of a box without cost, and what the costliest has more
_STACK_GAP, _LANE, _HEADER, _LINE_GAP = 8, 7, 22, 20
_MARGIN = 16  # on both sides, where edges leave a line and enter the next
MAX_BLOCKS = 24


@dataclass
class _Column:
    """Blocks below each other, the costliest first; x is its left side, on the drawing's line `line`."""

    stage: int
    blocks: list[int]
    x: float = 0.0
    line: int = 0


@dataclass
class _Line:
    """A line of columns: where its boxes begin, and the axis on which the first block of each column is centred."""

    columns: list[_Column]
    lanes: dict[int, int]
    top: float = 0.0
    axis: float = 0.0
    bottom: float = 0.0


def graph_drawing(plan: Plan, profile: Profile, width: float, title: str = "") -> Picture:
    """Draw the plan's model: what goes from one stage to the next stands at the border, as activation bytes."""
    blocks = module_blocks(profile, plan.stage_nodes(profile))
    return _GraphPicture(plan, profile, blocks, width, title).draw()


class _GraphPicture:
    """The layout of one graph: columns by the longest path within each stage, columns packed into lines."""

    def __init__(self, plan: Plan, profile: Profile, blocks: Sequence[ModuleBlock], width: float, title: str) -> None:
        self.plan, self.profile, self.blocks, self.title = plan, profile, blocks, title
        self.picture = Picture(width, title or f"{plan.name}: the model by stage")
        self.users = [[user for user, block in enumerate(blocks) if n in block.inputs] for n in range(len(blocks))]
        self.column_of = _columns_of(blocks, self.users)
        self.columns = self._columns()
        self.max_s = max((block.seconds for block in blocks), default=0.0) or 1.0
        fewest = len(self._packed(_BOX_WIDTHS[-1]))
        self.box_width = next(width for width in _BOX_WIDTHS if len(self._packed(width)) == fewest)
        self.lines = self._packed(self.box_width)
        self._give_lanes()
        self._place()

    def draw(self) -> Picture:
        if self.title:
            self.picture.text(0, 14, fitted(self.title, self.picture.width, 13), "title")
        for line in self.lines:
            self._draw_bands(line)
        for number in range(len(self.blocks)):
            self._draw_edges(number)
        for number, block in enumerate(self.blocks):
            self._draw_block(number, block)
        self._draw_borders()
        return self.picture

    def _columns(self) -> list[_Column]:
        columns: dict[int, list[int]] = {}
        for number in sorted(range(len(self.blocks)), key=lambda number: -self.blocks[number].seconds):
            columns.setdefault(self.column_of[number], []).append(number)
        return [_Column(self.blocks[own[0]].stage, own) for _, own in sorted(columns.items())]

    def _packed(self, box_width: int) -> list[_Line]:
        """Fill lines with columns, and set where these begin."""
        lines, x, before = [_Line([], {})], float(_MARGIN), -1
        for column in self.columns:
            gap = 0 if not lines[-1].columns else _GAP if column.stage == before else _BORDER_GAP
            if lines[-1].columns and x + gap + box_width > self.picture.width - _MARGIN:
                lines.append(_Line([], {}))
                x, gap = float(_MARGIN), 0
            column.x, column.line, before = x + gap, len(lines) - 1, column.stage
            x = column.x + box_width
            lines[-1].columns.append(column)
        return lines

    def _give_lanes(self) -> None:
        """Give each block whose output skips columns a lane above the boxes of the lines that it passes."""
        for number in range(len(self.blocks)):
            start, end = self.column_of[number], self._reach(number)
            if end - start > 1:
                for line in range(self.columns[start].line, self.columns[end].line + 1):
                    self.lines[line].lanes[number] = self._free_lane(line, start, end)

    def _free_lane(self, line: int, start: int, end: int) -> int:
        """Return the lowest lane of a line that no other block's edges take between two columns."""
        taken = {
            lane
            for other, lane in self.lines[line].lanes.items()
            if self.column_of[other] < end and self._reach(other) > start
        }
        return next(lane for lane in range(len(self.blocks) + 1) if lane not in taken)

    def _reach(self, number: int) -> int:
        """Return the last column that takes a block's output."""
        return max((self.column_of[user] for user in self.users[number]), default=0)

    def _height(self, number: int) -> float:
        return _MIN_HEIGHT + _EXTRA_HEIGHT * self.blocks[number].seconds / self.max_s

    def _place(self) -> None:
        """Set the lines below each other."""
        y = 26.0 if self.title else 0.0
        for line in self.lines:
            lanes = max(line.lanes.values(), default=-1) + 1
            above = max((self._height(column.blocks[0]) / 2 for column in line.columns), default=0.0)
            line.top = y + _HEADER + 6 + lanes * _LANE
            line.axis = line.top + above
            line.bottom = max((self._y(column.blocks[-1])[1] for column in line.columns), default=line.axis) + 8
            y = line.bottom + _LINE_GAP

    def _y(self, number: int) -> tuple[float, float]:
        """Return the upper and lower side of a block."""
        column = self.columns[self.column_of[number]]
        y = self.lines[column.line].axis - self._height(column.blocks[0]) / 2
        for other in column.blocks[: column.blocks.index(number)]:
            y += self._height(other) + _STACK_GAP
        return y, y + self._height(number)

    def _middle(self, number: int) -> float:
        return sum(self._y(number)) / 2

    def _draw_bands(self, line: _Line) -> None:
        """Draw the ground of each stage in a line, with its name."""
        top = line.top - 6 - _LANE * (max(line.lanes.values(), default=-1) + 1)
        for stage in dict.fromkeys(column.stage for column in line.columns):
            own = [column for column in line.columns if column.stage == stage]
            x, end = own[0].x - 8, own[-1].x + self.box_width + 8
            self.picture.box(x, top, end - x, line.bottom - top, f"tint {stage_class(stage)}", radius=8)
            replicas = self.plan.stages[stage].replicas
            label = f"stage {stage}" + (f" × {replicas}" if replicas > 1 else "")
            self.picture.text(x + 4, top - 6, fitted(label, end - x, 12), "strong")

    def _draw_block(self, number: int, block: ModuleBlock) -> None:
        (y, end), x = self._y(number), self.columns[self.column_of[number]].x
        tooltip = (
            f"{block.name}: {block.what}, {format_seconds(block.seconds)} forward and backward, "
            f"parameters {format_bytes(block.parameter_bytes)}"
        )
        self.picture.box(x, y, self.box_width, end - y, "paper", radius=5)
        self.picture.box(x, y, self.box_width, end - y, f"block {stage_class(block.stage)}", radius=5, tooltip=tooltip)
        texts = [(block.name, "small strong"), (block.what, "small soft")]
        if block.seconds:
            texts.append((format_seconds(block.seconds), "small"))
        baseline = (y + end) / 2 + 4 - 6 * (len(texts) - 1)
        for index, (text, style) in enumerate(texts):
            text = fitted(text, self.box_width - 8, 11.5 if index == 0 else 10.5)
            self.picture.text(x + self.box_width / 2, baseline + 12 * index, text, style, anchor="middle")

    def _draw_edges(self, number: int) -> None:
        """Draw what a block's output goes to: beside it straight, farther away through its lane."""
        users = self.users[number]
        near = [user for user in users if self.column_of[user] - self.column_of[number] == 1]
        for user in near:
            self._draw_near(number, user, self._edge_style(number, user))
        if far := [user for user in users if user not in near]:
            self._draw_lane(number, far)

    def _edge_style(self, number: int, user: int) -> str:
        crosses = self.blocks[user].stage != self.blocks[number].stage
        return "border" if crosses and self.blocks[number].what != "input" else "edge"

    def _draw_near(self, number: int, user: int, style: str) -> None:
        source, target = self.columns[self.column_of[number]], self.columns[self.column_of[user]]
        start_x, y, end_y = source.x + self.box_width, self._middle(number), self._middle(user)
        if source.line == target.line:
            self._curve(start_x, y, target.x, end_y, style)
            return
        self._curve(start_x, y, self.picture.width - 2, y, style)
        self._curve(2, end_y, target.x, end_y, style)

    def _draw_lane(self, number: int, users: Sequence[int]) -> None:
        """Draw one line above the boxes for all users that are farther away, going down to each."""
        source, last = self.columns[self.column_of[number]], max(users, key=lambda user: self.column_of[user])
        end = self.columns[self.column_of[last]]
        style = self._edge_style(number, last)
        for index in range(source.line, end.line + 1):
            y = self._lane_y(index, number)
            start_x = source.x + self.box_width if index == source.line else 2.0
            end_x = end.x if index == end.line else self.picture.width - 2
            if index == source.line:
                self.picture.path(self._bend(start_x, self._middle(number), start_x + 16, y), style)
                start_x += 16
            self.picture.line(start_x, y, end_x - (16 if index == end.line else 0), y, style)
        for user in users:
            target = self.columns[self.column_of[user]]
            y, middle = self._lane_y(target.line, number), self._middle(user)
            style = self._edge_style(number, user)
            self.picture.path(self._bend(target.x - 16, y, target.x - 5, middle), style)
            self._arrow_head(target.x, middle, style)

    def _lane_y(self, line: int, number: int) -> float:
        return self.lines[line].top - 4 - _LANE * self.lines[line].lanes[number]

    def _curve(self, x: float, y: float, end_x: float, end_y: float, style: str) -> None:
        self.picture.path(self._bend(x, y, end_x - 5, end_y), style)
        self._arrow_head(end_x, end_y, style)

    def _arrow_head(self, x: float, y: float, style: str) -> None:
        head = "border-head" if style == "border" else "head"
        self.picture.path(f"M{x:.1f},{y:.1f} l-6,-3.5 v7 Z", head)

    @staticmethod
    def _bend(x: float, y: float, end_x: float, end_y: float) -> str:
        if y == end_y:
            return f"M{x:.1f},{y:.1f} H{end_x:.1f}"
        half = (x + end_x) / 2
        return f"M{x:.1f},{y:.1f} C{half:.1f},{y:.1f} {half:.1f},{end_y:.1f} {end_x:.1f},{end_y:.1f}"

    def _draw_borders(self) -> None:
        """Write at each border of stages how many bytes of activations cross it, for one minibatch."""
        sizes = self._border_bytes()
        for before, column in zip(self.columns, self.columns[1:], strict=False):
            if before.stage != column.stage and before.line == column.line:
                label = format_bytes(sizes[before.stage])
                centre = (before.x + self.box_width + column.x) / 2
                line = self.lines[column.line]
                self.picture.text(centre, line.bottom + 2, label, "accent small", anchor="middle")

    def _border_bytes(self) -> list[int]:
        """Return for each stage the bytes that it, and those before it, send to later stages."""
        profile = self.profile.sent_as(self.plan.wire_dtype)
        stage_of = {name: block.stage for block in self.blocks for name in block.nodes}
        sizes = [0] * len(self.plan.stages)
        for name, users in self.profile.graph.consumers.items():
            is_input = self.profile.by_name[name].op == "input"
            last = max((stage_of[user] for user in users if not is_input), default=stage_of[name])
            for stage in range(stage_of[name], last):
                sizes[stage] += profile.sent_bytes(name)[0]
        return sizes


def _columns_of(blocks: Sequence[ModuleBlock], users_of: Sequence[Sequence[int]]) -> list[int]:
    """Return the column of each block: after all that it takes, and after all of the stages before.

    What takes nothing, such as a target, stands just before its first user.
    """
    columns, first, end = [0] * len(blocks), 0, 0
    for number, block in enumerate(blocks):
        if number and block.stage != blocks[number - 1].stage:
            first = end
        columns[number] = max((columns[source] + 1 for source in block.inputs), default=first)
        columns[number] = max(columns[number], first)
        end = max(end, columns[number] + 1)
    for number, (block, users) in enumerate(zip(blocks, users_of, strict=True)):
        if not block.inputs and users and all(blocks[user].stage == block.stage for user in users):
            columns[number] = max(columns[number], min(columns[user] for user in users) - 1)
    return columns


def dot(plan: Plan, profile: Profile) -> str:
    """Draw a box per stage around its operators; an edge between stages is labelled `activation + gradient bytes`."""
    return "\n".join(_lines(plan, profile)) + "\n"


def _lines(plan: Plan, profile: Profile) -> Iterator[str]:
    yield f"digraph {_quoted(plan.name)} {{"
    yield '  node [shape=box, style="rounded,filled", fillcolor=white, fontname=sans, fontsize=10];'
    yield "  edge [fontname=sans, fontsize=9, color=gray40];"
    stages = plan.stage_nodes(profile)
    for s, (stage, nodes) in enumerate(zip(plan.stages, stages, strict=True)):
        replicas = f"{stage.replicas} replicas" if stage.replicas > 1 else "1 replica"
        yield f"  subgraph cluster_{s} {{"
        yield f"    label={_quoted(f'stage {s}, {replicas}')}; style=filled; fillcolor=gray93; fontname=sans;"
        for name in nodes:
            node = profile.by_name[name]
            time = format_seconds(node.forward_s + node.backward_s)
            yield f"    {_quoted(name)} [label={_quoted(f'{name}{chr(10)}{node.op}, {time}')}];"
        yield "  }"
    stage_of = {name: s for s, nodes in enumerate(stages) for name in nodes}
    sent = profile.sent_as(plan.wire_dtype)
    for name, consumers in profile.graph.consumers.items():
        for consumer in consumers:
            attributes = ""
            if stage_of[name] != stage_of[consumer]:
                label = " + ".join(map(format_bytes, sent.sent_bytes(name)))
                attributes = f" [label={_quoted(label)}, color=firebrick, penwidth=2]"
            yield f"  {_quoted(name)} -> {_quoted(consumer)}{attributes};"
    yield "}"


def _quoted(text: str) -> str:
    """Quote a text as a string of DOT, so that what stands in an artifact never becomes syntax."""
    escaped = printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("&", "&amp;")
    return f'"{escaped}"'


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
        more = f" +{len(names) - 1}" if len(names) > 1 else ""
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
                what=f"{len(names)} operators" if is_module else costliest.op + more,
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


def _cost(node: Node) -> tuple[bool, float]:
    """What has parameters comes before what has none: a convolution names its block, not the ReLU after it."""
    return node.parameter_bytes > 0, node.forward_s + node.backward_s


def _seconds(profile: Profile, names: Collection[str]) -> float:
    return sum(profile.by_name[name].forward_s + profile.by_name[name].backward_s for name in names)
