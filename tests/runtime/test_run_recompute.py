"""A stage that recomputes trains to the same bits, and keeps no graph between forward and backward."""

from dataclasses import replace

import harness
import numpy as np
import pytest
import torch
from harness import CONV2, LSTM3, SKIP3
from torch import nn

from pdtool.runtime.stage.pipeline_stage import PipelineStage


def recomputed(spec):
    stages = tuple(stage.model_copy(update={"recompute": True}) for stage in spec.plan.stages)
    return replace(spec, plan=spec.plan.model_copy(update={"stages": stages}), out=spec.out.with_name("again"))


@pytest.mark.rows_of_the_day(days=2)
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


CRITERION = """
class Criterion(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
    def forward(self, output, target):
        self.seen += self.training
        return F.cross_entropy(output, target) * self.seen.clone() / 10

CRITERION = Criterion()

def loss(output, target):
    return CRITERION(output, target)
"""


def test_a_criterion_that_keeps_something_changes_once_a_minibatch(tmp_path):
    toy = replace(CONV2, model=CONV2.model + CRITERION)
    spec = harness.job(tmp_path, toy, schedule="gpipe", microbatches=3)
    found, expected = (harness.weights(harness.run(each)) for each in (recomputed(spec), spec))
    harness.assert_same(found, expected, rtol=0, atol=0)


class Stateful(nn.Module):
    """Random numbers, and buffers and attributes that change in all ways, some of them late."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.late_norm = nn.BatchNorm1d(3)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("last", torch.zeros(3))
        self.register_buffer("scale", torch.full((3,), 2.0))
        self.register_buffer("pair", torch.zeros(2, 3))
        self.register_buffer("second", self.pair[1])
        self.register_buffer("mean", None)
        self.register_buffer("of_numpy", torch.from_numpy(np.zeros(3, np.float32)))
        self.register_buffer("spread", torch.ones(1).expand(3))
        self.register_buffer("nothing", torch.empty(0, 3))
        self.other = nn.Module()
        self.other.register_buffer("seen", self.seen)
        self.rounds = 0

    def forward(self, x, mask):
        self.seen += 1
        self.other.seen *= 2
        self.rounds += 1
        y = self.linear(x) * self.scale * self.seen.clone() * self.rounds * self.spread + self.last + self.second
        self.last = x.detach().mean(0)
        if self.mean is None:
            self.mean = torch.zeros(3)
        self.mean.data.lerp_(self.last, 0.1)
        if self.rounds > 2:  # what the first forwards leave as it was
            y = self.late_norm(y)
            self.pair.add_(1)
            self.of_numpy.add_(1)
            self.scale = self.scale * 0.5
            if not hasattr(self, "made"):
                self.register_buffer("made", torch.zeros(()))
            self.made -= 1
            y = y * self.made.clone() + self.of_numpy.clone()
        y = y + mask.mul_(0.5).sum() + self.mean
        return torch.nn.functional.dropout(y, 0.5)


def write_into_target(output, target):
    """A loss that changes what it is given."""
    wanted = target.pop("wanted").mul_(0.5)
    return ((output - wanted) ** 2).mean()


def trained(recompute):
    """What four minibatches in flight and a step between their backwards come to, and how often forward ran."""
    torch.manual_seed(0)
    module = Stateful()
    calls = []
    module.linear.register_forward_hook(lambda *_: calls.append(None))
    stage = PipelineStage(module, write_into_target, recompute=recompute)
    optimizer = torch.optim.SGD(stage.weights.parameters.values(), lr=0.1)
    inputs = [[torch.randn(4, 3, requires_grad=True), torch.ones(4)] for _ in range(4)]
    targets = [{"wanted": torch.ones(4, 3)} for _ in range(4)]
    found = []
    for i in range(4):
        found.append(stage.forward(i, inputs[i], targets[i])[0].detach())
    alive = [output for kept in stage.stashed.values() for output in kept.outputs]
    for i in range(4):
        found.append(stage.backward(i, [None])[0].clone())
        stage.weights.prepare_update()
        optimizer.step()
        optimizer.zero_grad()
        found += [p.detach().clone() for p in stage.weights.parameters.values()]
    return [*found, *(mask for _, mask in inputs)], dict(module.named_buffers()), module.rounds, alive, len(calls)


def test_the_second_forward_sees_what_the_first_one_saw():
    """Weight version, random numbers, buffers, attributes, inputs and target; and it leaves all as they were."""
    kept, kept_buffers, rounds, graphs, calls = trained(recompute=False)
    again, again_buffers, rounds_again, no_graphs, twice = trained(recompute=True)
    assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))
    assert kept_buffers.keys() == again_buffers.keys()
    assert all(torch.equal(value, again_buffers[name]) for name, value in kept_buffers.items())
    assert (rounds, rounds_again) == (4, 4)
    assert (len(graphs), no_graphs) == (4, [])
    assert (calls, twice) == (4, 8)
