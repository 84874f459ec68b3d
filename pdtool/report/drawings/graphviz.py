"""The partitioned operator graph in DOT, the language of Graphviz."""

from __future__ import annotations

from collections.abc import Iterator

from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.errors import printable
from pdtool.units import format_bytes, format_seconds


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
    for name, consumers in profile.graph.consumers.items():
        node = profile.by_name[name]
        for consumer in consumers:
            attributes = ""
            if stage_of[name] != stage_of[consumer]:
                label = f"{format_bytes(node.output_bytes)} + {format_bytes(node.gradient_bytes)}"
                attributes = f" [label={_quoted(label)}, color=firebrick, penwidth=2]"
            yield f"  {_quoted(name)} -> {_quoted(consumer)}{attributes};"
    yield "}"


def _quoted(text: str) -> str:
    """Quote a text as a string of DOT, so that what stands in an artifact never becomes syntax."""
    escaped = printable(text).replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("&", "&amp;")
    return f'"{escaped}"'
