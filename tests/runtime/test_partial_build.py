"""A model that is built with the values of some tensors has exactly those that it has when it is built as a whole."""

from __future__ import annotations

import copy
import pickle
import random
import subprocess
import sys
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import harness
import numpy
import pytest
import samples
import torch
from collection import FAMILIES, tasks, write_model
from harness import CONV1, CONV3
from torch import Tensor, nn
from torch.nn.utils import prune

from pdtool.errors import ModelError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.operators import named_state, names_over_parameters
from pdtool.runtime.stage.optimizer import NamedOptimizer
from pdtool.runtime.worker.partial_build import MissingValuesError, build_partially
from pdtool.runtime.worker.worker_model import WorkerModel, is_small

pytestmark = pytest.mark.filterwarnings("ignore")  # of models, as in a plain loop
SEED = 3
# Those whose construction reads values: they are built as a whole.
READING = {"structures.weight_normalised": r"Tensor.item\(\)"}


def seeded(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """Build from a seed."""

    def build() -> nn.Module:
        torch.manual_seed(SEED)
        numpy.random.seed(SEED)
        return make()

    return build


def generators() -> list[Any]:
    """The states of all generators."""
    _, keys, *rest = numpy.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), keys.tolist(), rest]


def check_equal(build: Callable[[], nn.Module], names: Callable[[str], bool]) -> nn.Module:
    """Check that the tensors of these names, and all others with values, are those of the whole model."""
    expected = named_state(build())
    after = generators()
    _, model = build_partially(build, lambda model: [t for name, t in named_state(model).items() if names(name)])
    assert generators() == after
    found = named_state(model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert not (tensor.is_meta and names(name)), name
        assert tensor.shape == expected[name].shape
        assert tensor.requires_grad == expected[name].requires_grad
        if not tensor.is_meta:
            torch.testing.assert_close(tensor, expected[name], rtol=0, atol=0, equal_nan=True)
    ties = [[[a is b for b in state.values()] for a in state.values()] for state in (found, expected)]
    assert ties[0] == ties[1]
    assert names_over_parameters(found) == names_over_parameters(expected)
    return model


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_wanted_of_any_model_is_that_of_the_whole_model(family: str, tmp_path: Path) -> None:
    """A third of the names, by chance; the generators go on as if all had been drawn."""
    without_values = 0
    for name in tasks(family):
        build, chosen = partial(write_model(tmp_path, name).build, SEED), random.Random(name)
        wanted = {key for key in sorted(named_state(build())) if chosen.random() < 1 / 3}
        if name in READING:
            with pytest.raises(ModelError, match=READING[name]):
                build_partially(build, nn.Module.parameters)
            continue
        model = check_equal(build, wanted.__contains__)
        without_values += sum(parameter.is_meta for parameter in model.parameters())
    assert without_values > 20


class Layers(nn.Module):
    """A layer under each name."""

    def __init__(self, **layers: nn.Module) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)


def linear(initialize: Callable[[Tensor], Any] = lambda weight: None, *size: int) -> nn.Linear:
    """A layer whose weight is initialized once more."""
    layer = nn.Linear(*(size or (6, 5)))
    with torch.no_grad():
        initialize(layer.weight)
    return layer


def drawn_as_parameters_are_placed(weight: Tensor) -> None:
    """Skip the meta device, as many initializations do, and draw where the parameter is."""
    if not weight.is_meta and weight.device.type == "cpu" and weight.is_cpu:
        weight.copy_(torch.randn(weight.shape, device=weight.device))


