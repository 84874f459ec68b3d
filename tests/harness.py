"""Jobs small enough to run in a second: models with hand-written stages, run by real processes over gloo.

The processes come from a fork server that has torch imported; they skip the launcher, which has tests of its own.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import torch
from reference.replay import Batch

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.bundle import Bundle, StageModule, TensorSpec, TiedParameter
from pdtool.artifacts.cluster import Cluster, Level
from pdtool.artifacts.metrics import MetricsLine, UpdateLine, read_metrics
from pdtool.artifacts.plan import Plan, Stage
from pdtool.artifacts.run_dir import RunDir
from pdtool.files import file_sha256
from pdtool.frontend.model_file import ModelFile
from pdtool.runtime.config import RunConfig
from pdtool.runtime.loading.minibatches import sample_order
from pdtool.runtime.ranks import assign_ranks
from pdtool.schedule import SCHEDULES

DEVICE = "cpu"  # where workers compute; test_run_gpu.py sets it to cuda
PREPARE: Callable[[], None] | None = None  # for `run`, where a test says nothing else


@dataclass(frozen=True)
class Toy:
    """A model.py and its stages: source, inputs and outputs of each, and the tensors between them."""

    model: str
    stages: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...]
    tensors: tuple[TensorSpec, ...]
    inputs: tuple[str, ...] = ("x",)
    tied: tuple[TiedParameter, ...] = ()
    optional_gradients: bool = False


def tensor(name: str, producer: int, consumers: Sequence[int], *shape: int, dtype: str = "float32") -> TensorSpec:
    gradient = producer >= 0 and dtype.startswith("float")
    return TensorSpec(
        name=name,
        producer=producer,
        consumers=tuple(consumers),
        shape=("batch", *shape),
        dtype=dtype,
        gradient=gradient,
    )


OPTIMIZERS = {
    "sgd": "torch.optim.SGD([p for _, p in named], lr=0.05, momentum=0.9)",
    "plain": "torch.optim.SGD([p for _, p in named], lr=0.1)",
    "decay": "torch.optim.SGD([p for _, p in named], lr=0.05, weight_decay=0.1)",
    "adam": "torch.optim.Adam([p for _, p in named], lr=0.01)",
}

CONTRACT = """
import torch, torch.nn as nn, torch.nn.functional as F
SAMPLES = 26

class Data(torch.utils.data.Dataset):
    def __init__(self, n, seed):
        g = torch.Generator().manual_seed(seed)
        self.x = {x}
        self.y = {y}
    def __len__(self):
        return len(self.y)
    def __getitem__(self, i):
        return self.x[i], self.y[i]

def dataset(split):
    return Data(SAMPLES, 1) if split == "train" else Data(10, 2)

def loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())

def metrics(output, target):
    return {{"accuracy": ((output.argmax(-1) == target).sum(), target.numel())}}

def optimizer(named):
    return OPTIMIZER
