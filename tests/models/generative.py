"""Autoencoders, flows, diffusion, fields, and others that model the data or its dynamics."""

import math

import torch
import torch.nn.functional as F
from task import Task, both, classes, numbers
from torch import nn
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal


class VAE(nn.Module):
    """Noise in training only."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc21, self.fc22 = nn.Linear(16, 12), nn.Linear(12, 4), nn.Linear(12, 4)
        self.fc3, self.fc4 = nn.Linear(4, 12), nn.Linear(12, 16)

    def encode(self, x):
        h1 = F.relu(self.fc1(x))
        return self.fc21(h1), self.fc22(h1)

    def reparameterize(self, mu, logvar):
        if self.training:
            std = torch.exp(0.5 * logvar)
            eps = torch.randn_like(std)
            return eps.mul(std).add_(mu)
        return mu

    def decode(self, z):
        return torch.sigmoid(self.fc4(F.relu(self.fc3(z))))

    def forward(self, x):
        mu, logvar = self.encode(x.view(-1, 16))
        return self.decode(self.reparameterize(mu, logvar)), mu, logvar


def vae_loss(output, x):
    recon_x, mu, logvar = output
    reconstruction = F.mse_loss(recon_x, x.view(-1, 16))
    return reconstruction - 0.05 * torch.mean(1 + logvar - mu.pow(2) - logvar.exp())


class ConvVAE(nn.Module):
    """Noise always, by torch.distributions; convolutions up and down."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 4, 3, 2, 1), nn.LeakyReLU(0.2), nn.Flatten(), nn.Linear(64, 8))
        self.decoder = nn.Sequential(
            nn.Linear(4, 64),
            nn.Unflatten(1, (4, 4, 4)),
            nn.LeakyReLU(0.2),
            nn.ConvTranspose2d(4, 1, 3, 2, 1, output_padding=1),
        )

    def forward(self, x):
        mean, logvar = self.encoder(x).chunk(2, dim=1)
        z = Normal(mean, torch.exp(0.5 * logvar)).rsample()
        return {"reconstruction": self.decoder(z), "mean": mean, "logvar": logvar}


def beta_vae_loss(output, x):
    mean, logvar = output["mean"], output["logvar"]
    kl = -0.5 * torch.sum(1 + logvar - mean**2 - logvar.exp(), dim=1).mean()
    return F.mse_loss(output["reconstruction"], x) + 0.01 * kl


class VectorQuantizer(nn.Module):
    """A codebook that follows the encoder's outputs: updated in training, by buffers."""

    def __init__(self, codes=8, dim=4, decay=0.99, eps=1e-5):
        super().__init__()
        self.decay, self.eps = decay, eps
        embed = torch.randn(dim, codes)
        self.register_buffer("embed", embed)
        self.register_buffer("cluster_size", torch.zeros(codes))
        self.register_buffer("embed_avg", embed.clone())

    def forward(self, x):
        flatten = x.reshape(-1, x.shape[-1])
        distance = (
            flatten.pow(2).sum(1, keepdim=True) - 2 * flatten @ self.embed + self.embed.pow(2).sum(0, keepdim=True)
        )
        _, ind = (-distance).max(1)
        onehot = F.one_hot(ind, self.embed.shape[1]).type(flatten.dtype)
        quantize = F.embedding(ind.view(*x.shape[:-1]), self.embed.transpose(0, 1))
        if self.training:
            self.cluster_size.data.mul_(self.decay).add_(onehot.sum(0), alpha=1 - self.decay)
            embed_sum = flatten.detach().transpose(0, 1) @ onehot
            self.embed_avg.data.mul_(self.decay).add_(embed_sum, alpha=1 - self.decay)
            n = self.cluster_size.sum()
            cluster_size = (self.cluster_size + self.eps) / (n + self.embed.shape[1] * self.eps) * n
            self.embed.data.copy_(self.embed_avg / cluster_size.unsqueeze(0))
        diff = (quantize.detach() - x).pow(2).mean()
        quantize = x + (quantize - x).detach()
        return quantize, diff


