"""`pdtool report`: the page of plans, runs and emulations; and the drawings that it shares with `--svg`."""

from __future__ import annotations

import fcntl
import json
import multiprocessing
import random
import re
import shutil
from contextlib import contextmanager
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
import samples
from conftest import Folder
from graphs import chain, plan_of, random_profile
from hypothesis import given, settings
from hypothesis import strategies as st

import pdtool
from pdtool.artifacts.chrome_trace import TraceEvent, WorkerTrace, chrome_trace
from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.metrics import UpdateLine, ValidationLine
from pdtool.artifacts.plan import Certificate, Plan, PlanOptions, Why
from pdtool.artifacts.profile import Profile
from pdtool.planner.choice.comparison import StageShares, SweepPoint, crossings, simulated_for_report
from pdtool.planner.choice.make_plan import make_plan
from pdtool.planner.choice.without_formulas import under_schedule
from pdtool.planner.placement import Placement
from pdtool.planner.simulator.engine import simulate
from pdtool.planner.simulator.job import SimulationJob
from pdtool.reports.chart import Curve, curve_chart, gain_chart
from pdtool.reports.figures import measured_group, memory_bars, metric_curves, simulated_group
from pdtool.reports.graph_drawing import MAX_BLOCKS, graph_drawing, module_blocks
from pdtool.reports.page import FIGURES, PageFigure, pictures
from pdtool.reports.picture import FONT_SIZE, AxisScale, Picture, text_width, time_labels
from pdtool.reports.sentences import gain_in_words
from pdtool.reports.timeline_drawing import TimelineGroup, timeline_drawing
from pdtool.units import format_bits_rate

WIDTHS = (1120, 358)
SVG = "{http://www.w3.org/2000/svg}"
SIZES = {"small": 10.5, "title": 13.0, "on-forward": 10.0, "on-backward": 10.0}  # of drawings.css


def parsed(picture: Picture) -> ElementTree.Element:
    return ElementTree.fromstring(picture.standalone())


def text_boxes(root: ElementTree.Element) -> list[tuple[str, float, float, float, float]]:
    """Text, and left, upper, right and lower side of its box, with widths as the drawing takes them to be."""
    boxes = []
    for element in root.iter(f"{SVG}text"):
        size = min([SIZES.get(name, FONT_SIZE) for name in element.get("class", "").split()] or [FONT_SIZE])
        width, x, y = text_width(element.text or "", size), float(element.attrib["x"]), float(element.attrib["y"])
        left = x - width * {"start": 0, "middle": 0.5, "end": 1}[element.get("text-anchor", "start")]
        boxes.append((element.text or "", left, y - size * 0.75, left + width, y + size * 0.2))
    return boxes


def assert_tidy(picture: Picture) -> None:
    """No text lies upon another, and nothing outside of the picture."""
    root = parsed(picture)
    width, height = (float(number) for number in root.attrib["viewBox"].split()[2:])
    boxes = text_boxes(root)
    for text, left, top, right, bottom in boxes:
        assert left >= -1, text
        assert right <= width + 1, text
        assert top >= -1, text
        assert bottom <= height + 1, text
    for a, b in combinations(boxes, 2):
        apart = a[3] <= b[1] + 0.5 or b[3] <= a[1] + 0.5 or a[4] <= b[2] + 0.5 or b[4] <= a[2] + 0.5
        assert apart, (a, b)
    for element in root.iter(f"{SVG}rect"):
        if element.get("class") != "paper" or element.get("x"):
            assert float(element.attrib["x"]) >= -0.1
            assert float(element.attrib["x"]) + float(element.attrib["width"]) <= width + 0.1


# --- drawings ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits() -> tuple[Plan, Profile]:
    """The residual network of the zoo in three stages, with edges that skip modules."""
    profile = pdtool.profile("pdtool.zoo.digits", device="v100")
    cluster = make_cluster((3,), (1.25e9,))
    return make_plan(profile, "profiles/digits.json", cluster, PlanOptions(straight=True)), profile


@pytest.fixture(scope="module")
def wide_chain() -> tuple[Plan, Profile]:
    """A long chain with replicated stages, on two servers of eight."""
    profile = chain([0.01] * 40, parameters=10**6, crossing=10**5)
    cluster = make_cluster((2, 8), (1e8, 1e10))
    return make_plan(profile, "profiles/chain.json", cluster), profile


