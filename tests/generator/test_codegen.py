"""Law 1: the stages composed equal the model. Compared here by hand, beside codegen's own proof."""

import ast
import inspect
from pathlib import Path

import pytest
import torch
from skeletons import plan_of, shared_traces, skeleton, texts_in, traced_once  # noqa: F401  a fixture
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.bundle import Bundle
from pdtool.errors import ArtifactError, StaleError, UsageError
from pdtool.frontend.model_file import ModelFile
from pdtool.frontend.model_io import ModelInputs
from pdtool.frontend.tracing import trace, trace_file
from pdtool.generator import composed as composed_module
from pdtool.generator import generate as generate_module
from pdtool.generator import verify as verify_module
from pdtool.generator.composed import ModelFailedError, VerificationError, compose, copy_state, load_stages
from pdtool.generator.generate import generate
from pdtool.generator.stage_file import StageWriter
from pdtool.generator.verify import verify_values
from pdtool.generator.wiring import Wiring
from pdtool.host import MemoryLimit
from pdtool.profiler.measure import measure

MODELS = Path(__file__).parents[1] / "models" / "small.py"
INPUTS = {
    "branchy": lambda n: (torch.randn(n, 3, 8, 8),),
    "unet": lambda n: (torch.randn(n, 3, 16, 16),),
    "tied": lambda n: (torch.randint(0, 50, (n, 10)),),
    "encoder": lambda n: (torch.randn(n, 6, 8),),
}


class SmallModel(ModelFile):
    """A model of tests/models/small.py with inputs of its own kind."""

    def example_inputs(self, batch_size):
        return ModelInputs.of(INPUTS.get(self.ref.function, lambda n: (torch.randn(n, 8),))(batch_size))


def small(function, **settings):
    return SmallModel.load(ModelRef(source=str(MODELS), function=function, settings=settings), trusted=True)


def tensors(output):
    plain = dict(output) if isinstance(output, dict) else output
    return [leaf for leaf in pytree.tree_leaves(plain) if isinstance(leaf, torch.Tensor)]


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize("count", [1, 2, 3, 5])
@pytest.mark.parametrize("function", ["branchy", "tied", "unet", "no_grad", "sequential", "encoder", "named"])
def test_composed_stages_equal_the_model(function, count, tmp_path):
    model_file = small(function)
    profile = skeleton(model_file)
    bundle = generate(plan_of(profile, count), profile, model_file, tmp_path / "bundle")

    assert bundle.proof == "values"
    assert Bundle.load(tmp_path / "bundle" / "bundle.yaml") == bundle
    model = model_file.build(seed=7).eval()
    stages = load_stages(texts_in(tmp_path / "bundle"), bundle)
    copy_state(model, stages, bundle)
    for stage in stages:
        stage.eval()
    inputs = model_file.example_inputs(6).args
    expected, found = tensors(model(*inputs)), tensors(compose(stages, bundle, inputs))
    assert expected
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b)
    torch.autograd.backward([t.sum() for t in expected if t.requires_grad])
    torch.autograd.backward([t.sum() for t in found if t.requires_grad])
    total = {}
    for stage in stages:
        for name, parameter in stage.named_parameters():
            original = dict(model.named_parameters(remove_duplicate=False))[name]
            if parameter.grad is not None:
                total[id(original)] = total.get(id(original), 0) + parameter.grad
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(total[id(parameter)], parameter.grad, msg=name)


@pytest.mark.parametrize("function", ["branchy", "tied", "unet"])
def test_stage_files_import_torch_only_and_keep_original_names(function, tmp_path):
    model_file = small(function)
    profile = skeleton(model_file)
    bundle = generate(plan_of(profile, 3), profile, model_file, tmp_path / "b")
    state = set()
    for text in texts_in(tmp_path / "b").values():
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                assert [a.name for a in node.names] == ["torch"]
            if isinstance(node, ast.ImportFrom):
                assert node.module in ("torch", "torch.nn")
    for stage in load_stages(texts_in(tmp_path / "b"), bundle):
        state |= set(stage.state_dict())
    assert state == set(model_file.build().state_dict())


