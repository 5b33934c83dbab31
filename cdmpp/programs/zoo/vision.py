"""Residual networks for images: ResNet-18 and ResNet-50."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import ConvNorm, image_input
from cdmpp.programs.zoo.registry import network


class _Block(nn.Module):
    """Residual block; ``bottleneck`` puts the 3x3 convolution between two 1x1 ones."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = width * 4 if bottleneck else width
        if bottleneck:
            self.body = nn.Sequential(
                ConvNorm(inputs, width, 1), ConvNorm(width, width, 3, stride), ConvNorm(width, outputs, 1, act=None)
            )
        else:
            self.body = nn.Sequential(ConvNorm(inputs, width, 3, stride), ConvNorm(width, outputs, 3, act=None))
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else ConvNorm(inputs, outputs, 1, stride, act=None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


class _ResNet(nn.Module):
    def __init__(self, depths: tuple[int, ...], bottleneck: bool, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(ConvNorm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1))
        blocks: list[nn.Module] = []
        channels = 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for index in range(depth):
                blocks.append(_Block(channels, width, 2 if stage and not index else 1, bottleneck))
                channels = width * 4 if bottleneck else width
        self.stages = nn.Sequential(*blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.stages(self.stem(x)).mean((2, 3)))
        return scores


@network("resnet18")
def _resnet18(batch: int = 1, image: int = 224) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ResNet-18: residual blocks of two 3x3 convolutions."""
    return _ResNet((2, 2, 2, 2), False, 1000), image_input(batch, image)


@network("resnet50")
def _resnet50(batch: int = 1, image: int = 224) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ResNet-50: residual blocks of 1x1, 3x3 and 1x1 convolutions."""
    return _ResNet((3, 4, 6, 3), True, 1000), image_input(batch, image)
