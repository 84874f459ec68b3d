"""Emulation: what sleeps is what the profile says, links have their speeds, and nothing is left behind."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import samples
from graphs import chain, plan_of
from namespaces import namespaces

from pdtool.api import emulating
from pdtool.artifacts.cluster import make_cluster
from pdtool.artifacts.profile import Profile, SharedParameter
from pdtool.artifacts.report import Emulation
from pdtool.cli.run_view import emulation_view
from pdtool.emulator import emulation
from pdtool.emulator.emulation import choose_scaling, without_latency
from pdtool.emulator.pretend_cluster import enter_own_network
from pdtool.emulator.sleeping_model import Scaling, write_sleeping_model
from pdtool.errors import PdtoolError
from pdtool.host import usable_cores
from pdtool.options.simulate_options import EmulateOptions
from pdtool.planner.choice.plan_figures import refresh
from pdtool.runtime.status import process_state

_CLUSTER = make_cluster((2, 2), (2e6, 2e7))


def net_and_plan(stages=(["x", "a0", "a1"], ["a2", "a3"]), workers=((0, 1, 2), (3,)), **settings):
    """Four operators of 6 ms, 40 KB over each border, and a plan for two servers of two workers."""
    net = chain([0.006] * 4, parameters=20_000, crossing=40_000)
    plan = plan_of(net, stages, workers, _CLUSTER, **settings)
    return net, refresh(plan, net)


def loaded(path: Path):
    """A generated file, imported."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    code = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(code)
    return code


def test_what_sleeps_has_the_times_and_bytes_of_the_profile(tmp_path):
    net, plan = net_and_plan()
    _, bundle = write_sleeping_model(tmp_path, plan, net, Scaling(scale=4, slowdown=3), minibatches=10)
    for s, nodes in enumerate(plan.stage_nodes(net)):
        segments = loaded(tmp_path / f"stage_{s}.py").__dict__[f"Stage{s}"].SEGMENTS.values()
        held = [net.by_name[name] for name in nodes]
        for field in ("forward_s", "backward_s", "update_s"):
            expected = 3 * sum(getattr(node, field) for node in held)
            assert sum(getattr(segment, field) for segment in segments) == pytest.approx(expected)
        assert 4 * sum(segment.floats for segment in segments) == pytest.approx(
            sum(node.parameter_bytes for node in held) / 4, abs=4 * len(held)
        )
    [_, crossing] = bundle.tensors
    assert (crossing.producer, crossing.consumers, crossing.gradient) == (0, (1,), True)
    assert 4 * crossing.sizes(1)[1] == 40_000 / 4


def test_a_skip_is_sent_to_every_stage_that_takes_it_and_tied_weights_stay_tied(tmp_path):
    net = chain([0.006] * 3, parameters=20_000, crossing=40_000)
    skipping = net.nodes[3].model_copy(update={"inputs": ("a0", "a1")})
    shared = (SharedParameter(name="w", bytes=8_000, nodes=("a0", "a2")),)
    fields = {name: getattr(net, name) for name in type(net).model_fields}
    net = Profile(**fields | {"nodes": (*net.nodes[:3], skipping), "shared": shared})
    plan = plan_of(net, [["x", "a0"], ["a1"], ["a2"]], [[0], [1], [2]], _CLUSTER)
    _, bundle = write_sleeping_model(tmp_path, plan, net, Scaling(), minibatches=10)
    assert [tensor.consumers for tensor in bundle.tensors] == [(0,), (1, 2), (2,)]
    [tied] = bundle.tied
    assert tied.stages == (0, 2)
    model = loaded(tmp_path / "model.py").model()
    first, last = (model.get_parameter(name) for name in tied.names)
    assert first is last
    assert first.nbytes == 8_000
    assert sum(p.nbytes for p in model.parameters()) == 3 * 20_000 - 8_000


