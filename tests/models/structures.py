"""What models do beside computing: hooks, modes, wrappers, parts that are frozen, shared, pruned or made later."""

import copy
import math
import random
from collections import OrderedDict
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import torch.nn.utils.prune as prune
from task import Task, both, classes, in_double, named, numbers
from torch import nn
from torch.utils.checkpoint import checkpoint


def perceptron(inputs=8, width=12, outputs=3):
    return nn.Sequential(
        nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, outputs)
    )


class Distillation(nn.Module):
    """A frozen teacher, kept in evaluation mode by an overridden train()."""

    def __init__(self):
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Dropout(0.5), nn.Linear(16, 3))
        self.student = perceptron()
        for p in self.teacher.parameters():
            p.requires_grad_(False)
        self.teacher.eval()

    def train(self, mode=True):
        super().train(mode)
        self.teacher.eval()
        return self

    def forward(self, x):
        with torch.no_grad():
            teacher_logits = self.teacher(x)
        return self.student(x), teacher_logits


def distillation_loss(output, target):
    student, teacher = output
    soft = F.kl_div(F.log_softmax(student / 2, dim=-1), F.softmax(teacher / 2, dim=-1), reduction="batchmean") * 4
    return 0.5 * soft + 0.5 * F.cross_entropy(student, target)


class TwoWays(nn.Module):
    """Goes another way for large activations, where torch.export cannot see."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(12, 12)

    def forward(self, x):
        y = self.linear(x)
        return y.tanh() if y.abs().max().item() > 1 else y


class UntrainedPart(nn.Module):
    """Calls an opaque module without gradients, which is not frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 12), TwoWays(), perceptron(12)

    def forward(self, x):
        x = self.first(x).relu()
        with torch.no_grad():
            factor = self.middle(x)
        return self.last(x * factor)


class LossesInForward(nn.Module):
    """Computes losses itself; torch has most of these functions twice, with different defaults."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.criterion = nn.BCEWithLogitsLoss(pos_weight=torch.full((12,), 0.5))

    def forward(self, x):
        a = self.first(x).tanh()
        b = self.second(a)
        sign = a.detach()[:, 0].sign()
        losses = [
            self.criterion(b, a.sigmoid()),
            F.hinge_embedding_loss(a[:, 1], sign),
            F.margin_ranking_loss(a[:, 2], b[:, 2], sign, margin=0.1),
            F.cosine_embedding_loss(a, b, sign),
            F.triplet_margin_loss(a, b, a.flip(1), swap=True),
            F.kl_div(b.log_softmax(1), a.softmax(1), reduction="batchmean"),
            F.poisson_nll_loss(b, a.abs()),
            F.huber_loss(a, b, delta=0.3),
            F.soft_margin_loss(b, a.detach().sign(), reduction="sum"),
        ]
        return self.last(b), sum(losses)


def with_losses(output, target):
    return F.cross_entropy(output[0], target) + 0.01 * output[1]


class Overwritten(nn.Module):
    """Writes over all of a layer's output, so that the layer gets a gradient of zero; its weights decay."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.lost, self.lost_too = (nn.Linear(8, 8) for _ in range(4))
        self.last = perceptron()

    def forward(self, x):
        x = self.first(x).relu()
        y, z = self.lost(x), self.lost_too(x)
        y.copy_(self.second(x))
        z[:] = y[:, :1]
        x = x * 2
        x.copy_(y.mean(1, keepdim=True))
        return self.last(y * z + x)