@pytest.fixture(scope="module", params=["digits", "wide_chain"])
def example(request) -> tuple[Plan, Profile]:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("title", ["", "a title: 1-1"])
def test_the_graph_is_tidy(example, width, title):
    plan, profile = example
    picture = graph_drawing(plan, profile, width, title)
    assert_tidy(picture)
    assert picture.height < (700 if width > 1000 else 2000)


@pytest.mark.parametrize("seed", range(25))
def test_graphs_with_branches_and_skips_are_tidy(seed):
    rng = random.Random(seed)
    profile = random_profile(rng, rng.choice([3, 12, 40])).model_copy(update={"pin": {}})
    names = profile.graph.names
    cuts = [0, *sorted(rng.sample(range(1, len(names)), k=rng.choice([1, 2]))), len(names)]
    stages = [names[a:b] for a, b in pairwise(cuts)]
    cluster = make_cluster((len(stages),), (1e9,))
    plan = plan_of(profile, stages, [[s] for s in range(len(stages))], cluster)
    for width in WIDTHS:
        assert_tidy(graph_drawing(plan, profile, width))


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "interleaved"])
def test_timelines_of_all_schedules_are_tidy_and_fit(digits, width, schedule):
    plan, profile = digits
    placement = Placement.of(plan, profile)
    if schedule != plan.schedule:
        placement = under_schedule(plan, profile, schedule, chunks=2)
    job = SimulationJob.of(placement, profile, plan.cluster)
    result = simulate(job)
    group = simulated_group(result, job.shape, schedule, f"simulated, {schedule}")
    assert group.end_s <= result.makespan_s
    assert 0 <= group.bubble < 1
    picture = timeline_drawing([group, replace(group, title="again")], width, "one beside the other")
    assert_tidy(picture)
    numbers = {text for text, *_ in text_boxes(parsed(picture))}
    assert ({"0"} if schedule == "interleaved" else {"0", "1"}) <= numbers or width < 600


@pytest.mark.parametrize("width", WIDTHS)
def test_a_timeline_of_many_workers_shows_some_of_each_stage(width):
    profile = chain([0.01] * 8, parameters=10, crossing=10**6)
    plan = make_plan(profile, "profiles/chain.json", make_cluster((8, 4), (1e7, 1e10)))
    job = SimulationJob.of(Placement.of(plan, profile), profile, plan.cluster)
    group = simulated_group(simulate(job), job.shape, plan.schedule, "simulated")
    picture = timeline_drawing([group], width)
    assert_tidy(picture)
    assert picture.height < 800
    assert "and 8 more replicas" in " ".join(text for text, *_ in text_boxes(parsed(picture)))


def test_idle_time_is_counted_once_the_pipeline_is_full():
    rows = [
        WorkerTrace(w, w, [TraceEvent("compute", f"{w}F{i}", "forward", w + i, 1.0 - w / 2) for i in range(10)])
        for w in (0, 1)
    ]
    group = TimelineGroup("", rows, 0.0, 9.0, 1.0)
    assert [group.busy(row) for row in rows] == [pytest.approx(1.0), pytest.approx(0.5)]
    assert group.bubble == pytest.approx(0.25)


def test_a_measured_timeline_that_ends_while_the_pipeline_fills_counts_from_its_beginning():
    """It said `bubble 100%` over rows full of work, where minibatches took much longer than predicted."""
    rows = [
        WorkerTrace(w, w, [TraceEvent("compute", f"{w}{kind[0].upper()}0", kind, start_s, 5.0)])
        for w, kind, start_s in ((0, "forward", 0.0), (1, "forward", 5.0), (1, "backward", 10.0))
    ]
    group = measured_group(rows, "1f1b", 4.0, "measured")
    assert [group.busy(row) for row in rows[:2]] == [1.0, 0.0]


@pytest.mark.parametrize("width", [540, *WIDTHS])
def test_charts_are_tidy(digits, width):
    plan, profile = digits
    points = simulated_for_report(plan, profile).sweep
    own = plan.cluster.levels[0].bandwidth_bytes_per_s
    assert any(point.bandwidth_bytes_per_s == pytest.approx(own) for point in points)
    assert_tidy(gain_chart(points, width, own, "gain of a plan with quite a long name over data parallelism"))
    for ys in ([1e-5, 3.0, 400.0], [0.5, 0.51], [0.0, 0.0], [-3.0, 1e9], [1e-30, 1e29], [0.0012]):
        curves = [
            Curve("training, of a run", list(enumerate(ys))),
            Curve("validation", [(0.0, ys[0])], 1, is_dotted=True),
        ]
        assert_tidy(curve_chart(curves, width, "loss", "updates"))


