"""The profile: what is counted exactly is checked exactly; times are only checked to be there."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from pdtool import host
from pdtool.artifacts.artifact import ModelRef
from pdtool.artifacts.device import find_device
from pdtool.artifacts.profile import Profile
from pdtool.errors import ModelError, UsageError
from pdtool.frontend.model_file import ModelFile
from pdtool.generator.expressions import constructor_call
from pdtool.profiler.estimate import estimate
from pdtool.profiler.execute import Executor, ProfiledModel
from pdtool.profiler.measure import _agree, measure, measure_scratch_bytes

TEXT = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.mix = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.act = nn.ReLU(inplace=True)
        self.out = nn.Linear(8, 20, bias=False)
        self.out.weight = self.embed.weight
        self.spare = nn.Parameter(torch.zeros(3))

    def forward(self, ids):
        x = self.embed(ids)
        y = self.act(self.mix(x))
        return self.out(self.norm(x + y) + torch.arange(8))

def model(): return Net()
def dataset(split): return [(torch.tensor(i % 20), (i + 1) % 20) for i in range(64)]
def loss(output, target): return F.cross_entropy(output, target)
def optimizer(named): return torch.optim.Adam([p for _, p in named])
"""


CODEBOOK = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("codes", torch.randn(6, 8))

    def forward(self, x):
        x = self.first(x)
        nearest = (self.codes.pow(2).sum(1) - 2 * x @ self.codes.t()).argmin(1)
        chosen = self.codes[nearest]
        with torch.no_grad():
            self.codes.mul_(0.9)
        return self.last(x + (chosen - x).detach())

def model(): return Net()
def dataset(split): return [(torch.randn(8), torch.tensor(i % 2)) for i in range(64)]
def optimizer(named): return torch.optim.SGD([p for _, p in named], lr=0.1)
loss = nn.functional.cross_entropy
"""
DROPPED_WEIGHTS = """
import torch
from torch import nn
import torch.nn.functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.ones(8, 1))
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.bias = nn.Parameter(torch.randn(8))

    def forward(self, x):
        bias = self.bias * 2
        y = F.linear(self.first(x) + bias, F.dropout(self.scale * self.weight))
        return y * bias

def model(): return Net()
def example_inputs(n): return torch.randn(n, 8)
"""


NAMED = """
from dataclasses import dataclass
from transformers.utils import ModelOutput

@dataclass
class Named(ModelOutput):
    logits: torch.Tensor = None

