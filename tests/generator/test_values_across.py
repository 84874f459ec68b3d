"""Values that user code carries from one minibatch or function to another, past the tensors that stages exchange."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from skeletons import plan_of, skeleton

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.profile import Profile
from pdtool.errors import ModelError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_rules import check_loss_parameters
from pdtool.frontend.user_code import undoing_user_changes
from pdtool.frontend.variable_uses import collected
from pdtool.generator.composed import VerificationError
from pdtool.generator.generate import generate

FILE = """
import torch
from torch import nn
from torch.utils.data import TensorDataset, default_collate

{before}
class Part(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        {init}
    def forward(self, x):
        h = self.linear(x)
        {forward}

def model():
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), Part(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))

def dataset(split):
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)
{after}
"""
PENALIZED = """
def loss(output, target):
    penalty = sum(PENALTIES)
    PENALTIES.clear()
    return nn.functional.cross_entropy(output, target) + penalty
"""
CUBE = """
CACHE = {}
class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        CACHE["x"] = x
        return x**3
    @staticmethod
    def backward(ctx, gradient):
        return 3 * CACHE["x"]**2 * gradient
"""
HOOK = "self.register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * (1 + {}.abs()),))"
IN_FLIGHT = {
    "an activation that a hook reads": {
        "init": HOOK.format("module.kept"),
        "forward": "self.kept = x.detach(); return torch.tanh(h)",
    },
    "a cache beside ctx": {"before": CUBE, "forward": "return Cube.apply(h)"},
    "a buffer that forward changes through data": {
        "forward": "self.scale.data.mul_(0.5).add_(h.detach().abs().mean(0)); return torch.tanh(h / self.scale)"
    },
    "a buffer that forward changes": {
        "forward": "self.scale.lerp_(h.detach().abs().mean(0), 0.5); return h / self.scale"
    },
}
MIXUP = """
LAMBDA = {"now": 1.0}
class Mixup:
    def __call__(self, samples):
        LAMBDA["now"] = 0.3
        return default_collate(samples)
collate = Mixup()
def loss(output, target):
    return LAMBDA["now"] * nn.functional.cross_entropy(output, target)
"""
EPOCH = """
EPOCH = 0
def sampler(dataset, epoch):
    global EPOCH
    EPOCH = epoch
    return list(range(len(dataset)))
def loss(output, target):
    return nn.functional.cross_entropy(output, target) * (1 + EPOCH)
"""
HELPERS = """
STEEPNESS = {}
def keep(value):
    STEEPNESS["now"] = value
def loss(output, target):
    value = nn.functional.cross_entropy(output, target)
    keep(float(value))
    return value
class Careful(torch.optim.SGD):
    def step(self, closure=None):
        if STEEPNESS.get("now", 1.0) > 0.01:
            super().step(closure)
def optimizer(named_parameters):
    return Careful([p for _, p in named_parameters], lr=0.1)
"""
SHARED_CACHE = """
TABLES = {}
def table(size):
    if size not in TABLES:
        TABLES[size] = torch.ones(size)
    return TABLES[size]
def collate(samples):
    x, y = default_collate(samples)
    return x * table(4), y
step = 0
def loss(output, target):
    global step
    step += 1
    return nn.functional.cross_entropy(output * table(2), target)
class Own(torch.optim.SGD):
    def step(self, closure=None):
        super().step(closure)
def optimizer(named_parameters):
    return Own([p for _, p in named_parameters], lr=0.1)
"""
LOAD = """
def after_update(named, update):
    for name, parameter in named:
        parameter.add_(0.01 * LOAD["now"])
"""
OBJECT = """
class Config:
    def __init__(self):
        self.smoothing, self.calls = 0.0, 0
    def begin(self, epoch):
        self.count()
        self.smoothing = 0.1 * epoch
    def count(self):
        self.calls += 1
    def smooth(self):
        return self.smoothing
CONFIG = Config()
def sampler(dataset, epoch):
    CONFIG.begin(epoch)
    return range(len(dataset))
def loss(output, target):
    CONFIG.count()
    return nn.functional.cross_entropy(output, target, label_smoothing=CONFIG.smooth())
