"""A backward in two parts makes the gradients of one backward, to the bit with the same kernels; it keeps little."""

import gc
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from pdtool.runtime.stage import split_backward


def backward_input(outputs, inputs, gradients):
    """The first part of a backward from tensors."""
    return split_backward.backward_input([get_gradient_edge(output) for output in outputs], inputs, gradients)


class Tied(nn.Module):
    """One weight in two layers, another by its transpose, and biases of their own."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x):
        y = self.second(torch.relu(self.first(x)))
        y = self.conv(torch.relu(self.conv(y[:, None])))[:, 0]
        return self.third(y) @ self.third.weight


class Mixed(Tied):
    """The same in two precisions: each weight is cast once for both its uses."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x).float()


class Skip(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x):
        y = torch.relu(self.a(x))
        return x + y + self.b(y)


class Several(nn.Module):
    """Two inputs; outputs of both, of one, the other as it came, and one of parameters alone."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, y):
        z = self.a(x) * self.b(y)
        return z, self.b(x), y, self.c.weight.tanh()


class Unused(nn.Module):
    """The second output has no gradient, so the second input has none."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x, y):
        return self.a(x), self.b(y).detach()


class Frozen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.body[0].weight.requires_grad_(False)
        self.body[2].requires_grad_(False)

    def forward(self, x):
        return self.body(x)


class Tokens(nn.Module):
    """A first stage: integers in."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(9, 6)
        self.position = nn.Parameter(torch.randn(5, 6))
        self.head = nn.Linear(6, 9, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        return self.head(torch.tanh(self.embedding(tokens) + self.position))


class Joined(nn.Module):
    """Tokens that meet what came from the stage before, by a sum and by a product."""

    def __init__(self):
        super().__init__()
        self.embedding, self.mix = nn.Embedding(9, 6), nn.Linear(6, 6)

    def forward(self, x, tokens):
        known = self.mix(self.embedding(tokens))
        return torch.softmax(x @ known.transpose(1, 2), -1) @ (x + known)


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale, (gradient * x).sum(0)


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.scale = nn.Linear(6, 6), nn.Parameter(torch.randn(6))

    def forward(self, x):
        return OwnBackward.apply(self.a(x), self.scale)


class Hooked(nn.Module):
    """Scales gradients on their way, at the output of a product and at a parameter."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)
        self.norm.weight.register_hook(lambda gradient: 5 * gradient)
        self.b.weight.register_hook(lambda gradient: 7 * gradient)

    def forward(self, x):
        y = self.norm(self.a(x))
        z = self.b(y)
        for value in (y, z):
            value.register_hook(lambda gradient: 3 * gradient)
        return z


class Factors(nn.Module):
    """Parameters as either factor, of matrices and of batches, by rows and by columns, broadcast, scaled."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Parameter(torch.randn(6, 6)) for _ in range(4))
        self.batch, self.row = nn.Parameter(torch.randn(3, 6, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x):
        y = torch.tanh(x @ self.a) + torch.tanh(self.b @ x) + torch.tanh(self.c.t() @ x) + torch.tanh(x @ self.d.t())
        y = torch.tanh(torch.addmm(self.row, y, self.a.t().exp(), alpha=0.5))
        z = torch.tanh(torch.baddbmm(self.row, y.expand(3, 6, 6), self.batch)) @ self.batch
        return torch.bmm(self.batch.mT, torch.tanh(z)) @ self.c


class Made(nn.Module):
    """Convolutions whose weights come from the input, and whose data are a parameter."""

    def __init__(self):
        super().__init__()
        self.make, self.image = nn.Linear(6, 9), nn.Parameter(torch.randn(1, 1, 5, 5))

    def forward(self, x):
        return nn.functional.conv2d(self.image, self.make(x).view(-1, 1, 3, 3), padding=1)


class Apart(nn.Module):
    """An output of parameters alone, which the other outputs' operators have too."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(6, 6), nn.Linear(6, 6), nn.LayerNorm(6)

    def forward(self, x):
        return self.norm(self.b(self.a(x))), self.b.weight @ self.norm.weight, self.norm.bias


def convolutions():
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.ConvTranspose2d(4, 4, 3, output_padding=1, stride=2, bias=False),
        nn.Conv2d(4, 2, 3, dilation=2, groups=2, padding="same", padding_mode="circular"),
    )


