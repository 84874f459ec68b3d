"""Profiles of only a model's graph, plans for them, and traces that are made once: for the tests of codegen."""

import pytest

from pdtool.artifacts.cluster import Cluster, Level
from pdtool.artifacts.device import Device
from pdtool.artifacts.plan import Plan, Stage
from pdtool.artifacts.profile import Node, Profile
from pdtool.frontend.tracing import trace_file
from pdtool.generator import generate as generate_module

TRACES = {}  # by name of the model's class: each has one function, and one batch size, in a file of tests


def traced_once(file, model, batch_size):
    """`trace_file`, which takes a second, once for each model; the proof leaves it as it was (test_codegen.py)."""
    if file.ref.model_dump_json() not in TRACES:
        TRACES[file.ref.model_dump_json()] = trace_file(file, model, batch_size)
    return TRACES[file.ref.model_dump_json()]


@pytest.fixture(autouse=True)
def shared_traces(monkeypatch):
    """For `generate` too; a test of tracing itself undoes it."""
    monkeypatch.setattr(generate_module, "trace_file", traced_once)


def skeleton(model_file):
    """A profile without costs: only the graph, as `measure` would write it."""
    traced = traced_once(model_file, model_file.build(), 4)
    constant = {op.name for op in traced.operators if op.constant}
    nodes = tuple(
        Node(
            name=op.name,
            op=op.op,
            module=op.module,
            inputs=tuple(dict.fromkeys(v.operator for v in op.values if v.operator not in constant)),
        )
        for op in traced.operators
        if op.name not in constant
    )
    return Profile(
        name=model_file.name,
        model=model_file.ref,
        batch_size=4,
        device=Device(name="none", kind="estimated"),
        step_s=0.0,
        coverage=0.0,
        nodes=nodes,
        together=traced.together,
    )


def plan_of(profile, count):
    """`count` stages of about equal numbers of operators, moved apart only where `together` forbids it."""
    inputs = [n.name for n in profile.nodes if n.op == "input"]
    blocks = [b for b in profile.graph.contracted([inputs, *profile.together]) if not set(b) & set(inputs)]
    cuts = [round(i * len(blocks) / count) for i in range(count + 1)]
    stages = [[n for b in blocks[cuts[i] : cuts[i + 1]] for n in b] for i in range(count)]
    stages[0] = inputs + stages[0]
    return Plan(
        name=f"{profile.name}-{count}",
        model=profile.model,
        profile="none",
        batch_size=4,
        cluster=Cluster(levels=(Level(size=count, bandwidth_bytes_per_s=1e9),)),
        stages=tuple(
            Stage(nodes=tuple(profile.graph.compress(nodes)), replicas=1, workers=(s,), in_flight=count - s)
            for s, nodes in enumerate(stages)
        ),
    )


def texts_in(folder):
    return {path.name: path.read_text() for path in sorted(folder.glob("stage_*.py"))}