def test_generation_does_not_start_cuda(tmp_path, monkeypatch):
    """A driver may be too old for this torch, and a process with CUDA cannot be forked."""

    def start():
        raise AssertionError("CUDA was started")

    monkeypatch.setattr(torch.cuda, "_lazy_init", start)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    model_file = small("encoder")
    profile = skeleton(model_file)
    assert generate(plan_of(profile, 2), profile, model_file, tmp_path / "b").proof == "values"


def test_generation_is_deterministic(tmp_path, monkeypatch):
    monkeypatch.setattr(generate_module, "trace_file", trace_file)
    model_file = small("branchy")
    profile = skeleton(model_file)
    for name in ("a", "b"):
        generate(plan_of(profile, 3), profile, model_file, tmp_path / name)
    files = {p.name: p.read_bytes() for p in (tmp_path / "a").iterdir()}
    assert files == {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()}
    assert len(files) == 4


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("self.training", "True"),
        ('float("-inf")', "0.0"),
        ("x + relu_0", "x - relu_0"),
        ("nn.MaxPool2d", "nn.AvgPool2d"),
        ("batch_first=True, dropout=0.1", "batch_first=True"),
        ("self.steps.add_(1)", "self.steps.add_(2)"),
        ("reshape(batch, 4, 12)", "reshape(3, 4, 12)"),
        ("batch_first=True, dropout=0.1", "batch_first=True, dropout=0.2"),
    ],
)
def test_the_proof_finds_a_wrong_stage(old, new, tmp_path):
    model_file = small("branchy")
    profile = skeleton(model_file)
    bundle = generate(plan_of(profile, 2), profile, model_file, tmp_path / "b")
    texts = texts_in(tmp_path / "b")
    assert any(old in text for text in texts.values()), "the fault must be one that the text can have"
    texts = {name: text.replace(old, new) for name, text in texts.items()}
    batches = [model_file.example_inputs(3), model_file.example_inputs(4)]
    with pytest.raises(VerificationError):
        verify_values(model_file.build, texts, bundle, batches)


def test_the_proof_finds_a_border_without_the_gradient_that_it_needs(tmp_path):
    """A run sends gradients for the tensors of the bundle that have one, and for no others."""
    model_file = small("branchy")
    profile = skeleton(model_file)
    bundle = generate(plan_of(profile, 3), profile, model_file, tmp_path / "b")
    sent = [tensor for tensor in bundle.tensors if tensor.gradient]
    assert sent
    for tensor in sent:
        changed = [t.model_copy(update={"gradient": t.gradient and t is not tensor}) for t in bundle.tensors]
        wrong = bundle.model_copy(update={"tensors": tuple(changed)})
        batches = [model_file.example_inputs(samples) for samples in (3, 3, 4)]
        with pytest.raises(VerificationError, match=r"(gets a gradient in .*, but not in|gradient of .* differs)"):
            verify_values(model_file.build, texts_in(tmp_path / "b"), wrong, batches)