INITIALIZATIONS: dict[str, Callable[[Tensor], Any]] = {
    **{
        name: getattr(nn.init, name)
        for name in (
            "uniform_",
            "normal_",
            "trunc_normal_",
            "xavier_uniform_",
            "kaiming_normal_",
            "orthogonal_",
            "eye_",
        )
    },
    "narrow": lambda weight: nn.init.trunc_normal_(weight, a=2, b=3),
    "rows": lambda weight: weight[1:3].normal_(),
    "transposed": lambda weight: weight.t().uniform_(),
    "bernoulli_": lambda weight: weight.bernoulli_(0.3),
    "exponential_": lambda weight: weight.exponential_(),
    "by its size": lambda weight: weight.mul_(weight.norm() / weight.numel()),
    "like it": lambda weight: weight.add_(torch.randn_like(weight)),
    "where it is": drawn_as_parameters_are_placed,
    "where it is put": lambda weight: weight.copy_(torch.ones(5, 6).to(weight.device)),
    "own generator": lambda weight: weight.normal_(generator=torch.Generator().manual_seed(1)),
    "numpy": lambda weight: weight.copy_(torch.from_numpy(numpy.random.rand(5, 6))),
}


@pytest.mark.parametrize("initialize", INITIALIZATIONS.values(), ids=INITIALIZATIONS)
def test_initializations_draw_as_for_the_whole_model(initialize: Callable[[Tensor], Any]) -> None:
    """The second layer is wanted, which the first one is drawn before; then the first."""
    build = seeded(lambda: Layers(a=linear(initialize), b=linear(initialize)))
    for name in ("b", "a"):
        model = check_equal(build, lambda key, name=name: key.startswith(name))
        assert sum(parameter.is_meta for parameter in model.parameters()) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [2**18 - 1, 2**18 + 1, 2**18 + 15, 2**18 + 16, 2**19 + 17])
def test_large_tensors_are_drawn_in_pieces_of_the_same_numbers(dtype: torch.dtype, size: int) -> None:
    def layer(name: str) -> nn.Module:
        module = nn.Module()
        module.register_parameter(name, nn.Parameter(torch.empty(size, dtype=dtype)))
        nn.init.normal_(module.get_parameter(name))
        nn.init.uniform_(module.get_parameter(name))
        return module

    check_equal(seeded(lambda: Layers(a=layer("large"), b=linear())), lambda name: name == "b.weight")


def weight_normalized() -> nn.Module:
    """The wanted scale is made of the weight."""
    return nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))


def averaged() -> nn.Module:
    """A copy of parameters that are not wanted, and a buffer and an attribute made of one."""
    model = Layers(b=linear(), b_average=linear(), a=linear())
    model.b_average.load_state_dict(model.b.state_dict())
    model.register_buffer("b_scale", model.b.weight.detach().std(0))
    model.b_bound = model.b.weight.detach().abs().max() + 1
    return model


def tied_by_object() -> nn.Module:
    """One parameter that is registered twice without being read from the first module."""
    weight, model = nn.Parameter(torch.randn(5, 6)), Layers(a=linear(), b=linear())
    model.a.weight = model.b.weight = weight
    return model


def loaded(model: nn.Module, *, assign: bool) -> nn.Module:
    """A model with parameters from elsewhere."""
    model.load_state_dict({name: torch.randn(value.shape) for name, value in model.state_dict().items()}, assign=assign)
    return model


def set_data() -> nn.Module:
    """Parameters that get other memory: of a real tensor, and of what is made of another parameter."""
    model = Layers(a=linear(), b=linear(), c=linear())
    model.a.weight.data = torch.randn(5, 6)
    model.b.weight.data = model.c.weight.data * 2
    model.c.bias.data = model.a.bias.data
    nn.init.normal_(model.b.weight)
    return model


STRUCTURES = {
    "cloned": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3),
    "copied": lambda: Layers(a=(layer := linear()), b=copy.deepcopy(layer), c=copy.deepcopy(layer)),
    "weight norm": lambda: Layers(a=weight_normalized(), b=weight_normalized()),
    "spectral norm": lambda: Layers(a=nn.utils.parametrizations.spectral_norm(linear()), b=linear()),
    "averaged": averaged,
    "tied": tied_by_object,
    "set data": set_data,
    "pruned": lambda: Layers(a=prune.l1_unstructured(linear(), "weight", 0.5), b=linear()),
    "assigned": lambda: loaded(Layers(a=linear(), b=linear()), assign=True),
    "loaded": lambda: loaded(Layers(a=linear(), b=linear()), assign=False),
    "converted": lambda: Layers(a=linear(), b=linear()).double().to("cpu"),
    "lstm": lambda: Layers(a=nn.LSTM(3, 4, 2), b=nn.LSTM(3, 4)),
    "views": lambda: Layers(a=linear(lambda weight: weight.view(-1)[3:].zero_()), b=linear()),
    "frozen": lambda: Layers(a=linear().requires_grad_(False), b=linear()),
}


