"""Drawings of a model by stage: its blocks as SVG, and its operators in DOT, the language of Graphviz.

`module_blocks` collapses the operators into a few blocks, complete modules if possible, to be seen at a glance. They
stand from left to right, in lines like a text. A block's colour shows its stage, its height its cost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count, groupby, pairwise, takewhile

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import printable
from pdtool.graph import Graph
from pdtool.planner.placement import Placement
from pdtool.planner.stage_costs import stage_loads
from pdtool.reports.picture import Picture, fitted, stage_class
from pdtool.units import format_bytes, format_seconds

_BOX_WIDTHS = (104, 100, 96, 92, 88, 84)  # pixels
_GAP, _BORDER_GAP = 22, 64  # pixels, between columns of one stage, and of two
_MIN_HEIGHT, _EXTRA_HEIGHT = 42, 54  # pixels, of a box without cost, and the extra of the costliest
_STACK_GAP, _LANE, _HEADER, _LINE_GAP = 8, 7, 22, 20
_MARGIN = 16  # on both sides, where edges leave a line and enter the next
MAX_BLOCKS = 24
_Atom = tuple[str, ...]  # an operator with its followers
_Group = tuple[_Atom, ...]  # of one stage, under one path


@dataclass(eq=False)
class _Box:
    """A drawn block, in `column` of the whole drawing and on the line `line`.

    Attributes:
        users: the boxes of the blocks that take its output.
        x, y, end: its left, upper and lower side, in pixels.
    """

    block: ModuleBlock
    column: int
    users: list[_Box] = field(default_factory=list)
    line: int = 0
    x: float = 0.0
    y: float = 0.0
    end: float = 0.0

    @property
    def middle(self) -> float:
        return (self.y + self.end) / 2

    @property
    def reach(self) -> int:
        """The last column that takes its output."""
        return max((user.column for user in self.users), default=0)

    def style_to(self, user: _Box) -> str:
        crosses = user.block.stage != self.block.stage
        return "border" if crosses and self.block.what != "input" else "edge"


@dataclass
class _Line:
    """A line of columns, each with its costliest box first; `lanes` are for boxes whose outputs skip columns."""

    columns: list[list[_Box]] = field(default_factory=list)
    lanes: dict[_Box, int] = field(default_factory=dict)
    header: float = 0.0
    top: float = 0.0
    bottom: float = 0.0

    def lane_y(self, box: _Box) -> float:
        return self.top - 4 - _LANE * self.lanes[box]


def graph_drawing(plan: Plan, profile: Profile, width: float, title: str = "") -> Picture:
    """Draw the plan's model, with the bytes of activations at each border between stages."""
    blocks = module_blocks(profile, plan.stage_nodes(profile))
    return _GraphPicture(plan, profile, blocks, width, title).draw()