"""

IMAGES = CONTRACT.format(x="torch.randn(n, 2, 6, 6, generator=g)", y="torch.randint(0, 4, (n,), generator=g)")
WORDS = CONTRACT.format(x="torch.randint(0, 11, (n, 5), generator=g)", y="torch.randint(0, 11, (n, 5), generator=g)")
HEAD = "import torch\nimport torch.nn as nn\nimport torch.nn.functional as F\n\n"


def stage(number: int, init: str, forward: str) -> str:
    """Source of a stage file; statements are separated by semicolons, `x -> y` names arguments and result."""
    arguments, body = forward.split(":", 1)
    lines = [f"class Stage{number}(nn.Module):", "    def __init__(self):", "        super().__init__()"]
    lines += [f"        {line.strip()}" for line in init.split(";") if line.strip()]
    lines += [f"    def forward(self, {arguments.strip()}):"]
    lines += [f"        {line.strip()}" for line in body.split(";") if line.strip()]
    return HEAD + "\n".join(lines) + "\n"


def model(init: str, forward: str) -> str:
    return stage(9, init, forward).replace("Stage9", "Net").replace(HEAD, "") + "\ndef model():\n    return Net()\n"


_CONV = (
    "self.conv1 = nn.Conv2d(2, 4, 3, padding=1, bias=False); self.bn = nn.BatchNorm2d(4)",
    "self.conv2 = nn.Conv2d(4, 4, 3, padding=1)",
    "self.fc = nn.Linear(16, 4)",
)
_CONV_FORWARD = (
    "a = F.relu(self.bn(self.conv1(x)))",
    "b = F.avg_pool2d(F.relu(self.conv2(a)), 3)",
    "z = self.fc(b.flatten(1))",
)

CONV3 = Toy(
    model=IMAGES + model("; ".join(_CONV), f"x: {'; '.join(_CONV_FORWARD)}; return z"),
    stages=(
        (stage(0, _CONV[0], f"x: {_CONV_FORWARD[0]}; return a"), ("x",), ("a",)),
        (stage(1, _CONV[1], f"a: {_CONV_FORWARD[1]}; return b"), ("a",), ("b",)),
        (stage(2, _CONV[2], f"b: {_CONV_FORWARD[2]}; return z"), ("b",), ()),
    ),
    tensors=(tensor("x", -1, [0], 2, 6, 6), tensor("a", 0, [1], 4, 6, 6), tensor("b", 1, [2], 4, 2, 2)),
)
CONV2 = replace(
    CONV3,
    stages=(
        CONV3.stages[0],
        (stage(1, f"{_CONV[1]}; {_CONV[2]}", f"a: {_CONV_FORWARD[1]}; {_CONV_FORWARD[2]}; return z"), ("a",), ()),
    ),
    tensors=CONV3.tensors[:2],
)
CONV1 = replace(
    CONV3,
    stages=((stage(0, "; ".join(_CONV), f"x: {'; '.join(_CONV_FORWARD)}; return z"), ("x",), ()),),
    tensors=CONV3.tensors[:1],
)


def faulty(statement: str) -> Toy:
    """CONV3 with a statement in the forward of stage 1: `self.n` counts its calls from 0, `a` is its input."""
    source = stage(
        1,
        f"self.n = -1; {_CONV[1]}",
        f"a: import os, signal, time; self.n += 1; {statement}; {_CONV_FORWARD[1]}; return b",
    )
    return replace(CONV3, stages=(CONV3.stages[0], (source, ("a",), ("b",)), CONV3.stages[2]))


# h skips stage 1, x (a model input) is used again by the last stage, and m carries no gradient
_SKIP = ("self.a = nn.Linear(6, 5)", "self.b = nn.Linear(5, 5); self.c = nn.Linear(5, 3)", "self.d = nn.Linear(14, 4)")
_SKIP_FORWARD = (
    "x: h = torch.tanh(self.a(x)); m = h > 0; g = torch.tanh(self.b(h)); k = self.c(g) * 2; "
    "return self.d(torch.cat([k, h * m, x], 1))"
)
SKIP3 = Toy(
    model=IMAGES.replace("n, 2, 6, 6", "n, 6") + model("; ".join(_SKIP), _SKIP_FORWARD),
    stages=(
        (stage(0, _SKIP[0], "x: h = torch.tanh(self.a(x)); return h, h > 0"), ("x",), ("h", "m")),
        (stage(1, _SKIP[1], "h: return self.c(torch.tanh(self.b(h))) * 2"), ("h",), ("k",)),
        (stage(2, _SKIP[2], "k, h, m, x: return self.d(torch.cat([k, h * m, x], 1))"), ("k", "h", "m", "x"), ()),
    ),
    tensors=(
        tensor("x", -1, [0, 2], 6),
        tensor("h", 0, [1, 2], 5),
        tensor("m", 0, [2], 5, dtype="bool"),
        tensor("k", 1, [2], 3),
    ),
)

# returns two tensors, of which a loss may leave out the second, that b and c alone compute
_TWO = ("self.a = nn.Linear(6, 5)", "self.b = nn.Linear(5, 5); self.c = nn.Linear(5, 4)", "self.d = nn.Linear(5, 4)")
TWO3 = Toy(
    model=IMAGES.replace("n, 2, 6, 6", "n, 6")
    + model("; ".join(_TWO), "x: h = torch.tanh(self.a(x)); return self.d(h), self.c(torch.tanh(self.b(h)))"),
    stages=(
        (stage(0, _TWO[0], "x: return torch.tanh(self.a(x))"), ("x",), ("h",)),
        (stage(1, _TWO[1], "h: return self.c(torch.tanh(self.b(h)))"), ("h",), ("k",)),
        (stage(2, _TWO[2], "h, k: return self.d(h), k"), ("h", "k"), ()),
    ),
    tensors=(tensor("x", -1, [0], 6), tensor("h", 0, [1, 2], 5), tensor("k", 1, [2], 4)),
    optional_gradients=True,
)

SKIP1 = replace(
    SKIP3, stages=((stage(0, "; ".join(_SKIP), _SKIP_FORWARD), ("x",), ()),), tensors=(tensor("x", -1, [0], 6),)
)

_LSTM = (
    "self.embed = nn.Embedding(11, 6)",
    "self.rnn = nn.LSTM(6, 7, batch_first=True)",
    "self.out = nn.Linear(7, 11)",
)
LSTM3 = Toy(
    model=WORDS + model("; ".join(_LSTM), "x: return self.out(self.rnn(self.embed(x))[0])"),
    stages=(
        (stage(0, f"{_LSTM[0]}", "x: return self.embed(x)"), ("x",), ("e",)),
        (stage(1, f"{_LSTM[1]}", "e: return self.rnn(e)[0]"), ("e",), ("h",)),
        (stage(2, f"{_LSTM[2]}", "h: return self.out(h)"), ("h",), ()),
    ),
    tensors=(tensor("x", -1, [0], 5, dtype="int64"), tensor("e", 0, [1], 5, 6), tensor("h", 1, [2], 5, 7)),
)

_TIED = ("self.embed = nn.Embedding(11, 6)", "self.mid = nn.Linear(6, 6)", "self.out = nn.Linear(6, 11)")
_TIED_FORWARD = "x: return self.out(torch.tanh(self.mid(self.embed(x))))"
TIED3 = Toy(
    model=WORDS + model("; ".join(_TIED) + "; self.out.weight = self.embed.weight", _TIED_FORWARD),
    stages=(
        (stage(0, _TIED[0], "x: return self.embed(x)"), ("x",), ("e",)),
        (stage(1, _TIED[1], "e: return torch.tanh(self.mid(e))"), ("e",), ("h",)),
        (stage(2, _TIED[2], "h: return self.out(h)"), ("h",), ()),
    ),
    tensors=(tensor("x", -1, [0], 5, dtype="int64"), tensor("e", 0, [1], 5, 6), tensor("h", 1, [2], 5, 6)),
    tied=(TiedParameter(stages=(0, 2), names=("embed.weight", "out.weight")),),
)


# the same in two stages, of which the first has another parameter beside the tied one
TIED2 = replace(
    TIED3,
    stages=(
        (stage(0, "; ".join(_TIED[:2]), "x: return torch.tanh(self.mid(self.embed(x)))"), ("x",), ("h",)),
        (stage(1, _TIED[2], "h: return self.out(h)"), ("h",), ()),
    ),
    tensors=(tensor("x", -1, [0], 5, dtype="int64"), tensor("h", 0, [1], 5, 6)),
    tied=(TiedParameter(stages=(0, 1), names=("embed.weight", "out.weight")),),
)


# has parameters that nothing uses: they get no gradient, and the optimizer must leave them alone
UNUSED1 = replace(
    CONV1,
    model=CONV1.model.replace("self.fc =", "self.unused = nn.Linear(2, 2); self.fc ="),
    stages=((CONV1.stages[0][0].replace("self.fc =", "self.unused = nn.Linear(2, 2); self.fc ="), ("x",), ()),),
)

# two stages on each of two workers, or of four
CONV4 = replace(
    CONV3,
    stages=(
        (stage(0, "self.conv1 = nn.Conv2d(2, 4, 3, padding=1, bias=False)", "x: return self.conv1(x)"), ("x",), ("c",)),
        (stage(1, "self.bn = nn.BatchNorm2d(4)", "c: return F.relu(self.bn(c))"), ("c",), ("a",)),
        (stage(2, _CONV[1], f"a: {_CONV_FORWARD[1]}; return b"), ("a",), ("b",)),
        (stage(3, _CONV[2], f"b: {_CONV_FORWARD[2]}; return z"), ("b",), ()),
    ),
    tensors=(
        tensor("x", -1, [0], 2, 6, 6),
        tensor("c", 0, [1], 4, 6, 6),
        tensor("a", 1, [2], 4, 6, 6),
        tensor("b", 2, [3], 4, 2, 2),
    ),
)
# with two workers h and x go from a stage to another one of the same worker
SKIP4 = replace(
    SKIP3,
    stages=(
        SKIP3.stages[0],
        (stage(1, "self.b = nn.Linear(5, 5)", "h: return torch.tanh(self.b(h))"), ("h",), ("g",)),
        (
            stage(2, "self.c = nn.Linear(5, 3)", "g, h, m, x: return self.c(g) * 2, torch.cat([h * m, x], 1)"),
            ("g", "h", "m", "x"),
            ("k", "j"),
        ),
        (stage(3, _SKIP[2], "k, j: return self.d(torch.cat([k, j], 1))"), ("k", "j"), ()),
    ),
    tensors=(
        tensor("x", -1, [0, 2], 6),
        tensor("h", 0, [1, 2], 5),
        tensor("m", 0, [2], 5, dtype="bool"),
        tensor("g", 1, [2], 5),
        tensor("k", 2, [3], 3),
        tensor("j", 2, [3], 11),
    ),
)


def perceptron(stages: int) -> Toy:
    """A linear layer a stage."""
    last = stages - 1
    layers = [f"self.l{s} = nn.Linear({6 if s == 0 else 5}, {4 if s == last else 5})" for s in range(stages)]
    forward = "; ".join(f"h{s + 1} = torch.tanh(self.l{s}(h{s}))" for s in range(stages))
    return Toy(
        model=IMAGES.replace("n, 2, 6, 6", "n, 6") + model("; ".join(layers), f"h0: {forward}; return h{stages}"),
        stages=tuple(
            (
                stage(s, layers[s], f"h{s}: return torch.tanh(self.l{s}(h{s}))"),
                (f"h{s}",),
                (f"h{s + 1}",) if s < last else (),
            )
            for s in range(stages)
        ),
        tensors=tuple(tensor(f"h{s}", s - 1, [s], 6 if s == 0 else 5) for s in range(stages)),
        inputs=("h0",),
    )


MLP6 = perceptron(6)
TIED4 = replace(
    TIED3,
    stages=(
        TIED3.stages[0],
        (stage(1, _TIED[1], "e: return self.mid(e)"), ("e",), ("f",)),
        (stage(2, "", "f: return torch.tanh(f)"), ("f",), ("h",)),
        (stage(3, _TIED[2], "h: return self.out(h)"), ("h",), ()),
    ),
    tensors=(*TIED3.tensors[:2], tensor("f", 1, [2], 5, 6), tensor("h", 2, [3], 5, 6)),
    tied=(TiedParameter(stages=(0, 3), names=("embed.weight", "out.weight")),),
)

# all in one stage; that the two names are one parameter is known to the model only
TIED1 = replace(
    TIED3, stages=((stage(0, "; ".join(_TIED), _TIED_FORWARD), ("x",), ()),), tensors=TIED3.tensors[:1], tied=()
)


def job(
    folder: Path,
    toy: Toy,
    replicas: Sequence[int] = (),
    *,
    schedule: str = "1f1b",
    weights: str = "",
    microbatches: int = 1,
    update_every: int | None = None,
    chunks: int = 1,
    in_flight: Sequence[int] = (),
    optimizer: str = "sgd",
    batch_size: int = 4,
    wire_dtype: str = "fp32",
    **settings: Any,
) -> RunConfig:
    """Write model.py and the bundle into `folder`; a spec that runs them with one worker per replica.

    Args:
        replicas, in_flight: of each place, by which there are `chunks` stages; else straight, and the usual.
        weights: else the schedule's usual policy.
    """
    places = len(toy.stages) // chunks
    replicas = tuple(replicas) or (1,) * places
    in_flight = tuple(in_flight) or SCHEDULES[schedule].usual_in_flight(replicas, microbatches, chunks)
    (folder / "bundle").mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(toy.model.replace("OPTIMIZER", OPTIMIZERS[optimizer]))
    modules = []
    for s, (source, inputs, outputs) in enumerate(toy.stages):
        path = folder / "bundle" / f"stage_{s}.py"
        path.write_text(source)
        space: dict[str, Any] = {}
        exec(source, space)
        module = space[f"Stage{s}"]()
        modules.append(
            StageModule(
                file=path.name,
                class_name=f"Stage{s}",
                sha256=file_sha256(path),
                inputs=inputs,
                outputs=outputs,
                parameters=tuple(dict(module.named_parameters())),
                buffers=tuple(dict(module.named_buffers())),
            )
        )
    bundle = Bundle(
        name="toy",
        batch_size=batch_size,
        proof="values",
        inputs=toy.inputs,
        stages=tuple(modules),
        tensors=toy.tensors,
        tied=toy.tied,
        optional_gradients=toy.optional_gradients,
    )
    bundle.check()
    bundle.save(folder / "bundle" / "bundle.yaml")
    total = sum(replicas)
    first = [sum(replicas[:s]) for s in range(len(replicas))]
    plan = Plan(
        name="toy",
        model=None,
        profile="none",
        batch_size=batch_size,
        schedule=schedule,
        weights=weights or SCHEDULES[schedule].policy_names[0],
        microbatches=microbatches,
        update_every=update_every,
        chunks=chunks,
        wire_dtype=wire_dtype,
        cluster=Cluster(levels=(Level(size=total, bandwidth_bytes_per_s=1e9),)),
        stages=tuple(
            Stage(nodes=("n",), replicas=r, workers=tuple(range(f, f + r)), in_flight=w)
            for r, f, w in [*zip(replicas, first, in_flight, strict=True)] * chunks
        ),
    )
    plan.check()
    settings = {"out": folder / "run", "timeout_s": 60.0, "device": DEVICE} | settings
    return RunConfig(
        plan=plan,
        bundle=bundle,
        bundle_dir=folder / "bundle",
        trusted=True,
        model=ModelRef(source=str(folder / "model.py")),
        **settings,
    )


@dataclass(frozen=True)
class Outcome:
    """What a stage on a worker ended with."""

    stage: int
    replica: int
    state: dict[str, torch.Tensor]
    peak_versions: int
    peak_stashed: int


# What a worker would import by itself otherwise, for a second or more: torch._dynamo comes with the first optimizer,
# torch.export._trace with a check of the model, the others with models of the zoo. What is not installed is left out.
PRELOAD = (
    "harness",
    "pdtool.runtime.launch.launcher",
    "pdtool.runtime.worker.worker",
    "pdtool.generator.generate",
    "torch._dynamo",
    "torch.export._trace",
    "sklearn.datasets",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.resnet.modeling_resnet",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
    "libraries_known",
)


def start_server() -> None:
    """The fork server of this process, if it has none yet."""
    multiprocessing.set_forkserver_preload(list(PRELOAD))
    forkserver.ensure_running()


def run(spec: RunConfig, prepare: Callable[[], None] | None = None) -> list[Outcome]:
    """Run a job on real processes and collect what they end with, by rank.

    Args:
        prepare: called in each process before anything else; a function that can be imported.

    Raises:
        AssertionError: some did not end well, with the exit codes and the errors of all.
    """
    context = multiprocessing.get_context("forkserver")
    start_server()
    spec.out.mkdir(parents=True, exist_ok=True)
    store = spec.out / f"store-{len(list(spec.out.glob('store-*')))}"
    world = spec.plan.workers
    processes = [
        context.Process(target=_work, args=(spec, rank, world, store, prepare or PREPARE)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    codes = [process.exitcode for process in processes]
    assert codes == [0] * world, "\n".join(
        [f"exit codes {codes}", *(path.read_text() for path in sorted(spec.out.glob("error-*.txt")))]
    )
    loaded = (torch.load(spec.out / f"outcome-{rank}.pt", weights_only=False) for rank in range(world))
    return [outcome for outcomes in loaded for outcome in outcomes]


def _work(spec: RunConfig, rank: int, world: int, store: Path, prepare: Callable[[], None] | None) -> None:
    from pdtool.runtime.worker.start_worker import start_worker

    os.dup2(os.open(spec.out / f"stderr-{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    gc.freeze()  # the worker looks through nothing for garbage that the server has imported
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    if prepare:
        prepare()
    try:
        worker = start_worker(spec, rank, _device(spec, rank), world)
        worker.run()
    except Exception as error:
        (spec.out / f"error-{rank}.txt").write_text(f"rank {rank}: {type(error).__name__}: {error}")
        raise
    outcomes = [
        Outcome(
            stage=s,
            replica=assign_ranks(spec.plan)[rank].replica,
            state={name: value.detach().cpu().clone() for name, value in replica.stage.module.state_dict().items()},
            peak_versions=replica.stage.weights.peak_versions,
            peak_stashed=worker.peak_stashed,
        )
        for s, replica in worker.stages.items()
    ]
    torch.save(outcomes, spec.out / f"outcome-{rank}.pt")
    torch.distributed.destroy_process_group()


def errors(spec: RunConfig) -> str:
    """What the workers of a job wrote to stderr."""
    return "".join(path.read_text() for path in sorted(spec.out.glob("stderr-*.txt")))


def _device(spec: RunConfig, rank: int) -> torch.device:
    """The worker's device, which computes in fp32 throughout."""
    if spec.device != "cuda":
        return torch.device("cpu")
    torch.backends.cudnn.allow_tf32 = False
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