@pytest.mark.parametrize("make", STRUCTURES.values(), ids=STRUCTURES)
def test_values_that_are_made_of_others(make: Callable[[], nn.Module]) -> None:
    """Each tensor alone."""
    build = seeded(make)
    for wanted in named_state(build()):
        check_equal(build, lambda name, wanted=wanted: name == wanted)


def test_a_pretrained_model_of_transformers(tmp_path: Path) -> None:
    """It is made on the meta device by itself, and its tied embedding is loaded from a file."""
    gpt2 = pytest.importorskip("transformers.models.gpt2")
    gpt2.GPT2LMHeadModel(gpt2.GPT2Config(n_layer=2, n_embd=8, n_head=2, vocab_size=11)).save_pretrained(tmp_path)
    build = seeded(lambda: gpt2.GPT2LMHeadModel.from_pretrained(tmp_path))
    for part in ("wte", "h.1"):
        model = check_equal(build, lambda name, part=part: part in name)
        assert sum(parameter.is_meta for parameter in model.parameters()) > 12


class Reading(nn.Module):
    """Computes with the values of parameters that are registered."""

    def __init__(self, read: Callable[[nn.Linear, nn.Linear], Any]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 5), nn.Linear(6, 5)
        self.register_buffer("total", torch.zeros(()))
        try:
            with torch.no_grad():
                read(self.a, self.total)
        except Exception:  # a model may catch what it likes
            self.total += 1