class Cropped(nn.Module):
    """Takes the whole of a tensor, as libraries crop what they have padded."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.last(self.first(x)[:, :5].contiguous())


def test_a_view_of_the_whole_has_the_gradient_of_what_it_views():
    """Else a border behind it would cut off what is before: a run would not train it."""
    traced = trace(Cropped(), lambda samples: (torch.randn(samples, 5, 8),), 4, Path("model.py"))
    [view] = [op for op in traced.operators if op.op == "alias"]
    assert view.outputs[0].differentiable


def test_a_model_that_keeps_state_between_minibatches_is_found_out(tmp_path):
    model_file = small("broken", fault="state")
    profile = skeleton(model_file)
    message = r"small.py:[0-9]+: forward changes self.kept of the model and reads it again"
    with pytest.raises(VerificationError, match=message):
        generate(plan_of(profile, 1), profile, model_file, tmp_path / "b")
    assert not (tmp_path / "b").exists()


def test_a_model_whose_backward_fails_is_found_out(tmp_path):
    """As in a plain loop: two in-place ReLUs, of which the second changes what the first one has kept."""
    model_file = small("broken", fault="backward")
    profile = skeleton(model_file)
    with pytest.raises(VerificationError, match=r"the backward of the model failed.*modified by an inplace operation"):
        generate(plan_of(profile, 1), profile, model_file, tmp_path / "b")


def test_a_model_too_large_for_this_machine_is_checked_by_shapes(tmp_path, monkeypatch):
    monkeypatch.setattr(composed_module, "_COPIES", 10**12)
    model_file = small("unet")
    profile = skeleton(model_file)
    said = []
    bundle = generate(plan_of(profile, 2), profile, model_file, tmp_path / "b", said.append)
    assert bundle.proof == "shapes"
    assert any("too large" in line for line in said)


def test_the_memory_for_the_proof_is_that_of_the_control_group(monkeypatch):
    limit = MemoryLimit("the control group", 10**6, 5 * 4 * 72)
    monkeypatch.setattr(composed_module, "memory_limits", lambda: [limit])
    assert not composed_module.fits_in_memory(torch.nn.Linear(8, 8))
    assert composed_module.fits_in_memory(torch.nn.Linear(4, 4))


@pytest.mark.parametrize("what", ["the generated stages", "the backward of the generated stages"])
def test_stages_that_fail_are_no_failure_of_the_model(what):
    """After that one, codegen would go on with another minibatch."""
    with pytest.raises(VerificationError, match=f"{what} failed") as failure:
        verify_module._run(what, lambda: 1 / 0, "training")
    assert not isinstance(failure.value, ModelFailedError)


def test_tied_weight_is_listed_with_its_name_in_each_stage(tmp_path):
    model_file = small("tied")
    profile = skeleton(model_file)
    bundle = generate(plan_of(profile, 3), profile, model_file, tmp_path / "b")
    (tie,) = bundle.tied
    assert tie.stages == (0, 2)
    assert tie.names == ("embedding.weight", "decoder.weight")
    texts = texts_in(tmp_path / "b")
    assert "# decoder.weight is embedding.weight of stage 0 as well: `pdtool run` keeps" in texts["stage_2.py"]
    assert "# embedding.weight is decoder.weight of stage 2 as well" in texts["stage_0.py"]


def test_functional_call_computes_with_the_tensors_that_it_is_given(tmp_path):
    """The stage called the layer with its own weights, which the check at equal initial weights does not tell."""
    model_file = small("teacher")
    profile = skeleton(model_file)
    generate(plan_of(profile, 2), profile, model_file, tmp_path / "bundle")
    text = "".join(texts_in(tmp_path / "bundle").values())
    assert "F.linear(x, self.first_weight, bias=self.first_bias)" in text
    assert "self.layer(x)" in text


def test_skip_goes_straight_to_every_later_stage(tmp_path):
    model_file = small("unet")
    profile = skeleton(model_file)
    bundle = generate(plan_of(profile, 5), profile, model_file, tmp_path / "b")
    skips = [t for t in bundle.tensors if t.producer == 0 and t.consumers and max(t.consumers) > 1]
    assert skips
    assert all(t.gradient for t in skips)


def test_profile_of_another_model_is_refused(tmp_path):
    profile = skeleton(small("unet"))
    with pytest.raises(ArtifactError, match="operators differ from the profile's"):
        generate(plan_of(profile, 2), profile, small("tied"), tmp_path / "b")


def test_edited_stage_file_is_found_out(tmp_path):
    model_file = small("unet")
    profile = skeleton(model_file)
    bundle = generate(plan_of(profile, 2), profile, model_file, tmp_path / "b")
    bundle.check_files(tmp_path / "b")
    (tmp_path / "b" / "stage_1.py").write_text("import os\n")
    with pytest.raises(StaleError, match=r"stage_1.py: has changed since codegen"):
        bundle.check_files(tmp_path / "b")
    (tmp_path / "b" / "stage_1.py").unlink()
    with pytest.raises(StaleError, match=r"stage_1.py: is missing"):
        bundle.check_files(tmp_path / "b")


def test_fewer_stages_leave_no_old_file_behind(tmp_path):
    model_file = small("unet")
    profile = skeleton(model_file)
    generate(plan_of(profile, 3), profile, model_file, tmp_path / "b")
    generate(plan_of(profile, 2), profile, model_file, tmp_path / "b")
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["bundle.yaml", "stage_0.py", "stage_1.py"]


def test_a_model_that_changes_its_input_in_place_is_proved(tmp_path):
    """The model and the stages each get the minibatch as it was loaded."""
    model_file = small("broken", fault="input")
    profile = skeleton(model_file)
    generate(plan_of(profile, 2), profile, model_file, tmp_path / "b")
    assert "mul = x * 2" in texts_in(tmp_path / "b")["stage_0.py"]


def test_files_that_codegen_has_not_written_stay(tmp_path):
    model_file = small("branchy")
    profile = skeleton(model_file)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").touch()
    with pytest.raises(UsageError, match="run is the folder of a run; pass another path with -o"):
        generate(plan_of(profile, 2), profile, model_file, tmp_path / "run")
    own = tmp_path / "mine" / "stage_7.py"
    own.parent.mkdir()
    own.write_text("my own work\n")
    with pytest.raises(UsageError, match=r"stage_7.py was not written by `pdtool codegen`"):
        generate(plan_of(profile, 2), profile, model_file, own.parent)
    assert texts_in(own.parent) == {"stage_7.py": "my own work\n"}


class Exact(nn.Module):
    """Computes a part without autocast, and more in training than in evaluation."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.first(x)
        with torch.autocast("cpu", enabled=False):
            x = x.float().softmax(-1)
        return self.last(x * 2 if self.training else x)