def normed():
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1), nn.GroupNorm(1, 2))


def recurrent(kind):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = kind(6, 5, 2, batch_first=True), nn.Linear(5, 4)

        def forward(self, x):
            y, _ = self.body(x)
            return self.head(y)

    return Recurrent


def transformer():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


def floats(*shape):
    return lambda: torch.randn(shape).requires_grad_()


def tokens():
    return torch.randint(9, (3, 5))


CASES = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 4, bias=False)), [floats(3, 2, 6)]),
    "conv": (convolutions, [floats(2, 3, 7, 7)]),
    "batch norm": (normed, [floats(2, 3, 7, 7)]),
    "lstm": (recurrent(nn.LSTM), [floats(3, 5, 6)]),
    "gru": (recurrent(nn.GRU), [floats(3, 5, 6)]),
    "transformer": (transformer, [floats(2, 5, 8)]),
    "tied": (Tied, [floats(3, 6)]),
    "mixed": (Mixed, [floats(3, 6)]),
    "factors": (Factors, [floats(6, 6)]),
    "made": (Made, [floats(2, 6)]),
    "apart": (Apart, [floats(3, 6)]),
    "skip": (Skip, [floats(3, 6)]),
    "several": (Several, [floats(3, 6), floats(3, 6)]),
    "unused": (Unused, [floats(3, 6), floats(3, 6)]),
    "frozen": (Frozen, [floats(3, 6)]),
    "all frozen": (lambda: Frozen().requires_grad_(False), [floats(3, 6)]),
    "tokens": (Tokens, [tokens]),
    "joined": (Joined, [floats(3, 5, 6), tokens]),
    "no gradient wanted": (Skip, [lambda: torch.randn(3, 6)]),
    "own backward": (Own, [floats(3, 6)]),
    "hooked": (Hooked, [floats(3, 6)]),
}


def case(name):
    """Module, inputs, outputs that have a gradient, and these gradients; the same each time."""
    torch.manual_seed(0)
    make, inputs = CASES[name]
    module, values = make(), [value() for value in inputs]
    outputs = module(*values)
    outputs = [o for o in (outputs if isinstance(outputs, tuple) else [outputs]) if o.requires_grad]
    return module, values, outputs, [torch.randn(o.shape, dtype=o.dtype) for o in outputs]


def whole(name):
    """What one backward makes: gradients of the inputs, and of the parameters by name."""
    module, inputs, outputs, gradients = case(name)
    if outputs:
        torch.autograd.backward(outputs, gradients)
    return [value.grad for value in inputs], {key: p.grad for key, p in module.named_parameters()}


def same(one, other):
    """Bit by bit; None is None."""
    return other is None if one is None else other is not None and torch.equal(one, other)


@pytest.mark.parametrize("name", CASES)
def test_two_parts_are_one_backward(name):
    inputs, parameters = whole(name)
    module, values, outputs, gradients = case(name)
    found, rest = backward_input(outputs, values, gradients)
    assert all(p.grad is None for p in [*module.parameters(), *values])
    rest.run()
    assert all(same(a, b) for a, b in zip(inputs, found, strict=True))
    assert all(value.grad is None for value in values)
    for key, parameter in module.named_parameters():
        assert same(parameters[key], parameter.grad), key


def test_gradients_are_added_to_what_is_there():
    _, parameters = whole("tied")
    module, values, outputs, gradients = case("tied")
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    backward_input(outputs, values, gradients)[1].run()
    for key, parameter in module.named_parameters():
        assert same(parameters[key] + 1, parameter.grad), key


def test_a_loss_has_no_gradient_of_its_own():
    module, value = nn.Linear(3, 2), torch.randn(4, 3, requires_grad=True)
    expected = torch.autograd.grad(module(value).square().mean(), [value, module.weight])
    (found,), rest = backward_input([module(value).square().mean()], [value], [None])
    rest.run()
    assert same(expected[0], found)
    assert same(expected[1], module.weight.grad)


@pytest.mark.parametrize("name", CASES)
def test_each_parameter_is_final_once(name):
    module, values, outputs, gradients = case(name)
    told = Counter()
    for key, parameter in module.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(lambda _, key=key: told.update([key]))
    _, rest = backward_input(outputs, values, gradients)
    assert not told
    rest.run()
    assert told == Counter(key for key, p in module.named_parameters() if p.grad is not None)


