"""profile --compile: segments are compiled and timed as a whole, and what they take is shared out."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
import samples
import torch
import torch._inductor.config
from conftest import NET, Folder
from hypothesis import given
from hypothesis import strategies as st

from pdtool.api import training
from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.profile import Profile
from pdtool.errors import ArtifactError, ModelError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.operators import Operator, Value
from pdtool.frontend.tracing import trace_file
from pdtool.profiler import compiled as compile_model
from pdtool.profiler.compiled import apportion, cut_into_segments, segment_module
from pdtool.profiler.estimate import measured_model
from pdtool.profiler.execute import ProfiledModel
from pdtool.profiler.measure import measure

TEXT = """
import torch
from torch import nn
import torch.nn.functional as F

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, gradient): return gradient * 2

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.rnn = nn.LSTM(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight
        self.scale = nn.Parameter(torch.ones(8))
        self.mask = torch.tensor([0.5] * 8)

    def forward(self, ids):
        x, (hidden, _) = self.rnn(self.embed(ids).unsqueeze(0))
        x, y = (x + hidden).squeeze(0).split([4, 4], 1)
        z = self.norm(torch.cat([x, y], 1) * self.scale * self.mask)
        if self.training:
            z = z + z.abs()
        return self.out(Double.apply(z).view(-1, 8) + torch.arange(8))

def model(): return Net()
def dataset(split): return [(torch.tensor(i % 20), (i + 1) % 20) for i in range(64)]
def loss(output, target): return F.cross_entropy(output, target)
"""


def write(tmp_path: Path, text: str = TEXT) -> ModelFile:
    path = tmp_path / "net.py"
    path.write_text(text)
    return ModelFile.load(ModelRef(source=str(path)), trusted=True)


def chain_of_blocks(blocks: int) -> list[Operator]:
    """Blocks of a, b(a) and c(a, b): one tensor crosses between two blocks, and two cross inside of one."""
    operators: list[Operator] = []
    last = Value("x", 0, (), torch.float32, True)
    for block in range(blocks):
        a, b, c = (Value(f"{block}.{part}", 0, (), torch.float32, True) for part in "abc")
        for value, taken in ((a, (last,)), (b, (a,)), (c, (a, b))):
            name = value.operator
            operators.append(Operator(name=name, op="f", module=name, args=taken, outputs=(value,)))
        last = c
    return operators


def test_segments_are_cut_where_the_fewest_tensors_cross() -> None:
    operators = chain_of_blocks(6)
    seconds = {op.name: 1.0 for op in operators}
    segments = cut_into_segments(operators, operators[-1].outputs, seconds, shortest_s=2.0)
    assert [[op.name for op in segment] for segment in segments] == [[f"{i}.{p}" for p in "abc"] for i in range(6)]


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=40), st.floats(0.1, 1e3))
def test_segments_are_all_operators_in_order_and_none_is_short(seconds: list[float], shortest_s: float) -> None:
    operators = chain_of_blocks(-(-len(seconds) // 3))[: len(seconds)]
    by_name = dict(zip((op.name for op in operators), seconds, strict=True))
    segments = cut_into_segments(operators, operators[-1].outputs, by_name, shortest_s)
    assert list(chain(*segments)) == operators
    if len(segments) > 1:
        assert all(sum(by_name[op.name] for op in segment) > shortest_s - 1e-6 for segment in segments)


SECONDS = st.floats(0, 1e3, allow_subnormal=False)


@given(st.lists(st.tuples(SECONDS, st.lists(SECONDS, min_size=1, max_size=5)), max_size=5), SECONDS)
def test_shares_add_up_to_what_was_measured(measured: list[tuple[float, list[float]]], loss_s: float) -> None:
    """Of each segment; and inside of one they are as the times one by one."""
    one_by_one = {f"{i}.{j}": s for i, (_, times) in enumerate(measured) for j, s in enumerate(times)}
    segments = {f"segment {i}": [f"{i}.{j}" for j in range(len(times))] for i, (_, times) in enumerate(measured)}
    seconds = {f"segment {i}": total for i, (total, _) in enumerate(measured)} | {"loss": loss_s}
    shares = apportion(seconds, segments, one_by_one)
    assert shares["loss"] == loss_s
    for name, operators in segments.items():
        assert sum(shares[op] for op in operators) == pytest.approx(seconds[name])
        total_s = sum(one_by_one[op] for op in operators)
        for op in operators:
            assert shares[op] * total_s == pytest.approx(seconds[name] * one_by_one[op] if total_s else 0)


def test_a_segment_computes_what_its_operators_compute(tmp_path: Path) -> None:
    """Modules, several outputs, ties, mere attributes, operators of training only, autograd.Functions."""
    torch.manual_seed(0)
    file = write(tmp_path)
    model = ProfiledModel.of(file, trace_file(file, file.build(), 4), 4, torch.device("cpu"))
    environment = model.environment()
    inputs = list(environment)
    for op in model.computed:
        environment.update(zip(op.outputs, model.run(op, environment), strict=True))
    module = segment_module(model.run, model.computed, inputs, model.outputs)
    (computed,) = module(*(environment[value] for value in inputs))
    (expected,) = (environment[value] for value in model.outputs)
    assert torch.equal(computed, expected)
    names = [name for name, _ in file.build().named_parameters()]
    state = [model.run.state[name] for name in names]
    for ours, theirs in zip(
        torch.autograd.grad(computed.sum(), state), torch.autograd.grad(expected.sum(), state), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.fixture
def short_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compile_model._MIN_SEGMENT_S, "cpu", 1e-5)


@pytest.fixture
def one_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(compile_model._MIN_SEGMENT_S, "cpu", 100.0)


def compile_by(monkeypatch: pytest.MonkeyPatch, compiler: Callable[[torch.nn.Module], object]) -> None:
    monkeypatch.setattr(torch, "compile", compiler)


def fails_for(*numbers: int) -> Callable[[torch.nn.Module], object]:
    """A compiler that fails for some of the modules that it is given, when these are called first."""
    count = iter(range(1000))

    def compiler(module: torch.nn.Module) -> object:
        def fail(*args: object) -> None:
            raise RuntimeError("no\ncompiler")

        return fail if next(count) in numbers else module

    return compiler


@pytest.mark.usefixtures("short_segments")
def test_the_profile_says_what_was_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by(monkeypatch, fails_for())
    notes: list[str] = []
    profile = measure(write(tmp_path), batch_size=8, compiled=True, note=notes.append)
    assert profile.compiled
    assert len(profile.segments) > 1
    assert list(chain(*profile.segments)) == [n.name for n in profile.nodes if n.op not in ("input", "loss")]
    assert notes == [
        f"compiling {len(profile.segments)} segments and then the whole model, which takes some seconds for each"
    ]
    assert profile.step_s > 0
    assert profile.by_name["out"].backward_s > 0
    assert Profile.parse(profile.dump()) == profile


@pytest.mark.usefixtures("short_segments")
def test_what_cannot_be_compiled_is_named_and_measured_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_by(monkeypatch, fails_for(1))
    notes: list[str] = []
    profile = measure(write(tmp_path), batch_size=8, compiled=True, note=notes.append)
    computed = [n.name for n in profile.nodes if n.op not in ("input", "loss")]
    missing = [name for name in computed if name not in chain(*profile.segments)]
    segment = " to ".join(dict.fromkeys((missing[0], missing[-1])))
    remainder = "whose operators are measured one by one: RuntimeError: no compiler"
    assert notes[1] == f"warning: torch.compile fails for {segment}, {remainder}"
    assert all(profile.by_name[name].forward_s > 0 for name in computed)


@pytest.mark.usefixtures("short_segments")
def test_a_model_that_cannot_be_compiled_at_all_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by(monkeypatch, fails_for(*range(1000)))
    with pytest.raises(ModelError, match=r"fails for every part of the model: .*: no compiler; leave --compile out"):
        measure(write(tmp_path), batch_size=8, compiled=True)


@pytest.mark.usefixtures("one_segment")
def test_without_the_whole_there_is_no_coverage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_by(monkeypatch, fails_for(1))
    notes: list[str] = []
    profile = measure(write(tmp_path), batch_size=8, compiled=True, note=notes.append)
    assert len(profile.segments) == 1
    assert (profile.step_s, profile.coverage, profile.launch_s) == (0, 0, 0)
    assert "fails for the model as a whole, so coverage is unknown: RuntimeError: no compiler" in notes[1]


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
@pytest.mark.usefixtures("one_segment")
def test_a_model_is_compiled(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._inductor.config, "compile_threads", 1)  # more are processes, which would stay
    folder.write("model.py", NET)
    told = folder.pdtool("profile", "model.py", "--batch-size", "8", "--threads", "1", "--compile").stderr
    assert "compiling 1 segment and then the whole model" in told
    assert "times are shares of the times of 1 compiled segment" in told
    profile = Profile.load("profiles/model.json")
    assert profile.segments == (("first", "relu", "middle", "last"),)
    assert profile.step_s > 0
    for name in profile.segments[0]:
        assert profile.by_name[name].forward_s > 0
        assert profile.by_name[name].backward_s > 0


def test_profiles_from_before_are_of_operators_one_by_one() -> None:
    content = json.loads(samples.profile().dump())
    old = {name: value for name, value in content.items() if name not in ("compiled", "segments")}
    assert Profile.parse(samples.sealed(old)) == samples.profile()
    assert not samples.profile().compiled
    with pytest.raises(ArtifactError, match=r"segments\[0\]: 'b' is not a node"):
        Profile.parse(samples.sealed({**content, "segments": [["a", "b"]]}))


def test_an_estimate_is_not_calibrated_with_times_of_what_was_compiled() -> None:
    profile = samples.profile().model_copy(update={"compiled": True})
    with pytest.raises(ArtifactError, match=r"p\.json: compiled: was measured with --compile.*; calibrate with"):
        measured_model(profile, "p.json")


@pytest.mark.parametrize(
    ("profiled", "asked", "warning"),
    [
        (False, True, "torch.compile fuses them, so the predictions do not apply: profile with --compile"),
        (
            True,
            False,
            "the run does not compile them, so the predictions do not apply: run with --compile, or profile without it",
        ),
        (False, False, None),
        (True, True, None),
    ],
)
def test_run_warns_when_profile_and_run_differ(profiled, asked, warning, monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    monkeypatch.setattr(training, "note", notes.append)
    profile = samples.profile().model_copy(update={"compiled": profiled})
    device = "cpu" if profile.is_measured_on_cpu else "cuda"
    training._warn_about_predictions(SimpleNamespace(device=device, precision="fp32", compiled=asked), profile)
    assert [note.endswith(warning) for note in notes] == ([True] if warning else [])
