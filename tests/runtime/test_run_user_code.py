"""What a worker says of the user's data and optimizer."""

import random
import sys
from collections import deque
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import NET
from torch.testing._internal.two_tensor import TwoTensor

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.bundle import TensorSpec
from pdtool.errors import ModelError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import Structure
from pdtool.frontend.user_code import undoing_user_changes
from pdtool.runtime.groups import user_code_settings
from pdtool.runtime.loading.minibatch_loader import MinibatchLoader
from pdtool.runtime.loading.minibatches import DatasetSplit, TrainingData
from pdtool.runtime.stage import kept_values
from pdtool.runtime.stage.component import CannotPackError, pack, unpack
from pdtool.runtime.stage.optimizer import NamedOptimizer, RunLength
from pdtool.runtime.stage.pipeline_stage import PipelineStage
from pdtool.runtime.worker import checkpoint

TEXT = """
import numpy, torch
def model(): pass
class Data:
    def __len__(self): return 4
    def __getitem__(self, i):
        ITEM
def dataset(split): return Data()
def optimizer(named): return torch.optim.SGD([p for n, p in named if PICK], lr=0.1)
"""
INPUTS = [TensorSpec(name="x", producer=-1, consumers=(0,), shape=("batch", 2), dtype="float32", gradient=False)]


def load(tmp_path, item="pass", pick="True", more=""):
    path = tmp_path / "user.py"
    path.write_text(TEXT.replace("ITEM", item).replace("PICK", pick) + more)
    return ModelFile.load(ModelRef(source=str(path)), trusted=True)


def test_a_sample_that_cannot_be_read_names_its_line(tmp_path):
    with pytest.raises(ModelError, match=r"^user.py:7: dataset\('train'\), sample 0, raised FileNotFoundError"):
        MinibatchLoader(load(tmp_path, "open('nowhere')"), "train", INPUTS).load([0], 1)


KEPT = """
AVERAGE, DECAY, CALLS, LOG, OF_A_CALL, TAU = {}, 1.0, 0, [], {}, 1.0
def after_update(named_parameters, update):
    global DECAY, TAU
    TAU = 0.9**update
    DECAY = 0.99**update
    LOG.append(update)
    OF_A_CALL = {}
    for name, p in named_parameters:
        OF_A_CALL[name] = p
        AVERAGE[name] = DECAY * AVERAGE.get(name, p) + (1 - DECAY) * OF_A_CALL[name]
def count():
    global CALLS
    CALLS += 1
def loss(output, target):
    count()
    return TAU * output.sum()
"""


def test_variables_are_kept_that_a_later_call_reads(tmp_path):
    """Not those that are computed anew in each call, or never read."""
    steps = """
import io, itertools
STEPS, LOG = itertools.count(), io.StringIO()
def loss(output, target):
    return next(STEPS), LOG.write("")
"""
    for more, expected in ((KEPT, ["TAU", "AVERAGE", "CALLS"]), (steps, ["STEPS"]), ("", [])):
        file = load(tmp_path, more=more)
        found = kept_values.variables_kept(file, {file.module.__name__: file.module})
        assert [name for _, name in found] == expected


QUEUED = """
from collections import deque
QUEUE, NORMS, SCALE, WEIGHTS = deque(), [], 1.0, {}
def after_update(named_parameters, update):
    global SCALE
    QUEUE.append(len(QUEUE))
    NORMS.append(float(sum(p.detach() for _, p in named_parameters)) + sum(NORMS))
    SCALE *= 0.9
    for name, p in named_parameters:
        WEIGHTS[name] = WEIGHTS.get(name, p)
"""


def test_a_resumed_run_tells_of_values_that_the_checkpoint_has_not_for_its_stages(tmp_path):
    """The model's own memory is not saved. Under another plan, no stage has these stages' sums."""
    made = {name: torch.ones(()) * (i + 1) for i, name in enumerate("ab")}
    model = torch.nn.ParameterDict({name: torch.nn.Parameter(value) for name, value in made.items()})
    saved: dict[str, dict[str, torch.Tensor]] = {}
    for s, name in enumerate("ab"):
        file = load(tmp_path, more=QUEUED)
        kept = kept_values.KeptValues(file, model, [["a"], ["b"]], s, torch.device("cpu"))
        file.module.after_update([(name, model[name])], 1)
        for variable, entry, tensor in kept.state_dict():
            saved.setdefault(variable, {})[entry] = tensor
    of = {variable: {} for variable in kept.names} | saved
    lost = {"WEIGHTS (user.py:19)"}
    for stages, more in (([["a"], ["b"]], set()), ([["a", "b"]], {"NORMS (user.py:16)"})):
        file = load(tmp_path, more=QUEUED)
        kept = kept_values.KeptValues(file, model, stages, 0, torch.device("cpu"))
        kept.load_state_dict(of)
        assert {*kept.lost} == lost | more
        assert (0.9, [] if more else [1.0]) == (file.module.SCALE, file.module.NORMS)
        assert deque([0]) == file.module.QUEUE


AVERAGING = """
from collections import deque
import numpy as np
class Mean:
    def __init__(self):
        self.sum, self.count = 0.0, 0
class EMA:
    def __init__(self, model):
        self.model, self.mean, self.shadow = model, Mean(), {}
        self.recent, self.center = deque(maxlen=2), np.zeros(2, dtype=np.float32)
    def update(self, named_parameters, update):
        for name, p in named_parameters:
            self.shadow[name] = p.detach() * 2
        self.mean.sum, self.mean.count = self.mean.sum + update, self.mean.count + 1
        self.recent.append(update)
        self.center = self.center + update
    def kept(self):
        return self.mean.sum, self.mean.count, [*self.recent], self.center.tolist(), {**self.shadow}
"""
FUNCTION = """
ema = EMA(NET)
def after_update(named_parameters, update):
    ema.update(named_parameters, update)
"""
EACH_WAY = {
    "a function of model.py": FUNCTION,
    "a bound method": "ema = EMA(NET)\nafter_update = ema.update",
    "an object": "EMA.__call__ = EMA.update\nafter_update = ema = EMA(NET)",
}


@pytest.mark.parametrize("is_imported", [False, True])
@pytest.mark.parametrize("way", EACH_WAY)
def test_what_objects_keep_is_in_the_checkpoint_however_they_are_called(tmp_path, way, is_imported):
    """A resumed run began with a new average. Objects in objects, a deque and an array of numpy count, too."""
    name = f"averaging_{abs(hash((way, is_imported)))}"
    (tmp_path / f"{name}.py").write_text(AVERAGING)
    text = f"from {name} import EMA" if is_imported else AVERAGING
    text += f"\nNET = torch.nn.Linear(1, 1)\n{EACH_WAY[way]}\n"
    model, saved = torch.nn.Linear(1, 1), dict[str, dict[str, torch.Tensor]]()
    with undoing_user_changes():
        file = load(tmp_path, more=text)
        file.module.ema.model = model
        kept = kept_values.KeptValues(file, model, [["weight", "bias"]], 0, torch.device("cpu"))
        first = file.module.ema.kept()
        with kept.restored():
            file.module.after_update([("weight", model.weight)], 5)
            file.module.ema.new, file.module.ema.mean = 1, None
        assert (file.module.ema.kept(), hasattr(file.module.ema, "new")) == (first, False)
        for update in (1, 2, 3):
            file.module.after_update([("weight", model.weight)], update)
        for variable, entry, tensor in kept.state_dict():
            saved.setdefault(variable, {})[entry] = tensor
        expected = file.module.ema.kept()
    with undoing_user_changes():
        file = load(tmp_path, more=text)
        file.module.ema.model = model
        kept = kept_values.KeptValues(file, model, [["weight", "bias"]], 0, torch.device("cpu"))
        kept.load_state_dict({variable: {} for variable in kept.names} | saved)
        assert file.module.ema.kept() == expected
        assert not kept.lost