OPERATORS = {
    "linear": lambda a, b, weight, norm: nn.functional.linear(a, weight, norm[0]),
    "product": lambda a, b, weight, norm: torch.tanh(a @ b),
    "weighted": lambda a, b, weight, norm: torch.tanh(weight @ a),
    "add": lambda a, b, weight, norm: a + b,
    "multiply": lambda a, b, weight, norm: torch.tanh(a) * torch.tanh(b),
    "norm": lambda a, b, weight, norm: nn.functional.layer_norm(a, (3,), *norm),
    "weight": lambda a, b, weight, norm: weight,
    "embedding": lambda a, b, weight, norm: nn.functional.embedding(torch.tensor([2, 0, 2]), weight),
    "cut": lambda a, b, weight, norm: a.detach(),
    "hooked": lambda a, b, weight, norm: hooked(a @ weight),
}


def hooked(value):
    if value.requires_grad:
        value.register_hook(lambda gradient: 0.5 * gradient)
    return value


class Random(nn.Module):
    """Operators on each other's results, which may be parameters alone, with weights that several may use."""

    def __init__(self, steps, outputs, frozen):
        super().__init__()
        self.steps, self.outputs = steps, outputs
        self.weights = nn.ParameterList(torch.randn(3, 3, dtype=torch.double) for _ in range(4))
        self.norms = nn.ParameterList(torch.randn(2, 3, dtype=torch.double) for _ in range(2))
        self.weights[frozen].requires_grad_(False)
        self.weights[3].register_hook(lambda gradient: 0.5 * gradient)

    def forward(self, *inputs):
        values = list(inputs)
        for name, a, b, weight in self.steps:
            a, b = values[a % len(values)], values[b % len(values)]
            values.append(OPERATORS[name](a, b, self.weights[weight], self.norms[weight % 2].unbind()))
        return [value for i in self.outputs if (value := values[-1 - i % len(values)]).requires_grad]


small = st.integers(0, 9)
steps = st.lists(st.tuples(st.sampled_from(list(OPERATORS)), small, small, st.integers(0, 3)), min_size=1, max_size=10)


@settings(max_examples=100)
@given(
    steps, st.lists(small, min_size=1, max_size=3), st.integers(0, 2), st.lists(st.booleans(), min_size=1, max_size=2)
)
def test_two_parts_of_any_graph_are_one_backward(steps, outputs, frozen, wanted):
    found = []
    for split in (False, True):
        torch.manual_seed(0)
        module = Random(steps, outputs, frozen)
        inputs = [torch.randn(3, 3, dtype=torch.double, requires_grad=wants) for wants in wanted]
        roots = module(*inputs)
        gradients = [torch.randn(3, 3, dtype=torch.double) for _ in roots]
        with Kernels() as kernels:
            if split:
                got, rest = backward_input(roots, inputs, gradients)
                rest.run()
            elif roots:
                torch.autograd.backward(roots, gradients)
        found.append((got if split else [x.grad for x in inputs], [p.grad for p in module.parameters()], kernels.count))
    (inputs, parameters, count), (split_inputs, split_parameters, split_count) = found
    assert all(same(a, b) for a, b in zip(inputs, split_inputs, strict=True))
    assert all(nearly(a, b) for a, b in zip(parameters, split_parameters, strict=True))
    assert count == split_count


def nearly(one, other):
    """What three or more operators add to a parameter may be summed in another order."""
    return same(one, other) or torch.allclose(one, other, rtol=0, atol=1e-14 * one.abs().max())


class Kernels(TorchDispatchMode):
    """Counts those that cost something; of a convolution, each gradient it makes."""

    COSTLY = ("mm", "addmm", "bmm", "baddbmm", "mkldnn_rnn_layer_backward", "native_batch_norm_backward")
    COSTLY += ("native_group_norm_backward", "native_layer_norm_backward", "embedding_dense_backward")
    COSTLY += ("threshold_backward", "tanh_backward", "_softmax_backward_data")

    def __init__(self):
        super().__init__()
        self.count = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name == "convolution_backward":
            self.count.update(
                f"{name} {of}" for of, wanted in zip(("input", "weight"), args[-1], strict=False) if wanted
            )
        elif name in self.COSTLY:
            self.count[name] += 1
        return func(*args, **(kwargs or {}))


