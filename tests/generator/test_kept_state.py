"""State that a model keeps on its modules between minibatches: a pipeline would get it wrong, so codegen refuses it."""

from __future__ import annotations

import itertools
import re
from collections import deque
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from collection import differences, trained_in_stages, trained_plainly
from conftest import Folder
from skeletons import plan_of, skeleton
from torch import Tensor, nn

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.bundle import Bundle
from pdtool.errors import ModelError, TraceError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.tracing import trace_file
from pdtool.generator.composed import VerificationError
from pdtool.generator.generate import generate
from pdtool.generator.kept_state import kept_attributes, kept_state

HEAD = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Linear(8, 2)
        self.kept, self.steps, self.cache = None, 0, {}
        self.register_buffer("table", None, persistent=False)

    def forward(self, x):
"""
TAIL = """
def model():
    return Net()

def dataset(split):
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x.sum(1) > 0).long())

def loss(output, target):
    return nn.functional.cross_entropy(output, target)

def optimizer(named_parameters):
    return torch.optim.SGD([p for _, p in named_parameters], lr=0.1)
"""
REFUSED = {
    "hidden state, reset when the size changes": (
        """
        h = torch.tanh(self.first(x))
        if self.kept is not None and self.kept.shape == h.shape:
            h = h + self.kept
        self.kept = h.detach()
        return self.last(h)
""",
        "kept",
        17,
    ),
    "counter that a branch reads": (
        """
        self.steps += 1
        return self.last(torch.tanh(self.first(x))) * (2 if self.steps > 100 else 1)
""",
        "steps",
        14,
    ),
    "cache": (
        """
        if not self.training:
            self.cache["x"] = self.cache.get("x", 0) + 1
        return self.last(torch.tanh(self.first(x)))
""",
        "cache",
        None,
    ),
    "buffer that the first minibatch fills": (
        """
        h = torch.tanh(self.first(x))
        if self.table is None:
            self.table = h.detach().mean(0)
        return self.last(h - self.table)
""",
        "table",
        16,
    ),
    "copy of the first weights": (
        """
        if self.kept is None:
            self.kept = self.last.weight.detach().clone()
        return self.last(torch.tanh(self.first(x))) + self.kept.sum()
""",
        "kept",
        15,
    ),
    "weights that an evaluation leaves to the next": (
        """
        h = torch.tanh(self.first(x))
        if self.training:
            return self.last(h)
        return self.last(h) + self.cache.setdefault("x", self.last.weight.detach() * 2).sum()
""",
        "cache",
        None,
    ),
    "hidden state of an evaluation that train() clears": (
        """
        h = torch.tanh(self.first(x))
        if not self.training:
            self.kept = h = h + (0 if self.kept is None else self.kept.mean())
        return self.last(h)

    def train(self, mode=True):
        self.kept = None
        return super().train(mode)
""",
        "kept",
        16,
    ),
    "random numbers that are drawn once": (
        """
        if self.table is None:
            self.register_buffer("table", torch.rand(8))
        return self.last(torch.tanh(self.first(x)) * self.table)
""",
        "table",
        None,
    ),
}
FILES = """
import functools
import types
import torch
import other

@functools.cache
def table(size):
    return torch.arange(float(size))

CALLS, LAST, TABLES, HISTORY, SHOWN = 0, {}, {}, {}, set()

class State:
    __slots__ = ("step",)

STATE = State()
STATE.step = 0

@functools.cache
def settings():
    return types.SimpleNamespace(scale=2.0)

settings().scale = 3.0

def counted(net):
    return 2 if net.steps > 100 else 1

def added(h):
    return h + LAST["mean"]
"""
SHARED = {
    "the class attribute Net.calls": """
        Net.calls = getattr(Net, "calls", 0) + 1
        return self.last(self.first(x)) * (2 if Net.calls > 100 else 1)
""",
    "the global variable CALLS of model.py": """
        global CALLS
        CALLS += 1
        return self.last(self.first(x)) * (2 if CALLS > 100 else 1)
""",
    "the global variable SEEN of other.py": """
        other.SEEN.append(0)
        return self.last(self.first(x)) * (2 if other.many() else 1)
