"""Image networks: residual, plain, inverted, dense and branching ones, later ones with windows, and generators."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import (
    Built,
    ConvNorm,
    attend,
    check_divides,
    image_input,
    merge_heads,
    modulate,
    split_heads,
    time_embedding,
)
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
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


@network("resnet18")
def _resnet18(batch: int = 1, image: int = 224) -> Built:
    """ResNet-18: residual blocks of two 3x3 convolutions."""
    return _ResNet((2, 2, 2, 2), False, 1000), image_input(batch, image)


@network("resnet50")
def _resnet50(batch: int = 1, image: int = 224) -> Built:
    """ResNet-50: residual blocks of 1x1, 3x3 and 1x1 convolutions."""
    return _ResNet((3, 4, 6, 3), True, 1000), image_input(batch, image)


def _classifier(body: nn.Sequential, channels: int, classes: int = 1000) -> nn.Sequential:
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


@network("vgg11")
def _vgg11(batch: int = 1, image: int = 224) -> Built:
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
def _mobilenet_v2(batch: int = 1, image: int = 224) -> Built:
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
def _densenet121(batch: int = 1, image: int = 224) -> Built:
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
def _inception(batch: int = 1, image: int = 224) -> Built:
    """Three stages of Inception blocks after a plain stem, two blocks each."""
    body: list[nn.Module] = [ConvNorm(3, 32, 3, 2), ConvNorm(32, 64, 3), nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for width in (64, 128, 192):
        for _ in range(2):
            body.append(_Inception(channels, width))
            channels = 3 * width + width // 2
        body.append(nn.MaxPool2d(3, 2, 1))
    return _classifier(nn.Sequential(*body), channels), image_input(batch, image)


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
        return x + y.permute(0, 3, 1, 2)


@network("convnext")
def _convnext(batch: int = 1, image: int = 64, width: int = 48) -> Built:
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
def _efficientnet(batch: int = 1, image: int = 96, width: int = 16) -> Built:
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
def _shufflenet(batch: int = 1, image: int = 96, width: int = 58) -> Built:
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
def _resnext(batch: int = 1, image: int = 64, width: int = 64, groups: int = 8) -> Built:
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
        return x + self.mlp(x)


@network("swin")
def _swin(batch: int = 1, side: int = 16, width: int = 96, heads: int = 3, window: int = 4) -> Built:
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
        return x + self.over_channels(self.norm2(x))


@network("mixer")
def _mixer(batch: int = 1, tokens: int = 49, width: int = 192) -> Built:
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
def _segmenter(batch: int = 1, image: int = 96, width: int = 48, classes: int = 19) -> Built:
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
        return y.clamp(0, 1)


@network("super-resolution")
def _super_resolution(batch: int = 1, image: int = 48, width: int = 32, scale: int = 2) -> Built:
    """SRResNet in small: convolutions with PReLU, and a pixel shuffle."""
    return _SuperResolution(width, scale), image_input(batch, image)


@network("dcgan")
def _dcgan(batch: int = 1, noise: int = 100, width: int = 64) -> Built:
    """DCGAN's generator: noise to 64 x 64 pixels by transposed convolutions."""
    body: list[nn.Module] = []
    channels = noise
    for index, factor in enumerate((8, 4, 2, 1)):
        step, padding = (2, 1) if index else (1, 0)
        outputs = width * factor
        body += [nn.ConvTranspose2d(channels, outputs, 4, step, padding, bias=False)]
        body += [nn.BatchNorm2d(outputs), nn.ReLU()]
        channels = outputs
    body += [nn.ConvTranspose2d(channels, 3, 4, 2, 1, bias=False), nn.Tanh()]
    return nn.Sequential(*body), (torch.randn(batch, noise, 1, 1),)