"""
HOOKED = """
def model(of=model):
    net = of()
    net[0].register_forward_pre_hook(lambda module, inputs: (inputs[0] * 0.9,))
    net[3].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 2,))
    return net
"""
WRITES_LOAD = 'LOAD["now"] = h.detach().mean() if self.training else 0.0; return h'
WEIGHTED = """
RATE = 0.1
WEIGHTS = {}
def weigh(targets):
    WEIGHTS["now"] = torch.bincount(targets).float()
def dataset(split, of=dataset):
    global RATE
    weigh((made := of(split)).tensors[1])
    RATE = 1 / len(made)
    return made
"""
FIRST = {
    "before": "MEAN = 0.0",
    "after": "def dataset(split, of=dataset):\n    global MEAN\n    MEAN = 0.5\n    return of(split)\n",
}
EXAMPLE = "def example_inputs(batch_size):\n    return torch.zeros(batch_size, 4)\n"
PASSED = {
    "dataset to loss": (
        {
            "after": f"{WEIGHTED}def loss(output, target):\n"
            "    return nn.functional.cross_entropy(output, target, WEIGHTS['now'])"
        },
        r"dataset\(\) changes WEIGHTS, which loss\(\) reads",
    ),
    "dataset to optimizer": (
        {"after": f"{WEIGHTED}def optimizer(named):\n    return torch.optim.SGD([p for _, p in named], lr=RATE)"},
        r"dataset\(\) changes RATE, which optimizer\(\) reads",
    ),
    "dataset to model": (
        {"after": f"{WEIGHTED}def model(of=model):\n    return nn.Sequential(of(), nn.Dropout(RATE))"},
        r"dataset\(\) changes RATE, which model\(\) reads, but the model is built first",
    ),
    "dataset to forward": (
        {"before": FIRST["before"], "forward": "return h - MEAN", "after": FIRST["after"] + EXAMPLE},
        r"dataset\(\) changes MEAN, which forward reads, but stages have its value as a constant",
    ),
    "a sample to forward": (
        {
            "before": "RATE = 0.5",
            "forward": "return h * RATE",
            "after": "made = dataset\nclass Late(TensorDataset):\n    def __getitem__(self, i):\n        global RATE\n"
            "        RATE += i > 40\n        return super().__getitem__(i)\n"
            "def dataset(split):\n    return Late(*made(split).tensors)\n",
        },
        r"model\.py:\d+: dataset\(\) changes RATE, which forward reads, but stages have its value as a constant",
    ),
    "a method under a condition to forward": (
        {
            "before": "RATE = [0.5]",
            "forward": "return h * RATE[0]",
            "after": "class Loss:\n    if True:\n        def __call__(self, output, target):\n"
            "            RATE[0] += 0.1\n            return nn.functional.cross_entropy(output, target)\n"
            "loss = Loss()\n",
        },
        r"model\.py:\d+: loss\(\) changes RATE\[0\], which forward reads, but stages have its value as a constant",
    ),
    "the optimizer's class to forward": (
        {
            "before": "RATE = [0.5]",
            "forward": "return h * scaled()",
            "after": "def scaled():\n    return RATE[0]\nclass Own(torch.optim.SGD):\n    def step(self):\n"
            "        RATE[0] *= 0.9\ndef optimizer(named):\n    return Own([p for _, p in named], lr=0.1)\n",
        },
        r"model\.py:\d+: optimizer\(\) changes RATE\[0\], which forward reads, but stages have its value as a constant",
    ),
    "a helper of loss, which the model could call, to forward": (
        {
            "before": "RATE = [0.5]\ndef anneal():\n    RATE[0] *= 0.9\n",
            "forward": "return h * RATE[0]\n    def anneal(self):\n        anneal()",
            "after": "def loss(output, target):\n    anneal()\n    return output.mean()\n",
        },
        r"model\.py:\d+: loss\(\) changes RATE\[0\], which forward reads",
    ),
    "a loss object to forward": (
        {
            "before": "RATE = [0.5]",
            "forward": "return h * RATE[0]",
            "after": "class Loss(nn.CrossEntropyLoss):\n    def forward(self, output, target):\n"
            "        RATE[0] += 0.1\n        return super().forward(output, target)\nloss = Loss()\n",
        },
        r"model\.py:\d+: loss\(\) changes RATE\[0\], which forward reads",
    ),
    "a schedule to forward": (
        {
            "before": "RATE = 0.5",
            "forward": "return h * RATE",
            "after": "def factor(step):\n    global RATE\n    RATE = 0.5 + step\n    return 1.0\n"
            "def scheduler(optimizer):\n    return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)\n",
        },
        r"model\.py:\d+: scheduler\(\) changes RATE, which forward reads",
    ),
    "forward to loss in a list": (
        {"before": "PENALTIES = []", "forward": "PENALTIES.append(h.abs().mean()); return h", "after": PENALIZED},
        r"loss\(\) changes PENALTIES, which forward reads, .*; if forward puts values there, return them as part of "
        r"the output; otherwise keep it in a buffer that forward changes$",
    ),
    "callable object to loss": ({"after": MIXUP}, r"model\.py:\d+: collate\(\) changes LAMBDA, which loss\(\) reads"),
    "a helper of loss to the optimizer's class": (
        {"after": HELPERS},
        r"model\.py:\d+: loss\(\) changes STEEPNESS, which the optimizer's step reads",
    ),
    "method of an object to loss": (
        {"after": OBJECT},
        r"model\.py:\d+: sampler\(\) changes CONFIG\.smoothing, which loss\(\) reads",
    ),
    "sampler to loss": ({"after": EPOCH}, r"sampler\(\) changes EPOCH, which loss\(\) reads"),
    "forward to after_update": (
        {"before": "LOAD = {}", "forward": WRITES_LOAD, "after": LOAD},
        r"forward changes the global variable LOAD of model\.py in each call, but it is read in after_update\(\)",
    ),
}
CLIPPED = """
from torch.optim.optimizer import register_optimizer_step_pre_hook
def clip(optimizer, *_):
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.1)
def optimizer(named_parameters):
    register_optimizer_step_pre_hook(clip)
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)
"""


SKIPPING = """
class Careful(torch.optim.SGD):
    def step(self, closure=None):
        gradients = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if all(bool(gradient.isfinite().all()) for gradient in gradients):
            super().step(closure)
