"""User code trains what it trains in a plain loop, whatever it does to the parameters that it is given.

Programs are drawn from a grammar: an optimizer, what optimizer() does to the parameters, what after_update() does, and
what the loss leaves out. With a flush their weights are those of the plain loop, without one those of the replay; a
run that goes on from a checkpoint ends as one that was not disturbed. None is refused.
"""

from __future__ import annotations

import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import CONV3, CONV4, SKIP1, SKIP3, TIED2, TIED3, TWO3, Toy, assert_same, batches, stage_of, weights
from reference import replay
from test_laws_plain_loop import resumed
from test_laws_training import pipeline

from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.user_code import find_source
from pdtool.runtime.config import RunConfig

DRAWS = int(os.environ.get("PDTOOL_USER_PROGRAMS", 12))

OPTIMIZERS = {
    "sgd": "return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, weight_decay=0.1)",
    "adamw": "return torch.optim.AdamW(parameters, lr=0.01)",
    "fused": "return torch.optim.Adam(parameters, lr=0.01, fused=True)",
    "rate as a tensor": "return torch.optim.Adam(parameters, lr=torch.tensor(0.01), foreach=False, capturable=False)",
    "rebinding": """
        class Rebinding(torch.optim.SGD):
            @torch.no_grad()
            def step(self):
                for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                    p.data = p.data - 0.05 * p.grad
        return Rebinding(parameters, lr=0.05)""",
    "flattening": """
        class Flattening(torch.optim.SGD):
            @torch.no_grad()
            def step(self):
                own = [p for group in self.param_groups for p in group["params"]]
                changes = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
                vectors = [nn.utils.parameters_to_vector(each) for each in (own, changes)]
                nn.utils.vector_to_parameters(vectors[0] - 0.05 * vectors[1], own)
        return Flattening(parameters, lr=0.05)""",
    "hooks": """
        for p in parameters:
            p.register_hook(lambda gradient: 0.5 * gradient.clone())
        return torch.optim.SGD(parameters, lr=0.05)""",
    "state in groups": """
        class Counting(torch.optim.SGD):
            @torch.no_grad()
            def step(self):
                for group in self.param_groups:
                    group["k"] = group.get("k", 0) + 1
                    group["mean"] = 0.5 * group.get("mean", torch.ones(())) + 0.5 / group["k"]
                    group["lr"] *= 0.9
                super().step()
                for p in (p for group in self.param_groups for p in group["params"] if p.requires_grad):
                    p.mul_(1 - 0.1 * group["mean"] / group["k"])
        return Counting(parameters, lr=0.2)""",
    "state of the whole": """
        class Whole(torch.optim.SGD):
            n = 0
            @torch.no_grad()
            def step(self):
                self.n += 1
                self.state["all"] = {"steps": self.state.get("all", {}).get("steps", 0) + 1}
                for group in self.param_groups:
                    group["momentum"] *= 0.9
                for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                    p.mul_(1 - 0.1 / (self.n * self.state["all"]["steps"]))
                super().step()
        return Whole(parameters, lr=0.05, momentum=0.9)""",
    "state of any type": """
        class Odd(torch.optim.SGD):
            @torch.no_grad()
            def step(self):
                for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
                    state = self.state[p]
                    state["updates"] = state.get("updates", 0) + 1
                    state["a.b"] = 0.5 * state.get("a.b", 0.1) + 0.3
                    state["last_step"] = [torch.zeros_like(p), *state.get("last_step", ())][:3]
                    state[1] = {"pair": (state["updates"], "text"), "mean": state.get(1, {}).get("mean", p.mean()) / 2}
                    state["last_step"][0].copy_(p.grad)
                    for i, past in enumerate(state["last_step"]):
                        p.sub_(past, alpha=state["a.b"] * 0.1 / (i + 1))
                    p.add_(state[1]["mean"] / state["updates"], alpha=0.1)
        return Odd(parameters, lr=0.05)""",
}
IN_OPTIMIZER = {
    "": "",
    "freeze": "FIRST.requires_grad_(False)",
    "hook": "FIRST.register_hook(lambda gradient: gradient * (torch.arange(gradient.numel()) % 2).view_as(gradient))",
    "other strides": "FIRST.data = FIRST.data.transpose(0, -1).contiguous().transpose(0, -1)",
}
AFTER_UPDATE = {
    "": "",
    "rebind": "FIRST.data = FIRST.data * 0.9",
    "write": "FIRST.mul_(0.9)",
    "freeze": "FIRST.requires_grad_(update < 2)",
    "thaw": "FIRST.requires_grad_(update >= 2)",
    "thaw and freeze": "FIRST.requires_grad_(update % 3 == 1)",
}
SCHEDULES = {
    "": "",
    "step": "return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)",
    "cycle of momentum": "return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=100)",
    "writing": """
    class Writing(torch.optim.lr_scheduler.StepLR):
        def step(self):
            super().step()
            for p in (p for group in self.optimizer.param_groups for p in group["params"]):
                p.data.mul_(0.95)
    return Writing(optimizer, 2, 0.5)""",
}
LOSSES = {
    "both": "F.cross_entropy(output[0], target) + F.cross_entropy(output[1], target)",
    "one": "F.cross_entropy(output[0], target)",
    "one, in some minibatches": "F.cross_entropy(output[0], target) + (output[1].mean() if target[0] > 1 else 0)",
}
PROGRAM = """
def optimizer(named):
    named = dict(named)
    parameters = list(named.values())
    for FIRST in [named["CHOSEN"]] if "CHOSEN" in named else []:
        IN_OPTIMIZER
        pass
    OPTIMIZER

def after_update(named_parameters, update):
    for name, FIRST in named_parameters:
        if name == "CHOSEN":
            AFTER_UPDATE
            pass
"""
LOSS = """
def loss(output, target):
    return LOSS

def metrics(output, target):
    return {}
"""
PLANS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "flush": ((1, 1, 1), {"schedule": "1f1b-flush", "microbatches": 3}),
    "recomputing": ((1, 1, 1), {"schedule": "gpipe", "microbatches": 2}),
    "zero bubble": ((1, 1, 1), {"schedule": "zb-h1", "microbatches": 4}),
    "replicas": ((2, 1, 2), {"schedule": "gpipe", "microbatches": 2}),
    "1f1b": ((1, 1, 1), {}),
    "1f1b with replicas": ((2, 1, 1), {}),
    "vertical sync": ((1, 1, 1), {"weights": "vertical-sync"}),
}


