"""Models of tables, graphs, points and pairs."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from task import Task, adamw, both, classes, in_double, named, numbers
from torch import nn


class DeepFM(nn.Module):
    """Embeddings of several fields in one table, a factorisation machine, and a deep part."""

    def __init__(self, field_dims=(5, 7, 3), dim=4):
        super().__init__()
        self.embedding, self.fc = nn.Embedding(sum(field_dims), dim), nn.Embedding(sum(field_dims), 1)
        self.register_buffer("offsets", torch.tensor([0, *torch.tensor(field_dims[:-1]).cumsum(0).tolist()]))
        self.bias = nn.Parameter(torch.zeros(1))
        layers, size = [], len(field_dims) * dim
        for width in (16, 8):
            layers += [nn.Linear(size, width), nn.BatchNorm1d(width), nn.ReLU()]
            size = width
        self.mlp = nn.Sequential(*layers, nn.Linear(size, 1))

    def forward(self, x):
        x = x + self.offsets.unsqueeze(0)
        embedded = self.embedding(x)
        linear = torch.sum(self.fc(x), dim=1) + self.bias
        square_of_sum, sum_of_square = embedded.sum(dim=1) ** 2, (embedded**2).sum(dim=1)
        fm = 0.5 * (square_of_sum - sum_of_square).sum(dim=1, keepdim=True)
        return (linear + fm + self.mlp(embedded.flatten(1))).squeeze(1)


def click_loss(output, target):
    return F.binary_cross_entropy_with_logits(output, target.float())


class WideAndDeep(nn.Module):
    """A dict of categorical and continuous inputs, one table for each column, bags of tags."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleDict({"user": nn.Embedding(10, 4), "item": nn.Embedding(12, 4)})
        self.tags = nn.EmbeddingBag(8, 4, mode="mean")
        self.deep = nn.Sequential(nn.Linear(14, 16), nn.PReLU(), nn.Linear(16, 1))
        self.wide = nn.Linear(2, 1)

    def forward(self, batch):
        columns = [self.embeddings[name](batch[name]) for name in ("user", "item")]
        columns.append(self.tags(batch["tags"]))
        deep = self.deep(torch.cat([*columns, batch["continuous"]], dim=1))
        return (deep + self.wide(batch["continuous"])).squeeze(-1)


class GCN(nn.Module):
    """Graph convolutions with a dense adjacency matrix."""

    class Layer(nn.Module):
        def __init__(self, inputs, outputs):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.empty(inputs, outputs)), nn.Parameter(torch.zeros(outputs))
            stdv = 1.0 / math.sqrt(outputs)
            self.weight.data.uniform_(-stdv, stdv)

        def forward(self, x, adj):
            return torch.bmm(adj, torch.matmul(x, self.weight)) + self.bias

    def __init__(self):
        super().__init__()
        self.gc1, self.gc2, self.out = self.Layer(4, 8), self.Layer(8, 8), nn.Linear(8, 3)

    def forward(self, x, adj):
        adj = ((adj + adj.transpose(1, 2)) > 0).float() + torch.eye(adj.size(1), device=adj.device)
        degree = adj.sum(-1).pow(-0.5)
        adj = degree.unsqueeze(-1) * adj * degree.unsqueeze(-2)
        x = F.relu(self.gc1(x, adj))
        return self.out(F.relu(self.gc2(x, adj)).mean(1))


class GAT(nn.Module):
    """Graph attention, masked where there is no edge."""

    def __init__(self, width=8, heads=2):
        super().__init__()
        self.W = nn.ModuleList([nn.Linear(4, width, bias=False) for _ in range(heads)])
        self.a = nn.ParameterList([nn.Parameter(torch.randn(2 * width, 1) * 0.1) for _ in range(heads)])
        self.leakyrelu, self.out = nn.LeakyReLU(0.2), nn.Linear(heads * width, 3)

    def attention(self, W, a, x, adj):
        Wh = W(x)
        n = Wh.size(-1)
        e = self.leakyrelu(Wh @ a[:n] + (Wh @ a[n:]).transpose(1, 2))
        attention = torch.where(adj > 0, e, -9e15 * torch.ones_like(e))
        return F.elu(torch.matmul(F.softmax(attention, dim=2), Wh))

    def forward(self, x, adj):
        x = torch.cat([self.attention(W, a, x, adj) for W, a in zip(self.W, self.a, strict=True)], dim=2)
        return self.out(x.max(dim=1).values)


