"""A module that torch.export cannot see through is one operator, taken whole from the user's model."""

from pathlib import Path

import pytest
import torch
from skeletons import plan_of, skeleton, texts_in

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.device import find_device
from pdtool.errors import ModelError, PdtoolError, TraceError
from pdtool.frontend.graph_digest import graph_sha256
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import ModelInputs
from pdtool.frontend.model_rules import Hints
from pdtool.frontend.opaque_modules import modules_using_data
from pdtool.frontend.tracing import trace_file
from pdtool.generator import generate as generate_module
from pdtool.generator.composed import VerificationError
from pdtool.generator.generate import generate
from pdtool.profiler.estimate import estimate
from pdtool.profiler.measure import measure
from pdtool.runtime.worker.worker_model import load_stage_module

MODELS = Path(__file__).parents[1] / "models" / "opaque.py"
OPAQUE = {
    "experts": {"1"},
    "packed_sequence": {"1"},
    "straight_through": set(),
    "gradient_reversal": set(),
    "ramped": set(),
    "reentrant_checkpoint": set(),
    "branch_on_values": {"1"},
    "scan": {"1"},
    "two_outputs": {"1.two"},
    "with_table": {"1"},
    "two_tied": {"a", "b"},
    "many_alike": {"0", "1", "2", "3", "4", "5"},
    "called_twice": {"branch"},
    "shared_inside": {"branch"},
    "averaging_norm": {"1"},
    "spectral": {"1"},
    "python_table": {"1"},
    "random_projection": {"1"},
}


CATCHING = """
import torch
from torch import nn

class Clipped(nn.Module):
    def forward(self, x):
        try:
            if x.max().item() > 2.2:
                x = x * 0.1
        except Exception:
            pass
        return x

def model():
    return nn.Sequential(nn.Linear(8, 8), Clipped(), nn.Linear(8, 8))

def example_inputs(n):
    return torch.zeros(n, 8)
"""


def test_an_error_of_the_trace_that_forward_catches_makes_it_opaque_too(tmp_path):
    """The trace would be without the branch, and the zeros of the example would not show it."""
    (tmp_path / "model.py").write_text(CATCHING)
    file = ModelFile.load(ModelRef(source=str(tmp_path / "model.py")), trusted=True)
    assert set(trace_file(file, file.build(), 4).opaque) == {"1"}


SEEDING = """
import torch
from torch import nn, manual_seed as from_torch

class Net(nn.Linear):
    def forward(self, x):
        SEED
        return super().forward(x + torch.randn(8))

def model():
    return Net(8, 8)

def example_inputs(n):
    return torch.ones(n, 8)
"""


class OpaqueModel(ModelFile):
    """A model of tests/models/opaque.py."""

    def example_inputs(self, batch_size):
        return ModelInputs.of(torch.randn(batch_size, *self.module.INPUTS.get(self.ref.function, (8,))))


def load(name):
    return OpaqueModel.load(ModelRef(source=str(MODELS), function=name), trusted=True)


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize("name", OPAQUE)
def test_it_is_one_operator_of_a_stage_that_equals_the_model(name, tmp_path):
    model_file = load(name)
    traced = trace_file(model_file, model_file.build(), 4)
    assert set(traced.opaque) == OPAQUE[name]
    assert {op.module for op in traced.operators if op.opaque} == OPAQUE[name]
    profile = skeleton(model_file)
    stages = 2 if name == "called_twice" else 3  # whose calls must stand in one stage
    bundle = generate(plan_of(profile, stages), profile, model_file, tmp_path / "b")
    assert bundle.proof == "values"
    assert {path for stage in bundle.stages for path in stage.opaque} == OPAQUE[name]
    text = "".join(texts_in(tmp_path / "b").values())
    for path in OPAQUE[name]:
        assert f'model.get_submodule("{path}")' in text, text