CHOSEN = [(SKIP3, "b.weight"), (TWO3, "b.weight"), (CONV3, "conv2.weight"), (SKIP3, "a.bias"), (TIED3, "embed.weight")]
SPLIT_HOOKS = ("hook", "hooks")  # of a tied parameter no stage has the whole gradient: they are refused


def program(draw: random.Random) -> tuple[str, Toy]:
    """A program in words, and the toy that does it."""
    toy, chosen = draw.choice(CHOSEN)
    parts = [draw.choice(list(part)) for part in (OPTIMIZERS, IN_OPTIMIZER, AFTER_UPDATE, LOSSES)]
    if (parts[0], parts[1]) in (("flattening", "other strides"), ("hooks", "freeze")):  # refused by torch
        parts[1] = ""
    if toy is TIED3:
        parts[:2] = ["sgd" if parts[0] in SPLIT_HOOKS else parts[0], parts[1].replace("hook", "freeze")]
    code = PROGRAM.replace("    OPTIMIZER\n", "    " + OPTIMIZERS[parts[0]].strip().replace("\n    ", "\n") + "\n")
    code = code.replace("AFTER_UPDATE", AFTER_UPDATE[parts[2]]).replace("IN_OPTIMIZER", IN_OPTIMIZER[parts[1]])
    code += draw.choice(["", "MAX_GRAD_NORM = 0.3\n"])
    code = code.replace("CHOSEN", chosen) + (LOSS.replace("LOSS", LOSSES[parts[3]]) if toy is TWO3 else "")
    schedule = draw.choice([name for name in SCHEDULES if "cycle" not in name or parts[0] in ("sgd", "adamw", "fused")])
    if schedule:
        code += f"\ndef scheduler(optimizer):\n    {SCHEDULES[schedule].strip()}\n"
    return f"{chosen}: {', '.join(parts)}, {schedule}{', clipped' * ('MAX_GRAD_NORM' in code)}", replace(
        toy, model=toy.model + code
    )


