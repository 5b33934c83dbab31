"""Networks that make images: DCGAN's generator, a U-Net block, the token decoder of Step1X-Edit."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import attend, merge_heads, modulate, split_heads, time_embedding
from cdmpp.programs.zoo.registry import network


@network("dcgan")
def _dcgan(batch: int = 1, noise: int = 100, width: int = 64) -> tuple[nn.Module, tuple[Tensor, ...]]:
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
        z: Tensor = self.conv2(self.act(self.norm2(y))) + self.shortcut(x)
        return z


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
        z: Tensor = self.merge(torch.cat((y, kept), 1), time)
        return z


@network("unet-block")
def _unet_block(batch: int = 1, image: int = 32, width: int = 64) -> tuple[nn.Module, tuple[Tensor, ...]]:
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
        y: Tensor = x + parts[5] * self.mlp(modulate(self.norm2(x), parts[3], parts[4]))
        return y


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
        y: Tensor = x + gate * self.narrow(torch.cat((merge_heads(attend(q, k, v)), hidden), -1))
        return y


@network("step1x-dit")
def _step1x(
    batch: int = 1, image: int = 8, text: int = 32, width: int = 384, heads: int = 6
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Token decoder of Step1X-Edit: ``image`` x ``image`` tokens to denoise, as many of the image to edit,
    and ``text`` tokens of the instruction attend to each other."""
    tokens = torch.randn(batch, 2 * image * image, width)
    return _Step1X(width, heads, text), (torch.randn(batch, text, width), tokens, torch.randn(batch, width))