@pytest.mark.parametrize(
    ("by", "message"),
    [
        ("torch.manual_seed(3)", r"seeding.py:7: forward calls torch.manual_seed, which tracing cannot see"),
        ("from_torch(3)", r"seeding.py: forward seeds torch's generator, which tracing cannot see"),
    ],
)
def test_a_model_whose_own_forward_seeds_the_generator_is_refused(by, message, tmp_path):
    """Its stages would draw other numbers in each minibatch."""
    path = tmp_path / "seeding.py"
    path.write_text(SEEDING.replace("SEED", by))
    model_file = ModelFile.load(ModelRef(source=str(path)), trusted=True)
    with pytest.raises(TraceError, match=message):
        trace_file(model_file, model_file.build(), 4)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_parameter_that_is_tied_to_the_outside_is_the_models_own(stages, tmp_path):
    model_file = load("tied_to_the_outside")
    profile = skeleton(model_file)
    bundle = generate(plan_of(profile, stages), profile, model_file, tmp_path / "b")
    model = model_file.build(seed=3)
    modules = [load_stage_module(bundle, tmp_path / "b", s, model) for s in range(stages)]
    for path in ("first", "branch.linear"):
        stage = next(m for m in modules if path in dict(m.named_modules()))
        assert stage.get_parameter(f"{path}.weight") is model.first.weight, path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("inner_called", "branch.linear is called from outside branch, which is opaque and cannot be split"),
        ("hooked", "parameter branch.linear.weight has a gradient hook"),
        ("pieces", "pieces returns 2 tensors for 2 samples and 3 for 3.*one tensor with a batch dimension"),
        ("hooked_as_a_whole", "the model has a backward hook.*on modules inside the model"),
    ],
)
def test_what_a_stage_could_not_do_is_refused(name, message):
    model_file = load(name)
    with pytest.raises(TraceError, match=message):
        trace_file(model_file, model_file.build(), 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("moving_teacher", "forward changes parameter 1.teacher.weight at each call.*after_update"),
        ("remembering", "forward changes self.last of 1 and reads it again"),
        ("hooking_parameter", r"opaque.py:\d+: forward puts a hook on a parameter.*optimizer's step"),
        (
            "hooking_activation",
            r"opaque.py:\d+: forward puts a hook on a tensor, but no stage would call it.*a module of",
        ),
        ("overlapping", "1.running_mean and 3.running_mean share memory that forward changes.*make them one tensor"),
    ],
)
def test_what_a_forward_does_beside_computing_is_refused(name, message, tmp_path):
    model_file = load(name)

    def generate_two_stages():
        profile = skeleton(model_file)
        generate(plan_of(profile, 2), profile, model_file, tmp_path / "b")

    with pytest.raises(PdtoolError, match=message):
        generate_two_stages()


def test_an_estimate_says_that_it_needs_values():
    with pytest.raises(ModelError, match=r"depends on the values of tensors.*measure it with --device cpu"):
        estimate(load("branch_on_values"), batch_size=4, device=find_device("v100"))


def test_an_autograd_function_is_imported_from_the_users_file(tmp_path):
    model_file = load("gradient_reversal")
    profile = skeleton(model_file)
    generate(plan_of(profile, 2), profile, model_file, tmp_path / "b")
    text = "".join(texts_in(tmp_path / "b").values())
    assert "from opaque import GradientReversal  # an autograd.Function\n" in text
    assert "GradientReversal.apply(" in text


def test_its_state_is_not_changed_by_tracing():
    model_file = load("experts")
    model = model_file.build()
    before, random = model.state_dict(), torch.get_rng_state()
    before = {name: value.clone() for name, value in before.items()}
    trace_file(model_file, model, 4)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in before.items())
    assert "forward" not in vars(model[1])
    torch.set_rng_state(random)


def test_a_loop_in_the_model_itself_names_the_line_and_what_to_do():
    model_file = load("loop_in_the_model")
    with pytest.raises(
        TraceError, match=r"opaque\.py:\d+: .*module of its own: pdtool then keeps that module in one piece"
    ):
        trace_file(model_file, model_file.build(), 4)


def test_hints_name_opaque_modules(monkeypatch):
    model_file = load("branch_on_values")
    monkeypatch.setitem(vars(model_file), "hints", Hints(opaque=("0",)))
    assert trace_file(model_file, model_file.build(), 4).opaque["0"] == "HINTS"
    del model_file.__dict__["hints"]
    for path in ("nowhere", ""):
        model_file.__dict__.pop("hints", None)
        monkeypatch.setattr(model_file.module, "HINTS", {"opaque": [path]})
        with pytest.raises(TraceError, match=f"'{path}' as opaque, but the model has no such module"):
            trace_file(model_file, model_file.build(), 4)


def test_its_source_is_part_of_the_graph(tmp_path):
    digests = []
    for text in (
        MODELS.read_text(),
        MODELS.read_text().replace("> 1 else", "> 2 else"),
        "# a comment\n" + MODELS.read_text(),
    ):
        (tmp_path / "opaque.py").write_text(text)
        model_file = OpaqueModel.load(
            ModelRef(source=str(tmp_path / "opaque.py"), function="branch_on_values"), trusted=True
        )
        digests.append(graph_sha256(trace_file(model_file, model_file.build(), 4)))
    assert digests[0] == digests[2] != digests[1]


def test_an_opaque_module_that_checkpoints_reentrantly_is_measured(tmp_path, monkeypatch):
    model_file = load("reentrant_checkpoint")
    monkeypatch.setitem(vars(model_file), "hints", Hints(opaque=("1",)))
    samples = [(torch.randn(8), torch.randn(4)) for _ in range(8)]
    monkeypatch.setattr(model_file.module, "dataset", lambda split: samples, raising=False)
    node = measure(model_file, batch_size=4).by_name["1"]
    assert node.op == "Checkpointed"
    assert node.backward_s > 0


