"""The image networks of the public labels that are built here, in plain torch, by the names of the labels.

ResNet, ResNeXt and Wide ResNet, VGG, SqueezeNet, MNASNet, ShuffleNet v2 as torchvision has them; DenseNet;
vision transformers as timm has them, with fused attention. MobileNet v2 is the zoo's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

Act = Callable[[], nn.Module]
relu: Act = partial(nn.ReLU, inplace=True)


def conv_norm(
    inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1, act: Act | None = relu
) -> nn.Sequential:
    """Convolution without bias, batch normalisation, activation."""
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), *([act()] if act else []))


class _Residual(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool, groups: int, base: int) -> None:
        super().__init__()
        outputs = 4 * width if bottleneck else width
        inner = int(width * base / 64) * groups
        if bottleneck:
            self.body = nn.Sequential(
                conv_norm(inputs, inner, 1),
                conv_norm(inner, inner, 3, stride, groups),
                conv_norm(inner, outputs, 1, act=None),
            )
        else:
            self.body = nn.Sequential(conv_norm(inputs, width, 3, stride), conv_norm(width, width, 3, act=None))
        same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if same else conv_norm(inputs, outputs, 1, stride, act=None)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu_(self.body(x) + self.shortcut(x))


def resnet(depths: Sequence[int], bottleneck: bool = True, groups: int = 1, base: int = 64) -> nn.Module:
    """ResNet and its wider and grouped forms; ``base``: width of a group in the first stage."""
    body: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage, depth in enumerate(depths):
        width = 64 << stage
        for index in range(depth):
            stride = 2 if stage and not index else 1
            body.append(_Residual(channels, width, stride, bottleneck, groups, base))
            channels = 4 * width if bottleneck else width
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


def vgg(stages: Sequence[int], norm: bool) -> nn.Module:
    """VGG with its three large linear layers, the first two as convolutions as timm has them."""
    body: list[nn.Module] = []
    channels = 3
    for depth, width in zip(stages, (64, 128, 256, 512, 512), strict=True):
        for _ in range(depth):
            body.append(nn.Conv2d(channels, width, 3, padding=1))
            body += [nn.BatchNorm2d(width)] if norm else []
            body.append(relu())
            channels = width
        body.append(nn.MaxPool2d(2, 2))
    head = [nn.Conv2d(512, 4096, 7), relu(), nn.Dropout(0.0), nn.Conv2d(4096, 4096, 1), relu()]
    return nn.Sequential(*body, *head, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4096, 1000))


class _Fire(nn.Module):
    def __init__(self, inputs: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(nn.Conv2d(inputs, squeeze, 1), relu())
        self.one = nn.Sequential(nn.Conv2d(squeeze, expand, 1), relu())
        self.three = nn.Sequential(nn.Conv2d(squeeze, expand, 3, padding=1), relu())

    def forward(self, x: Tensor) -> Tensor:
        x = self.squeeze(x)
        return torch.cat((self.one(x), self.three(x)), 1)


def squeezenet(version: str) -> nn.Module:
    """SqueezeNet 1.0 or 1.1."""
    early = version == "1_0"
    body: list[nn.Module] = [nn.Conv2d(3, 96 if early else 64, 7 if early else 3, 2), relu()]
    pools = (3, 7) if early else (2, 4)
    body.append(nn.MaxPool2d(3, 2, ceil_mode=True))
    channels = 96 if early else 64
    for index, (squeeze, expand) in enumerate(
        ((16, 64), (16, 64), (32, 128), (32, 128), (48, 192), (48, 192), (64, 256), (64, 256))
    ):
        if index in pools:
            body.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        body.append(_Fire(channels, squeeze, expand))
        channels = 2 * expand
    return nn.Sequential(*body, nn.Dropout(0.5), nn.Conv2d(512, 1000, 1), relu(), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class _Inverted(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expand: int) -> None:
        super().__init__()
        width = inputs * expand
        self.body = nn.Sequential(
            conv_norm(inputs, width, 1),
            conv_norm(width, width, kernel, stride, width),
            conv_norm(width, outputs, 1, act=None),
        )
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x) + x if self.residual else self.body(x)


def mnasnet(alpha: float) -> nn.Module:
    """MNASNet-B1 of a width."""

    def wide(value: int) -> int:
        rounded = max(8, int(value * alpha + 4) // 8 * 8)
        return rounded if rounded >= 0.9 * value * alpha else rounded + 8

    first, second = wide(32), wide(16)
    body: list[nn.Module] = [
        conv_norm(3, first, 3, 2),
        conv_norm(first, first, 3, 1, first),
        conv_norm(first, second, 1, act=None),
    ]
    channels = second
    stages = (
        (24, 3, 2, 3, 3),
        (40, 5, 2, 3, 3),
        (80, 5, 2, 6, 3),
        (96, 3, 1, 6, 2),
        (192, 5, 2, 6, 4),
        (320, 3, 1, 6, 1),
    )
    for width, kernel, stride, expand, depth in stages:
        for index in range(depth):
            body.append(_Inverted(channels, wide(width), kernel, 1 if index else stride, expand))
            channels = wide(width)
    body.append(conv_norm(channels, 1280, 1))
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(0.2), nn.Linear(1280, 1000))


class _Shuffle(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        self.split = stride == 1
        if not self.split:
            self.left = nn.Sequential(conv_norm(inputs, inputs, 3, stride, inputs, None), conv_norm(inputs, half, 1))
        into = half if self.split else inputs
        self.right = nn.Sequential(
            conv_norm(into, half, 1), conv_norm(half, half, 3, stride, half, None), conv_norm(half, half, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        if self.split:
            kept, x = x.chunk(2, dim=1)
        else:
            kept = self.left(x)
        joined = torch.cat((kept, self.right(x)), 1)
        n, c, h, w = joined.shape
        return joined.view(n, 2, c // 2, h, w).transpose(1, 2).contiguous().view(n, c, h, w)


def shufflenet(widths: Sequence[int]) -> nn.Module:
    """ShuffleNet v2."""
    body: list[nn.Module] = [conv_norm(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    channels = 24
    for width, depth in zip(widths, (4, 8, 4), strict=False):
        for index in range(depth):
            body.append(_Shuffle(channels, width, 1 if index else 2))
            channels = width
    body.append(conv_norm(channels, widths[3], 1))
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[3], 1000))


class _Dense(nn.Module):
    def __init__(self, inputs: int, growth: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.BatchNorm2d(inputs),
            relu(),
            nn.Conv2d(inputs, 4 * growth, 1, bias=False),
            nn.BatchNorm2d(4 * growth),
            relu(),
            nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False),
        )

    def forward(self, features: list[Tensor]) -> Tensor:
        made: Tensor = self.body(torch.cat(features, 1))
        return made


class _DenseBlock(nn.Module):
    def __init__(self, inputs: int, depth: int, growth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Dense(inputs + i * growth, growth) for i in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.layers:
            features.append(layer(features))
        return torch.cat(features, 1)


def densenet(depths: Sequence[int], growth: int = 32, first: int = 64) -> nn.Module:
    """DenseNet."""
    body: list[nn.Module] = [conv_norm(3, first, 7, 2), nn.MaxPool2d(3, 2, 1)]
    channels = first
    for index, depth in enumerate(depths):
        body.append(_DenseBlock(channels, depth, growth))
        channels += depth * growth
        body += [nn.BatchNorm2d(channels), relu()]
        if index + 1 < len(depths):
            body += [nn.Conv2d(channels, channels // 2, 1, bias=False), nn.AvgPool2d(2, 2)]
            channels //= 2
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000))


class _VitLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.last_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.joint, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        joint = self.joint(self.norm(x)).reshape(batch, tokens, 3, self.heads, width // self.heads)
        q, k, v = joint.permute(2, 0, 3, 1, 4).unbind(0)
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.down(nn.functional.gelu(self.up(self.last_norm(x))))


class Vit(nn.Module):
    """Vision transformer with a class token."""

    def __init__(self, image: int, patch: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, (image // patch) ** 2 + 1, width))
        self.layers = nn.Sequential(*(_VitLayer(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(x.shape[0], -1, -1), x), 1) + self.positions
        scores: Tensor = self.head(self.norm(self.layers(x))[:, 0])
        return scores


Build = Callable[[], nn.Module]
_RESNETS: Mapping[str, Build] = {
    "resnet18": partial(resnet, (2, 2, 2, 2), False),
    "resnet34": partial(resnet, (3, 4, 6, 3), False),
    "resnet50": partial(resnet, (3, 4, 6, 3)),
    "resnet101": partial(resnet, (3, 4, 23, 3)),
    "resnet152": partial(resnet, (3, 8, 36, 3)),
    "resnext50_32x4d": partial(resnet, (3, 4, 6, 3), True, 32, 4),
    "resnext101_32x4d": partial(resnet, (3, 4, 23, 3), True, 32, 4),
    "resnext101_64x4d": partial(resnet, (3, 4, 23, 3), True, 64, 4),
    "resnext101_32x8d": partial(resnet, (3, 4, 23, 3), True, 32, 8),
    "resnext101_32x16d": partial(resnet, (3, 4, 23, 3), True, 32, 16),
    "wide_resnet50_2": partial(resnet, (3, 4, 6, 3), True, 1, 128),
    "wide_resnet101_2": partial(resnet, (3, 4, 23, 3), True, 1, 128),
}
#: Names of weights that timm lists as models of their own -> the network.
_SAME: Mapping[str, str] = {
    **{f"tv_{name}": name for name in ("resnet34", "resnet50", "resnet101", "resnet152", "resnext50_32x4d")},
    **{f"gluon_{name}_v1b": name for name in ("resnet18", "resnet34", "resnet50", "resnet101", "resnet152")},
    **{f"gluon_{name}": name for name in ("resnext50_32x4d", "resnext101_32x4d", "resnext101_64x4d")},
    **{
        f"{source}_{name}": name
        for source in ("swsl", "ssl", "ig")
        for name in ("resnet18", "resnet50", *(n for n in _RESNETS if n.startswith("resnext")))
    },
}
_VITS = {"tiny": (192, 3, 12), "small": (384, 6, 12), "base": (768, 12, 12), "large": (1024, 16, 24)}
_VGG = {"11": (1, 1, 2, 2, 2), "13": (2, 2, 2, 2, 2), "16": (2, 2, 3, 3, 3), "19": (2, 2, 4, 4, 4)}


def _networks() -> dict[str, Build]:
    from cdmpp.programs.zoo import parse_network

    builds: dict[str, Build] = dict(_RESNETS)
    builds |= {alias: _RESNETS[name] for alias, name in _SAME.items()}
    for depth, stages in _VGG.items():
        builds[f"vgg{depth}"], builds[f"vgg{depth}_bn"] = (partial(vgg, stages, False), partial(vgg, stages, True))
    builds |= {f"squeezenet{v}": partial(squeezenet, v) for v in ("1_0", "1_1")}
    for name, alpha in (("0_5", 0.5), ("0_75", 0.75), ("1_0", 1.0), ("1_3", 1.3)):
        builds[f"mnasnet{name}"] = partial(mnasnet, alpha)
    for name, widths in (
        ("0_5", (48, 96, 192, 1024)),
        ("1_0", (116, 232, 464, 1024)),
        ("1_5", (176, 352, 704, 1024)),
        ("2_0", (244, 488, 976, 2048)),
    ):
        builds[f"shufflenet_v2_x{name}"] = partial(shufflenet, widths)
    for name, arguments in (
        ("densenet121", ((6, 12, 24, 16),)),
        ("densenet169", ((6, 12, 32, 32),)),
        ("densenet201", ((6, 12, 48, 32),)),
        ("densenet161", ((6, 12, 36, 24), 48, 96)),
    ):
        builds[name] = partial(densenet, *arguments)
    builds["tv_densenet121"] = builds["densenet121"]
    builds["mobilenetv2_100"] = lambda: parse_network("mobilenet-v2").module
    for name, (width, heads, layers) in _VITS.items():
        for patch in (8, 16, 32):
            for image in (224, 384):
                builds[f"vit_{name}_patch{patch}_{image}"] = partial(Vit, image, patch, width, heads, layers)
        builds[f"deit_{name}_patch16_224"] = partial(Vit, 224, 16, width, heads, layers)
        builds[f"deit_{name}_patch16_384"] = partial(Vit, 384, 16, width, heads, layers)
    return builds


NETWORKS: Mapping[str, Build] = _networks()


class Training(nn.Module):
    """A network and the loss of a classifier."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, image: Tensor) -> Tensor:
        classes = torch.zeros(image.shape[0], dtype=torch.int64, device=image.device)
        loss: Tensor = nn.functional.cross_entropy(self.network(image), classes)
        return loss


def make(name: str, training: bool, size: int) -> nn.Module:
    """A network of :data:`NETWORKS` for images of a size, on the meta device, in evaluation mode or
    training.
    """
    with torch.device("meta"):
        network = NETWORKS[name]()
    return network.to("meta").requires_grad_(True).train(training)