BOUND = """
import functools
CALLS = {"n": 0}
class Mean:
    def __init__(self):
        self.sum = 0
def counted(function):
    calls, last = 0, None
    def inner(*arguments):
        nonlocal calls, last
        calls, last = calls + 1, LAST
        CALLS["n"] += 1
        return calls, CALLS["n"], function(*arguments)
    return inner
def _loss(scale, mean, output, target, *, seen):
    scale.mul_(2)
    mean.sum += 1
    seen.append(len(seen))
    return scale.tolist(), mean.sum, [*seen]
loss = counted(functools.partial(_loss, torch.ones(1), Mean(), seen=[]))
STEPS = {}
@torch.no_grad()
def after_update(named_parameters, update, state={"n": 0}):
    state["n"] += 1
    STEPS["n"] = STEPS.get("n", 0) + state["n"]
    return STEPS["n"]
"""


@pytest.mark.parametrize(("last", "lost"), [("None", []), ("threading.Lock()", ["loss (user.py:20)"])])
def test_what_is_bound_to_a_function_is_in_the_checkpoint_or_told(tmp_path, last, lost):
    """Closures, defaults and arguments of a partial began anew in a resumed run, without a word; so did variables that
    only a function in a function, or a decorated one, uses."""
    cpu, model, saved = torch.device("cpu"), torch.nn.Linear(1, 1), dict[str, dict[str, torch.Tensor]]()
    found = []
    for is_resumed in (False, True):
        with undoing_user_changes():
            file = load(tmp_path, more=f"import threading\nLAST = {last}\n{BOUND}")
            kept = kept_values.KeptValues(file, model, [["weight", "bias"]], 0, cpu)
            if is_resumed:
                kept.load_state_dict({variable: {} for variable in kept.names} | saved)
                assert kept.lost == lost
            else:
                with kept.restored():
                    file.module.loss(1, 2), file.module.after_update([], 1)
                file.module.loss(1, 2), file.module.after_update([], 1)
                for variable, entry, tensor in kept.state_dict():
                    saved.setdefault(variable, {})[entry] = tensor.clone()
            found.append((file.module.loss(1, 2), file.module.after_update([], 2)))
    assert found == [((2, 2, ([4.0], 2, [0, 1])), 3)] * 2


IMPORTS = "import collections, functools, heapq, itertools, random\nimport numpy as np\n"
SHARED = {
    "a counter in a dict": """
def loss(output, target, seen={"a": collections.Counter()}):
    seen["a"]["n"] += 1
    return seen["a"]["n"]
""",
    "an argument that is called func": """
def _loss(output, target, func, calls={"n": 0}):
    calls["n"] += 1
    return calls["n"]
loss = functools.partial(_loss, func=min)
""",
    "an attribute with the name of a parameter": """
def loss(output, target, calls=[]):
    calls.append(len(calls))
    loss.calls += len(calls)
    return loss.calls
loss.calls = 0
""",
    "a variable of a closure that was an object": """
class Best:
    value = 3.0
def least(best):
    def inner(output, target):
        nonlocal best
        best = getattr(best, "value", best) - 1
        return best
    return inner
loss = least(Best())
""",
    "memory under two names": """
MEAN = torch.zeros(())
STATE = {"mean": MEAN, "all": [MEAN]}
def loss(output, target):
    STATE["mean"].lerp_(torch.ones(()), 0.5)
    STATE["all"][0].add_(1)
    return float(MEAN)
""",
    "one object at the start, several now": """
AVERAGES, LISTS, ROWS = dict.fromkeys("ab", torch.zeros(1)), [[0]] * 2, torch.arange(4.0)
FIRST = {"row": ROWS[:1]}
def loss(output, target):
    FIRST["row"] = FIRST["row"] + 1
    for i, key in enumerate(AVERAGES):
        AVERAGES[key] = 0.5 * AVERAGES[key] + i + 1
        LISTS[i] = [*LISTS[i], i]
    return {key: float(value) for key, value in AVERAGES.items()}, LISTS[:], ROWS.tolist(), float(FIRST["row"])
""",
    "a parameter of the loss": """
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.zeros(1))
    def forward(self, output, target):
        if target is not None:  # a validation trains nothing
            (self.scale - 1).square().sum().backward()
            STEP.step()
            STEP.zero_grad()
        return float(self.scale.detach())
loss = Loss()
STEP = torch.optim.SGD(loss.parameters(), lr=0.1)
""",
    "a tensor that grows": """
SEEN = torch.zeros(1)
def loss(output, target):
    SEEN.data = torch.cat([SEEN, SEEN[-1:] + 1])
    return SEEN.tolist()
""",
    "memory of another form": """
EMA = torch.zeros(2, 2)
def loss(output, target):
    EMA.data.mul_(0.5).add_(1)
    EMA.flatten().add_(1)
    return EMA.tolist()
""",
    "an expanded tensor": """
ONE = torch.ones(1)
WEIGHTS = ONE.expand(3)
def loss(output, target):
    WEIGHTS[:1].mul_(2)
    ONE.add_(1)
    return WEIGHTS.tolist()
""",
    "what a function gets as an argument": """
CENTER, LEAST = {"x": 0.0}, [3]
def move(center):
    center["x"] += 1
def loss(output, target):
    move(CENTER)
    heapq.heappush(LEAST, len(LEAST))
    return CENTER["x"], sorted(LEAST)
""",
    "generators of random numbers": """
NOISE, LEGACY, BITS = np.random.default_rng(1), np.random.RandomState(2), np.random.Generator(np.random.MT19937(3))
OWN = torch.Generator().manual_seed(4)
DRAWN, SEVERAL = {"own": OWN}, (np.random.RandomState(np.random.PCG64(6)), np.random.Generator(np.random.SFC64(7)))
class Mix:
    def __init__(self):
        self.random = random.Random(5)
MIX = Mix()
def some(generator):
    return generator.random()
def loss(output, target):
    drawn = [float(NOISE.beta(1, 1)), float(LEGACY.rand()), some(BITS), MIX.random.gauss(0, 1)]
    drawn += [float(each.normal()) for each in SEVERAL]
    return [*drawn, float(torch.rand(1, generator=OWN)), float(torch.rand(1, generator=DRAWN["own"]))]
""",
}


@pytest.mark.parametrize("code", SHARED.values(), ids=SHARED)
def test_values_that_share_a_name_or_memory_are_kept_each(tmp_path, code):
    """Nor does a validation before training, whose changes are undone, part what belongs together."""
    model, saved, found = torch.nn.Linear(1, 1), dict[str, dict[str, torch.Tensor]](), []
    for is_resumed in (False, True):
        with undoing_user_changes():
            file = load(tmp_path, more=IMPORTS + code)
            kept = kept_values.KeptValues(file, model, [["weight", "bias"]], 0, torch.device("cpu"))
            if is_resumed:
                kept.load_state_dict({variable: {} for variable in kept.names} | saved)
                assert not kept.lost
            else:
                with kept.restored():
                    file.module.loss(1, None)
                file.module.loss(1, 2)
                for variable, entry, tensor in kept.state_dict():
                    saved.setdefault(variable, {})[entry] = tensor.clone()
            found.append(file.module.loss(1, 2))
    file = load(tmp_path, more=IMPORTS + code)
    uninterrupted = [file.module.loss(1, 2) for _ in range(2)][1]
    assert found == [uninterrupted] * 2


def test_a_default_argument_that_cannot_be_set_again_is_told(tmp_path):
    code = "def loss(output, target, seen=torch.zeros(1)):\n    seen.data = torch.cat([seen, seen])\n"
    model, cpu, saved = torch.nn.Linear(1, 1), torch.device("cpu"), {"loss": {}}
    for is_resumed in (False, True):
        file = load(tmp_path, more=code)
        kept = kept_values.KeptValues(file, model, [["weight"]], 0, cpu)
        if is_resumed:
            kept.load_state_dict(saved)
        else:
            file.module.loss(1, 2)
            saved["loss"] = {entry: tensor for _, entry, tensor in kept.state_dict()}
    assert kept.lost == ["loss (user.py:10)"]