def optimizer(named_parameters):
    return Careful([p for _, p in named_parameters], lr=0.1)
"""


def written(folder: Path, **parts: str) -> tuple[ModelFile, Profile]:
    defaults = {"before": "", "init": "", "forward": "return torch.tanh(h)", "after": ""}
    text = FILE
    for name, part in (defaults | parts).items():
        text = text.replace(f"{{{name}}}", part)
    (folder / "model.py").write_text(text)
    file = ModelFile.load(ModelRef(source=str(folder / "model.py")), trusted=True)
    return file, skeleton(file)


def generated(folder: Path, in_flight: int | None = None, **parts: str) -> None:
    file, profile = written(folder, **parts)
    plan = plan_of(profile, 2)
    if in_flight:
        stages = tuple(stage.model_copy(update={"in_flight": in_flight}) for stage in plan.stages)
        plan = plan.model_copy(update={"stages": stages})
    generate(plan, profile, file, folder / "plan")


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("name", IN_FLIGHT)
def test_what_a_backward_reads_must_not_be_changed_by_the_next_forward(name, tmp_path):
    """In a plain loop each backward follows its own forward; with several minibatches in flight it does not."""
    with pytest.raises(VerificationError, match=r"two minibatches in flight.*the backward of one minibatch needs"):
        generated(tmp_path, **IN_FLIGHT[name])
    generated(tmp_path, in_flight=1, **IN_FLIGHT[name])


@pytest.mark.parametrize(
    "forward",
    [
        "scale = h.detach().abs(); self.training and h.register_hook(lambda g: g / (1 + scale)); return h",
        "self.scale.add_(h.detach().mean(0)); return h / self.scale.clone()",
    ],
)
def test_values_of_their_own_may_be_kept_for_backward(forward, tmp_path):
    generated(tmp_path, forward=forward)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("name", PASSED)
def test_no_variable_carries_a_value_to_a_function_in_another_process(name, tmp_path):
    parts, message = PASSED[name]
    with pytest.raises(VerificationError, match=message):
        generated(tmp_path, **parts)


IN_PLACE = """
import numpy
LAST, KEPT, ROWS = torch.zeros(()), {"x": torch.zeros(())}, numpy.zeros(3)
class Vocabulary:
    def filter_(self, least): return least
    def __float__(self): return 0.0