"""


@pytest.fixture
def model_file(tmp_path):
    return write(tmp_path, TEXT)


def write(tmp_path, text):
    path = tmp_path / "net.py"
    path.write_text(text)
    return ModelFile.load(ModelRef(source=str(path)), trusted=True)


def test_profile_counts_what_the_model_holds(model_file):
    seen = []
    profile = measure(model_file, batch_size=16, progress=lambda done, total: seen.append((done, total)))
    nodes = profile.by_name
    assert list(nodes) == ["ids", "embed", "mix", "act", "add", "norm", "add_1", "out", "target", "loss"]
    assert nodes["add"].inputs == ("embed", "act")
    assert nodes["loss"].inputs == ("out", "target")
    assert nodes["ids"].output_bytes == 16 * 8
    assert nodes["ids"].gradient_bytes == 0
    assert nodes["mix"].output_bytes == nodes["mix"].gradient_bytes == 16 * 8 * 4
    assert nodes["mix"].parameter_bytes == (64 + 8) * 4
    assert nodes["mix"].flops == 2 * 16 * 8 * 8
    assert nodes["act"].stash_bytes == 16 * 8 * 4
    (shared,) = profile.shared
    assert (shared.name, shared.bytes, shared.nodes) == ("embed.weight", 20 * 8 * 4, ("embed", "out"))
    parameter_bytes = sum(p.nbytes for n, p in model_file.build().named_parameters() if n != "spare")
    assert profile.parameter_bytes(list(nodes)) == parameter_bytes
    assert profile.optimizer_state_bytes == pytest.approx(2.0)
    assert seen[-1][0] == seen[-1][1] > 0
    assert Profile.parse(profile.dump()).dump() == profile.dump()


def test_a_parameter_that_the_model_returns_is_shared_with_the_loss(tmp_path):
    """The last stage holds it, too: an interleaved plan had both of its stages on one worker, and no run took it."""
    text = TEXT.replace("torch.arange(8))", "torch.arange(8)), self.mix.bias, self.spare")
    text = text.replace("cross_entropy(output,", "cross_entropy(output[0],")
    profile = measure(write(tmp_path, text), batch_size=16)
    assert [(shared.name, shared.nodes) for shared in profile.shared] == [
        ("embed.weight", ("embed", "out")),
        ("mix.bias", ("mix", "loss")),
    ]
    assert profile.by_name["loss"].parameter_bytes == (8 + 3) * 4
    assert profile.by_name["loss"].update_s > 0, "that of the parameter that nothing else uses"


FROZEN = (
    TEXT.replace("        self.spare", "        self.mix.requires_grad_(False)\n        self.spare"),
    TEXT.replace("        self.spare", "        self.embed.requires_grad_(False)\n        self.spare"),
)


@pytest.mark.parametrize("text", FROZEN, ids=["frozen", "frozen and tied"])
def test_frozen_parameters_are_neither_updated_nor_averaged(tmp_path, model_file, text):
    """They take memory; those that are tied need not stay equal."""
    trained, profile = (measure(file, batch_size=16) for file in (model_file, write(tmp_path, text)))
    frozen = [node for node in profile.nodes if node.frozen_bytes]
    assert [node.name for node in frozen] == (["mix"] if text == FROZEN[0] else ["embed", "out"])
    assert all(node.frozen_bytes == trained.by_name[node.name].parameter_bytes for node in frozen)
    assert all(node.parameter_bytes == node.update_s == 0 for node in frozen)
    assert profile.optimizer_state_bytes == pytest.approx(2.0)
    assert [shared.name for shared in profile.shared] == (["embed.weight"] if text == FROZEN[0] else [])
    assert sum(node.update_s for node in profile.nodes) > 0


@pytest.mark.parametrize(
    ("loss", "is_a_sum"),
    [
        ("F.cross_entropy(output, target, reduction='sum')", True),
        ("F.cross_entropy(output, target)", False),
        ("F.cross_entropy(output.view(4, 20), target, reduction='sum')", False),  # it takes no other minibatch
    ],
)
def test_a_loss_that_sums_over_samples_is_told(tmp_path, loss, is_a_sum):
    path = tmp_path / "summing.py"
    path.write_text(TEXT.replace("F.cross_entropy(output, target)", loss))
    notes: list[str] = []
    measure(ModelFile.load(ModelRef(source=str(path)), trusted=True), batch_size=4, note=notes.append)
    assert any("loss() sums over the samples" in note for note in notes) == is_a_sum


def test_two_rounds_agree_if_whole_steps_and_passes_took_as_long():
    def agree(steps, backwards):
        return _agree(steps, [({"a": 1.0, "b": 2.0}, {"a": backward}) for backward in backwards])

    assert agree([1.0, 1.02], [3.0, 3.1])
    assert not agree([1.0], [3.0])
    assert not agree([1.0, 1.06], [3.0, 3.0])
    assert not agree([1.0, 1.0], [3.0, 3.5])


def test_a_loss_may_change_the_output_in_place(tmp_path):
    text = TEXT.replace("def loss(output, target): ", "def loss(output, target):\n    output.sub_(1.0)\n    ")
    assert measure(write(tmp_path, text), batch_size=16).by_name["loss"].backward_s > 0


def test_a_complex_layer_is_written_with_its_dtype():
    assert constructor_call(nn.Linear(2, 3, dtype=torch.complex64)) == "nn.Linear(2, 3, dtype=torch.complex64)"


def test_times_are_measured(model_file):
    profile = measure(model_file, batch_size=16)
    assert 0 < profile.device.memory_bytes <= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("embed", "mix", "norm", "loss"):
        assert profile.by_name[name].forward_s > 0
        assert profile.by_name[name].backward_s > 0
    assert profile.by_name["mix"].update_s > 0
    assert profile.step_s > 0
    total = sum(n.forward_s + n.backward_s + n.update_s for n in profile.nodes)
    assert profile.coverage == pytest.approx(total / profile.step_s)


def test_times_are_taken_with_freed_memory_kept_as_in_a_worker(model_file, monkeypatch):
    """Page faults of returned memory made VGG-16 1.6 times as slow as in a run; scratch needs memory returned."""
    for name in (name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))):
        monkeypatch.delenv(name)
    changes: list[dict[int, int]] = [{}]
    seen: dict[str, list[int]] = {"step": [], "scratch": []}
    monkeypatch.setattr(host, "_set_malloc_options", changes.append)
    step, scratch = ProfiledModel.train_step, measure_scratch_bytes
    monkeypatch.setattr(ProfiledModel, "train_step", lambda self: seen["step"].append(len(changes)) or step(self))
    monkeypatch.setattr(
        "pdtool.profiler.measure.measure_scratch_bytes",
        lambda *given: seen["scratch"].append(len(changes)) or scratch(*given),
    )
    measure(model_file, batch_size=16)
    assert {kind: [changes[i - 1] for i in set(counts)] for kind, counts in seen.items()} == {
        "step": [host._KEEPING],
        "scratch": [host._RETURNING],
    }
    assert changes[-1] == host._DEFAULTS


def test_bf16_is_measured_as_a_run_computes_it(model_file):
    """Under autocast: products keep bf16 for their backward, while weights and what goes over borders stay fp32."""
    plain = measure(model_file, batch_size=16).by_name
    profile = measure(model_file, batch_size=16, precision="bf16")
    nodes = profile.by_name
    assert profile.precision == "bf16"
    assert (nodes["act"].stash_bytes, plain["act"].stash_bytes) == (16 * 8 * 2, 16 * 8 * 4)
    weight_bytes = 8 * 8 * 2  # each minibatch keeps weights that were cast for it
    assert nodes["mix"].stash_bytes == 16 * 8 * 2 + weight_bytes
    for name in ("mix", "norm", "out"):
        assert nodes[name].output_bytes == plain[name].output_bytes
        assert nodes[name].parameter_bytes == plain[name].parameter_bytes
        assert nodes[name].forward_s > 0
        assert nodes[name].backward_s > 0


def test_the_loss_is_measured_in_bf16_too(tmp_path):
    check = "assert torch.is_autocast_enabled('cpu')\n    assert output.dtype is torch.bfloat16"
    file = write(tmp_path, TEXT.replace("return F.cross_entropy", f"\n    {check}\n    return F.cross_entropy"))
    assert measure(file, batch_size=16, precision="bf16").by_name["loss"].backward_s > 0


def test_bf16_is_refused_where_the_model_switches_autocast_off(tmp_path):
    text = TEXT.replace("y = self.act(self.mix(x))", "y = self.act(self.mix(x))\n        MORE")
    more = "with torch.autocast('cpu', enabled=False):\n            y = y * 2"
    file = write(tmp_path, text.replace("MORE", more))
    assert measure(file, batch_size=16).precision == "fp32"
    with pytest.raises(UsageError, match=r"--precision bf16: the model switches autocast off at net\.py:\d+"):
        measure(file, batch_size=16, precision="bf16")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_scratch_is_what_is_held_only_while_computing():
    """Of 40 MB in each of three tensors, one is the result."""
    a = torch.ones(10_000_000)
    result, scratch = measure_scratch_bytes(torch.device("cpu"), lambda: (a + 1) * (a + 2))
    assert scratch() == pytest.approx(80e6, rel=0.05)
    assert result[0] == 6
    _, none = measure_scratch_bytes(torch.device("cpu"), lambda: a + 1)
    assert none() < 2e6
    _, small = measure_scratch_bytes(torch.device("cpu"), lambda: len([torch.ones(20_000) for _ in range(500)]))
    assert small() == pytest.approx(40e6, rel=0.1), "also where glibc keeps what is freed"


class Keeping(torch.autograd.Function):
    """Keeps 40 MB of its own until its backward, which needs 40 MB more for a moment."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x * 2)
        return x.sum()

    @staticmethod
    def backward(ctx, gradient):
        return (ctx.saved_tensors[0] + 1) * gradient


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_what_a_backward_frees_of_its_forward_is_no_scratch():
    """The stash counts it; counted again, the working set of an LSTM or a loss is several times too large."""
    x = torch.ones(10_000_000, requires_grad=True)
    loss = Keeping.apply(x)
    gradients, scratch = measure_scratch_bytes(torch.device("cpu"), lambda: torch.autograd.grad(loss, x))
    assert gradients[0][0] == 3
    assert scratch() == pytest.approx(40e6, rel=0.1)