def test_where_autocast_is_switched_off_is_noted():
    traced = trace(Exact(), lambda samples: (torch.randn(samples, 8),), 4, Path(__file__))
    [line] = traced.autocast_off
    assert "softmax(-1)" in Path(__file__).read_text().splitlines()[int(line.partition(":")[2]) - 1]


FILLED = """
import torch
from torch import nn

class Filled(nn.Linear):
    def forward(self, x):
        y, z = torch.ones(x.shape) * x, torch.ones(x.shape) * x
        y.copy_(super().forward(x))
        z[:] = super().forward(x)
        return (y + 1 / 3) * (z - 1 / 3)

def model():
    return Filled(8, 8)

def example_inputs(samples):
    return torch.randn(samples, 8)
"""


def test_a_tensor_that_is_written_over_keeps_its_dtype_under_autocast(tmp_path):
    (tmp_path / "filled.py").write_text(FILLED)
    file = ModelFile.load(ModelRef(source=str(tmp_path / "filled.py")), trusted=True)
    profile = skeleton(file)
    bundle = generate(plan_of(profile, 1), profile, file, tmp_path / "b")
    stages, model, x = load_stages(texts_in(tmp_path / "b"), bundle), file.build(), torch.randn(4, 8)
    copy_state(model, stages, bundle)
    with torch.autocast("cpu", torch.bfloat16):
        expected, found = model(x), compose(stages, bundle, [x])
    assert expected.dtype == found.dtype == torch.float32
    assert torch.equal(expected, found)


class Counting(nn.Module):
    """Multiplies by a copy or a view of a buffer that each minibatch changes, in another stage than the buffer's."""

    def __init__(self, taken):
        super().__init__()
        self.first, self.last, self.taken = nn.Linear(8, 8), nn.Linear(8, 8), taken
        self.register_buffer("count", torch.ones(8))

    def forward(self, x):
        taken = self.taken(self.count)
        self.count += 1
        return self.last(self.first(x)) * taken


