"""Small artifacts that hold together, and hypothesis strategies for all of them."""

from __future__ import annotations

import hashlib
import json
import math
import string
from typing import Any

from hypothesis import strategies as st

from pdtool.artifacts.artifact import Artifact, ModelRef
from pdtool.artifacts.bundle import Bundle, StageModule, TensorSpec, TiedParameter
from pdtool.artifacts.cluster import Cluster, ClusterFile, Level, LevelMeasured, NetworkMeasured
from pdtool.artifacts.device import Device
from pdtool.artifacts.plan import Plan, Predicted, Rival, Stage, Why
from pdtool.artifacts.profile import Node, Profile, SharedParameter
from pdtool.artifacts.report import EmulatedPlan, Emulation, Measured, Report, StageReport
from pdtool.artifacts.run_dir import CheckpointManifest, RunState, StoredFile

MODEL = ModelRef(source="model.py", settings={"layers": 3, "wide": True, "rate": 0.5, "kind": "a b"})


def profile() -> Profile:
    """x -> a -> b -> loss, with a skip from a to the loss."""
    return Profile(
        name="net",
        model=MODEL,
        batch_size=8,
        device=Device(name="cpu", kind="measured"),
        step_s=0.01,
        coverage=0.99,
        loading_s=2e-3,
        digests={"model.py": "0" * 64},
        nodes=(
            Node(name="x", op="input", module="", output_bytes=100),
            Node(
                name="a",
                op="Linear",
                module="a",
                inputs=("x",),
                forward_s=1e-3,
                backward_s=2e-3,
                update_s=1e-4,
                output_bytes=100,
                gradient_bytes=100,
                parameter_bytes=400,
                stash_bytes=100,
                flops=800,
            ),
            Node(
                name="block.b",
                op="Linear",
                module="block.b",
                inputs=("a",),
                forward_s=1e-3,
                backward_s=2e-3,
                output_bytes=100,
                gradient_bytes=100,
                parameter_bytes=400,
                stash_bytes=100,
            ),
            Node(name="block.relu@1", op="relu", module="block", inputs=("block.b",), forward_s=1e-4),
            Node(name="loss", op="loss", module="", inputs=("block.relu@1", "a"), forward_s=1e-4, backward_s=1e-4),
        ),
        shared=(SharedParameter(name="a.weight", bytes=300, nodes=("a", "block.b")),),
        together=(("block.b", "block.relu@1"),),
        pin={"loss": -1},
    )


def plan() -> Plan:
    """The same net in two stages, 2-1, on 3 workers of 4."""
    made = Plan(
        name="net-2x2",
        model=MODEL,
        profile="profiles/net.json",
        batch_size=8,
        digests={"model.py": "0" * 64},
        cluster=Cluster(
            levels=(
                Level(size=2, bandwidth_bytes_per_s=1.25e9, latency_s=5e-5),
                Level(size=2, bandwidth_bytes_per_s=1.2e10),
            ),
            memory_bytes=16 * 10**9,
        ),
        stages=(
            Stage(nodes=("x", "a"), replicas=2, workers=(0, 1), in_flight=2),
            Stage(nodes=("block", "loss"), replicas=1, workers=(2,), in_flight=1),
        ),
        why=Why(bottleneck="compute of stage 1", rivals=(Rival(plan="4", bottleneck_s=4e-3, why="synchronises"),)),
    )
    predicted = Predicted(
        bottleneck_s=3e-3,
        throughput_samples_per_s=2666.0,
        gain_over_data_parallel=1.3,
        compute_s=(1.5e-3, 3e-3),
        allreduce_s=(1e-6, 0.0),
        transfer_s=(1e-6,),
        memory_bytes=(1000, 2000),
        traffic_bytes=300,
        plan_sha256=made.plan_sha256,
    )
    return made.model_copy(update={"predicted": predicted})


