"""Image networks after 2017: grouped and depthwise convolutions, windows, mixers, dense prediction."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import ConvNorm, attend, check_divides, image_input, merge_heads, split_heads
from cdmpp.programs.zoo.registry import network


class _ConvNeXtBlock(nn.Module):
    """Depthwise 7x7 convolution, then a channels-last feed-forward network."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.spatial = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.scale = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.spatial(x).permute(0, 2, 3, 1)
        y = self.scale * self.mlp(self.norm(y))
        out: Tensor = x + y.permute(0, 3, 1, 2)
        return out


@network("convnext")
def _convnext(batch: int = 1, image: int = 64, width: int = 48) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ConvNeXt: three stages of one block each; ``image`` is a multiple of 16."""
    check_divides(16, image, "convnext: image")
    body: list[nn.Module] = [nn.Conv2d(3, width, 4, 4), _ConvNeXtBlock(width)]
    for stage in (1, 2):
        body += [nn.Conv2d(width << stage - 1, width << stage, 2, 2), _ConvNeXtBlock(width << stage)]
    return nn.Sequential(*body), image_input(batch, image)


class _SqueezeExcite(nn.Module):
    """Scales every channel by a gate that is computed from the mean of all channels."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(width, hidden, 1), nn.Conv2d(hidden, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        gate = self.up(nn.functional.silu(self.down(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(gate)


class _MBConv(nn.Module):
    """EfficientNet's block."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        width = inputs * expand
        self.body = nn.Sequential(
            ConvNorm(inputs, width, 1, act=nn.SiLU),
            ConvNorm(width, width, kernel, stride, groups=width, act=nn.SiLU),
            _SqueezeExcite(width, max(1, inputs // 4)),
            ConvNorm(width, outputs, 1, act=None),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.residual else y


@network("efficientnet")
def _efficientnet(batch: int = 1, image: int = 96, width: int = 16) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Blocks of EfficientNet: depthwise convolutions with gates on the channels."""
    body: list[nn.Module] = [ConvNorm(3, width, 3, 2, act=nn.SiLU)]
    inputs = width
    for factor, kernel, stride, expand in ((1.5, 3, 2, 4), (2.5, 5, 2, 6), (5, 3, 2, 6), (7, 5, 1, 6)):
        outputs = int(width * factor)
        body += [_MBConv(inputs, outputs, kernel, stride, expand), _MBConv(outputs, outputs, kernel, 1, expand)]
        inputs = outputs
    return nn.Sequential(*body), image_input(batch, image)