class FrozenBatchNorm(nn.Module):
    """Fine-tuning: the backbone's batch norms stay in evaluation mode while it trains."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        )
        self.head = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 3))

    def train(self, mode=True):
        super().train(mode)
        for module in self.backbone.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
                module.weight.requires_grad = False
                module.bias.requires_grad = False
        return self

    def forward(self, x):
        return self.head(self.backbone(x).mean((2, 3)))


def frozen_backbone():
    """A backbone put into evaluation mode when the model is built; only its head is trained."""
    model = nn.Sequential(OrderedDict(backbone=nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())))
    for p in model.backbone.parameters():
        p.requires_grad = False
    model.backbone.eval()
    model.add_module("head", nn.Linear(16, 3))
    return model


class FrozenBatchNorm2d(nn.Module):
    """As torchvision's: buffers only."""

    def __init__(self, channels):
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.1), ("running_var", 0.9)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x):
        w, b = self.weight.reshape(1, -1, 1, 1), self.bias.reshape(1, -1, 1, 1)
        rv, rm = self.running_var.reshape(1, -1, 1, 1), self.running_mean.reshape(1, -1, 1, 1)
        scale = w * (rv + 1e-5).rsqrt()
        return x * scale + (b - rm * scale)


def frozen_statistics():
    return nn.Sequential(nn.Conv2d(3, 8, 3), FrozenBatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 3))


class MomentumContrast(nn.Module):
    """MoCo: a second encoder follows the first one, and a queue of keys in a buffer."""

    def __init__(self, dim=4, size=16, m=0.9, T=0.2):
        super().__init__()
        self.m, self.T, self.K = m, T, size
        self.encoder_q = perceptron(outputs=dim)
        self.encoder_k = copy.deepcopy(self.encoder_q)
        for p in self.encoder_k.parameters():
            p.requires_grad = False
        self.register_buffer("queue", F.normalize(torch.randn(dim, size), dim=0))

    @torch.no_grad()
    def _momentum_update_key_encoder(self):
        for param_q, param_k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            param_k.data = param_k.data * self.m + param_q.data * (1.0 - self.m)

    def forward(self, im_q, im_k):
        q = F.normalize(self.encoder_q(im_q), dim=1)
        with torch.no_grad():
            self._momentum_update_key_encoder()
            k = F.normalize(self.encoder_k(im_k), dim=1)
        l_pos = torch.einsum("nc,nc->n", [q, k]).unsqueeze(-1)
        l_neg = torch.einsum("nc,ck->nk", [q, self.queue.clone().detach()])
        logits = torch.cat([l_pos, l_neg], dim=1) / self.T
        self.queue[:] = torch.cat([k.T, self.queue], dim=1)[:, : self.K]
        return logits


def moco_loss(logits, _):
    return F.cross_entropy(logits, torch.zeros(logits.shape[0], dtype=torch.long))


class BYOL(nn.Module):
    """A target network in buffers, which follows the online one in training."""

    def __init__(self):
        super().__init__()
        self.online, self.predictor = nn.Linear(8, 4), nn.Linear(4, 4)
        self.register_buffer("target_weight", self.online.weight.detach().clone())
        self.register_buffer("target_bias", self.online.bias.detach().clone())

    def forward(self, view1, view2):
        prediction = self.predictor(self.online(view1))
        with torch.no_grad():
            if self.training:
                self.target_weight.lerp_(self.online.weight, 0.1)
                self.target_bias.lerp_(self.online.bias, 0.1)
            projection = F.linear(view2, self.target_weight, self.target_bias)
        return F.normalize(prediction, dim=-1), F.normalize(projection, dim=-1)


def byol_loss(output, _):
    return (2 - 2 * (output[0] * output[1]).sum(dim=-1)).mean()


class GradReverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lambd):
        ctx.lambd = lambd
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output.neg() * ctx.lambd, None


class DomainAdversarial(nn.Module):
    """A gradient reversed by a function of its own."""

    def __init__(self):
        super().__init__()
        self.feature, self.classifier, self.domain = nn.Linear(8, 12), nn.Linear(12, 3), nn.Linear(12, 2)

    def forward(self, x):
        feature = torch.relu(self.feature(x))
        return {"label": self.classifier(feature), "domain": self.domain(GradReverse.apply(feature, 0.3))}


def adversarial_loss(output, target):
    return F.cross_entropy(output["label"], target["label"]) + F.cross_entropy(output["domain"], target["domain"])