""",
    "the global variable LAST of model.py": """
        h = self.first(x)
        before = LAST.get("mean", 0)
        LAST["mean"] = h.detach().mean()
        return self.last(h - before)
""",
}
SHARED |= {
    "the global variable STATE of model.py": """
        STATE.step += 1
        return self.last(self.first(x)) * (2 if STATE.step > 100 else 1)
""",
    "self.steps of the model": """
        self.steps += torch.is_grad_enabled()
        return self.last(self.first(x)) * counted(self)
""",
}
OF_ONE_MINIBATCH = {
    "warning": """
        if "x" not in SHOWN:
            SHOWN.add("x")
        return self.last(self.first(x))
""",
    "settings": """
        return self.last(self.first(x)) * settings().scale
""",
    "statistics": """
        HISTORY.setdefault("all", []).append(x.shape[1])
        return self.last(self.first(x))
""",
    "table": """
        return self.last(self.first(x) + TABLES.setdefault(8, torch.arange(8.0)))
""",
    "value for an inner function": """
        LAST["mean"] = x.mean()
        return self.last(added(self.first(x)))
""",
    "cached function": """
        return self.last(self.first(x) + table(8))
""",
    "count that nobody reads": """
        global CALLS
        CALLS += 1
        Net.steps = x.mean().detach()
        return self.last(self.first(x))
""",
}
CACHES = {
    "buffer": """
        if self.table is None:
            self.register_buffer("table", torch.arange(8.0) / 8, persistent=False)
        return self.last(torch.tanh(self.first(x)) + self.table)
""",
    "positions up to the longest input": """
        if x.shape[1] > self.steps:
            self.steps = x.shape[1]
            angles = torch.outer(torch.arange(100.0), 1 / 10 ** torch.arange(8.0))
            self.register_buffer("sin", angles.sin(), persistent=False)
            self.kept = angles.cos()
        return self.last(torch.tanh(self.first(x)) * self.sin[: x.shape[1]].sum(0) + self.kept[1])
""",
    "attribute that is not there before": """
        if not hasattr(self, "mask"):
            self.mask = torch.ones(100, 8).triu()
        return self.last(torch.tanh(self.first(x)) * self.mask[: x.shape[1]].sum(0))
""",
    "dict, in evaluation only": """
        h = torch.tanh(self.first(x))
        if not self.training:
            h = h + self.cache.setdefault((8, h.dtype), torch.arange(8.0))
        return self.last(h)
""",
    "weights, for one evaluation": """
        h = torch.tanh(self.first(x))
        if self.training:
            return self.last(h * self.last.weight.sum(0))
        return self.last(h * self.cache.setdefault("x", self.last.weight.sum(0)))

    def train(self, mode=True):
        self.cache = {}
        return super().train(mode)