def test_a_module_whose_parts_cannot_be_imported_is_no_fault(tmp_path):
    """As of a library that imports its parts when they are asked for."""
    lazy = "import types\nclass Lazy(types.ModuleType):\n    def __getattr__(self, name): raise RuntimeError(name)\n"
    code = f"{lazy}LAZY = Lazy('lazy')\ndef loss(output, target): return LAZY.part.run(LAZY.other(1))\n"
    file = load(tmp_path, more=code)
    assert not kept_values.variables_kept(file, {file.module.__name__: file.module})


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_what_has_not_changed_is_not_saved(tmp_path):
    """NaN is not equal to itself, and a nested tensor cannot be compared."""
    code = """
LABELS, NESTED = [torch.tensor([1.0, float("nan")])], [torch.nested.nested_tensor([torch.ones(1), torch.ones(2)])]
def loss(output, target):
    if target is None:
        LABELS.append(NESTED.pop())
    return LABELS
"""
    model = torch.nn.Linear(1, 1)
    kept = kept_values.KeptValues(load(tmp_path, more=code), model, [["weight"]], 0, torch.device("cpu"))
    assert "LABELS" in kept.names
    assert [name for name, *_ in kept.state_dict()] == ["NESTED"]  # which cannot be saved


REPLACED = """
class Warm:
    n = 0
class Main:
    n, m = 0, 0
class Phase:
    def __init__(self):
        self.current = Warm()
PHASE = Phase()
def after_update(named_parameters, update):
    PHASE.current = Main() if update == 2 else PHASE.current
    PHASE.current.n += update
"""


@pytest.mark.parametrize(("updates", "lost"), [(1, []), (3, ["PHASE (user.py:20)"])])
def test_a_resumed_run_tells_of_an_object_that_training_has_replaced(tmp_path, updates, lost):
    """Its values were set in the object of another class that is there at the start."""
    cpu, model, saved = torch.device("cpu"), torch.nn.Linear(1, 1), dict[str, dict[str, torch.Tensor]]()
    file = load(tmp_path, more=REPLACED)
    kept = kept_values.KeptValues(file, model, [["weight", "bias"]], 0, cpu)
    for update in range(1, updates + 1):
        file.module.after_update([], update)
    for variable, entry, tensor in kept.state_dict():
        saved.setdefault(variable, {})[entry] = tensor
    file = load(tmp_path, more=REPLACED)
    kept = kept_values.KeptValues(file, model, [["weight", "bias"]], 0, cpu)
    kept.load_state_dict({variable: {} for variable in kept.names} | saved)
    assert (kept.lost, file.module.PHASE.current.n) == (lost, 0 if lost else 1)


def test_the_classes_of_objects_are_those_of_the_own_stage(tmp_path):
    """The last stage's loss had replaced an object, and the first stage did not get the values of its own."""
    cpu, model, saved = torch.device("cpu"), torch.nn.Linear(1, 1), dict[str, dict[str, torch.Tensor]]()
    for stage in (0, 1):
        file = load(tmp_path, more=REPLACED)
        kept = kept_values.KeptValues(file, model, [["weight"], ["bias"]], stage, cpu)
        file.module.after_update([], 2 if stage else 1)
        for variable, entry, tensor in kept.state_dict():
            saved.setdefault(variable, {})[entry] = tensor
    file = load(tmp_path, more=REPLACED)
    kept = kept_values.KeptValues(file, model, [["weight"], ["bias"]], 0, cpu)
    kept.load_state_dict({variable: {} for variable in kept.names} | saved)
    assert (kept.lost, file.module.PHASE.current.n) == ([], 1)


CENTERED = """
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = torch.nn.BatchNorm1d(1)
    def forward(self, output, target):
        return self.inner(output).sum()
loss = Loss()
"""


def test_a_resumed_run_tells_of_values_that_an_edited_object_has_not(tmp_path):
    model, cpu = torch.nn.Linear(1, 1), torch.device("cpu")
    file = load(tmp_path, more=CENTERED)
    first = kept_values.KeptValues(file, model, [["weight"]], 0, cpu)
    file.module.loss(torch.ones(2, 1), None)
    saved: dict[str, dict[str, torch.Tensor]] = {"loss": {}}
    for name, entry, tensor in first.state_dict():
        saved[name][entry] = tensor
    assert saved["loss"]
    for edited, lost in ((CENTERED, []), (CENTERED.replace("inner", "norm"), ["loss"])):
        resumed = kept_values.KeptValues(load(tmp_path, more=edited), model, [["weight"]], 0, cpu)
        resumed.load_state_dict(saved)
        assert resumed.lost == lost


def test_a_length_that_cannot_be_told_names_its_line(tmp_path):
    file = load(tmp_path, more="class Broken(Data):\n    def __len__(self): return 1 // 0\nData = Broken\n")
    with pytest.raises(ModelError, match=r"^user.py:11: the length of dataset\('train'\) raised ZeroDivisionError"):
        MinibatchLoader(file, "train", INPUTS)


@pytest.mark.parametrize(
    ("item", "described"),
    [
        ("return torch.ones(2 + (i == 3)), 1", r"sample 1: float32\[2\], int; sample 3: float32\[3\], int"),
        ("return torch.ones(2), numpy.ones(1 + (i > 1))", r"sample 1: .* float64\[1\]; sample 2: .* float64\[2\]"),
    ],
)
def test_samples_that_do_not_go_together_are_named(tmp_path, item, described):
    loader = MinibatchLoader(load(tmp_path, item), "train", INPUTS)
    with pytest.raises(ModelError, match=r"^user.py: the samples of dataset\('train'\), .*" + described):
        loader.load([1, 2, 3], 1)


def test_samples_that_cannot_be_collated_are_described(tmp_path):
    with pytest.raises(ModelError, match=r"of dataset\('train'\), each float32\[2\], object, raised TypeError"):
        MinibatchLoader(load(tmp_path, "return torch.ones(2), object()"), "train", INPUTS).load([0, 1], 1)


def test_the_example_of_a_profile_says_the_same(tmp_path):
    with pytest.raises(ModelError, match=r"^user.py:7: dataset\('train'\), sample 1, raised ZeroDivisionError"):
        load(tmp_path, "return torch.ones(2), 1 // (1 - i)").example_batch(2)


def test_examples_come_from_one_training_set_and_a_stream_begins_anew(tmp_path):
    """One that takes a minute to make is made once by profile, and once by codegen; once, it was ten times."""
    counted = "MADE = 0\ndef dataset(split):\n    global MADE; MADE += 1\n    return {}\n"
    file = load(tmp_path, "return torch.rand(2), numpy.random.rand()", more=counted.format("Data()"))
    first, second = file.example_batch(4), file.example_batch(3)
    assert file.module.MADE == 1
    assert all(torch.equal(one[:3], other) for one, other in zip(first, second, strict=True))
    stream = (
        "class Stream(torch.utils.data.IterableDataset):\n    items = None\n    def __iter__(self): return self.items\n"
    )
    made = "stream = Stream(); stream.items = iter([(torch.ones(2), i) for i in range(4)]); return stream"
    file = load(tmp_path, more=f"{stream}def dataset(split):\n    {made}\n")
    assert [file.example_batch(4)[1].tolist() for _ in range(2)] == [[0, 1, 2, 3]] * 2


def test_a_sample_that_is_not_a_pair_is_named(tmp_path):
    with pytest.raises(
        ModelError, match=r"^user.py: dataset\('train'\), sample 2, is not a pair .*; return one, or define collate"
    ):
        MinibatchLoader(load(tmp_path, "return [1]"), "train", INPUTS).load([2], 1)