class Binarize(torch.autograd.Function):
    """The sign, with a straight-through gradient within ±1."""

    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return input.sign()

    @staticmethod
    def backward(ctx, grad_output):
        (input,) = ctx.saved_tensors
        return grad_output * (input.abs() <= 1).to(grad_output.dtype)


class BinaryNet(nn.Module):
    class BinaryLinear(nn.Linear):
        def forward(self, x):
            return F.linear(x, Binarize.apply(self.weight), self.bias)

    def __init__(self):
        super().__init__()
        self.fc1, self.bn1 = self.BinaryLinear(8, 16), nn.BatchNorm1d(16)
        self.fc2, self.bn2, self.fc3 = self.BinaryLinear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 3)

    def forward(self, x):
        x = Binarize.apply(self.bn1(self.fc1(x)))
        return self.fc3(F.hardtanh(self.bn2(self.fc2(x))))


class FakeQuantized(nn.Module):
    """Weights rounded to 4 bits, the gradient straight through by detach()."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 3)])

    @staticmethod
    def quantize(w):
        scale = w.detach().abs().max() / 7
        return w + (torch.clamp(torch.round(w / scale), -8, 7) * scale - w).detach()

    def forward(self, x):
        for i, layer in enumerate(self.layers):
            x = F.linear(x, self.quantize(layer.weight), layer.bias)
            if i < len(self.layers) - 1:
                x = F.relu6(x)
        return x


def weight_normalised():
    """The new weight_norm, a parametrisation, and an orthogonal one."""
    wn, orthogonal = torch.nn.utils.parametrizations.weight_norm, torch.nn.utils.parametrizations.orthogonal
    return nn.Sequential(
        wn(nn.Linear(8, 12)), nn.Tanh(), orthogonal(nn.Linear(12, 12)), nn.Tanh(), wn(nn.Linear(12, 3))
    )


class Symmetric(nn.Module):
    def forward(self, X):
        return X.triu() + X.triu(1).transpose(-1, -2)


def parametrized():
    """A parametrisation of the user's own."""
    layer = nn.Linear(12, 12)
    torch.nn.utils.parametrize.register_parametrization(layer, "weight", Symmetric())
    return nn.Sequential(nn.Linear(8, 12), nn.ReLU(), layer, nn.ReLU(), nn.Linear(12, 3))


def pruned():
    """A fifth of the weights masked, as a lottery ticket is trained."""
    model = perceptron()
    for module in model:
        if isinstance(module, nn.Linear):
            prune.l1_unstructured(module, name="weight", amount=0.2)
    return model


class Hooked(nn.Module):
    """Features taken by forward hooks, an input changed by a pre-hook."""

    def __init__(self):
        super().__init__()
        self.net = perceptron()
        self.features = {}
        for name in ("0", "2"):
            self.net.get_submodule(name).register_forward_hook(self._keep(name))
        self.net[4].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        self.head = nn.Linear(24, 3)

    def _keep(self, name):
        def hook(module, inputs, output):
            self.features[name] = output

        return hook

    def forward(self, x):
        out = self.net(x)
        return out + self.head(torch.cat([self.features["0"], self.features["2"]], dim=1))


class HookedAtFirst(nn.Module):
    """Hidden states collected by hooks that the first forward registers, as transformers' models do."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 6)
        self.heads = nn.ModuleList([nn.Linear(12, 3), nn.Linear(6, 3)])
        self.collected = []

    def forward(self, x):
        if not getattr(self, "is_hooked", False):
            for layer in (self.first, self.second):
                layer.register_forward_hook(lambda module, inputs, output: self.collected.append(output))
            self.is_hooked = True
        self.collected = []
        self.second(torch.relu(self.first(x)))
        return sum(head(states) for head, states in zip(self.heads, self.collected, strict=True))


class CompiledPart(nn.Module):
    """A part of the model goes through torch.compile."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.compile(nn.Sequential(nn.Linear(8, 12), nn.ReLU()), backend="eager")
        self.head = nn.Linear(12, 3)

    def forward(self, x):
        return self.head(self.encoder(x))