@pytest.mark.parametrize(("own", "is_marked"), [(0.9e8, False), (1e8, True), (3e8, True), (4.1e8, False)])
def test_the_plans_bandwidth_is_marked_where_the_chart_has_it(own, is_marked):
    points = [
        SweepPoint(bandwidth_bytes_per_s=rate, time_per_minibatch_s=1.0, data_parallel_s=1.2) for rate in (1e8, 4e8)
    ]
    labels = [text for text, *_ in text_boxes(parsed(gain_chart(points, WIDTHS[0], own)))]
    assert any(label.startswith("this plan") for label in labels) == is_marked


@settings(max_examples=40)
@given(st.sampled_from([400, *WIDTHS]), st.lists(st.sampled_from([0.5, 0.9, 1.2, 3.0]), min_size=2, max_size=9))
def test_bandwidths_of_equal_gain_are_told_apart_or_together(width, gains):
    points = [
        SweepPoint(bandwidth_bytes_per_s=1e8 * 1.3**number, time_per_minibatch_s=1.0, data_parallel_s=gain)
        for number, gain in enumerate(gains)
    ]
    picture = gain_chart(points, width)
    assert_tidy(picture)
    labels = [text for text, *_ in text_boxes(parsed(picture)) if text.startswith("equal at")]
    if len(equal := [format_bits_rate(rate) for rate in crossings(points)]) <= 2:
        assert labels in ([f"equal at {rate}" for rate in equal], [f"equal at {' and '.join(equal)}"])


@given(st.floats(1e-9, 1e9), st.floats(1.001, 1e6), st.integers(2, 12), st.booleans())
def test_ticks_are_few_round_and_different(low, ratio, most, is_log):
    scale = AxisScale(low, low * ratio, 0, 100, is_log)
    ticks = scale.ticks(most)
    assert 0 < len(ticks) <= most + 1
    assert all(low * (1 - 1e-6) <= tick <= low * ratio * (1 + 1e-6) for tick in ticks)
    assert all(a < b for a, b in pairwise(ticks))
    labels = time_labels(ticks)
    assert len(set(labels)) == len(labels)


def test_blocks_hold_each_operator_once_and_no_edge_goes_back(example):
    plan, profile = example
    stages = plan.stage_nodes(profile)
    blocks = module_blocks(profile, stages)
    assert len(blocks) <= max(MAX_BLOCKS, len(stages))
    assert sorted(name for block in blocks for name in block.nodes) == sorted(profile.graph.names)
    for number, block in enumerate(blocks):
        assert all(source < number for source in block.inputs)
        assert all(name in stages[block.stage] or profile.by_name[name].op == "input" for name in block.nodes)
    whole_s = sum(node.forward_s + node.backward_s for node in profile.nodes)
    assert sum(block.seconds for block in blocks) == pytest.approx(whole_s)


def test_blocks_are_modules_where_those_are_whole(digits):
    _, profile = digits
    names = [node.name for node in profile.nodes]
    few = module_blocks(profile, [names], most=9)
    assert {"stem", "block1", "block2"} <= {block.name for block in few}
    assert len(few) <= 9


# --- pages ------------------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Checks that tags are closed, and collects texts and what other files a page would load."""

    VOID = ("meta", "link", "br", "input")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.tags: set[str] = set()
        self.loaded: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value != "data:,"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)


def read(path: str = "report.html") -> _Page:
    page = _Page(Path(path).read_text(encoding="utf-8"))
    assert page.loaded == []
    assert "script" not in page.tags
    return page


def sentence(path: str = "report.html") -> str:
    return re.search("<h1>(.*?)</h1>", Path(path).read_text(encoding="utf-8"))[1]