VOCABULARY, LOG = Vocabulary(), []
def print_(value, out): pass
def loss(output, target):
    value = nn.functional.cross_entropy(output, target)
    STATEMENT
    return value
def after_update(named, update):
    for _, parameter in named:
        parameter.add_(LAST + KEPT["x"] + ROWS.sum() + float(VOCABULARY), alpha=0.01)
    LOG.append(update)
"""


@pytest.mark.parametrize(
    ("statement", "variable"),
    [
        ("LAST.copy_(value.detach())", "LAST"),
        ("LAST.mul_(0.9).add_(value.detach())", "LAST"),
        ("torch.add(LAST, 1, out=LAST)", "LAST"),
        ("nn.init.constant_(LAST, 2.0)", "LAST"),
        ("KEPT['x'].fill_(float(value))", "KEPT"),
        ("KEPT.setdefault('x', value.detach()).mul_(0.5)", "KEPT"),
        ("ROWS.fill(float(value))", "ROWS"),
        ("LAST.detach().add_(1)", "LAST"),
        ("torch.Tensor.add_(LAST, 1)", "LAST"),
        ("LAST.mul(2).add_(1); nn.init.zeros_(LAST.clone())", ""),
        ("KEPT = {'x': value}; KEPT['x'].detach().mul_(2)", ""),
        ("numpy.bool_(ROWS)", ""),
        ("LAST[target].clamp_(min=0.1); LAST.requires_grad_(False)", ""),
        ("VOCABULARY.filter_(1); print_(1, out=VOCABULARY); LOG.append(float(value))", ""),
    ],
)
def test_a_change_in_place_carries_a_value_too(statement, variable, tmp_path):
    file = written(tmp_path, after=IN_PLACE.replace("STATEMENT", statement))[0]
    found = {name for _, name in collected(file.module, "loss", "after_update")}
    assert found == ({variable} if variable else set())


WARM = """
NET, build = [], model
def model():
    NET[:] = [build()]
    return NET[0]
def warm():
    for module in NET[-1].modules():
        if isinstance(module, Part):
            module.factor *= 1.5
"""
WARMED = {  # where reading the file does not show that the model's number changes
    "sampler": "def sampler(dataset, epoch):\n    warm()\n    return list(range(len(dataset)))\n",
    "loss": "def loss(output, target):\n    warm()\n    return nn.functional.cross_entropy(output, target)\n",
    "optimizer": "made = optimizer\ndef optimizer(named):\n    of = made(named)\n"
    "    of.register_step_post_hook(lambda *_: warm())\n    return of\n",
    "scheduler": "def scheduler(optimizer, updates):\n    def rate(update):\n        warm()\n        return 1.0\n"
    "    return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)\n",
    "after_update": "def after_update(named_parameters, update):\n    warm()\n",
    "train": """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.epoch = build(), 0
    def train(self, mode=True):
        self.epoch += mode
        return super().train(mode)
    def forward(self, x):
        return self.net(x) * (1 + 0.1 * self.epoch)
def model():
    return Net()