def test_a_model_too_large_for_memory_cannot_be_proved_by_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr(generate_module, "fits_in_memory", lambda traced: False)
    model_file = load("branch_on_values")
    profile = skeleton(model_file)
    with pytest.raises(
        VerificationError,
        match="the outputs of 1 are known only by running the model, which does not fit into this machine's memory",
    ):
        generate(plan_of(profile, 2), profile, model_file, tmp_path / "b")
    assert not (tmp_path / "b").exists()


AROUND = """
import numpy as np
import torch
from torch import nn
class Moved(nn.Module):
    def __init__(self): super().__init__(); self.layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    def forward(self, x): self.layers.to(x.device); return self.layers(x)
class Factors(nn.Module):
    def forward(self, shape): return torch.from_numpy(np.random.rand(shape[0])).float()
class Scaled(nn.Module):
    def __init__(self): super().__init__(); self.factors = Factors()
    def forward(self, x): return x * self.factors(x.shape)[:, None]
class Large(nn.Module):
    def forward(self, x): return x.contiguous() * 2 if x.shape[0] >= 64 else x * 2
class Flagged(nn.Module):
    def forward(self, x): return x + x * (x > 0.5).any().item()
class Embedder(nn.Module):
    def __init__(self): super().__init__(); self.linear = nn.Linear(4, 4); self.matrix = torch.rand(4, 40)
    def forward(self, x): return self.linear(x)
class Last(nn.Module):
    def __init__(self, matrix): super().__init__(); self.linear = nn.Linear(4, 2); self.matrix = matrix
    def forward(self, x): return self.linear(x @ self.matrix @ self.matrix.T if self.matrix.dim() > 1 else x)
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.inner = nn.Linear(4, 4), INNER()
        self.last = Last(getattr(self.inner, "matrix", torch.ones(1)))
    def forward(self, x, t): return self.last(self.inner(self.first(x * t[:, None])))
def model(): return Net()
def example_inputs(batch_size): return torch.randn(batch_size, 4), torch.rand(batch_size)
"""


@pytest.mark.rows_of_the_day(days=2)
@pytest.mark.parametrize("inner", ["Moved", "Scaled", "Large", "Flagged", "Embedder"])
def test_the_module_around_one_that_cannot_be_alone_becomes_opaque(tmp_path, inner):
    """If the code to blame is in an opaque module already. Nor is a comparison of the inputs' sizes to blame, and a
    tensor that modules share has a name outside of an opaque one."""
    text = AROUND.replace("INNER", inner) + ("HINTS = {'opaque': ['inner']}" if inner == "Embedder" else "")
    (tmp_path / f"around_{inner}.py").write_text(text)
    file = ModelFile.load(ModelRef(source=str(tmp_path / f"around_{inner}.py")), trusted=True)
    assert set(trace_file(file, file.build(), 4).opaque) == {"inner"}
    profile = skeleton(file)
    generate(plan_of(profile, 1), profile, file, tmp_path / "bundle")


def test_a_module_like_an_opaque_one_need_not_be_called(tmp_path):
    """Once, HINTS was blamed for it, of which the file has none."""
    unused = AROUND.replace("INNER", "Moved")
    (tmp_path / "unused.py").write_text(
        unused.replace("self.last = Last", "self.spare = Moved()\n        self.last = Last")
    )
    file = ModelFile.load(ModelRef(source=str(tmp_path / "unused.py")), trusted=True)
    assert set(trace_file(file, file.build(), 4).opaque) == {"inner"}


def test_only_data_of_a_tensor_counts_as_data():
    class Reads(torch.nn.Module):
        def forward(self, x):
            return x.data

    class Compares(torch.nn.Module):
        def forward(self, x):
            return x * (x.data_ptr() != 0)  # of self.dataset

    assert modules_using_data(torch.nn.Sequential(Compares(), Reads())) == ["1"]


def test_an_attribute_that_only_an_opaque_module_has_is_refused_outside_of_it(tmp_path):
    text = AROUND.replace("INNER", "Embedder") + "HINTS = {'opaque': ['inner']}"
    text = text.replace("t[:, None])))", "t[:, None])) @ self.inner.matrix)").replace(
        'getattr(self.inner, "matrix", ', "("
    )
    text = text.replace("nn.Linear(4, 2)", "nn.Linear(40, 2)")
    (tmp_path / "outside.py").write_text(text)
    file = ModelFile.load(ModelRef(source=str(tmp_path / "outside.py")), trusted=True)
    with pytest.raises(
        TraceError, match=r"forward uses inner\.matrix, but its module is one operator.*register_buffer"
    ):
        trace_file(file, file.build(), 4)