def bundle() -> Bundle:
    """Stage files of `plan`."""
    stages = [
        StageModule(
            file="stage_0.py",
            class_name="Stage0",
            sha256="1" * 64,
            inputs=("x",),
            outputs=("h",),
            parameters=("a.weight", "a.bias"),
            buffers=("a.count",),
        ),
        StageModule(
            file="stage_1.py",
            class_name="Stage1",
            sha256="2" * 64,
            inputs=("h",),
            outputs=(),
            parameters=("block.b.weight",),
        ),
    ]
    tensors = (
        TensorSpec(name="x", producer=-1, consumers=(0,), shape=("batch", 4), dtype="float32", gradient=False),
        TensorSpec(name="h", producer=0, consumers=(1,), shape=("2*batch+1", 4), dtype="bfloat16", gradient=True),
    )
    tied = (TiedParameter(stages=(0, 1), names=("a.weight", "block.b.weight")),)
    return Bundle(
        name="net-2x2",
        batch_size=8,
        proof="values",
        inputs=("x",),
        stages=tuple(stages),
        tensors=tensors,
        tied=tied,
        digests={"plan": "3" * 64},
    )


def report() -> Report:
    """Of a run of `plan`."""
    stage = StageReport(
        replicas=2,
        busy_s=3e-3,
        forward_s=1e-3,
        backward_s=1.5e-3,
        update_s=5e-4,
        wait_s=1e-3,
        allreduce_s=7e-4,
        rest_s=3e-4,
        send_s=2e-4,
        sent_bytes=100,
        peak_versions=2,
        peak_stashed=2,
        peak_memory_bytes=12_000_000,
    )
    return Report(
        plan="net-2x2",
        config="2-1",
        schedule="1f1b",
        batch_size=8,
        epochs=2,
        minibatches=10,
        minibatches_by_epoch=(12, 10),
        throughput_samples_per_s=2000.5,
        target="accuracy=0.98",
        target_reached=False,
        metrics={"loss": 0.25, "accuracy": 0.5},
        predicted=plan().predicted,
        measured=Measured(bottleneck_s=4e-3, throughput_samples_per_s=2000.0),
        stages=(stage, stage.model_copy(update={"replicas": 1})),
    )


def cluster() -> ClusterFile:
    """Two servers of two devices, probed."""
    return ClusterFile(
        name="lab",
        memory_bytes=16 * 10**9,
        levels=(
            Level(size=2, bandwidth_bytes_per_s=1.25e9, latency_s=5e-5),
            Level(size=2, bandwidth_bytes_per_s=1.2e10, latency_s=5e-6),
        ),
        measured=NetworkMeasured(
            workers=4,
            backend="gloo",
            torch="2.13.0",
            levels=(
                LevelMeasured(pair_bytes_per_s=1.2e9, allreduce_bytes_per_s=1e9),
                LevelMeasured(pair_bytes_per_s=1.1e10, allreduce_bytes_per_s=6e9),
            ),
        ),
    )


def checkpoint_manifest() -> CheckpointManifest:
    """Of two stages, after three epochs."""
    files = {f"stage-{s}.safetensors": StoredFile(bytes=1000 + s, sha256=f"{s:064x}") for s in range(2)}
    return CheckpointManifest(
        epoch=3,
        seed=7,
        metrics={"loss": 0.5, "accuracy": 0.75},
        files=files,
        minibatches=(0, 45, 20),
        samples=(360, 360, 160),
        tied={"head.weight": "embedding.weight"},
    )


def run_state() -> RunState:
    """A run that failed in its third epoch."""
    return RunState(
        plan="net-2x2",
        config="2-1",
        schedule="1f1b",
        epochs=4,
        epochs_done=1,
        updates=10,
        samples=80,
        end="failed",
        reason="the loss is nan",
    )