@pytest.mark.parametrize(
    "taken",
    [
        lambda count: count * 1.0,
        lambda count: count - 0 * count[0],
        lambda count: count.expand(8),
        lambda count: count.view(2, 4).flatten(),
    ],
    ids=["copy", "difference", "expand", "view"],
)
def test_what_a_stage_sends_is_not_changed_by_the_next_minibatch(taken):
    """It may still be under way then, or wait for a stage of the same worker."""
    traced = trace(Counting(taken), lambda samples: (torch.randn(samples, 8),), 4, Path(__file__))
    names = [op.name for op in traced.operators if not op.constant]
    wiring = Wiring.of(traced, [names[: names.index("last")], names[names.index("last") :]])
    namespace = {}
    exec(StageWriter(wiring, 0, "counting").text(), namespace)
    stage, inputs = namespace["Stage0"](), torch.randn(4, 8)
    [k] = [k for k, value in enumerate(wiring.outputs(0)) if value.operator != "first"]
    sent = stage(inputs)[k]
    before = sent.clone()
    assert not torch.equal(stage(inputs)[k], before)
    assert torch.equal(sent, before)


POINTER = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("count", torch.ones(8))

    def forward(self, x):
        with torch.no_grad():
            before = self.count + torch.arange(8)
            self.count[0] = self.count[0] + 1
        return self.last(self.first(x)) * before

def model(): return Net()
def example_inputs(n): return torch.randn(n, 8)
"""


@pytest.mark.parametrize("stages", [2, 4])
def test_a_view_that_crosses_a_border_has_the_values_before_a_write_of_a_part(tmp_path, stages):
    """The stage returned it with those after. The first of two stages takes no tensor, to make one on its device."""
    path = tmp_path / "pointer.py"
    path.write_text(POINTER)
    file = ModelFile.load(ModelRef(source=str(path), function="model"), trusted=True)
    profile = skeleton(file)
    generate(plan_of(profile, stages), profile, file, tmp_path / "b")


class Cells(nn.Module):
    """Calls cells in a loop, and with or without a state."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.LSTMCell(8, 8), nn.GRUCell(8, 8, bias=False), nn.RNNCell(8, 8, nonlinearity="relu")

    def forward(self, x):
        state = self.a(x)
        for _ in range(2):
            state = self.a(state[0], state)
        return self.c(x, self.b(x, self.b(state[0])))


class Resized(nn.Module):
    """Interpolates in one, two and three dimensions."""

    def forward(self, x):
        line = F.interpolate(F.interpolate(x[:, None], scale_factor=1.5), size=9, mode="linear", align_corners=True)
        plane = F.interpolate(line[:, None], scale_factor=(2, 1.5), mode="bilinear")
        plane = F.interpolate(F.interpolate(plane, scale_factor=0.7, mode="bicubic"), size=(4, 6), mode="nearest-exact")
        return F.interpolate(plane[:, None], scale_factor=2, mode="trilinear", align_corners=False)


class Namespaces(nn.Module):
    """Calls functions of torch.linalg, torch.special and torch.fft."""

    def forward(self, x):
        spectrum = torch.fft.rfft(F.normalize(x))
        return torch.special.i0e(torch.fft.irfft(spectrum, n=8)) * torch.linalg.norm(x, dim=1, keepdim=True)


class Bags(nn.Module):
    """Sums embeddings, as a recommender does."""

    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(5, 3, mode="sum")

    def forward(self, x):
        return self.bag(x.long().clamp(0, 4))


