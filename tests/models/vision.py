"""Models of images, of 3 channels and 16 × 16 pixels where nothing else is said."""

import torch
import torch.nn.functional as F
from task import Task, both, classes, in_double, named, numbers
from torch import nn


class ResidualBlock(nn.Module):
    expansion = 1

    def __init__(self, channels, out, stride=1):
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.downsample = None
        if stride != 1 or channels != out:
            self.downsample = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        identity = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        if self.downsample is not None:
            identity = self.downsample(x)
        out += identity
        return self.relu(out)


class ResNet(nn.Module):
    def __init__(self, width=8, classes=4):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(True))
        self.layer1 = self._layer(width, width, 2, 1)
        self.layer2 = self._layer(width, 2 * width, 2, 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(2 * width, classes)
        for m in self.modules():
            if isinstance(m, nn.Conv2d):
                nn.init.kaiming_normal_(m.weight, mode="fan_out", nonlinearity="relu")

    def _layer(self, channels, out, blocks, stride):
        layers = [ResidualBlock(channels, out, stride)]
        layers += [ResidualBlock(out, out) for _ in range(blocks - 1)]
        return nn.Sequential(*layers)

    def forward(self, x):
        x = self.layer2(self.layer1(self.stem(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


class ResNeXt(nn.Module):
    class Block(nn.Module):
        def __init__(self, channels, groups):
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(channels, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 1, bias=False),
                nn.BatchNorm2d(channels),
            )

        def forward(self, x):
            return F.relu(x + self.body(x))

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.blocks = nn.ModuleList([self.Block(8, 4) for _ in range(3)])
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=[2, 3]))


class DenseNet(nn.Module):
    class Layer(nn.Module):
        def __init__(self, channels, growth):
            super().__init__()
            self.norm = nn.BatchNorm2d(channels)
            self.conv = nn.Conv2d(channels, growth, 3, padding=1, bias=False)

        def forward(self, features):
            return self.conv(F.relu(self.norm(torch.cat(features, 1))))

    def __init__(self, growth=4):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 2, 1)
        self.layers = nn.ModuleList([self.Layer(8 + i * growth, growth) for i in range(4)])
        self.norm = nn.BatchNorm2d(8 + 4 * growth)
        self.classifier = nn.Linear(8 + 4 * growth, 4)

    def forward(self, x):
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(features))
        x = F.relu(self.norm(torch.cat(features, 1)), inplace=True)
        x = F.adaptive_avg_pool2d(x, (1, 1))
        return self.classifier(torch.flatten(x, 1))


class ConvBnRelu(nn.Sequential):
    def __init__(self, channels, out, kernel, stride=1, groups=1, activation=nn.ReLU):
        super().__init__(
            nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False),
            nn.BatchNorm2d(out),
            activation(inplace=True),
        )


class Inception(nn.Module):
    def __init__(self, channels=8):
        super().__init__()
        self.branch1 = ConvBnRelu(channels, 4, 1)
        self.branch2 = nn.Sequential(ConvBnRelu(channels, 4, 1), ConvBnRelu(4, 4, 3))
        self.branch3 = nn.Sequential(ConvBnRelu(channels, 4, 1), ConvBnRelu(4, 4, 5))
        self.branch4 = nn.Sequential(nn.MaxPool2d(3, 1, 1, ceil_mode=True), ConvBnRelu(channels, 4, 1))

    def forward(self, x):
        branches = [self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)]
        return torch.cat(branches, 1)


class InceptionNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvBnRelu(3, 8, 3, 2)
        self.inception1 = Inception(8)
        self.inception2 = Inception(16)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        return self.fc(self.inception2(self.inception1(self.stem(x))).mean((-2, -1)))


class GoogLeNet(InceptionNet):
    """With an auxiliary head that training alone uses."""

    def __init__(self):
        super().__init__()
        self.aux = nn.Linear(16, 4)

    def forward(self, x):
        x = self.inception1(self.stem(x))
        aux = None
        if self.training:
            aux = self.aux(F.adaptive_avg_pool2d(x, 1).flatten(1))
        x = self.fc(self.inception2(x).mean((-2, -1)))
        if self.training:
            return x, aux
        return x