def test_bandwidths_are_divided_by_what_bytes_and_times_are_scaled_with():
    cluster = _CLUSTER.slower(4 * 2.5)
    assert [level.bandwidth_bytes_per_s for level in cluster.levels] == [2e5, 2e6]


def test_a_minibatch_is_slow_enough_to_be_emulated_and_the_cores_can_carry_the_bytes():
    net, plan = net_and_plan()
    scaling = choose_scaling(plan, net)
    assert scaling.slowdown * plan.predicted.simulated_s >= 0.15
    assert choose_scaling(plan, net, scale=7, slowdown=3) == Scaling(scale=7, slowdown=3)
    heavy = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"traffic_bytes": 10**12})})
    assert choose_scaling(heavy, net).scale > 1000
    large = chain([0.006] * 4, parameters=10**10)
    assert choose_scaling(plan, large).scale > 300, "its updates would keep the cores busy"


def test_each_plan_has_the_scale_that_it_needs():
    net, plan = net_and_plan()
    heavy = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"traffic_bytes": 10**12})})
    scalings = emulating._scalings({"this plan": plan, "heavy": heavy}, net, EmulateOptions())
    assert scalings == {"this plan": choose_scaling(plan, net), "heavy": choose_scaling(heavy, net)}
    assert scalings["heavy"].scale > scalings["this plan"].scale


def test_predictions_are_those_of_the_plan_as_it_stands_over_links_without_latency():
    """Pretended links have none; and somebody may have edited the figures."""
    net, plan = net_and_plan()
    slow = make_cluster((2, 2), (2e6, 2e7), latencies=(0.1, 0.1))
    edited = plan.predicted.model_copy(update={"simulated_s": 1e-6})
    emulated = without_latency(plan.model_copy(update={"cluster": slow, "predicted": edited}), net)
    assert emulated.predicted.simulated_s == plan.predicted.simulated_s
    assert emulated.cluster == slow, "it is told that the links had none"


def test_the_time_of_training_is_measured_whatever_the_last_minibatch_holds():
    """A short one counted as a full one: 353 ms of training took 179."""
    report = samples.report()
    found = emulation._emulated("this plan", samples.plan(), report, Scaling(slowdown=2.0))
    longest_s = max(stage.time_s for stage in report.stages)
    assert found.training_s == pytest.approx(report.epochs * report.minibatches * longest_s / 2)
    assert found.throughput_samples_per_s == 2 * report.measured.throughput_samples_per_s
    asleep = report.model_copy(update={"batch_size": 1})  # a sample of a sleeping model stands for a minibatch
    more = emulation._emulated("this plan", samples.plan(), asleep, Scaling(slowdown=2.0)).throughput_samples_per_s
    assert more == samples.plan().batch_size * found.throughput_samples_per_s


def test_scalings_of_ones_own_that_are_too_small_are_told(capsys):
    net, plan = net_and_plan()
    heavy = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"traffic_bytes": 10**12})})

    def warnings(plan, **asked):
        emulating._scalings({"it": plan}, net, EmulateOptions(**asked))
        return capsys.readouterr().err

    assert warnings(heavy) == ""
    assert warnings(plan, slowdown=100.0) == ""
    assert "which the workers' own 2 to 4 ms make much longer" in warnings(plan, slowdown=1.0)
    assert "sending and updating keep the cores busy" in warnings(heavy, scale=2.0, slowdown=100.0)


def test_chunks_of_an_all_reduce_stay_long_beside_their_headers_where_slowing_down_allows_it():
    """An emulation of data parallelism was 12 % too slow: its scale left chunks of one or two packets."""
    net = chain([0.06, 0.06], parameters=10**8)  # two workers send each other half of a bucket of 25 MB in two chunks
    plan = refresh(plan_of(net, [["x", "a0", "a1"]], [[0, 1]], make_cluster((2,), (1e10,))), net)
    busy = plan.model_copy(update={"predicted": plan.predicted.model_copy(update={"traffic_bytes": 2 * 10**9})})
    scaling = choose_scaling(busy, net)
    assert scaling.slowdown * busy.predicted.simulated_s > 0.2, "slower than the shortest minibatch"
    assert 25e6 / 4 / scaling.scale >= 0.9 * 6_000, "two digits of the scale are rounded up"