def test_a_model_without_loss_and_data_is_profiled_without_them(tmp_path):
    text = TEXT[: TEXT.index("def dataset")] + "def example_inputs(n): return torch.zeros(n, dtype=torch.long)\n"
    profile = measure(write(tmp_path, text), batch_size=4)
    assert "loss" not in profile.by_name
    assert profile.optimizer_state_bytes == 0
    assert all(node.update_s == 0 for node in profile.nodes)


def test_a_loss_may_take_named_outputs_as_attributes(tmp_path):
    """As of a model from `transformers`, whose output is a mapping with attributes."""
    text = TEXT.replace("return self.out(", "return Named(logits=self.out(").replace(
        "torch.arange(8))", "torch.arange(8)))"
    )
    text = text.replace("cross_entropy(output,", "cross_entropy(output.logits,").replace(
        "class Net", NAMED + "class Net"
    )
    profile = measure(write(tmp_path, text), batch_size=4)
    assert profile.by_name["loss"].inputs == ("out", "target")


def test_a_model_without_anything_to_train_is_refused(tmp_path):
    text = TEXT + "def model(build=model): return build().requires_grad_(False)\n"
    with pytest.raises(
        ModelError, match=r"net.py: no parameter of the model requires a gradient, .*; leave requires_grad on"
    ):
        measure(write(tmp_path, text), batch_size=4)