@pytest.mark.parametrize(
    ("kind", "lines"),
    [
        (Bags, ['self.bag = nn.EmbeddingBag(5, 3, mode="sum")', "self.bag(x)"]),
        (
            Namespaces,
            [
                "torch.linalg.vector_norm(x, dim=[1], keepdim=True)",
                "torch.fft.rfft(",
                "torch.fft.irfft(",
                "torch.special.i0e(",
                "torch.linalg.norm(x, dim=[1], keepdim=True)",
            ],
        ),
        (
            Cells,
            [
                "self.a = nn.LSTMCell(8, 8)",
                "self.b = nn.GRUCell(8, 8, bias=False)",
                'self.c = nn.RNNCell(8, 8, nonlinearity="relu")',
                "a_0, a_0_1 = self.a(x)",
                "a_1, a_1_1 = self.a(a_0, (a_0, a_0_1))",
            ],
        ),
        (
            Resized,
            [
                'F.interpolate(x, scale_factor=1.5, mode="nearest")',
                'F.interpolate(x, size=[9], mode="linear", align_corners=True)',
                'F.interpolate(x, scale_factor=[2.0, 1.5], mode="bilinear")',
                'F.interpolate(x, scale_factor=0.7, mode="bicubic")',
                'F.interpolate(x, size=[4, 6], mode="nearest-exact")',
                'F.interpolate(x, scale_factor=2.0, mode="trilinear")',
            ],
        ),
    ],
)
def test_calls_are_written_as_people_write_them(kind, lines):
    traced = trace(kind(), lambda samples: (torch.randn(samples, 8),), 4, Path(__file__))
    wiring = Wiring.of(traced, [[op.name for op in traced.operators if not op.constant]])
    text = StageWriter(wiring, 0, "net").text()
    assert [line for line in lines if line not in text] == []
    namespace = {}
    exec(text, namespace)
    stage, model, inputs = namespace["Stage0"](), kind(), torch.randn(5, 8)
    stage.load_state_dict(model.state_dict())
    assert torch.equal(stage(inputs), model(inputs))


@pytest.mark.skipif("bias" not in inspect.signature(nn.GroupNorm).parameters, reason="norms of this torch have a bias")
def test_norms_may_be_without_a_bias_or_without_parameters():
    model = nn.Sequential(nn.GroupNorm(2, 8, bias=False), nn.GroupNorm(2, 8, affine=False), nn.Linear(8, 8))
    traced = trace(model, lambda samples: (torch.randn(samples, 8),), 4, Path(__file__))
    text = StageWriter(Wiring.of(traced, [["input", "0", "1", "2"]]), 0, "net").text()
    assert "nn.GroupNorm(2, 8, bias=False)" in text
    assert "nn.GroupNorm(2, 8, affine=False)" in text


NOISY = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 6), nn.Linear(6, 6), nn.Linear(6, 3)
        self.drop = nn.Dropout(0.5)

    def forward(self, x):
        x = self.first(x)
        noise = NOISE(self.second(x))
        return self.last(noise + self.drop(x))