class _GraphPicture:
    """The layout of one graph: columns by the longest path within each stage, columns packed into lines."""

    def __init__(self, plan: Plan, profile: Profile, blocks: Sequence[ModuleBlock], width: float, title: str) -> None:
        self.plan, self.profile, self.title = plan, profile, title
        self.picture = Picture(width, title or f"{plan.name}: the model by stage")
        self.boxes = _boxes(blocks)
        costliest_first = sorted(self.boxes, key=lambda box: -box.block.seconds)
        columns = range(max((box.column for box in self.boxes), default=-1) + 1)
        self.columns = [[box for box in costliest_first if box.column == column] for column in columns]
        # the widest one that still gives the fewest lines
        self.box_width = min(_BOX_WIDTHS, key=lambda width: len(self._packed(width)))
        self.lines = self._packed(self.box_width)
        self._give_lanes()
        self._place()

    def draw(self) -> Picture:
        if self.title:
            self.picture.text(0, 14, fitted(self.title, self.picture.width, 13), "title")
        for line in self.lines:
            self._draw_bands(line)
        for box in self.boxes:
            self._draw_edges(box)
        for box in self.boxes:
            self._draw_box(box)
        self._draw_borders()
        return self.picture

    def _packed(self, box_width: int) -> list[_Line]:
        """Fill lines with columns, and set where these begin."""
        lines, x, before = [_Line()], float(_MARGIN), -1
        for column in self.columns:
            stage = column[0].block.stage
            gap = 0 if not lines[-1].columns else _GAP if stage == before else _BORDER_GAP
            if lines[-1].columns and x + gap + box_width > self.picture.width - _MARGIN:
                lines.append(_Line())
                x, gap = float(_MARGIN), 0
            for box in column:
                box.x, box.line = x + gap, len(lines) - 1
            x, before = x + gap + box_width, stage
            lines[-1].columns.append(column)
        return lines

    def _give_lanes(self) -> None:
        """Give each box whose output skips columns the lowest free lane above the boxes of each line that it passes."""
        for box in self.boxes:
            if box.reach - box.column > 1:
                for line in self.lines[box.line : self.columns[box.reach][0].line + 1]:
                    meeting = (other for other in line.lanes if other.column < box.reach and other.reach > box.column)
                    taken = {line.lanes[other] for other in meeting}
                    line.lanes[box] = next(lane for lane in count() if lane not in taken)

    def _place(self) -> None:
        """Set the lines below each other; the first box of each column is centred on the axis of its line."""
        costliest_s = max((box.block.seconds for box in self.boxes), default=0.0) or 1.0
        heights = {box: _MIN_HEIGHT + _EXTRA_HEIGHT * box.block.seconds / costliest_s for box in self.boxes}
        y = 26.0 if self.title else 0.0
        for line in self.lines:
            line.header = y + _HEADER
            line.top = line.header + 6 + _LANE * (max(line.lanes.values(), default=-1) + 1)
            axis = line.top + max((heights[column[0]] / 2 for column in line.columns), default=0.0)
            line.bottom = axis + 8
            for column in line.columns:
                y = axis - heights[column[0]] / 2
                for box in column:
                    box.y, box.end = y, y + heights[box]
                    y = box.end + _STACK_GAP
                line.bottom = max(line.bottom, column[-1].end + 8)
            y = line.bottom + _LINE_GAP

    def _draw_bands(self, line: _Line) -> None:
        """Draw the ground of each stage in a line, with its name."""
        for stage, columns in groupby(line.columns, key=lambda column: column[0].block.stage):
            own_x = [column[0].x for column in columns]
            x, end = own_x[0] - 8, own_x[-1] + self.box_width + 8
            self.picture.box(x, line.header, end - x, line.bottom - line.header, f"tint {stage_class(stage)}", radius=8)
            replicas = self.plan.stages[stage].replicas
            label = f"stage {stage}" + (f" × {replicas}" if replicas > 1 else "")
            self.picture.text(x + 4, line.header - 6, fitted(label, end - x, 12), "strong")

    def _draw_box(self, box: _Box) -> None:
        block, height = box.block, box.end - box.y
        tooltip = (
            f"{block.name}: {block.what}, {format_seconds(block.seconds)} forward and backward, "
            f"parameters {format_bytes(block.parameter_bytes)}"
        )
        style = f"block {stage_class(block.stage)}"
        self.picture.box(box.x, box.y, self.box_width, height, "paper", radius=5)
        self.picture.box(box.x, box.y, self.box_width, height, style, radius=5, tooltip=tooltip)
        texts = [(block.name, "small strong"), (block.what, "small soft")]
        if block.seconds:
            texts.append((format_seconds(block.seconds), "small"))
        baseline = box.middle + 4 - 6 * (len(texts) - 1)
        for index, (text, style) in enumerate(texts):
            text = fitted(text, self.box_width - 8, 11.5 if index == 0 else 10.5)
            self.picture.text(box.x + self.box_width / 2, baseline + 12 * index, text, style, anchor="middle")

    def _draw_edges(self, box: _Box) -> None:
        """Draw lines to a block's users: straight to neighbours, through its lane to farther ones."""
        far = [user for user in box.users if user.column - box.column > 1]
        for user in box.users:
            if user not in far:
                self._draw_near(box, user)
        if far:
            self._draw_lane(box, far)

    def _draw_near(self, box: _Box, user: _Box) -> None:
        start_x, style = box.x + self.box_width, box.style_to(user)
        if box.line == user.line:
            self._curve(start_x, box.middle, user.x, user.middle, style)
            return
        self._curve(start_x, box.middle, self.picture.width - 2, box.middle, style)
        self._curve(2, user.middle, user.x, user.middle, style)

    def _draw_lane(self, box: _Box, users: Sequence[_Box]) -> None:
        """Draw one line above the boxes for all users that are farther away, going down to each."""
        last = max(users, key=lambda user: user.column)
        style, right = box.style_to(last), box.x + self.box_width
        for index in range(box.line, last.line + 1):
            y = self.lines[index].lane_y(box)
            start_x, end_x = 2.0, self.picture.width - 2
            if index == box.line:
                start_x = right + 16
                self.picture.path(_bend(right, box.middle, start_x, y), style)
            if index == last.line:
                end_x = last.x - 16
            self.picture.line(start_x, y, end_x, y, style)
        for user in users:
            self._curve(user.x - 16, self.lines[user.line].lane_y(box), user.x, user.middle, box.style_to(user))

    def _curve(self, x: float, y: float, end_x: float, end_y: float, style: str) -> None:
        """Draw a line with an arrow head at its end."""
        self.picture.path(_bend(x, y, end_x - 5, end_y), style)
        self.picture.path(f"M{end_x:.1f},{end_y:.1f} l-6,-3.5 v7 Z", "border-head" if style == "border" else "head")

    def _draw_borders(self) -> None:
        """Write at each border of stages how many bytes of activations cross it, for one minibatch."""
        stages = Placement.of(self.plan, self.profile).stages
        loads = stage_loads(self.profile.sent_as(self.plan.wire_dtype), stages)
        for (before, *_), (box, *_) in pairwise(self.columns):
            if before.block.stage != box.block.stage and before.line == box.line:
                label = format_bytes(loads[before.block.stage + 1].entering_bytes)
                centre = (before.x + self.box_width + box.x) / 2
                self.picture.text(centre, self.lines[box.line].bottom + 2, label, "accent small", anchor="middle")