class _Shuffle(nn.Module):
    """ShuffleNet's unit: half of the channels pass, the other half is filtered, then both are interleaved."""

    def __init__(self, width: int) -> None:
        super().__init__()
        half = width // 2
        self.body = nn.Sequential(
            ConvNorm(half, half, 1), ConvNorm(half, half, 3, groups=half, act=None), ConvNorm(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        kept, filtered = x.chunk(2, 1)
        y = torch.stack((kept, self.body(filtered)), 2)
        batch, half, _, height, width = y.shape
        return y.reshape(batch, 2 * half, height, width)


@network("shufflenet")
def _shufflenet(batch: int = 1, image: int = 96, width: int = 58) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ShuffleNetV2: split, filter, interleave; ``width`` is even."""
    check_divides(2, width, "shufflenet: width")
    body: list[nn.Module] = [ConvNorm(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    inputs = 24
    for stage in range(3):
        body += [ConvNorm(inputs, width << stage, 3, 2), _Shuffle(width << stage)]
        inputs = width << stage
    return nn.Sequential(*body), image_input(batch, image)


class _ResNeXtBlock(nn.Module):
    """Bottleneck with a grouped convolution."""

    def __init__(self, inputs: int, width: int, groups: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            ConvNorm(inputs, width, 1),
            ConvNorm(width, width, 3, stride, groups=groups),
            ConvNorm(width, 2 * width, 1, act=None),
        )
        self.shortcut = ConvNorm(inputs, 2 * width, 1, stride, act=None)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.leaky_relu(self.body(x) + self.shortcut(x), 0.1)


@network("resnext")
def _resnext(batch: int = 1, image: int = 64, width: int = 64, groups: int = 8) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ResNeXt: bottlenecks with convolutions in ``groups`` groups."""
    check_divides(groups, width, "resnext: groups")
    body: list[nn.Module] = [ConvNorm(3, width, 5, 2)]
    inputs = width
    for stage in range(3):
        body.append(_ResNeXtBlock(inputs, width << stage, groups, 1 + (stage > 0)))
        inputs = 2 * width << stage
    return nn.Sequential(*body, nn.AvgPool2d(2)), image_input(batch, image)


class _Window(nn.Module):
    """Attention inside windows of ``window`` x ``window`` tokens, shifted by half a window if ``shift``."""

    def __init__(self, width: int, heads: int, window: int, shift: bool) -> None:
        super().__init__()
        self.heads, self.window, self.shift = heads, window, window // 2 if shift else 0
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias = nn.Parameter(torch.randn(heads, window**2, window**2))
        self.mlp = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, side, _, width = x.shape
        count, y = side // self.window, self.norm(x)
        if self.shift:
            y = torch.cat((y[:, self.shift :], y[:, : self.shift]), 1)
        y = y.reshape(batch, count, self.window, count, self.window, width).transpose(2, 3)
        y = y.reshape(batch * count**2, self.window**2, width)
        q, k, v = (split_heads(part, self.heads) for part in self.qkv(y).chunk(3, -1))
        y = self.out(merge_heads(attend(q, k, v, self.bias)))
        y = y.reshape(batch, count, count, self.window, self.window, width).transpose(2, 3)
        x = x + y.reshape(batch, side, side, width)
        z: Tensor = x + self.mlp(x)
        return z


@network("swin")
def _swin(
    batch: int = 1, side: int = 16, width: int = 96, heads: int = 3, window: int = 4
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Swin: attention in windows and in shifted windows over ``side`` x ``side`` tokens."""
    check_divides(window, side, "swin: window")
    check_divides(heads, width, "swin: heads")
    body = nn.Sequential(_Window(width, heads, window, False), _Window(width, heads, window, True))
    return body, (torch.randn(batch, side, side, width),)


class _Mixer(nn.Module):
    """A feed-forward network over tokens, then one over channels."""

    def __init__(self, tokens: int, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.over_tokens = nn.Sequential(nn.Linear(tokens, 2 * tokens), nn.GELU(), nn.Linear(2 * tokens, tokens))
        self.over_channels = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        y: Tensor = x + self.over_channels(self.norm2(x))
        return y


@network("mixer")
def _mixer(batch: int = 1, tokens: int = 49, width: int = 192) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """MLP-Mixer's layer: products along both axes of the tokens."""
    return _Mixer(tokens, width), (torch.randn(batch, tokens, width),)


class _Segmenter(nn.Module):
    """Dilated convolutions in parallel, joined and enlarged."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, inputs, 3, 2), ConvNorm(inputs, inputs, 3, 2))
        self.branches = nn.ModuleList(
            nn.Conv2d(inputs, width, 3, padding=dilation, dilation=dilation) for dilation in (1, 2, 4, 8)
        )
        self.join, self.head = ConvNorm(4 * width, width, 1, act=nn.Hardswish), nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.stem(x)
        y = self.join(torch.cat([branch(y) for branch in self.branches], 1))
        y = nn.functional.interpolate(self.head(y), scale_factor=4.0, mode="bilinear", align_corners=False)
        return torch.softmax(y, 1)


@network("segmenter")
def _segmenter(
    batch: int = 1, image: int = 96, width: int = 48, classes: int = 19
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """DeepLab's head: dilated convolutions, bilinear enlargement, softmax over classes."""
    check_divides(4, image, "segmenter: image")
    return _Segmenter(64, width, classes), image_input(batch, image)


class _SuperResolution(nn.Module):
    """Residual convolutions at low resolution, then a pixel shuffle."""

    def __init__(self, width: int, scale: int) -> None:
        super().__init__()
        self.stem, self.act = nn.Conv2d(3, width, 5, padding=2), nn.PReLU(width)
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1), nn.PReLU(width), nn.Conv2d(width, width, 3, padding=1)
        )
        self.enlarge, self.scale = nn.Conv2d(width, 3 * scale**2, 3, padding=1), scale

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.stem(x))
        y = self.enlarge(y + 0.2 * self.body(y))
        batch, channels, height, width = y.shape
        y = y.reshape(batch, channels // self.scale**2, self.scale, self.scale, height, width)
        y = y.permute(0, 1, 4, 2, 5, 3)
        y = y.reshape(batch, channels // self.scale**2, height * self.scale, width * self.scale)
        out: Tensor = y.clamp(0, 1)
        return out


@network("super-resolution")
def _super_resolution(
    batch: int = 1, image: int = 48, width: int = 32, scale: int = 2
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """SRResNet in small: convolutions with PReLU, and a pixel shuffle."""
    return _SuperResolution(width, scale), image_input(batch, image)
