"""A stage that recomputes trains to the same bits, and keeps no graph between forward and backward."""

from dataclasses import replace

import harness
import pytest
import torch
from harness import CONV2, LSTM3, SKIP3
from torch import nn

from pdtool.runtime.stage.pipeline_stage import PipelineStage


def recomputed(spec):
    stages = tuple(stage.model_copy(update={"recompute": True}) for stage in spec.plan.stages)
    return replace(spec, plan=spec.plan.model_copy(update={"stages": stages}), out=spec.out.with_name("again"))


@pytest.mark.parametrize(
    ("toy", "replicas", "schedule"),
    [(CONV2, (1, 1), "1f1b"), (SKIP3, (2, 1, 2), "1f1b"), (LSTM3, (1, 1, 1), "1f1b-flush")],
)
def test_recomputing_changes_no_bit(tmp_path, toy, replicas, schedule):
    microbatches = 1 if schedule == "1f1b" else 3
    spec = harness.job(tmp_path, toy, replicas, schedule=schedule, microbatches=microbatches, epochs=2)
    for kept, again in zip(harness.run(spec), harness.run(recomputed(spec)), strict=True):
        assert kept.peak_stashed == again.peak_stashed
        assert kept.peak_versions == again.peak_versions
        for name, value in kept.state.items():
            assert torch.equal(value, again.state[name]), name


class Stateful(nn.Module):
    """Random numbers, a buffer written in place, one replaced, and one that stays."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        self.seen += 1
        y = self.linear(x) * self.scale * self.seen.clone() + self.last
        self.last = x.detach().mean(0)
        return torch.nn.functional.dropout(y, 0.5)


def trained(recompute):
    """Gradients and buffers after two minibatches in flight and a step between their backwards."""
    torch.manual_seed(0)
    module = Stateful()
    stage = PipelineStage(module, lambda output, target: ((output - target) ** 2).mean(), recompute=recompute)
    optimizer = torch.optim.SGD(stage.weights.parameters.values(), lr=0.1)
    inputs = [torch.randn(4, 3, requires_grad=True) for _ in range(2)]
    found = []
    for i in (0, 1):
        found.append(stage.forward(i, [inputs[i]], torch.ones(4, 3))[0].detach())
    alive = [output.grad_fn for kept in stage.stashed.values() for output in kept.outputs]
    for i in (0, 1):
        found += [g.clone() for g in stage.backward(i, [None])]
        stage.weights.prepare_update()
        optimizer.step()
        optimizer.zero_grad()
        found += [p.detach().clone() for p in stage.weights.parameters.values()]
    return found, dict(module.named_buffers()), alive, module.calls


def test_the_second_forward_sees_what_the_first_one_saw():
    """The weight version, the random numbers, the buffers; and it leaves the buffers as they were."""
    kept, kept_buffers, graphs, calls = trained(recompute=False)
    again, again_buffers, no_graphs, twice = trained(recompute=True)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert all(torch.equal(value, again_buffers[name]) for name, value in kept_buffers.items())
    assert (len(graphs), no_graphs) == (2, [])
    assert (calls, twice) == (2, 4)