class Scripted(nn.Module):
    """A function and a module under torch.jit.script, as activations of old are written."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 3)
        self.inner = torch.jit.script(nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12)))

    def forward(self, x):
        return self.fc2(self.inner(mish(self.fc1(x))))


@torch.jit.script
def mish(x):
    return x * torch.tanh(F.softplus(x))


class LazyTable(nn.Module):
    """A table of positions made at the first forward, and a buffer registered then."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2, self.table = nn.Linear(4, 8), nn.Linear(8, 3), None

    def forward(self, x):
        if self.table is None:
            positions = torch.arange(x.shape[1]).unsqueeze(1) / 10000 ** (torch.arange(4) / 4)
            self.table = torch.sin(positions)
        return self.fc2(F.relu(self.fc1(x + self.table)).mean(1))


def lazy():
    """Lazy modules, made whole by a first call."""
    model = nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(3))
    model(torch.zeros(2, 3, 8, 8))
    return model


class RunningNorm(nn.Module):
    """Inputs normalised by statistics of all that came before, in buffers, as in reinforcement learning."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("var", torch.ones(8))
        self.register_buffer("count", torch.tensor(1e-4))
        self.actor, self.critic = nn.Linear(8, 4), nn.Linear(8, 1)

    def update(self, x):
        batch_mean, batch_var, batch_count = x.mean(0), x.var(0, unbiased=False), x.shape[0]
        delta, total = batch_mean - self.mean, self.count + batch_count
        m2 = self.var * self.count + batch_var * batch_count + delta**2 * self.count * batch_count / total
        self.mean, self.var, self.count = self.mean + delta * batch_count / total, m2 / total, total

    def forward(self, x):
        if self.training:
            self.update(x)
        x = torch.clamp((x - self.mean) / torch.sqrt(self.var + 1e-8), -5, 5)
        return self.actor(x), self.critic(x).squeeze(-1)


def actor_critic_loss(output, target):
    logits, value = output
    chosen = F.log_softmax(logits, -1).gather(1, target["action"][:, None]).squeeze(1)
    advantage = (target["return"] - value).detach()
    entropy = torch.distributions.Categorical(logits=logits).entropy().mean()
    return -(chosen * advantage).mean() + F.mse_loss(value, target["return"]) - 0.01 * entropy


class SparseTable(nn.Module):
    """Looks words up by the function, whose gradient is to be sparse."""

    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.randn(20, 8))

    def forward(self, words):
        return F.embedding(words, self.table, sparse=True).sum(1)


class LateCentering(nn.Module):
    """Subtracts a mean that it assigns to a buffer, from the sixth minibatch on."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        if self.training:
            self.calls = self.calls + 1
            self.mean = torch.where(self.calls > 5, 0.9 * self.mean + 0.1 * x.detach().mean(0), self.mean)
        return x - self.mean


class Warming(nn.Module):
    """A weight that grows with the number of calls, counted in a buffer."""

    def __init__(self):
        super().__init__()
        self.net, self.side = perceptron(), nn.Linear(8, 3)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        if self.training:
            self.calls += 1
        return self.net(x) + torch.clamp(self.calls / 20, max=1.0) * self.side(x)


class BatchRenorm(nn.Module):
    """Batch renormalisation, its limits moving with a counter."""

    def __init__(self, features=8, momentum=0.1):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, features), nn.Linear(features, 3)
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))
        self.register_buffer("running_mean", torch.zeros(features))
        self.register_buffer("running_std", torch.ones(features))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))
        self.momentum = momentum

    @property
    def rmax(self):
        return (2 / 35 * self.num_batches_tracked + 25 / 35).clamp_(1.0, 3.0)

    def norm(self, x):
        if self.training:
            mean, std = x.mean(0), x.std(0, unbiased=False) + 1e-3
            r = (std.detach() / self.running_std).clamp_(1 / self.rmax, self.rmax)
            d = ((mean.detach() - self.running_mean) / self.running_std).clamp_(-5, 5)
            x = (x - mean) / std * r + d
            self.running_mean += self.momentum * (mean.detach() - self.running_mean)
            self.running_std += self.momentum * (std.detach() - self.running_std)
            self.num_batches_tracked += 1
        else:
            x = (x - self.running_mean) / self.running_std
        return self.weight * x + self.bias

    def forward(self, x):
        return self.fc2(F.relu(self.norm(self.fc1(x))))