def test_hints_become_constraints(tmp_path):
    text = TEXT.replace("inplace=True", "") + "HINTS = {'no_split': ['norm', ''], 'pin': {'out': -1}}\n"
    with pytest.raises(ModelError, match="HINTS names '', but the model has no such module"):
        measure(write(tmp_path, text), batch_size=4)
    for path, remedy in ((r"\*", r"name each module by its whole path, such as .*; patterns do"), ("nrm", "mean norm")):
        with pytest.raises(ModelError, match=rf"HINTS names '{path}', but the model has no such module.*; .*{remedy}"):
            measure(write(tmp_path, text.replace("'norm', ''", repr(path.strip(chr(92))))), batch_size=4)
    text = TEXT.replace("self.mix = nn.Linear(8, 8)", "self.none, self.mix = nn.Identity(), nn.Linear(8, 8)")
    with pytest.raises(ModelError, match="HINTS names 'none', but forward computes nothing in it; leave it out"):
        measure(write(tmp_path, text + "HINTS = {'pin': {'none': 0}}\n"), batch_size=4)
    text = TEXT.replace("self.mix = nn.Linear(8, 8)", "self.mix = nn.Sequential(nn.Linear(8, 8), nn.Tanh())")
    profile = measure(write(tmp_path, text + "HINTS = {'no_split': ['mix'], 'pin': {'out': -1}}\n"), batch_size=4)
    assert profile.together == (("mix.0", "mix.1"),)
    assert profile.pin == {"out": -1}


def test_a_minibatch_that_does_not_fit_says_so(model_file, monkeypatch):
    def exhausted(*args, **kwargs):
        raise torch.OutOfMemoryError("tried to allocate 9 GB")

    monkeypatch.setattr(Executor, "__call__", exhausted)
    with pytest.raises(ModelError, match=r"minibatch of 16 does not fit in memory.*smaller --batch-size"):
        measure(model_file, batch_size=16)


def test_a_cpu_without_the_kernel_says_so(model_file, monkeypatch):
    """As an LSTM in bf16 on a CPU without AVX-512."""

    def refused(*args, **kwargs):
        raise RuntimeError("could not create a primitive descriptor for the LSTM forward propagation primitive")

    monkeypatch.setattr(Executor, "__call__", refused)
    with pytest.raises(ModelError, match=r"no kernel for a minibatch in this precision .*; leave out --precision bf16"):
        measure(model_file, batch_size=16, precision="bf16")


def test_a_minibatch_too_small_to_normalise_over_says_so(model_file):
    match = r"net.py: a minibatch of 1 is too small for batch normalisation .*; choose a larger --batch-size"
    with pytest.raises(ModelError, match=match):
        measure(model_file, batch_size=1)
    with pytest.raises(ModelError, match=match):
        estimate(model_file, batch_size=1, device=find_device("v100"))


BUFFER_THAT_BACKWARD_NEEDS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 2)
        self.register_buffer("scale", torch.ones(8))
    def forward(self, x):
        h = self.first(x) / self.scale
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 * h.detach().abs().mean(0)
        return self.last(h)
