"""Blocks of Step-Audio: the encoder of spectrograms and the vocoder."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.programs.zoo.layers import check_divides
from cdmpp.programs.zoo.registry import network
from cdmpp.programs.zoo.transformers import PreNormLayer


class _AudioEncoder(nn.Module):
    """Two conv1d layers, the second of which halves the frames, then a transformer layer."""

    def __init__(self, mels: int, width: int, heads: int, frames: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv1d(mels, width, 3, 1, 1), nn.Conv1d(width, width, 3, 2, 1)
        self.act, self.positions = nn.GELU(), nn.Parameter(torch.randn(frames // 2, width))
        self.layer, self.norm, self.pool = PreNormLayer(width, heads), nn.LayerNorm(width), nn.AvgPool1d(2, 2)

    def forward(self, mel: Tensor) -> Tensor:
        x = self.act(self.conv2(self.act(self.conv1(mel)))).transpose(1, 2) + self.positions
        x = self.norm(self.layer(x))
        y: Tensor = self.pool(x.transpose(1, 2))
        return y


@network("audio-encoder")
def _audio_encoder(
    batch: int = 1, frames: int = 256, mels: int = 80, width: int = 384, heads: int = 6
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Step-Audio's encoder: ``frames`` (a multiple of 4) of ``mels`` bands."""
    check_divides(heads, width, "audio-encoder: heads and width")
    check_divides(4, frames, "audio-encoder: frames")
    return _AudioEncoder(mels, width, heads, frames), (torch.randn(batch, mels, frames),)


class _Dilated(nn.Module):
    """HiFi-GAN's residual block: convolutions of growing dilation."""

    def __init__(self, width: int, kernel: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, kernel, dilation=d, padding=d * (kernel // 2)) for d in (1, 3, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = x + conv(nn.functional.leaky_relu(x, 0.1))
        return x


class _Vocoder(nn.Module):
    """HiFi-GAN: transposed convolutions lengthen, residual blocks of several kernels follow each."""

    def __init__(self, mels: int, width: int) -> None:
        super().__init__()
        self.enter = nn.Conv1d(mels, width, 7, padding=3)
        self.ups, self.blocks = nn.ModuleList(), nn.ModuleList()
        for factor in (8, 8, 4):
            self.ups.append(nn.ConvTranspose1d(width, width // 2, 2 * factor, factor, factor // 2))
            width //= 2
            self.blocks += [_Dilated(width, 3), _Dilated(width, 7)]
        self.leave = nn.Conv1d(width, 1, 7, padding=3)

    def forward(self, mel: Tensor) -> Tensor:
        x = self.enter(mel)
        for stage, up in enumerate(self.ups):
            x = up(nn.functional.leaky_relu(x, 0.1))
            x = (self.blocks[2 * stage](x) + self.blocks[2 * stage + 1](x)) * 0.5
        return torch.tanh(self.leave(nn.functional.leaky_relu(x, 0.1)))


@network("vocoder")
def _vocoder(
    batch: int = 1, frames: int = 32, mels: int = 80, width: int = 128
) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """Step-Audio's vocoder: ``frames`` of a spectrogram to 256 times as many samples."""
    check_divides(8, width, "vocoder: width")
    return _Vocoder(mels, width), (torch.randn(batch, mels, frames),)