TOLERANCE = {"rtol": 2e-5, "atol": 2e-6}
OTHER_KERNELS = {"rtol": 1e-2, "atol": 1e-3}  # those of a GPU, against a replay on the CPU


def batches(spec: RunConfig) -> list[list[Batch]]:
    """The minibatches of every epoch, as the replays take them."""
    data = ModelFile.load(spec.model, trusted=True).dataset("train")
    size = spec.plan.batch_size
    out = []
    for epoch in range(1, spec.epochs + 1):
        order = list(sample_order(spec.seed, epoch, len(data)))[: spec.steps and spec.steps * size]
        out.append([(data.x[order[i : i + size]], data.y[order[i : i + size]]) for i in range(0, len(order), size)])
    return out


def weights(outcomes: list[Outcome], replica: int = 0) -> dict[str, torch.Tensor]:
    """The state of all stages together."""
    return {name: value for o in outcomes if o.replica == replica for name, value in o.state.items()}


def logged(out: Path) -> list[MetricsLine]:
    """The lines of metrics.jsonl, without what no two runs have in common: when, and how fast."""
    update, other = {"time": 0.0, "samples_per_s": None}, {"time": 0.0}
    lines = read_metrics(RunDir(out).metrics_file)
    return [line.model_copy(update=update if isinstance(line, UpdateLine) else other) for line in lines]


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: float) -> None:
    """Equal by name, within float tolerance."""
    if DEVICE != "cpu":
        tolerance = OTHER_KERNELS
    for name, value in expected.items():
        torch.testing.assert_close(
            found[name], value, msg=lambda text, n=name: f"{n}: {text}", **(tolerance or TOLERANCE)
        )


def without_statistics(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Without batch norm's counts and running statistics, of which each replica has seen its share only."""
    return {n: v for n, v in state.items() if not n.endswith(("running_mean", "running_var", "num_batches_tracked"))}


def stage_of(spec: RunConfig) -> dict[str, int]:
    """Parameter name -> its stage."""
    return {name: s for s, stage in enumerate(spec.bundle.stages) for name in stage.parameters}