def _bend(x: float, y: float, end_x: float, end_y: float) -> str:
    if y == end_y:
        return f"M{x:.1f},{y:.1f} H{end_x:.1f}"
    half = (x + end_x) / 2
    return f"M{x:.1f},{y:.1f} C{half:.1f},{y:.1f} {half:.1f},{end_y:.1f} {end_x:.1f},{end_y:.1f}"


def _boxes(blocks: Sequence[ModuleBlock]) -> list[_Box]:
    """Return a box for each block, in a column after its inputs and after all earlier stages.

    A block without inputs, such as a target, stands just before its first user.
    """
    boxes: list[_Box] = []
    first = end = 0
    for block in blocks:
        if boxes and block.stage != boxes[-1].block.stage:
            first = end
        sources = [boxes[source] for source in block.inputs]
        box = _Box(block, max([first, *(source.column + 1 for source in sources)]))
        for source in sources:
            source.users.append(box)
        boxes.append(box)
        end = max(end, box.column + 1)
    for box in boxes:
        if not box.block.inputs and box.users and all(user.block.stage == box.block.stage for user in box.users):
            box.column = max(box.column, min(user.column for user in box.users) - 1)
    return boxes


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
    """Quote a text as a string of DOT, so that an artifact's text never becomes syntax."""
    escaped = printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("&", "&amp;")
    return f'"{escaped}"'


@dataclass(frozen=True)
class ModuleBlock:
    """Operators of one stage that are drawn as one block.

    Attributes:
        name: path of the module, or of the costliest operator.
        what: the operator's kind, or the number of operators.
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


def module_blocks(profile: Profile, stages: Sequence[Collection[str]], most: int = MAX_BLOCKS) -> list[ModuleBlock]:
    """Return about `most` blocks, or one for each stage if those are more, in topological order.

    It opens the costliest modules first, as long as there are not too many blocks. An operator without parameters, such
    as a ReLU, belongs to the one before it if nothing else takes that one's output.
    """
    stage_of = _stages_of(profile, stages)
    atoms = _atoms(profile, stage_of)
    groups = [tuple(atom for atom in atoms if stage_of[atom[0]] == s) for s in range(len(stages))]
    return _blocks(profile, stage_of, map(_names, _opened(profile, groups, most)))


def _stages_of(profile: Profile, stages: Sequence[Collection[str]]) -> dict[str, int]:
    """Return the stage of each operator; for an input its first user's, because no stage sends inputs to another."""
    stage_of = {name: s for s, names in enumerate(stages) for name in names}
    for node in profile.nodes:
        if node.op == "input":
            users = profile.graph.consumers[node.name]
            stage_of[node.name] = min((stage_of[user] for user in users), default=stage_of[node.name])
    return stage_of