@dataclass
class Answer:
    loss: torch.Tensor
    logits: torch.Tensor


class WithLabels(nn.Module):
    """Computes its loss itself, from labels among its inputs, as Hugging Face's models do."""

    def __init__(self):
        super().__init__()
        self.net, self.criterion = perceptron(), nn.CrossEntropyLoss()

    def forward(self, pixel_values, labels=None):
        logits = self.net(pixel_values)
        loss = None
        if labels is not None:
            loss = self.criterion(logits.view(-1, 3), labels.view(-1))
        return Answer(loss=loss, logits=logits)


def own_loss(output, _):
    return output.loss


class EarlyExits(nn.Module):
    """A list of answers, each deeper than the one before, and *args."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.exits = nn.ModuleDict({f"exit_{i}": nn.Linear(8, 3) for i in range(3)})

    def forward(self, *inputs):
        x, outputs = sum(inputs), []
        for block, name in zip(self.blocks, self.exits, strict=True):
            x = block(x)
            outputs.append(self.exits[name](x))
        return outputs


def deep_supervision(outputs, target):
    return sum(F.cross_entropy(output, target) * 0.5**i for i, output in enumerate(reversed(outputs)))


class Adaptive(nn.Module):
    """Iterates until the values stop changing: a loop over data inside of a module."""

    class Solver(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.W = nn.Linear(dim, dim, bias=False)
            self.W.weight.data *= 0.3

        def forward(self, x):
            z = torch.zeros_like(x)
            for _ in range(20):
                new = torch.tanh(self.W(z) + x)
                if (new - z).abs().max() < 1e-3:
                    break
                z = new
            return z

    def __init__(self):
        super().__init__()
        self.inject, self.solver, self.out = nn.Linear(8, 8), self.Solver(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.solver(self.inject(x)))


class Tree(nn.Module):
    """A soft decision tree, recursive modules."""

    class Node(nn.Module):
        def __init__(self, depth):
            super().__init__()
            self.gate = nn.Linear(8, 1)
            branch = lambda: Tree.Node(depth - 1) if depth > 1 else nn.Linear(8, 3)  # noqa: E731
            self.left, self.right = branch(), branch()

        def forward(self, x):
            p = torch.sigmoid(self.gate(x))
            return p * self.left(x) + (1 - p) * self.right(x)

    def __init__(self):
        super().__init__()
        self.root = self.Node(2)

    def forward(self, x):
        return self.root(x)


class DoubleHead(nn.Module):
    """In double precision, with a Sequential that is sliced and iterated over."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
        self.norm, self.out = nn.InstanceNorm1d(8), nn.Linear(8, 3)
        self.double()

    def forward(self, x):
        x = x.double()
        x = self.net[:2](x)
        for layer in self.net[2:]:
            x = F.softsign(layer(x))
        return self.out(self.norm(x.unsqueeze(1)).squeeze(1))


class Tied(nn.Module):
    """An autoencoder whose decoder is the encoder, upside down, and layers that are one object twice."""

    def __init__(self):
        super().__init__()
        shared = nn.Linear(8, 8)
        self.layers = nn.ModuleList([shared, nn.Linear(8, 8), shared])
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x):
        h = x
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return F.linear(h, self.layers[1].weight.t(), self.bias)


class MixedPrecision(nn.Module):
    """Autocast written into the model."""

    def __init__(self):
        super().__init__()
        self.net, self.out = perceptron(outputs=8), nn.Linear(8, 3)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.net(x)
        return self.out(x.float())


class Ensemble(nn.Module):
    """Several models called as one, by torch.func over stacked parameters."""

    def __init__(self, members=3):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(members, 8, 3) * 0.3)
        self.temperature = nn.Parameter(torch.zeros(members))

    def forward(self, x):
        logits = torch.vmap(lambda w, t: x @ w / t.exp())(self.weight, self.temperature)
        return torch.logsumexp(logits.log_softmax(-1), 0) - math.log(len(logits))


