"""The whole road for every model of the zoo: profile, partition, codegen with its proof, and training over Gloo."""

import math

import pytest
import torch
from harness import run
from pydantic import JsonValue

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import PlanOptions
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Report
from pdtool.frontend.model_file import ModelFile
from pdtool.generator.generate import generate
from pdtool.planner.choice.make_plan import make_plan
from pdtool.profiler.measure import measure
from pdtool.runtime.config import RunConfig

MODELS: dict[str, dict[str, JsonValue]] = {
    "digits": {"width": 8},
    "vgg16": {"size": "mini"},
    "alexnet": {"size": "mini"},
    "resnet50": {"size": "mini"},
    "gnmt": {"size": "mini", "layers": 4},
    "awd_lm": {"size": "mini"},
    "s2vt": {"size": "mini"},
    "lstm_lm": {"width": 32},
    "transformer": {"layers": 2, "width": 32},
    "gpt2": {"layers": 2, "width": 32},
    "hf_resnet": {},
}
CLUSTERS = {"3": [1e9], "2x2": [1e8, 1e9]}
# Straight pipelines have the most borders. On 2x2 the search is free to replicate: here with dropout, batch norm, a
# recurrent net and a tied parameter.
ROADS = [(name, "3") for name in MODELS] + [(name, "2x2") for name in ("digits", "resnet50", "lstm_lm", "gpt2")]
STEPS = 10


@pytest.fixture(scope="module")
def profiled():
    """Each model is profiled once, in as few rounds as may be: (ModelFile, Profile) by name."""
    known: dict[str, tuple[ModelFile, Profile]] = {}

    def get(name):
        if name not in known:
            file = ModelFile.load(ModelRef(source=f"pdtool.zoo.{name}", settings=MODELS[name]))
            known[name] = file, measure(file, batch_size=4, threads=1)
        return known[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pdtool.profiler.measure._BUDGET_S", 0.0)
        yield get


@pytest.mark.rows_of_the_day(days=6)
@pytest.mark.parametrize(("name", "topology"), ROADS)
def test_the_whole_road(name, topology, profiled, tmp_path):
    file, profile = profiled(name)
    cluster = make_cluster([int(n) for n in topology.split("x")], CLUSTERS[topology])
    options = PlanOptions(straight=topology != "2x2", simplest=0.0)
    plan = make_plan(profile, "profile.json", cluster, options)
    bundle = generate(plan, profile, file, tmp_path / "bundle")
    assert bundle.proof == "values"
    spec = RunConfig(
        plan=plan,
        bundle=bundle,
        bundle_dir=tmp_path / "bundle",
        model=file.ref,
        out=tmp_path / "run",
        steps=STEPS,
        timeout_s=60.0,
    )
    outcomes = run(spec)

    report = Report.load(tmp_path / "run" / "report.json")
    assert report.minibatches == STEPS
    assert math.isfinite(report.metrics["loss"])
    before = file.build(spec.seed).state_dict()
    trained = {name: tensor for outcome in outcomes for name, tensor in outcome.state.items()}
    assert set(trained) == set(before)
    assert any(not torch.equal(before[name], trained[name]) for name in before)
    for outcome in outcomes:
        assert outcome.peak_versions <= plan.stages[outcome.stage].in_flight
        assert outcome.peak_stashed <= plan.stages[outcome.stage].in_flight