class MessagePassing(nn.Module):
    """Edges given as pairs of nodes, messages added by scatter, GRU updates."""

    def __init__(self, width=8):
        super().__init__()
        self.encode, self.message = nn.Linear(4, width), nn.Linear(2 * width, width)
        self.update, self.out = nn.GRUCell(width, width), nn.Linear(width, 1)

    def forward(self, x, edge_index):
        b, n, _ = x.shape
        h, (src, dst) = self.encode(x), edge_index.unbind(1)
        for _ in range(2):
            width = h.size(-1)
            source = h.gather(1, src.unsqueeze(-1).expand(-1, -1, width))
            target = torch.gather(h, 1, dst[..., None].expand(-1, -1, width))
            messages = F.relu(self.message(torch.cat([source, target], -1)))
            total = torch.zeros_like(h).scatter_add_(1, dst.unsqueeze(-1).expand_as(messages), messages)
            h = self.update(total.view(b * n, -1), h.view(b * n, -1)).view(b, n, -1)
        return self.out(h).sum(1).squeeze(-1)


class PointNet(nn.Module):
    class TNet(nn.Module):
        def __init__(self, k=3):
            super().__init__()
            self.conv, self.bn, self.fc, self.k = nn.Conv1d(k, 8, 1), nn.BatchNorm1d(8), nn.Linear(8, k * k), k

        def forward(self, x):
            batchsize = x.size()[0]
            x = torch.max(F.relu(self.bn(self.conv(x))), 2, keepdim=True)[0].view(-1, 8)
            iden = torch.eye(self.k).flatten().view(1, self.k * self.k).repeat(batchsize, 1)
            return (self.fc(x) + iden.to(x.device)).view(-1, self.k, self.k)

    def __init__(self):
        super().__init__()
        self.stn, self.conv1, self.bn1 = self.TNet(), nn.Conv1d(3, 8, 1), nn.BatchNorm1d(8)
        self.conv2, self.fc = nn.Conv1d(8, 16, 1), nn.Linear(16, 3)

    def forward(self, x):
        trans = self.stn(x)
        x = torch.bmm(x.transpose(2, 1), trans).transpose(2, 1)
        x = self.conv2(F.relu(self.bn1(self.conv1(x))))
        return F.log_softmax(self.fc(torch.max(x, 2)[0]), dim=1), trans


def pointnet_loss(output, target):
    prediction, trans = output
    identity = torch.eye(3)[None]
    regularizer = torch.mean(torch.norm(torch.bmm(trans, trans.transpose(2, 1)) - identity, dim=(1, 2)))
    return F.nll_loss(prediction, target) + 0.001 * regularizer


class EdgeConv(nn.Module):
    """Nearest neighbours found anew in each layer (DGCNN)."""

    def __init__(self, k=3):
        super().__init__()
        self.k, self.conv = k, nn.Sequential(nn.Conv2d(6, 8, 1, bias=False), nn.BatchNorm2d(8), nn.LeakyReLU(0.2))
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        points = x.transpose(1, 2)
        idx = (-torch.cdist(points, points)).topk(self.k, dim=-1)[1]
        batch = torch.arange(x.size(0), device=x.device).view(-1, 1, 1)
        neighbours = points[batch, idx]
        centre = points.unsqueeze(2).expand_as(neighbours)
        edges = torch.cat((neighbours - centre, centre), dim=3).permute(0, 3, 1, 2)
        return self.fc(self.conv(edges).max(dim=-1)[0].mean(-1))


class DeepSets(nn.Module):
    """Sets of different sizes, as a mask."""

    def __init__(self):
        super().__init__()
        self.phi, self.rho = nn.Sequential(nn.Linear(2, 8), nn.ELU()), nn.Sequential(nn.Linear(8, 8), nn.ELU())
        self.out = nn.Bilinear(8, 8, 1)

    def forward(self, x, mask):
        h = self.phi(x) * mask.unsqueeze(-1)
        mean = h.sum(1) / mask.sum(1, keepdim=True).clamp(min=1)
        peak = h.masked_fill(mask.unsqueeze(-1) == 0, -1e4).amax(1)
        return self.out(self.rho(mean), self.rho(peak)).squeeze(-1)


