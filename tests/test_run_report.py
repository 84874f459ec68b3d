"""What a run leaves behind: metrics.jsonl, report.json, trace.json, and the end of it at a target."""

from __future__ import annotations

import json
from pathlib import Path

import harness
import pytest
from harness import CONV2, CONV3

from pdtool.artifacts.report import Report
from pdtool.run.launch import launch
from pdtool.run.log import read
from pdtool.run.spec import Target, seed_of


def test_a_launched_run_leaves_its_record(tmp_path: Path) -> None:
    """Through torch elastic: a line per update of the last stage and per validation, one lane per worker, a report."""
    spec = harness.job(tmp_path, CONV2, (2, 1), epochs=2, target=Target("loss", 0.0))
    events: list[dict[str, object]] = []
    report = launch(spec, on_event=events.append)
    lines = read(spec.out / "metrics.jsonl")
    assert lines == events
    assert [(line["split"], line["epoch"], line["step"]) for line in lines] == [
        *(("train", 1, step) for step in range(1, 8)), ("valid", 1, 7),
        *(("train", 2, step) for step in range(8, 15)), ("valid", 2, 14),
    ]  # fmt: skip
    assert lines[-1].keys() >= {"loss", "accuracy"}
    assert Report.load(spec.out / "report.json") == report
    assert (report.config, report.epochs, report.minibatches) == ("2-1", 2, 7)
    assert (report.target, report.target_reached) == ("loss=0", False)
    assert report.metrics == {name: lines[-1][name] for name in ("loss", "accuracy")}
    assert [stage.replicas for stage in report.stages] == [2, 1]
    # stage 1 sends back 144 floats a sample; stage 0 as many forward, and an int64 label; each replica half of them
    assert report.stages[1].sent_bytes == round(26 / 7 * 144 * 4)
    gradients = 2 * (1 / 2) * (18 * 4 + 8) * 4 * 4 / 7
    assert report.stages[0].sent_bytes == pytest.approx(26 / 7 * (144 * 4 + 8) / 2 + gradients, rel=0.1)
    for stage in report.stages:
        assert stage.busy_s == pytest.approx(stage.forward_s + stage.backward_s + stage.update_s)
        assert stage.busy_s > 0
    trace = json.loads((spec.out / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in trace if e["name"] == "process_name"] == [
        "rank 0 (stage 0, replica 0)", "rank 1 (stage 0, replica 1)", "rank 2 (stage 1, replica 0)",
    ]  # fmt: skip
    done = [e["name"] for e in trace if e["ph"] == "X" and e["pid"] == 2 and e["cat"] in ("forward", "backward", "update")]
    assert done[:3] == ["1F0", "1B0", "1U0"]
    assert len(done) == 2 * 3 * 7


def test_a_run_stops_at_its_target(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV3, epochs=5, steps=2, target=Target("accuracy", 0.0))
    report = launch(spec)
    assert (report.epochs, report.minibatches, report.target_reached) == (1, 2, True)


@pytest.mark.parametrize(
    ("text", "value", "reached"),
    [("accuracy=0.9", 0.9, True), ("accuracy=0.9", 0.89, False), ("loss=0.5", 0.5, True), ("perplexity=98", 99, False)],
)
def test_targets(text: str, value: float, reached: bool) -> None:
    """At least; loss and perplexity at most."""
    target = Target.parse(text)
    assert str(target) == text
    assert target.reached({target.metric: value}) is reached


def test_seeds_differ_in_every_part() -> None:
    seeds = {seed_of(a, b, c) for a in range(3) for b in range(3) for c in range(3)} | {
        seed_of(0, 0),
        seed_of(0, 0, "x"),
    }
    assert len(seeds) == 29