def emulation() -> Emulation:
    """Of a plan and of data parallelism."""
    own = EmulatedPlan(
        name="this plan",
        config="3-1",
        schedule="1f1b",
        workers=4,
        minibatches=40,
        bottleneck_s=4e-3,
        throughput_samples_per_s=2000.0,
        simulated_s=3.9e-3,
        sent_bytes=10**6,
        epochs=2,
        training_s=0.4,
    )
    return Emulation(
        plan="net-2x2",
        batch_size=8,
        cluster=plan().cluster,
        compute="sleep",
        scale=12,
        slowdown=1.5,
        cores=2,
        plans=(own, own.model_copy(update={"name": "data-parallel", "config": "4", "bottleneck_s": 9e-3})),
    )


ALL: tuple[Artifact, ...] = (
    profile(),
    cluster(),
    plan(),
    bundle(),
    report(),
    run_state(),
    emulation(),
    checkpoint_manifest(),
)


def sealed(content: dict[str, Any]) -> str:
    """JSON text with the right digest: what a stranger who knows the format could write."""
    text = json.dumps({k: v for k, v in content.items() if k != "sha256"}, sort_keys=True, ensure_ascii=False)
    return json.dumps({**content, "sha256": hashlib.sha256(text.encode()).hexdigest()})


_words = st.text(string.ascii_letters + string.digits + "_", min_size=1, max_size=8)
_names = st.lists(_words, min_size=1, max_size=3).map(".".join)
_seconds = st.just(0.0) | st.floats(min_value=1e-30, max_value=1e6)
_bytes = st.integers(min_value=0, max_value=2**50)
_labels = st.text(st.characters(blacklist_categories=("Cs", "Cc")), max_size=20)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    """Any graph of up to eight operators, with any costs."""
    names = draw(st.lists(_names, min_size=1, max_size=8, unique=True))
    nodes = tuple(
        Node(
            name=name,
            op=draw(_labels),
            module=draw(st.one_of(st.just(""), _names)),
            inputs=tuple(draw(st.lists(st.sampled_from(names[:i]), max_size=3))) if i else (),
            forward_s=draw(_seconds),
            backward_s=draw(_seconds),
            update_s=draw(_seconds),
            output_bytes=draw(_bytes),
            gradient_bytes=draw(_bytes),
            parameter_bytes=draw(_bytes),
            frozen_bytes=draw(_bytes),
            stash_bytes=draw(_bytes),
            saved_by=draw(st.sampled_from([None, *names[i + 1 :]])),
            flops=draw(_bytes),
        )
        for i, name in enumerate(names)
    )
    some = st.lists(st.sampled_from(names), max_size=3).map(tuple)
    most = min(node.parameter_bytes for node in nodes) // 2  # of each of two
    shared = st.builds(SharedParameter, name=_names, bytes=st.integers(0, most), nodes=some)
    return Profile(
        name=draw(_words),
        model=draw(st.one_of(st.none(), st.just(MODEL))),
        batch_size=draw(st.integers(1, 2**20)),
        device=Device(name=draw(_labels), kind=draw(st.sampled_from(["measured", "estimated"]))),
        step_s=draw(_seconds),
        coverage=draw(_seconds),
        optimizer_state_bytes=draw(_seconds),
        step_scratch_bytes=draw(_seconds),
        nodes=nodes,
        shared=tuple(draw(st.lists(shared, max_size=2))),
        together=tuple(draw(st.lists(some, max_size=2))),
        pin=draw(st.dictionaries(st.sampled_from(names), st.integers(-3, 3), max_size=2)),
        digests=draw(st.dictionaries(_labels, st.just("a" * 64), max_size=2)),
    )


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    """Any stages on any cluster with enough workers."""
    replicas = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    workers = draw(st.permutations(range(sum(replicas))))
    level = st.builds(Level, size=st.integers(1, 3), bandwidth_bytes_per_s=st.floats(1, 1e12), latency_s=_seconds)
    flush = draw(st.booleans())
    stages = tuple(
        Stage(
            nodes=tuple(draw(st.lists(_labels, min_size=1, max_size=3, unique=True))),
            replicas=r,
            workers=tuple(workers[sum(replicas[:s]) : sum(replicas[: s + 1])]),
            in_flight=draw(st.integers(1, 9)),
        )
        for s, r in enumerate(replicas)
    )
    rivals = st.lists(st.builds(Rival, plan=_labels, bottleneck_s=_seconds, why=_labels), max_size=2).map(tuple)
    return Plan(
        name=draw(_words),
        model=MODEL,
        profile=draw(_labels),
        batch_size=draw(st.integers(1, 999)),
        cluster=Cluster(
            levels=(Level(size=sum(replicas), bandwidth_bytes_per_s=1e9), *draw(st.lists(level, max_size=2))),
            memory_bytes=draw(st.one_of(st.none(), st.integers(1, 2**40))),
        ),
        schedule=draw(st.sampled_from(["1f1b-flush", "gpipe"])) if flush else "1f1b",
        weights="flush" if flush else "stash",
        microbatches=draw(st.integers(1, 9)) if flush else 1,
        stages=stages,
        why=draw(st.one_of(st.none(), st.builds(Why, bottleneck=_labels, rivals=rivals))),
    )