READS: dict[str, Callable[[nn.Linear, Tensor], Any]] = {
    "item": lambda a, total: a.weight[0, 0].item(),
    "branch": lambda a, total: bool(a.weight.sum() > 0),
    "numpy": lambda a, total: a.weight.detach().numpy(),
    "tolist": lambda a, total: a.bias.tolist(),
    "address": lambda a, total: a.weight.data_ptr(),
    "write": lambda a, total: total.copy_(a.weight.sum()),
    "add": lambda a, total: total.add_(a.weight.sum()),
    "statistics": lambda a, total: nn.BatchNorm1d(5)(a(torch.ones(2, 6))),
    "memory": lambda a, total: setattr(total, "data", a.weight.sum()),
    "draw": lambda a, total: torch.poisson(a.weight.abs()),
    "pickle": lambda a, total: nn.init.normal_(pickle.loads(pickle.dumps(a)).weight),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_construction_that_reads_values_is_refused(read: Callable[[nn.Linear, Tensor], Any]) -> None:
    """Also if the model catches the error."""
    with pytest.raises((RuntimeError, TypeError), match=r"meta|model\(\)|values|storage"):
        build_partially(seeded(lambda: Reading(read)), lambda model: [model.get_parameter("b.weight")])


def test_a_construction_that_changes_is_refused() -> None:
    sizes = iter(((6, 5), (5, 5)))
    with pytest.raises(MissingValuesError, match="different parameters when it is called again"):
        build_partially(lambda: Layers(a=nn.Linear(*next(sizes))), nn.Module.parameters)


LARGE = """
import torch
from torch import nn
from pdtool.host import peak_resident_bytes, reset_peak, resident_bytes
from pdtool.runtime.worker.partial_build import build_partially

def build():
    return nn.Sequential(*(nn.Linear(2000, 2000) for _ in range(20)), nn.Embedding(20000, 1000))

build_partially(lambda: nn.Linear(9, 9), nn.Module.parameters)
before = resident_bytes()
reset_peak()
outline, model = build_partially(build, lambda model: model[0].parameters())
print((peak_resident_bytes() - before) / 1e6)
"""


@pytest.mark.rows_of_the_day(days=2)
def test_parameters_that_are_not_wanted_take_no_memory() -> None:
    """Not even while it is built: 400 MB, of which 16 are wanted."""
    done = subprocess.run([sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, timeout=120)
    assert 16 < float(done.stdout) < 60


# --- the model of a worker --------------------------------------------------------------------------------------------

USED_BY_NONE = replace(CONV3, model=CONV3.model.replace("self.fc =", "self.unused = nn.Linear(2, 2); self.fc ="))


def worker_model(folder: Path, toy: harness.Toy, stages: Collection[int]) -> WorkerModel:
    """The model of a worker that has some of the toy's stages."""
    config = harness.job(folder, toy)
    assert config.model
    return WorkerModel.build(ModelFile.load(config.model, trusted=True), SEED, config.bundle, stages)


def test_a_worker_has_the_values_of_its_own_stages(tmp_path: Path) -> None:
    """And the first stage, which saves them, those of what no stage uses."""
    own = {0: {"conv1", "bn", "unused"}, 1: {"conv2"}, 2: {"fc"}}
    for stage, layers in own.items():
        built = worker_model(tmp_path / str(stage), USED_BY_NONE, [stage])
        has_values = {name.partition(".")[0] for name, p in built.model.named_parameters() if not p.is_meta}
        assert (has_values, built.why_whole) == (layers, "")


def test_what_is_traced_without_values_shares_memory_as_the_whole_model_does(tmp_path: Path) -> None:
    shared = replace(CONV3, model=CONV3.model.replace("self.fc =", "self.w = self.conv2.weight.data; self.fc ="))
    [group] = names_over_parameters(named_state(worker_model(tmp_path / "whole", shared, range(3)).model))
    checked: list[nn.Module] = []
    worker_model(tmp_path / "part", shared, [0]).check(checked.append)
    assert names_over_parameters(named_state(checked[0])) == [group]
    assert sorted(group) == ["conv2.weight", "w"]


def test_a_worker_with_all_stages_builds_the_whole_model(tmp_path: Path) -> None:
    assert worker_model(tmp_path, CONV3, [0, 1, 2]).outline is None


def test_a_model_that_is_kept_between_calls_is_refused(tmp_path: Path) -> None:
    toy = replace(CONV3, model=CONV3.model + "\nimport functools\nmodel = functools.cache(model)\n")
    with pytest.raises(ModelError, match=r"returns parameters that it made .* make a new model in each call"):
        worker_model(tmp_path, toy, [0])


OPTIMIZERS = {
    "fused": "torch.optim.Adam([p for _, p in named], fused=True)",
    "state at once": "torch.optim.Adagrad([p for _, p in named])",
    "groups": "torch.optim.AdamW([{'params': [p for _, p in named if p.dim() == d]} for d in (1, 2, 4)])",
    "copies": "torch.optim.SGD([p for _, p in named], lr=[p.detach().clone() for _, p in named] and 0.1)",
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_an_optimizer_is_called_with_all_parameters(tmp_path: Path, optimizer: str) -> None:
    """It keeps those of the stage, and steps them."""
    toy = replace(CONV3, model=CONV3.model.replace("OPTIMIZER", optimizer))
    built = worker_model(tmp_path, toy, [1])
    parameters = built.optimizer_parameters()
    own = {name: p for name, p in parameters.items() if name.startswith("conv2")}
    assert list(parameters) == [name for name, _ in built.file.build(SEED).named_parameters()]
    named = NamedOptimizer(built.file, parameters, own)
    assert named.optimizer
    kept = [p for group in named.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in kept} == {id(p) for p in own.values()}
    before = own["conv2.weight"].detach().clone()
    for parameter in own.values():
        parameter.grad = torch.ones_like(parameter)
    named.step()
    assert not torch.equal(before, own["conv2.weight"])


def test_an_optimizer_that_reads_values_is_refused(tmp_path: Path) -> None:
    """The error says what it may use."""
    reading = "torch.optim.SGD([p for _, p in named if p.abs().sum() > 0], lr=0.1)"
    built = worker_model(tmp_path, replace(CONV3, model=CONV3.model.replace("OPTIMIZER", reading)), [1])
    parameters = built.optimizer_parameters()
    own = {name: p for name, p in parameters.items() if name.startswith("conv2")}
    with pytest.raises(ModelError, match=r"optimizer.*reads the values of parameters.*names, shapes and types"):
        NamedOptimizer(built.file, parameters, own)


READ_IN_MODEL = """
_made = model

def model():
    made = _made()
    made.fc.bias.data.fill_(made.conv2.weight.sum().item())
    return made
"""


def test_a_small_model_is_built_whole_and_once(tmp_path: Path) -> None:
    spec = harness.job(tmp_path, CONV3)
    predicted = samples.plan().predicted
    assert predicted
    small, large = (predicted.model_copy(update={"memory_bytes": (size, size)}) for size in (10**9, 10**10))
    plans = [spec.plan.model_copy(update={"predicted": each}) for each in (small, large, None)]
    assert [is_small(plan) for plan in plans] == [True, False, False]
    file = ModelFile.load(spec.model, trusted=True)
    built = WorkerModel.build(file, SEED, spec.bundle, [1], as_a_whole=True)
    assert not any(parameter.is_meta for parameter in built.model.parameters())
    assert built.why_whole == ""


def test_an_optimizer_may_not_read_values_and_go_on(tmp_path: Path) -> None:
    """The learning rate would be another one on each worker."""
    code = CONV3.model.replace(
        "    return OPTIMIZER",
        """    try:
        rate = float(named[0][1].abs().mean())
    except Exception:
        rate = 0.5
    return torch.optim.SGD([p for _, p in named], lr=rate)""",
    )
    built = worker_model(tmp_path, replace(CONV3, model=code), [1])
    parameters = built.optimizer_parameters()
    own = {name: p for name, p in parameters.items() if name.startswith("conv2")}
    with pytest.raises(ModelError, match="reads the values of parameters"):
        NamedOptimizer(built.file, parameters, own)


@pytest.mark.parametrize(
    "read", ["repr(made[0].weight)", "made[0].weight.untyped_storage()[0]", "np.from_dlpack(made[0].weight.detach())"]
)
def test_other_ways_to_read_values_are_seen(read: str) -> None:
    def build() -> nn.Module:
        made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with suppress(Exception):
            made[1].weight.data.fill_(float(len(str(eval(read, {"made": made, "np": numpy})))))
        return made

    with pytest.raises(MissingValuesError, match="reads a parameter"):
        build_partially(build, lambda model: [model[1].weight])


def test_draws_in_another_thread_are_refused() -> None:
    def build() -> nn.Module:
        made = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        with ThreadPoolExecutor(1) as pool:
            for layer in made:
                pool.submit(nn.init.normal_, layer.weight)
        return made

    with pytest.raises(MissingValuesError, match="in another thread"):
        build_partially(build, lambda model: [model[1].weight])


def test_a_run_says_that_workers_built_the_whole_model(tmp_path: Path) -> None:
    """Once, with the line of the model."""
    spec = harness.job(tmp_path, replace(CONV3, model=CONV3.model + READ_IN_MODEL))
    harness.run(spec)
    errors = harness.errors(spec)
    assert errors.count("warning: 3 of 3 workers built the whole model at the start") == 1, errors
    assert errors.count("model.py:") == 1, errors


def test_weights_that_are_made_of_others_train_as_in_one_stage(tmp_path: Path) -> None:
    """A worker with the only stage builds the whole model."""
    states = []
    for number, toy in enumerate((CONV3, CONV1)):
        job = harness.job(tmp_path / str(number), replace(toy, model=toy.model + READ_IN_MODEL), schedule="gpipe")
        states.append(harness.weights(harness.run(job)))
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        torch.testing.assert_close(tensor, states[1][name])
