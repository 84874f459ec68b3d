"""`pdtool diff`: what differs between two plans, profiles or runs, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import samples
from graphs import chain, with_nodes

from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.plan import Plan, PlanOptions
from pdtool.cli.commands.diff import FieldDifference
from pdtool.planner.choice.make_plan import make_plan


@pytest.fixture
def plans(folder):
    """profiles/net.json, and a.yaml and b.yaml, its straight pipelines on two and three workers."""
    net = chain([0.4, 0.3, 0.3, 0.2, 0.1], parameters=1000, crossing=50)
    net.save("profiles/net.json")
    for name, workers in (("a", 2), ("b", 3)):
        made = make_plan(net, "profiles/net.json", make_cluster((workers,), (3000.0,)), PlanOptions(straight=True))
        made.save(f"{name}.yaml")
    return folder


def rows(text):
    """The table's rows: label -> (A, B, change)."""
    lines = [line.split("  ") for line in text.splitlines()]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return {line[0]: tuple(line[1:]) for line in cells if len(line) > 2}


def test_a_figures_name_is_told_without_its_unit():
    path = ("plans", 0, "throughput_samples_per_s")
    assert FieldDifference(path=path, first=1.0, second=2.0).label == "plans[0] throughput"


def test_equal_plans_do_not_differ(plans):
    result = plans.pdtool("diff", "a.yaml", "a.yaml", "--exit-code")
    assert result.stdout.splitlines()[-1] == "no difference"
    renamed = Plan.load("a.yaml").model_copy(update={"name": "another", "why": None})
    renamed.save("c.yaml")
    plans.pdtool("diff", "a.yaml", "c.yaml", "--exit-code")


def test_two_plans_for_people(plans):
    result = plans.pdtool("diff", "a.yaml", "b.yaml")
    assert "A: a.yaml: 1-1 on 2, schedule 1f1b" in result.stdout
    assert "B: b.yaml: 1-1-1 on 3, schedule 1f1b" in result.stdout
    found = rows(result.stdout)
    assert found["level 0 size"] == ("2", "3")
    assert found["stage 0 in flight"] == ("2", "3")
    assert found["stage 2 workers"] == ("–", "2")
    assert found["time, predicted"] == ("700 ms", "600 ms", "-14.3%")
    assert "stage 2 recompute" not in found, "it says nothing of a stage that only one plan has"
    assert "stage 0 replicas" not in found
    a, b = (Plan.load(f"{name}.yaml") for name in "ab")
    stages = [{name: s for s, stage in enumerate(plan.stages) for name in stage.nodes} for plan in (a, b)]
    moved = {name for name in stages[0] if stages[0][name] != stages[1][name]}
    assert moved
    said = [line.partition(" of B: ")[2].split(", ") for line in result.stdout.splitlines() if " of B: " in line]
    assert {name for names in said for name in names} == moved
    assert plans.pdtool("diff", "a.yaml", "b.yaml", "--exit-code", code=1).stdout == result.stdout


def test_as_json(plans):
    data = json.loads(plans.pdtool("diff", "a.yaml", "b.yaml", "--json").stdout)
    assert (data["kind"], data["a"], data["b"], data["is_same"]) == ("plan", "a.yaml", "b.yaml", False)
    by_field = {one["field"]: one for one in data["differences"]}
    a, b = (Plan.load(f"{name}.yaml").predicted.bottleneck_s for name in "ab")
    assert by_field["predicted.bottleneck_s"] == {
        "field": "predicted.bottleneck_s",
        "first": a,
        "second": b,
        "change": pytest.approx(b / a - 1),
    }
    assert data["moved"]
    assert json.loads(plans.pdtool("diff", "a.yaml", "a.yaml", "--json").stdout)["differences"] == []


def test_a_plan_that_names_no_wire_dtype_has_fp32(plans):
    Plan.load("a.yaml").model_copy(update={"wire_dtype": "fp16"}).save("c.yaml")
    found = rows(plans.pdtool("diff", "a.yaml", "c.yaml").stdout)
    assert found["wire dtype"] == ("fp32", "fp16")


def test_an_edited_plan_is_compared_as_it_is_now(plans):
    text = Path("a.yaml").read_text()
    Path("c.yaml").write_text(text.replace("in_flight: 2", "in_flight: 3"))
    found = rows(plans.pdtool("diff", "a.yaml", "c.yaml").stdout)
    assert found["stage 0 in flight"] == ("2", "3")
    assert {"stage 0 memory", "stage 0 in flight"} <= found.keys()
    Path("c.yaml").write_text(text.replace("nodes: [x", "nodes: [y"))
    assert "names 'y', which the profile does not have" in plans.pdtool("diff", "a.yaml", "c.yaml", code=3).stderr


def test_a_time_that_differs_much_is_not_hidden_by_bytes_that_differ_little(folder):
    """All times were at the end, because a second is less than a byte."""
    net = chain([1e-3] * 20, parameters=1000, crossing=1000)
    net.save("first.json")
    nodes = [node.model_copy(update={"output_bytes": node.output_bytes + 500}) for node in net.nodes]
    nodes[7] = nodes[7].model_copy(update={"forward_s": 2 * nodes[7].forward_s})
    with_nodes(net, nodes).save("second.json")
    found = rows(folder.pdtool("diff", "first.json", "second.json").stdout)
    assert next(label for label in found if label.startswith("operators")) == f"operators {nodes[7].name} forward"
    nodes[3] = nodes[3].model_copy(update={"exact_bytes": 500})  # a file leaves it out where it is 0
    with_nodes(net, nodes).save("second.json")
    assert (
        rows(folder.pdtool("diff", "first.json", "second.json").stdout)[f"operators {nodes[3].name} exact"][0] == "0 B"
    )


def test_profiles_runs_and_what_cannot_be_compared(plans):
    samples.profile().save("first.json")
    slower = samples.profile()
    nodes = [n.model_copy(update={"forward_s": 2 * n.forward_s}) if n.name == "a" else n for n in slower.nodes]
    slower.model_copy(update={"nodes": tuple(nodes), "batch_size": 16}).save("second.json")
    found = rows(plans.pdtool("diff", "first.json", "second.json").stdout)
    assert found["batch size"] == ("8", "16")
    assert found["operators a forward"][-1] == "+100.0%"
    assert len(found) == 2 + 1, found
    samples.report().save("report.json")
    samples.report().model_copy(update={"metrics": {"loss": 0.5, "accuracy": 0.5}}).save("other.json")
    for value in (1.0, 2.0):  # a name that is left out elsewhere
        samples.report().model_copy(update={"metrics": {"proof": value}}).save(f"proof{value}.json")
    assert "metrics proof" in plans.pdtool("diff", "proof1.0.json", "proof2.0.json").stdout
    assert rows(plans.pdtool("diff", "report.json", "other.json").stdout)["metrics loss"] == ("0.25", "0.5", "+100.0%")
    stderr = plans.pdtool("diff", "a.yaml", "first.json", code=2).stderr
    assert "a.yaml is a plan and first.json a profile; name two files of the same kind" in stderr
    twice = plans.pdtool("diff", "-", "-", code=2, stdin=Path("a.yaml").read_text())
    assert "A and B would both come from stdin" in twice.stderr