class FiLM(nn.Module):
    """Features scaled and shifted by a question."""

    def __init__(self):
        super().__init__()
        self.question, self.film = nn.GRU(4, 8, batch_first=True), nn.Linear(8, 2 * 2 * 8)
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.convs, self.bns = nn.ModuleList(), nn.ModuleList()
        for _ in range(2):
            self.convs.append(nn.Conv2d(8, 8, 3, padding=1))
            self.bns.append(nn.BatchNorm2d(8, affine=False))
        self.fc = nn.Linear(8, 3)

    def forward(self, image, question):
        film = self.film(self.question(question)[1][0]).view(-1, 2, 2, 8)
        x = self.stem(image)
        for i, (conv, bn) in enumerate(zip(self.convs, self.bns, strict=True)):
            gamma, beta = film[:, i, 0, :, None, None], film[:, i, 1, :, None, None]
            x = x + F.relu(bn(conv(x)) * (1 + gamma) + beta)
        return self.fc(x.amax((2, 3)))


class HyperNetwork(nn.Module):
    """One network makes the weights of another, for each sample."""

    def __init__(self):
        super().__init__()
        self.hyper, self.scale = nn.Linear(3, 4 * 8 + 8), nn.Linear(3, 8)

    def forward(self, x, context):
        weights, bias = self.hyper(context).split([32, 8], dim=-1)
        h = torch.baddbmm(bias.unsqueeze(1), x.unsqueeze(1), weights.view(-1, 4, 8)).squeeze(1)
        return (torch.tanh(h) * self.scale(context)).sum(-1)