@pytest.mark.rows_of_the_day(days=4)
@pytest.mark.parametrize("seed", range(DRAWS))
def test_programs_of_users_train_what_a_plain_loop_trains(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    text, toy = program(draw)
    name = draw.choice([name for name in PLANS if toy.tied == () or PLANS[name][1].get("schedule")])
    replicas, settings = PLANS[name]
    spec = harness.job(tmp_path, toy, replicas, epochs=2, batch_size=2, steps=10, **settings)
    if name == "recomputing":
        stages = tuple(stage.model_copy(update={"recompute": True}) for stage in spec.plan.stages)
        spec = replace(spec, plan=spec.plan.model_copy(update={"stages": stages}))
    sys.stdout.write(f"{text}; {name}\n")
    found = harness.without_statistics(weights(harness.run(spec)))
    expected = expected_weights(spec, replicas)
    assert_same(found, {n: v for n, v in expected.items() if n in found})
    assert_same(harness.without_statistics(weights(harness.run(resumed(spec)))), found, rtol=0, atol=0)


def expected_weights(spec: RunConfig, replicas: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Those of the plain loop, or of the replay."""
    file = ModelFile.load(spec.model, trusted=True)
    model = file.build(spec.seed)
    schedulers: dict[frozenset[str], Any] = {}

    def make_optimizer(named: Any) -> torch.optim.Optimizer:
        named = list(named)
        optimizer = file.optimizer(named)
        schedulers[frozenset(name for name, _ in named)] = file.scheduler(optimizer, 1)
        return optimizer

    def after_update(named: Any, update: int) -> None:
        named = list(named)
        file.after_update(named, update)
        if scheduler := schedulers[frozenset(name for name, _ in named)]:
            scheduler.step()

    if spec.plan.schedule == "1f1b":
        definition = pipeline(spec, replicas, replicas)
        stage = stage_of(spec).__getitem__
        max_norm = file.training.max_grad_norm
        return replay.asynchronous(
            model, stage, batches(spec), file.loss, make_optimizer, definition, (), max_norm, after_update
        )
    updates = iter(range(1, 1000))
    trained = replay.synchronous(
        model,
        batches(spec),
        file.loss,
        make_optimizer,
        spec.plan.microbatches,
        max_norm=file.training.max_grad_norm,
        after_update=lambda: after_update(model.named_parameters(), next(updates)),
    )
    return harness.without_statistics(trained)


TIED_HOOK = """
def optimizer(named):
    named = dict(named)
    named["embed.weight"].register_hook(lambda gradient: 2 * gradient)
    return torch.optim.SGD(named.values(), lr=0.05)
"""
KEPT = """
def optimizer(named):
    parameters = [p for _, p in named]
    class Keeping(torch.optim.SGD):
        views = [p.data for p in parameters]
        def step(self):
            for p, view in zip(parameters, self.views):
                if p.grad is not None:
                    view.sub_(0.1 * p.grad)
    return Keeping(parameters, lr=0.1)
"""
FROZEN_MODEL = """
_made = model
def model():
    made = _made()
    made.a.requires_grad_(False)
    return made
"""
AFTER = "\ndef after_update(named, update):\n    p = dict(named).get({name!r})\n    if p is not None: {statement}\n"
SWITCHED_OFF = """
_loss = loss
def loss(output, target):
    torch.set_grad_enabled(False)
    return _loss(output, target)
"""
REFUSED = [
    (SWITCHED_OFF, r"gradients are switched off in training: .*; use `with torch.no_grad\(\):` instead"),
    (KEPT, r"model.py:\d+: the parameter a.weight gets new memory .*; read .data again in each step"),
    (AFTER.format(name="b.weight", statement="p.data = p.data.double()"), r"b.weight became float64\[5, 5\] on cpu"),
    (AFTER.format(name="b.weight", statement="p.data = p.data[:4]"), r"b.weight became float32\[4, 5\] on cpu"),
    (
        AFTER.format(name="b.bias", statement="p.register_post_accumulate_grad_hook(print)"),
        r"model.py:\d+: the parameter b.bias has a hook on its accumulated gradient, .*; update the parameter in",
    ),
    (
        AFTER.format(name="b.bias", statement="p.register_hook(lambda gradient: gradient)"),
        r"b.bias gets a gradient hook during training, .*; register it in optimizer\(\)",
    ),
    (
        FROZEN_MODEL + AFTER.format(name="a.bias", statement="p.requires_grad_(True)"),
        r"trains parameters that model\(\) left frozen, but the plan sends no gradient back for h, .*; leave them",
    ),
]


@pytest.mark.parametrize(("code", "words"), REFUSED)
def test_what_training_cannot_follow_is_refused_by_name(tmp_path: Path, code: str, words: str) -> None:
    toy = replace(SKIP3, model=SKIP3.model + code)
    if code.startswith(FROZEN_MODEL):
        h = toy.tensors[1].model_copy(update={"gradient": False})
        toy = replace(toy, tensors=(toy.tensors[0], h, *toy.tensors[2:]))
    with pytest.raises(AssertionError, match=words):
        harness.run(harness.job(tmp_path, toy))


def test_memory_that_stays_where_it_is_may_be_kept(tmp_path: Path) -> None:
    toy = replace(SKIP3, model=SKIP3.model + KEPT)
    spec = harness.job(tmp_path, toy, schedule="1f1b-flush", microbatches=3)
    assert_same(weights(harness.run(spec)), expected_weights(spec, (1, 1, 1)))


def test_a_hook_on_a_gradient_that_no_stage_has_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"embed.weight has a gradient hook, but several stages share this"):
        harness.run(harness.job(tmp_path, replace(TIED3, model=TIED3.model + TIED_HOOK)))


OF_A_MACHINE = """
import sys
from pathlib import Path
RANK = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
sys.path.insert(0, str(Path(__file__).parent / str(RANK)))
import settings_of_machine
def optimizer(named):
    return torch.optim.SGD([p for _, p in named], lr=LR)
"""


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        ("0.1 * (1 + RANK)", r"optimizer\(\) is SGD\(.*lr=0.1, .*\) on rank 0 .*lr=0.2, .* on rank 1"),
        ("0.1", r"the file of module settings_of_machine is \w+ on rank 0 .*, \w+ on rank 1"),
    ],
    ids=["settings", "imported file"],
)
def test_replicas_do_not_train_with_different_code(tmp_path: Path, rate: str, words: str) -> None:
    """Two machines may have other environment variables, or other versions of a file that model.py imports."""
    toy = replace(SKIP1, model=SKIP1.model + OF_A_MACHINE.replace("LR", rate))
    spec = harness.job(tmp_path, toy, (2,))
    for rank in range(2):
        folder = find_source(spec.model.source).parent / str(rank)
        folder.mkdir()
        (folder / "settings_of_machine.py").write_text("#" * rank)
    with pytest.raises(AssertionError, match=words):
        harness.run(spec)


ONCE = """
def optimizer(named):
    named = dict(named)
    with torch.no_grad():
        named["{name}"].register_hook(lambda gradient: 0.5 * gradient)
        named["{name}"].mul_(1.5)
    return torch.optim.SGD(named.values(), lr=0.05)
"""


@pytest.mark.parametrize(
    ("toy", "name", "options"),
    [
        (TIED2, "mid.weight", {"schedule": "1f1b-flush"}),
        (CONV4, "conv2.weight", {"schedule": "interleaved", "chunks": 2}),
    ],
    ids=["tied", "chunks"],
)
def test_what_optimizer_does_to_parameters_happens_once(
    tmp_path: Path, toy: Toy, name: str, options: dict[str, Any]
) -> None:
    """A worker makes an optimizer for each of its stages and for each parameter that stages share."""
    toy = replace(toy, model=toy.model + ONCE.format(name=name))
    spec = harness.job(tmp_path, toy, (1, 1), microbatches=4, batch_size=2, **options)
    assert_same(harness.without_statistics(weights(harness.run(spec))), expected_weights(spec, (1, 1)))


@pytest.mark.parametrize("name", ["embed.weight", "out.weight"])
def test_a_weight_that_stages_share_frozen_cannot_be_trained_later(tmp_path: Path, name: str) -> None:
    frozen = FROZEN_MODEL.replace("made.a", "made.embed") + AFTER.format(name=name, statement="p.requires_grad_(True)")
    toy = replace(TIED3, model=TIED3.model + frozen, tied=())
    e = toy.tensors[1].model_copy(update={"gradient": False})
    toy = replace(toy, tensors=(toy.tensors[0], e, *toy.tensors[2:]))
    with pytest.raises(
        AssertionError, match=rf"{name} was frozen in model\(\) and is trained now, .* freeze it in opt"
    ):
        harness.run(harness.job(tmp_path, toy))


ADDING = """
def optimizer(named):
    parameters = [p for _, p in named]
    class Adding(torch.optim.SGD):
        steps = 0
        def step(self):
            self.steps += 1
            if self.steps == 2:
                self.add_param_group({"params": parameters[2:]})
            super().step()
    return Adding(parameters[:2], lr=0.1)
"""


def test_a_group_that_a_step_adds_is_trained_and_a_resumed_run_says_that_it_lacks_it(tmp_path: Path) -> None:
    toy = replace(SKIP3, model=SKIP3.model + ADDING)
    spec = harness.job(tmp_path, replace(toy, stages=SKIP1.stages, tensors=SKIP1.tensors), epochs=2)
    assert_same(weights(harness.run(spec)), expected_weights(spec, (1,)))
    with pytest.raises(
        AssertionError, match=r"model.py:\d+: optimizer\(\) makes 1 parameter groups, .* had 2; make all groups"
    ):
        harness.run(resumed(spec))


GLOBAL = """
_made = model
def model():
    global NET
    NET = _made()
    return NET
"""


def test_a_model_that_stands_at_the_top_of_its_file_is_warned_of(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, replace(SKIP3, model=SKIP3.model + GLOBAL), steps=1)
    harness.run(spec)
    warning = "warning: NET, at the top of model.py, refers to the model. A worker has the newest weights of its own"
    assert harness.errors(spec).count(warning) == 1