class VQVAE(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(1, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
        self.quantize = VectorQuantizer()
        self.decoder = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.ConvTranspose2d(8, 1, 4, 2, 1))

    def forward(self, x):
        quant, diff = self.quantize(self.encoder(x).permute(0, 2, 3, 1))
        return self.decoder(quant.permute(0, 3, 1, 2)), diff


def vq_loss(output, x):
    out, latent_loss = output
    return F.mse_loss(out, x) + 0.25 * latent_loss.mean()


class RealNVP(nn.Module):
    """Coupling layers, and the logarithm of their determinant."""

    def __init__(self, dim=6, layers=3):
        super().__init__()
        masks = [[i % 2 if n % 2 else 1 - i % 2 for i in range(dim)] for n in range(layers)]
        self.register_buffer("mask", torch.tensor(masks, dtype=torch.float32))
        net = lambda: nn.Sequential(nn.Linear(dim, 8), nn.LeakyReLU(), nn.Linear(8, dim))  # noqa: E731
        self.t = nn.ModuleList([net() for _ in range(layers)])
        self.s = nn.ModuleList([nn.Sequential(net(), nn.Tanh()) for _ in range(layers)])

    def forward(self, x):
        log_det_J, z = x.new_zeros(x.shape[0]), x
        for i in reversed(range(len(self.t))):
            z_ = self.mask[i] * z
            s, t = self.s[i](z_) * (1 - self.mask[i]), self.t[i](z_) * (1 - self.mask[i])
            z = (1 - self.mask[i]) * (z - t) * torch.exp(-s) + z_
            log_det_J -= s.sum(dim=1)
        return z, log_det_J


def flow_loss(output, _):
    z, log_det = output
    return -(Normal(0.0, 1.0).log_prob(z).sum(-1) + log_det).mean()


class Diffusion(nn.Module):
    """A U-Net that is told the time by a sinusoidal embedding."""

    def __init__(self, width=8):
        super().__init__()
        self.time_mlp = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width))
        self.inc, self.down = nn.Conv2d(1, width, 3, padding=1), nn.Conv2d(width, width, 4, 2, 1)
        self.emb = nn.Linear(width, 2 * width)
        self.norm = nn.GroupNorm(2, width)
        self.up, self.out = nn.ConvTranspose2d(width, width, 4, 2, 1), nn.Conv2d(2 * width, 1, 1)
        self.width = width

    def timestep_embedding(self, timesteps, max_period=10000):
        half = self.width // 2
        freqs = torch.exp(-math.log(max_period) * torch.arange(0, half, dtype=torch.float32) / half)
        args = timesteps[:, None].float() * freqs[None].to(timesteps.device)
        return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)

    def forward(self, x, t):
        emb = self.time_mlp(self.timestep_embedding(t))
        h1 = self.inc(x)
        h = self.norm(self.down(F.silu(h1)))
        scale, shift = self.emb(emb)[..., None, None].chunk(2, dim=1)
        h = F.silu(h * (1 + scale) + shift)
        return self.out(torch.cat([self.up(h), h1], dim=1))


class DDPM(nn.Module):
    """Draws times and noise itself, and returns what it was to find beside what it found."""

    def __init__(self, steps=10):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(7, 16), nn.SiLU(), nn.Linear(16, 6))
        alphas = torch.cumprod(1 - torch.linspace(1e-4, 0.2, steps), 0)
        self.register_buffer("sqrt_alphas", alphas.sqrt())
        self.register_buffer("sqrt_one_minus_alphas", (1 - alphas).sqrt())
        self.steps = steps

    def forward(self, x):
        t = torch.randint(0, self.steps, (x.shape[0],), device=x.device)
        noise = torch.randn_like(x)
        x_t = self.sqrt_alphas[t, None] * x + self.sqrt_one_minus_alphas[t, None] * noise
        return self.net(torch.cat([x_t, (t / self.steps)[:, None]], dim=-1)), noise


def noise_loss(output, _):
    return F.mse_loss(*output)


class Discriminator(nn.Module):
    """With spectral_norm: a power iteration in each forward of training."""

    def __init__(self):
        super().__init__()
        sn = torch.nn.utils.parametrizations.spectral_norm
        self.main = nn.Sequential(
            sn(nn.Conv2d(1, 8, 4, 2, 1)),
            nn.LeakyReLU(0.2, inplace=True),
            sn(nn.Conv2d(8, 8, 4, 2, 1)),
            nn.LeakyReLU(0.2, inplace=True),
            nn.Flatten(),
            sn(nn.Linear(32, 1)),
        )

    def forward(self, input):
        return self.main(input).view(-1, 1).squeeze(1)


class OldDiscriminator(Discriminator):
    """With the spectral_norm of old, a hook."""

    def __init__(self):
        nn.Module.__init__(self)
        sn = torch.nn.utils.spectral_norm
        self.main = nn.Sequential(sn(nn.Conv2d(1, 8, 4, 2, 1)), nn.LeakyReLU(0.2), nn.Flatten(), sn(nn.Linear(128, 1)))


def hinge_loss(output, label):
    return F.relu(1 - output * (2 * label - 1)).mean()


