"""Tables fit the terminal: columns are left out, and named; no word and no figure is ever cut."""

from __future__ import annotations

import io
import re
from collections.abc import Iterable
from typing import Any

import pytest
import samples
from conftest import Folder

from pdtool.cli.artifact_views import (
    bundle_view,
    cluster_view,
    plan_view,
    profile_table,
    simulation_view,
    timeline,
    worker_table,
)
from pdtool.cli.run_view import checkpoint_view, emulation_view, report_view
from pdtool.cli.table import PlainConsole, Table
from pdtool.planner.choice.comparison import simulated

COLUMNS = ("operator", "kind", "forward", "backward", "memory")
ROWS = [
    ["features.denseblock1.conv1", "a convolution of five by five", "1.25 ms", "12.5 ms", "512 MB"],
    ["head", "Linear", "123 µs", "1.25 s", "0 B"],
]
DROP = ("memory", "kind")


def rendered(part: Any, width: int) -> str:
    target = PlainConsole(file=io.StringIO(), width=width, highlight=False, force_terminal=True, no_color=True)
    with target.capture() as capture:
        target.print(part, crop=False)
    return re.sub(r"\x1b\[[0-9;]*m", "", capture.get())


@pytest.mark.parametrize("width", range(40, 120, 3))
def test_columns_are_left_out_by_priority_and_what_is_shown_is_whole(width: int) -> None:
    text = rendered(Table(COLUMNS, ROWS, names=2, drop=DROP), width)
    lines = text.splitlines()
    left_out = set(re.findall(r"\w+", lines[-1].partition(":")[2])) if lines[-1].startswith("(not shown") else set()
    assert left_out in (set(), {"memory"}, {"memory", "kind"})
    for number, column in enumerate(COLUMNS):
        for cell in (column, *(row[number] for row in ROWS)):
            pieces = cell.split() if number < 2 else [cell]  # words may stand on several lines, a figure never
            assert (
                all((piece in text) == (column not in left_out) for piece in pieces if piece != column)
                or column in left_out
            )
    needed = len("features.denseblock1.conv1  1.25 ms  backward")
    assert max(map(len, lines)) <= max(width, needed)


def test_a_column_that_tells_no_rows_apart_goes_first() -> None:
    rows = [["a", "0", "1 ms"], ["b", "0", "2 ms"]]
    text = rendered(Table(("stage", "all-reduce", "to next"), rows, drop=("to next", "all-reduce")), 18)
    assert "(not shown at" in text
    assert "2 ms" in text


def tables() -> Iterable[Any]:
    yield profile_table(samples.profile())
    yield worker_table(samples.plan(), 1)
    manifest = samples.checkpoint_manifest()
    for view in (
        plan_view(samples.plan()),
        bundle_view(samples.bundle()),
        report_view(samples.report()),
        cluster_view(samples.cluster()),
        emulation_view(samples.emulation()),
        checkpoint_view(manifest),
    ):
        yield from (part for part in view if isinstance(part, Table))


@pytest.mark.parametrize("part", list(tables()), ids=lambda part: part._columns[0])
def test_all_tables_fit_80_columns(part: Table) -> None:
    assert max(map(len, rendered(part, 80).splitlines())) <= 80


def test_into_a_pipe_a_table_has_80_columns_or_those_that_are_asked_for(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no colours."""
    samples.report().save("report.json")
    narrow = folder.pdtool("show", "report.json").stdout
    assert "(not shown at width 80: sending)" in narrow
    assert "sending" not in narrow.splitlines()[2]
    monkeypatch.setenv("COLUMNS", "120")
    wide = folder.pdtool("show", "report.json").stdout
    assert "not shown" not in wide
    assert "\x1b" not in narrow + wide


def test_a_cluster_that_was_not_probed_has_no_measured_columns(folder: Folder) -> None:
    samples.cluster().model_copy(update={"measured": None}).save("lab.yaml")
    shown = folder.pdtool("show", "lab.yaml").stdout
    assert "bandwidth" in shown
    assert "ring formula" not in shown


def test_the_timeline_names_the_workers_of_the_plan() -> None:
    plan = samples.plan()
    numbers = [worker for stage in plan.stages[: plan.pipeline_depth] for worker in stage.workers]
    renamed = dict(zip(numbers, reversed(numbers), strict=True))
    stages = [
        stage.model_copy(update={"workers": tuple(renamed[worker] for worker in stage.workers)})
        for stage in plan.stages
    ]
    drawn = timeline(plan.model_copy(update={"stages": tuple(stages)}), 80)
    assert [int(number) for number in re.findall(r"worker (\d+)", drawn)] == numbers[::-1] != numbers


def test_a_simulation_as_fast_as_predicted_is_not_slower_by_minus_nothing() -> None:
    profile, plan = samples.profile(), samples.plan()
    result = simulated(plan, profile).result
    predicted = plan.predicted.model_copy(update={"bottleneck_s": result.time_per_minibatch_s * (1 + 1e-7)})
    lines = simulation_view(plan.model_copy(update={"predicted": predicted}), plan.schedule, result)
    assert any("simulated +0.0%" in str(line) for line in lines)
