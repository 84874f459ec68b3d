"""Estimates: everything but the times is what measuring finds; the times are those of the roofline by hand."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys

import bench_estimate
import pytest
import torch
from click.testing import CliRunner

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.device import TABLE, Devices, DeviceSpec, find_device
from pdtool.artifacts.profile import Profile
from pdtool.cli.commands.app import main
from pdtool.errors import ArtifactError, ModelError, StaleError, UsageError
from pdtool.frontend.model_file import ModelFile
from pdtool.profiler.estimate import calibrate_device, estimate
from pdtool.profiler.kernels import FLOP_FORMULAS
from pdtool.profiler.measure import measure

TIMES = {"forward_s", "backward_s", "update_s"}
MEASURED = TIMES | {"scratch_bytes"}
DEVICE = DeviceSpec(
    name="by hand",
    peak_flops_per_s={"fp32": 1e12, "tf32": 4e12, "bf16": 8e12},
    bandwidth_bytes_per_s=1e11,
    memory_bytes=10**10,
    launch_s=1e-6,
    source="a test",
)
HEAD = "import torch\nfrom torch import nn\nimport torch.nn.functional as F\n"
NET = (
    HEAD
    + """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.act = nn.ReLU(inplace=True)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight
        self.spare = nn.Parameter(torch.zeros(3))
        self.scale = torch.tensor([0.5])

    def forward(self, ids):
        x = self.embed(ids)
        return self.out(self.norm(x + self.act(self.mix(x))) * self.scale + torch.arange(8))

def model(): return Net()
def dataset(split): return [(torch.tensor(i % 20), (i + 1) % 20) for i in range(64)]
def loss(output, target): return F.cross_entropy(output, target)
def optimizer(named): return torch.optim.Adam([p for _, p in named])
HINTS = {'no_split': ['mix', 'act'], 'pin': {'out': -1}}
"""
)


def write(tmp_path, text, name="net.py"):
    path = tmp_path / name
    path.write_text(text)
    return ModelFile.load(ModelRef(source=str(path)), trusted=True)


def one_layer(tmp_path, layer, inputs):
    """A model of one layer at the path `layer`; `inputs` is an expression in n, the batch size."""
    text = f"def model(): return nn.Sequential({layer})\ndef example_inputs(n): return {inputs}\n"
    return write(tmp_path, HEAD + text)


def zoo(name, **settings):
    return ModelFile.load(ModelRef(source=f"pdtool.zoo.{name}", settings=settings), trusted=True)


def counted(profile, *leave_out):
    """What a profile holds besides its device and what only that can tell."""
    content = profile.model_dump(exclude={"device", "reserved_bytes", "step_s", "coverage", "nodes"})
    return content, [node.model_dump(exclude=MEASURED | set(leave_out)) for node in profile.nodes]


SMALL = [
    ("digits", {"width": 8}),
    ("transformer", {"width": 16, "layers": 1, "tied": True}),
    ("llm", {"layers": 1, "width": 16, "heads": 2, "hidden": 32, "vocabulary": 256}),
]


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize(("name", "settings"), SMALL, ids=[name for name, _ in SMALL])
def test_all_that_needs_no_device_is_as_measured(name, settings):
    file = zoo(name, **settings)
    assert counted(estimate(file, batch_size=2, device=DEVICE)) == counted(measure(file, batch_size=2))


def test_ties_hints_and_unused_parameters_are_as_measured(tmp_path):
    file = write(tmp_path, NET)
    digests = {file.ref.source: file.sha256}  # of the graph there is none: a fake tensor hides the value of `scale`
    measured = measure(file, batch_size=16).model_copy(update={"digests": digests})
    assert counted(estimate(file, batch_size=16, device=DEVICE)) == counted(measured)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("layer", "per_step"),
    [
        ("nn.LSTM(6, 8, num_layers=2, bidirectional=True)", 2 * 4 * 8 * (6 + 8) + 2 * 4 * 8 * (16 + 8)),
        ("nn.LSTM(6, 8, proj_size=3)", 4 * 8 * (6 + 3) + 8 * 3),
        ("nn.GRU(6, 8, batch_first=True)", 3 * 8 * (6 + 8)),
        ("nn.RNN(6, 8)", 8 * (6 + 8)),
    ],
)
def test_recurrent_flops_are_those_of_each_step_measured_and_estimated(tmp_path, layer, per_step):
    text = f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = {layer}
    def forward(self, x): return self.cell(x)[0]
def model(): return Net()
def example_inputs(n): return torch.randn({"n, 5" if "batch_first" in layer else "5, n"}, 6)
"""
    file = write(tmp_path, HEAD + text)
    measured, estimated = measure(file, batch_size=3), estimate(file, batch_size=3, device=DEVICE)
    assert counted(estimated, "stash_bytes", "saved_by") == counted(measured, "stash_bytes", "saved_by")
    node = estimated.by_name["cell"]
    assert node.flops == 2 * 5 * 3 * per_step
    assert node.backward_s == pytest.approx(2 * node.forward_s)
    assert node.forward_s >= node.flops / 1e12 + 5e-6  # each step launches
    assert node.stash_bytes > 0