def model(): return Net()
def example_inputs(samples): return torch.randn(samples, 8)
"""
NOISES = [
    "F.gumbel_softmax",
    "torch.rand_like",
    "torch.randn_like",
    "(lambda h: torch.rand(h.shape) * h)",
    "(lambda h: torch.bernoulli(torch.sigmoid(h)) * h)",
    "(lambda h: torch.normal(h, 0.1))",
    "(lambda h: F.dropout(h, 0.3, training=True))",
    "(lambda h: F.dropout1d(h, 0.3))",
    "(lambda h: F.rrelu(h, training=True))",
    "(lambda h: h * F.fractional_max_pool2d(h.view(-1, 1, 2, 3), 2, output_size=(1, 2)).mean())",
    "(lambda h: h * torch.empty_like(h).uniform_(0, 2))",
    "(lambda h: h * torch.empty_like(h).normal_(1, 2))",
    "(lambda h: h * torch.empty_like(h).exponential_())",
    "(lambda h: h * torch.empty_like(h).bernoulli_(0.3))",
    "(lambda h: h * torch.empty_like(h).log_normal_())",
    "(lambda h: h * torch.empty_like(h).cauchy_())",
    "(lambda h: h * torch.empty_like(h).geometric_(0.4))",
    "(lambda h: h * torch.empty_like(h).random_())",
    "(lambda h: h * torch.empty_like(h).random_(7))",
]


@pytest.mark.parametrize("noise", NOISES)
def test_who_draws_before_whom_is_no_difference(tmp_path: Path, noise: str) -> None:
    """In the model the noise comes before the dropout, in the stages after it."""
    (tmp_path / "noisy.py").write_text(NOISY.replace("NOISE", noise))
    file = ModelFile.load(ModelRef(source=str(tmp_path / "noisy.py")), trusted=True)
    profile = skeleton(file)
    plan = plan_of(profile, 2)
    names = [node.name for node in profile.nodes]
    in_first = [name for name in names if name in {"x", "first", "drop"}]
    stages = [
        stage.model_copy(update={"nodes": tuple(nodes)})
        for stage, nodes in zip(plan.stages, (in_first, [n for n in names if n not in in_first]), strict=True)
    ]
    plan = plan.model_copy(update={"stages": tuple(stages)})
    assert generate(plan, profile, file, tmp_path / "bundle").proof == "values"


FUNCTIONAL = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 6), nn.Linear(6, 6)

    def forward(self, x):
        h = self.second(self.first(x))
        p, image = h.sigmoid(), h.view(-1, 1, 2, 3)
        sums = [RESULTS]
        return torch.stack([value.sum() for value in sums])

def model(): return Net()
def example_inputs(samples): return torch.randn(samples, 8)
def loss(output, target): return output.sum()
"""
RESULTS = [
    *(f"F.{name}(h, p, reduction='none')" for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss")),
    "F.mse_loss(h, p, reduction='sum')",
    "F.binary_cross_entropy(p, p.detach(), reduction='none')",
    "F.soft_margin_loss(h, p.detach().sign(), reduction='sum')",
    "F.adaptive_max_pool2d(image, 1)",
    "F.adaptive_max_pool2d(image, 1, return_indices=True)[1]",
    "F.adaptive_max_pool3d(image, (1, 2, 1))",
    "torch.tensordot(h, self.second.weight, dims=([1], [1]))",
    "torch.cdist(h, p, compute_mode='donot_use_mm_for_euclid_dist')",
    "torch.block_diag(self.first.weight, self.second.weight)",
    "torch.cartesian_prod(h.sum(0), p.sum(0))",
]
# Their results have no gradient, though their arguments have one.
MADE = [
    "h * torch.empty_like(h).normal_()",
    "h * torch.zeros_like(h).normal_()",
    "h * h.new_empty(h.shape).bernoulli_(0.5)",
    "h * torch.zeros_like(h).scatter_(1, h.argmax(1, keepdim=True), 2.0, reduce='add')",
]


@pytest.mark.parametrize("results", [RESULTS, MADE], ids=["functions", "without gradient"])
def test_functions_are_profiled_and_written_as_they_are_called(tmp_path: Path, results: list[str]) -> None:
    """Those of Python take other arguments than the operators of their names; no backward is asked of what has none."""
    (tmp_path / "functions.py").write_text(FUNCTIONAL.replace("RESULTS", ", ".join(results)))
    file = ModelFile.load(ModelRef(source=str(tmp_path / "functions.py")), trusted=True)
    profile = measure(file, batch_size=4)
    assert generate(plan_of(profile, 2), profile, file, tmp_path / "bundle").proof == "values"


ONE_SAMPLE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 8), nn.Sequential(nn.Linear(8, 4), LAYER)

    def forward(self, x):
        h = self.first(x)
        BODY
        return self.last(h)

def model():
    return Net()

def example_inputs(batch_size):
    return torch.randn(batch_size, 4)