def layerwise(named_parameters):
    """Learning rates that fall with the depth of a layer, by its name."""
    groups = [{"params": [p], "lr": 0.02 * 0.5 ** name.count("1")} for name, p in named_parameters if p.requires_grad]
    return torch.optim.SGD(groups, lr=0.02, momentum=0.9)


INPUT, CLASS = numbers(8), classes(3)


class SharedNorm(nn.Module):
    """A batch norm that is called under two names, whose statistics are one."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm = nn.BatchNorm1d(8)
        self.norm_again = self.norm

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return self.third(self.norm_again(self.second(x)).relu())


class SharedMemory(nn.Module):
    """An autoencoder whose decoder has the encoder's weight, transposed, and which looks at it in a buffer, too."""

    def __init__(self):
        super().__init__()
        self.first, self.encoder = nn.Linear(8, 12), nn.Linear(12, 4)
        self.decoder, self.last = nn.Linear(4, 12), nn.Linear(12, 8)
        self.decoder.weight = nn.Parameter(self.encoder.weight.t())
        self.register_buffer("scale", self.encoder.weight.detach()[0, :4])
        self.row = self.encoder.weight.detach()[1]

    def forward(self, x):
        code = self.encoder(torch.tanh(self.first(x))) + self.scale
        return self.last(torch.tanh(self.decoder(code)) + self.row)


class Recomputed(nn.Module):
    """Dropout that is computed again before the backward."""

    def __init__(self):
        super().__init__()
        self.fc, self.dropout = nn.Linear(8, 8), nn.Dropout(0.3)

    def forward(self, x):
        return checkpoint(lambda x: self.dropout(torch.relu(self.fc(x))), x, use_reentrant=False)


class LayerDrop(nn.Module):
    """Layers that are skipped at random, by Python's random; one of them is computed again before its backward."""

    def __init__(self):
        super().__init__()
        self.layers, self.again = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)]), Recomputed()

    def forward(self, x):
        for layer in self.layers:
            if self.training and random.random() < 0.5:
                continue
            x = x + torch.tanh(layer(x))
        return self.again(x)


class DroppedWeight(nn.Module):
    """DropConnect on a weight that is not contiguous; then dropout of what was made contiguous, in place."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(37, 8).t())

    def forward(self, x):
        x = (x @ F.dropout(self.weight, 0.2, self.training)).t().contiguous()
        return F.dropout(x, 0.2, self.training, inplace=True).t()


class SharedStatistics(nn.Module):
    """Two batch norms with their own weights, whose statistics are one."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.norm, self.norm_again = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        for name, buffer in self.norm.named_buffers():
            setattr(self.norm_again, name, buffer)

    def forward(self, x):
        x = self.norm(self.first(x)).relu()
        return self.third(self.norm_again(self.second(x)).relu())