""",
}
PARTS = {
    "parameter": ("self.scale = nn.Parameter(torch.ones(8))", "forward makes scale, a parameter, in its first call"),
    "module": ("self.scale = nn.Linear(8, 8)", "forward makes scale, a Linear, in its first call"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_that_forward_reads_again_is_refused(folder: Folder, name: str) -> None:
    """With its attribute and line; nothing is written."""
    forward, attribute, line = REFUSED[name]
    folder.write("model.py", HEAD + forward.removeprefix("\n") + TAIL)
    folder.pdtool("profile", "model.py", "--batch-size", "4")
    folder.pdtool("partition", "--topology", "2", "--straight")
    errors = folder.pdtool("codegen", code=1).stderr
    where = f"model.py:{line}: " if line else ""
    assert f"{where}forward changes self.{attribute} of the model and reads it again" in errors
    assert not (folder.path / "plans/model-2").exists()


@pytest.mark.parametrize("described", SHARED)
def test_state_of_classes_and_files_is_refused(described: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("SEEN = []\n\ndef many():\n    return len(SEEN) > 100\n")
    file = _model(tmp_path, SHARED[described], FILES)
    profile = skeleton(file)
    with pytest.raises(VerificationError, match=f"forward changes {described} and reads it again"):
        generate(plan_of(profile, 2), profile, file, tmp_path / "b")


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("name", OF_ONE_MINIBATCH)
def test_what_a_file_keeps_for_one_minibatch_is_no_state(name: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("")
    file = _model(tmp_path, OF_ONE_MINIBATCH[name], FILES)
    profile = skeleton(file)
    bundle = generate(plan_of(profile, 2), profile, file, tmp_path / "b")
    assert not differences(trained_in_stages(file, bundle, tmp_path / "b"), trained_plainly(file))


def test_a_loss_cannot_read_what_forward_puts_into_a_variable(tmp_path: Path) -> None:
    loss = "\ndef loss(output, target):\n    return nn.functional.cross_entropy(output, target) + LAST.get('mean', 0)\n"
    forward = "        LAST['mean'] = x.mean()\n        return self.last(self.first(x))\n"
    (tmp_path / "other.py").write_text("")
    file = _model(tmp_path, forward, FILES, loss)
    profile = skeleton(file)
    message = r"forward changes the global variable LAST of model.py in each call, but it is read in loss\(\)"
    with pytest.raises(VerificationError, match=message):
        generate(plan_of(profile, 2), profile, file, tmp_path / "b")


CHANGED = {
    "CALLS": ("global CALLS\n    CALLS += 1", "self.first(x) * CALLS"),
    "LAST['mean']": ("LAST['mean'] = 1", "self.first(x) + LAST.get('mean', 0)"),
    "Net.rate": ("Net.rate = 0.5", "self.first(x) * (self.rate if hasattr(self, 'rate') else 1)"),
    "LAST": ("LAST.setdefault('mean', update)", "self.first(x) + LAST.get('mean', 0)"),
    "other.RATES": ("other.RATES.append(update)", "self.first(x) * other.RATES[-1]"),
    "other.RATE": ("for other.RATE in (2, 3): pass", "self.first(x) * other.RATE"),
}
CHANGED_BY_LOSS = {"LAST": "LAST.update(mean=1)", "other.RATES": "other.RATES.append(2)"}
LEFT_ALONE = {
    "local variable in forward": ("global CALLS\n    CALLS += 1", "[CALLS * self.first(x) for CALLS in (1,)][0]"),
    "local variable in the function": ("CALLS = 1", "self.first(x) * (CALLS + 1)"),
    "a function of torch": ("torch.add(torch.ones(1), update)", "torch.relu(self.first(x))"),
    "a function of a file": ("other.add(update)", "self.first(x) * other.RATE"),
    "read by nobody": ("global CALLS\n    LAST['mean'], CALLS = 1, 2", "self.first(x)"),
}


@pytest.mark.parametrize("variable", CHANGED)
def test_what_training_changes_and_forward_reads_is_refused(variable: str, tmp_path: Path) -> None:
    """With the line; a stage file has a constant in its place."""
    statement, value = CHANGED[variable]
    with pytest.raises(
        VerificationError, match=rf"model.py:\d+: after_update\(\) changes {re.escape(variable)}, which"
    ):
        _generated_with_after_update(statement, value, tmp_path)


@pytest.mark.parametrize("variable", CHANGED_BY_LOSS)
def test_what_a_method_called_in_loss_changes_is_refused(variable: str, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("RATES = [1]\n")
    loss = f"\ndef loss(output, target):\n    {CHANGED_BY_LOSS[variable]}\n    return output.mean()\n"
    value = "self.first(x) * other.RATES[-1] + LAST.get('mean', 0)"
    file = _model(tmp_path, f"        return self.last({value})\n", FILES, loss)
    profile = skeleton(file)
    with pytest.raises(VerificationError, match=rf"model.py:\d+: loss\(\) changes {re.escape(variable)}, which"):
        generate(plan_of(profile, 2), profile, file, tmp_path / "b")


@pytest.mark.parametrize(
    ("statement", "value"),
    [
        ("(lambda last: last.update(mean=update))(LAST)", "self.first(x) + LAST.get('mean', 0)"),
        (
            "globals()['change'](update)\n\ndef change(update):\n    LAST['mean'] = update > 30",
            "self.first(x) + LAST.get('mean', 0)",
        ),
        ("setattr(Net, 'rate', 0.5)", "self.first(x) * (self.rate if hasattr(self, 'rate') else 1)"),
    ],
)
def test_what_after_update_changes_elsewhere_is_refused_too(statement: str, value: str, tmp_path: Path) -> None:
    """Found by calling it, with the line where it is defined."""
    message = r"model.py:\d+: after_update\(\) changes a value that forward reads and that is neither a parameter"
    with pytest.raises(ModelError, match=message):
        _generated_with_after_update(statement, value, tmp_path)


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("name", LEFT_ALONE)
def test_what_has_only_the_same_name_is_no_matter(name: str, tmp_path: Path) -> None:
    assert _generated_with_after_update(*LEFT_ALONE[name], tmp_path).proof == "values"


def _generated_with_after_update(statement: str, value: str, folder: Path) -> Bundle:
    (folder / "other.py").write_text("RATE = 1\nRATES = [1]\ndef add(update):\n    pass\n")
    function = f"\ndef after_update(named_parameters, update):\n    {statement}\n"
    file = _model(folder, f"        return self.last({value})\n", FILES, function)
    profile = skeleton(file)
    return generate(plan_of(profile, 2), profile, file, folder / "b")


def test_state_that_forward_only_writes_is_no_matter(folder: Folder) -> None:
    """A count of calls that nobody reads, and the activations of the last call."""
    forward = (
        "        self.steps += 1\n        self.kept = h = torch.tanh(self.first(x))\n        return self.last(h)\n"
    )
    folder.write("model.py", HEAD + forward + TAIL)
    folder.pdtool("profile", "model.py", "--batch-size", "4")
    folder.pdtool("partition", "--topology", "2", "--straight")
    assert "checked: outputs" in folder.pdtool("codegen").stderr


def test_opaque_modules_cannot_pass_values_through_a_variable(tmp_path: Path) -> None:
    """In a run each may be in a process of its own."""
    modules = """