class _ResNorm(nn.Module):
    """Residual block of a diffusion U-Net: group normalisation, SiLU, convolution, time embedding."""

    def __init__(self, inputs: int, outputs: int, embedding: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(8, inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(embedding, outputs)
        self.norm2, self.conv2 = nn.GroupNorm(8, outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.shortcut = nn.Conv2d(inputs, outputs, 1)
        self.act = nn.SiLU()

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y = self.conv1(self.act(self.norm1(x)))
        y = y + self.time(self.act(time))[:, :, None, None]
        return self.conv2(self.act(self.norm2(y))) + self.shortcut(x)


class _UNet(nn.Module):
    """One level down and up again, with the skip connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        embedding = 4 * width
        self.time = nn.Sequential(nn.Linear(width, embedding), nn.SiLU(), nn.Linear(embedding, embedding))
        self.down, self.shrink = _ResNorm(width, width, embedding), nn.Conv2d(width, width, 3, 2, 1)
        self.inner, self.up = _ResNorm(width, 2 * width, embedding), nn.Conv2d(2 * width, width, 3, 1, 1)
        self.merge = _ResNorm(2 * width, width, embedding)

    def forward(self, x: Tensor, step: Tensor) -> Tensor:
        time = self.time(step)
        kept = self.down(x, time)
        y = self.inner(self.shrink(kept), time)
        y = self.up(nn.functional.interpolate(y, scale_factor=2.0, mode="nearest"))
        return self.merge(torch.cat((y, kept), 1), time)


@network("unet-block")
def _unet_block(batch: int = 1, image: int = 32, width: int = 64) -> Built:
    """A level of a diffusion U-Net; ``image`` is the side of the latent, even."""
    return _UNet(width), (torch.randn(batch, width, image, image), time_embedding(batch, width))


class _Stream(nn.Module):
    """One kind of tokens in a double block: its own weights around the shared attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.modulation = nn.Linear(width, 6 * width)
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))

    def before(self, x: Tensor, parts: tuple[Tensor, ...]) -> list[Tensor]:
        joint = self.qkv(modulate(self.norm1(x), parts[0], parts[1]))
        return [split_heads(part, self.heads) for part in joint.chunk(3, -1)]

    def after(self, x: Tensor, attended: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
        x = x + parts[2] * self.out(attended)
        return x + parts[5] * self.mlp(modulate(self.norm2(x), parts[3], parts[4]))


class _Step1X(nn.Module):
    """A double block (text and image tokens apart) and a single block (all tokens alike)."""

    def __init__(self, width: int, heads: int, text: int) -> None:
        super().__init__()
        self.text_tokens, self.heads, self.width = text, heads, width
        self.text, self.image = _Stream(width, heads), _Stream(width, heads)
        self.modulation = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.wide, self.narrow = nn.Linear(width, 7 * width), nn.Linear(5 * width, width)

    def forward(self, text: Tensor, image: Tensor, condition: Tensor) -> Tensor:
        condition = nn.functional.silu(condition)
        for_text = self.text.modulation(condition)[:, None].chunk(6, -1)
        for_image = self.image.modulation(condition)[:, None].chunk(6, -1)
        pairs = zip(self.text.before(text, for_text), self.image.before(image, for_image), strict=True)
        q, k, v = (torch.cat(pair, 2) for pair in pairs)
        attended = merge_heads(attend(q, k, v))
        text = self.text.after(text, attended[:, : self.text_tokens], for_text)
        image = self.image.after(image, attended[:, self.text_tokens :], for_image)
        x = torch.cat((text, image), 1)
        shift, scale, gate = self.modulation(condition)[:, None].chunk(3, -1)
        joint = self.wide(modulate(self.norm(x), shift, scale))
        q, k, v = (split_heads(part, self.heads) for part in joint[..., : 3 * self.width].chunk(3, -1))
        hidden = nn.functional.gelu(joint[..., 3 * self.width :], approximate="tanh")
        return x + gate * self.narrow(torch.cat((merge_heads(attend(q, k, v)), hidden), -1))


@network("step1x-dit")
def _step1x(batch: int = 1, image: int = 8, text: int = 32, width: int = 384, heads: int = 6) -> Built:
    """Token decoder of Step1X-Edit: ``image`` x ``image`` tokens to denoise, as many of the image to edit,
    and ``text`` tokens of the instruction attend to each other."""
    tokens = torch.randn(batch, 2 * image * image, width)
    return _Step1X(width, heads, text), (torch.randn(batch, text, width), tokens, torch.randn(batch, width))