""",
}


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("function", WARMED)
def test_no_function_of_training_changes_a_number_that_forward_reads(function, tmp_path):
    parts = {"init": "self.factor = 1.0", "forward": "return h * self.factor", "after": WARM + WARMED[function]}
    message = rf"model\.py:.* {function}\(\) changes a value that forward reads .* but stages keep it as a constant"
    with pytest.raises(ModelError, match=message):
        generated(tmp_path, in_flight=1, **parts)


def test_a_model_that_an_object_holds_is_tried_too(tmp_path):
    holder = "class Trainer:\n    state = {}\nTRAINER = Trainer()\n"
    warm = WARM.replace("NET, build = [], model", "build = model").replace("NET[:]", "TRAINER.state['nets']")
    warm = holder + warm.replace("NET[", "TRAINER.state['nets'][") + WARMED["sampler"]
    with pytest.raises(ModelError, match=r"sampler\(\) changes a value that forward reads"):
        generated(tmp_path, in_flight=1, init="self.factor = 1.0", forward="return h * self.factor", after=warm)


@pytest.mark.parametrize("function", [name for name in WARMED if name != "train"])
def test_no_function_of_training_changes_the_mode_of_a_module(function, tmp_path):
    """As to freeze the statistics of a batch norm; training went on without that."""
    warm = WARM.replace("module.factor *= 1.5", "module.linear.train(not NET[-1].training)")
    with pytest.raises(
        ModelError, match=rf"{function}\(\) puts 2.linear into another mode, but stages keep their modes"
    ):
        generated(tmp_path, in_flight=1, forward="return h", after=warm + WARMED[function])


def test_a_loss_that_leaves_the_model_in_training_mode_is_refused(tmp_path):
    """In a validation: its next minibatch would be computed in training mode by a plain loop."""
    asks = "def loss(output, target):\n    NET[-1].eval()\n    NET[-1].train()\n    return output.sum()\n"
    warm = WARM[: WARM.index("def warm")] + asks
    with pytest.raises(ModelError, match=r"loss\(\) puts the model into another mode, but stages keep their modes"):
        generated(tmp_path, in_flight=1, forward="return h", after=warm)


def test_train_need_not_return_the_module(tmp_path):
    """As Python allows, and a plain loop, which does not use the value; codegen ended in an AttributeError."""
    after = """
build = model
class Net(nn.Sequential):
    def train(self, mode=True):
        super().train(mode)
        self[2].bn.eval()
def model():
    return Net(*build())
"""
    generated(tmp_path, init="self.bn = nn.BatchNorm1d(8)", forward="return self.bn(h)", after=after)


REPLACING = {
    "2.scale": "module.scale = module.scale * 1.5",
    "2.scale, registered again": "module.register_buffer('scale', torch.zeros(8))",
    "2.linear.weight": "module.linear.weight = nn.Parameter(module.linear.weight * 1.5)",
}


@pytest.mark.parametrize(
    ("function", "name"), [*zip((name for name in WARMED if name != "train"), [*REPLACING, *REPLACING], strict=False)]
)
def test_no_function_of_training_replaces_a_tensor_of_the_model(function, name, tmp_path):
    """As torch.nn.utils.prune does; training went on with the first one."""
    warm = WARM.replace("module.factor *= 1.5", REPLACING[name])
    message = rf"model\.py:.* {function}\(\) puts another tensor in the place of {name.partition(',')[0]} in the model"
    with pytest.raises(ModelError, match=message):
        generated(tmp_path, in_flight=1, forward="return h * self.scale", after=warm + WARMED[function])


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(("function", "refused"), [("sampler", 1), ("loss", 0), ("metrics", 0), ("after_update", None)])
def test_only_the_worker_of_a_stage_may_write_into_its_tensors(function, refused, tmp_path):
    """`refused`: in which stage the tensor must be; the write was lost there."""
    functions = WARMED | {"metrics": "def metrics(output, target):\n    warm()\n    return {'n': (1.0, 1)}\n"}
    for stage, part in enumerate(("0.bias", "5.bias")):
        write = f"if module is NET[-1]:\n            module.get_parameter('{part}').data.add_(1)"
        warm = WARM.replace("if isinstance(module, Part):\n            module.factor *= 1.5", write)
        message = rf"{function}\(\) writes into {part} of the model, but runs in another worker than the stage that has"
        with pytest.raises(ModelError, match=message) if stage == refused else nullcontext():
            generated(tmp_path, in_flight=1, forward="return h", after=warm + functions[function])


def test_a_worker_with_several_stages_may_write_into_each(tmp_path):
    """With four stages in two chunks, the loss runs in the worker that has stages 1 and 3."""
    write = "if module is NET[-1]:\n            module.get_parameter('PART').data.add_(1)"
    warm = WARM.replace("if isinstance(module, Part):\n            module.factor *= 1.5", write) + WARMED["loss"]
    for part, refused in (("0.bias", True), ("2.linear.bias", False), ("3.bias", True), ("5.bias", False)):
        file, profile = written(tmp_path, after=warm.replace("PART", part))
        nodes = [["input", "0", "1"], ["2.linear", "2.tanh"], ["3", "4"], ["5"]]
        plan = plan_of(profile, 4)
        stages = [
            s.model_copy(update={"nodes": tuple(n), "in_flight": 1}) for s, n in zip(plan.stages, nodes, strict=True)
        ]
        plan = plan.model_copy(update={"stages": tuple(stages), "chunks": 2})
        with pytest.raises(ModelError, match=rf"loss\(\) writes into {part}") if refused else nullcontext():
            generate(plan, profile, file, tmp_path / "plan")


def test_what_collate_writes_is_not_blamed_on_the_loss(tmp_path):
    """The first stage's worker loads the data, unless loader workers do."""
    collate = (
        "def collate(samples):\n    NET[-1].get_buffer('2.scale').mul_(0.5)\n    return default_collate(samples)\n"
    )
    generated(tmp_path, in_flight=1, forward="return h", after=WARM + collate)