"""


@pytest.mark.parametrize(
    ("body", "layer", "differs"),
    [
        ("h = h.relu()", "nn.ReLU()", False),
        ("h = h.relu()", "nn.BatchNorm1d(4)", False),  # which one sample cannot train: the run says so
        ("h = h / max(len(x) - 1, 1) * min(len(x), 3)", "nn.ReLU()", False),  # sympy has other names for these
        ("h = h * (len(x) % 3)", "nn.ReLU()", False),
        ("h = h - h.mean(0) if len(x) > 1 else h", "nn.ReLU()", True),
        ("h = h if self.training or len(x) == 1 else 2 * h", "nn.ReLU()", True),
        ("h = h.view(-1, 8, 1).squeeze()", "nn.ReLU()", False),  # the stage does the same, and the run refuses it
    ],
)
def test_the_bundle_says_if_one_sample_is_a_special_case(tmp_path, body, layer, differs):
    """torch.export takes it that a minibatch has two samples or more, and decides such branches by that."""
    name = f"one_sample_{abs(hash((body, layer)))}.py"
    (tmp_path / name).write_text(ONE_SAMPLE.replace("BODY", body).replace("LAYER", layer))
    file = ModelFile.load(ModelRef(source=str(tmp_path / name)), trusted=True)
    profile = skeleton(file)
    bundle = generate(plan_of(profile, 2), profile, file, tmp_path / "b")
    assert bundle.differs_for_one_sample == differs
    assert Bundle.load(tmp_path / "b" / "bundle.yaml") == bundle


WHITENING = """
import torch
from torch import nn

class Whitening(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.first(x)
        x = x - x.mean(0)
        factor = torch.linalg.cholesky(x.T @ x / len(x))
        return self.second(torch.linalg.solve_triangular(factor, x.T, upper=False).T)

def model():
    return Whitening()

def example_inputs(batch_size):
    return torch.randn(batch_size, 4, generator=torch.Generator().manual_seed(0))
"""


def test_a_model_that_fails_on_few_samples_is_checked_with_a_whole_minibatch(tmp_path):
    path = tmp_path / "whitening.py"
    path.write_text(WHITENING)
    model_file = ModelFile.load(ModelRef(source=str(path), function="model"), trusted=True)
    profile = skeleton(model_file).model_copy(update={"batch_size": 16})
    assert generate(plan_of(profile, 2), profile, model_file, tmp_path / "b").proof == "values"


SMALL_GRADIENTS = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.branch, self.inner = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 16)
        self.norm, self.last, self.scale = nn.BatchNorm1d(16), nn.Linear(16, 4), nn.Parameter(torch.full((16,), 1e-6))

    def forward(self, x):
        x = self.norm(self.first(x))
        branch = torch.relu(self.branch(x))
        if FAULT:
            branch = branch * 0.1 + branch.detach() * 0.9
        return self.last(x + self.scale * self.inner(branch))

def model():
    return Block()

def example_inputs(batch_size):
    return torch.randn(batch_size, 8, generator=torch.Generator().manual_seed(0))
"""


def test_rounding_is_told_from_a_difference_behind_a_layer_scale(tmp_path):
    """The gradient of a bias before a batch norm is all rounding; that of a weight behind a scale of 1e-6 is not."""
    path = tmp_path / "block.py"
    path.write_text(SMALL_GRADIENTS.replace("FAULT", "False"))
    file = ModelFile.load(ModelRef(source=str(path), function="model"), trusted=True)
    profile = skeleton(file)
    bundle = generate(plan_of(profile, 2), profile, file, tmp_path / "b")
    texts, batches = texts_in(tmp_path / "b"), [file.example_inputs(samples) for samples in (3, 3, 4)]
    rounded = {name: text.replace("self.first(x)", "self.first(x) * 3 / 3") for name, text in texts.items()}
    wrong = {name: text.replace("relu(x)", "relu(0.1 * x + 0.9 * x.detach())") for name, text in texts.items()}
    assert texts not in (rounded, wrong)
    verify_values(file.build, rounded, bundle, batches)
    with pytest.raises(VerificationError, match=r"gradient of branch.* differs"):
        verify_values(file.build, wrong, bundle, batches)
    path.write_text(SMALL_GRADIENTS.replace("FAULT", "branch.requires_grad"))
    file = ModelFile.load(ModelRef(source=str(path), function="model"), trusted=True)
    profile = skeleton(file)
    with pytest.raises(VerificationError, match=r"gradient of branch.* differs.*requires_grad"):
        generate(plan_of(profile, 2), profile, file, tmp_path / "c")
