"""`show`: any artifact, for people."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

from pdtool.cli import console, options
from pdtool.cli.deliver import print_json
from pdtool.errors import ArtifactError, UsageError

if TYPE_CHECKING:
    from pdtool.artifacts.envelope import Artifact

_FORMAT = re.compile(r"""^\W{0,4}format["']?:\s*["']?pdtool/([a-z]+)/""", re.MULTILINE)


@click.command(
    epilog="\b\nExamples:\n  pdtool show runs/digits-3 --json\n  pdtool show plans/digits-3.yaml --graph -o graph.svg"
)
@click.argument("file")
@click.option("--graph", is_flag=True, help="Draw a plan's operators and stages for Graphviz instead.")
@options.output("With --graph, DOT to write; FILE.svg is drawn by Graphviz.")
@options.as_json
def show(file: str, graph: bool, output: str | None, as_json: bool) -> None:
    """Print FILE, any artifact or the folder of one, for people."""
    if output and not graph:
        raise UsageError(f"-o {output} without --graph", "redirect the output, or add --graph")
    artifact = load(file)
    if graph:
        draw_graph(artifact, file, output)
        return
    if as_json:
        print_json(artifact)
        return
    from pdtool.artifacts.bundle import Bundle
    from pdtool.artifacts.cluster import ClusterFile
    from pdtool.artifacts.device import Devices
    from pdtool.artifacts.plan import Plan
    from pdtool.artifacts.profile import Profile
    from pdtool.artifacts.report import Report
    from pdtool.cli import render

    match artifact:
        case Profile():
            console.show(render.profile_table(artifact), err=False)
        case Devices():
            console.show(*render.devices_view(artifact), err=False)
        case ClusterFile():
            console.show(*render.cluster_view(artifact), err=False)
        case Plan():
            console.show(*render.plan_view(artifact), "", render.timeline(artifact), err=False)
        case Bundle():
            console.show(*render.bundle_view(artifact), err=False)
        case Report():
            console.show(*render.report_view(artifact), err=False)


def draw_graph(artifact: Artifact, file: str, output: str | None) -> None:
    """The graph of a plan, to `output` or stdout; raises UsageError for what is no plan."""
    from pdtool.artifacts.plan import Plan
    from pdtool.cli.dot import dot, write_graph
    from pdtool.cli.inputs import profile_of

    if not isinstance(artifact, Plan):
        raise UsageError(f"{file} is a {artifact.KIND}, and --graph draws plans", "name a plan")
    profile = profile_of(artifact, file)
    if output is None or output == "-":
        click.echo(dot(artifact, profile), nl=False)
        return
    write_graph(artifact, profile, Path(output))
    console.note(f"wrote {output}")


def load(file: str) -> Artifact:
    """The artifact in a file, or the report or bundle in a folder; `-` is stdin.

    Raises:
        ArtifactError: there is none, or it is damaged.
    """
    path = Path(file)
    if path.is_dir():
        found = [path / name for name in ("report.json", "bundle.yaml") if (path / name).is_file()]
        if not found:
            raise ArtifactError(path, "holds neither report.json nor bundle.yaml", "name a file, or a finished run")
        path = found[0]
    try:
        text = sys.stdin.read() if file == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(path, f"cannot be read ({getattr(error, 'strerror', None) or 'not UTF-8 text'})") from error
    kind = _FORMAT.search(text)
    if not kind:
        raise ArtifactError(
            path, "is no artifact of pdtool (no format field)", "name a profile, cluster, plan, bundle or report"
        )
    return artifact_class(kind[1], path).parse(text, path)


def artifact_class(kind: str, path: Path | str = "") -> type[Artifact]:
    """The class of a kind; raises ArtifactError for an unknown one in `path`."""
    from pdtool.artifacts.bundle import Bundle
    from pdtool.artifacts.cluster import ClusterFile
    from pdtool.artifacts.device import Devices
    from pdtool.artifacts.plan import Plan
    from pdtool.artifacts.profile import Profile
    from pdtool.artifacts.report import Report

    classes: dict[str, type[Artifact]] = {c.KIND: c for c in (Profile, Devices, ClusterFile, Plan, Bundle, Report)}
    if kind not in classes:
        raise ArtifactError(path, f"is of the unknown kind {kind!r}", f"known are {', '.join(classes)}", field="format")
    return classes[kind]