def auxiliary_loss(output, target):
    if isinstance(output, tuple):
        return F.cross_entropy(output[0], target) + 0.3 * F.cross_entropy(output[1], target)
    return F.cross_entropy(output, target)


class SqueezeExcite(nn.Module):
    def __init__(self, channels, reduction=4):
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(channels, channels // reduction, bias=False),
            nn.ReLU(inplace=True),
            nn.Linear(channels // reduction, channels, bias=False),
            nn.Sigmoid(),
        )

    def forward(self, x):
        b, c, _, _ = x.size()
        y = self.pool(x).view(b, c)
        y = self.fc(y).view(b, c, 1, 1)
        return x * y.expand_as(x)


class MobileNet(nn.Module):
    """Inverted residuals with squeeze-and-excite, hard activations."""

    class Block(nn.Module):
        def __init__(self, channels, out, stride, expand):
            super().__init__()
            hidden = channels * expand
            self.use_residual = stride == 1 and channels == out
            self.conv = nn.Sequential(
                ConvBnRelu(channels, hidden, 1, activation=nn.Hardswish),
                ConvBnRelu(hidden, hidden, 3, stride, hidden, nn.ReLU6),
                SqueezeExcite(hidden),
                nn.Conv2d(hidden, out, 1, bias=False),
                nn.BatchNorm2d(out),
            )

        def forward(self, x):
            return x + self.conv(x) if self.use_residual else self.conv(x)

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            ConvBnRelu(3, 8, 3, 2), self.Block(8, 8, 1, 2), self.Block(8, 12, 2, 2), self.Block(12, 12, 1, 2)
        )
        self.classifier = nn.Sequential(nn.Linear(12, 16), nn.Hardswish(), nn.Linear(16, 4))

    def forward(self, x):
        return self.classifier(self.features(x).mean([2, 3]))


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x):
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


def drop_path(x, drop_prob=0.0, training=False):
    """Stochastic depth, as timm writes it."""
    if drop_prob == 0.0 or not training:
        return x
    keep_prob = 1 - drop_prob
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    random_tensor = x.new_empty(shape).bernoulli_(keep_prob)
    if keep_prob > 0.0:
        random_tensor.div_(keep_prob)
    return x * random_tensor


class DropPath(nn.Module):
    def __init__(self, drop_prob):
        super().__init__()
        self.drop_prob = drop_prob

    def forward(self, x):
        return drop_path(x, self.drop_prob, self.training)


class ConvNeXt(nn.Module):
    class Block(nn.Module):
        def __init__(self, dim, rate):
            super().__init__()
            self.dwconv = nn.Conv2d(dim, dim, 7, padding=3, groups=dim)
            self.norm = nn.LayerNorm(dim, eps=1e-6)
            self.pwconv1 = nn.Linear(dim, 4 * dim)
            self.act = nn.GELU()
            self.pwconv2 = nn.Linear(4 * dim, dim)
            self.gamma = nn.Parameter(1e-1 * torch.ones(dim))
            self.drop_path = DropPath(rate) if rate > 0.0 else nn.Identity()

        def forward(self, x):
            shortcut = x
            x = self.dwconv(x).permute(0, 2, 3, 1)
            x = self.pwconv2(self.act(self.pwconv1(self.norm(x))))
            x = (self.gamma * x).permute(0, 3, 1, 2)
            return shortcut + self.drop_path(x)

    def __init__(self, rates=(0.0, 0.0)):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 4, 4), LayerNorm2d(8))
        self.stages = nn.Sequential(*(self.Block(8, rate) for rate in rates))
        self.head = nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.stages(self.stem(x)).mean([-2, -1]))


def stochastic_depth():
    return ConvNeXt(tuple(r.item() for r in torch.linspace(0.1, 0.3, 3)))