def test_a_function_inside_a_subclass_of_a_recurrent_layer_is_not_the_layer(tmp_path):
    text = """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x): return x * 2
    @staticmethod
    def backward(ctx, gradient): return gradient * 2
class Layer(nn.LSTM):
    def forward(self, x): return Twice.apply(super().forward(x)[0])
def model(): return nn.Sequential(Layer(64, 256), nn.Linear(256, 1))
def example_inputs(n): return torch.randn(20, n, 64)
"""
    nodes = estimate(write(tmp_path, HEAD + text), batch_size=8, device=DEVICE).by_name
    twice, lstm = (next(node for node in nodes.values() if node.op == op) for op in ("Twice", "lstm"))
    assert 0 < twice.forward_s < 0.1 * lstm.forward_s


def test_cudnn_counts_the_same_flops_as_onednn():
    inputs, matrices, biases = (5, 3, 6), [(32, 6), (32, 8)], [(32,), (32,)]
    forward, backward = FLOP_FORMULAS[torch.ops.aten._cudnn_rnn], FLOP_FORMULAS[torch.ops.aten._cudnn_rnn_backward]
    assert forward(inputs, matrices + biases, 4) == 2 * 5 * 3 * 32 * (6 + 8)
    assert forward(inputs, matrices, 2) == FLOP_FORMULAS[torch.ops.aten.mkldnn_rnn_layer](inputs, *matrices, *biases)
    assert backward(inputs, matrices, 2) == FLOP_FORMULAS[torch.ops.aten.mkldnn_rnn_layer_backward](inputs, *matrices)


def test_a_linear_layer_takes_the_longer_of_computing_and_moving(tmp_path):
    node = estimate(one_layer(tmp_path, "nn.Linear(512, 256)", "torch.randn(n, 512)"), batch_size=1024, device=DEVICE)
    node = node.by_name["0"]
    assert node.flops == 2 * 1024 * 512 * 256
    assert node.forward_s == pytest.approx(node.flops / 1e12 + 1e-6)  # 268 us of work, 37 us of moving
    thin = estimate(one_layer(tmp_path, "nn.Linear(512, 256)", "torch.randn(n, 512)"), batch_size=1, device=DEVICE)
    moved = 4 * (512 * 256 + 256 + 512 + 256)
    assert thin.by_name["0"].forward_s == pytest.approx(moved / 1e11 + 1e-6)


def test_a_convolution_in_the_middle_goes_back_twice_and_a_first_one_once(tmp_path):
    layers = "nn.Conv2d(64, 64, 3, padding=1), nn.Conv2d(64, 64, 3, padding=1)"
    profile = estimate(one_layer(tmp_path, layers, "torch.randn(n, 64, 28, 28)"), batch_size=64, device=DEVICE)
    flops = 2 * 64 * 28 * 28 * 64 * 64 * 9
    for name, times in (("0", 1), ("1", 2)):
        node = profile.by_name[name]
        assert node.flops == flops
        assert node.forward_s == pytest.approx(flops / 1e12, rel=0.01)
        assert node.backward_s == pytest.approx(times * flops / 1e12, rel=0.02)