@pytest.fixture
def ran(road: Folder) -> Folder:
    """`road` with runs/net, a finished run of its plan: what a run writes, made from a simulation."""
    plan, profile = Plan.load("plans/model-2.yaml"), Profile.load("profiles/model.json")
    result = simulate(SimulationJob.of(Placement.of(plan, profile), profile, plan.cluster))
    folder = Path("runs/net")
    folder.mkdir(parents=True)
    plan.save(folder / "plan.yaml")
    names = [f"rank {usage.worker} (stage {usage.stage}, replica 0)" for usage in result.workers]
    (folder / "trace.json").write_text(json.dumps(chrome_trace(dict(zip(names, result.events, strict=True)))))
    report = samples.report()
    stages = tuple(stage.model_copy(update={"replicas": 1}) for stage in report.stages)
    update = {"plan": plan.name, "config": plan.config, "predicted": plan.predicted, "stages": stages}
    report.model_copy(update=update).save(folder / "report.json")
    write_metrics(folder, epochs=2)
    return road


def write_metrics(folder: Path, epochs: int, updates: int = 30) -> None:
    lines = []
    for epoch in range(1, epochs + 1):
        for step in range((epoch - 1) * updates + 1, epoch * updates + 1):
            line = {"split": "train", "epoch": epoch, "step": step, "loss": 3.0 / step, "time": step * 0.1}
            lines.append({**line, "lr": 0.1 / epoch, "samples_per_s": 2000.0 + step})
        lines.append({"split": "valid", "epoch": epoch, "step": epoch * updates, "loss": 1 / epoch, "accuracy": 0.9})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


@contextmanager
def locked(folder: Path):
    """A process that holds the folder of a run: another one than this, which would be given its own lock."""

    def hold(path, pipe):
        with open(path, "w") as file:
            fcntl.lockf(file, fcntl.LOCK_EX)
            pipe.send("locked")
            pipe.recv()

    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("fork").Process(target=hold, args=(folder / ".lock", theirs))
    process.start()
    assert ours.recv() == "locked"
    yield
    ours.send("end")
    process.join()


def test_the_page_of_a_plan(road):
    result = road.pdtool("report")
    assert "wrote report.html; open it in a browser" in result.stderr
    page = read()
    assert re.match(r"1-1 on 2 .*(data parallelism at 8 Gbit/s; stages? \d)", sentence())
    assert {"The model by stage", "Stages", "Timeline", "Compared with other plans"} <= set(page.texts)
    assert "Training" not in page.texts
    assert 'http-equiv="refresh"' not in Path("report.html").read_text()


def test_the_page_of_a_run(ran):
    ran.pdtool("report", "runs/net", "-o", "run.html")
    page, text = read("run.html"), Path("run.html").read_text(encoding="utf-8")
    assert re.match(r"1-1: accuracy 0.5 after 2 epochs, 4 ms per minibatch, [^,;]* simulated;", sentence("run.html"))
    assert {"Training", "learning rate", "samples per second", "accuracy, validation"} <= set(page.texts)
    assert {"Why measured differs from predicted", "computing", "averaging gradients"} <= set(page.texts)
    assert "measured, as the last epoch began" in text
    assert "memory, measured" in text


def test_a_run_that_goes_on_is_loaded_again(ran):
    folder = Path("runs/net")
    write_metrics(folder, epochs=3)  # of a run that was resumed: the report is of the one before
    ran.pdtool("report", "runs/net")
    assert sentence() == "1-1 on 2 workers stopped in or after epoch 3, loss 0.3333"
    with locked(folder):
        ran.pdtool("report", "runs/net")
        assert sentence() == "1-1 on 2 workers is training: epoch 3, loss 0.3333"
        assert '<meta http-equiv="refresh" content="5">' in Path("report.html").read_text()
        (folder / "metrics.jsonl").unlink()
        ran.pdtool("report", "runs/net")
        assert sentence() == "1-1 on 2 workers is starting"
    result = ran.pdtool("report", "runs/net", "--watch")
    assert "all runs have ended; no longer watching" in result.stderr


def test_a_run_without_its_plan_shows_what_was_measured(ran):
    Path("profiles/model.json").unlink()
    ran.pdtool("report", "runs/net")
    assert "the plan cannot be simulated here: " in " ".join(read().texts)
    Path("runs/net/plan.yaml").unlink()
    ran.pdtool("report", "runs/net")
    assert "the plan of this run was not found, so it cannot be simulated here" in " ".join(read().texts)


