"""What a plan predicts of messages between stages is what a run sends, whatever they are sent as."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import Folder
from graphs import chain, with_nodes

import pdtool
from pdtool.api.inputs import Inputs
from pdtool.api.rescheduling import rescheduled
from pdtool.artifacts.device import Device
from pdtool.artifacts.plan import Plan
from pdtool.artifacts.report import Report
from pdtool.emulator.sleeping_model import Scaling, write_sleeping_model
from pdtool.errors import FieldError
from pdtool.options.declaration import read_options
from pdtool.options.run_options import RunOptions
from pdtool.runtime.messages.routes import list_edges, list_routes

# Stage 1 takes activations of float32, indices of int64, and the model's own input; only the activations are narrowed.
MODEL = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

HINTS = {"pin": {"first": 0, "argmax": 0, "embed": 1}}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.embed, self.second = nn.Linear(16, 64), nn.Embedding(16, 8), nn.Linear(88, 4)

    def forward(self, x):
        index = x.argmax(1)
        return self.second(torch.cat([self.first(x).relu(), self.embed(index), x], 1))

def model():
    return Net()

def dataset(split):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(32, 16, generator=generator), torch.randint(4, (32,), generator=generator))

def loss(output, target):
    return F.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.SGD([parameter for _, parameter in named_parameters], lr=0.1)
"""
FORWARD = 8 * 64  # float32 numbers in a message of activations, and in one of gradients
EXACT_BYTES = 8 * (8 + 4 * 16 + 8)  # the index, the input and the target


def sent_bytes(report: Report) -> int:
    return sum(stage.sent_bytes for stage in report.stages)


def test_a_run_sends_as_many_bytes_as_its_plan_predicts(folder: Folder) -> None:
    """By the plan's wire format, and by another that is asked for, of which the plan says nothing."""
    folder.write("model.py", MODEL)
    profile = pdtool.profile("model.py", batch_size=8, threads=1, device="cpu")
    options = {"topology": "2", "strategy": "straight", "bandwidth": "1MB/s"}
    wide = pdtool.partition(profile, **options)
    assert wide.predicted.traffic_bytes == 2 * FORWARD * 4 + EXACT_BYTES
    assert "wire_dtype" not in Path("plans/model-2.yaml").read_text()
    assert sent_bytes(pdtool.run(wide, timeout="60s", device="cpu")) == wide.predicted.traffic_bytes
    narrow = pdtool.partition(profile, **options, wire_dtype="bf16")
    assert narrow == Plan.load("plans/model-2.yaml")
    assert narrow.predicted.traffic_bytes == 2 * FORWARD * 2 + EXACT_BYTES
    assert narrow.predicted.transfer_s[0] == pytest.approx((FORWARD * 2 + EXACT_BYTES) / 1e6)
    assert narrow.predicted.memory_bytes == wide.predicted.memory_bytes, "what arrived is float32 again"
    assert all(finding.holds is not False for finding in pdtool.check(narrow))
    assert sent_bytes(pdtool.run(narrow, timeout="60s", device="cpu")) == narrow.predicted.traffic_bytes
    wide.save("plans/wide.yaml")
    as_asked = pdtool.run("plans/wide.yaml", timeout="60s", device="cpu", wire_dtype="fp16")
    assert sent_bytes(as_asked) == narrow.predicted.traffic_bytes
    asked = read_options("run", RunOptions, {"wire_dtype": "bf16"})
    narrowed = rescheduled(Inputs.load("plans/wide.yaml", None), asked)
    assert narrowed.model_copy(update={"why": None}) == narrow.model_copy(update={"why": None})


def test_a_model_that_sleeps_sends_as_many_bytes_as_the_plan_predicts(folder: Folder) -> None:
    folder.write("model.py", MODEL)
    profile = pdtool.profile("model.py", batch_size=8, threads=1, device="cpu")
    plan = pdtool.partition(profile, topology="2", strategy="straight", wire_dtype="bf16")
    sleeping, bundle = write_sleeping_model(Path("sleeping"), plan, profile, Scaling(), minibatches=4)
    routes = list_routes(list_edges(bundle, []), [[0], [1]], wire_dtype=sleeping.wire_dtype)
    sent = [torch.empty(part.shape, dtype=part.dtype).nbytes for route in routes for part in route.parts(1)]
    assert sum(sent) == plan.predicted.traffic_bytes


def test_what_a_profile_does_not_say_counts_as_float32() -> None:
    """But for what it estimated as if cast to another precision, and what the dataset gives."""
    profile = chain([1.0, 1.0], crossing=1000).sent_as("bf16")
    assert profile.sent_bytes("a0") == (500, 500)
    assert profile.sent_bytes("x") == (profile.by_name["x"].output_bytes, profile.by_name["x"].gradient_bytes)
    estimated = Device(name="H100", kind="estimated")
    for precision, sent in (("bf16", 1000), ("fp16", 1000), ("tf32", 500), ("fp32", 500), (None, 500)):
        made = profile.model_copy(update={"precision": precision, "device": estimated})
        assert made.sent_bytes("a0") == (sent, sent), precision
    measured = Device(name="H100", kind="measured")
    autocast = profile.model_copy(update={"precision": "bf16", "device": measured})
    assert autocast.sent_bytes("a0") == (500, 500), "stages send float32 under autocast"


def test_a_profile_that_says_more_than_there_is_is_refused() -> None:
    profile = chain([1.0, 1.0], crossing=1000)
    nodes = [node.model_copy(update={"exact_bytes": 1001}) for node in profile.nodes]
    with pytest.raises(FieldError, match="exact_bytes exceed output_bytes"):
        with_nodes(profile, nodes).check()
