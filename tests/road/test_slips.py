"""Slips on the command line and in pdtool.toml: what is said of them; and in Python."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path

import numpy as np
import pytest

import pdtool
from pdtool import Plan
from pdtool.api.model_settings import assignments
from pdtool.errors import UsageError
from pdtool.frontend.user_code import parse_settings

PLAN = "plans/model-2.yaml"


@pytest.mark.parametrize(
    ("toml", "code", "says"),
    [
        (b"[run]\nepochs = " + b"9" * 5000, 3, "is not TOML (Exceeds the limit"),
        (b"[run]\nlog-every = 1\nlog_every = 2\n", 3, "run.log_every: is set twice; remove one of them"),
        (b"\xef\xbb\xbf[devices]\njson = true\n", 0, ""),
        (b"[profile]\nset = {}\n", 0, ""),
        (b"[run]\nset = []\n", 0, ""),
    ],
)
def test_a_project_file_is_read_or_its_fault_said(toml, code, says, folder):
    (folder.path / "pdtool.toml").write_bytes(toml)
    assert says in folder.pdtool("devices", code=code).stderr


def test_a_project_file_that_is_a_link_to_nothing_is_not_passed_over(folder):
    (folder.path / "pdtool.toml").symlink_to("nowhere")
    assert "pdtool.toml: cannot be read" in folder.pdtool("devices", code=3).stderr


@pytest.mark.parametrize(
    ("toml", "typed"),
    [
        ('replicas = "1-1"', "--straight --topology 2"),
        ("samples-per-update = 16", "--topology 2 --schedule gpipe --microbatches 2"),
        ('microbatches = 4\nschedule = "gpipe"', "--topology 2 --samples-per-update 64"),
        ('cluster = "c.yaml"', "--topology 2"),
        ("microbatches = 4", "--topology 2 --schedule 1f1b"),
    ],
)
def test_what_is_typed_overrides_what_excludes_it(road, toml, typed):
    """Once: `--cluster Sentinel.UNSET cannot be combined`, or a traceback."""
    road.write("pdtool.toml", f"[partition]\n{toml}\n")
    profile = json.loads(Path("profiles/model.json").read_text())["batch_size"]
    road.pdtool("partition", "profiles/model.json", *typed.replace("64", str(4 * profile)).split(), "-o", "x.yaml")


def test_a_schedule_that_is_typed_overrides_what_it_excludes(road):
    road.write("pdtool.toml", '[run]\nschedule = "gpipe"\nmicrobatches = 4\n')
    road.pdtool("run", PLAN, "--schedule", "1f1b", "--update-every", "2", "--dry-run")


def test_a_folder_that_was_removed_is_said(folder, monkeypatch):
    """Once: `the output failed`, or the end of the process inside torch."""
    (folder.path / "gone").mkdir()
    monkeypatch.chdir(folder.path / "gone")
    (folder.path / "gone").rmdir()
    error = folder.pdtool("profile", "model.py", code=2).stderr
    assert error == "error: the current folder cannot be read (No such file or directory); go to one that exists\n"


def test_a_value_of_a_project_file_that_is_refused_is_said_to_be_of_it(folder):
    """Nobody has typed --epochs."""
    folder.write("pdtool.toml", "[run]\nepochs = 2.5\nset = ['width']\n")
    error = folder.pdtool("run", "plan.yaml", code=2).stderr
    assert "invalid value for '--epochs': '2.5' is not a whole number" in error
    assert "pdtool.toml gives run these options: epochs = '2.5'" in error


def test_a_name_in_capitals_suggests_the_same_name(folder):
    """Once: `did you mean v100?`."""
    assert "did you mean h100?" in folder.pdtool("devices", "H100", code=2).stderr


def test_what_init_says_can_be_typed(folder):
    assert "next: cd 'my model' && pdtool train model.py" in folder.pdtool("init", "my model").stderr


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pdtool.partition("profiles/model.json", topology="2", microbatches=2.7), "microbatches=2.7 is not"),
        (lambda: pdtool.run(PLAN, epochs=True), "epochs=True is not a whole number"),
        (lambda: pdtool.simulate(PLAN, minibatches=-1), "minibatches=-1: "),
        (lambda: pdtool.simulate(PLAN, schedule="1f1"), "schedule='1f1': "),
        (lambda: pdtool.simulate(PLAN, against=["gpip"]), "did you mean gpipe?"),
        (lambda: pdtool.simulate(PLAN, bandwidths=[float("nan")]), "bandwidth nan is not a rate"),
        (lambda: pdtool.simulate(PLAN, bandwidths="1GB/s"), "bandwidth 1GB/s is not a rate"),
        (lambda: pdtool.simulate(PLAN, bandwidths=None), "bandwidth None is not a rate"),
        (lambda: pdtool.simulate(PLAN, bandwidths=np.int64(-1)), "bandwidth -1 is not a rate"),
        (lambda: pdtool.simulate(PLAN, against=None), "against=None is not a list of strategies"),
        (lambda: pdtool.emulate(PLAN, against=None), "against=None is not a list of strategies"),
        (lambda: pdtool.emulate(PLAN, against=["gpipe", 1]), "against=['gpipe', 1] is not a list of strategies"),
        (lambda: pdtool.run(PLAN, settings={"width": None}), "setting width=None is not a str, number or bool"),
        (lambda: pdtool.run(PLAN, settings={"width=8": 2}), "'width=8' is not the name of a setting"),
        (lambda: pdtool.run(PLAN, settings={3: 8}), "3 is not the name of a setting"),
        (lambda: pdtool.run(PLAN, settings={"width": np.float64("nan")}), "width=np.float64(nan) is not a str, number"),
        (lambda: pdtool.run(PLAN, settings=["width=8"]), "is not a dict of names and values"),
        (lambda: pdtool.run(PLAN, precision=["bf16"]), "precision=['bf16']: ['bf16'] is not one of"),
        (lambda: pdtool.run(PLAN, trust="yes"), "trust='yes' is not True or False"),
        (lambda: pdtool.run(PLAN, timeout=b"60s"), "timeout=b'60s' is not a string"),
        (lambda: pdtool.run(PLAN, output=""), "a path is empty"),
        (lambda: pdtool.partition("profiles/model.json", topology=(2, 2)), "topology=(2, 2) is not a string; pass one"),
        (lambda: pdtool.codegen(PLAN, model=Path("nowhere.py")), "nowhere.py"),
        (lambda: pdtool.simulate(PLAN, bandwidths=["1Gbit/s"]), "bandwidth 1Gbit/s is not a rate"),
        (lambda: pdtool.emulate(PLAN, scale=10**400), "is not in the range 1<=x<="),
        (lambda: pdtool.report(PLAN, output="-"), "only on the command line"),
        (lambda: pdtool.report(), "no plan or run is named"),
    ],
)
def test_a_wrong_value_in_python_is_named(call, says, road):
    """Once: 2.7 was read as 2, and an unknown schedule a KeyError."""
    with pytest.raises(UsageError) as caught:
        call()
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: pdtool.check(None), "a plan or its path is needed, not a NoneType"),
        (lambda: pdtool.profile(5), "a path is needed, not an int"),
        (lambda: pdtool.partition(None, topology="2"), "a path is needed, not a NoneType"),
        (lambda: pdtool.partition(Plan.load(PLAN), topology="2"), "a path is needed, not a Plan"),
        (lambda: pdtool.partition("p.json", topology="2", cost="pipedream"), "'cost'; did you mean cost_model?"),
        (lambda: pdtool.partition("p.json", global_batch_size=64), "size'; did you mean samples_per_update?"),
        (lambda: pdtool.run(PLAN, dry_run=True), "has no option 'dry_run'"),
        (lambda: pdtool.run(PLAN, output=["runs/a"]), "a path is needed, not a list"),
        (lambda: pdtool.export(None), "a path is needed, not a NoneType"),
    ],
)
def test_what_is_no_plan_or_no_option_in_python_is_a_type_error(call, says, road):
    """Once: `dry_run=True` trained."""
    with pytest.raises(TypeError, match=says):
        call()


@pytest.mark.parametrize("value", ["8", "true", "1e3", "'q'", "x=y", "a\nb", 8, 0.5, True])
def test_a_setting_in_python_keeps_its_type(value):
    read = parse_settings(assignments({"name": value}))["name"]
    assert (read, type(read)) == (value, type(value))


def test_one_rival_in_python_may_be_a_text(road):
    one, several = (pdtool.simulate(PLAN, against=against).comparison for against in ("gpipe", ["gpipe"]))
    assert one == several


class Kind(str, Enum):  # noqa: UP042
    """A text, as argparse and configuration libraries give them."""

    TALL = "tall"


@pytest.mark.parametrize(
    ("value", "plain"), [(np.float64(0.01), 0.01), (np.int64(8), 8), (np.str_("8"), "8"), (Kind.TALL, "tall")]
)
def test_a_setting_of_numpy_or_an_enum_is_a_plain_one(value, plain):
    """A learning rate of np.logspace was the text "np.float64(0.01)", and np.int64(8) was no number."""
    read = parse_settings(assignments({"name": value}))["name"]
    assert (read, type(read)) == (plain, type(plain))