def test_samples_of_other_arguments_are_refused(tmp_path):
    file = load(tmp_path, "return {'x': torch.ones(2), 'y': 1}, 1")
    with pytest.raises(ModelError, match=r"gives the model other arguments \(x, y\) than it was traced with \(x\)"):
        MinibatchLoader(file, "train", INPUTS, ("x",)).load([0], 1)
    with pytest.raises(ModelError, match=r"\(x, y\) than it was traced with \(tensors by position\); return the same"):
        MinibatchLoader(file, "train", INPUTS).load([0], 1)
    with pytest.raises(ModelError, match=r"\(x, y\) than it was traced with \(x, y=False\)"):
        MinibatchLoader(file, "train", INPUTS, ("x", "y=False")).load([0], 1)


COLLATE = """
def collate(samples):
    longest = LENGTH
    rows = [torch.nn.functional.pad(torch.tensor(s["words"]).float(), (0, longest - len(s["words"]))) for s in samples]
    return {"x": torch.stack(rows)}, TARGET
"""
WORDS = "return {'words': [1, 2, 3][: 1 + i], 'label': i}"  # sample i has min(i + 1, 3) words


def collated(tmp_path, length="2", target="None", item=WORDS):
    more = COLLATE.replace("LENGTH", length).replace("TARGET", target)
    return MinibatchLoader(load(tmp_path, item, more=more), "train", INPUTS, ("x",))


def test_the_users_collate_makes_a_minibatch_of_any_samples(tmp_path):
    loader = collated(tmp_path, target="{'label': torch.tensor([s['label'] for s in samples]), 'name': None}")
    split = loader.describe()
    assert split.samples == 4
    inputs, target = loader.load([1, 0], 1)
    assert [t.tolist() for t in inputs] == [[[1.0, 2.0], [1.0, 0.0]]]
    assert split.unflatten(target) == {"label": target[0], "name": None}
    assert target[0].tolist() == [1, 0]


def test_a_minibatch_may_have_no_target(tmp_path):
    loader = collated(tmp_path)
    split = loader.describe()
    assert loader.load([0, 1], 1)[1] == split.leaves == []
    assert split.unflatten([]) is None


def test_lengths_that_differ_between_minibatches_are_refused(tmp_path):
    loader = collated(tmp_path, length="max(len(s['words']) for s in samples)")
    assert loader.load([0, 1], 1)[0][0].shape == (2, 2)
    message = r"gives inputs float32\[2, 3\], but the stages take float32\[2, 2\]; pad to a fixed length in collate\(\)"
    with pytest.raises(ModelError, match=message):
        loader.load([1, 2], 1)


def test_targets_that_differ_between_minibatches_are_refused(tmp_path):
    loader = collated(tmp_path, target="torch.ones(len(samples), max(len(s['words']) for s in samples))")
    loader.describe()
    message = (
        r"a target of shape \[2, 2\] for 2 samples, but of shape \[1, 1\] for one sample; .* pad to a fixed length"
    )
    with pytest.raises(ModelError, match=message):
        loader.load([0, 1], 1)
    with pytest.raises(ModelError, match="give targets one row per sample"):
        collated(tmp_path, target="torch.tensor(len(samples))").describe()


def test_faults_of_collate_name_their_line(tmp_path):
    with pytest.raises(
        ModelError, match=r"^user.py:13: collate\(\) of 2 samples of dataset\('train'\) raised KeyError"
    ):
        collated(tmp_path, item="return {}").load([0, 1], 1)
    with pytest.raises(ModelError, match=r"^user.py:7: dataset\('train'\), sample 3, raised ZeroDivisionError"):
        collated(tmp_path, item="return 1 // (3 - i)").load([3, 1], 1)
    file = load(tmp_path, "return 1", more="def collate(samples): return torch.ones(len(samples))\n")
    with pytest.raises(ModelError, match=r"^user.py: collate\(\) returned Tensor, not a pair \(inputs, target\)"):
        file.example_batch(2)


def test_the_seed_fixes_numpys_random_numbers_too(tmp_path):
    loader = MinibatchLoader(load(tmp_path, "return numpy.random.randn(2).astype('float32'), 1"), "train", INPUTS)
    first, again, other = (loader.load([0, 1], seed)[0][0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        ("3", r"sampler\(\) returned 3, which is not a list of sample indices \(.*\); return a list of integers"),
        (
            "torch.utils.data.BatchSampler(range(4), 2, False)",
            r"sampler\(\) returned <.*BatchSampler.*>, which is not .* or a Sampler; a BatchSampler yields batches$",
        ),
        ("[[0, 1]]", r"sampler\(\) returned \[\[0, 1\]\], which is not a list"),
        ("[0, 4]", r"in epoch 2, sampler\(\) returned index 4, but the dataset has 4 samples; return indices from 0"),
        ("[]", r"in epoch 2, sampler\(\) returned no indices"),
        ("[1 / 0]", r"sampler\(\) raised ZeroDivisionError"),
    ],
)
def test_samples_that_cannot_be_chosen_are_refused(tmp_path, returned, match):
    loader = MinibatchLoader(load(tmp_path, more=f"def sampler(data, epoch): return {returned}\n"), "train", INPUTS)
    with pytest.raises(ModelError, match=f"^user.py:.*{match}"):
        loader.order_by_sampler(0, 2)


TARGETS = {  # of the first sample and of later ones; None: that is no difference
    "another order": ("{'u': y, 'v': 2 * y}", "{'v': 2 * y, 'u': y}", None),
    "another kind of sequence": ("[{'u': y}, {'v': 2 * y}]", "({'u': y}, {'v': 2 * y})", None),
    "None elsewhere": (
        "{'hard': y, 'soft': None}",
        "{'hard': None, 'soft': y}",
        r"dict \(target.hard: None, target.soft: Tensor\), but its first sample dict \(target.hard: Tensor",
    ),
    "another key": (
        "{'colour': y}",
        "{'shape': y}",
        r"dict \(target.shape: Tensor\), but its first sample dict \(target.c",
    ),
    "another class": (
        "Hard(y)",
        "Soft(y)",
        r"Soft \(target.y: Tensor\), but its first sample Hard \(target.y: Tensor\)",
    ),
    "nested otherwise": (
        "([y], [y, y])",
        "([y, y], [y])",
        r"tuple \(target.0.0: Tensor, target.0.1: Tensor, target.1.0",
    ),
    "a number": ("y", "1.0", r"a target float, but its first sample Tensor"),
    "a number in a list": (
        "[1, y]",
        "[torch.ones(len(samples), dtype=torch.int64), y]",
        r"target.0: Tensor, .* \(target.0: int",
    ),
}


@pytest.mark.parametrize("kind", TARGETS)
def test_a_target_has_the_structure_of_the_first_samples(tmp_path, kind):
    """Tensors of the same shapes under other keys would reach loss() under the first sample's."""
    first, later, message = TARGETS[kind]
    classes = (
        "import dataclasses\n@dataclasses.dataclass\nclass Hard: y: torch.Tensor\n"
        "@dataclasses.dataclass\nclass Soft: y: torch.Tensor\n"
    )
    collate = (
        "def collate(samples):\n"
        "    y = torch.tensor([float(s['label']) for s in samples], dtype=torch.float64)\n"
        f"    return torch.stack([s['image'] for s in samples]), ({first} if len(samples) == 1 else {later})\n"
    )
    loader = MinibatchLoader(
        load(tmp_path, "return {'image': torch.ones(2), 'label': i}", more=classes + collate), "train", INPUTS
    )
    split = loader.describe()
    if message is None:
        target = split.unflatten(loader.load([1, 3], 1)[1])
        parts = target if isinstance(target, dict) else target[0] | target[1]
        assert (parts["u"].tolist(), parts["v"].tolist()) == ([1.0, 3.0], [2.0, 6.0])
        return
    with pytest.raises(ModelError, match=message):
        loader.load([1, 3], 1)


def test_numbers_in_a_target_reach_the_loss_as_numbers(tmp_path):
    numbers = "{'count': len(samples), 'scale': 0.1, 'last': samples[-1]['label'] == 3}"
    loader = collated(tmp_path, target=f"(torch.tensor([s['label'] for s in samples]), {numbers})")
    split = loader.describe()
    _, leaves = loader.load([1, 3], 1)
    labels, numbers = split.unflatten(leaves)
    assert labels.tolist() == [1, 3]
    assert numbers == {"count": 2, "scale": 0.1, "last": True}
    assert [type(value) for value in numbers.values()] == [int, float, bool]


