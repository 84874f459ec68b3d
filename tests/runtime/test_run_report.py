"""What a run leaves behind: metrics.jsonl, report.json, trace.json, and the end of it at a target."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import harness
import pytest
import samples
from harness import CONV2, CONV3, CONV4, TIED3

from pdtool.artifacts.chrome_trace import TRACKS, chrome_trace
from pdtool.artifacts.metrics import MetricsLine, ValidationLine, read_metrics
from pdtool.artifacts.report import Report
from pdtool.cli.run_view import report_view
from pdtool.frontend.random_numbers import derive_seed
from pdtool.host import usable_cores
from pdtool.options.target import Target
from pdtool.planner.simulator.engine import simulate
from pdtool.planner.simulator.job import SimulationJob, StageWork, TiedGroup
from pdtool.planner.stage_costs import StageEdge
from pdtool.reports.slowness import slowness_lines
from pdtool.runtime.launch.launcher import launch
from pdtool.runtime.ranks import assign_ranks
from pdtool.schedule import SCHEDULES, ActionKind


def test_a_launched_run_leaves_its_record(tmp_path: Path) -> None:
    """Through the launcher: a line per update of the last stage and per validation, one lane per worker, a report."""
    spec = harness.job(tmp_path, CONV2, (2, 1), epochs=2, target=Target.parse("loss=0.0"))
    events: list[MetricsLine] = []
    report = launch(spec, on_metrics=events.append)
    lines = read_metrics(spec.out / "metrics.jsonl")
    assert lines == events
    assert [(line.split, line.epoch, line.step) for line in lines] == [
        *(("train", 1, step) for step in range(1, 8)),
        ("valid", 1, 7),
        *(("train", 2, step) for step in range(8, 15)),
        ("valid", 2, 14),
    ]
    assert isinstance(lines[-1], ValidationLine)
    assert lines[-1].figures.keys() >= {"loss", "accuracy"}
    assert Report.load(spec.out / "report.json") == report
    assert (report.config, report.epochs, report.minibatches) == ("2-1", 2, 7)
    assert (report.target, report.target_reached) == ("loss=0", False)
    assert (report.cores, report.local_workers) == (len(usable_cores()), 3)
    assert report.metrics == lines[-1].figures
    assert [stage.replicas for stage in report.stages] == [2, 1]
    # without a steady state, the whole epoch is measured: from the first loss to the last was several times too fast
    assert not report.measured.is_steady
    assert report.measured.bottleneck_s * report.throughput_samples_per_s == pytest.approx(26 / 7)
    assert report.measured.throughput_samples_per_s == report.throughput_samples_per_s
    # stage 1 sends back 144 floats a sample; stage 0 as many forward, and an int64 label; each replica half of them
    assert report.stages[1].sent_bytes == round(26 / 7 * 144 * 4)
    gradients = 2 * (1 / 2) * (18 * 4 + 8) * 4 * 4 / 7
    assert report.stages[0].sent_bytes == pytest.approx(26 / 7 * (144 * 4 + 8) / 2 + gradients, rel=0.1)
    for stage in report.stages:
        assert stage.busy_s == pytest.approx(stage.forward_s + stage.backward_s + stage.update_s)
        assert stage.busy_s > 0
    trace = json.loads((spec.out / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in trace if e["name"] == "process_name"] == [
        "rank 0 (stage 0, replica 0)",
        "rank 1 (stage 0, replica 1)",
        "rank 2 (stage 1, replica 0)",
    ]
    done = [
        e["name"] for e in trace if e["ph"] == "X" and e["pid"] == 2 and e["cat"] in ("forward", "backward", "update")
    ]
    done = [name for name, _ in groupby(done)]  # a wait may cut an action in two
    assert done[:3] == ["1F0", "1B0", "1U0"]
    assert len(done) == 2 * 3 * 7


MINIBATCHES = 6
RUNS = {
    "2-1": (CONV2, {"replicas": (2, 1)}),
    "tied": (TIED3, {}),
    "zb-h1": (CONV3, {"schedule": "zb-h1", "microbatches": 3}),
}
RUNS |= {
    kind.name: (CONV4, {"schedule": kind.name, "chunks": 2, "microbatches": 2})
    for kind in SCHEDULES.values()
    if kind.chunked
}


@pytest.fixture(scope="module", params=RUNS)
def traced(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """A run of one epoch: its spec, its report and the events of its trace."""
    toy, settings = RUNS[request.param]
    spec = harness.job(tmp_path_factory.mktemp("run"), toy, steps=MINIBATCHES, **settings)
    report = launch(spec)
    return spec, report, json.loads((spec.out / "trace.json").read_text())["traceEvents"]


def simulated(spec: Any) -> list[dict[str, Any]]:
    """The trace of a simulation of the same lists, with costs of no meaning."""
    plan, bundle = spec.plan, spec.bundle
    shape = plan.shape(tuple(tied.stages for tied in bundle.tied))
    last = len(plan.stages) - 1
    ends = {(max(t.producer, 0), c): t.gradient for t in bundle.tensors for c in t.consumers if max(t.producer, 0) != c}
    ends |= {(0, last): ends.get((0, last), False)}  # the target
    found = simulate(
        SimulationJob(
            shape=shape,
            lists=plan.kind.build(shape, MINIBATCHES),
            cluster=plan.cluster,
            workers=[w for stage in plan.stages[: plan.pipeline_depth] for w in stage.workers],
            stages=[StageWork(seconds=dict.fromkeys(ActionKind, 1.0), averaged_bytes=8)] * (last + 1),
            edges=[
                StageEdge(source=a, destination=b, forward_bytes=8, backward_bytes=8, has_gradient=gradient)
                for (a, b), gradient in ends.items()
            ],
            tied=[TiedGroup(stages=t.stages, lags=(0,) * len(t.stages), size_bytes=8) for t in bundle.tied],
        )
    )
    return list(chrome_trace(found.named_events)["traceEvents"])


def lane_of(event: dict[str, Any]) -> str:
    return TRACKS[event["tid"] // 1000]


def test_the_trace_of_a_run_has_the_lanes_and_names_of_its_simulation(traced: tuple[Any, ...]) -> None:
    """Actions in the same order; the same messages, each once; averages where there are some."""
    spec, _, events = traced
    found, expected = ([e for e in made if e["ph"] == "X"] for made in (events, simulated(spec)))
    for pid in {e["pid"] for e in expected}:
        actions, messages, averages = [], [], []
        for made in (found, expected):
            mine = [e for e in made if e["pid"] == pid]
            compute = [
                (e["cat"], e["name"]) for e in mine if lane_of(e) == "compute" and e["cat"] not in ("wait", "data")
            ]
            actions.append([name for name, _ in groupby(compute)])
            messages.append(Counter((lane_of(e), e["cat"], e["name"]) for e in mine if e["cat"] in ("send", "receive")))
            averages.append({(e["cat"], e["name"]) for e in mine if lane_of(e) == "all-reduce"})
        assert actions[0] == actions[1]
        assert messages[0] == messages[1]
        assert averages[0] == averages[1]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == set(map(str, assign_ranks(spec.plan)))


def test_a_worker_does_one_thing_at_a_time(traced: tuple[Any, ...]) -> None:
    """Its compute lane is one row, without overlap; to the nanosecond that the file holds."""
    _, _, events = traced
    lanes = {(e["pid"], e["tid"]) for e in events if e["ph"] == "X" and lane_of(e) == "compute"}
    assert lanes == {(pid, 0) for pid in {e["pid"] for e in events}}
    for pid, _ in lanes:
        spans = sorted(
            (e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, 0)
        )
        assert all(end <= start + 2e-3 for (_, end), (start, _) in pairwise(spans))


def test_shares_of_the_time_add_up(traced: tuple[Any, ...]) -> None:
    """Computing and waiting take no more than all the time; handing over messages is part of the computing."""
    spec, report, events = traced
    slowest = spec.plan.batch_size / report.throughput_samples_per_s
    for stage in report.stages:
        assert stage.busy_s == pytest.approx(stage.forward_s + stage.backward_s + stage.update_s)
        assert stage.busy_s > 0
        assert stage.rest_s > 0
        assert stage.time_s <= slowest * 1.001
        assert stage.send_s < stage.busy_s
        assert 0 < stage.peak_memory_bytes < 2e9
    averaged = [stage.allreduce_s > 0 for stage in report.stages]
    assert averaged == [
        s in {s for t in spec.bundle.tied for s in t.stages} or stage.replicas > 1
        for s, stage in enumerate(report.stages)
    ]
    for s, stage in enumerate(report.stages if not any(averaged) else ()):
        sent = sum(e["args"]["bytes"] for e in events if e["ph"] == "X" and (e["pid"], e["cat"]) == (s, "send"))
        assert stage.sent_bytes == round(sent / MINIBATCHES)


def test_a_run_stops_at_its_target(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV3, epochs=5, steps=2, target=Target.parse("accuracy=0.0"))
    report = launch(spec)
    assert (report.epochs, report.minibatches, report.target_reached) == (1, 2, True)


@pytest.mark.parametrize(
    ("text", "reached", "missed"),
    [
        ("accuracy=0.9", [0.9, 1.0], [0.89]),
        ("loss=0.5", [0.5, 0.1], [0.51]),
        ("perplexity=98", [98, 97], [99]),
        ("nll=4", [4, 7.6], [3.9]),
        ("nll<=4", [4, 3.9], [7.6]),
        ("nll<4", [3.9], [4, 7.6]),
        ("bleu>=20", [20, 21], [19.9]),
        ("loss>0.5", [0.6], [0.5, 0.4]),
    ],
)
def test_targets(text: str, reached: list[float], missed: list[float]) -> None:
    """With = at least; loss and perplexity at most; otherwise as it is written."""
    target = Target.parse(text)
    assert str(target) == text
    assert (
        Target.parse(str(target))
        == Target.parse(f" {text} ".replace(target.relation, f" {target.relation} "))
        == target
    )
    assert all(target.is_reached({target.metric: value}) for value in reached)
    assert not any(target.is_reached({target.metric: value}) for value in missed)


def test_a_target_that_can_be_read_in_two_ways_says_how_it_was_read() -> None:
    said = "target nll=4 is read as nll >= 4; write nll<=4 if lower is better"
    assert Target.parse("nll=4").interpretation == said
    assert Target.parse("loss=0.5").interpretation == "target loss=0.5 is read as loss <= 0.5"
    assert Target.parse("accuracy=0.9").interpretation == "target accuracy=0.9 is read as accuracy >= 0.9"
    assert Target.parse("nll<=4").interpretation is None


def test_the_report_compares_measured_with_simulated_time_where_the_plan_has_one() -> None:
    """Else with what the formulas say."""
    predicted = samples.plan().predicted
    assert predicted
    report = samples.report()
    for simulated_s, line in (
        (None, "per minibatch: predicted 2 ms, measured 4 ms (+100%)"),
        (5e-3, "per minibatch: simulated 5 ms, measured 4 ms (-20%)"),
    ):
        changed = predicted.model_copy(update={"bottleneck_s": 2e-3, "simulated_s": simulated_s})
        assert line in list(report_view(report.model_copy(update={"predicted": changed})))


def test_of_workers_that_shared_cores_no_error_of_the_prediction_is_given() -> None:
    report = samples.report().model_copy(update={"cores": 2, "local_workers": 3})
    lines = [line for line in report_view(report) if isinstance(line, str)]
    assert any(re.fullmatch(r"per minibatch: \w+ \S+ ms, measured 4 ms", line) for line in lines)
    assert "3 workers shared 2 cores. With one device each they would be faster" in lines
    for others in ({"local_workers": 2}, {"cores": None}):
        assert not any("shared" in str(line) for line in report_view(report.model_copy(update=others)))


def test_a_report_says_which_stage_computes_longer_than_was_profiled() -> None:
    """Stage 0 was predicted to compute 1.5 ms a minibatch, stage 1 3 ms; not where the reason is known."""
    start = ") computing: "

    def said(busy_s: tuple[float, float], **update: object) -> list[str]:
        report = samples.report()
        stages = [s.model_copy(update={"busy_s": b}) for s, b in zip(report.stages, busy_s, strict=True)]
        report = report.model_copy(update={"cores": 4, "local_workers": 3, "stages": tuple(stages), **update})
        return [str(line).partition(start)[2] for line in report_view(report) if "the profile says" in str(line)]

    [line] = said((4.6e-3, 3.1e-3))
    assert line.startswith(
        "stage 0 computes for 4.6 ms, but the profile says 1.5 ms: the cores may have been busy with "
    )
    assert line.endswith("of another device")
    for of_one_epoch in ({"epochs": 1}, {"epochs": 4, "resumed_after": 3}):
        assert said((4.6e-3, 3.1e-3), **of_one_epoch) == [f"{line}. A single epoch includes the warm-up"]
    assert said((4.6e-3, 9e-3))[0].startswith("stage 1 computes for 9 ms, but the profile says 3 ms: ")
    [on_gpu] = said((4.6e-3, 9e-3), cores=None, epochs=1)
    assert "the GPU may have been busy" in on_gpu
    assert on_gpu.endswith(". A single epoch includes the warm-up")
    assert said((1.6e-3, 3.1e-3)) == said((9e-3, 9e-3), cores=2) == said((9e-3, 9e-3), includes_compilation=True) == []


def test_a_report_counts_the_cores_that_its_workers_may_use(tmp_path: Path) -> None:
    """Not those of the machine: workers that are confined to one core share it."""
    confined = f"import os; os.sched_setaffinity(0, {{{min(usable_cores())}}})\n"
    toy = replace(CONV2, model=confined + CONV2.model)
    report = launch(harness.job(tmp_path, toy, steps=2, device="cpu"))
    assert (report.cores, report.local_workers, report.is_crowded) == (1, 2, True)


def test_a_report_of_one_epoch_says_that_compiling_is_part_of_its_time() -> None:
    lines = [str(line) for line in report_view(samples.report().model_copy(update={"includes_compilation": True}))]
    assert "per minibatch: predicted 3 ms, measured 4 ms" in lines
    assert any(line.startswith("one epoch: these figures include the time of torch.compile") for line in lines)


def test_a_report_of_epochs_that_are_too_short_says_so_instead_of_how_wrong_the_prediction_was() -> None:
    report = samples.report()
    short = report.measured.model_copy(update={"is_steady": False})
    lines = [str(line) for line in report_view(report.model_copy(update={"measured": short}))]
    assert "per minibatch: predicted 3 ms, measured 4 ms" in lines
    assert any(line.startswith("epochs of 10 minibatches have no steady state") for line in lines)


def test_a_report_says_when_loading_slows_the_run() -> None:
    """Where the first stage would else be no slower than another: its loading is no loss while it has to wait."""
    report = samples.report()
    first, second = report.stages
    quick = first.model_copy(update={"data_s": 0.1e-3})
    slow = first.model_copy(update={"data_s": 5e-3})
    slower = second.model_copy(update={"busy_s": 9e-3})
    said = [
        [line for line in slowness_lines(report.model_copy(update={"stages": stages})) if "loader worker" in line]
        for stages in ((quick, second), (slow, slower), (slow, second), (slow,))
    ]
    assert said[:2] == [[], []]
    assert all("loading: not predicted; no loader worker loaded ahead" in lines[0] for lines in said[2:])
    unpredicted = report.model_copy(update={"stages": (slow,), "predicted": None})
    assert next(slowness_lines(unpredicted)).startswith(
        "loading slows this run: stage 0 spends 50% of its time on data, and "
    )


@pytest.mark.parametrize(
    ("workers", "cores", "remedy"),
    [
        (0, 4, "no loader worker loaded ahead: pass --loader-workers 1"),
        (1, 4, "1 loader worker loaded for each replica: pass --loader-workers 2"),
        (2, 4, "2 loader workers loaded for each replica, and no core is free. Make samples cheaper"),
        (3, None, "3 loader workers loaded for each replica: pass --loader-workers 4"),
    ],
)
def test_more_loader_workers_are_proposed_where_there_are_cores_for_them(workers, cores, remedy) -> None:
    report = samples.report()
    first = report.stages[0].model_copy(update={"data_s": 5e-3, "replicas": 1})
    update = {"stages": (first,), "predicted": None, "cores": cores, "local_workers": 2, "loader_workers": workers}
    assert remedy in next(slowness_lines(report.model_copy(update=update)))


def test_a_run_with_slow_samples_says_so(tmp_path: Path) -> None:
    """Loaded in the training process, or by a loader worker that is waited for."""
    sleeping = CONV2.model.replace("return self.x[i]", "import time; time.sleep(0.02); return self.x[i]")
    for workers in (0, 1):
        toy = replace(CONV2, model=sleeping)
        report = launch(harness.job(tmp_path / str(workers), toy, device="cpu", loader_workers=workers, steps=3))
        first, second = report.stages
        assert first.data_s > 20e-3, "of 80 ms a minibatch"
        assert second.data_s == 0.0
        assert first.forward_s < first.data_s
        assert any("loader worker" in str(line) for line in report_view(report))


def test_seeds_differ_in_every_part() -> None:
    seeds = {derive_seed(a, b, c) for a in range(3) for b in range(3) for c in range(3)} | {
        derive_seed(0, 0),
        derive_seed(0, 0, "x"),
    }
    assert len(seeds) == 29