def test_two_runs_stand_beside_each_other_and_their_plan_once(ran):
    shutil.copytree("runs/net", "runs/other")
    ran.pdtool("report", "runs/net", "runs/other")
    page, text = read(), Path("report.html").read_text(encoding="utf-8")
    assert text.count("<h1>") == 2
    assert text.count("<h2>The model by stage") == 1
    assert {"runs/net, validation", "runs/other, validation"} <= set(page.texts)
    assert "runs/other: measured, as the last epoch began" in text


def test_the_page_of_an_emulation(folder):
    samples.emulation().save("runs/e/emulation.json")
    for name in ("runs/e", "runs/e/emulation.json"):
        folder.pdtool("report", name)
        assert sentence() == "3-1: 4 ms per minibatch emulated, 3.9 ms simulated; 2.25 times as fast as data-parallel"
        assert "this plan (3-1), emulated" in read().texts
        assert Path("report.html").read_text().count("bytes and bandwidths / 12, times x 1.5") == 2, "of each plan"


def test_a_figure_is_an_entry_of_the_list(road, monkeypatch):
    """Of all subjects together; its heading and its sentence are texts, and no HTML."""

    def names(views):
        curves = [Curve("loss", [(0.0, 1.0), (1.0, len(views))])]
        yield PageFigure("<b>Names</b>", "of one & all", pictures(lambda width: curve_chart(curves, width, "a", "b")))

    monkeypatch.setattr("pdtool.reports.page.FIGURES", (*FIGURES, names))
    road.pdtool("report")
    text = Path("report.html").read_text(encoding="utf-8")
    assert "<h2>&lt;b&gt;Names&lt;/b&gt;</h2>" in text
    assert '<p class="about">of one &amp; all</p>' in text
    assert text.count("a, over b") == 2, "for wide and for narrow screens"
    read()


def test_a_page_goes_to_stdout_and_overwrites_nothing_else(road):
    assert road.pdtool("report", "-o", "-").stdout.startswith("<!doctype html>")
    road.pdtool("report", "-o", "page.html")
    road.pdtool("report", "-o", "page.html")
    error = road.pdtool("report", "-o", "model.py", code=2).stderr
    assert "model.py is not a page of pdtool and would be overwritten; name another file" in error


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["profiles/model.json"], 2, "profiles/model.json is a profile, not a plan or run"),
        (["model.py"], 2, "model.py is not an artifact of pdtool; name a plan, or the folder of a run or an emulation"),
        (["profiles"], 2, "profiles holds neither report.json nor metrics.jsonl"),
        (["gone"], 3, "gone: cannot be read (No such file or directory)"),
        (["a", "b", "c", "d", "e"], 2, "5 plans and runs are too many for one page; name at most 4"),
        (["--watch", "-o", "-"], 2, "--watch rewrites the page, so it needs a file instead of -o -; name it with -o"),
    ],
)
def test_what_is_no_subject_of_a_page(road, arguments, code, error):
    assert error in road.pdtool("report", *arguments, code=code).stderr


@pytest.mark.parametrize(
    ("gap", "said"),
    [
        (0.0, "optimal: by the formulas, no plan with"),
        (0.0003, "optimal to within 0.05%: by the formulas, no plan with"),
        (0.5, "This plan takes 3 ms (50.0% more)"),
        (1.5, "This plan takes 5 ms (2.5 times as long)"),
        (None, "by the form"),
    ],
)
def test_the_page_says_of_the_certificate_what_show_says(road, gap, said):
    """Of a plan as fast as the bound that it takes "0.0% more", the page said."""
    plan = Plan.load("plans/model-2.yaml")
    certificate = Certificate(bound_s=2e-3, gap=gap, workers=2, cuts=3)
    plan.model_copy(update={"why": Why(bottleneck="compute", certificate=certificate)}).save("plans/model-2.yaml")
    road.pdtool("report")
    shown = re.search("certificate: (.*)", road.pdtool("show", "plans/model-2.yaml").stdout)[1]
    assert said in shown
    assert f"{shown[0].upper()}{shown[1:]}. Proof: the search covered" in " ".join(read().texts)
    assert ("optimal" in shown, "more)" in shown) == (gap in (0, 0.0003), gap == 0.5)


