"""pdtool in Python: the functions of the commands, and that importing pdtool costs nothing."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
import runpy
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest
import samples
import torch
from conftest import NET

import pdtool
from pdtool.artifacts.bundle import Bundle
from pdtool.artifacts.cluster import ClusterFile
from pdtool.artifacts.device import Devices
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.profile import Profile
from pdtool.artifacts.report import Emulation, Report
from pdtool.artifacts.run_dir import CheckpointManifest, RunState
from pdtool.errors import ArtifactError, ModelError, NoPlanError, PdtoolError, StaleError, UsageError

DOCS = Path(__file__).parents[2] / "docs" / "python.md"
FUNCTIONS = ("profile", "partition", "simulate", "check", "codegen", "run", "emulate", "show", "report", "export")
ARTIFACTS = (Bundle, CheckpointManifest, ClusterFile, Devices, Emulation, Plan, Profile, Report, RunState)


def test_importing_pdtool_loads_nothing():
    code = "import sys, pdtool; print([m for m in ('torch', 'click', 'pydantic', 'pdtool.api') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_function_is_of_the_package_and_documented(name):
    function = getattr(pdtool, name)
    assert inspect.isfunction(function)
    assert function.__module__.startswith("pdtool.api.")
    assert name in dir(pdtool)
    documented = inspect.getdoc(function)
    assert "Args:" in documented
    assert "Raises:" in documented
    for parameter in inspect.signature(function).parameters:
        assert f"    {parameter}: " in documented, f"{name}() does not say what {parameter} is"


def test_the_package_lists_its_functions_and_the_artifacts_and_is_no_function_itself():
    assert set(dir(pdtool)) == {*FUNCTIONS, *(kind.__name__ for kind in ARTIFACTS), "PdtoolError", "__version__"}
    assert pdtool.PdtoolError is PdtoolError
    assert all(getattr(pdtool, kind.__name__) is kind for kind in ARTIFACTS)
    assert not any(callable(module) for name, module in sys.modules.items() if name.partition(".")[0] == "pdtool")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = pdtool.nothing


def test_from_model_to_report(folder, capsys):
    from conftest import NET

    folder.write("model.py", NET)
    profile = pdtool.profile("model.py", batch_size=8, threads=1, settings={"width": 6})
    assert isinstance(profile, Profile)
    assert profile == Profile.load("profiles/model.json")
    assert profile.model.settings == {"width": 6}
    plan = pdtool.partition(profile, topology="2", strategy="straight", bandwidth="1GB/s", simplest="0%")
    assert isinstance(plan, Plan)
    assert plan == Plan.load("plans/model-2.yaml")
    assert plan.profile == "profiles/model.json", "the file that holds this profile, not another copy"
    assert "".join(map(str, (plan, profile))) == (
        "Plan(name='model-2', config='1-1', schedule='1f1b', batch_size=8)Profile(name='model', batch_size=8)"
    )
    simulation = pdtool.simulate(plan, against=["gpipe"], bandwidths=[1e8, 1e9])
    assert simulation.result.time_per_minibatch_s == pytest.approx(plan.predicted.simulated_s)
    assert [point.bandwidth_bytes_per_s for point in simulation.sweep] == [1e8, 1e9]
    assert len(simulation.comparison.plans) == 2
    assert pickle.loads(pickle.dumps(simulation)) == copy.deepcopy(simulation) == simulation
    assert len(repr(simulation)) < 3000
    assert all(finding.holds is not False for finding in pdtool.check(plan))
    assert isinstance(pdtool.codegen(plan), Bundle)
    assert [finding.holds for finding in pdtool.check("plans/model-2.yaml", fresh=True)] == [True] * 4
    report = pdtool.run(plan, steps=2, seed=3, timeout="60s", schedule="1f1b-flush")
    assert isinstance(report, Report)
    assert report == Report.load("runs/model-2/report.json")
    assert pdtool.report(plan_path := "plans/model-2.yaml", "runs/model-2", output="page.html") == Path("page.html")
    assert plan_path in Path("page.html").read_text()
    weights = torch.load(pdtool.export("runs/model-2", "model.pt"), weights_only=True)
    assert weights["first.weight"].shape == (6, 4)
    assert capsys.readouterr().out == "", "what it has to say goes to stderr"


def test_a_notebook_gets_the_tables_of_show_and_a_line_where_it_needs_text(capsys):
    """Once, a plan filled three pages."""
    hostile = "<script>[bold]"
    kinds = (samples.profile(), samples.plan(), samples.bundle(), samples.report(), samples.cluster())
    for artifact in kinds:
        artifact = artifact.model_copy(update={"plan" if isinstance(artifact, Report) else "name": hostile})
        assert repr(artifact) == str(artifact)
        assert hostile in repr(artifact)
        assert len(repr(artifact)) < 120
        pdtool.show(artifact)
        printed, html = capsys.readouterr().out, artifact._repr_html_()
        assert hostile in printed
        assert re.fullmatch(r"(?s)<pre[^<]*>.*</pre>", html)
        assert "<script" not in html
        told = unescape(re.sub(r"<[^>]*>", "", html))
        assert told.splitlines()[0].rstrip() == printed.splitlines()[0]


def test_show_takes_what_the_command_takes(road, capsys):
    for what in ("plans/model-2.yaml", Path("profiles/model.json")):
        pdtool.show(what)
        assert capsys.readouterr().out == road.pdtool("show", str(what)).stdout
    with pytest.raises(ArtifactError, match=r"nothing\.yaml"):
        pdtool.show("nothing.yaml")
    for function in (pdtool.show, pdtool.run):
        with pytest.raises(TypeError, match="a path is needed, not an int"):
            function(3)


def test_errors_are_those_of_the_commands(road):
    with pytest.raises(ModelError, match="broken"):
        pdtool.profile(road.write("broken.py", "raise ValueError('broken')"))
    with pytest.raises(UsageError, match="bandwidth '10' is not"):
        pdtool.partition("profiles/model.json", topology="2", bandwidth="10")
    with pytest.raises(UsageError, match=r"strategy='fastest': .*is not one of"):
        pdtool.partition("profiles/model.json", topology="2", strategy="fastest")
    plan = pdtool.Plan.load("plans/model-2.yaml")
    for update, said in ({"wire_dtype": "fp7"}, "wire_dtype: "), ({"schedule": "x"}, "schedule: "):
        with pytest.raises(ArtifactError, match=rf"plans/model-2.yaml: {said}"):
            pdtool.simulate(plan.model_copy(update=update))
    profile = Profile.load("profiles/model.json")
    with pytest.raises(ArtifactError, match=r"^model: batch_size: it must be 1 or more \(got 0\)$"):
        pdtool.partition(profile.model_copy(update={"batch_size": 0}), topology="2")
    assert [*Path("profiles").iterdir()] == [Path("profiles/model.json")], "a wrong profile is not written"
    for wrong in (5, [5]):
        with pytest.raises(UsageError, match=r"against=\[?5\]? is not a list of strategies; write against=\['gpipe'\]"):
            pdtool.simulate(plan, against=wrong)
    with pytest.raises(UsageError, match="codegen writes a folder, not a file"):
        pdtool.codegen(plan, output="-")
    with pytest.raises(NoPlanError):
        pdtool.partition("profiles/model.json", topology="2", memory="1B", output="none.yaml")
    with pytest.raises(TypeError, match=r"partition\(\) has no option 'worker'; did you mean workers"):
        pdtool.partition("profiles/model.json", topology="2", worker=1)
    with pytest.raises(ArtifactError, match="is a profile, not a plan"):
        pdtool.simulate("profiles/model.json")
    profile = Profile.load("profiles/model.json")
    profile.model_copy(update={"batch_size": 9}).save("profiles/model.json")
    for function in (pdtool.check, pdtool.simulate, pdtool.codegen, pdtool.run):
        with pytest.raises(StaleError, match="has changed since the plan was made"):
            function("plans/model-2.yaml")


@pytest.mark.usefixtures("stages")
def test_a_run_raises_what_its_worker_raised(road):
    """Once, errors with the same exit code arrived as one class: a StaleError was a ScheduleError."""
    folder = road.path / "plans/model-2"
    stage = folder / "stage_1.py"
    written = stage.read_text()
    stage.write_text(f"{written}\n# edited\n")
    Bundle.load(folder / "bundle.yaml").trusting(folder).save(folder / "bundle.yaml")
    with pytest.raises(StaleError, match=r"^rank 1 .*stage_1.py: differs from what codegen writes here") as stale:
        pdtool.run("plans/model-2.yaml", steps=2)
    assert Path(stale.value.path).name == "stage_1.py"
    assert repr(stale.value).startswith("StaleError('rank 1 "), "a log of it says where"
    pdtool.codegen("plans/model-2.yaml")
    only_in_a_worker = "import multiprocessing as m; m.parent_process() and [][0]; return nn.functional"
    road.write("model.py", Path("model.py").read_text().replace("return nn.functional", only_in_a_worker))
    with pytest.raises(ModelError, match=r"^rank 1 .*: loss\(\) raised IndexError"):
        pdtool.run("plans/model-2.yaml", steps=2)


def test_the_example_of_the_documentation_runs(road, capsys):
    text = DOCS.read_text(encoding="utf-8")
    [example] = re.findall(r"```python\n(import pdtool\n.*?)```", text, re.DOTALL)
    (road.path / "plans/model-2.yaml").unlink()
    runpy.run_path(str(road.write("plan_bandwidths.py", example)), run_name="__main__")
    stdout = capsys.readouterr().out
    assert re.search(r"^1-1 [0-9.e-]+ seconds per minibatch$", stdout, re.MULTILINE)
    assert re.search(r"^[0-9.]+ samples/s$", stdout, re.MULTILINE)


def test_plans_of_one_name_in_two_files_have_stage_files_of_their_own(folder):
    """Both wrote into the folder of the plan's name, and the second replaced the first's."""
    folder.write("model.py", NET)
    profile = pdtool.profile("model.py", batch_size=8, threads=1, device="cpu")
    asked = {"topology": "2", "strategy": "straight", "bandwidth": "1GB/s", "simplest": "0%"}
    plans = [pdtool.partition(profile, output=f"plans/{name}.yaml", **asked) for name in "ab"]
    assert plans[0] == plans[1] == Plan.load("plans/a.yaml")
    for plan, other in zip(plans, reversed(plans), strict=True):
        pdtool.codegen(plan)
        assert Path(plan.path).with_suffix("").joinpath("bundle.yaml").is_file()
        assert plan.path != other.path
    assert not Path("plans/model-2").exists()
    loaded = Plan.load("plans/b.yaml")
    assert pdtool.check(loaded, fresh=True)[-1].holds
