"""Print how long the planner takes and what it finds: `make bench-planner`. Figures beside targets, no pass or fail.

Each row is one whole command, `pdtool partition PROFILE --topology ...`, in a process of its own: its seconds on the
clock less those of `pdtool partition --help`, and the peak of its resident memory.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median

sys.path.append(str(Path(__file__).parents[1]))

import biggraphs

from pdtool.artifacts.plan import Certificate, Plan
from pdtool.artifacts.profile import Profile

ROOT = Path(__file__).parents[2]
PUBLISHED = ROOT.parent / "shared" / "data" / "pipedream"
PDTOOL = [sys.executable, "-m", "pdtool"]
MOST_BYTES = 2 * 10**9
RATES = ("10Gbit/s", "12GB/s")  # between servers, inside one
COLUMNS = "{:<22} {:>5} {:>7} {:>6} {:>8} {:>8} {:>7} {:>10} {:>8}  {:<14} {:<20} {}\n"


HEADS = ("case", "nodes", "workers", "memory", "seconds", "CPU s", "MB", "pace ms", "gap", "target", "plan", "how sure")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One command; `profile` writes or imports the profile of its name when it is first needed."""

    name: str
    profile: Callable[[Path], Path]
    topology: str
    memory: str | None = None
    target_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one command took: exit code (None: stopped at the time limit), seconds on the clock and of all processors,
    and bytes at the peak."""

    code: int | None
    wall_s: float
    processor_s: float
    peak_bytes: int
    errors: str = ""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table; wall_s is over the start-up time."""

    case: str
    topology: str
    memory: str | None
    nodes: int
    outcome: str
    wall_s: float
    processor_s: float
    peak_bytes: int
    target_s: float | None
    met: bool | None
    config: str = ""
    bottleneck_s: float | None = None
    gap: float | None = None
    sure: str = ""


def run(folder: Path, arguments: Sequence[str], limit_s: float) -> Run:
    """One command, in a folder that holds what earlier ones wrote."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    start = time.perf_counter()
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [*PDTOOL, *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
        pid, stopped = 0, False
        while not pid:
            pid, status, used = os.wait4(process.pid, os.WNOHANG)
            if not pid and not stopped and time.perf_counter() - start > limit_s:
                process.kill()
                stopped = True
            time.sleep(0 if pid else 0.005)
        wall = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        text = errors.read().decode(errors="replace")
    return Run(
        code=None if stopped else process.returncode,
        wall_s=wall,
        processor_s=used.ru_utime + used.ru_stime,
        peak_bytes=used.ru_maxrss * 1024,
        errors=text,
    )


def measure(case: Case, folder: Path, start_up_s: float, limit_s: float) -> Row:
    """Partition once, and read what was found."""
    path = case.profile(folder)
    rates = ",".join(RATES[: case.topology.count("x") + 1])
    wanted = ["--topology", case.topology, "--bandwidth", rates, "--memory", case.memory or "none"]
    plan_path = folder / "plan.yaml"
    plan_path.unlink(missing_ok=True)
    done = run(folder, ["partition", str(path), *wanted, "-o", str(plan_path)], limit_s)
    wall = max(0.0, done.wall_s - start_up_s)
    outcome = {0: "done", 4: "no plan", None: "timeout"}.get(done.code, f"exit {done.code}")
    if done.code not in (0, 4, None):
        sys.stderr.write(f"{case.name} on {case.topology}, exit code {done.code}: {_reason(done.errors)}\n")
    found = Plan.load(plan_path) if done.code == 0 else None
    met = outcome == "done" and wall <= case.target_s and done.peak_bytes < MOST_BYTES if case.target_s else None
    certificate = found.why.certificate if found and found.why else None
    return Row(
        case=case.name,
        topology=case.topology,
        memory=case.memory,
        nodes=len(Profile.load(path).nodes),
        outcome=outcome,
        wall_s=wall,
        processor_s=done.processor_s,
        peak_bytes=done.peak_bytes,
        target_s=case.target_s,
        met=met,
        config=_config(found) if found else outcome,
        bottleneck_s=found.predicted.bottleneck_s if found and found.predicted else None,
        gap=certificate.gap if certificate else None,
        sure=_sure(certificate) if certificate else "",
    )


def _sure(certificate: Certificate) -> str:
    """What was searched: all plans between so many cuts, or fewer after operators were merged."""
    merged = certificate.merged_operators
    return f"{merged.groups} -> {merged.merged_into} groups" if merged else f"all, {certificate.cuts} cuts"


def _reason(errors: str) -> str:
    """The line that says what is wrong; a schedule's grid may come after it, a traceback before."""
    lines = errors.strip().splitlines() or [""]
    return next((text for text in lines if "rror" in text and not text.startswith(" ")), lines[-1])[:300]


def _config(plan: Plan) -> str:
    """`15-1`, or a summary where that is long."""
    copies = f" ({plan.copies} copies)" if plan.copies > 1 else ""
    return plan.config if len(plan.config) <= 20 else f"{len(plan.stages)} stages{copies}"