def test_attention_counts_both_products(tmp_path):
    text = """
class Net(nn.Module):
    def forward(self, x): return F.scaled_dot_product_attention(x, x, x)
def model(): return Net()
def example_inputs(n): return torch.randn(n, 4, 32, 16)
"""
    node = estimate(write(tmp_path, HEAD + text), batch_size=2, device=DEVICE).nodes[-1]
    assert node.flops == 2 * (2 * 2 * 4 * 32 * 32 * 16)


def test_lookups_and_elementwise_cost_their_bytes_and_views_nothing(tmp_path):
    layers = "nn.Embedding(10000, 64), nn.ReLU(), nn.Flatten()"
    file = one_layer(tmp_path, layers, "torch.zeros(n, 50, dtype=torch.long)")
    nodes = estimate(file, batch_size=32, device=DEVICE).by_name
    out = 32 * 50 * 64 * 4
    assert nodes["0"].forward_s == pytest.approx((32 * 50 * 8 + 2 * out) / 1e11 + 1e-6)  # not the whole table
    assert nodes["1"].forward_s == pytest.approx(2 * out / 1e11 + 1e-6)
    assert nodes["2"].forward_s == nodes["2"].backward_s == 0


def test_a_gradient_step_moves_parameter_gradient_and_state(tmp_path):
    text = NET.replace("torch.optim.Adam([p for _, p in named])", "torch.optim.SGD([p for _, p in named], 0.1)")
    profile = estimate(write(tmp_path, text), batch_size=4, device=DEVICE)
    parameter_bytes = 4 * (20 * 8 + 64 + 8 + 16 + 3)
    unused = 3 / (20 * 8 + 64 + 8 + 16 + 3)  # belongs to no node
    assert sum(n.update_s for n in profile.nodes) == pytest.approx(3 * parameter_bytes / 1e11 * (1 - unused))


def test_a_model_larger_than_any_memory_is_never_allocated(tmp_path):
    layers = "nn.Linear(150_000, 160_000), nn.ReLU(), nn.Linear(160_000, 10)"
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    profile = estimate(one_layer(tmp_path, layers, "torch.randn(n, 150_000)"), batch_size=2, device=DEVICE)
    assert profile.parameter_bytes(set(profile.by_name)) > 96e9
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 2e6  # kB


def test_estimates_are_the_same_bytes_each_time():
    file = zoo("digits", width=8)
    assert estimate(file, batch_size=4, device=DEVICE).dump() == estimate(file, batch_size=4, device=DEVICE).dump()


def test_precision_chooses_bytes_and_peak(tmp_path):
    file = one_layer(tmp_path, "nn.Linear(2048, 2048)", "torch.randn(n, 2048)")
    single, tf32, half = (estimate(file, batch_size=2048, device=DEVICE, precision=p) for p in (None, "tf32", "bf16"))
    flops = single.by_name["0"].flops
    assert [p.by_name["0"].parameter_bytes for p in (single, tf32, half)] == [
        4 * 2049 * 2048,
        4 * 2049 * 2048,
        2 * 2049 * 2048,
    ]
    for profile, peak in ((single, 1e12), (tf32, 4e12), (half, 8e12)):
        assert profile.by_name["0"].forward_s == pytest.approx(flops / peak, rel=0.01)
    assert tf32.device.name == "by hand, tf32"
    with pytest.raises(UsageError, match=r"by hand has no figure for fp16; choose one of fp32, tf32, bf16"):
        estimate(file, batch_size=2, device=DEVICE, precision="fp16")


def test_a_faster_device_is_never_slower():
    file = zoo("digits", width=8)
    fast = DEVICE.model_copy(update={"peak_flops_per_s": {"fp32": 2e12}, "bandwidth_bytes_per_s": 2e11})
    slow_nodes, fast_nodes = (estimate(file, batch_size=8, device=d).nodes for d in (DEVICE, fast))
    assert all(getattr(f, t) <= getattr(s, t) for s, f in zip(slow_nodes, fast_nodes, strict=True) for t in TIMES)


def test_a_model_that_is_built_from_values_is_built_for_real(tmp_path):
    text = NET.replace("self.norm = ", "self.width = int(torch.tensor([3, 8]).max().item())\n        self.norm = ")
    assert "mix" in estimate(write(tmp_path, text), batch_size=4, device=DEVICE).by_name