from torch import nn

class Writer(nn.Module):
    def forward(self, x):
        LAST["mean"] = x.mean()
        return x + float(x.sum() > 1e9)

class Reader(nn.Module):
    def forward(self, x):
        return x + LAST.get("mean", 0) + float(x.sum() > 1e9)

writer, reader = Writer(), Reader()
"""
    (tmp_path / "other.py").write_text("")
    forward = "        return self.last(self.reader(self.first(self.writer(x))))\n"
    file = _model(tmp_path, forward, FILES + modules, "\nHINTS = {'opaque': ['writer', 'reader']}\n")
    path = tmp_path / "model.py"
    path.write_text(
        path.read_text().replace(
            "return Net()", "net = Net()\n    net.writer, net.reader = writer, reader\n    return net"
        )
    )
    file = ModelFile.load(ModelRef(source=str(path)), trusted=True)
    profile = skeleton(file)
    with pytest.raises(
        VerificationError, match=r"variable LAST of model.py in each call, but it is read in writer and reader"
    ):
        generate(plan_of(profile, 2), profile, file, tmp_path / "b")


def test_a_table_where_the_trace_cannot_restore_it_is_refused(tmp_path: Path) -> None:
    """The message says where to keep it, in place of torch's about fake tensors."""
    forward = "        return self.last(self.first(x) + TABLE.setdefault(8, torch.arange(8.0)))\n"
    file = _model(tmp_path, forward, "\nclass Table(dict):\n    pass\n\nTABLE = Table()\n")
    said = r"forward of the model takes a tensor .* an object or cache .*make that tensor in __init__ .* own: pdtool"
    with pytest.raises(TraceError, match=said):
        trace_file(file, file.build(), 4)


