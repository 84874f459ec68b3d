"""Optimizers of torch and of others, in three stages: each trains as in a plain loop, or is refused by name.

| optimizers | |
|---|---|
| all of torch.optim but LBFGS and SparseAdam; schedule-free AdamW, SGD and RAdam; Lion; Muon | as in a plain loop |
| Prodigy; any that clips by a norm, or whose hooks or schedule do; any that goes by the number of a group | refused |
| LBFGS, SparseAdam | refused by optimizer() (test_run_user_code.py) |
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import pytest
import torch
from harness import SKIP3, Toy, assert_same, batches, stage_of, weights
from reference import replay
from test_laws_plain_loop import resumed

from pdtool.artifacts.artifact import ModelRef
from pdtool.errors import ModelError
from pdtool.frontend import update_proof
from pdtool.frontend.model_file import ModelFile

OF_TORCH = ["ASGD", "Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop"]
OPTIMIZERS = {name: f"torch.optim.{name}(parameters, lr=0.01)" for name in (*OF_TORCH, "SGD")} | {
    "Muon": "torch.optim.Muon([p for p in parameters if p.dim() == 2], lr=0.01)",
    "schedule-free AdamW": "schedulefree.AdamWScheduleFree(parameters, lr=0.01, warmup_steps=3)",
    "schedule-free SGD": "schedulefree.SGDScheduleFree(parameters, lr=0.1)",
    "schedule-free RAdam": "schedulefree.RAdamScheduleFree(parameters, lr=0.01)",
    "Lion": "lion_pytorch.Lion(parameters, lr=0.001, weight_decay=0.1)",
    "Lookahead": "Lookahead(torch.optim.Adam(parameters, lr=0.01))",
    "Lookahead without Optimizer.__init__": "BareLookahead(torch.optim.Adam(parameters, lr=0.01))",
}
# As timm has it: the state of both is in the wrapped optimizer.
LOOKAHEAD = """
class Lookahead(torch.optim.Optimizer):
    def __init__(self, base):
        super().__init__([{"params": [torch.nn.Parameter(torch.zeros(1))]}], {})
        self.base, self.param_groups = base, base.param_groups
        for group in self.param_groups:
            group["calls"] = 0

    @torch.no_grad()
    def step(self):
        self.base.step()
        for group in self.param_groups:
            group["calls"] += 1
            for p in group["params"]:
                state = self.base.state[p]
                slow = state.setdefault("slow", p.clone())
                if group["calls"] % 2 == 0:
                    p.copy_(slow.lerp_(p, 0.5))

class BareLookahead(Lookahead):  # as in the version that is copied most
    def __init__(self, base):
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, base.state, base.defaults
        for group in self.param_groups:
            group["calls"] = 0

    def zero_grad(self, set_to_none=True):
        self.base.zero_grad(set_to_none)
"""


def with_optimizer(code: str, more: str = "") -> Toy:
    imports = "\n".join(f"import {name}" for name in ("schedulefree", "lion_pytorch", "prodigyopt") if name in code)
    more += LOOKAHEAD if "Lookahead" in code else ""
    made = f"\n{imports}\n{more}\ndef optimizer(named):\n    parameters = [p for _, p in named]\n    return {code}\n"
    return replace(SKIP3, model=SKIP3.model + made)


@pytest.mark.rows_of_the_day(days=6)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_in_three_stages_it_trains_as_in_a_plain_loop(tmp_path: Path, name: str) -> None:
    """In a run that goes on from a checkpoint, too. Those that have modes are in that of evaluation at the end."""
    toy = with_optimizer(OPTIMIZERS[name])
    spec = harness.job(tmp_path, toy, schedule="1f1b-flush", microbatches=3, epochs=2)
    found = weights(harness.run(spec))
    file = ModelFile.load(spec.model, trusted=True)
    model, made = file.build(spec.seed), []

    def optimizer(named: Any) -> torch.optim.Optimizer:
        made.append(file.optimizer(list(named)))
        set_mode("train")
        return made[0]

    def set_mode(mode: str) -> None:
        if hasattr(made[0], mode):
            getattr(made[0], mode)()

    evaluated: dict[str, torch.Tensor] = {}

    def after_epoch() -> None:
        set_mode("eval")
        evaluated.update({n: p.detach().clone() for n, p in model.named_parameters()})
        set_mode("train")

    replay.synchronous(model, batches(spec), file.loss, optimizer, 3, after_epoch=after_epoch)
    assert_same(found, evaluated)
    assert_same(weights(harness.run(resumed(spec))), found, rtol=0, atol=0)


KEPT_BY_NAME = """
import torch as _torch
SLOW, EMA = {}, {}
def after_update(named, update):
    for name, p in named:
        if name not in SLOW:
            SLOW[name], EMA[name] = p.detach().clone(), p.detach().clone()
        EMA[name].lerp_(p.detach(), 0.1)
        _torch.save(EMA[name], FOLDER + f"/{name}.pt")
        if update % 3 == 0:  # Lookahead
            SLOW[name].lerp_(p.detach(), 0.5)
            p.data.copy_(SLOW[name])