def model(): return Net()
def example_inputs(batch_size): return torch.randn(batch_size, 8)
"""


def test_a_buffer_that_is_assigned_before_its_backward_is_told(tmp_path):
    (tmp_path / "model.py").write_text(BUFFER_THAT_BACKWARD_NEEDS)
    file = ModelFile.load(ModelRef(source=str(tmp_path / "model.py")), trusted=True)
    with pytest.raises(ModelError, match=r"needs a value that was changed in place .*; .* as in self.scale.clone\(\)"):
        measure(file, batch_size=4)
    (tmp_path / "model.py").write_text(BUFFER_THAT_BACKWARD_NEEDS.replace("/ self.scale", "/ self.scale.clone()"))
    measure(ModelFile.load(file.ref, trusted=True), batch_size=4)


def test_a_batch_larger_than_the_data_says_so(model_file):
    with pytest.raises(ModelError, match="64 samples, fewer than one minibatch of 100"):
        measure(model_file, batch_size=100)


def test_an_operator_that_the_data_does_not_fit_is_named(tmp_path):
    """The module and its line were left out, so nobody knew which of a model's embeddings has too few rows."""
    text = """
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(10, 4)

    def forward(self, x):
        return self.words(x).mean(1)

def dataset(split):
    return [(torch.tensor([1, 10]), torch.zeros(4))] * 8

def loss(output, target):
    return F.mse_loss(output, target)
"""
    text = f"import torch\nfrom torch import nn\nfrom torch.nn import functional as F\nclass model(nn.Module):{text}"
    match = (
        r"^net.py: a minibatch, in words at net.py:10, raised IndexError: index out of range in self; let dataset\(\) "
        "return indices that exist: from 0 to an embedding's num_embeddings - 1$"
    )
    with pytest.raises(ModelError, match=match):
        measure(write(tmp_path, text), batch_size=4)


def test_a_loss_that_fails_names_its_line(tmp_path):
    text = TEXT.replace("return F.cross_entropy(output, target)", "return F.cross_entropy(output, target.float().nope)")
    line = next(i for i, t in enumerate(text.splitlines(), 1) if "nope" in t)
    with pytest.raises(ModelError, match=rf"net.py:{line}: loss\(\) raised AttributeError"):
        measure(write(tmp_path, text), batch_size=4)


PENALIZED = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.critic = nn.Linear(4, 4), nn.Linear(4, 3)
    def forward(self, x):
        x = x.requires_grad_()
        return self.critic(self.first(x).tanh()), x
def model(): return Net()
def dataset(split): return [(torch.ones(4), i % 3) for i in range(8)]
def loss(output, target):
    y, x = output
    slope, = torch.autograd.grad(y.sum(), X, create_graph=True)
    return F.cross_entropy(y, target) + slope.square().mean()