def test_a_loss_that_looks_into_its_tensors_says_what_to_do(tmp_path):
    text = NET.replace(
        "return F.cross_entropy(output, target)", "return output.sum() if output.max().item() else output.sum()"
    )
    with pytest.raises(ModelError, match=r"loss\(\).* depends on the values of tensors.*measure it with --device cpu"):
        estimate(write(tmp_path, text), batch_size=4, device=DEVICE)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_calibration_makes_the_sums_of_each_kind_those_measured(precision, tmp_path, monkeypatch):
    """Also under autocast, where the estimate is of a cast model with smaller outputs."""
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, NET)
    measured = measure(file, batch_size=16, precision=precision)
    device = calibrate_device(DEVICE, measured, "measured.json")
    assert set(device.factors) == {"matmul", "norm", "embedding", "elementwise", "update"}
    calibrated = estimate(file, batch_size=16, device=device, precision=precision)
    assert calibrated.device.name == f"by hand, {precision}, calibrated"
    for names in (["mix", "out"], ["norm"], ["embed"]):
        spent = [sum(p.by_name[n].forward_s + p.by_name[n].backward_s for n in names) for p in (measured, calibrated)]
        assert spent[0] == pytest.approx(spent[1])
    assert sum(n.update_s for n in calibrated.nodes) == pytest.approx(sum(n.update_s for n in measured.nodes))


def test_calibration_refuses_what_is_not_measured_or_not_this_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file = write(tmp_path, NET)
    measured = measure(file, batch_size=4)
    with pytest.raises(ArtifactError, match=r"m.json: contains no times that pdtool measured; calibrate with"):
        calibrate_device(DEVICE, estimate(file, batch_size=4, device=DEVICE), "m.json")
    (tmp_path / "net.py").write_text(NET + "\n")
    with pytest.raises(StaleError, match="has changed since it was profiled"):
        calibrate_device(DEVICE, measured, "m.json")


def test_every_device_of_the_table_cites_its_source():
    devices = Devices.load(TABLE).devices
    assert {"v100", "a100", "h100", "rtx4090", "titanx", "t4"} <= set(devices)
    for device in devices.values():
        assert "https://" in device.source
        peaks = device.peak_flops_per_s
        assert peaks["fp32"] <= peaks.get("tf32", peaks["fp32"]) <= peaks.get("fp16", float("inf"))
    assert Devices.parse(Devices.load(TABLE).dump()) == Devices.load(TABLE)


def test_an_unknown_device_lists_the_known():
    known = r"'v1000' is not known; did you mean v100\? measure on cpu or cuda, estimate for v100, .*a100"
    with pytest.raises(UsageError, match=known):
        find_device("v1000")


OWN = """format: pdtool/device/1
devices:
  mine:
    name: mine
    peak_flops_per_s: {fp32: 1.0e+12}
    bandwidth_bytes_per_s: 1.0e+11
    memory_bytes: 1000
    launch_s: 0.0
    source: me
...
"""


@pytest.mark.parametrize(
    ("old", "new", "field"),
    [
        ("1.0e+11", "-1.0", "devices.mine.bandwidth_bytes_per_s"),
        ("1.0e+11", "fast", "devices.mine.bandwidth_bytes_per_s"),
        ("    memory_bytes: 1000\n", "", "devices.mine.memory_bytes"),
        ("fp32: 1.0e+12", "fp33: 1.0e+12", "devices.mine.peak_flops_per_s.fp33"),
        ("fp32: 1.0e+12", "bf16: 1.0e+12", "devices.mine.peak_flops_per_s: needs at least fp32"),
        ("source: me", "sauce: me", "devices.mine.s"),
        ("device/1", "device/2", "format"),
        (OWN[OWN.index("  mine") : OWN.index("...")], "  {}\n", "devices: at least 1 is needed"),
    ],
)
def test_a_broken_device_file_is_refused_naming_the_field(tmp_path, old, new, field):
    assert old in OWN
    (tmp_path / "own.yaml").write_text(OWN.replace(old, new))
    with pytest.raises(ArtifactError, match=rf"own.yaml: {field}") as error:
        find_device(str(tmp_path / "own.yaml"))
    assert error.value.exit_code == 3


def test_a_file_of_several_devices_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"holds \d+ devices \(v100, .*keep one device in a file"):
        find_device(str(TABLE))


def run(*arguments):
    return CliRunner().invoke(main, ["profile", *arguments])