def test_a_sampler_draws_from_seed_and_epoch(tmp_path):
    more = "def sampler(data, epoch): return [*torch.randint(2, (9,)) + torch.tensor(numpy.random.randint(3))]\n"
    loader = MinibatchLoader(load(tmp_path, more=more), "train", INPUTS)
    first, again, other_epoch, other_seed = (loader.order_by_sampler(*at) for at in ((0, 1), (0, 1), (0, 2), (1, 1)))
    assert first == again
    assert first not in (other_epoch, other_seed)


def parameters():
    return {name: torch.nn.Parameter(torch.ones(2)) for name in ("body.weight", "body.bias", "head.weight")}


def optimizer_of(file, names=("body.weight", "body.bias"), model=None):
    """The optimizer of the stage that has these parameters."""
    model = model or parameters()
    return NamedOptimizer(file, model, {name: model[name] for name in names})


def test_a_stage_with_nothing_to_train_has_no_optimizer(tmp_path):
    assert optimizer_of(load(tmp_path, pick="'head' in n")).optimizer is None
    assert optimizer_of(load(tmp_path), []).optimizer is None
    assert optimizer_of(load(tmp_path)).optimizer is not None


def test_other_faults_of_the_optimizer_are_not_hidden(tmp_path):
    with pytest.raises(ModelError, match="division by zero"):
        optimizer_of(load(tmp_path, pick="1 / 0"))


def test_state_that_no_checkpoint_holds_is_told_once(tmp_path, capsys):
    optimizer = optimizer_of(load(tmp_path))
    for parameter in optimizer.parameters.values():
        optimizer.optimizer.state[parameter] = {"closure": parameters, "momentum_buffer": None, "step": 3}
    saved = [list(optimizer.state_dict()) for _ in range(2)]
    record = unpack({entry: tensor for name, entry, tensor in saved[1] if name == "body.bias"})
    assert record["state"] == {"momentum_buffer": None, "step": 3}
    assert capsys.readouterr().err.count("keeps 'closure', a function: checkpoints hold tensors, numbers, string") == 1


def test_lists_of_numbers_in_attributes_are_saved_and_tensors_there_are_told(tmp_path, capsys):
    """As a Lookahead keeps its slow weights beside its state."""
    first, resumed = optimizer_of(load(tmp_path)), optimizer_of(load(tmp_path))
    first.optimizer._steps, resumed.optimizer._steps = [1, 2.5], []
    first.optimizer.__class__ = resumed.optimizer.__class__ = type("Own", (first.optimizer.__class__,), {})
    saved = {name: {} for name in first.names}
    for name, entry, tensor in first.state_dict():
        saved[name][entry] = tensor
    assert not capsys.readouterr().err
    resumed.load_state_dict(saved)
    assert resumed.optimizer._steps == [1, 2.5]
    first.optimizer.slow = {"weights": [torch.ones(2)]}
    list(first.state_dict())
    assert "keeps tensors in its attribute slow, which no checkpoint holds" in capsys.readouterr().err


def test_the_state_of_a_wrapped_optimizer_is_saved_whatever_its_name(tmp_path, capsys):
    """As Lookahead has it in the version that is copied most; once, it was said that no checkpoint holds it."""
    more = """
class Ahead(torch.optim.Optimizer):
    def __init__(self, base):
        self.base, self.param_groups, self.state, self.defaults = base, base.param_groups, {}, {}
        self.fast_state = base.state
    def step(self, closure=None):
        self.base.step()
def optimizer(named): return Ahead(torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.9))
"""
    first = optimizer_of(load(tmp_path, more=more))
    for parameter in first.parameters.values():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    saved = [entry for _, entry, _ in first.state_dict()]
    assert any("momentum_buffer" in entry for entry in saved)
    assert not capsys.readouterr().err


def test_what_an_optimizer_keeps_is_packed_as_it_is():
    """Of all types, under any names; two names that differ in where their dots are stay two."""
    nested = {"a": {"b": torch.ones(2)}, "a.b": torch.zeros(3), "": torch.ones(()), 3: [torch.ones(1), (1, 2.5)]}
    plain = {
        "updates": 7,
        "last_step": "no",
        None: True,
        "z": 1j,
        "t": (float("inf"), 0.1),
        "set": {1},
        "n": np.int8(3),
    }
    record = {"updates": 2**70, "state": nested | plain}
    found = unpack(dict(pack(record)))
    torch.testing.assert_close({key: found["state"].pop(key) for key in nested}, nested, rtol=0, atol=0)
    assert found == {"updates": 2**70, "state": plain | {"n": 3}}
    with pytest.raises(CannotPackError, match="a TwoTensor"):  # such as the state of torchao's AdamW8bit
        list(pack({"exp_avg": TwoTensor(torch.ones(1), torch.ones(1))}))


EVERY = (
    "SGD",
    "Adam",
    "AdamW",
    "NAdam",
    "RAdam",
    "Adamax",
    "Adagrad",
    "Adadelta",
    "RMSprop",
    "Rprop",
    "ASGD",
    "Adafactor",
)


@pytest.mark.parametrize("kind", EVERY)
@pytest.mark.parametrize("named", [False, True], ids=["tensors", "names"])
def test_a_stage_keeps_its_parameters_in_the_groups_of_all(tmp_path, kind, named):
    """And steps them as if all were there, beside a group that has become empty."""
    text = f"""
def optimizer(named):
    pick = lambda layer: [(n, p) if {named} else p for n, p in named if n.startswith(layer)]
    groups = [{{"params": pick("head")}}, {{"params": pick("body"), "lr": 0.5}}]
    return torch.optim.{kind}(groups, lr=0.1)
"""
    file = load(tmp_path, more=text)
    model, whole = parameters(), parameters()
    part = optimizer_of(file, model=model).optimizer
    assert [group["params"] for group in part.param_groups] == [[], [model["body.weight"], model["body.bias"]]]
    assert not {*part.state} - {model["body.weight"], model["body.bias"]}
    if named:
        assert [group["param_names"] for group in part.param_groups] == [[], ["body.weight", "body.bias"]]
    everything = file.optimizer(whole.items())
    for _ in range(3):
        for values, optimizer in ((model, part), (whole, everything)):
            for p in values.values():
                p.grad = p.detach() * 0.3
            optimizer.step()
    assert torch.equal(model["body.weight"], whole["body.weight"])
    assert torch.equal(model["head.weight"], torch.ones(2))


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        (
            "[torch.optim.SGD(p, 0.1), torch.optim.Adam(p)]",
            r"returned 2 values in a list, .* \(GANs\) cannot be pipelined;",
        ),
        (
            "torch.optim.SparseAdam(p)",
            "returned SparseAdam, which takes sparse gradients only, but stages compute dense",
        ),
        ("torch.optim.LBFGS(p)", "returned LBFGS, whose step needs a closure that computes the loss again"),
    ],
)
def test_optimizers_that_one_step_does_not_update_are_refused(tmp_path, returned, match):
    more = f"def optimizer(named):\n    p = [p for _, p in named]\n    return {returned}\n"
    with pytest.raises(ModelError, match=rf"^user.py: optimizer\(\) {match}.*; .*use|return"):
        optimizer_of(load(tmp_path, more=more))