class NeRF(nn.Module):
    """Places encoded by sines and cosines of growing frequency, and a skip; then a ray's colours composed."""

    def __init__(self, levels=3, width=16):
        super().__init__()
        self.levels = levels
        size = 3 + 3 * 2 * levels
        self.pts_linears = nn.ModuleList(
            [nn.Linear(size, width)] + [nn.Linear(width + size if i == 1 else width, width) for i in range(3)]
        )
        self.skips, self.alpha, self.rgb = [1], nn.Linear(width, 1), nn.Linear(width, 3)

    def encode(self, x):
        out = [x]
        for level in range(self.levels):
            for fn in (torch.sin, torch.cos):
                out.append(fn(2.0**level * x))
        return torch.cat(out, -1)

    def forward(self, points):
        encoded = self.encode(points)
        h = encoded
        for i, layer in enumerate(self.pts_linears):
            h = F.relu(layer(h))
            if i in self.skips:
                h = torch.cat([encoded, h], -1)
        alpha = 1.0 - torch.exp(-F.relu(self.alpha(h)[..., 0]))
        transmitted = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1.0 - alpha + 1e-10], -1), -1)[:, :-1]
        return torch.sum((alpha * transmitted)[..., None] * torch.sigmoid(self.rgb(h)), -2)


class Siren(nn.Module):
    class Sine(nn.Module):
        def __init__(self, inputs, outputs, first=False):
            super().__init__()
            self.linear, self.omega_0 = nn.Linear(inputs, outputs), 3.0
            with torch.no_grad():
                bound = 1 / inputs if first else math.sqrt(6 / inputs) / self.omega_0
                self.linear.weight.uniform_(-bound, bound)

        def forward(self, x):
            return torch.sin(self.omega_0 * self.linear(x))

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(self.Sine(2, 16, True), self.Sine(16, 16), self.Sine(16, 16), nn.Linear(16, 1))

    def forward(self, coords):
        return self.net(coords)