def test_the_command_says_that_it_estimates_and_records_its_inputs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, NET)
    (tmp_path / "own.yaml").write_text(OWN)
    measured = run("net.py", "--batch-size", "4", "-o", "measured.json")
    assert measured.exit_code == 0, measured.output
    done = run("net.py", "--batch-size", "8", "--device", "own.yaml", "--calibrate", "measured.json", "-o", "out.json")
    assert done.exit_code == 0, done.output
    assert "estimated for mine, calibrated. Nothing was run or measured" in done.stderr
    assert "ratio of measured to estimated times in measured.json: " in done.stderr
    profile = Profile.load("out.json")
    assert (profile.device.kind, profile.device.name) == ("estimated", "mine, calibrated")
    assert profile.device.memory_bytes == 1000, "of own.yaml"
    assert (profile.step_s, profile.coverage) == (0, 0)
    assert set(profile.digests) == {"net.py", "own.yaml", "measured.json"}
    lost = run("net.py", "--batch-size", "8", "--device", "own.yaml", "--calibrate", "out.json", "-o", "./out.json")
    assert lost.exit_code == 2
    assert "./out.json would be overwritten, but --calibrate reads it; pass another path with -o" in lost.stderr


def test_the_command_never_mixes_measuring_and_estimating(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(tmp_path, NET)
    for arguments, what in (
        (
            ["--precision", "fp16"],
            "--device auto cannot measure with --precision fp16; pass fp32 or bf16, the precisions of `run`",
        ),
        (["--calibrate", "x.json"], "--device auto measures, but --calibrate is for estimates"),
        (["--device", "v100", "--threads", "2"], "--device v100 estimates, but --threads is for measuring"),
        (["--device", "v100", "--compile"], "--device v100 estimates operator by operator, but a compiled model"),
        (["--device", "gtx1"], "device 'gtx1' is not known"),
        (["--device", "cuda:0", "--threads", "2"], "device 'cuda:0' is not known; did you mean cuda?"),
    ):
        done = run("net.py", *arguments)
        assert done.exit_code == 2
        assert what in done.stderr


@pytest.mark.skipif(not bench_estimate.DATA.is_dir(), reason=f"{bench_estimate.DATA} is not here")
@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize("name", bench_estimate.MODELS)
def test_estimates_are_of_the_order_that_pipedream_measured(name):
    comparison = bench_estimate.compare(name)
    assert 0.5 < comparison.ratio < 1.5
    assert sum(estimated for _, estimated in comparison.shares) == pytest.approx(1)


SEVEN_B = {"layers": 8, "width": 8192, "hidden": 22016}  # the parameters of 32 layers in a quarter of the operators


@pytest.mark.rows_of_the_day(days=3)
def test_a_model_of_7b_parameters_takes_half_a_minute_and_2_gb(tmp_path):
    """Half a minute of the processor, which others may hold."""
    settings = [word for name, value in SEVEN_B.items() for word in ("--set", f"{name}={value}")]
    # ru_maxrss would not do: a new process begins with its parent's peak
    peak = "import atexit, runpy; atexit.register(lambda: print(open('/proc/self/status').read(), flush=True))"
    run = f"{peak}; runpy.run_module('pdtool', run_name='__main__')"
    command = [sys.executable, "-c", run, "profile", "pdtool.zoo.llm", "--device", "a100", "--batch-size", "1"]
    environment = {**os.environ, "PYTHONPATH": str(TABLE.parents[2])}
    process = subprocess.Popen(
        [*command, *settings, "-o", "llm.json"],
        cwd=tmp_path,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    assert process.stdout
    with process.stdout:
        status = process.stdout.read()
    _, process.returncode, usage = os.wait4(process.pid, 0)
    assert process.returncode == 0
    assert usage.ru_utime + usage.ru_stime < 30
    assert int(re.findall(r"VmHWM:\s+(\d+) kB", status)[0]) < 2e6
    profile = Profile.load(tmp_path / "llm.json")
    with torch.device("meta"):
        parameter_bytes = sum(p.nbytes for p in zoo("llm", **SEVEN_B).build().parameters())
    assert profile.parameter_bytes(set(profile.by_name)) == parameter_bytes > 4 * 6.7e9