def _opened(profile: Profile, groups: list[_Group], most: int) -> list[_Group]:
    """Repeatedly open the costliest group that still fits."""
    groups, closed = [*groups], set[_Group]()
    while candidates := [group for group in groups if len(group) > 1 and group not in closed]:
        costliest = max(candidates, key=lambda group: _seconds(profile, _names(group)))
        parts = _parts(profile.graph, costliest)
        if len(groups) - 1 + len(parts) > most:
            closed.add(costliest)
        else:
            position = groups.index(costliest)
            groups[position : position + 1] = parts
    return groups


def _parts(graph: Graph, group: _Group) -> list[_Group]:
    """Divide a group by the modules just inside the innermost one that holds all of it."""
    depth = len(_common_path(graph, [atom[0] for atom in group])) + 1
    parts: dict[tuple[str, ...], list[_Atom]] = {}
    for atom in group:
        parts.setdefault(_path(graph, atom[0])[:depth], []).append(atom)
    return [tuple(atoms) for atoms in parts.values()] if len(parts) > 1 else [(atom,) for atom in group]


def _names(group: _Group) -> list[str]:
    return [name for atom in group for name in atom]


def _path(graph: Graph, name: str) -> tuple[str, ...]:
    """Return the parts of an operator's module path, and its own name unless it is that module."""
    module = graph.modules[name]
    parts = tuple(module.split(".")) if module else ()
    return parts if name == module else (*parts, name)


def _atoms(profile: Profile, stage_of: dict[str, int]) -> list[_Atom]:
    """Join operators without parameters to the only one before them, if they are its only user and beside it."""
    graph, first_of = profile.graph, dict[str, str]()
    atoms: dict[str, list[str]] = {}
    for name, inputs in graph.inputs.items():
        before = inputs[0] if len(set(inputs)) == 1 else ""
        joins = (
            before
            and not profile.by_name[name].parameter_bytes
            and profile.by_name[before].op != "input"
            and len(graph.consumers[before]) == 1
            and stage_of[before] == stage_of[name]
            and _path(graph, before)[:-1] == _path(graph, name)[:-1]
        )
        first_of[name] = first_of[before] if joins else name
        atoms.setdefault(first_of[name], []).append(name)
    return [tuple(names) for names in atoms.values()]


def _blocks(profile: Profile, stage_of: dict[str, int], groups: Iterable[Sequence[str]]) -> list[ModuleBlock]:
    """Make blocks of groups; groups that need each other become one, so that no edge goes backwards."""
    merged = profile.graph.contracted(groups)
    merged.sort(key=lambda names: stage_of[names[0]])  # keeps the order within a stage
    number = {name: i for i, names in enumerate(merged) for name in names}
    blocks = []
    for i, names in enumerate(merged):
        inputs = {number[source] for name in names for source in profile.graph.inputs[name]} - {i}
        more = f" +{len(names) - 1}" if len(names) > 1 else ""
        # With parameters before without: a convolution names its block, not the ReLU after it.
        nodes = [profile.by_name[name] for name in names]
        costliest = max(nodes, key=lambda node: (node.parameter_bytes > 0, node.forward_s + node.backward_s))
        path = ".".join(_common_path(profile.graph, names))
        of_module = {name for name in profile.graph.members.get(path, ()) if stage_of[name] == stage_of[names[0]]}
        is_module = len(names) > 1 and 0 < len(of_module) == len(of_module.intersection(names))
        blocks.append(
            ModuleBlock(
                name=path if is_module else costliest.name,
                what=f"{len(names)} operators" if is_module else costliest.op + more,
                stage=stage_of[names[0]],
                nodes=tuple(names),
                seconds=_seconds(profile, names),
                parameter_bytes=profile.weight_bytes(names),
                inputs=tuple(sorted(inputs)),
            )
        )
    return blocks


def _common_path(graph: Graph, names: Sequence[str]) -> tuple[str, ...]:
    """Return the path of the innermost module that holds all these operators."""
    first, last = (pick(_path(graph, name) for name in names) for pick in (min, max))
    same = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return tuple(part for part, _ in same)


def _seconds(profile: Profile, names: Collection[str]) -> float:
    return sum(profile.by_name[name].forward_s + profile.by_name[name].backward_s for name in names)