def test_a_parameter_that_is_not_the_models_is_refused(tmp_path):
    """Such as one of another model: it would be stepped, or nothing would, without a word."""
    more = "def optimizer(named): return torch.optim.SGD(torch.nn.Linear(3, 2).parameters(), 0.1)\n"
    with pytest.raises(
        ModelError, match=r"takes a parameter of shape \[2, 3\] that is not one of the model's; use only"
    ):
        optimizer_of(load(tmp_path, more=more))


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_sparse_gradients_become_dense_ones(tmp_path, kind):
    """With the same values, so that SGD and Adagrad, which take both, train the same weights."""
    more = f"def model():\n    return torch.nn.{kind}(5, 3, sparse=True)\n"
    built = load(tmp_path, more=more).build()
    sparse = getattr(torch.nn, kind)(5, 3, sparse=True, _weight=built.weight.detach().clone())
    for module in (built, sparse):
        module(torch.tensor([[1, 4], [1, 2]])).square().sum().backward()
    assert not built.weight.grad.is_sparse
    assert torch.equal(built.weight.grad, sparse.weight.grad.to_dense())


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("MAX_GRAD_NORM = 0", "MAX_GRAD_NORM: 0 is not a positive finite number; write 1.0"),
        ("MAX_GRAD_NORM = 10**400", "MAX_GRAD_NORM: 1000"),
        ("MAX_GRAD_NORM = float('nan')", "MAX_GRAD_NORM: nan is not a positive"),
        ("MAX_GRAD_NORM = float('inf')", "MAX_GRAD_NORM: inf is not a positive"),
        ("MAX_GRAD_NORM = True", "MAX_GRAD_NORM: True is not a positive"),
        ("MAX_GRAD_NORM = '1'", "MAX_GRAD_NORM: '1' is not a positive"),
        ("SCHEDULER_STEP = 'minibatch'", 'SCHEDULER_STEP: \'minibatch\' is unknown; write "update" or "epoch"'),
        ("DROP_LAST = 1", "DROP_LAST: 1 is neither True nor False; write one of them"),
    ],
)
def test_constants_are_checked(tmp_path, line, match):
    with pytest.raises(ModelError, match=f"^user.py: {match}"):
        _ = load(tmp_path, more=line).training


def test_a_schedule_that_wants_an_argument_is_refused(tmp_path):
    more = """
class Metric:
    def step(self, metric):
        pass
def scheduler(o): return Metric()
"""
    with pytest.raises(
        ModelError, match=r"scheduler\(\) returned Metric, which cannot be stepped \(missing .* 'metric'"
    ):
        optimizer_of(load(tmp_path, more=more))


def test_what_is_no_schedule_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"scheduler\(\) returned NoneType, not an LRScheduler"):
        optimizer_of(load(tmp_path, more="def scheduler(optimizer): pass\n"))


@pytest.mark.parametrize(
    ("signature", "total"), [("o", None), ("o, total", 7), ("o, warmup=3", None), ("o, *, warmup=3", None)]
)
def test_a_schedule_is_told_how_often_it_will_be_stepped_if_it_asks(tmp_path, signature, total):
    arguments = "total" if total else "4"
    more = f"def scheduler({signature}): return torch.optim.lr_scheduler.StepLR(o, {arguments})\n"
    file, model = load(tmp_path, more=more), parameters()
    assert file.scheduler(file.optimizer(model.items()), 7).step_size == (total or 4)


def test_a_schedule_of_the_whole_run_goes_on_at_the_same_part_of_it(tmp_path):
    """After the first of two epochs, whose plan made seven updates of it, while this one makes three."""
    more = "def scheduler(o, total): return torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=total)\n"
    file, model = load(tmp_path, more=more), parameters()
    length = RunLength(epochs=2, updates=6, losses_before=[1.0])
    resumed, expected = (NamedOptimizer(file, model, model, length) for _ in range(2))
    resumed.load_state_dict({name: dict(pack({"updates": 7, "state": {}})) for name in model})
    for _ in range(3):
        expected.step()
    assert resumed.optimizer.param_groups[0]["lr"] == expected.optimizer.param_groups[0]["lr"] != 0.1


