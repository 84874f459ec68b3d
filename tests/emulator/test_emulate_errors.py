"""Emulation: what cannot be emulated is refused with the reason, and what is said when something goes wrong."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import samples
from conftest import NET
from graphs import chain, plan_of
from namespaces import namespaces
from test_emulate import net_and_plan

import pdtool
from pdtool.api import emulating
from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.device import Device
from pdtool.artifacts.profile import Profile, SharedParameter
from pdtool.cli.run_view import emulation_view
from pdtool.emulator import pretend_cluster as linux
from pdtool.emulator.emulation import check_minibatches, choose_scaling, minibatches_to_steady_state, sleeping_config
from pdtool.emulator.pretend_cluster import PretendCluster
from pdtool.emulator.sleeping_model import Scaling, write_sleeping_model
from pdtool.errors import ArtifactError, PdtoolError, UsageError
from pdtool.options.simulate_options import EmulateOptions
from pdtool.planner.choice.plan_figures import refresh
from pdtool.schedule.shape import steady_minibatches

STREAM = """
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(made("train"))

made = dataset

def dataset(split):
    return Stream() if split == "train" else made(split)
"""


def tied_net() -> Profile:
    """A chain whose first and last operator share their parameters."""
    net = chain([0.006] * 2, parameters=8_000, crossing=40_000)
    fields = {name: getattr(net, name) for name in Profile.model_fields}
    return Profile(**fields | {"shared": (SharedParameter(name="w", bytes=8_000, nodes=("a0", "a1")),)})


@pytest.mark.parametrize(("name", "value"), [("seed", 3), ("model", "model.py")])
def test_options_of_training_are_refused_where_workers_sleep(name, value):
    with pytest.raises(UsageError, match=f"--{name} has no effect: sleeping workers train no model; add --compute "):
        pdtool.emulate("plan.yaml", **{name: value})


def test_a_plan_that_takes_no_time_is_refused():
    net = chain([0.0, 0.0])
    plan = refresh(plan_of(net, [["x", "a0"], ["a1"]], [[0], [1]], make_cluster((2,), (1e6,))), net)
    with pytest.raises(ArtifactError, match="1-1 takes 0 per minibatch, which is too short to emulate; use a "):
        choose_scaling(plan, net)


def test_minibatches_are_counted_with_the_schedule_of_the_workers_whose_tied_stages_update_together(tmp_path):
    """Stages of three and four replicas that share a parameter update after 12 minibatches, both."""
    net = tied_net()
    workers = [[0, 1, 2], [3, 4, 5, 6]]
    plan = refresh(plan_of(net, [["x", "a0"], ["a1"]], workers, make_cluster((7,), (1e6,))), net)
    with pytest.raises(UsageError, match="--minibatches 30 is too few for the steady state of 3-4; pass 60 or more"):
        check_minibatches(plan, net, 30)
    assert "only 12 of 3-4 are timed, which may be too fast" in check_minibatches(plan, net, 36)
    assert not check_minibatches(plan, net, 60)
    config = sleeping_config(plan, net, tmp_path, Scaling(), EmulateOptions())
    assert config.shape.update_every == (12, 12)
    assert steady_minibatches(minibatches_to_steady_state(plan, net), config.shape)


@pytest.mark.parametrize("scale", [1, 2])
def test_messages_too_small_for_any_scale_are_told_as_that(scale, tmp_path):
    """It was `pass --scale 1 or less`, also to one who had passed none."""
    net = chain([0.006] * 2, parameters=8_000, crossing=512)
    plan = refresh(plan_of(net, [["x", "a0"], ["a1"]], [[0], [1]], make_cluster((2,), (1e6,))), net)
    with pytest.raises(
        UsageError, match="have at most 512 bytes, too few for an emulated link to delay; simulate the plan"
    ):
        sleeping_config(plan, net, tmp_path, Scaling(scale=scale), EmulateOptions())


def test_the_report_of_an_emulation_compares_with_what_is_predicted_of_it(tmp_path):
    net, plan = net_and_plan()
    sleeping, _ = write_sleeping_model(tmp_path, plan, net, Scaling(scale=4, slowdown=3), minibatches=10)
    slept = sleeping.predicted
    assert slept.simulated_s == pytest.approx(3 * plan.predicted.simulated_s)
    assert slept.compute_s == pytest.approx([3 * time_s for time_s in plan.predicted.compute_s])
    assert slept.traffic_bytes == round(plan.predicted.traffic_bytes / 4)
    assert slept.throughput_samples_per_s == pytest.approx(1 / slept.simulated_s), "a minibatch is one sample"


def test_a_user_namespace_that_cannot_be_used_is_told(monkeypatch):
    """Where the kernel lets a process enter one, but not map its user: AppArmor of Ubuntu does so."""

    def denied(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(linux, "_unshare", lambda flags: 0 if flags & linux._CLONE_NEWUSER else errno.EPERM)
    monkeypatch.setattr(Path, "write_text", denied)
    with pytest.raises(
        PdtoolError,
        match=r"is not allowed to make any \(Permission denied: /proc/self/setgroups\); start pdtool as root",
    ):
        linux.enter_own_network()


def fake_tool(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str, script: str) -> None:
    tool = folder / name
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")


@pytest.mark.parametrize(("tool", "module"), [("tc", "module sch_tbf"), ("ip", "modules veth and bridge")])
def test_links_that_the_kernel_cannot_make_are_told_with_what_is_missing(tmp_path, monkeypatch, tool, module):
    fake_tool(tmp_path, monkeypatch, tool, "echo 'Error: Specified qdisc kind is unknown.' >&2; exit 2")
    with pytest.raises(PdtoolError, match=rf"`{tool}` could not .* kind is unknown.*{module}; .*pdtool simulate"):
        linux.configure(tool, ["anything"])


@pytest.mark.parametrize(("bandwidth", "said"), [(1e15, "a link of 1 PB/s cannot"), (1.0, "a link of 1 B/s cannot")])
def test_links_that_no_tool_can_make_are_refused_with_the_bounds(bandwidth, said):
    pretend = PretendCluster(make_cluster((2, 2), (bandwidth, 1e6)))
    with pytest.raises(PdtoolError, match=rf"{said} be emulated; .* between 1 kB/s and 1 TB/s, or simulate the plan"):
        pretend._shape("anything", 0)
    assert "rate 8160000bit" in pretend._shape("anything", 1)


def test_a_tool_that_hangs_is_not_waited_for(tmp_path, monkeypatch):
    fake_tool(tmp_path, monkeypatch, "tc", "exec sleep 60")
    monkeypatch.setattr(linux, "_TIMEOUT_S", 0.1)
    with pytest.raises(PdtoolError, match=r"`tc -batch` did not end within 0\.1 s"):
        linux.configure("tc", ["anything"])


def test_workers_that_shared_cores_have_no_error_of_prediction():
    emulation = samples.emulation().model_copy(update={"compute": "real", "cores": 1})
    lines = [str(line) for line in emulation_view(emulation)]
    workers = max(plan.workers for plan in emulation.plans)
    assert f"{workers} workers shared 1 core. With one device each they would be faster" in lines
    assert not any("shared" in str(line) for line in emulation_view(samples.emulation())), "sleeping takes no core"


@pytest.mark.parametrize(("compute", "warned"), [("real", True), ("sleep", False)])
def test_simulated_times_of_another_device_than_this_are_told(compute, warned, capsys):
    profile = samples.profile().model_copy(update={"device": Device(name="V100", kind="estimated")})
    emulating._warn_of_another_device(profile, compute)
    assert ("but the model runs on this CPU" in capsys.readouterr().err) is warned


class TestCommand:
    """`pdtool emulate` in a folder with a plan."""

    @pytest.fixture(autouse=True)
    def _files(self, folder):
        net, plan = net_and_plan()
        net.save("net.json")
        plan.model_copy(update={"digests": {"net.json": net.content_sha256}}).save("net.yaml")

    def test_options_that_do_not_go_together_are_refused_before_anything_is_planned(self, folder, monkeypatch):
        monkeypatch.setattr("pdtool.api.emulating.rival_plans", None)
        assert "do not learn" in folder.pdtool("emulate", "net.yaml", "--target", "loss<1", code=2).stderr
        for options, error in (
            (("--target", "best"), "target 'best' is not METRIC=NUMBER"),
            (("--slowdown", "2"), "so --scale and --slowdown do not apply"),
        ):
            assert error in folder.pdtool("emulate", "net.yaml", "--compute", "real", *options, code=2).stderr
        assert "writes a folder, not a file" in folder.pdtool("emulate", "net.yaml", "-o", "-", code=2).stderr

    def test_a_folder_that_another_emulation_writes_is_refused(self, folder):
        """While its process lives: nothing has to be tidied up after one that was killed."""
        Path("out").mkdir()
        hold = "import fcntl; f = open('out/.lock', 'w'); fcntl.lockf(f, fcntl.LOCK_EX); print(1, flush=True); input()"
        with subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
            other.stdout.readline()
            said = folder.pdtool("emulate", "net.yaml", "--against", "", "-o", "out", code=2).stderr
            other.communicate(b"\n")
        assert "out is in use by a run" in said
        assert not Path("out/this-plan").exists()


@namespaces
def test_a_model_is_trained_until_its_target_and_one_that_misses_it_ends_with_6(folder):
    folder.write("net.py", NET)
    folder.write("stream.py", NET + STREAM)
    folder.pdtool("profile", "net.py", "--batch-size", "16", "--threads", "1")
    folder.pdtool("partition", "--topology", "2", "--straight")
    train = ("emulate", "--compute", "real", "--against", "", "-o", "out", "--target")
    refused = folder.pdtool(*train, "accuracy=0.9", "--model", "stream.py", code=2).stderr
    assert "an IterableDataset without a length" in refused
    assert "give it with --minibatches" in refused
    missed = folder.pdtool(*train, "accuracy=1.1", "--epochs", "3", "--json", code=6)
    assert "accuracy=1.1 was not reached by this plan in 3 epochs; pass a larger --epochs" in missed.stderr
    assert "this plan: accuracy=1.1 not reached in 3 epochs" in missed.stderr
    assert "epochs of 3 minibatches have no steady state" in missed.stderr
    [plan] = json.loads(missed.stdout)["plans"]
    assert (plan["config"], plan["epochs"], plan["minibatches"], plan["target_reached"]) == ("1-1", 3, 3, False)
    assert plan["training_s"] > 0
    assert "but the model runs on this CPU" not in missed.stderr, "its profile was measured here"