def test_names_are_no_syntax_of_html(road):
    name = "<script>alert(1)</script>\u202e"
    plan = Plan.load("plans/model-2.yaml")
    plan.model_copy(update={"why": samples.plan().why.model_copy(update={"bottleneck": name})}).save(
        "plans/model-2.yaml"
    )
    road.pdtool("report")
    text = Path("report.html").read_text(encoding="utf-8")
    assert "<script" not in text
    assert "&lt;script&gt;" in text
    assert "\u202e" not in text


# --- what is said -----------------------------------------------------------------------------------------------------


def test_a_stage_that_needs_more_memory_than_there_is_needs_more_than_all_of_it():
    [bar] = memory_bars(100, StageShares(1.0, 0.0, 0.0, memory_bytes=125), None)
    assert bar.figure == "125 B of 100 B"
    assert [(part.share, part.label) for part in bar.parts] == [(1.0, "125%")]


def test_gains_in_words():
    assert gain_in_words(2.234) == "2.23 times as fast as data parallelism"
    assert gain_in_words(1.005) == "as fast as data parallelism"
    assert gain_in_words(0.85) == "15% slower than data parallelism"
    assert gain_in_words(0.003) == "0.003 times as fast as data parallelism"


def test_figures_that_cannot_be_drawn_are_left_out():
    lines = [
        UpdateLine(epoch=1, step=1, loss=float("nan")),
        UpdateLine(epoch=1, step=2, loss=1e300),
        ValidationLine(epoch=1, step=2, loss=float("inf"), metrics={"accuracy": float("-inf")}),
    ]
    assert metric_curves([("run", lines)]) == {}
    [curves] = metric_curves([("run", [*lines, UpdateLine(epoch=1, step=3, loss=0.5)])]).values()
    assert all(curve.points == [(3.0, 0.5)] for curve in curves)


def test_a_long_run_is_drawn_by_few_points():
    lines = [UpdateLine(epoch=1, step=i, loss=1.0 / (i + 1)) for i in range(20_000)]
    [curves] = metric_curves([("run", lines)]).values()
    assert all(len(curve.points) <= 500 for curve in curves)


# --- in a browser -----------------------------------------------------------------------------------------------------

_OVERLAPS = """() => {
  const found = [];
  for (const svg of document.querySelectorAll('svg.drawing')) {
    const frame = svg.getBoundingClientRect();
    if (!frame.width) continue;
    const boxes = [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect()]);
    boxes.forEach(([a, p], i) => {
      if (p.left < frame.left - 2 || p.right > frame.right + 2) found.push('outside: ' + a);
      boxes.slice(i + 1).forEach(([b, q]) => {
        const x = Math.min(p.right, q.right) - Math.max(p.left, q.left);
        const y = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
        if (x > 1 && y > 4) found.push(a + ' / ' + b);
      });
    });
  }
  for (const e of document.querySelectorAll('h1, dd, .bar-name, .bar-figure, td, .stage-holds'))
    if (e.scrollWidth > e.clientWidth + 1 && e.clientWidth) found.push('cut off: ' + e.textContent);
  return found;
}"""


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium; the tests that need one are skipped where there is none."""
    playwright = pytest.importorskip("playwright.sync_api")
    path = next(filter(None, map(shutil.which, ("chromium-headless-shell", "chromium", "google-chrome"))), None)
    with playwright.sync_playwright() as p:
        try:
            started = p.chromium.launch(executable_path=path)
        except playwright.Error as error:
            pytest.skip(f"no browser can be started: {str(error).splitlines()[0]}")
        yield started
        started.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_in_a_browser_nothing_overlaps_and_nothing_is_complained_about(ran, browser, width, scheme):
    shutil.copytree("runs/net", "runs/other")
    ran.pdtool("report", "-o", "plan.html")
    ran.pdtool("report", "runs/net", "-o", "run.html")
    ran.pdtool("report", "runs/net", "runs/other", "-o", "two.html")
    tab = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    complaints = []
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("requestfailed", lambda request: complaints.append(request.url))
    for name in ("plan.html", "run.html", "two.html"):
        tab.goto((ran.path / name).as_uri())
        assert tab.evaluate(_OVERLAPS) == [], name
        assert tab.evaluate("document.documentElement.scrollWidth") <= width, name
        is_dark = tab.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 18, 23)"
        assert is_dark == (scheme == "dark")
    assert complaints == []
    tab.close()