@st.composite
def reports(draw: st.DrawFn) -> Report:
    """Any figures."""
    stage = st.builds(
        StageReport,
        replicas=st.integers(1, 9),
        busy_s=_seconds,
        forward_s=_seconds,
        backward_s=_seconds,
        update_s=_seconds,
        wait_s=_seconds,
        allreduce_s=_seconds,
        data_s=_seconds,
        rest_s=_seconds,
        send_s=_seconds,
        sent_bytes=_bytes,
        peak_versions=st.integers(0, 9),
        peak_stashed=st.integers(0, 9),
        peak_memory_bytes=st.none() | _bytes,
    )
    finite = st.floats(allow_nan=False, allow_infinity=False)
    return report().model_copy(
        update={
            "metrics": draw(st.dictionaries(_labels, finite, max_size=3)),
            "stages": tuple(draw(st.lists(stage, max_size=2))),
            "plan": draw(_labels),
            "target_reached": draw(st.sampled_from([None, True, False])),
        }
    )


@st.composite
def bundles(draw: st.DrawFn) -> Bundle:
    """Any shapes, names and ties."""
    dim = st.one_of(st.integers(0, 99), st.sampled_from(["batch", "49*batch", "batch+1", "2*batch-3"]))
    dtype = st.sampled_from(["float32", "bfloat16", "int64", "bool", "complex64"])
    sample = bundle()
    tensors = tuple(
        tensor.model_copy(update={"shape": tuple(draw(st.lists(dim, max_size=4))), "dtype": draw(dtype)})
        for tensor in sample.tensors
    )
    stages = tuple(
        stage.model_copy(update={"parameters": tuple(draw(st.lists(_names, max_size=4)))}) for stage in sample.stages
    )
    return sample.model_copy(update={"tensors": tensors, "stages": stages, "name": draw(_words)})


@st.composite
def clusters(draw: st.DrawFn) -> ClusterFile:
    """Any levels, written by hand or probed."""
    rates = st.floats(1e-3, 1e15)
    level = st.builds(Level, size=st.integers(1, 9), bandwidth_bytes_per_s=rates, latency_s=_seconds)
    levels = tuple(draw(st.lists(level, min_size=1, max_size=4)))
    found = st.builds(LevelMeasured, pair_bytes_per_s=rates, allreduce_bytes_per_s=rates)
    measured = NetworkMeasured(
        workers=math.prod(v.size for v in levels),
        backend=draw(st.sampled_from(["gloo", "nccl"])),
        torch=draw(_labels),
        levels=tuple(draw(found) for _ in levels),
    )
    return ClusterFile(
        name=draw(_words),
        levels=levels,
        memory_bytes=draw(st.one_of(st.none(), st.integers(1, 2**40))),
        measured=draw(st.sampled_from([None, measured])),
    )