class PixelCNN(nn.Module):
    """Masked convolutions, which write zeros into their weight at each forward."""

    class MaskedConv2d(nn.Conv2d):
        def __init__(self, mask_type, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.register_buffer("mask", self.weight.data.clone())
            _, _, kH, kW = self.weight.size()
            self.mask.fill_(1)
            self.mask[:, :, kH // 2, kW // 2 + (mask_type == "B") :] = 0
            self.mask[:, :, kH // 2 + 1 :] = 0

        def forward(self, x):
            self.weight.data *= self.mask
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(
            self.MaskedConv2d("A", 1, 8, 5, 1, 2, bias=False),
            nn.BatchNorm2d(8),
            nn.ReLU(True),
            self.MaskedConv2d("B", 8, 8, 3, 1, 1, bias=False),
            nn.ReLU(True),
            nn.Conv2d(8, 4, 1),
        )

    def forward(self, x):
        return self.net(x)


class MADE(nn.Module):
    """Masked linear layers, the mask multiplied in."""

    class MaskedLinear(nn.Linear):
        def __init__(self, mask):
            super().__init__(mask.shape[1], mask.shape[0])
            self.register_buffer("mask", mask)

        def forward(self, input):
            return F.linear(input, self.mask * self.weight, self.bias)

    def __init__(self, dim=6, hidden=12):
        super().__init__()
        degrees = [torch.arange(dim), torch.arange(hidden) % (dim - 1), torch.arange(dim)]
        first = (degrees[1][:, None] >= degrees[0][None]).float()
        last = (degrees[2][:, None] > degrees[1][None]).float()
        self.net = nn.Sequential(self.MaskedLinear(first), nn.ReLU(), self.MaskedLinear(last))

    def forward(self, x):
        return self.net(x)


class HamiltonianNet(nn.Module):
    """Its output is the gradient of an energy by its input."""

    def __init__(self):
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
        self.register_buffer("J", torch.tensor([[0.0, 0, 1, 0], [0, 0, 0, 1], [-1, 0, 0, 0], [0, -1, 0, 0]]))

    def forward(self, x):
        with torch.enable_grad():
            x = x.requires_grad_(True)
            H = self.energy(x).sum()
            (gradient,) = torch.autograd.grad(H, x, create_graph=True)
        return gradient @ self.J.t()


class NeuralODE(nn.Module):
    """Two steps of Runge and Kutta."""

    class Dynamics(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.net = nn.Sequential(nn.Linear(dim + 1, 16), nn.Tanh(), nn.Linear(16, dim))

        def forward(self, t, y):
            return self.net(torch.cat([y, torch.full_like(y[:, :1], t)], dim=1))

    def __init__(self, dim=4, steps=2):
        super().__init__()
        self.func, self.head, self.steps = self.Dynamics(dim), nn.Linear(dim, 3), steps

    def forward(self, y):
        h = 1 / self.steps
        for n in range(self.steps):
            t = n * h
            k1 = self.func(t, y)
            k2 = self.func(t + h / 2, y + h / 2 * k1)
            k3 = self.func(t + h / 2, y + h / 2 * k2)
            k4 = self.func(t + h, y + h * k3)
            y = y + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return self.head(y)


class Equilibrium(nn.Module):
    """A deep equilibrium by eight iterations without gradient, and one with."""

    def __init__(self, dim=8):
        super().__init__()
        self.inject, self.W, self.out = nn.Linear(4, dim), nn.Linear(dim, dim, bias=False), nn.Linear(dim, 3)
        self.W.weight.data *= 0.5

    def f(self, z, x):
        return torch.tanh(self.W(z) + x)

    def forward(self, x):
        x = self.inject(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(8):
                z = self.f(z, x)
        return self.out(self.f(z, x))


class GumbelAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, x):
        logits = self.encoder(x).view(-1, 3, 4)
        z = F.gumbel_softmax(logits, tau=0.8, hard=True) if self.training else logits.softmax(-1)
        return self.decoder(z.flatten(1)), logits


def gumbel_loss(output, x):
    reconstruction, logits = output
    q = logits.softmax(-1)
    return F.mse_loss(reconstruction, x) + 0.1 * (q * torch.log(q * 4 + 1e-8)).sum(-1).mean()


class MixtureDensity(nn.Module):
    """Weights, means and deviations of three normal distributions, for a likelihood."""

    def __init__(self):
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(4, 16), nn.Tanh())
        self.pi, self.mu, self.log_sigma = nn.Linear(16, 3), nn.Linear(16, 6), nn.Linear(16, 6)

    def forward(self, x):
        h = self.hidden(x)
        return self.pi(h), self.mu(h).view(-1, 3, 2), self.log_sigma(h).view(-1, 3, 2).exp()


def mixture_loss(output, target):
    pi, mu, sigma = output
    mixture = MixtureSameFamily(Categorical(logits=pi), Independent(Normal(mu, sigma), 1))
    return -mixture.log_prob(target).mean()


class SparseAutoencoder(nn.Module):
    """The decoder is the encoder's weight transposed; noise is added to the inputs in training."""

    def __init__(self, noise=0.0):
        super().__init__()
        self.weight, self.noise = nn.Parameter(torch.randn(12, 16) * 0.1), noise
        self.b_enc, self.b_dec = nn.Parameter(torch.zeros(12)), nn.Parameter(torch.zeros(16))

    def forward(self, x):
        if self.training and self.noise:
            x = x + self.noise * torch.randn(x.shape)
        h = torch.sigmoid(F.linear(x - self.b_dec, self.weight, self.b_enc))
        return F.linear(h, self.weight.t(), self.b_dec), h.mean(0)


def denoising():
    return SparseAutoencoder(0.3)


def sparse_loss(output, x):
    reconstruction, rho = output
    kl = 0.1 * torch.log(0.1 / rho) + 0.9 * torch.log(0.9 / (1 - rho))
    return F.mse_loss(reconstruction, x) + 0.01 * kl.sum()


PICTURE = numbers(1, 8, 8)
MODELS = {
    "vae": Task(VAE, numbers(16), None, vae_loss, noisy=True),
    "conv_vae": Task(ConvVAE, PICTURE, None, beta_vae_loss, noisy=True),
    "vq_vae": Task(VQVAE, PICTURE, None, vq_loss),
    "real_nvp": Task(RealNVP, numbers(6), None, flow_loss),
    "diffusion": Task(Diffusion, both(PICTURE, classes(100)), PICTURE, F.mse_loss),
    "ddpm": Task(DDPM, numbers(6), None, noise_loss, noisy=True),
    "spectral_norm": Task(Discriminator, PICTURE, classes(2), hinge_loss),
    "spectral_norm_hook": Task(OldDiscriminator, PICTURE, classes(2), hinge_loss),
    "nerf": Task(NeRF, numbers(5, 3), numbers(3), F.mse_loss),
    "siren": Task(Siren, numbers(7, 2), numbers(7, 1), F.mse_loss),
    "pixel_cnn": Task(PixelCNN, PICTURE, classes(4, 8, 8)),
    "made": Task(MADE, numbers(6), None, F.mse_loss),
    "hamiltonian": Task(HamiltonianNet, numbers(4), numbers(4), F.mse_loss),
    "neural_ode": Task(NeuralODE, numbers(4), classes(3)),
    "equilibrium": Task(Equilibrium, numbers(4), classes(3)),
    "gumbel": Task(GumbelAutoencoder, numbers(8), None, gumbel_loss, noisy=True),
    "mixture_density": Task(MixtureDensity, numbers(4), numbers(2), mixture_loss),
    "sparse_autoencoder": Task(SparseAutoencoder, numbers(16), None, sparse_loss),
    "denoising": Task(denoising, numbers(16), None, sparse_loss, noisy=True),
}