def test_the_scaling_of_each_plan_is_told_where_they_differ():
    emulation = samples.emulation()
    assert "bytes and bandwidths / 12, times x 1.5" in emulation_view(emulation)
    own, rival = emulation.plans
    differing = emulation.model_copy(update={"plans": (own, rival.model_copy(update={"scale": 3, "slowdown": 20}))})
    lines = list(emulation_view(differing))
    assert "this plan: bytes and bandwidths / 12, times x 1.5" in lines
    assert "data-parallel: bytes and bandwidths / 3, times x 20" in lines


def test_a_rival_that_is_the_plan_is_not_emulated_again(capsys):
    """Two emulations of one plan differ by noise, which would be shown as a gain."""
    _, plan = net_and_plan()
    rival = plan.model_copy(update={"name": "another", "schedule": "gpipe", "weights": "flush"})
    assert emulating._others(plan, {"pipeline": plan.model_copy(), "gpipe": rival}) == {"gpipe": rival}
    assert "pipeline is the same as this plan" in capsys.readouterr().err


@pytest.mark.parametrize(("load", "warned"), [(0.5, False), (1.7, True)])
def test_cores_that_other_programs_use_are_told(load, warned, capsys, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (load * len(usable_cores()), 0, 0))
    emulating._warn_of_busy_cores()
    assert ("other programs keep" in capsys.readouterr().err) is warned