def test_a_transform_that_torch_export_loses_sight_of_can_be_opaque(tmp_path: Path) -> None:
    """As in PyTorch's tutorial on ensembles; the message named a cache, and not the module."""
    modules = """
import torch
from torch import nn

class Ensemble(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = [nn.Sequential(nn.Linear(4, 4, device="meta"), nn.Tanh())]
        self.weight, self.bias = nn.Parameter(torch.randn(3, 4, 4)), nn.Parameter(torch.zeros(3, 4))
    def forward(self, x):
        def one(weight, bias):
            return torch.func.functional_call(self.base[0], {"0.weight": weight, "0.bias": bias}, (x,))
        return torch.vmap(one, out_dims=1)(self.weight, self.bias).sum(1)
"""
    forward = "        return self.last(self.first(self.ensemble(x)))\n"
    file = _model(tmp_path, forward, modules)
    path = tmp_path / "model.py"
    text = path.read_text().replace("self.kept,", "self.ensemble = Ensemble()\n        self.kept,")
    path.write_text(text)
    file = ModelFile.load(ModelRef(source=str(path)), trusted=True)
    with pytest.raises(TraceError, match=r"forward of ensemble takes a tensor .* or name ensemble in HINTS opaque"):
        trace_file(file, file.build(), 4)
    path.write_text(f"{text}\nHINTS = {{'opaque': ['ensemble']}}\n")
    file = ModelFile.load(ModelRef(source=str(path)), trusted=True)
    profile = skeleton(file)
    assert generate(plan_of(profile, 2), profile, file, tmp_path / "b").opaque == ["ensemble"]


@pytest.mark.parametrize("name", CACHES)
def test_what_forward_makes_of_constants_at_its_first_call_is_as_in_a_plain_loop(name: str, tmp_path: Path) -> None:
    file = _model(tmp_path, CACHES[name])
    model = file.build()
    before = {path: {**vars(module), **module._buffers} for path, module in model.named_modules()}
    profile = skeleton(file)
    trace_file(file, model, 4)
    after = {path: {**vars(module), **module._buffers} for path, module in model.named_modules()}
    assert after == before
    bundle = generate(plan_of(profile, 2), profile, file, tmp_path / "b")
    assert not differences(trained_in_stages(file, bundle, tmp_path / "b"), trained_plainly(file))


CACHING = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.cache, self.seen = nn.Linear(4, 4), None, None

    def forward(self, x):
        if x.detach().sum() > 1e9:
            x = x * 1
        if self.training:
            return x @ self.linear.weight
        if self.cache is None or CONDITION:
            self.cache, self.seen = self.linear.weight.detach() * 2.0, self.linear.weight._version
        return x @ self.cache
IN_INNER

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), Inner(), nn.Linear(4, 2)

    def forward(self, x):
        return self.last(torch.tanh(self.inner(torch.tanh(self.first(x)))))
IN_NET
"""
CLEARS = """
    def train(self, mode=True):
        self.CACHE = None
        return super().train(mode)