"""


def test_state_and_files_of_after_update_are_those_of_training(tmp_path: Path) -> None:
    """The check tries it before, on invented gradients."""
    saved = tmp_path / "saved"
    saved.mkdir()
    code = f"FOLDER = {str(saved)!r}\n{KEPT_BY_NAME}"
    toy = replace(SKIP3, model=SKIP3.model + code)
    spec = harness.job(tmp_path, toy, schedule="1f1b-flush", microbatches=3, epochs=2)
    file = ModelFile.load(spec.model, trusted=True)
    model = file.build(spec.seed)
    names = [name for name, _ in model.named_parameters()]
    update_proof.check_update(file, model, [{n for n in names if n[0] in part} for part in ("a", "bc", "d")])
    assert not any(saved.iterdir())
    assert not file.module.SLOW
    found = weights(harness.run(spec))
    averages = {path.stem: torch.load(path) for path in saved.iterdir()}
    updates = iter(range(1, 1000))
    expected = replay.synchronous(
        model,
        batches(spec),
        file.loss,
        lambda named: file.optimizer(list(named)),
        3,
        after_update=lambda: file.after_update(list(model.named_parameters()), next(updates)),
    )
    assert_same(found, harness.without_statistics(expected))
    assert_same(averages, file.module.EMA)


CLIPPING = """
class Clipping(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step()
class Rarely(torch.optim.SGD):
    def __init__(self, parameters, lr, normalizes):
        super().__init__(parameters, lr)
        self.normalizes = normalizes
    def step(self):
        gradients = [p.grad for group in self.param_groups for p in group["params"]]
        norm = sum(gradient.norm() for gradient in gradients)
        for gradient in gradients if self.normalizes(norm) else ():
            gradient /= norm
        return super().step()
class Scaled(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            p.grad *= 0.5
        return super().step()
class First(torch.optim.SGD):
    def step(self):
        self.param_groups[0]["lr"] = 0.1 * self.param_groups[0]["params"][0].numel()
        return super().step()
class ByPosition(torch.optim.SGD):
    def __init__(self, parameters, lr):
        super().__init__(parameters, lr)
        self.sums = [torch.zeros_like(p) for p in parameters]
    @torch.no_grad()
    def step(self):
        for p, total in zip(self.param_groups[0]["params"], self.sums):
            p.sub_(total.add_(p.grad), alpha=0.1)
class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in (p for group in self.param_groups for p in group["params"]):
            p.add_(torch.randn_like(p))
def hooked(parameters):
    made = torch.optim.SGD(parameters, 0.1)
    def clip(optimizer, args, kwargs):
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
    made.register_step_pre_hook(clip)
    return made
"""
SCHEDULED = """
def scheduler(optimizer):
    seen = [p for group in optimizer.param_groups for p in group["params"]]
    def rate(i):
        return 1 / (1 + sum(float(p.grad.norm()) for p in seen if p.grad is not None))
    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
"""
NORMALIZED = """
def after_update(named, update):
    total = sum(p.square().sum() for _, p in named) ** 0.5
    for _, p in named:
        p.div_(total)
"""
AVERAGED = """
def after_update(named, update):
    parameters = dict(named)
    parameters["a.weight"].mul_(0.9).add_(parameters["d.weight"].mean(), alpha=0.1)
"""
SGD = "torch.optim.SGD(parameters, lr=0.1)"
FOLLOWING = """
def after_update(named, update):
    parameters = dict(named)
    for name in parameters:
        if name == "LATER.bias":
            parameters[name].lerp_(parameters["EARLIER.bias"].mean(), 0.1)
"""
PROVED = [
    ("torch.optim.SGD(parameters, 0.1)", FOLLOWING.replace("LATER", "c").replace("EARLIER", "b"), ""),  # of one stage
    (
        "torch.optim.SGD(parameters, 0.1)",
        FOLLOWING.replace("LATER", "c").replace("EARLIER", "a"),
        r"after_update\(\) depends on parameters of several stages: .* fails with only",
    ),
    ("Scaled(parameters, 0.1)", CLIPPING, ""),
    ("Noisy(parameters, 0.1)", CLIPPING, ""),  # whose numbers are others for each stage: it cannot be proved
    (
        "Clipping(parameters, 0.1)",
        CLIPPING,
        r"a step of Clipping depends .*, a.weight, a.bias, b.weight and 5 others get",
    ),
    ("Rarely(parameters, 0.1, lambda norm: norm > 300)", CLIPPING, r"a step of Rarely depends"),  # on huge gradients
    ("Rarely(parameters, 0.1, lambda norm: norm < 1e-3)", CLIPPING, r"a step of Rarely depends"),  # on tiny ones
    (
        "hooked(parameters)",
        CLIPPING,
        r"a step of SGD depends on parameters of several stages: .* if it clips gradients, set MAX_GRAD_NORM",
    ),
    (
        "First([{'params': [p]} for p in parameters], 0.1)",
        CLIPPING,
        r".*it works with all parameters, but fails .*IndexError.*\); if it fails because a parameter group is "
        r"empty there, skip it with `if group\['params'\]:`; if it clips gradients, ",
    ),
    (
        "ByPosition(parameters, 0.1)",
        CLIPPING,
        r"a step of ByPosition depends .* size of tensor .*\); if it keeps values of parameters by position, keep "
        r"them in self.state\[parameter\] instead; if it clips gradients, ",
    ),
    (
        "prodigyopt.Prodigy(parameters)",
        "",
        "a step of Prodigy depends on parameters of several stages: with the same gradients",
    ),
    (SGD, SCHEDULED, r"scheduler\(\) depends on parameters of several stages"),
    (SGD, NORMALIZED, r"after_update\(\) depends on parameters of several stages"),
    (SGD, NORMALIZED.replace("total)", "2.0)"), ""),
    (SGD, AVERAGED, r"after_update\(\) depends .* raised KeyError: 'd.weight'\); if the update needs all parameters "),
]


LARGE = """
def model():
    return nn.Sequential(nn.Linear(1200, 1000), nn.Linear(1000, 10))

def after_update(named, update):
    total = sum(p.square().sum() for _, p in named) ** 0.5
    for _, p in named:
        p.mul_(min(1.0, 15 / total))
"""


def test_what_depends_on_the_norm_of_a_large_model_is_found(tmp_path: Path) -> None:
    """It is computed of corners, and the norm of the weights is 18."""
    (tmp_path / "model.py").write_text(
        f"{SKIP3.model}{LARGE}".replace("OPTIMIZER", SGD.replace("parameters", "[p for _, p in named]"))
    )
    file = ModelFile.load(ModelRef(source=str(tmp_path / "model.py")), trusted=True)
    stages = [{"0.weight", "0.bias"}, {"1.weight", "1.bias"}]
    with pytest.raises(
        ModelError, match=r"^model.py:\d+: after_update\(\) depends on parameters of several stages: wi"
    ):
        update_proof.check_update(file, file.build(), stages)


def parts(tmp_path: Path, toy: Toy) -> tuple[ModelFile, list[set[str]]]:
    """The model's file, and the parameters of each stage."""
    spec = harness.job(tmp_path, toy)
    file = ModelFile.load(ModelRef(source=str(tmp_path / "model.py")), trusted=True)
    return file, [{n for n, at in stage_of(spec).items() if at == s} for s in range(3)]


def test_a_trial_of_the_update_leaves_nothing_behind(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """optimizer() and scheduler() were called once in this process."""
    note = f"open('{tmp_path}/noted.txt', 'a').write('tried')"
    more = f"def scheduler(o):\n    {note}\n    print('tried')\n    return torch.optim.lr_scheduler.ConstantLR(o)\n"
    file, stages = parts(tmp_path, with_optimizer(f"print('tried') or {note} and {SGD}", more))
    update_proof.check_update(file, file.build(), stages)
    assert "tried" not in capfd.readouterr().out
    assert not (tmp_path / "noted.txt").exists()


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(("code", "more", "words"), PROVED)
def test_an_update_that_looks_at_several_stages_is_refused(tmp_path: Path, code: str, more: str, words: str) -> None:
    file, stages = parts(tmp_path, with_optimizer(code, more))
    update_proof.check_update(file, file.build(), [set.union(*stages)])  # in one stage it is what it is
    if words:
        with pytest.raises(ModelError, match=rf"^model.py:\d+: {words}"):
            update_proof.check_update(file, file.build(), stages)
    else:
        update_proof.check_update(file, file.build(), stages)


def test_an_update_that_fails_on_growing_gradients_is_refused(tmp_path: Path) -> None:
    """If the steps up to there are all that is compared, they may be equal by chance, as NaN equals NaN."""
    file, stages = parts(tmp_path, with_optimizer("prodigyopt.Prodigy(parameters, lr=1.0, weight_decay=0.01)"))
    with pytest.raises(ModelError, match=r"Prodigy raised .* overflow; pdtool tries it with .* train without stages"):
        update_proof.check_update(file, file.build(), stages)


@pytest.mark.rows_of_the_day(days=5)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_update_of_each_parameter_alone_is_proved(tmp_path: Path, monkeypatch: Any, name: str) -> None:
    """Those of torch are, too, though it is not computed for them."""
    monkeypatch.setattr(update_proof, "user_code_in_step", lambda file, optimizer: ["a step"])
    file, stages = parts(tmp_path, with_optimizer(OPTIMIZERS[name]))
    update_proof.check_update(file, file.build(), stages)