@pytest.mark.parametrize(
    ("forward", "after"),
    [
        ("self.scale.mul_(0.5); return self.norm(h)", WARM),
        ("self.scale = 0.9 * self.scale + h.detach().mean(0); return self.norm(h)", WARM),
        ("self.scale = self.scale + 1 if h.detach().sum() > 0 else self.scale; return self.norm(h)", ""),  # opaque
    ],
)
def test_what_forward_writes_is_not_blamed_on_the_functions(forward, after, tmp_path):
    after += "def after_update(named_parameters, update):\n    pass\n"
    generated(tmp_path, in_flight=1, init="self.norm = nn.BatchNorm1d(8)", forward=forward, after=after)


def test_metrics_is_named_where_it_may_be_the_one(tmp_path):
    parts = {"init": "self.factor = 1.0", "forward": "return h * self.factor"}
    metrics = "def metrics(output, target):\n    warm()\n    return {'n': (1.0, 1)}\n"
    with pytest.raises(ModelError, match=r"loss\(\) or metrics\(\) changes a value that forward reads"):
        generated(tmp_path, **parts, after=WARM + metrics)


def test_a_buffer_that_the_first_forward_makes_is_no_obstacle(tmp_path):
    mask = 'self.mask is None and self.register_buffer("mask", torch.ones(8), persistent=False)'
    init = 'self.factor = 1.0; self.register_buffer("mask", None)'
    with pytest.raises(ModelError, match=r"sampler\(\) changes a value that forward reads"):
        generated(
            tmp_path, init=init, forward=f"{mask}; return h * self.mask * self.factor", after=WARM + WARMED["sampler"]
        )


def test_a_function_that_cannot_be_tried_is_not_refused(tmp_path):
    """As where a library in it does not survive a fork, or it takes longer than a trial may."""
    ends = "import os\ndef sampler(dataset, epoch):\n    os.abort()\n"
    generated(tmp_path, forward="return torch.tanh(h)", init="pass", after=WARM + ends)


def test_what_they_change_of_the_model_elsewhere_is_no_matter(tmp_path):
    parts = {
        "init": "self.factor = 1.0",
        "forward": "return torch.tanh(h)",
        "after": WARM + "".join([*WARMED.values()][:-1]),
    }
    generated(tmp_path, **parts)


def test_optimizer_may_set_what_forward_does_not_read(tmp_path):
    """Other keys of a common table, a setting of torch, or what is frozen."""
    after = """
CONFIG = {"scale": 0.5}
NET = None
def model(of=model):
    global NET
    NET = of()
    return NET
def optimizer(named_parameters):
    CONFIG["lr"] = 0.1
    torch.backends.cudnn.benchmark = False
    NET[0].weight.requires_grad = False
    return torch.optim.SGD([p for _, p in named_parameters], lr=CONFIG["lr"])
"""
    generated(tmp_path, forward="return torch.tanh(h * CONFIG['scale'])", after=after)
    after = after.replace('CONFIG["lr"] = 0.1', 'CONFIG["lr"] = CONFIG["scale"] = 0.1')
    with pytest.raises(VerificationError, match=r"optimizer\(\) changes CONFIG\['scale'\], which forward reads"):
        generated(tmp_path, forward="return torch.tanh(h * CONFIG['scale'])", after=after)


