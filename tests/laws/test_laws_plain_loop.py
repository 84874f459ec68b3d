"""What model.py says of training is done as a plain loop does it: clipping, parameter groups, learning-rate schedules.

With a flush the weights are those of that loop. Without one stages update at different moments: a stage clips by its
own norm, as the replay does.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import CONV1, CONV2, CONV3, CONV4, TIED3, TIED4, Toy, assert_same, batches, stage_of, weights
from reference import replay
from test_laws_flush import CHUNKED
from test_laws_training import BW2, pipeline

from pdtool.artifacts.metrics import ValidationLine, read_metrics
from pdtool.frontend.model_file import ModelFile
from pdtool.options.target import Target
from pdtool.runtime.config import RunConfig
from pdtool.runtime.loading.minibatch_loader import MinibatchLoader

MAX_NORM = 0.3  # of gradients that have a norm of one or two
CLIPPED = f"\nMAX_GRAD_NORM = {MAX_NORM}\n"


def with_code(toy: Toy, code: str) -> Toy:
    """The toy with more code in its model.py."""
    return replace(toy, model=toy.model + code)


def plain_loop(spec: RunConfig, every: int, **options: Any) -> dict[str, torch.Tensor]:
    """The weights that a plain loop trains, without batch norm's statistics."""
    file = ModelFile.load(spec.model, trusted=True)
    trained = replay.synchronous(file.build(spec.seed), batches(spec), file.loss, file.optimizer, every, **options)
    return harness.without_statistics(trained)


