"""Convolutional networks of other shapes: plain, inverted, dense and branching."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import ConvNorm, image_input
from cdmpp.programs.zoo.registry import network


def _classifier(body: nn.Sequential, channels: int, classes: int = 1000) -> nn.Sequential:
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


@network("vgg11")
def _vgg11(batch: int = 1, image: int = 224) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """VGG-11, its three large linear layers replaced by one after an average, as in later variants."""
    body: list[nn.Module] = []
    channels = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if width:
            body += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        else:
            body.append(nn.MaxPool2d(2, 2))
    return _classifier(nn.Sequential(*body), channels), image_input(batch, image)


class _Inverted(nn.Module):
    """MobileNetV2's block: widen, filter each channel by itself, narrow."""

    def __init__(self, inputs: int, outputs: int, stride: int, expand: int) -> None:
        super().__init__()
        width = inputs * expand
        widen = [ConvNorm(inputs, width, 1, act=nn.ReLU6)] if expand > 1 else []
        self.body = nn.Sequential(
            *widen, ConvNorm(width, width, 3, stride, groups=width, act=nn.ReLU6), ConvNorm(width, outputs, 1, act=None)
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.body(x)
        return x + y if self.residual else y


@network("mobilenet-v2")
def _mobilenet_v2(batch: int = 1, image: int = 224) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """MobileNetV2: inverted residual blocks with depthwise convolutions."""
    body: list[nn.Module] = [ConvNorm(3, 32, 3, 2, act=nn.ReLU6)]
    channels = 32
    stages = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expand, width, depth, stride in stages:
        for index in range(depth):
            body.append(_Inverted(channels, width, 1 if index else stride, expand))
            channels = width
    body.append(ConvNorm(channels, 1280, 1, act=nn.ReLU6))
    return _classifier(nn.Sequential(*body), 1280), image_input(batch, image)


class _Dense(nn.Module):
    """DenseNet's layer: what it computes is appended to what it read."""

    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs),
            nn.ReLU(),
            ConvNorm(inputs, 4 * growth, 1),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, self.body(x)), 1)


@network("densenet121")
def _densenet121(batch: int = 1, image: int = 224) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """DenseNet-121: every layer reads what all earlier ones of its block wrote."""
    growth = 32
    body: list[nn.Module] = [ConvNorm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate((6, 12, 24, 16)):
        for _ in range(depth):
            body.append(_Dense(channels, growth))
            channels += growth
        body += [nn.BatchNorm2d(channels), nn.ReLU()]
        if stage < 3:
            body += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2, 2)]
            channels //= 2
    return _classifier(nn.Sequential(*body), channels), image_input(batch, image)


class _Inception(nn.Module):
    """Four branches side by side: 1x1, 3x3, factorised 7x7 as 1x7 and 7x1, pooling."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.point = ConvNorm(inputs, width, 1)
        self.square = nn.Sequential(ConvNorm(inputs, width // 2, 1), ConvNorm(width // 2, width, 3))
        self.long = nn.Sequential(
            ConvNorm(inputs, width // 2, 1),
            ConvNorm(width // 2, width // 2, (1, 7)),
            ConvNorm(width // 2, width, (7, 1)),
        )
        self.pooled = nn.Sequential(nn.AvgPool2d(3, 1, 1), ConvNorm(inputs, width // 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.point(x), self.square(x), self.long(x), self.pooled(x)), 1)


@network("inception")
def _inception(batch: int = 1, image: int = 224) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Three stages of Inception blocks after a plain stem, two blocks each."""
    body: list[nn.Module] = [ConvNorm(3, 32, 3, 2), ConvNorm(32, 64, 3), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width in (64, 128, 192):
        for _ in range(2):
            body.append(_Inception(channels, width))
            channels = 3 * width + width // 2
        body.append(nn.MaxPool2d(3, 2, 1))
    return _classifier(nn.Sequential(*body), channels), image_input(batch, image)
