"""Laws 2, 3 and 8 for models that draw random numbers: seed, minibatch and operator decide them, never the plan."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import assert_same, batches, stage_of, weights
from reference import replay
from skeletons import plan_of, skeleton, traced_once
from torch import nn

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.metrics import ValidationLine, read_metrics
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.random_numbers import OperatorSeeds, derive_seed, module_draws, module_draws_by_layout
from pdtool.generator import generate as generate_module
from pdtool.generator.generate import generate
from pdtool.runtime.config import RunConfig
from pdtool.runtime.stage.pipeline_stage import PipelineStage
from pdtool.schedule import SCHEDULES

# Leaf modules called once and twice, functions, a write in place, and a loss; `before` names each to the reference, and
# gives it what it draws like, which lies transposed in memory.
MODEL = (
    harness.CONTRACT.format(x="torch.randn(n, 5, 4, generator=g)", y="torch.randint(0, 4, (n,), generator=g)").replace(
        "OPTIMIZER", harness.OPTIMIZERS["sgd"]
    )
    + """
import random

def before(operator, x=None):
    return x

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout(0.3)
        self.first = nn.Linear(4, 8)
        self.lstm = nn.LSTM(8, 8, 2, dropout=0.3, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, dropout=0.2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.channels = nn.Dropout1d(0.3)
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        x = before("drop@0", x)
        x = self.first(self.drop(x)).transpose(1, 2)
        x = before("rand_like", x)
        x = (x + 0.2 * torch.rand_like(x)).transpose(1, 2)
        before("lstm")
        x, _ = self.lstm(x)
        x = before("dropout", x)
        x = F.dropout(x, 0.2, self.training)
        before("attention")
        x = x + self.attention(x, x, x, need_weights=False)[0]
        before("bernoulli")
        x = self.norm(x * x.new_empty(5, 8).bernoulli_(0.9))
        before("channels")
        x = self.channels(x.transpose(1, 2)).transpose(1, 2)
        x = before("drop@1", self.last(x).transpose(0, 1))
        return self.drop(x).mean(0)

def model():
    return Noisy()

def loss(output, target):
    before("loss")
    return F.cross_entropy(output + random.random() * torch.randn_like(output), target)
"""
)
FLUSH = "1f1b-flush"
MICROBATCHES = 3


class Reference:
    """Seeds as the law says, and not as pdtool's workers do it, while a model is trained in this process."""

    def __init__(self, model: nn.Module, file: ModelFile, spec: RunConfig) -> None:
        self._forwards, self._minibatches, self._seed = 0, len(batches(spec)[0]), spec.seed
        model.register_forward_pre_hook(self._begin)
        file.module.before = self._before

    def _begin(self, *_: object) -> None:
        self._forwards += 1

    def _before(self, operator: str, x: torch.Tensor | None = None) -> torch.Tensor | None:
        epochs, minibatch = divmod(self._forwards - 1, self._minibatches)
        seed = derive_seed(self._seed, "train", epochs + 1, minibatch, operator)
        torch.manual_seed(seed)
        random.seed(seed)
        return None if x is None else x.contiguous()


@pytest.fixture(autouse=True)
def shared_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tracing takes a second: once is enough."""
    monkeypatch.setattr(generate_module, "trace_file", traced_once)


def job(
    folder: Path, replicas: tuple[int, ...], schedule: str = FLUSH, *, chunks: int = 1, recompute: bool = False
) -> RunConfig:
    """Stages as codegen writes them, and a spec that runs them."""
    folder.mkdir(exist_ok=True)
    (folder / "model.py").write_text(MODEL)
    file = ModelFile.load(ModelRef(source=str(folder / "model.py")), trusted=True)
    profile = skeleton(file)
    plan = plan_of(profile, len(replicas) * chunks)
    microbatches = MICROBATCHES if SCHEDULES[schedule].flushes else 1
    in_flight = SCHEDULES[schedule].usual_in_flight(replicas, microbatches, chunks)
    first = [sum(replicas[:s]) for s in range(len(replicas))]
    places = [
        {"replicas": r, "workers": tuple(range(f, f + r)), "in_flight": w, "recompute": recompute}
        for r, f, w in zip(replicas, first, in_flight, strict=True)
    ]
    stages = tuple(stage.model_copy(update=places[s % len(places)]) for s, stage in enumerate(plan.stages))
    levels = tuple(replace(level, size=sum(replicas)) for level in plan.cluster.levels)
    changes = {
        "schedule": schedule,
        "weights": SCHEDULES[schedule].policy_names[0],
        "microbatches": microbatches,
        "chunks": chunks,
    }
    changes |= {"stages": stages, "cluster": replace(plan.cluster, levels=levels)}
    plan = plan.model_copy(update=changes)
    plan.check()
    bundle = generate(plan, profile, file, folder / "bundle").model_copy(update={"digests": {}})
    return RunConfig(
        plan=plan,
        bundle=bundle,
        bundle_dir=folder / "bundle",
        model=file.ref,
        out=folder / "run",
        trusted=True,
        epochs=2,
        timeout_s=60.0,
    )


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of the model trained in one process with the reference's seeds; by the plan's schedule."""
    known: dict[str, dict[str, torch.Tensor]] = {}

    def trained(spec: RunConfig) -> dict[str, torch.Tensor]:
        if spec.plan.weights not in known:
            file = ModelFile.load(spec.model, trusted=True)
            model = file.build(spec.seed)
            Reference(model, file, spec)
            known[spec.plan.weights] = replay.synchronous(model, batches(spec), file.loss, file.optimizer, MICROBATCHES)
        return known[spec.plan.weights]

    return trained


@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize(
    ("replicas", "settings"),
    [
        pytest.param((1,), {}, id="one"),
        pytest.param((1, 1), {}, id="two"),
        pytest.param((1, 1, 1), {}, id="three"),
        pytest.param((1,), {"recompute": True}, id="one-recompute"),
        pytest.param((1, 1, 1), {"recompute": True}, id="three-recompute"),
        pytest.param((2, 1), {}, id="2-1"),
        pytest.param((1, 1, 1), {"schedule": "zb-h1"}, id="zb"),
        pytest.param((1, 1), {"schedule": "zb-h1", "recompute": True}, id="zb-recompute"),
        *(
            pytest.param((1, 1), {"schedule": kind.name, "chunks": 2}, id=kind.name)
            for kind in SCHEDULES.values()
            if kind.chunked
        ),
    ],
)
def test_every_plan_draws_the_same_random_numbers(
    tmp_path: Path, replicas: tuple[int, ...], settings: dict[str, Any], unsplit: Any
) -> None:
    spec = job(tmp_path, replicas, **settings)
    assert_same(weights(harness.run(spec)), unsplit(spec))


def test_without_a_flush_too(tmp_path: Path) -> None:
    """Law 3, while minibatches are in flight together."""
    spec = job(tmp_path, (1, 1, 1), "1f1b")
    found = weights(harness.run(spec))
    file = ModelFile.load(spec.model, trusted=True)
    model = file.build(spec.seed)
    Reference(model, file, spec)
    pipeline = replay.Pipeline((1, 1, 1), (3, 2, 1), (1, 1, 1))
    expected = replay.asynchronous(
        model, stage_of(spec).__getitem__, batches(spec), file.loss, file.optimizer, pipeline
    )
    assert_same(found, expected)


def test_validation_draws_the_same_too(tmp_path: Path) -> None:
    """What the model and the loss draw in evaluation mode; another seed draws other numbers."""
    logs = []
    for name, replicas, seed in (("a", (1,), 0), ("b", (1, 1), 0), ("c", (1, 1), 1)):
        spec = replace(job(tmp_path / name, replicas), epochs=1, seed=seed)
        harness.run(spec)
        lines = read_metrics(spec.out / "metrics.jsonl")
        logs.append([line.loss for line in lines if isinstance(line, ValidationLine)])
    assert logs[0] == pytest.approx(logs[1], rel=1e-5)
    assert logs[0] != pytest.approx(logs[2], rel=1e-3)


PICTURE = """
        transpose = seed_operator("rand_like", transpose)
        x = torch.rand_like(transpose)
        x = x * 0.2
        x = transpose + x
        x = x.transpose(1, 2)
        lstm, _ = self.lstm(x)
        lstm = seed_operator("dropout", lstm)
        dropout = F.dropout(lstm, p=0.2, training=self.training)
        x, _ = self.attention(dropout, dropout, dropout, need_weights=False)
"""


def test_a_stage_file_names_what_no_module_path_names(tmp_path: Path) -> None:
    """A leaf module that is called once is known by its path."""
    job(tmp_path, (1,))
    text = (tmp_path / "bundle" / "stage_0.py").read_text()
    assert PICTURE in text, text
    assert text.count("def seed_operator(name, *tensors):") == 1
    named = [line.partition("seed_operator(")[2] for line in text.splitlines()]
    names = [line.partition('"')[2].partition('"')[0] for line in named if line.startswith('"')]
    assert names == ["drop@0", "rand_like", "dropout", "bernoulli", "drop@1"]


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.LSTM(2, 2, 2, dropout=0.1), True),
        (nn.GRU(2, 2), False),
        (nn.MultiheadAttention(2, 1, dropout=0.1), True),
        (nn.MultiheadAttention(2, 1), False),
        (nn.TransformerEncoderLayer(2, 1), True),
        (nn.RReLU(), True),
        (nn.Linear(2, 2), False),
        (torch.nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), False),
    ],
    ids=lambda value: value if isinstance(value, bool) else type(value).__name__,
)
def test_modules_that_draw(module: nn.Module, draws: bool) -> None:
    assert module_draws(module) == draws


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        *((kind(8, 8, 2, dropout=0.5, batch_first=True), (6, 5, 8)) for kind in (nn.LSTM, nn.GRU, nn.RNN)),
        (nn.Dropout1d(0.5), (6, 5, 8)),
        (nn.Dropout2d(0.5), (6, 5, 8, 3)),
        (nn.FeatureAlphaDropout(0.5), (6, 5, 8, 3)),
        (nn.MultiheadAttention(8, 2, dropout=0.5), (6, 5, 8)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_draws_by_index_needs_no_layout(module: nn.Module, shape: tuple[int, ...]) -> None:
    """A tensor with the same values and another layout in memory gets the same random numbers."""
    x = torch.randn(shape)
    transposed = x.transpose(0, 2).contiguous().transpose(0, 2)
    arguments = 3 if isinstance(module, nn.MultiheadAttention) else 1
    results = []
    for value in (x, transposed):
        torch.manual_seed(0)
        output = module(*[value] * arguments)
        results.append(output[0] if isinstance(output, tuple) else output)
    assert not module_draws_by_layout(module)
    torch.testing.assert_close(*results)


class Quiet(nn.Module):
    """Draws nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleDict({"0": nn.Linear(2, 2), "drop": nn.Dropout(0.0)})
        self.attention = nn.MultiheadAttention(2, 1)


class Opaque(nn.Module):
    """A user's module, which draws as it likes."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.inner(x), self.inner(x), x * random.random()])


class Stage(nn.Module):
    """A stage with a user's module, called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.ModuleDict({"opaque": Opaque(), "drop": nn.Dropout(0.5)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        seed_operator("block.opaque@0")
        first = self.block["opaque"](x)
        seed_operator("block.opaque@1")
        return torch.cat([first, self.block["opaque"](x), self.block["drop"](x)[None]])


class Drawing(nn.Module):
    """A stage with a module and a function that draw."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = seed_operator("rand_like", x)
        return self.drop(x + torch.rand_like(x))


def seed_operator(name: str, *tensors: torch.Tensor) -> Any:
    """As in a stage file."""
    return tensors[0] if len(tensors) == 1 else tensors


@pytest.fixture(autouse=True)
def untouched_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages put theirs in place of the function above, which the next test finds as it was."""
    monkeypatch.setitem(globals(), "seed_operator", seed_operator)


def test_a_stage_that_draws_nothing_has_no_hooks() -> None:
    module = Quiet()
    PipelineStage(module, None)
    assert not any(m._forward_pre_hooks for m in module.modules())


def test_each_call_of_a_users_module_is_seeded_once() -> None:
    """With Python's generator, and not what lies inside of it: its own calls draw different numbers."""
    module, seeds = Stage(), OperatorSeeds()
    seeds.attach(module)
    hooked = [name for name, m in module.named_modules() if m._forward_pre_hooks]
    assert hooked == ["block.opaque", "block.drop"]
    x = torch.ones(64)
    draws = []
    for minibatch in (0, 0, 1):
        seeds.begin_forward(minibatch)
        draws.append(module(x))
        random.seed(minibatch + len(draws))
    assert torch.equal(draws[0], draws[1])
    rows = [tuple(row.tolist()) for row in torch.cat([draws[0], draws[2]])]
    assert len(set(rows)) == len(rows) == 14


def test_a_compiled_stage_draws_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing in it is seeded by name, which a compiler would stumble over; one seed at its beginning is left."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    stages = [PipelineStage(Drawing(), None, compiled=True, seeds=OperatorSeeds(s)) for s in (0, 0, 1)]
    x = torch.ones(64, 2)
    first, second, other = (stage.forward(0, [x])[0] for stage in stages)
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert not any(m._forward_pre_hooks for stage in stages for m in stage.module.modules())


@pytest.mark.parametrize("change", [("seed", 1), ("split", "valid"), ("epoch", 2), ("minibatch", 1), ("operator", "b")])
def test_the_numbers_differ_in_everything_that_decides_them(change: tuple[str, Any]) -> None:
    def drawn(*, seed: int = 0, split: str = "train", epoch: int = 1, minibatch: int = 0, operator: str = "a") -> float:
        seeds = OperatorSeeds(stage=3)
        seeds.begin_phase(seed, split, epoch)
        seeds.begin_forward(minibatch)
        seeds.seed(operator)
        return torch.rand(()).item()

    assert drawn() == drawn() != drawn(**dict([change]))


def test_a_scripted_module_takes_no_hooks_and_computes_all_the_same() -> None:
    module = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Sequential(nn.Dropout(0.5))))
    OperatorSeeds().attach(module)
    assert module(torch.ones(3, 2)).shape == (3, 2)
