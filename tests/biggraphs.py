"""Profiles as big as real models, for the planner's benchmark: costs of a V100, by a roofline with some unevenness.

Everything is seeded: the same call gives the same profile, on any machine. Widths are chosen so that a minibatch takes
between a tenth of a second and a few seconds, as the published profiles do.
"""

import random
from collections.abc import Sequence

from pdtool.artifacts.device import Device
from pdtool.artifacts.profile import Node, Profile, SharedParameter

FLOPS_PER_S = 8e12  # float32 on a V100: half of its peak, which convolutions and matrix products commonly reach
HALF_FLOPS_PER_S = 6e13  # of 125e12 with tensor cores
BYTES_PER_S = 7e11  # of 900 GB/s
LAUNCH_S = 8e-6
OPTIMIZER_PASSES = 5  # momentum: reads weight, gradient and momentum, writes weight and momentum


class Net:
    """A profile being written down, node by node.

    Attributes:
        unevenness: times scatter by up to this fraction, as measured ones do.
    """

    def __init__(
        self, name: str, *, batch_size: int, seed: int, unevenness: float = 0.1, flops_per_s: float = FLOPS_PER_S
    ) -> None:
        self.name, self.batch_size, self.unevenness, self.flops_per_s = name, batch_size, unevenness, flops_per_s
        self.random = random.Random(seed)
        self.nodes: dict[str, Node] = {}

    def input(self, name: str, output_bytes: int = 0) -> str:
        """A tensor that the data brings."""
        self.nodes[name] = Node(name=name, op="input", module="", output_bytes=output_bytes)
        return name

    def leaf(self, path: str, op: str, inputs: Sequence[str], out: float, **costs: float) -> str:
        """A whole call of the module at `path`."""
        return self.add(path, path, op, inputs, out, **costs)

    def call(self, module: str, op: str, inputs: Sequence[str], out: float, **costs: float) -> str:
        """A function in the forward of `module`; the second `add` of a module is `add@1`."""
        prefix = f"{module}." if module else ""
        count = sum(name.startswith(f"{prefix}{op}@") for name in self.nodes)
        return self.add(f"{prefix}{op}@{count}", module, op, inputs, out, **costs)

    def add(
        self,
        name: str,
        module: str,
        op: str,
        inputs: Sequence[str],
        out: float,
        *,
        flops: float = 0.0,
        weights: float = 0.0,
        stash: float | None = None,
        gradient: float | None = None,
    ) -> str:
        """A node that gives `out` bytes; its time is that of its flops or of its bytes, whichever is longer.

        Args:
            flops: of the forward.
            weights: bytes of parameters.
            stash: bytes kept for the backward; None: as many as it takes.
            gradient: bytes that a gradient comes back for; None: all of the output.
        """
        taken = sum(self.nodes[source].output_bytes for source in inputs)
        moved = taken + out + weights
        scatter = 1 + self.unevenness * self.random.uniform(-1, 1)
        forward = LAUNCH_S + scatter * max(flops / self.flops_per_s, moved / BYTES_PER_S)
        self.nodes[name] = Node(
            name=name,
            op=op,
            module=module,
            inputs=tuple(inputs),
            forward_s=forward,
            backward_s=2 * forward * scatter,
            update_s=LAUNCH_S + OPTIMIZER_PASSES * weights / BYTES_PER_S if weights else 0.0,
            output_bytes=int(out),
            gradient_bytes=int(out if gradient is None else gradient),
            parameter_bytes=int(weights),
            stash_bytes=int(taken if stash is None else stash),
            flops=int(flops),
        )
        return name

    def bytes(self, name: str) -> int:
        """Of the output of `name`."""
        return self.nodes[name].output_bytes

    def profile(self, shared: Sequence[SharedParameter] = ()) -> Profile:
        """What was written down; optimizer state is one momentum."""
        nodes = tuple(self.nodes.values())
        made = Profile(
            name=self.name,
            model=None,
            batch_size=self.batch_size,
            device=Device(name="V100", kind="estimated"),
            step_s=sum(n.forward_s + n.backward_s + n.update_s for n in nodes),
            coverage=1.0,
            optimizer_state_bytes=1.0,
            nodes=nodes,
            shared=tuple(shared),
        )
        made.check()
        return made

    def loss(self, inputs: Sequence[str]) -> str:
        """The last node."""
        return self.add("loss", "", "loss", inputs, 4, stash=sum(map(self.bytes, inputs)))