def kernels(name):
    """Of one backward, of the first part, and of the second."""
    _, _, outputs, gradients = case(name)
    with Kernels() as one:
        if outputs:
            torch.autograd.backward(outputs, gradients)
    _, values, outputs, gradients = case(name)
    with Kernels() as first:
        _, rest = backward_input(outputs, values, gradients)
    with Kernels() as second:
        rest.run()
    return one.count, first.count, second.count


@pytest.mark.parametrize("name", CASES)
def test_nothing_is_computed_twice(name):
    one, first, second = kernels(name)
    assert first + second == one


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("linear", {"mm": 2, "threshold_backward": 1}, {"mm": 2}),
        ("conv", {"convolution_backward input": 3, "threshold_backward": 1}, {"convolution_backward weight": 3}),
        ("skip", {"mm": 2, "threshold_backward": 1}, {"mm": 2}),
        ("lstm", {"mkldnn_rnn_layer_backward": 2, "mm": 1}, {"mm": 1}),
        ("transformer", {"mm": 4, "native_layer_norm_backward": 2}, {"mm": 4}),
        ("tokens", {}, {"mm": 2, "tanh_backward": 1, "embedding_dense_backward": 1}),
        ("no gradient wanted", {}, {"mm": 3, "threshold_backward": 1}),
        ("all frozen", {"mm": 3, "tanh_backward": 2}, {}),
        ("tied", {"mm": 4, "convolution_backward input": 2}, {"mm": 4, "convolution_backward weight": 2}),
    ],
)
def test_what_is_put_off(name, first, second):
    """The gradients of weights, and of first stages everything; nothing else."""
    _, now, later = kernels(name)
    assert {key: now[key] for key in first} == first
    assert later == Counter(second)
    if not first:
        assert not now


@pytest.fixture
def alive():
    """How many of the tensors that graphs save from now on are there still, without those of `kept`."""
    saved = []

    def pack(tensor):
        saved.append(StorageWeakRef(tensor.untyped_storage()))
        return tensor.detach()

    def count(*kept):
        known = {StorageWeakRef(tensor.untyped_storage()).cdata for tensor in kept}
        return len({ref.cdata for ref in saved if not ref.expired()} - known)

    gc.collect()
    gc.disable()  # what only it would free counts
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        yield count
    gc.enable()


@pytest.mark.rows_of_the_day(days=3)
@pytest.mark.parametrize("name", CASES)
def test_the_graph_is_let_go(name, alive):
    module, values, outputs, gradients = case(name)
    found, rest = backward_input(outputs, values, gradients)
    del outputs, found
    rest.run()
    assert not alive(*module.parameters(), *module.buffers(), *values)


def test_what_is_left_can_be_dropped(alive):
    module, values, outputs, gradients = case("transformer")
    _, rest = backward_input(outputs, values, gradients)
    del outputs
    assert alive(*module.parameters(), *values)
    del rest
    assert not alive(*module.parameters(), *values)


def test_between_the_parts_only_what_products_need_is_kept(alive):
    """Of these, the last layer's input; the second layer's weight has no gradient."""
    module = nn.Sequential(nn.Linear(6, 6), nn.GELU(), nn.Linear(6, 6), nn.Softmax(-1), nn.Sigmoid(), nn.Linear(6, 6))
    module[2].weight.requires_grad_(False)
    value = torch.randn(3, 6, requires_grad=True)
    output = module(value)
    assert alive(*module.parameters(), value) == 3
    _, rest = backward_input([output], [value], [torch.ones(3, 6)])
    del output
    assert alive(*module.parameters(), value) == 1
    rest.run()


def test_the_second_part_lets_go_product_by_product(alive):
    module, value = nn.Sequential(*[nn.Linear(3, 3) for _ in range(4)]), torch.randn(2, 3, requires_grad=True)
    output, found = module(value), []
    _, rest = backward_input([output], [value], [torch.ones(2, 3)])
    del output
    for layer in module:
        layer.weight.register_post_accumulate_grad_hook(lambda _: found.append(alive(*module.parameters(), value)))
    rest.run()
    assert found == [3, 2, 1, 0]
