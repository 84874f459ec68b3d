"""A plan keeps its word about memory: a stage keeps for its backward what the formulas count, and nothing else."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from skeletons import plan_of
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from pdtool.artifacts.device import Device
from pdtool.artifacts.profile import ModelRef, Profile
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.tracing import trace_file
from pdtool.generator.generate import generate
from pdtool.planner.stage_costs import stage_loads
from pdtool.profiler.execute import ProfiledModel
from pdtool.profiler.graph_costs import GraphCosts, count_stash_and_flops, make_profile
from pdtool.runtime.stage.pipeline_stage import PipelineStage
from pdtool.runtime.worker.worker_model import load_stage_module

CPU, CONTIGUOUS = torch.device("cpu"), torch.contiguous_format
BATCH = 8


def counted(file: ModelFile) -> Profile:
    """A profile with memory only."""
    traced = trace_file(file, file.build(), BATCH)
    model = ProfiledModel.of(file, traced, BATCH, CPU)
    stash_bytes, saved_by, flops = count_stash_and_flops(model)
    costs = GraphCosts(
        forward_s={},
        backward_s={},
        stash_bytes=stash_bytes,
        saved_by=saved_by,
        flops=flops,
        update_s=0.0,
        optimizer_state_bytes=0.0,
    )
    return make_profile(model, Device(name="test, 1 thread", kind="measured"), costs)


def kept_bytes(stage: nn.Module, inputs: list[Tensor], loss: Any, target: Any, *, is_first: bool) -> tuple[int, Any]:
    """Bytes of the different memories that a minibatch's graph and its received tensors take; and the outputs."""
    weights = {tensor.untyped_storage()._cdata for tensor in (*stage.parameters(), *stage.buffers())}
    kept: dict[int, Tensor] = {}

    def note(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    pipeline = PipelineStage(stage, loss)
    with saved_tensors_hooks(note, lambda tensor: tensor):
        outputs = pipeline.forward(0, inputs, target)
    if not is_first:
        for tensor in pipeline.stashed[0].inputs:
            note(tensor)
    leaves = {leaf.untyped_storage()._cdata for leaf in pipeline.weights.parameters.values()}
    return sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in weights | leaves), outputs


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("digits", {}),  # norms keep what a convolution before them returns: across a border, it counts once
        ("transformer", {"layers": 2, "width": 16}),
        ("lstm_lm", {"width": 16}),
        ("s2vt", {"size": "mini"}),
    ],
)
def test_a_stage_keeps_what_the_formulas_count(name: str, settings: dict[str, Any], tmp_path: Path) -> None:
    file = ModelFile.load(ModelRef(source=f"pdtool.zoo.{name}", settings=settings), trusted=True)
    profile = counted(file)
    plan = plan_of(profile, 3)
    bundle = generate(plan, profile, file, tmp_path / "b")
    model = file.build()
    stages = [load_stage_module(bundle, tmp_path / "b", s, model) for s in range(3)]
    data, target = file.example_batch(BATCH)
    tensors = dict(zip(bundle.inputs, file.as_inputs(data).tensors, strict=True))
    for s, (stage, spec, load) in enumerate(
        zip(stages, bundle.stages, stage_loads(profile, tuple(map(tuple, plan.stage_nodes(profile)))), strict=True)
    ):
        inputs = [
            tensors[n].detach().clone(memory_format=CONTIGUOUS).requires_grad_(bundle.by_name[n].gradient)
            for n in spec.inputs
        ]
        is_last = s == len(stages) - 1
        loss = file.loss if is_last else None
        kept, outputs = kept_bytes(stage, inputs, loss, target if is_last else None, is_first=s == 0)
        counted_bytes = load.stash_bytes + load.input_bytes
        copied = 0.03 * kept if name == "lstm_lm" else 0.0  # in a run dropout gets contiguous inputs, which LSTMs copy
        assert kept - copied <= counted_bytes <= 1.01 * kept + 4096, f"stage {s}"
        tensors |= dict(zip(spec.outputs, outputs, strict=bool(spec.outputs)))


RESIDUAL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.skip = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)
    def forward(self, x):
        return torch.tanh(self.norm(self.linear(x)) + self.skip(x))

def model():
    return nn.Sequential(*(Block() for _ in range(4)))

def example_inputs(batch_size):
    return torch.randn(batch_size, 8)
"""


def test_a_forward_frees_activations_that_autograd_does_not_keep(tmp_path: Path) -> None:
    """The sum needs neither of its operands in the backward, and the norms' outputs are taken by nothing else."""
    (tmp_path / "model.py").write_text(RESIDUAL)
    file = ModelFile.load(ModelRef(source=str(tmp_path / "model.py")), trusted=True)
    profile = counted(file)
    bundle = generate(plan_of(profile, 1), profile, file, tmp_path / "b")
    stage = load_stage_module(bundle, tmp_path / "b", 0, file.build())
    norms = [module for module in stage.modules() if isinstance(module, nn.LayerNorm)]
    outputs: list[weakref.ref[Tensor]] = []
    alive: list[int] = []  # of the earlier norms' outputs, when a norm has computed its own

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        alive.append(sum(ref() is not None for ref in outputs))
        outputs.append(weakref.ref(output))

    for norm in norms:
        norm.register_forward_hook(note)
    stage(torch.randn(BATCH, 8))
    assert alive == [0] * 4