def start_up(folder: Path) -> float:
    """Seconds of the same command with next to nothing to plan: the interpreter, imports, reading and writing."""
    path = written("nothing", partial(biggraphs.chain, 3), folder)
    runs = [run(folder, ["partition", str(path), "--topology", "1", "-o", "nothing.yaml"], 60) for _ in range(5)]
    if any(done.code for done in runs):
        raise SystemExit(f"pdtool partition {path}:\n{runs[0].errors}")
    return median(done.wall_s for done in runs)


def written(name: str, make: Callable[[], Profile], folder: Path) -> Path:
    """The path of a profile of biggraphs.py."""
    path = folder / f"{name}.json"
    if not path.exists():
        make().save(path)
    return path


def imported(name: str, folder: Path) -> Path:
    """The path of a published profile, through `pdtool import`."""
    path = folder / f"{name}.json"
    if not path.exists():
        done = run(folder, ["import", str(PUBLISHED / f"{name}.graph.txt"), "-o", str(path)], 60)
        if done.code:
            raise SystemExit(f"pdtool import {name}: exit code {done.code}\n{done.errors}")
    return path


def targets() -> list[Case]:
    """The cases of the planner's targets."""
    made = {
        "cells": partial(written, "cells", biggraphs.cells),
        "transformer": partial(written, "transformer", biggraphs.transformer),
        "chain": partial(written, "chain1000", biggraphs.chain),
        "inception": partial(written, "inception", biggraphs.inception),
        "gnmt16": partial(written, "gnmt16", biggraphs.gnmt),
        "resnet101": partial(written, "resnet101", biggraphs.resnet),
    }
    wanted = [
        ("cells", "4x4", 10.0),
        ("transformer", "32x8", 20.0),
        ("chain", "128x8", 20.0),
        ("inception", "4x4", None),
        ("gnmt16", "4x4", None),
        ("resnet101", "4x4", None),
    ]
    found = [
        Case(name=f"published {name}", profile=partial(imported, name), topology="4x4", target_s=1.0, memory="16GB")
        for name in ("gnmt8", "resnet50")
        if PUBLISHED.is_dir()
    ]
    for memory in (None, "16GB"):
        found += [
            Case(name=name, profile=made[name], topology=topology, target_s=target, memory=memory)
            for name, topology, target in wanted
        ]
    return found


def growth() -> Iterator[tuple[str, list[Case]]]:
    """Tables of what grows: (title, cases)."""

    def chain(nodes: int, topology: str) -> Case:
        make = partial(biggraphs.chain, nodes)
        return Case(name=f"chain of {nodes}", profile=partial(written, f"chain{nodes}", make), topology=topology)

    yield "growth in operators", [chain(nodes, "4x4") for nodes in (125, 250, 500, 1000)]
    workers = ("4", "8", "2x8", "4x8", "8x8", "16x8", "32x8")
    yield "growth in workers", [chain(250, topology) for topology in workers]


def main() -> None:
    """Run everything in a temporary folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="Write the rows there, too.")
    parser.add_argument("--only", default="", metavar="TEXT", help="Only cases with this in name, topology or memory.")
    parser.add_argument("--limit", type=float, default=120.0, metavar="SECONDS", help="Stop a command after that.")
    arguments = parser.parse_args()
    tables = [("targets", targets()), *growth()]
    if not PUBLISHED.is_dir():
        sys.stdout.write(f"published profiles skipped: there is no {PUBLISHED}\n")
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        start_up_s = start_up(folder)
        sys.stdout.write(f"start-up (to plan three operators): {start_up_s:.2f} s, to be added to each time\n")
        for title, cases in tables:
            chosen = [case for case in cases if arguments.only in f"{case.name} {case.topology} {case.memory or ''}"]
            if chosen:
                sys.stdout.write(f"\n{title}\n{COLUMNS.format(*HEADS)}")
            for case in chosen:
                rows.append(measure(case, folder, start_up_s, arguments.limit))
                sys.stdout.write(line(rows[-1]))
                sys.stdout.flush()
    if arguments.json:
        content = {"start_up_s": start_up_s, "rows": [asdict(row) for row in rows]}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n")


def line(row: Row) -> str:
    """One row as text."""
    target = f"{row.target_s:g} s: {'met' if row.met else 'MISSED'}" if row.target_s else ""
    return COLUMNS.format(
        row.case,
        row.nodes,
        row.topology,
        row.memory or "",
        f"{row.wall_s:.2f}",
        f"{row.processor_s:.2f}",
        f"{row.peak_bytes / 1e6:.0f}",
        "" if row.bottleneck_s is None else f"{row.bottleneck_s * 1e3:.3f}",
        "" if row.gap is None else f"{row.gap:.1%}",
        target,
        row.config,
        row.sure,
    )


if __name__ == "__main__":
    main()