"""


@pytest.mark.parametrize(
    ("condition", "in_inner", "in_net", "is_refused"),
    [
        ("False", CLEARS.replace("CACHE", "cache"), "", False),
        ("self.seen != self.linear.weight._version", "", "", False),
        ("False", "", "", True),
        ("False", "", CLEARS.replace("CACHE", "inner.cache"), True),
        (
            "False",
            "",
            CLEARS.replace("CACHE", "inner.cache")
            .replace("train(self, mode=True)", "eval(self)")
            .replace("train(mode)", "eval()"),
            True,
        ),
    ],
)
def test_what_an_opaque_module_keeps_is_cleared_by_itself_only(condition, in_inner, in_net, is_refused, tmp_path):
    """A stage has the opaque module alone, and calls its train()."""
    text = CACHING.replace("CONDITION", condition).replace("IN_INNER", in_inner).replace("IN_NET", in_net)
    (tmp_path / "model.py").write_text(text + TAIL)
    file = ModelFile.load(ModelRef(source=str(tmp_path / "model.py")), trusted=True)
    profile = skeleton(file)
    expected = (
        pytest.raises(VerificationError, match=r"forward changes self\.cache of inner") if is_refused else nullcontext()
    )
    with expected:
        bundle = generate(plan_of(profile, 2), profile, file, tmp_path / "b")
        assert not differences(trained_in_stages(file, bundle, tmp_path / "b"), trained_plainly(file))


@pytest.mark.parametrize("part", PARTS)
def test_what_an_optimizer_would_miss_is_refused(part: str, tmp_path: Path) -> None:
    statement, message = PARTS[part]
    forward = f"\n        if self.steps == 0:\n            {statement}\n        return self.last(self.first(x))\n"
    file = _model(tmp_path, forward)
    with pytest.raises(TraceError, match=f"{message}.*call the model once in model\\(\\)"):
        trace_file(file, file.build(), 4)


def _model(folder: Path, forward: str, files: str = "", functions: str = "") -> ModelFile:
    (folder / "model.py").write_text(files + HEAD + forward.removeprefix("\n") + TAIL + functions)
    return ModelFile.load(ModelRef(source=str(folder / "model.py")), trusted=True)


class Rule:
    """An object that is called."""

    factor = 1

    def __call__(self, number: int) -> int:
        return self.factor * number


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.count, self.values, self.queue, self.plain = 0, [torch.zeros(2)], deque([1]), {"a": float("nan")}
        self.array, self.numbers, self.rule = np.zeros(2), itertools.count(), Rule()
        self.inner.limit, self.deep = 1, {"a": {"b": {"c": {"d": [0]}}}}
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += 1
        constant = self.array[0] + self.rule(0) + (self.numbers is None) + self.deep["a"]["b"]["c"]["d"][0]
        return self.inner(x) + self.count + self.values[0] + self.queue[0] + self.plain["a"] + constant


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(
    "statement",
    [
        "count += 1",
        "values[0].add_(1)",
        "queue.append(2)",
        "values.append(None)",
        "array[1] = 2",
        "numbers.__next__()",
        "rule.factor += 1",
        "inner.limit += 1",
        "values[0].numpy()[0] = 1",
        "deep['a']['b']['c']['d'][0] = 1",
    ],
)
def test_every_kind_of_change_is_seen(statement: str) -> None:
    model = Keeps()
    before = kept_state(model)
    model(torch.ones(1, 2))
    model.eval()
    assert list(kept_attributes(model, before)) == []
    exec(f"model.{statement}")
    (kept,) = kept_attributes(model, before)
    assert kept.name == re.findall(r"\w+", statement.removeprefix("inner."))[0]


WITH_STATE_OF_ITS_OWN = """
import torch
from torch import nn