class ShuffleNet(nn.Module):
    class Block(nn.Module):
        def __init__(self, channels):
            super().__init__()
            half = channels // 2
            self.branch = nn.Sequential(ConvBnRelu(half, half, 1), nn.Conv2d(half, half, 3, 1, 1, groups=half))

        def forward(self, x):
            left, right = x.chunk(2, dim=1)
            out = torch.cat((left, self.branch(right)), dim=1)
            batch, channels, height, width = out.size()
            out = out.view(batch, 2, channels // 2, height, width).transpose(1, 2).contiguous()
            return out.view(batch, channels, height, width)

    def __init__(self):
        super().__init__()
        self.stem = ConvBnRelu(3, 8, 3, 2)
        self.blocks = nn.Sequential(self.Block(8), self.Block(8))
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        return self.fc(self.blocks(self.stem(x)).mean([2, 3]))


class UNet(nn.Module):
    """Segmentation: skips kept in a list, sizes mended with padding."""

    def __init__(self, widths=(4, 8, 16)):
        super().__init__()
        self.downs, self.ups = nn.ModuleList(), nn.ModuleList()
        channels = 3
        for width in widths[:-1]:
            self.downs.append(self._double(channels, width))
            channels = width
        self.middle = self._double(channels, widths[-1])
        for width in reversed(widths[:-1]):
            self.ups.append(nn.ConvTranspose2d(width * 2, width, 2, 2))
            self.ups.append(self._double(width * 2, width))
        self.out = nn.Conv2d(widths[0], 4, 1)

    @staticmethod
    def _double(channels, out):
        return nn.Sequential(ConvBnRelu(channels, out, 3), ConvBnRelu(out, out, 3))

    def forward(self, x):
        skips = []
        for down in self.downs:
            x = down(x)
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = self.middle(x)
        skips = skips[::-1]
        for i in range(0, len(self.ups), 2):
            x = self.ups[i](x)
            skip = skips[i // 2]
            dy, dx = skip.size(2) - x.size(2), skip.size(3) - x.size(3)
            x = F.pad(x, [dx // 2, dx - dx // 2, dy // 2, dy - dy // 2])
            x = self.ups[i + 1](torch.cat((skip, x), dim=1))
        return self.out(x)


class Detector(nn.Module):
    """A feature pyramid with heads shared by its levels: scores and boxes of all anchors, in a dict."""

    def __init__(self):
        super().__init__()
        self.c1, self.c2, self.c3 = ConvBnRelu(3, 8, 3, 2), ConvBnRelu(8, 16, 3, 2), ConvBnRelu(16, 16, 3, 2)
        self.lateral = nn.ModuleList([nn.Conv2d(c, 8, 1) for c in (8, 16, 16)])
        self.cls_head = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
        self.box_head = nn.Conv2d(8, 4, 3, padding=1)
        nn.init.constant_(self.cls_head[-1].bias, -2.0)

    def forward(self, images):
        features, x = [], images
        for layer in (self.c1, self.c2, self.c3):
            x = layer(x)
            features.append(x)
        top, levels = None, []
        for feature, lateral in zip(features[::-1], list(self.lateral)[::-1], strict=True):
            level = lateral(feature)
            if top is not None:
                level = level + F.interpolate(top, scale_factor=2, mode="nearest")
            levels.append(level)
            top = level
        scores = [self.cls_head(level).flatten(2).transpose(1, 2) for level in levels]
        boxes = [self.box_head(level).flatten(2).transpose(1, 2) for level in levels]
        return {"scores": torch.cat(scores, 1), "boxes": torch.cat(boxes, 1).sigmoid()}


def detection_loss(output, target):
    scores, boxes = output["scores"], output["boxes"]
    one_hot = F.one_hot(target["label"], 4).float()[:, None].expand_as(scores)
    p = scores.sigmoid()
    ce = F.binary_cross_entropy_with_logits(scores, one_hot, reduction="none")
    focal = ((1 - (p * one_hot + (1 - p) * (1 - one_hot))) ** 2 * ce).mean()
    return focal + F.smooth_l1_loss(boxes, target["box"].sigmoid()[:, None].expand_as(boxes))


class ViT(nn.Module):
    class Block(nn.Module):
        def __init__(self, dim, heads):
            super().__init__()
            self.heads = heads
            self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

        def attention(self, x):
            B, N, C = x.shape
            qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv.unbind(0)
            attn = (q @ k.transpose(-2, -1)) * (C // self.heads) ** -0.5
            x = attn.softmax(dim=-1) @ v
            return self.proj(x.transpose(1, 2).reshape(B, N, C))

        def forward(self, x):
            x = x + self.attention(self.norm1(x))
            return x + self.mlp(self.norm2(x))

    def __init__(self, dim=16):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 4, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.randn(1, 17, dim) * 0.02)
        self.blocks = nn.ModuleList([self.Block(dim, 4) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 4)

    def forward(self, x):
        x = self.patch_embed(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def window_partition(x, size):
    B, H, W, C = x.shape
    x = x.view(B, H // size, size, W // size, size, C)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(-1, size * size, C)


def window_reverse(windows, size, H, W):
    B = int(windows.shape[0] / (H * W / size / size))
    x = windows.view(B, H // size, W // size, size, size, -1)
    return x.permute(0, 1, 3, 2, 4, 5).contiguous().view(B, H, W, -1)


class Swin(nn.Module):
    class Block(nn.Module):
        """Attention within windows that may be shifted, with a relative position bias."""

        def __init__(self, dim, resolution, size, shift):
            super().__init__()
            self.resolution, self.size, self.shift, self.heads = resolution, size, shift, 2
            self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
            self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
            self.bias_table = nn.Parameter(torch.randn((2 * size - 1) ** 2, self.heads) * 0.02)
            coords = torch.stack(torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")).flatten(1)
            relative = (coords[:, :, None] - coords[:, None, :]).permute(1, 2, 0).contiguous()
            relative += size - 1
            relative[:, :, 0] *= 2 * size - 1
            self.register_buffer("relative_position_index", relative.sum(-1))
            mask = None
            if shift:
                regions, count = torch.zeros(1, resolution, resolution, 1), 0
                slices = (slice(0, -size), slice(-size, -shift), slice(-shift, None))
                for h in slices:
                    for w in slices:
                        regions[:, h, w, :] = count
                        count += 1
                windows = window_partition(regions, size).squeeze(-1)
                mask = windows.unsqueeze(1) - windows.unsqueeze(2)
                mask = mask.masked_fill(mask != 0, -100.0).masked_fill(mask == 0, 0.0)
            self.register_buffer("attn_mask", mask)

        def attention(self, x):
            B_, N, C = x.shape
            qkv = self.qkv(x).reshape(B_, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
            q, k, v = qkv[0], qkv[1], qkv[2]
            attn = (q * (C // self.heads) ** -0.5) @ k.transpose(-2, -1)
            bias = self.bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
            attn = attn + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
            if self.attn_mask is not None:
                windows = self.attn_mask.shape[0]
                attn = attn.view(B_ // windows, windows, self.heads, N, N) + self.attn_mask.unsqueeze(1).unsqueeze(0)
                attn = attn.view(-1, self.heads, N, N)
            return self.proj((attn.softmax(-1) @ v).transpose(1, 2).reshape(B_, N, C))

        def forward(self, x):
            H = W = self.resolution
            B, L, C = x.shape
            assert L == H * W, "input feature has wrong size"
            shortcut = x
            x = self.norm1(x).view(B, H, W, C)
            if self.shift > 0:
                x = torch.roll(x, shifts=(-self.shift, -self.shift), dims=(1, 2))
            x = window_reverse(self.attention(window_partition(x, self.size)), self.size, H, W)
            if self.shift > 0:
                x = torch.roll(x, shifts=(self.shift, self.shift), dims=(1, 2))
            x = shortcut + x.view(B, H * W, C)
            return x + self.mlp(self.norm2(x))

    def __init__(self, dim=8):
        super().__init__()
        self.patch_embed = nn.Conv2d(3, dim, 2, 2)
        self.blocks = nn.Sequential(self.Block(dim, 8, 4, 0), self.Block(dim, 8, 4, 2))
        self.norm, self.head = nn.LayerNorm(4 * dim), nn.Linear(4 * dim, 4)

    def forward(self, x):
        x = self.blocks(self.patch_embed(x).flatten(2).transpose(1, 2))
        B, _, C = x.shape
        x = x.view(B, 8, 8, C)
        merged = torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)
        return self.head(self.norm(merged).mean((1, 2)))


class MLPMixer(nn.Module):
    class Block(nn.Module):
        def __init__(self, tokens, dim):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
            self.token_mix = nn.Sequential(nn.Linear(tokens, 16), nn.GELU(), nn.Linear(16, tokens))
            self.channel_mix = nn.Sequential(nn.Linear(dim, 32), nn.GELU(), nn.Linear(32, dim))

        def forward(self, x):
            x = x + self.token_mix(self.norm1(x).mT).mT
            return x + self.channel_mix(self.norm2(x))

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(48, 16)
        self.blocks = nn.Sequential(*(self.Block(16, 16) for _ in range(2)))
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        patches = F.unfold(x, kernel_size=4, stride=4).transpose(1, 2)
        return self.head(self.blocks(self.embed(patches)).mean(1))


class SpatialTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.localization = nn.Sequential(nn.Conv2d(3, 4, 5, 2), nn.ReLU(True), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.fc_loc = nn.Linear(16, 6)
        self.fc_loc.weight.data.zero_()
        self.fc_loc.bias.data.copy_(torch.tensor([1, 0, 0, 0, 1, 0], dtype=torch.float))
        self.conv = nn.Conv2d(3, 8, 3, stride=2)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        theta = self.fc_loc(self.localization(x)).view(-1, 2, 3)
        grid = F.affine_grid(theta, x.size(), align_corners=False)
        x = F.grid_sample(x, grid, align_corners=False)
        return F.log_softmax(self.fc(F.relu(self.conv(x)).amax((2, 3))), dim=1)


class SuperResolution(nn.Module):
    def __init__(self, factor=2):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(3, 16, 5, padding=2), nn.Conv2d(16, 8, 3, padding=1)
        self.conv3, self.shuffle = nn.Conv2d(8, 3 * factor**2, 3, padding=1), nn.PixelShuffle(factor)

    def forward(self, x):
        y = self.shuffle(self.conv3(torch.tanh(self.conv2(torch.tanh(self.conv1(x))))))
        return torch.clamp(y + F.interpolate(x, scale_factor=2, mode="bicubic", align_corners=False), -3.0, 3.0)


class DeepLab(nn.Module):
    """Dilated branches and a pooled one."""

    def __init__(self):
        super().__init__()
        self.stem = ConvBnRelu(3, 8, 3, 2)
        self.aspp = nn.ModuleList([nn.Conv2d(8, 4, 3, padding=d, dilation=d) for d in (1, 2, 4)])
        self.pooled = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(8, 4, 1), nn.SiLU())
        self.project = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        size = x.shape[-2:]
        x = self.stem(x)
        branches = [conv(x) for conv in self.aspp]
        branches.append(F.interpolate(self.pooled(x), size=x.shape[-2:], mode="bilinear", align_corners=False))
        return F.interpolate(self.project(torch.cat(branches, 1)), size=size, mode="bilinear", align_corners=False)


class CBAM(nn.Module):
    """Attention to channels, then to places."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.mlp = nn.Sequential(nn.Linear(8, 2), nn.ReLU(), nn.Linear(2, 8))
        self.spatial = nn.Conv2d(2, 1, 7, padding=3)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = F.silu(self.conv(x))
        avg, peak = F.avg_pool2d(x, x.size()[2:]).flatten(1), torch.amax(x, dim=(2, 3))
        x = x * torch.sigmoid(self.mlp(avg) + self.mlp(peak))[..., None, None]
        summary = torch.cat([x.max(1, keepdim=True)[0], x.mean(1).unsqueeze(1)], dim=1)
        x = x * self.spatial(summary).sigmoid()
        return self.fc(x.mean((2, 3)))


class EfficientNet(nn.Module):
    """Weight-standardised convolutions, SiLU, stochastic depth written with torch.rand."""

    class WSConv2d(nn.Conv2d):
        def forward(self, x):
            weight = self.weight
            mean = weight.mean(dim=(1, 2, 3), keepdim=True)
            std = weight.std(dim=(1, 2, 3), keepdim=True) + 1e-5
            weight = (weight - mean) / std.expand_as(weight)
            return F.conv2d(x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups)

    def __init__(self, survival=1.0):
        super().__init__()
        self.stem = self.WSConv2d(3, 8, 3, 2, 1)
        self.blocks = nn.ModuleList([self.WSConv2d(8, 8, 3, 1, 1) for _ in range(3)])
        self.norm, self.fc = nn.GroupNorm(2, 8), nn.Linear(8, 4)
        self.survival = survival

    def _drop(self, x):
        if not self.training or self.survival == 1.0:
            return x
        binary = torch.rand(x.shape[0], 1, 1, 1, device=x.device) < self.survival
        return torch.div(x, self.survival) * binary

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + self._drop(F.silu(block(x)))
        return self.fc(self.norm(x).mean((2, 3)))


def surviving():
    return EfficientNet(0.8)


class Siamese(nn.Module):
    def __init__(self):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.Conv2d(8, 8, 3, 2), nn.Flatten(), nn.Linear(72, 8)
        )

    def forward_once(self, x):
        return self.cnn(x)

    def forward(self, input1, input2):
        return self.forward_once(input1), self.forward_once(input2)


def contrastive_loss(output, same):
    distance = F.pairwise_distance(*output)
    return torch.mean(same * distance.pow(2) + (1 - same) * torch.clamp(2.0 - distance, min=0.0).pow(2))


class SimCLR(nn.Module):
    """Two views through one encoder in one call: cat, then chunk, on the batch."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.projector = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8))

    def forward(self, view1, view2):
        h = self.encoder(torch.cat([view1, view2], dim=0)).flatten(1)
        z1, z2 = self.projector(h).chunk(2, dim=0)
        return F.normalize(z1, dim=1), F.normalize(z2, dim=1)


def nt_xent(output, _):
    z = torch.cat(list(output))
    n = z.shape[0] // 2
    similarity = (z @ z.T / 0.5).masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
    return F.cross_entropy(similarity, torch.cat([torch.arange(n, 2 * n), torch.arange(n)]))


class TripletNet(nn.Module):
    """Three images in one tensor, the batch split by sizes."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 8))

    def forward(self, anchor, positive, negative):
        n = anchor.size(0)
        embedded = self.net(torch.cat((anchor, positive, negative)))
        return torch.split(embedded, n)


def triplet_loss(output, _):
    return F.triplet_margin_loss(*output, margin=1.0)


class CapsuleNet(nn.Module):
    """Three rounds of routing by agreement."""

    def __init__(self, capsules=8, dim=4, out=4):
        super().__init__()
        self.conv = nn.Conv2d(3, capsules * dim, 8, 8)
        self.W = nn.Parameter(torch.randn(1, capsules * 4, out, dim, dim) * 0.1)
        self.capsules, self.dim, self.out = capsules, dim, out

    @staticmethod
    def squash(x):
        norm = (x**2).sum(-1, keepdim=True)
        return norm / (1 + norm) * x / torch.sqrt(norm + 1e-8)

    def forward(self, x):
        batch = x.size(0)
        u = self.squash(
            self.conv(x).view(batch, self.capsules, self.dim, -1).transpose(2, 3).reshape(batch, -1, self.dim)
        )
        u_hat = (u[:, :, None, None, :] @ self.W).squeeze(3)
        b = torch.zeros(batch, u.size(1), self.out, 1, device=x.device)
        for i in range(3):
            v = self.squash((b.softmax(dim=2) * u_hat).sum(dim=1, keepdim=True))
            if i < 2:
                b = b + (u_hat * v).sum(-1, keepdim=True)
        return v.squeeze(1).norm(dim=-1)


def margin_loss(lengths, target):
    one_hot = F.one_hot(target, 4)
    present, absent = F.relu(0.9 - lengths) ** 2, F.relu(lengths - 0.1) ** 2
    return (one_hot * present + 0.5 * (1 - one_hot) * absent).sum(1).mean()


def smoothed(output, target):
    return F.cross_entropy(output, target, label_smoothing=0.1, weight=torch.tensor([1.0, 2.0, 1.0, 0.5]))


def dice_loss(output, target):
    p, t = output.softmax(1), F.one_hot(target, 4).permute(0, 3, 1, 2)
    return 1 - (2 * (p * t).sum((2, 3)) / ((p + t).sum((2, 3)) + 1)).mean() + F.cross_entropy(output, target)


class CountingNorm(nn.BatchNorm2d):
    """Batch normalisation that counts minibatches itself, as timm writes it."""

    def forward(self, x):
        if self.training:
            self.num_batches_tracked.add_(1)
        return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, 0.1)


def counting_norms():
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, 1, 1), CountingNorm(8), nn.ReLU()) for _ in range(16)]
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), *blocks, nn.Flatten(), nn.Linear(512, 4))


IMAGE, CLASS = numbers(3, 16, 16), classes(4)
MODELS = {
    "resnet": in_double(Task(ResNet, IMAGE, CLASS)),
    "resnext": Task(ResNeXt, IMAGE, CLASS, smoothed),
    "densenet": Task(DenseNet, IMAGE, CLASS),
    "inception": in_double(Task(InceptionNet, IMAGE, CLASS)),
    "googlenet": in_double(Task(GoogLeNet, IMAGE, CLASS, auxiliary_loss)),
    "mobilenet": in_double(Task(MobileNet, IMAGE, CLASS)),
    "convnext": Task(ConvNeXt, IMAGE, CLASS),
    "stochastic_depth": Task(stochastic_depth, IMAGE, CLASS, noisy=True),
    "shufflenet": Task(ShuffleNet, IMAGE, CLASS),
    "unet": Task(UNet, IMAGE, classes(4, 16, 16), dice_loss),
    "detector": Task(Detector, IMAGE, named(label=CLASS, box=numbers(4)), detection_loss),
    "vit": Task(ViT, IMAGE, CLASS),
    "swin": Task(Swin, IMAGE, CLASS),
    "mlp_mixer": Task(MLPMixer, IMAGE, CLASS),
    "spatial_transformer": Task(SpatialTransformer, IMAGE, CLASS, F.nll_loss),
    "super_resolution": Task(SuperResolution, numbers(3, 8, 8), numbers(3, 16, 16), F.l1_loss),
    "deeplab": Task(DeepLab, IMAGE, classes(4, 16, 16)),
    "cbam": Task(CBAM, IMAGE, CLASS),
    "weight_standardised": in_double(Task(EfficientNet, IMAGE, CLASS)),
    "surviving": Task(surviving, IMAGE, CLASS, noisy=True),
    "siamese": Task(Siamese, both(IMAGE, IMAGE), classes(2), contrastive_loss),
    "simclr": in_double(Task(SimCLR, both(IMAGE, IMAGE), CLASS, nt_xent)),
    "triplet": Task(TripletNet, both(*[numbers(3, 4, 4)] * 3), CLASS, triplet_loss),
    "capsules": Task(CapsuleNet, IMAGE, CLASS, margin_loss),
    "counting_norms": Task(counting_norms, IMAGE, CLASS),
}