def test_a_gradient_of_zero_in_the_model_alone_is_refused(tmp_path):
    """With weight decay it is not the same as none."""
    message = (
        r"2.linear.weight gets a gradient in the model, but not in .* the gradient is zero: freeze it in model\(\)"
    )
    with pytest.raises(VerificationError, match=message):
        generated(tmp_path, forward="total = h.sum(); total.copy_(x.mean()); return x * 2 + total")


def test_what_a_loss_object_did_before_the_trace_is_no_change(tmp_path):
    loss = (
        "class Loss(nn.CrossEntropyLoss):\n    def __init__(self):\n        super().__init__()\n        RATE[0] = 0.7\n"
    )
    generated(tmp_path, before="RATE = [0.5]", forward="return h * RATE[0]", after=f"{loss}loss = Loss()\n")


def test_a_setting_that_is_called_requires_grad_is_no_parameters(tmp_path):
    after = "class Config:\n    requires_grad = 1.0\nCONFIG = Config()\n"
    after += "def after_update(named, update):\n    CONFIG.requires_grad *= 0.5\n"
    with pytest.raises(VerificationError, match=r"after_update\(\) changes CONFIG.requires_grad, which forward reads"):
        generated(tmp_path, forward="return h * CONFIG.requires_grad", after=after)


def test_an_update_may_change_weights_and_buffers_in_place(tmp_path):
    """Unlike an attribute that is a constant in the stages."""
    after = """
NET = None
def model(of=model):
    global NET
    NET = of()
    NET.rate = 1.0
    return NET
def after_update(named, update):
    with torch.no_grad():
        NET[0].weight.clamp_(-1, 1)
        NET[2].scale.fill_(1.0)
"""
    generated(tmp_path, forward="return torch.tanh(h * self.scale)", after=after)
    with pytest.raises(
        VerificationError, match=r"after_update\(\) changes NET\[2\].scale, which forward reads, but stages"
    ):
        generated(
            tmp_path, forward="return torch.tanh(h * self.scale)", after=f"{after}    NET[2].scale = torch.ones(8)\n"
        )


def test_replicas_of_the_only_stage_see_different_values(tmp_path):
    """Each had a value of its own, so their weights became different. What collate leaves for loss is its own, too."""
    for name, is_refused in (("a helper of loss to the optimizer's class", True), ("callable object to loss", False)):
        file, profile = written(tmp_path, **PASSED[name][0])
        plan = plan_of(profile, 1)
        generate(plan, profile, file, tmp_path / "1")
        stages = tuple(stage.model_copy(update={"replicas": 2, "workers": (0, 1)}) for stage in plan.stages)
        match = r"\(\) changes .* reads, but each of the 2 replicas sees only its own"
        with pytest.raises(VerificationError, match=match) if is_refused else nullcontext():
            generate(plan.model_copy(update={"stages": stages}), profile, file, tmp_path / "2")


def test_a_cache_that_functions_in_two_processes_use_is_no_such_value(tmp_path):
    """Nor is a counter with the name of a method."""
    generated(tmp_path, after=SHARED_CACHE)


def test_what_dataset_computes_may_be_read_by_forward_if_it_gives_the_example(tmp_path):
    generated(tmp_path, before=FIRST["before"], forward="return h - MEAN", after=FIRST["after"])


def test_a_dataset_may_keep_a_cache_and_count_its_samples(tmp_path):
    """Under the name of an attribute of the model, and beside a number that forward reads."""
    before = "features, CONFIG = {}, {'scale': 0.5, 'seen': 0}"
    after = """
made = dataset
class Cached(TensorDataset):
    CONFIG["width"] = 4
    def __getitem__(self, i):
        features[i] = super().__getitem__(i)
        CONFIG["seen"] += 1
        return features[i]
def dataset(split):
    return Cached(*made(split).tensors)
"""
    parts = {"before": before, "init": "self.features = 4", "after": after}
    generated(tmp_path, **parts, forward="return h * CONFIG['scale'] / self.features")
    parts["after"] = after.replace("seen", "scale")
    with pytest.raises(VerificationError, match=r"dataset\(\) changes CONFIG\['scale'\], which forward reads"):
        generated(tmp_path, **parts, forward="return h * CONFIG['scale'] / self.features")