TAU, STEPS = 1.0, 0

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.mid, self.out = nn.Embedding(9, 4), nn.Linear(4, 4), nn.Linear(4, 9, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(torch.tanh(self.mid(self.embed(x))))

def model(): return Net()
def dataset(split): return [(torch.tensor(i % 9), torch.tensor((i + 1) % 9)) for i in range(8)]
def loss(output, target): return nn.functional.cross_entropy(output / TAU, target)
def optimizer(named): return torch.optim.SGD([p for _, p in named], lr=0.1)
"""
COUNTED_BY_CALLS = {
    "loss": ("def after_update(named, update):\n    global TAU\n    TAU = max(0.5, TAU - 0.1)", "what loss"),
    "rate": (
        "def rate(step):\n    global STEPS\n    STEPS += 1\n    return min(1, STEPS / 8)\n"
        "def scheduler(optimizer): return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)",
        "a value of a parameter group, such as the learning rate,",
    ),
}


@pytest.mark.parametrize("name", COUNTED_BY_CALLS)
def test_what_counts_its_calls_is_refused_where_a_worker_repeats_them(name: str, tmp_path: Path) -> None:
    """A parameter that stages share is stepped by itself."""
    function, what = COUNTED_BY_CALLS[name]
    with pytest.raises(
        ModelError, match=rf"model.py:\d+: {what}.* depends on how often .* not from its previous value"
    ):
        _generated_tied(function, tmp_path)


def test_what_counts_updates_is_not_refused(tmp_path: Path) -> None:
    _generated_tied("def after_update(named, update):\n    global TAU\n    TAU = 0.9**update", tmp_path)


COLLECTING = """
SCORES = []
def metrics(output, target):
    COLLECT
    return {"mean": (output.mean(), 1)}
"""
READING = {
    "summarize_metrics": "def summarize_metrics(totals): return {'median': sorted(SCORES)[len(SCORES) // 2]}",
    "loss": "def loss(output, target): return output.square().mean() * (1 + len(SCORES))",
}


@pytest.mark.parametrize("reader", READING)
@pytest.mark.parametrize("statement", ["SCORES.extend(target.tolist())", "SCORES[:] = target.tolist()"])
def test_what_metrics_collect_is_refused_where_each_replica_has_a_part(
    statement: str, reader: str, tmp_path: Path
) -> None:
    code = COLLECTING.replace("COLLECT\n", f"{statement}\n") + READING[reader]
    _generated_tied(code, tmp_path)
    match = rf"model.py:\d+: {reader}\(\) reads SCORES, .* has 2 replicas"
    with pytest.raises(VerificationError, match=match):
        _generated_tied(code, tmp_path, replicas=2)


def _generated_tied(function: str, folder: Path, replicas: int = 1) -> None:
    (folder / "model.py").write_text(f"{WITH_STATE_OF_ITS_OWN}\n{function}\n")
    file = ModelFile.load(ModelRef(source=str(folder / "model.py")), trusted=True)
    profile = skeleton(file)
    plan = plan_of(profile, 2)
    last = plan.stages[-1].model_copy(update={"replicas": replicas})
    plan = plan.model_copy(update={"stages": (*plan.stages[:-1], last)})
    assert generate(plan, profile, file, folder / "b").tied


GENERATORS = [
    "np.random.RandomState(0)",
    "np.random.default_rng(0)",
    "random.Random(0)",
    "torch.Generator().manual_seed(0)",
]
OPAQUE = """
import random
import numpy as np

class Noise(nn.Module):
    def __init__(self):
        super().__init__()
        self.rng = {generator}

    def forward(self, x):
        scale = torch.rand((), generator=self.rng).item() if hasattr(self.rng, "initial_seed") else self.rng.random()
        return x * scale if x.sum().item() else x

class ActNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.loc, self.is_set = nn.Parameter(torch.zeros(4)), nn.Buffer(torch.tensor(0))

    def forward(self, x):
        if self.is_set.item() == 0:
            self.loc.data.copy_({first})
            self.is_set.fill_(1)
        return x - self.loc

HINTS = {{"opaque": ["0"]}}

def model():
    return nn.Sequential({module}(), nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
"""


@pytest.mark.parametrize("generator", GENERATORS)
def test_a_generator_that_a_module_draws_from_in_forward_is_refused(generator: str, tmp_path: Path) -> None:
    """Replicas drew the same numbers for different minibatches, and a resumed run drew the first ones again."""
    functions = OPAQUE.format(generator=generator, first="x.mean(0)", module="Noise")
    file = _model(tmp_path, "        return x\n", functions=functions)
    profile = skeleton(file)
    with pytest.raises(VerificationError, match=r"forward draws random numbers from self.rng of 0: .*; draw from the"):
        generate(plan_of(profile, 2), profile, file, tmp_path / "b")


@pytest.mark.parametrize(("first", "is_refused"), [("x.mean(0)", True), ("torch.ones(4)", False)])
def test_replicas_do_not_set_a_parameter_each_from_its_first_minibatch(
    first: str, is_refused: bool, tmp_path: Path
) -> None:
    """As ActNorm does. They trained different weights, for only gradients are averaged."""
    functions = OPAQUE.format(generator="None", first=first, module="ActNorm")
    file = _model(tmp_path, "        return x\n", functions=functions)
    profile = skeleton(file)
    plan = plan_of(profile, 2)
    generate(plan, profile, file, tmp_path / "one")
    stage, last = plan.stages
    stages = (stage.model_copy(update={"replicas": 2, "workers": (0, 2)}), last)
    plan = plan.model_copy(update={"stages": stages})
    said = r"^forward sets parameter 0\.loc from its first minibatch, but stage 0 has 2 replicas"
    with pytest.raises(VerificationError, match=said) if is_refused else nullcontext():
        generate(plan, profile, file, tmp_path / "two")


WRITTEN_FIRST = "self.rows.index_copy_(0, (self.seen % 3).reshape(1), x[:1].detach()).mean()"
READ_BACK = """
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("rows", torch.zeros(3, 4))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.seen.add_(1)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        x = self.first(x - READ)
        self.rows[:, 0].copy_(x[0].detach().mean())
        return self.last(x)
"""


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize(("read", "buffer"), [("x.mean(0)", ""), ("self.rows.mean()", "rows"), (WRITTEN_FIRST, "rows")])
def test_buffers_that_each_replica_changes_and_reads_are_told(read: str, buffer: str, tmp_path: Path) -> None:
    """Such as a queue of earlier minibatches: each replica has one of its own. Running statistics are only written."""
    (tmp_path / "model.py").write_text(HEAD.rpartition("\n    def")[0] + READ_BACK.replace("READ", read) + TAIL)
    file = ModelFile.load(ModelRef(source=str(tmp_path / "model.py")), trusted=True)
    profile = skeleton(file)
    plan = plan_of(profile, 2)
    assert not generate(plan, profile, file, tmp_path / "one").doubts
    first, last = plan.stages
    stages = (first, last.model_copy(update={"replicas": 2, "workers": (1, 2)}))
    doubts = generate(plan.model_copy(update={"stages": stages}), profile, file, tmp_path / "two").doubts
    said = f"forward changes buffers and reads them in the next minibatch: {buffer}. Each replica"
    assert [doubt[: len(said)] for doubt in doubts] == [said] * bool(buffer)


@pytest.mark.parametrize(
    ("line", "said"),
    [("CALLS += 1\n    total = total * min(1, CALLS / 10)", "model.py:42: CALLS"), ("LAST = total", "")],
)
def test_what_the_loss_of_each_replica_keeps_is_told(line: str, said: str, tmp_path: Path) -> None:
    """As the number of its calls, for a term that begins small: with two replicas each counts half of them."""
    loss = (
        f"def loss(output, target):\n    global CALLS, LAST\n    total = output.sum()\n    {line}\n    return total\n"
    )
    (tmp_path / "model.py").write_text(
        f"{HEAD.rpartition('    def')[0]}{READ_BACK.replace('READ', '1')}{TAIL}\nCALLS = 0\n{loss}"
    )
    file = ModelFile.load(ModelRef(source=str(tmp_path / "model.py")), trusted=True)
    profile = skeleton(file)
    plan = plan_of(profile, 2)
    assert not generate(plan, profile, file, tmp_path / "one").kept_by_loss
    first, last = plan.stages
    stages = (first, last.model_copy(update={"replicas": 2, "workers": (1, 2)}))
    bundle = generate(plan.model_copy(update={"stages": stages}), profile, file, tmp_path / "two")
    assert bundle.kept_by_loss == ((said,) if said else ())


@pytest.mark.parametrize(
    ("line", "repeats"),
    [("", False), ("OWN.manual_seed(int(torch.randint(2**31, ())))", True), ("return X[i], 0", True)],
)
def test_samples_of_a_generator_of_their_own_are_told(line: str, repeats: bool, tmp_path: Path) -> None:
    """As albumentations has one: a run drew other numbers with another plan, and after it was resumed."""
    text = f"""
OWN, X = torch.Generator(), torch.randn(48, 4, generator=torch.Generator().manual_seed(0))
class Noisy(TensorDataset):
    def __getitem__(self, i):
        {line}
        return X[i] + torch.randn(4, generator=OWN), 0
def dataset(split):
    return Noisy(X)
"""
    file = _model(tmp_path, "        return self.last(self.first(x))\n", functions=text)
    profile = skeleton(file)
    doubts = generate(plan_of(profile, 2), profile, file, tmp_path / "bundle").doubts
    assert ["makes other values of the same samples" in doubt for doubt in doubts] == [True] * (not repeats)


LAST = """
class Last(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.zeros(1, 8))
    def forward(self, x):
        x = x + self.rows.mean(0)
        self.rows = x.detach()
        return x
def model():
    return nn.Sequential(nn.Linear(4, 8), Last(), nn.Linear(8, 2))
HINTS = {"opaque": ["1"]}
"""


def test_a_buffer_that_takes_the_size_of_the_minibatch_is_refused(tmp_path: Path) -> None:
    file = _model(tmp_path, "        return x\n", functions=LAST)
    profile = skeleton(file)
    with pytest.raises(
        VerificationError, match=r"^forward replaces the buffer 1\.rows, of shape \[3, 8\], by one of shap"
    ):
        generate(plan_of(profile, 2), profile, file, tmp_path / "bundle")