class KAN(nn.Module):
    """Splines on the edges, after efficient-kan."""

    class Layer(nn.Module):
        def __init__(self, inputs, outputs, grid=4, order=3):
            super().__init__()
            self.order = order
            h = 2 / grid
            knots = (torch.arange(-order, grid + order + 1) * h - 1).expand(inputs, -1).contiguous()
            self.register_buffer("grid", knots)
            self.base_weight = nn.Parameter(torch.randn(outputs, inputs) * 0.3)
            self.spline_weight = nn.Parameter(torch.randn(outputs, inputs, grid + order) * 0.1)

        def b_splines(self, x):
            assert x.dim() == 2
            grid, x = self.grid, x.unsqueeze(-1)
            bases = ((x >= grid[:, :-1]) & (x < grid[:, 1:])).to(x.dtype)
            for k in range(1, self.order + 1):
                bases = ((x - grid[:, : -(k + 1)]) / (grid[:, k:-1] - grid[:, : -(k + 1)]) * bases[:, :, :-1]) + (
                    (grid[:, k + 1 :] - x) / (grid[:, k + 1 :] - grid[:, 1:(-k)]) * bases[:, :, 1:]
                )
            return bases.contiguous()

        def forward(self, x):
            spline = F.linear(
                self.b_splines(x).view(x.size(0), -1), self.spline_weight.view(self.spline_weight.size(0), -1)
            )
            return F.linear(F.silu(x), self.base_weight) + spline

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([self.Layer(4, 6), self.Layer(6, 3)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class CLIP(nn.Module):
    """Two towers and a temperature, and the logits of every pair of the minibatch."""

    def __init__(self):
        super().__init__()
        self.visual = nn.Sequential(nn.Conv2d(1, 8, 3, 2), nn.GELU(), nn.Flatten(), nn.Linear(72, 8))
        self.text, self.text_projection = nn.Embedding(20, 8), nn.Parameter(torch.randn(8, 8) * 0.3)
        self.logit_scale = nn.Parameter(torch.ones([]) * math.log(1 / 0.07))

    def forward(self, image, text):
        image_features = self.visual(image)
        text_features = self.text(text).mean(dim=1) @ self.text_projection
        image_features = image_features / image_features.norm(dim=1, keepdim=True)
        text_features = text_features / text_features.norm(dim=1, keepdim=True)
        logits_per_image = self.logit_scale.exp() * image_features @ text_features.t()
        return logits_per_image, logits_per_image.t()


def clip_loss(output, _):
    labels = torch.arange(output[0].shape[0])
    return (F.cross_entropy(output[0], labels) + F.cross_entropy(output[1], labels)) / 2


class Tasks(NamedTuple):
    """A namedtuple as output."""

    depth: torch.Tensor
    label: torch.Tensor
    log_vars: torch.Tensor


class MultiTask(nn.Module):
    """Two tasks weighed by uncertainties that are learnt, and returned for the loss."""

    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.heads = nn.ModuleDict({"depth": nn.Linear(16, 1), "label": nn.Linear(16, 3)})
        self.log_vars = nn.Parameter(torch.zeros(2))

    def forward(self, x):
        x = self.trunk(x)
        outputs = {name: head(x) for name, head in self.heads.items()}
        return Tasks(outputs["depth"].squeeze(-1), outputs["label"], self.log_vars)


def uncertainty_loss(output, target):
    losses = torch.stack([F.mse_loss(output.depth, target["depth"]), F.cross_entropy(output.label, target["label"])])
    return (torch.exp(-output.log_vars) * losses + output.log_vars).sum()


class Maxout(nn.Module):
    """Maxout, an embedding by periods (PLR), and attention over columns."""

    def __init__(self):
        super().__init__()
        self.coefficients = nn.Parameter(torch.randn(4, 3))
        self.column, self.fc1, self.fc2 = nn.Linear(6, 8), nn.Linear(32, 2 * 3 * 4), nn.Linear(8, 2)

    def forward(self, x):
        v = 2 * math.pi * self.coefficients * x[..., None]
        x = F.relu(self.column(torch.cat([torch.cos(v), torch.sin(v)], -1)))
        weights = torch.softmax((x @ x.mT) / 8**0.5, dim=-1)
        h = self.fc1((weights @ x).flatten(1)).reshape(-1, 8, 3)
        return self.fc2(h.max(dim=2)[0])


class NBeats(nn.Module):
    """Forecasts added up, and what they explain taken from the input."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.theta = nn.Sequential(nn.Linear(8, 16), nn.ReLU()), nn.Linear(16, 6)
            t = torch.arange(12) / 12
            self.register_buffer("basis", torch.stack([t**i for i in range(6)]))

        def forward(self, x):
            out = self.theta(self.fc(x)) @ self.basis
            return out[:, :8], out[:, 8:]

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([self.Block() for _ in range(3)])

    def forward(self, x):
        mean = x.mean(1, keepdim=True)
        residual, forecast = x - mean, 0
        for block in self.blocks:
            backcast, block_forecast = block(residual)
            residual = residual - backcast
            forecast = forecast + block_forecast
        return forecast + mean


def quantile_loss(output, target):
    error = target - output
    return torch.max(0.9 * error, (0.9 - 1) * error).mean()


class LoRA(nn.Module):
    """Frozen weights and adapters of low rank; only these are trained."""

    class Layer(nn.Linear):
        def __init__(self, inputs, outputs, rank=2, alpha=4):
            super().__init__(inputs, outputs)
            self.lora_A, self.lora_B = nn.Parameter(torch.randn(rank, inputs)), nn.Parameter(torch.zeros(outputs, rank))
            self.scaling = alpha / rank
            self.weight.requires_grad = False

        def forward(self, x):
            result = F.linear(x, self.weight, self.bias)
            return result + (x @ self.lora_A.transpose(0, 1) @ self.lora_B.transpose(0, 1)) * self.scaling

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(self.Layer(8, 16), nn.Tanh(), self.Layer(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def forward(self, x):
        return self.net(x)


NODES = both(numbers(5, 4), lambda g: (torch.rand(5, 5, generator=g) > 0.5).float())
MODELS = {
    "deep_fm": in_double(
        Task(DeepFM, lambda g: torch.cat([classes(n, 1)(g) for n in (5, 7, 3)]), classes(2), click_loss)
    ),
    "wide_and_deep": Task(
        WideAndDeep,
        both(named(user=classes(10), item=classes(12), tags=classes(8, 3), continuous=numbers(2))),
        classes(2),
        click_loss,
    ),
    "gcn": Task(GCN, NODES, classes(3)),
    "gat": Task(GAT, NODES, classes(3)),
    "message_passing": Task(MessagePassing, both(numbers(5, 4), classes(5, 2, 8)), numbers(), F.mse_loss),
    "pointnet": Task(PointNet, numbers(3, 10), classes(3), pointnet_loss),
    "edge_conv": Task(EdgeConv, numbers(3, 10), classes(3)),
    "deep_sets": Task(DeepSets, both(numbers(6, 2), classes(2, 6)), numbers(), F.huber_loss),
    "film": Task(FiLM, both(numbers(1, 6, 6), numbers(5, 4)), classes(3)),
    "hyper_network": Task(HyperNetwork, both(numbers(4), numbers(3)), numbers(), F.mse_loss),
    "kan": Task(KAN, numbers(4), classes(3), optimizer=adamw),
    "clip": Task(CLIP, both(numbers(1, 8, 8), classes(20, 4)), classes(2), clip_loss, adamw),
    "multi_task": Task(MultiTask, numbers(8), named(depth=numbers(), label=classes(3)), uncertainty_loss),
    "maxout": Task(Maxout, numbers(4), classes(2)),
    "n_beats": Task(NBeats, numbers(8), numbers(4), quantile_loss),
    "lora": Task(LoRA, numbers(8), classes(3)),
}