def test_what_the_hooks_of_a_module_compute_stays_with_its_call(tmp_path):
    """A plan names both by the path of the module."""
    file, profile = written(tmp_path, after=HOOKED)
    assert any("3" in group and len(group) > 1 for group in profile.together)
    for count in range(1, 7):
        plan = plan_of(profile, count)
        assert [name for stage in plan.stage_nodes(profile) for name in stage] == [*profile.graph.inputs]
        generate(plan, profile, file, tmp_path / str(count))


def test_a_module_of_another_dtype_than_the_default_keeps_it(tmp_path):
    parts = {
        "before": "torch.set_default_dtype(torch.float64)",
        "init": "self.small = nn.Linear(8, 8).to(torch.float32)",
    }
    with undoing_user_changes():
        generated(tmp_path, **parts, forward="return h + self.small(x.float()).double()")


def test_a_target_in_the_memory_of_an_input_must_not_be_written(tmp_path):
    """A plain loop would compare the output with what forward has left there."""
    collate = "def collate(samples):\n    x = torch.stack([x for x, _ in samples])\n    return x, {}"
    written = {"before": "class Clamp(nn.Module):\n    def forward(self, x):\n        return x.clamp_(0)\n"}
    after = "def model():\n    return nn.Sequential(Clamp(), nn.Linear(4, 8), nn.Linear(8, 4))\n"
    loss = "def loss(output, target):\n    return nn.functional.mse_loss(output, target)\n"
    with pytest.raises(ModelError, match="forward writes into its input, and the target lies in the same memory"):
        generated(tmp_path, **written, after=f"{after}{loss}{collate.format('x.T.T')}")
    (tmp_path / "other").mkdir()
    generated(tmp_path / "other", **written, after=f"{after}{loss}{collate.format('x.clone()')}")


def test_a_hook_of_all_optimizers_takes_part_in_the_update(tmp_path):
    with pytest.raises(ModelError, match="a step of SGD depends on parameters of several stages"):
        generated(tmp_path, after=CLIPPED)


@pytest.mark.parametrize("skips", ["gradient.isfinite().all()", "gradient.norm() < 1000"])
def test_an_update_that_gradients_of_another_stage_may_skip_is_refused(skips, tmp_path):
    with pytest.raises(ModelError, match=r"if the gradient of 0\.weight is huge or not finite, .* gets another value"):
        generated(tmp_path, after=SKIPPING.replace("gradient.isfinite().all()", skips))


@pytest.mark.parametrize(
    ("zero_grad", "message"),
    [
        ("for p in self.param_groups[0]['params']: p.grad.mul_(0.5)", "leaves gradients, but pdtool then drops them"),
        ("[][0]", r"model\.py:\d+: .* raised IndexError"),
    ],
)
def test_a_zero_grad_that_training_cannot_follow_is_refused(zero_grad, message, tmp_path):
    after = (
        f"class Own(torch.optim.SGD):\n    def zero_grad(self, set_to_none=True):\n        {zero_grad}\n"
        "def optimizer(named_parameters):\n    return Own([p for _, p in named_parameters], lr=0.1)\n"
    )
    with pytest.raises(ModelError, match=message):
        generated(tmp_path, after=after)


def test_an_opaque_module_that_reads_parameters_from_a_list_is_refused(tmp_path):
    init = "self.weights = [self.linear.weight]; self.register_full_backward_hook(lambda *_: None)"
    with pytest.raises(VerificationError, match=r"self\.weights of 2 holds parameters in a list"):
        generated(tmp_path, init=init, forward="return torch.tanh(x @ self.weights[0])")


def test_a_loss_that_calls_backward_is_refused():
    output = torch.ones(2, requires_grad=True)
    output.square().sum().backward()
    with pytest.raises(ModelError, match=r"loss\(\) calls backward\(\) itself"):
        check_loss_parameters(output.sum(), [output])