class TestCommand:
    """`pdtool emulate` in a folder with a plan."""

    @pytest.fixture(autouse=True)
    def _files(self, folder, monkeypatch):
        monkeypatch.chdir(folder.path)
        self.net, self.plan = net_and_plan()
        self.net.save("net.json")
        slow = make_cluster((2, 2), (2e6, 2e7), latencies=(0.1, 0.1))
        of_file = {"cluster": slow, "digests": {"net.json": self.net.content_sha256}}
        refresh(self.plan.model_copy(update=of_file), self.net).save("net.yaml")

    @namespaces
    def test_a_plan_and_its_rival_are_emulated_and_can_be_shown(self, folder):
        result = folder.pdtool("emulate", "net.yaml", "--slowdown", "2", "--minibatches", "24", "--json", "-o", "out")
        emulation = Emulation.load("out/emulation.json")
        assert json.loads(result.stdout)["plans"] == json.loads(emulation.dump())["plans"]
        assert [(plan.name, plan.config) for plan in emulation.plans] == [("this plan", "3-1"), ("data-parallel", "4")]
        own, rival = emulation.plans
        assert [(plan.scale, plan.slowdown) for plan in emulation.plans] == [(1, 2), (1, 2)]
        assert own.simulated_s == self.plan.predicted.simulated_s, "over links without latency, as pretended ones are"
        # two of three minibatches go through the link between the servers, three times as slow as computing
        assert own.bottleneck_s >= 0.9 * 2 / 3 * 40_000 / 2e6
        # an activation and its gradient for each minibatch, and the gradients of stage 0 for every third
        assert own.sent_bytes == pytest.approx(2 * 40_000 + 40_000 * 2 * 2 / 3, rel=0.05)
        assert rival.sent_bytes == pytest.approx(2 * 3 * 80_000 / 4, rel=0.05)
        assert "data-parallel" in folder.pdtool("show", "out").stdout

    @pytest.mark.rows_of_the_day(days=2)
    @namespaces
    def test_whatever_ends_it_nothing_is_left(self, folder):
        """Killed at random moments: no process, no namespace and no link of it is there a moment later."""
        before, chance = _links(), random.Random(0)
        command = [sys.executable, "-m", "pdtool", "emulate", "net.yaml", "--minibatches", "10000", "-o"]
        signals = (signal.SIGKILL, signal.SIGINT, signal.SIGTERM)
        processes = [
            subprocess.Popen([*command, number.name], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
            for number in signals
        ]
        started: set[int] = set()
        for number, process in zip(signals, processes, strict=True):
            while not _descendants(process.pid):
                assert process.poll() is None
                time.sleep(0.1)
            time.sleep(chance.uniform(0, 4))
            started |= _descendants(process.pid)
            process.send_signal(number)
            assert process.wait(30) in (-number, 130)
        deadline = time.monotonic() + 20
        while any(map(process_state, started)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert [pid for pid in started if process_state(pid)] == [], "namespaces without names end with these"
        assert _links() == before

    @pytest.mark.rows_of_the_day(days=2)
    @namespaces
    def test_a_worker_that_dies_is_named(self, folder):
        command = [sys.executable, "-m", "pdtool", "emulate", "net.yaml", "--minibatches", "10000", "-o", "out"]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        trained = Path("out/this-plan/.workers/1.status")
        deadline = time.monotonic() + 60
        while b"of epoch" not in (trained.read_bytes() if trained.exists() else b"") and time.monotonic() < deadline:
            time.sleep(0.1)
        os.kill(int.from_bytes(trained.read_bytes()[:4], "little"), signal.SIGKILL)
        _, said = process.communicate(timeout=60)
        assert process.returncode == 5
        assert re.search(r"error: rank 1 \(stage 0, replica 1\) was killed by SIGKILL", said)

    def test_without_iproute2_it_says_so_and_what_to_do_instead(self, folder, monkeypatch):
        monkeypatch.setenv("PATH", "")
        said = folder.pdtool("emulate", "net.yaml", code=1).stderr
        assert "needs ip and tc of iproute2" in said
        assert "pdtool simulate" in said

    def test_what_cannot_be_emulated_is_refused_at_once(self, folder):
        def error(*arguments, code=2):
            return folder.pdtool("emulate", "net.yaml", "-o", "out", *arguments, code=code).stderr

        assert "the largest message between stages has 1" in error("--scale", "400")
        assert "nan is not in the range 1<=x<=1000000" in error("--slowdown", "nan").lower()
        assert "so --scale and --slowdown do not apply" in error("--compute", "real", "--scale", "2")
        assert "cannot reach --target loss<1; add --compute real" in error("--target", "loss<1")
        assert "--against 'gpype' is not a strategy" in error("--against", "gpype")
        assert "is too few for the steady state of" in error("--minibatches", "3")
        assert not Path("out/this-plan").exists(), "nothing was written"
        Path("out/emulation.json").touch()
        assert "out already contains an emulation" in error()

    def test_more_workers_than_the_memory_holds_are_refused(self, folder, monkeypatch):
        monkeypatch.setattr("pdtool.emulator.emulation._WORKER_BYTES", 10**15)
        said = folder.pdtool("emulate", "net.yaml", "-o", "out", code=1).stderr
        assert "4 workers of 3-1 need about" in said


def test_a_process_that_may_not_make_namespaces_is_told(monkeypatch):
    monkeypatch.setattr("pdtool.emulator.pretend_cluster._unshare", lambda flags: 1)
    with pytest.raises(PdtoolError, match=r"but this process is not allowed .*start pdtool as root.*pdtool simulate"):
        enter_own_network()


def _descendants(pid: int) -> set[int]:
    """The processes that a process has started, and those that these have."""
    children: dict[int, set[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(path.read_text(errors="replace").rpartition(")")[2].split()[1])
            children.setdefault(parent, set()).add(int(path.parent.name))
    found, queue = set(), [pid]
    while queue:
        new = children.get(queue.pop(), set())
        found |= new
        queue += new
    return found


def _links() -> bytes:
    """The network interfaces of the machine."""
    return subprocess.run(["ip", "-br", "link"], capture_output=True, check=True).stdout