def chain(nodes: int = 1000, *, seed: int = 0) -> Profile:
    """A straight chain of `nodes` operators between an input and a loss, grouped by ten into `blocks.K`: Linear layers
    of uneven width (256 to 4096) with a ReLU after every second one, minibatch 64. Times differ by a factor of a
    hundred between neighbours, sizes by ten, so that the best cuts are not at equal counts. The lattice of cuts has
    one cut per border and is as small as can be; what is large is stages x workers.
    """
    net = Net(f"chain{nodes}", batch_size=64, seed=seed, unevenness=0.5)
    rows = 64 * 32  # 32 positions a sample
    last, width = net.input("x", 4 * rows * 1024), 1024
    for i in range(nodes - 2):
        path = f"blocks.{i // 10}.{i % 10}"
        if i % 3 == 2:
            last = net.leaf(path, "ReLU", [last], 4 * rows * width)
        else:
            before, width = width, net.random.choice([256, 512, 1024, 1024, 2048, 4096])
            last = net.leaf(
                path, "Linear", [last], 4 * rows * width, flops=2 * rows * before * width, weights=4 * before * width
            )
    net.loss([last])
    return net.profile()


class Images(Net):
    """A net over images: tensors of channels x side x side, float32."""

    def __init__(self, name: str, *, batch_size: int, seed: int) -> None:
        super().__init__(name, batch_size=batch_size, seed=seed)
        self.shapes: dict[str, tuple[int, int]] = {}  # node -> channels, side

    def image(self, channels: int, side: int) -> str:
        """The input."""
        return self._shaped(self.input("x", 4 * self.batch_size * channels * side**2), channels, side)

    def conv(
        self,
        path: str,
        source: str,
        channels: int,
        kernel: tuple[int, int] = (3, 3),
        stride: int = 1,
        depthwise: bool = False,
    ) -> str:
        """A convolution without a bias, padded to keep the side (over the stride)."""
        before, side = self.shapes[source]
        side = -(-side // stride)
        weights = kernel[0] * kernel[1] * channels * (1 if depthwise else before)
        pixels = self.batch_size * side**2
        made = self.leaf(
            path, "Conv2d", [source], 4 * pixels * channels, flops=2 * pixels * weights, weights=4 * weights
        )
        return self._shaped(made, channels, side)

    def norm(self, path: str, source: str) -> str:
        """Batch normalisation."""
        return self._like(
            self.leaf(path, "BatchNorm2d", [source], self.bytes(source), weights=8 * self.shapes[source][0]), source
        )

    def relu(self, path: str, source: str) -> str:
        """An activation, as a module."""
        return self._like(self.leaf(path, "ReLU", [source], self.bytes(source)), source)

    def pool(self, path: str, source: str, stride: int = 1) -> str:
        """3x3 pooling."""
        channels, side = self.shapes[source]
        side = -(-side // stride)
        made = self.leaf(path, "AvgPool2d", [source], 4 * self.batch_size * channels * side**2)
        return self._shaped(made, channels, side)

    def plus(self, module: str, sources: Sequence[str]) -> str:
        """The sum of equal shapes; nothing is kept for its backward."""
        return self._like(self.call(module, "add", sources, self.bytes(sources[0]), stash=0), sources[0])

    def concat(self, module: str, sources: Sequence[str]) -> str:
        """Joined along the channels; nothing is kept for its backward."""
        made = self.call(module, "cat", sources, sum(map(self.bytes, sources)), stash=0)
        return self._shaped(made, sum(self.shapes[s][0] for s in sources), self.shapes[sources[0]][1])

    def unit(self, path: str, source: str, channels: int, kernel: tuple[int, int] = (3, 3), stride: int = 1) -> str:
        """Convolution, normalisation, activation."""
        made = self.conv(f"{path}.conv", source, channels, kernel, stride)
        return self.relu(f"{path}.relu", self.norm(f"{path}.bn", made))

    def separable(self, path: str, source: str, channels: int, kernel: int, stride: int = 1) -> str:
        """NASNet's: twice ReLU, depthwise and pointwise convolution, normalisation: eight nodes."""
        for turn, step in ((1, stride), (2, 1)):
            made = self.relu(f"{path}.relu_{turn}", source)
            made = self.conv(f"{path}.depthwise_{turn}", made, self.shapes[made][0], (kernel, kernel), step, True)
            made = self.conv(f"{path}.pointwise_{turn}", made, channels, (1, 1))
            source = self.norm(f"{path}.bn_{turn}", made)
        return source

    def classify(self, source: str, classes: int = 1000) -> str:
        """Mean over the image, one Linear, the loss."""
        channels = self.shapes[source][0]
        mean = self.leaf("avgpool", "AdaptiveAvgPool2d", [source], 4 * self.batch_size * channels, stash=0)
        scores = self.leaf(
            "fc",
            "Linear",
            [mean],
            4 * self.batch_size * classes,
            weights=4 * classes * (channels + 1),
            flops=2 * self.batch_size * channels * classes,
        )
        return self.loss([scores])

    def _shaped(self, name: str, channels: int, side: int) -> str:
        self.shapes[name] = (channels, side)
        return name

    def _like(self, name: str, source: str) -> str:
        return self._shaped(name, *self.shapes[source])


def cells(nodes: int = 700, branches: int = 8, *, seed: int = 0) -> Profile:
    """NASNet-A-like, `cells.K`: each cell takes the outputs of the two cells before it, brings both to its width by
    ReLU, 1x1 convolution and normalisation, and runs `branches` branches on them: separable convolutions of 3x3 and
    5x5 (eight nodes) and poolings (one) in turn, added in pairs, the last pair on the first pair's sum, all pairs
    concatenated. A third and two thirds of the way the side halves and the width doubles. As many cells as come
    nearest to `nodes` operators, minibatch 32 of 224x224. Each cell alone has tens of thousands of cuts, and the
    skip over a cell joins the lattices of neighbours.
    """
    net = Images(f"cells{nodes}", batch_size=32, seed=seed)
    stem = net.unit("stem", net.image(3, 224), 96, stride=4)
    pairs = branches // 2
    size = 7 + sum(8 if b % 4 < 2 else 1 for b in range(2 * pairs)) + pairs
    count = max(1, round((nodes - 7) / size))
    before, last = stem, stem
    for k in range(count):
        reduces = k in (count // 3, 2 * count // 3) and k > 0
        width = 96 * 2 ** sum(k >= border for border in (count // 3, 2 * count // 3) if border)
        before, last = last, _cell(net, f"cells.{k}", before, last, width, pairs, reduces)
    net.classify(last)
    return net.profile()


def _cell(net: Images, path: str, before: str, last: str, width: int, pairs: int, reduces: bool) -> str:
    step = net.shapes[before][1] // net.shapes[last][1]  # the skip over a reducing cell
    sides = []
    for name, source, stride in (("previous", before, step), ("current", last, 1)):
        made = net.conv(f"{path}.{name}.conv", net.relu(f"{path}.{name}.relu", source), width, (1, 1), stride)
        sides.append(net.norm(f"{path}.{name}.bn", made))
    stride, sums = 2 if reduces else 1, []
    for pair in range(pairs):
        ends = []
        for half in (0, 1):
            branch, source = f"{path}.branches.{2 * pair + half}", sides[(pair + half) % 2]
            inner = stride
            if sums and pair == pairs - 1 and half:
                source, inner = sums[0], 1
            if pair % 2 == 0:
                ends.append(net.separable(branch, source, width, 3 + 2 * half, inner))
            else:
                ends.append(net.pool(branch, source, inner))
        sums.append(net.plus(path, ends))
    return net.concat(path, sums)


def inception(modules: int = 11, *, seed: int = 0) -> Profile:
    """Inception-v3-like: a stem of five units, then `modules` modules `mixed.K` of four branches (1x1; 1x1 and a pair
    of 1x7 and 7x1; twice that pair; pooling and 1x1), each unit a convolution, a normalisation and an activation, the
    branches concatenated; two of the modules halve the side. About 32 nodes a module, 371 in all by default,
    minibatch 64 of 299x299. One module has some three thousand cuts, and cuts through neighbours do not combine.
    """
    net = Images("inception", batch_size=64, seed=seed)
    last = net.image(3, 299)
    for i, (channels, stride) in enumerate([(32, 2), (32, 1), (64, 2), (80, 1), (192, 2)]):
        last = net.unit(f"stem.{i}", last, channels, stride=stride)
    for k in range(modules):
        stride = 2 if modules > 2 and k in (modules // 3, 2 * modules // 3) else 1
        path, width = f"mixed.{k}", 64 * (1 + 2 * k // modules)
        first = net.unit(f"{path}.single", last, width, (1, 1), stride)
        short = net.unit(f"{path}.short.0", last, width, (1, 1))
        for i, kernel in enumerate([(1, 7), (7, 1)], start=1):
            short = net.unit(f"{path}.short.{i}", short, width + 32 * i, kernel, stride if i == 2 else 1)
        long = net.unit(f"{path}.long.0", last, width, (1, 1))
        for i, kernel in enumerate([(1, 7), (7, 1), (1, 7), (7, 1)], start=1):
            long = net.unit(f"{path}.long.{i}", long, width, kernel, stride if i == 4 else 1)
        pooled = net.unit(f"{path}.pooled", net.pool(f"{path}.pool", last, stride), width, (1, 1))
        last = net.concat(path, [first, short, long, pooled])
    net.classify(last)
    return net.profile()


def resnet(depths: Sequence[int] = (3, 4, 23, 3), *, seed: int = 0) -> Profile:
    """ResNet of bottleneck blocks `layerL.K`, ResNet-101 by default (its profile kept PipeDream's optimizer busy for
    over two minutes): three units, the addition of what the block took (through a convolution where shapes change) and
    an activation; minibatch 64 of 224x224. Few cuts: each block adds its own length, and twice at a downsampling.
    """
    net = Images("resnet", batch_size=64, seed=seed)
    last = net.pool("maxpool", net.unit("stem", net.image(3, 224), 64, (7, 7), 2), 2)
    for layer, depth in enumerate(depths, start=1):
        width = 32 * 2**layer
        for k in range(depth):
            path, stride = f"layer{layer}.{k}", 2 if k == 0 and layer > 1 else 1
            made = net.unit(f"{path}.unit1", last, width, (1, 1))
            made = net.unit(f"{path}.unit2", made, width, (3, 3), stride)
            made = net.norm(f"{path}.bn3", net.conv(f"{path}.conv3", made, 4 * width, (1, 1)))
            if k == 0:
                down = net.conv(f"{path}.downsample.0", last, 4 * width, (1, 1), stride)
                last = net.norm(f"{path}.downsample.1", down)
            last = net.relu(f"{path}.relu", net.plus(path, [made, last]))
    net.classify(last)
    return net.profile()


def gnmt(layers: int = 16, *, seed: int = 0) -> Profile:
    """Google's translation model as PipeDream profiled it (its node list, `gnmt8.graph.txt`, carried on to `layers`):
    half of them LSTMs of an encoder, half of a decoder, 1024 wide, minibatch 64 of 50 words. The first decoder layer
    attends to the encoder's output; its context is concatenated to what *every* later decoder layer takes, and the
    decoder's start state reaches every one of them through a `getitem` of its own. Residual additions from the third
    layer on. The target side can run beside the encoder, and the free `getitem`s of the start state may stand anywhere
    before their layers: that multiplies to 17,000 cuts for 16 layers. Outputs of LSTMs that nothing takes are left out.
    """
    net, rows, width, words = Net(f"gnmt{layers}", batch_size=64, seed=seed), 64 * 50, 1024, 32320
    out = 4 * rows * width

    def lstm(path: str, inputs: Sequence[str], take: int, op: str = "LSTM", times: float = 1.0) -> str:
        flops = 8 * rows * (take + width) * width * times
        return net.leaf(
            path,
            op,
            inputs,
            out * times,
            flops=flops,
            weights=16 * (take + width) * width * times,
            stash=6 * out * times,
        )

    def drop(path: str, source: str) -> str:
        return net.leaf(path, "Dropout", [source], net.bytes(source), stash=net.bytes(source) // 4)

    def embed(path: str, source: str) -> str:
        return net.leaf(path, "Embedding", [source], out, weights=4 * words * width, stash=8 * rows)

    source, lengths, target = net.input("source", 8 * rows), net.input("lengths", 8 * 64), net.input("target", 8 * rows)
    last = drop(
        "encoder.dropout", lstm("encoder.bidirectional", [embed("encoder.embedder", source), lengths], width, times=2)
    )
    skip = None
    for k in range(layers // 2 - 1):
        taken = last if k == 0 else drop(f"encoder.dropouts.{k}", last)
        made = lstm(f"encoder.layers.{k}", [taken], 2 * width if k == 0 else width)
        made = net.call("encoder", "getitem", [made], out, stash=0)
        skip, last = last, net.call("encoder", "add", [made, last], out, stash=0) if skip else made
    hidden = net.call("decoder", "hidden", [lengths], 0, stash=0)
    state = net.call("decoder", "getitem", [hidden], 0, stash=0)
    attention = lstm(
        "decoder.attention",
        [embed("decoder.embedder", target), state, last, lengths],
        2 * width,
        "RecurrentAttention",
        1.5,
    )
    last = net.call("decoder", "getitem", [attention], out, stash=0)
    context = net.call("decoder", "getitem", [attention], out, stash=0)
    for k in range(layers // 2 - 1):
        joined = net.call("decoder", "cat", [drop(f"decoder.dropouts.{k}", last), context], 2 * out, stash=0)
        state = net.call("decoder", "getitem", [hidden], 0, stash=0)
        made = lstm(f"decoder.layers.{k}", [joined, state], 2 * width)
        made = net.call("decoder", "getitem", [made], out, stash=0)
        last = net.call("decoder", "add", [made, last], out, stash=0) if k else made
    scores = net.leaf(
        "decoder.classifier",
        "Classifier",
        [last],
        4 * rows * words,
        flops=2 * rows * width * words,
        weights=4 * words * (width + 1),
    )
    net.loss([scores])
    return net.profile()


def transformer(nodes: int = 2000, *, parameters: float = 7e9, sequence: int = 1024, seed: int = 0) -> Profile:
    """A decoder-only language model of Llama's kind, in half precision, minibatch 1 of `sequence` tokens: as many
    layers `layers.K` of twenty operators as come nearest to `nodes`, and the width that gives about `parameters`.
    Query, key and value run in parallel, query and key through the rotary embedding, whose table is computed once and
    taken by every layer; the gate and up projections run in parallel; two residual additions a layer. The embedding
    is tied to the output layer, so the first and the last stage share it. A layer has 36 cuts, the whole model 3,600.
    """
    layers = max(1, round((nodes - 6) / 20))
    width = max(64, round((parameters / (12 * layers)) ** 0.5 / 64) * 64)
    words, heads, inner = 32000, width // 64, 8 * width // 3
    net = Net(f"transformer{nodes}", batch_size=1, seed=seed, flops_per_s=HALF_FLOPS_PER_S)
    out = 2 * sequence * width
    tokens = net.input("tokens", 8 * sequence)
    tied = 2 * words * width
    last = net.leaf("embedding", "Embedding", [tokens], out, weights=tied, stash=8 * sequence)
    table = net.call("", "rotary", [tokens], 4 * sequence * 64, stash=0, gradient=0)

    def linear(path: str, source: str, into: int) -> str:
        before = net.bytes(source) // (2 * sequence)
        return net.leaf(
            path, "Linear", [source], 2 * sequence * into, flops=2 * sequence * before * into, weights=2 * before * into
        )

    square, product = 2 * heads * sequence**2, 2 * sequence**2 * width
    for k in range(layers):
        own, attn, mlp = f"layers.{k}", f"layers.{k}.attn", f"layers.{k}.mlp"
        normed = net.leaf(f"{own}.norm1", "RMSNorm", [last], out, weights=2 * width)
        q, key, value = (linear(f"{attn}.{part}", normed, width) for part in "qkv")
        q, key = (net.call(attn, "rotate", [part, table], out, stash=0) for part in (q, key))
        scores = net.call(attn, "matmul", [q, key], square, flops=product)
        weights = net.call(attn, "softmax", [scores], square, stash=square)
        mixed = net.call(attn, "matmul", [weights, value], out, flops=product)
        made = net.leaf(f"{attn}.dropout", "Dropout", [linear(f"{attn}.out", mixed, width)], out, stash=out // 2)
        last = net.call(own, "add", [made, last], out, stash=0)
        normed = net.leaf(f"{own}.norm2", "RMSNorm", [last], out, weights=2 * width)
        gate, up = linear(f"{mlp}.gate", normed, inner), linear(f"{mlp}.up", normed, inner)
        gated = net.call(mlp, "mul", [net.call(mlp, "silu", [gate], net.bytes(gate)), up], net.bytes(up))
        made = net.leaf(f"{mlp}.dropout", "Dropout", [linear(f"{mlp}.down", gated, width)], out, stash=out // 2)
        last = net.call(own, "add", [made, last], out, stash=0)
    normed = net.leaf("norm", "RMSNorm", [last], out, weights=2 * width)
    head = net.leaf("head", "Linear", [normed], 2 * sequence * words, flops=2 * sequence * width * words, weights=tied)
    net.loss([head])
    return net.profile([SharedParameter(name="embedding.weight", bytes=tied, nodes=("embedding", "head"))])