def optimizer(named): return torch.optim.SGD([p for _, p in named], lr=0.1)
"""


@pytest.mark.parametrize("x", ["x", "x.clone().requires_grad_()"])
def test_a_gradient_penalty_is_told_where_it_can_be_computed(tmp_path, x):
    text = f"import torch\nfrom torch import nn\nimport torch.nn.functional as F\n{PENALIZED.replace('X,', f'{x},')}"
    line = next(i for i, t in enumerate(text.splitlines(), 1) if "slope, =" in t)
    match = rf"net.py:{line}: loss\(\) raised .*; pdtool gives loss\(\) .* without its graph .* HINTS\[\"opaque\"\]"
    with pytest.raises(ModelError, match=match):
        measure(write(tmp_path, text), batch_size=4)


@pytest.mark.parametrize("device", [None, "v100"])
def test_a_text_in_a_target_is_refused_before_a_run(tmp_path, device):
    """Only the workers refused it, after planning and codegen."""
    text = TEXT.replace("(i + 1) % 20)", "{'class': (i + 1) % 20, 'file': f'{i}.png'})")
    file = write(tmp_path, text.replace("entropy(output, target)", "entropy(output, target['class'])"))
    with pytest.raises(ModelError, match="a target of the dataset holds str, which cannot be sent"):
        estimate(file, batch_size=4, device=find_device(device)) if device else measure(file, batch_size=4)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        (
            "[y for _, y in samples]",
            r"gives a target of 4 parts for 4 samples, but of 1 part for one sample; let collate\(\) make one tensor",
        ),
        (
            "(torch.zeros(1), None) if len(samples) == 1 else [torch.zeros(4)] * 2",
            "gives a target of 2 parts for 4 samples, but of 1 part for one sample; give all targets the same",
        ),
        ("torch.ones(7, len(samples))", r"gives a target of shape \[7, 1\] for one sample; give targets one row per"),
        ("torch.ones(len(samples), len(samples))", r"of shape \[4, 4\] for 4 samples, but of shape \[1, 1\] for one"),
        (
            "torch.nested.nested_tensor([torch.ones(2)])",
            "gives a nested tensor as target; give targets one row per sample",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_target_without_a_row_for_each_sample_is_refused_before_a_run(tmp_path, target, message):
    """Only the workers refused it, after planning and codegen."""
    collate = f"\ndef collate(samples):\n    return torch.stack([x for x, _ in samples]), {target}\n"
    with pytest.raises(ModelError, match=message):
        measure(write(tmp_path, TEXT + collate), batch_size=4)


@pytest.mark.parametrize("device", [None, "v100"])
@pytest.mark.parametrize(
    "code",
    ["loss(output, target): return (output * scale).sum()", "optimizer(named): return torch.optim.SGD([scale], 0.1)"],
)
def test_parameters_of_the_loss_are_refused_before_a_run(tmp_path, code, device):
    """A center loss has them. Only the workers refused them, after planning and codegen."""
    file = write(tmp_path, f"{TEXT}\nscale = nn.Parameter(torch.ones(20))\ndef {code}\n")
    with pytest.raises(ModelError, match=r"\(\) (depends on|takes) a parameter of .*shape \[20\]"):
        estimate(file, batch_size=4, device=find_device(device)) if device else measure(file, batch_size=4)


def test_profile_of_this_file_is_where_it_says(model_file):
    profile = measure(model_file, batch_size=4)
    assert profile.digests == {model_file.ref.source: model_file.sha256, "operator graph": profile.graph_sha256}
    assert Path(profile.model.source).is_file()


def test_an_optimizer_that_needs_a_closure_is_refused(tmp_path):
    text = TEXT.replace("torch.optim.Adam([p for _, p in named])", "torch.optim.LBFGS([p for _, p in named])")
    with pytest.raises(ModelError, match=r"LBFGS, whose step needs a closure"):
        measure(write(tmp_path, text), batch_size=4)


@pytest.mark.parametrize(
    "statement", ["assert closure is not None", "closure()", "raise ValueError('no closure')", "0 / 0"]
)
def test_a_step_that_fails_without_a_closure_is_told_to_do_without(tmp_path, statement):
    """As SAM, whose step has closure=None. Another failure of such a step gets no such advice."""
    sam = f"class SAM(torch.optim.SGD):\n    def step(self, closure=None):\n        {statement}\n"
    text = TEXT.replace("torch.optim.Adam([p for _, p in named])", "SAM([p for _, p in named], 0.1)") + sam
    remedy = (
        "; a step gets no closure that computes the loss again, because a pipeline computes it once per update; use an "
        "optimizer without a closure, such as AdamW"
    )
    with pytest.raises(ModelError, match=r"net.py:\d+: a step of SAM raised ") as caught:
        measure(write(tmp_path, text), batch_size=4)
    assert str(caught.value).endswith(remedy) == ("closure" in statement)


def test_an_optimizer_whose_step_fails_names_its_line(tmp_path):
    broken = "class Broken(torch.optim.SGD):\n    def step(self):\n        raise KeyError('momentum')\n"
    text = TEXT.replace("torch.optim.Adam([p for _, p in named])", "Broken([p for _, p in named], 0.1)") + broken
    line = next(i for i, t in enumerate(text.splitlines(), 1) if "raise KeyError" in t)
    with pytest.raises(ModelError, match=rf"net.py:{line}: a step of Broken raised KeyError: 'momentum'"):
        measure(write(tmp_path, text), batch_size=4)


def test_what_is_made_of_parameters_for_one_operator_stands_with_it(tmp_path):
    profile = measure(write(tmp_path, DROPPED_WEIGHTS), batch_size=4)
    # the scaled bias has two users, which may be in different stages
    assert set(profile.together) == {("mul_1", "dropout"), ("dropout", "linear")}
    assert profile.by_name["mul"].inputs == ()


def test_no_gradient_is_asked_for_where_no_loss_leads(tmp_path):
    """The distances to the codes have one, which nobody takes, and the codes have changed since."""
    (tmp_path / "net.py").write_text(CODEBOOK)
    profile = measure(ModelFile.load(ModelRef(source=str(tmp_path / "net.py")), trusted=True), batch_size=8)
    assert profile.by_name["matmul"].backward_s == 0 < profile.by_name["first"].backward_s