def is_near(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    """Whether all of a is what b has."""
    return all(torch.allclose(value, b[name], rtol=1e-3, atol=1e-4) for name, value in a.items())


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize(
    ("toy", "replicas", "schedule", "settings", "optimizer"),
    [
        pytest.param(CONV3, (1, 1, 1), "1f1b-flush", {}, "adam", id="flush"),
        pytest.param(CONV2, (2, 1), "gpipe", {}, "sgd", id="gpipe-2-1"),
        pytest.param(CONV2, (2, 2), "zb-h1", {}, "sgd", id="zb-2-2"),
        pytest.param(TIED3, (1, 1, 1), "1f1b-flush", {}, "sgd", id="tied"),
        pytest.param(TIED3, (2, 1, 1), "gpipe", {}, "sgd", id="tied-2-1-1"),
        *(pytest.param(CONV4, (1, 1), name, {"chunks": 2, "steps": 6}, "sgd", id=name) for name in CHUNKED),
        *(pytest.param(TIED4, (2, 2), name, {"chunks": 2}, "sgd", id=f"tied-{name}-2-2") for name in CHUNKED),
    ],
)
def test_the_norm_of_all_stages_clips_as_in_a_plain_loop(
    tmp_path: Path, toy: Toy, replicas: tuple[int, ...], schedule: str, settings: dict[str, Any], optimizer: str
) -> None:
    settings = {"schedule": schedule, "microbatches": 4, "optimizer": optimizer, "epochs": 2} | settings
    spec = harness.job(tmp_path, with_code(toy, CLIPPED), replicas, **settings)
    found = weights(harness.run(spec))
    expected = plain_loop(spec, 4, max_norm=MAX_NORM)
    assert_same(found, expected)
    assert not is_near(plain_loop(spec, 4), expected)


SOME = """
def optimizer(named):
    return torch.optim.SGD([p for name, p in named if name.startswith(("conv1", "fc.weight"))], lr=0.05)
"""


def test_gradients_that_the_optimizer_does_not_take_count_once(tmp_path: Path) -> None:
    """Each in the norm of its own update, as where a loop clears the gradients of the whole model."""
    spec = harness.job(tmp_path, with_code(CONV3, CLIPPED + SOME), schedule="gpipe", microbatches=2, epochs=2)
    file = ModelFile.load(spec.model, trusted=True)
    model = file.build(spec.seed)
    expected = replay.synchronous(
        model, batches(spec), file.loss, file.optimizer, 2, max_norm=MAX_NORM, after_update=model.zero_grad
    )
    assert_same(weights(harness.run(spec)), expected)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_gradient_penalty_of_forward_is_that_of_a_plain_loop(tmp_path: Path, stages: int) -> None:
    """The tensor that forward makes for it is no parameter of the loss; such a run was refused."""
    toy, last = harness.perceptron(stages), stages - 1
    x, y = f"h{last}", f"torch.tanh(self.l{last}"
    penalty = (
        f"x = {x}.detach().requires_grad_(); with torch.enable_grad(): y = {y}(x)); "
        "with torch.enable_grad(): slope, = torch.autograd.grad(y.sum(), x, create_graph=True); "
        f"return {y}({x})), slope.square().sum(1)"
    )
    loss = "metrics = None\ndef loss(output, target): return F.cross_entropy(output[0], target) + output[1].mean()\n"
    text = toy.model.replace(f"return h{stages}", penalty.replace("; ", "\n        "))
    written = harness.stage(last, toy.stages[last][0].split("__init__()\n")[1].split("\n")[0], f"{x}: {penalty}")
    toy = replace(toy, model=text + loss, stages=(*toy.stages[:-1], (written, *toy.stages[-1][1:])))
    spec = harness.job(tmp_path, toy, schedule="1f1b-flush", microbatches=2, epochs=2)
    assert_same(weights(harness.run(spec)), plain_loop(spec, 2))


def test_data_parallelism_clips_as_a_plain_loop(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, with_code(CONV1, CLIPPED), (2,), epochs=2)
    outcomes = harness.run(spec)
    for replica in (0, 1):
        assert_same(weights(outcomes, replica), plain_loop(spec, 2, max_norm=MAX_NORM))


@pytest.mark.parametrize(
    ("toy", "replicas", "settings", "every"),
    [
        pytest.param(CONV3, (1, 1, 1), {}, (1, 1, 1), id="straight"),
        pytest.param(CONV2, (2, 1), {}, (2, 1), id="2-1"),
        pytest.param(CONV3, (1, 1, 1), BW2, (3, 3, 3), id="2bw"),
        pytest.param(TIED3, (1, 1, 1), {}, (1, 1, 1), id="tied"),
        pytest.param(TIED3, (2, 1, 1), {}, (2, 1, 2), id="tied-2-1-1"),
    ],
)
def test_without_a_flush_each_stage_clips_by_its_own_norm(
    tmp_path: Path, toy: Toy, replicas: tuple[int, ...], settings: dict[str, Any], every: tuple[int, ...]
) -> None:
    """And a tied parameter by its own, so that its copies stay equal."""
    spec = harness.job(tmp_path, with_code(toy, CLIPPED), replicas, epochs=2, **settings)
    outcomes = harness.run(spec)
    expected, unclipped = (asynchronous(spec, replicas, every, max_norm) for max_norm in (MAX_NORM, None))
    found = weights(outcomes)
    assert_same(found, {n: v for n, v in expected.items() if n in found})
    assert not is_near(unclipped, expected)


def asynchronous(
    spec: RunConfig, replicas: tuple[int, ...], every: tuple[int, ...], *options: Any
) -> dict[str, torch.Tensor]:
    """The weights of the replay."""
    file = ModelFile.load(spec.model, trusted=True)
    model, tied = file.build(spec.seed), ()
    for described in spec.bundle.tied:
        tied = described.names
        model.out.weight = torch.nn.Parameter(model.embed.weight.detach().clone())
    definition = pipeline(spec, replicas, every)
    return replay.asynchronous(
        model, stage_of(spec).__getitem__, batches(spec), file.loss, file.optimizer, definition, tied, *options
    )


GROUPS = """
def optimizer(named):
    named = list(named)
    assert [name for name, _ in named] == [name for name, _ in model().named_parameters()]
    layers = dict.fromkeys(name.partition(".")[0] for name, _ in named)
    groups = [
        {"params": [p for name, p in named if name.startswith(f"{layer}.")], "weight_decay": 0.1 * i}
        for i, layer in enumerate(layers)
    ]
    return torch.optim.AdamW(groups, lr=0.01)

def scheduler(optimizer, total_updates):
    rates = [0.01 * (i + 1) for i in range(len(optimizer.param_groups))]
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=total_updates)
"""


PLATEAU = """
def scheduler(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0, threshold=0.05)
"""
BY_EPOCH = """
SCHEDULER_STEP = "epoch"

def scheduler(optimizer, total_epochs):
    return torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.01, total_iters=total_epochs)
"""


@pytest.mark.parametrize("toy", [CONV3, TIED3], ids=["conv", "tied"])
def test_parameter_groups_and_their_schedules_are_those_of_a_plain_loop(tmp_path: Path, toy: Toy) -> None:
    """A group for each layer, with its own weight decay and its own largest learning rate in one cycle of the run;
    each stage has some of the groups."""
    settings: dict[str, Any] = {"schedule": "1f1b-flush", "microbatches": 3, "epochs": 2}
    spec = harness.job(tmp_path, with_code(toy, GROUPS), **settings)
    expected = scheduled_loop(spec, total_steps=6, steps_by_epoch=False)
    assert_same(weights(harness.run(spec)), expected)
    assert_same(weights(harness.run(resumed(spec))), expected)


@pytest.mark.parametrize("code", [PLATEAU, BY_EPOCH], ids=["plateau", "by-epoch"])
def test_schedules_of_epochs_are_those_of_a_plain_loop(tmp_path: Path, code: str) -> None:
    """Also in a run that goes on from the second of four epochs; a plateau is one of the validation loss."""
    spec = harness.job(
        tmp_path, with_code(TIED3, code), schedule="1f1b-flush", microbatches=3, optimizer="adam", epochs=4
    )
    expected = scheduled_loop(spec, total_steps=4, steps_by_epoch=True)
    assert_same(weights(harness.run(spec)), expected)
    assert_same(weights(harness.run(resumed(spec))), expected)
    assert not is_near(plain_loop(spec, 3), expected)


def resumed(spec: RunConfig) -> RunConfig:
    """The same run, from the middle of another one that was not disturbed."""
    checkpoint = spec.out / "checkpoints" / f"epoch-{spec.epochs // 2}"
    return replace(spec, out=spec.out.with_name("resumed"), resume=checkpoint)


def scheduled_loop(spec: RunConfig, total_steps: int, *, steps_by_epoch: bool) -> dict[str, torch.Tensor]:
    """The weights of a plain loop of updates with three minibatches each, and with a learning-rate schedule."""
    file = ModelFile.load(spec.model, trusted=True)
    model, valid = file.build(spec.seed), file.dataset("valid")
    schedulers: list[Any] = []

    def make(named: Any) -> Any:
        optimizer = file.optimizer(list(named))
        schedulers.append(file.scheduler(optimizer, total_steps))
        return optimizer

    def epoch_done() -> None:
        with torch.no_grad():
            loss = float(file.loss(model.eval()(valid.x), valid.y))
        model.train()
        is_plateau = isinstance(schedulers[0], torch.optim.lr_scheduler.ReduceLROnPlateau)
        schedulers[0].step(*([loss] if is_plateau else []))

    step = {"after_epoch": epoch_done} if steps_by_epoch else {"after_update": lambda: schedulers[0].step()}
    trained = replay.synchronous(model, batches(spec), file.loss, make, 3, **step)
    return harness.without_statistics(trained)


TRANSPOSED = """
as_it_was = model

def model():
    built = as_it_was()
    for p in built.parameters():
        p.data = p.data.permute(*reversed(range(p.dim()))).contiguous().permute(*reversed(range(p.dim())))
    return built

def optimizer(named):
    return torch.optim.Adam([p for _, p in named], lr=0.01, fused=True)
"""


@pytest.mark.parametrize(("toy", "replicas"), [(CONV2, (2, 1)), (TIED3, (1, 1, 1))], ids=["conv-2-1", "tied"])
def test_gradients_have_the_strides_of_their_parameters(tmp_path: Path, toy: Toy, replicas: tuple[int, ...]) -> None:
    """As fused optimizers take them to have."""
    spec = harness.job(tmp_path, with_code(toy, TRANSPOSED), replicas, schedule="gpipe", microbatches=2, epochs=2)
    assert_same(weights(harness.run(spec)), plain_loop(spec, 2))


def test_a_short_last_minibatch_is_dropped(tmp_path: Path) -> None:
    """Of 26 samples, two; of other samples in each epoch."""
    spec = harness.job(tmp_path, with_code(CONV3, "\nDROP_LAST = True\n"), schedule="gpipe", microbatches=3, epochs=2)
    expected = plain_loop(replace(spec, steps=6), 3)
    assert_same(weights(harness.run(spec)), expected)
    assert not is_near(plain_loop(spec, 3), expected)


AFTER_UPDATE = """
def after_update(named_parameters, update):
    for name, p in named_parameters:
        if name.endswith("weight"):
            p.clamp_(-0.2 * update, 0.2) if update % 2 else p.mul_(0.9)
"""


@pytest.mark.parametrize(("toy", "replicas"), [(CONV2, (2, 1)), (TIED3, (1, 1, 1))], ids=["conv-2-1", "tied"])
def test_what_is_done_after_an_update_is_as_in_a_plain_loop(
    tmp_path: Path, toy: Toy, replicas: tuple[int, ...]
) -> None:
    """At every replica, and at every holder of a tied parameter."""
    spec = harness.job(tmp_path, with_code(toy, AFTER_UPDATE), replicas, schedule="gpipe", microbatches=2, epochs=2)
    outcomes = harness.run(spec)
    file = ModelFile.load(spec.model, trusted=True)
    model, updates = file.build(spec.seed), iter(range(1, 100))
    expected = harness.without_statistics(
        replay.synchronous(
            model,
            batches(spec),
            file.loss,
            file.optimizer,
            2,
            after_update=lambda: file.after_update(model.named_parameters(), next(updates)),
        )
    )
    for replica in range(max(replicas)):
        assert_same(found := weights(outcomes, replica), {n: v for n, v in expected.items() if n in found})
    assert not is_near(plain_loop(spec, 2), expected)


@pytest.mark.parametrize("toy", [CONV3, TIED3], ids=["conv", "tied"])
def test_without_a_flush_it_is_done_to_the_newest_version(tmp_path: Path, toy: Toy) -> None:
    """Minibatches in flight keep theirs as it was."""
    spec = harness.job(tmp_path, with_code(toy, AFTER_UPDATE), epochs=2)
    found = weights(harness.run(spec))
    after_update = ModelFile.load(spec.model, trusted=True).after_update
    expected = asynchronous(spec, (1, 1, 1), (1, 1, 1), None, after_update)
    assert_same(found, {n: v for n, v in expected.items() if n in found})
    assert not is_near(asynchronous(spec, (1, 1, 1), (1, 1, 1)), expected)


CONFUSION = """
def metrics(output, target):
    confusion = torch.zeros(4, 4)
    confusion.index_put_((target, output.argmax(-1)), torch.tensor(1.0), accumulate=True)
    return {"confusion": (confusion, len(target)), "accuracy": ((output.argmax(-1) == target).sum(), len(target))}

def summarize_metrics(totals):
    confusion, samples = totals["confusion"]
    right, count = totals["accuracy"]
    assert samples == count == 10
    return {"recall": (confusion.diag() / confusion.sum(1).clamp(min=1)).mean(), "accuracy": right / count}
"""


def test_metrics_that_are_no_means_are_those_of_the_whole_validation_set(tmp_path: Path) -> None:
    """A matrix added up over three minibatches on two workers, and what is made of it."""
    spec = harness.job(tmp_path, with_code(CONV2, CONFUSION), (1, 2))
    outcomes = harness.run(spec)
    file = ModelFile.load(spec.model, trusted=True)
    model, valid = file.build(spec.seed).eval(), file.dataset("valid")
    model.load_state_dict(weights(outcomes), strict=True)
    *_, line = read_metrics(spec.out / "metrics.jsonl")
    with torch.no_grad():
        output = model(valid.x)
    expected = file.summarize_metrics(file.metrics(output, valid.y)) | {"loss": float(file.loss(output, valid.y))}
    assert isinstance(line, ValidationLine)
    assert line.figures == pytest.approx(expected)


RARE = """
def metrics(output, target):
    return {"nll": (0.0, 0), "accuracy": ((output.argmax(-1) == target).sum(), len(target))}
"""


def test_a_metric_that_counted_nothing_has_no_figure_and_reaches_no_target(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, with_code(CONV1, RARE), epochs=2, target=Target.parse("nll<=4"))
    harness.run(spec)
    validations = [line for line in read_metrics(spec.out / "metrics.jsonl") if isinstance(line, ValidationLine)]
    assert [[*line.metrics] for line in validations] == [["accuracy"]] * 2
    assert (
        "warning: the validation after epoch 2 gives no nll: metrics() returned a total count of 0\n"
        in harness.errors(spec)
    )


def test_a_metric_that_counted_nothing_is_no_matter_for_who_summarizes(tmp_path: Path) -> None:
    summary = "def summarize_metrics(totals):\n    return {'counted': totals['accuracy'][1]}\n"
    spec = harness.job(tmp_path, with_code(CONV1, RARE + summary))
    harness.run(spec)
    assert "total count of 0" not in harness.errors(spec)


WEIGHTED = """
def sampler(dataset, epoch):
    weights = [1.0 + epoch * (i % 3) for i in range(len(dataset))]
    return torch.utils.data.WeightedRandomSampler(weights, 14)
"""


def test_a_sampler_chooses_the_samples_of_each_epoch(tmp_path: Path) -> None:
    """With replacement, 14 of 26 by weights that change; drawn from the seed and the epoch alone, so that a run of
    another plan, or one that goes on from a checkpoint, has the same."""
    file, data, orders = None, None, []
    results = []
    for name, toy, replicas in (("straight", CONV3, (1, 1, 1)), ("replicas", CONV2, (2, 2))):
        spec = harness.job(
            tmp_path / name, with_code(toy, WEIGHTED), replicas, schedule="gpipe", microbatches=4, epochs=2
        )
        results.append(harness.without_statistics(weights(harness.run(spec))))
        file = ModelFile.load(spec.model, trusted=True)
        data = file.dataset("train")
        orders.append([MinibatchLoader(file, "train", ()).order_by_sampler(spec.seed, epoch) for epoch in (1, 2)])
    assert orders[0] == orders[1]
    assert [len(order) for order in orders[0]] == [14, 14]
    assert orders[0][0] != orders[0][1]
    epochs = [
        [(data.x[part], data.y[part]) for part in (order[i : i + 4] for i in range(0, 14, 4))] for order in orders[0]
    ]
    expected = replay.synchronous(file.build(spec.seed), epochs, file.loss, file.optimizer, 4)
    for found in results:
        assert_same(found, harness.without_statistics(expected))


WITH_A_GENERATOR = """
GENERATOR = torch.Generator().manual_seed(3)

def sampler(dataset, epoch):
    return torch.randperm(len(dataset), generator=GENERATOR).tolist()
"""


def test_a_sampler_is_called_once_for_each_epoch(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, with_code(CONV2, WITH_A_GENERATOR), (1, 1), schedule="gpipe", microbatches=4, epochs=2)
    found = weights(harness.run(spec))
    file, generator = ModelFile.load(spec.model, trusted=True), torch.Generator().manual_seed(3)
    data = file.dataset("train")
    epochs = [
        [(data.x[part], data.y[part]) for part in torch.randperm(len(data), generator=generator).split(4)]
        for _ in range(spec.epochs)
    ]
    expected = replay.synchronous(file.build(spec.seed), epochs, file.loss, file.optimizer, 4)
    assert_same(harness.without_statistics(found), harness.without_statistics(expected))


BY_EPOCH = """
Data.epoch = 0
Data.__getitem__ = lambda self, i: (self.x[i] + self.epoch, self.y[i])

def sampler(dataset, epoch):
    dataset.epoch = epoch
    return torch.randperm(len(dataset)).tolist()
"""


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(("replicas", "loader_workers"), [((1, 1), 0), ((2, 1), 0), ((2, 1), 1), ((3, 2), 0)])
def test_a_dataset_that_a_sampler_tells_the_epoch_gives_the_samples_of_that_epoch(
    tmp_path: Path, replicas: tuple[int, ...], loader_workers: int
) -> None:
    """At each replica of the first stage, in a resumed run too."""
    job = partial(harness.job, schedule="gpipe", microbatches=4, loader_workers=loader_workers)
    part = job(tmp_path / "part", with_code(CONV2, BY_EPOCH), replicas, epochs=1)
    harness.run(part)
    spec = job(tmp_path / "whole", with_code(CONV2, BY_EPOCH), replicas, epochs=2)
    results = [harness.run(spec), harness.run(replace(part, epochs=2, resume=part.out))]
    file = ModelFile.load(spec.model, trusted=True)
    data, epochs = file.dataset("train"), []
    for epoch in (1, 2):
        order = MinibatchLoader(file, "train", ()).order_by_sampler(spec.seed, epoch)
        minibatches = [order[i : i + 4] for i in range(0, len(order), 4)]
        epochs.append([(data.x[chosen] + epoch, data.y[chosen]) for chosen in minibatches])
    expected = replay.synchronous(file.build(spec.seed), epochs, file.loss, file.optimizer, 4)
    for outcomes in results:
        assert_same(weights(outcomes), harness.without_statistics(expected))
