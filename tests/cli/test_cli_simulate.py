"""`pdtool simulate` and `pdtool show --graph`: tables, traces, pictures, and what they refuse."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import samples
from graphs import chain, plan_of

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.planner.choice import comparison
from pdtool.planner.choice.comparison import SweepPoint, bandwidth_grid, crossings
from pdtool.planner.placement import Placement
from pdtool.planner.simulator.engine import simulate
from pdtool.planner.simulator.job import SimulationJob
from pdtool.reports.graph_drawing import dot


@pytest.fixture
def planned(folder):
    """plans/net.yaml: 2-1 on three of four workers, links of 1000 bytes/s; four operators of 1000 parameter bytes."""
    net = chain([0.3, 0.3, 0.2, 0.1], parameters=1000, crossing=50)
    net.save("profiles/net.json")
    plan = plan_of(net, [["x", "a0", "a1"], ["a2", "a3"]], [[0, 1], [2]], make_cluster((4,), (1000.0,)))
    plan.model_copy(update={"profile": "profiles/net.json"}).save("plans/net.yaml")
    return folder


def data_of(folder, *arguments):
    """What `--json` prints."""
    return json.loads(folder.pdtool("simulate", *arguments, "--json").stdout)


def test_the_tables(planned):
    text = planned.pdtool("simulate").stdout
    workers = re.findall(r"^ +(\d)  +(\d) +(\d+)% +(\d+)% +(\d+)%", text, re.MULTILINE)
    assert [(worker, stage) for worker, stage, *_ in workers] == [("0", "0"), ("1", "0"), ("2", "1")]
    assert all(99 <= sum(map(int, shares)) <= 101 for _, _, *shares in workers)
    assert re.search(r"steady state: \S+ m?s per minibatch \(\S+ samples/s\); predicted .*, simulated [+-]", text)
    assert re.search(r"The last worker began after .* \(fill\). The first ended .* early \(drain\)", text)
    for label in ("this plan", "data parallelism", "straight pipeline", "GPipe", "model parallelism"):
        assert re.search(rf"^{label}.* [0-9.]+ (B|kB)  ", text, re.MULTILINE)


def test_the_figures_are_those_of_the_simulator(planned):
    data = data_of(planned, "--minibatches", "40")
    profile, plan = Profile.load("profiles/net.json"), Plan.load("plans/net.yaml")
    cluster = plan.cluster
    simulated = simulate(SimulationJob.of(Placement.of(plan, profile), profile, cluster, 40))
    time_s = simulated.time_per_minibatch_s
    assert (data["minibatches"], data["bottleneck_s"]) == (40, time_s)
    assert [w["memory_bytes"] for w in data["workers"]] == [usage.memory_bytes for usage in simulated.workers]
    assert data["compared"][0]["throughput_samples_per_s"] == data["throughput_samples_per_s"] == 8 / time_s
    assert data["predicted_bottleneck_s"] <= time_s + 1e-9
    assert "sweep" not in data


def test_what_would_take_too_long_is_named_and_left_out(planned, monkeypatch):
    monkeypatch.setattr(comparison, "MAX_ACTIONS", 300)
    monkeypatch.setenv("COLUMNS", "120")
    text = planned.pdtool("simulate").stdout
    assert re.search(r"^straight pipeline \(.*\): too large to simulate here$", text, re.MULTILINE)
    assert re.search(r"^data parallelism \(4\) +4 ", text, re.MULTILINE)


def test_another_schedule_and_what_does_not_fit_it(planned):
    assert data_of(planned, "--schedule", "2bw")["schedule"] == "2bw"
    assert "predicted" not in planned.pdtool("simulate", "--schedule", "gpipe").stdout
    error = planned.pdtool("simulate", "--schedule", "zb-h1", code=2).stderr
    assert (
        "zb-h1 needs the same number of replicas for each stage, but the plan is 2-1; use a straight plan, or 1f1b-fl"
        in error
    )


def test_the_trace_has_a_process_per_worker_and_no_events_that_overlap_in_a_track(planned):
    planned.pdtool("simulate", "--trace", "out/trace.json")
    events = json.loads(Path("out/trace.json").read_text())["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "worker 0, stage 0", 1: "worker 1, stage 0", 2: "worker 2, stage 1"}
    tracks = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"compute", "send", "receive", "all-reduce"} <= tracks
    rows = {}
    for e in events:
        if e["ph"] == "X":
            rows.setdefault((e["pid"], e["tid"]), []).append((e["ts"], e["dur"]))
            assert e["cat"] in ("forward", "backward", "update", "wait", "send", "receive", "all-reduce")
    for row in rows.values():
        assert all(a + length <= b + 0.01 for (a, length), (b, _) in pairwise(sorted(row)))
    assert {"0F0", "1B0", "0U0"} <= {e["name"] for e in events}


def test_the_timeline_is_a_picture_of_1200_pixels_with_the_minibatches_in_it(planned):
    for minibatches in ("12", "2000"):
        planned.pdtool("simulate", "--svg", "t.svg", "--minibatches", minibatches)
        root = ElementTree.parse("t.svg").getroot()
        texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
        assert {"worker 2", "stage 1", "forward", "backward", "all-reduce", "0", "7"} <= set(texts)
        assert any(text.startswith("net (2-1, 1f1b), ") for text in texts)
        assert root.attrib["width"] == "1200"


def test_a_sweep_finds_where_data_parallelism_is_as_fast(planned):
    result = planned.pdtool("simulate", "--sweep", "bandwidth=0.8kbit/s..8Mbit/s", "--svg", "gain.svg")
    assert re.search(r"as fast as data parallelism at [0-9.]+ kbit/s \(interpolated\)", result.stdout)
    assert len(re.findall(r"bit/s .* ×  [█·|]{30}$", result.stdout, re.MULTILINE)) == 13
    data = data_of(planned, "--sweep", "bandwidth=0.8kbit/s..8Mbit/s")
    gains = [point["gain"] for point in data["sweep"]]
    assert gains[0] > 1 > gains[-1]
    [rate] = data["crossings_bytes_per_s"]
    below = [point["bandwidth_bytes_per_s"] for point in data["sweep"] if point["gain"] > 1]
    assert below[-1] < rate < data["sweep"][len(below)]["bandwidth_bytes_per_s"]
    assert "equal at" in Path("gain.svg").read_text(encoding="utf-8")
    ElementTree.parse("gain.svg")


def test_crossings_are_interpolated_on_logarithmic_scales():
    points = [
        SweepPoint(bandwidth_bytes_per_s=b, time_per_minibatch_s=1.0, data_parallel_s=g)
        for b, g in [(1, 10), (100, 0.1), (1e4, 1)]
    ]
    assert crossings(points) == [pytest.approx(10)]
    assert bandwidth_grid(1, 100)[::6] == [1, pytest.approx(10), 100]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("bandwidth=5..1Gbit/s", "begins at 5 Gbit/s and ends at 1 Gbit/s; write the lower bandwidth first"),
        ("latency=1..2ms", "--sweep 'latency=1..2ms' is not a range of bandwidths; write bandwidth=0.1..25Gbit/s"),
        ("bandwidth=1..2", "is not a range of bandwidths"),
        ("bandwidth=0..2Gbps", "bandwidth '0Gbps' is too small"),
        ("bandwidth=0..2Gbit/s", "bandwidth '0Gbit/s' is too small"),
        ("bandwidth=1..2GB", "bandwidth '1GB' is not a positive rate in bits or bytes"),
    ],
)
def test_bad_ranges(planned, text, error):
    assert error in planned.pdtool("simulate", "--sweep", text, code=2).stderr


def test_a_plan_whose_profile_has_changed_is_stale(planned):
    plan = Plan.load("plans/net.yaml")
    plan.model_copy(update={"digests": {"profiles/net.json": "0" * 64}}).save("plans/net.yaml")
    assert "profiles/net.json has changed since the plan was made" in planned.pdtool("simulate", code=3).stderr


# --- show --graph -----------------------------------------------------------------------------------------------------


def test_the_graph_has_a_cluster_per_stage_and_bytes_on_its_borders(planned):
    text = planned.pdtool("show", "plans/net.yaml", "--graph").stdout
    assert re.findall(r'label="(stage [^"]*)"', text) == ["stage 0, 2 replicas", "stage 1, 1 replica"]
    assert re.findall(r'"(\w+)" -> "(\w+)" \[label="([^"]*)"', text) == [("a1", "a2", "50 B + 50 B")]
    assert len(re.findall(" -> ", text)) == 4
    planned.pdtool("show", "plans/net.yaml", "--graph", "-o", "net.dot")
    assert Path("net.dot").read_text(encoding="utf-8") == text


def test_names_in_an_artifact_are_no_syntax_of_dot():
    plan = samples.plan().model_copy(update={"name": 'a"]; b [label="'})
    assert dot(plan, samples.profile()).startswith('digraph "a\\"]; b [label=\\"" {\n')


@pytest.mark.parametrize(("option", "start"), [("--svg", "<svg"), ("--trace", '{"traceEvents"')])
def test_a_dash_is_stdout_and_the_tables_go_to_stderr(planned, option, start):
    to_file = planned.pdtool("simulate", option, "file", "--minibatches", "12")
    piped = planned.pdtool("simulate", option, "-", "--minibatches", "12")
    assert piped.stdout == Path("file").read_text(encoding="utf-8")
    assert piped.stdout.startswith(start)
    assert to_file.stdout.startswith("net: 2-1")
    assert to_file.stdout in piped.stderr
    assert not Path("-").exists()


def test_stdout_takes_one_thing_only(planned):
    error = planned.pdtool("simulate", "--svg", "-", "--json", code=2).stderr
    assert "--svg - and --json would all go to stdout; name files for all but one" in error
    assert "--trace - and --svg -" in planned.pdtool("simulate", "--svg", "-", "--trace", "-", code=2).stderr


def test_copies_stand_in_the_tables(planned):
    net = Profile.load("profiles/net.json")
    plan = plan_of(net, [["x", "a0", "a1"], ["a2", "a3"]], [[0, 2], [1, 3]], make_cluster((4,), (1000.0,)), copies=2)
    plan.model_copy(update={"profile": "profiles/net.json"}).save("plans/net.yaml")
    text = planned.pdtool("simulate").stdout
    assert text.startswith("net: 2 x 1-1, schedule 1f1b")
    assert re.search(r"^this plan +2 x 1-1 ", text, re.MULTILINE)
    assert data_of(planned)["compared"][0]["config"] == "2 x 1-1"


def test_the_graph_as_svg_needs_no_other_program(planned, monkeypatch):
    monkeypatch.setenv("PATH", str(planned.path))
    planned.pdtool("show", "plans/net.yaml", "--graph", "-o", "net.svg")
    root = ElementTree.parse("net.svg").getroot()
    assert root.attrib["width"] == "1200"
    texts = {element.text for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"stage 0 × 2", "stage 1", "50 B", "a0", "a3"} <= texts


def test_only_plans_have_such_a_graph(planned):
    error = planned.pdtool("show", "profiles/net.json", "--graph", code=2).stderr
    assert "profiles/net.json is a profile, but --graph draws plans; name a plan" in error
    error = planned.pdtool("show", "plans/net.yaml", "-o", "x", code=2).stderr
    assert "-o x needs --graph; redirect the output, or add --graph" in error