class HookedBackward(nn.Module):
    """Gradients changed by hooks of modules, in front of them and behind them, and by one of an activation."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), perceptron(8, 8, 8), nn.Linear(8, 3)
        self.doubling = DoubledBackward()
        self.second.register_full_backward_hook(lambda module, inward, outward: (inward[0] * 2,))
        self.last.register_full_backward_pre_hook(lambda module, outward: (outward[0] * 0.5,))

    def forward(self, x):
        return self.last(self.doubling(self.second(torch.tanh(self.first(x)))))


class DoubledBackward(nn.Module):
    """Doubles a gradient."""

    def forward(self, x):
        x = torch.tanh(x)
        if torch.is_grad_enabled():
            x.register_hook(lambda gradient: gradient * 2)
        return x


class MissingGradients(nn.Module):
    """Parameters that get no gradient, always or in some minibatches; a gradient of zero would decay them."""

    def __init__(self):
        super().__init__()
        self.teacher, self.unused = nn.Linear(8, 3), nn.Linear(8, 8)
        self.first, self.sometimes, self.stopped = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.gate, self.last = Gate(), perceptron(8, 8, 3)

    def forward(self, x):
        taught, sometimes, stopped = self.teacher(x), self.sometimes(x), self.stopped(x)
        y = self.gate(torch.tanh(self.first(x)), sometimes)
        return self.last(torch.tanh(Stop.apply(y, stopped))), taught.detach() + self.unused(x).detach().sum()


class ContrastiveQueue(nn.Module):
    """A queue like MoCo's: forward writes into parts of buffers, without a gradient."""

    def __init__(self):
        super().__init__()
        self.encoder, self.head = nn.Linear(8, 8), nn.Linear(8, 3)
        self.register_buffer("queue", torch.randn(12, 8))
        self.register_buffer("position", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        query = self.encoder(x).tanh()
        if self.training:
            self._enqueue(query)
        return self.head(query) + (query @ self.queue.t()).mean(1, keepdim=True)

    @torch.no_grad()
    def _enqueue(self, keys):
        self.queue[(self.position + torch.arange(2)) % 12] = keys[:2]
        self.queue[-1:] = 0.5 * self.queue[-1:] + 0.5 * keys.mean(0)
        self.position[0] = (self.position[0] + 2) % 10


class StochasticNeurons(torch.autograd.Function):
    """Fires at random, with the gradient of the probability."""

    @staticmethod
    def forward(ctx, probability):
        return torch.bernoulli(probability)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class StochasticLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return StochasticNeurons.apply(self.linear(x).sigmoid())


class Directional(nn.Module):
    """Adds a directional derivative, a transform of torch.func."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return torch.func.jvp(lambda t: self.linear(t).tanh(), (x,), (torch.ones_like(x),))[1]


class GradientOfInput(nn.Module):
    """Adds the gradient of a potential by a detached input, as force fields and energy-based models do."""

    def __init__(self):
        super().__init__()
        self.potential = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        with torch.enable_grad():
            position = x.detach().requires_grad_()
            (force,) = torch.autograd.grad(self.potential(position).sum(), position, create_graph=True)
        return x + force


class GradientsOfSamples(nn.Module):
    """Adds the gradient of a potential by each sample: torch.func allows no hooks on saved tensors."""

    def __init__(self):
        super().__init__()
        self.potential = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x):
        return x + torch.func.vmap(torch.func.grad(lambda sample: self.potential(sample).sum()))(x)


class Gate(nn.Module):
    """Ignores its second input in most minibatches."""

    def forward(self, x, other):
        return torch.tanh(x) if int(x.abs().sum() * 1000) % 3 else torch.tanh(x + other)


class Stop(torch.autograd.Function):
    """Adds, and gives no gradient to its second input."""

    @staticmethod
    def forward(ctx, x, other):
        return x + other

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def taught_loss(output, target):
    return F.cross_entropy(output[0], target) + F.mse_loss(*output)


def decaying(named):
    return torch.optim.AdamW([p for _, p in named], lr=0.01, weight_decay=0.3)


MODELS = {
    "missing_gradients": replace(
        in_double(Task(MissingGradients, INPUT, CLASS, taught_loss)),
        optimizer=decaying,
        pin={"teacher": 0, "sometimes": 0, "stopped": 0, "gate": 1, "last": 2},
    ),
    "shared_statistics": in_double(Task(SharedStatistics, INPUT, CLASS)),
    "hooked_backward": Task(HookedBackward, INPUT, CLASS),
    "recomputed": Task(lambda: nn.Sequential(Recomputed(), Recomputed(), nn.Linear(8, 3)), INPUT, CLASS, noisy=True),
    "layer_drop": Task(lambda: nn.Sequential(LayerDrop(), LayerDrop(), nn.Linear(8, 3)), INPUT, CLASS, noisy=True),
    "dropped_weight": Task(
        lambda: nn.Sequential(nn.Linear(8, 8), DroppedWeight(), nn.Linear(37, 3)), INPUT, CLASS, noisy=True
    ),
    "shared_memory": Task(SharedMemory, INPUT, None, F.mse_loss),
    "shared_norm": Task(SharedNorm, INPUT, CLASS),
    "distillation": Task(Distillation, INPUT, CLASS, distillation_loss),
    "untrained_part": Task(UntrainedPart, INPUT, CLASS),
    "losses_in_forward": Task(LossesInForward, INPUT, CLASS, with_losses),
    "overwritten": Task(Overwritten, INPUT, CLASS, optimizer=decaying),
    "frozen_batch_norm": Task(FrozenBatchNorm, numbers(3, 8, 8), CLASS),
    "frozen_backbone": Task(frozen_backbone, INPUT, CLASS),
    "frozen_statistics": Task(frozen_statistics, numbers(3, 8, 8), CLASS),
    "momentum_contrast": Task(MomentumContrast, both(INPUT, INPUT), CLASS, moco_loss),
    "byol": Task(BYOL, both(INPUT, INPUT), CLASS, byol_loss),
    "gradient_reversal": Task(DomainAdversarial, INPUT, named(label=CLASS, domain=classes(2)), adversarial_loss),
    "binary_net": Task(BinaryNet, INPUT, CLASS),
    "fake_quantized": Task(FakeQuantized, INPUT, CLASS),
    "weight_normalised": Task(weight_normalised, INPUT, CLASS),
    "parametrized": Task(parametrized, INPUT, CLASS),
    "pruned": Task(pruned, INPUT, CLASS),
    "hooked": Task(Hooked, INPUT, CLASS),
    "hooked_at_first": Task(HookedAtFirst, INPUT, CLASS),
    "compiled_part": Task(CompiledPart, INPUT, CLASS),
    "scripted": in_double(Task(Scripted, INPUT, CLASS)),
    "lazy_table": Task(LazyTable, numbers(5, 4), CLASS),
    "lazy_modules": in_double(Task(lazy, numbers(3, 8, 8), CLASS)),
    "sparse_table": Task(lambda: nn.Sequential(SparseTable(), perceptron()), classes(20, 4), CLASS),
    "late_centering": Task(lambda: nn.Sequential(nn.Linear(8, 8), LateCentering(), perceptron()), INPUT, CLASS),
    "contrastive_queue": Task(lambda: nn.Sequential(ContrastiveQueue(), nn.Linear(3, 3)), INPUT, CLASS),
    "stochastic_neurons": Task(
        lambda: nn.Sequential(StochasticLayer(), StochasticLayer(), nn.Linear(8, 3)), INPUT, CLASS, noisy=True
    ),
    "directional": Task(lambda: nn.Sequential(nn.Linear(8, 8), Directional(), perceptron()), INPUT, CLASS),
    "gradient_of_input": Task(lambda: nn.Sequential(nn.Linear(8, 8), GradientOfInput(), perceptron()), INPUT, CLASS),
    "gradients_of_samples": Task(
        lambda: nn.Sequential(nn.Linear(8, 8), GradientsOfSamples(), perceptron()), INPUT, CLASS
    ),
    "running_norm": Task(
        RunningNorm, INPUT, lambda g: {"action": classes(4)(g), "return": numbers()(g)}, actor_critic_loss
    ),
    "warming": Task(Warming, INPUT, CLASS),
    "batch_renorm": Task(BatchRenorm, INPUT, CLASS),
    "with_labels": Task(WithLabels, named(pixel_values=INPUT, labels=CLASS), CLASS, own_loss),
    "early_exits": Task(EarlyExits, both(INPUT, INPUT), CLASS, deep_supervision, layerwise),
    "adaptive": Task(Adaptive, INPUT, CLASS),
    "soft_tree": Task(Tree, INPUT, CLASS),
    "double_head": Task(DoubleHead, INPUT, CLASS),
    "tied_layers": Task(Tied, INPUT, None, F.mse_loss),
    "mixed_precision": Task(MixedPrecision, INPUT, CLASS),
    "ensemble": Task(Ensemble, INPUT, CLASS, F.nll_loss),
}