def test_what_a_machine_may_set_otherwise_is_compared(tmp_path, monkeypatch):
    """Machines whose environments differ trained with different constants and schedules, without a word."""
    more = """import os
if "NORM" in os.environ: MAX_GRAD_NORM = float(os.environ["NORM"])
DROP_LAST, SCHEDULER_STEP = "DROP" in os.environ, os.environ.get("STEP", "update")
def scheduler(o):
    lr = torch.optim.lr_scheduler
    parts = [lr.ConstantLR(o, 0.5, 2), lr.ExponentialLR(o, float(os.environ.get("GAMMA", 0.9)))]
    return lr.SequentialLR(o, parts, [2])
"""

    def settings() -> dict[str, str]:
        file, model = load(tmp_path, more=more), parameters()
        return user_code_settings(file.training) | NamedOptimizer(file, model, model).schedule.settings

    own = "import time\nclass Own(torch.optim.lr_scheduler.LRScheduler):\n    def get_lr(self): return [0.1]\n"
    own += "def scheduler(o):\n    made = Own(o)\n    made.begun = time.time()\n    return made\n"
    file, model = load(tmp_path, more=own), parameters()
    assert NamedOptimizer(file, model, model).schedule.settings == {"scheduler() for 1 steps": "Own()"}
    usual = settings()
    assert settings() == usual
    for variable, value in (("NORM", "2"), ("DROP", "1"), ("STEP", "epoch"), ("GAMMA", "0.8")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            name, *more_names = [key for key, other in settings().items() if other != usual.get(key)]
        assert not more_names
        assert variable in name or name == "scheduler() for 1 steps"


def test_a_one_cycle_schedule_of_another_length_than_the_run_is_told(tmp_path, capsys):
    """Shorter than the run, it cannot be stepped to the end; longer, it does not get there."""
    more = "def scheduler(o): return torch.optim.lr_scheduler.OneCycleLR(o, max_lr=1.0, total_steps=5)\n"
    file, model = load(tmp_path, more=more), parameters()
    warnings = {n: NamedOptimizer(file, model, model, RunLength(updates=n)).schedule.length_warning for n in (4, 5, 6)}
    assert warnings[6].startswith(
        "OneCycleLR was made for 5 steps, but the run will take 6: let scheduler(optimizer, to"
    )
    assert warnings[4]
    assert not warnings[5]


@pytest.mark.parametrize("shape", [(2,), ()], ids=["vector", "scalar"])
@pytest.mark.parametrize(("options", "device"), [("capturable=True", "meta"), ("", "cpu")])
def test_a_step_count_is_resumed_where_the_optimizer_keeps_it(tmp_path, options, device, shape):
    """Of a fused or capturable Adam on the parameter's device, here one without memory; else on the CPU. All other
    state is where its parameter is."""
    more = f"def optimizer(named): return torch.optim.Adam([p for _, p in named], {options})\n"
    model = {"w": torch.nn.Parameter(torch.empty(shape, device="meta"))}
    resumed = NamedOptimizer(load(tmp_path, more=more), model, model)
    record = {"updates": 3, "state": {"step": torch.tensor(3.0), "exp_avg": torch.ones(shape)}}
    resumed.load_state_dict({"w": dict(pack(record))})
    state = resumed.optimizer.state[model["w"]]
    assert {key: value.device.type for key, value in state.items()} == {"step": device, "exp_avg": "meta"}


def test_a_setting_that_needs_other_state_than_the_resumed_run_has_is_refused(tmp_path):
    """Once: KeyError: 'max_exp_avg_sq'."""
    state = {"step": torch.tensor(3.0), "exp_avg": torch.ones(2), "exp_avg_sq": torch.ones(2)}
    more = "def optimizer(named): return torch.optim.Adam([p for _, p in named], amsgrad=True)\n"
    model = {"w": torch.nn.Parameter(torch.ones(2))}
    resumed = NamedOptimizer(load(tmp_path, more=more), model, model)
    resumed.load_state_dict({"w": dict(pack({"updates": 3, "state": state}))})
    model["w"].grad = torch.ones(2)
    with pytest.raises(ModelError, match=r"Adam looks for 'max_exp_avg_sq' in its state, .* the settings of that run"):
        resumed.step()


_NOISE = "torch.randn(2) + random.random() + numpy.random.rand()"
_NOISY_UPDATE = f"""import random
def after_update(named_parameters, update):
    for _, p in named_parameters:
        p.add_({_NOISE})
"""
_NOISY_OPTIMIZER = f"""import random
class Noisy(torch.optim.SGD):
    @torch.no_grad()
    def step(self):
        for p in self.param_groups[0]["params"]:
            p.add_({_NOISE})
def optimizer(named): return Noisy([p for _, p in named], lr=0.1)
"""


def test_a_stage_with_nothing_to_train_seeds_no_generators(tmp_path):
    """Each update would take time for nothing; an optimizer of the user's own, and after_update(), may draw."""
    cases = {"": parameters(), _NOISY_UPDATE: parameters(), _NOISY_OPTIMIZER: parameters()}
    for name in ("body.weight", "body.bias"):
        cases[""][name].requires_grad = False
    seeded = []
    for more, model in cases.items():
        before = torch.manual_seed(1).get_state()
        optimizer_of(load(tmp_path, more=more), model=model).step()
        seeded.append(not torch.equal(before, torch.random.get_rng_state()))
    assert seeded == [False, True, True]


@pytest.mark.parametrize("more", [_NOISY_UPDATE, _NOISY_OPTIMIZER], ids=["after_update", "optimizer"])
def test_updates_draw_the_same_numbers_at_all_replicas_and_in_a_resumed_run(tmp_path, more):
    """Whatever a replica drew before, for minibatches of its own."""
    file = load(tmp_path, more=more)
    replicas = [parameters() for _ in range(3)]
    one, other, resumed = (NamedOptimizer(file, model, model, seed=5) for model in replicas)
    for optimizer in (one, one, other, other):
        torch.rand(1), random.random(), np.random.rand()
        optimizer.step()
    with torch.no_grad():  # as if loaded from the checkpoint after the first update, which was the same for all
        first = parameters()
        NamedOptimizer(file, first, first, seed=5).step()
        for name, p in replicas[2].items():
            p.copy_(first[name])
    resumed.updates = 1
    resumed.step()
    for name, p in replicas[0].items():
        assert torch.equal(p, replicas[1][name])
        assert torch.equal(p, replicas[2][name])
    changes = [p - first[name] for name, p in replicas[0].items()]
    assert not torch.equal(changes[0], changes[1]), "each parameter has numbers of its own"
    assert not torch.equal(changes[0], first["body.weight"] - 1), "so has each update"


_OWN_ZERO_GRAD = """
class Shrinking(torch.optim.SGD):
    def zero_grad(self, set_to_none=True):
        super().zero_grad(set_to_none)
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]: p.mul_(0.9)
def optimizer(named): return Shrinking([p for _, p in named], lr=0.1)
"""
_ADDED_GROUP = """
def optimizer(named):
    global OPT, BODY
    BODY = [p for n, p in named if "head" not in n]
    OPT = torch.optim.SGD([p for n, p in named if "head" in n], lr=0.1)
    return OPT
def after_update(named, update):
    if update == 2: OPT.add_param_group({"params": BODY, "lr": 0.01})
"""
_VALUES_BY_HAND = """
def optimizer(named):
    global OPT
    OPT = torch.optim.SGD([p for _, p in named], lr=0.1, momentum=0.5)
    return OPT
def after_update(named, update):
    for group in OPT.param_groups: group["momentum"] += 0.1
"""
_RANDOM_RATES = """
import random
def scheduler(o): return torch.optim.lr_scheduler.LambdaLR(o, lambda step: random.random() + torch.rand(1).item())
"""


@pytest.mark.parametrize("more", [_OWN_ZERO_GRAD, _ADDED_GROUP, _VALUES_BY_HAND, _RANDOM_RATES])
def test_optimizers_of_several_stages_in_one_worker_do_what_one_optimizer_does(tmp_path, more):
    """Stages take turns, so that a variable of the file never names the optimizer that was made last by chance."""
    file, whole, model = load(tmp_path, more=more), parameters(), parameters()
    gradients = {name: torch.randn(2) for name in whole}

    def trained(optimizers, parameters):
        for _ in range(5):
            for optimizer in optimizers:
                for name, p in optimizer.parameters.items():
                    p.grad = gradients[name].clone()
                optimizer.step()
        return {name: p.detach() for name, p in parameters.items()}

    stages = [optimizer_of(file, names, model) for names in (("body.weight", "body.bias"), ("head.weight",), ())]
    found = trained(stages, model)
    expected = trained([NamedOptimizer(file, whole, whole)], whole)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert not any(torch.equal(p, torch.ones(2)) for p in found.values())


def test_a_resumed_run_has_the_attributes_and_random_rates_of_the_first(tmp_path):
    more = """
class Clock(torch.optim.SGD):
    def __init__(self, params):
        super().__init__(params, lr=0.1)
        self.clock = {"ticks": 0, "times": [0.5]}
    def step(self, closure=None):
        self.clock["ticks"] += 1
def optimizer(named): return Clock([p for _, p in named])
"""
    file, model = load(tmp_path, more=more + _RANDOM_RATES), parameters()
    first = NamedOptimizer(file, model, model, seed=3)
    for _ in range(4):
        first.step()
    saved = {name: {} for name in model}
    for name, entry, tensor in first.state_dict():
        saved[name][entry] = tensor
    resumed = NamedOptimizer(file, model, model, seed=3)
    resumed.load_state_dict(saved)
    assert resumed.optimizer.clock == {"ticks": 4, "times": [0.5]}
    assert resumed.learning_rate == first.learning_rate != NamedOptimizer(file, model, model, seed=4).learning_rate


def test_a_schedule_that_fails_names_its_line(tmp_path):
    more = "def scheduler(o): return torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 - step))\n"
    with pytest.raises(ModelError, match=r"^user.py:10: the learning-rate schedule LambdaLR raised ZeroDivisionError"):
        optimizer_of(load(tmp_path, more=more)).step()


def test_an_optimizer_whose_step_fails_names_its_line(tmp_path):
    more = """
class Broken(torch.optim.SGD):
    def step(self):
        raise KeyError("momentum")
def optimizer(named): return Broken([p for n, p in named], lr=0.1)
"""
    with pytest.raises(ModelError, match=r"^user.py:13: step 0 of Broken raised KeyError: 'momentum'"):
        optimizer_of(load(tmp_path, more=more)).step()


def test_a_metric_of_several_elements_is_refused(tmp_path):
    file = load(tmp_path, more="def metrics(output, target): return {'a': (output, 1)}\n")
    with pytest.raises(
        ModelError, match=r"metrics\(\) returned .*; return {name: \(sum, count\)} with sums of one element. For larger"
    ):
        file.metrics(torch.ones(2), None)


SUMMED = "def metrics(output, target): return {'a': (output, 1)}\n"


@pytest.mark.parametrize(
    ("returned", "match"),
    [
        ("3", r"summarize_metrics\(\) returned 3; return {name: number}"),
        ("{'a': torch.ones(2)}", r"summarize_metrics\(\) returned .*; return {name: number}"),
        ("{'loss': 1}", r"summarize_metrics\(\) names 'loss', which is the validation loss; rename it"),
        ("{'a' * 101: 1}", r"summarize_metrics\(\) names .* cannot be printed in a table"),
        ("{'a': 1 / 0}", r"11: summarize_metrics\(\) raised ZeroDivisionError"),
    ],
)
def test_figures_that_cannot_be_logged_are_refused(tmp_path, returned, match):
    file = load(tmp_path, more=f"{SUMMED}def summarize_metrics(totals): return {returned}\n")
    totals = file.metrics(torch.ones(2), None)
    assert torch.equal(totals["a"][0], torch.ones(2))
    with pytest.raises(ModelError, match=rf"^user.py:.*{match}"):
        file.summarize_metrics(totals)


def test_what_fails_after_an_update_names_its_line(tmp_path):
    more = "def after_update(named_parameters, update):\n    dict(named_parameters)['tail']\n"
    optimizer = optimizer_of(load(tmp_path, more=more))
    with pytest.raises(ModelError, match=r"^user.py:11: after_update\(\) raised KeyError: 'tail'"):
        optimizer.step()


def detached_loss(output, target):
    return output.detach().mean()


@pytest.mark.parametrize("recompute", [False, True])
def test_a_loss_without_a_gradient_is_refused_at_the_first_minibatch(recompute):
    stage = PipelineStage(torch.nn.Linear(2, 2), detached_loss, recompute=recompute)
    stage.weights.begin_phase()
    with pytest.raises(ModelError, match=r"loss\(\) returned a tensor without a gradient, .*; compute it from"):
        stage.forward(0, [torch.ones(1, 2)])


def test_a_loss_of_a_model_that_is_frozen_needs_no_gradient():
    stage = PipelineStage(torch.nn.Linear(2, 2).requires_grad_(False), lambda output, target: output.mean())
    stage.weights.begin_phase()
    stage.forward(0, [torch.ones(1, 2)])


def test_a_sampler_must_choose_as_many_samples_in_each_epoch(tmp_path):
    file = load(tmp_path, more="def sampler(data, epoch): return range(epoch)\n")
    plan = SimpleNamespace(batch_size=1)
    config = SimpleNamespace(plan=plan, steps=None, seed=0)
    splits = {"train": DatasetSplit(9, Structure.of(()))}
    data = TrainingData(config, file, splits, lambda epoch: file.sampler(None, epoch), check_length=lambda epoch: None)
    assert data.order_of_epoch(1, 0) == [0]
    with pytest.raises(ModelError, match=r"^user.py: sampler\(\) gives 2 samples in epoch 2, but 1 in epoch 1; return"):
        data.order_of_epoch(2, 1)


LATE_IMPORTS = """
import sys
from pathlib import Path
sys.path.insert(0, str(Path(__file__).parent / "library"))
from own_scale import SCALE
def model():
    from own_activation import Activation
    return nn.Sequential(nn.Linear(4, 8), Activation(), nn.Linear(8, 2))
class Rows:
    def __init__(self, rows): self.rows = rows
    def __len__(self): return len(self.rows)
    def __getitem__(self, index):
        from own_rows import scaled
        return scaled(self.rows[index])
original = dataset
def dataset(split):
    import own_data
    return Rows(own_data.limited(original(split)))
"""


def test_what_the_users_code_imports_when_it_runs_is_found_as_python_finds_it(folder, monkeypatch):
    """Its folder is on sys.path all the time, behind what model.py inserts there, also in loader workers."""
    folder.write("network/model.py", NET + LATE_IMPORTS)
    folder.write("network/library/own_scale.py", "SCALE = 2\n")
    folder.write("network/library/own_activation.py", "from torch.nn import Tanh as Activation\n")
    folder.write("network/own_activation.py", "from torch.nn import ReLU as Activation\n")
    folder.write("network/own_data.py", "def limited(rows): return rows\n")
    folder.write("network/own_rows.py", "def scaled(row): return row[0] * 2, row[1]\n")
    before = sys.path[:]
    for arguments in (
        ("profile", "network/model.py", "--batch-size", "8"),
        ("partition", "--topology", "2", "--straight", "--bandwidth", "1GB/s"),
        ("codegen",),
        ("check", "--fresh"),
        ("run", "--steps", "2", "--loader-workers", "2"),
    ):
        folder.pdtool(*arguments)
        assert sys.path == before, "a program that calls pdtool finds its own modules"
        for name in ("scale", "activation", "data", "rows"):
            monkeypatch.delitem(sys.modules, f"own_{name}", raising=False)
    stages = "".join(path.read_text() for path in (folder.path / "plans/model-2").glob("stage_*.py"))
    assert "tanh" in stages.lower()
    assert "relu" not in stages.lower()


ODD = """
import enum, numpy as np
from collections import defaultdict
from dataclasses import dataclass
class Phase(enum.Enum):
    WARM, MAIN = 1, 2
class Stats(dict):
    pass
@dataclass(frozen=True)
class Fixed:
    array: np.ndarray
class Node:
    def __init__(self, inner):
        self.inner = inner
class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.phase, self.stats, self.log = Phase.WARM, Stats(n=0), {"train": defaultdict(int)}
        self.fixed, self.long, self.names = Fixed(np.zeros(2)), np.zeros(2, np.longdouble), np.array(["a"])
        self.prior, self.current, self.endless = torch.ones(2), torch.zeros(2), []
        self.endless.append(self.endless)
        self.register_buffer("center", torch.zeros(()))
        self.shared, self.head, self.inner = NET, None, torch.nn.Linear(1, 1)
        self.held = [self.inner.weight]
        for _ in range(1500):
            self.head = Node(self.head)
    def forward(self, output, target):
        self.phase, self.current = Phase.MAIN, self.prior
        self.stats["n"] += 1
        self.log["train"]["n"] += 1
        self.fixed.array[0] += 1
        self.center += 1
        if not hasattr(self, "made"):
            self.made = Node(1)
        return output.sum()
NET = torch.nn.Linear(1, 1)
loss = Loss()
"""


def test_objects_of_any_kind_are_kept_or_left_alone(tmp_path):
    """Members of an Enum lost their values; arrays of longdouble, long chains of objects and lists in themselves ended
    the run; a dict of a class of its own, and a module that shares the model, lost what they kept."""
    cpu, saved = torch.device("cpu"), dict[str, dict[str, torch.Tensor]]()
    with undoing_user_changes():
        file = load(tmp_path, more=ODD)
        loss, model = file.module.loss, file.module.NET
        kept = kept_values.KeptValues(file, model, [["weight", "bias"]], 0, cpu)
        with kept.restored():
            loss(torch.ones(2), None)
        assert loss.phase is file.module.Phase.WARM
        assert (loss.stats["n"], loss.log["train"]["n"], loss.center.item()) == (0, 0, 0)
        assert loss.held[0] is loss.inner.weight
        assert (loss.fixed.array.tolist(), loss.current.tolist(), loss.prior.tolist()) == ([0, 0], [0, 0], [1, 1])
        assert (file.module.Phase.MAIN.value, file.module.Phase.MAIN.name) == (2, "MAIN")
        assert not hasattr(loss, "made")
        loss(torch.ones(2), None)
        for variable, entry, tensor in kept.state_dict():
            saved.setdefault(variable, {})[entry] = tensor
    with undoing_user_changes():
        file = load(tmp_path, more=ODD)
        loss, model = file.module.loss, file.module.NET
        kept = kept_values.KeptValues(file, model, [["weight", "bias"]], 0, cpu)
        kept.load_state_dict({variable: {} for variable in kept.names} | saved)
        assert (loss.stats["n"], loss.log["train"]["n"], loss.center.item(), loss.fixed.array[0]) == (1, 1, 1, 1)
        assert loss.current.tolist() == [1, 1]
        assert file.module.Phase.MAIN.value == 2


def test_a_module_and_a_variable_of_one_name_have_keys_of_their_own(tmp_path):
    """One was taken for an entry of the other, and the checkpoint could not be loaded."""
    name = f"counting_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(
        "COUNTS = {}\nclass Meter:\n    def __init__(self):\n        self.n = 0\n"
        "def count():\n    COUNTS['n'] = COUNTS.get('n', 0) + 1\n"
    )
    text = f"from {name} import Meter, count\n{name} = Meter()\n"
    text += f"def loss(output, target):\n    count()\n    {name}.n += 1\n    return output.sum()\n"
    cpu, model, saved = torch.device("cpu"), torch.nn.Linear(1, 1), dict[str, torch.Tensor]()
    with undoing_user_changes():
        file = load(tmp_path, more=text)
        kept = kept_values.KeptValues(file, model, [["weight", "bias"]], 0, cpu)
        file.module.loss(torch.ones(1), None)
        for variable, entry, tensor in kept.state_dict():
            saved[f"kept.{variable}.{entry}"] = tensor
    owners = {checkpoint._owner(key, {f"kept.{variable}" for variable in kept.names}) for key in saved}
    assert owners == {f"kept.{name}", f"kept.{name}/COUNTS"}
