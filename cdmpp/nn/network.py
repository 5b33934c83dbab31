"""The regressor: a masked transformer over the leaves, fused with device and protocol, quantile outputs.

CDMPP section 4.2-4.3 with these deviations: any number of leaves in one model (padding mask and attention
pooling in place of one flatten layer per leaf count); the network predicts log(latency / reference), the
reference being arithmetic + traffic + launch floor of the device at hand; the device conditions every leaf.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from cdmpp.features.schedule import SCHEDULE_WIDTH
from cdmpp.features.schema import WIDTH
from cdmpp.nn.inputs import DEVICE_LOGS, LEAF_MEETS_DEVICE, QUESTION_COLUMNS, SUMMARY_COLUMNS

INPUT_WIDTH = len(SUMMARY_COLUMNS) + len(QUESTION_COLUMNS)
#: Quantile levels that the network emits; others are interpolated between them.
LEVELS = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98)


class NetworkConfig(BaseModel):
    """Sizes of the network."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    width: int = Field(96, ge=16, le=512, description="width of a leaf token")
    layers: int = Field(2, ge=1, le=12)
    heads: int = Field(4, ge=1, le=16)
    feed_forward: int = Field(192, ge=16, le=4096)
    head_width: int = Field(384, ge=16, le=2048)
    head_layers: int = Field(3, ge=1, le=12)
    device_width: int = Field(16, ge=1, le=128, description="width of a known device's embedding")
    head: Literal["ratio", "structured"] = "ratio"
    dropout: float = Field(0.0, ge=0.0, le=0.9)
    schedule: bool = Field(False, description="read the schedule's columns of programs given as TIR")

    @property
    def leaf_width(self) -> int:
        """Columns of a leaf."""
        return WIDTH + SCHEDULE_WIDTH if self.schedule else WIDTH


#: Positions whose encoding is kept; deeper programs are rare.
POSITION_TABLE = 512


def positional_encoding(positions: Tensor, width: int) -> Tensor:
    """sin/cos encoding with the standard exponent: PE[p, 2i] = sin(p / 10000^(2i / width))."""
    exponent = torch.arange(0, width, 2, device=positions.device, dtype=torch.float32) / width
    angle = positions.float().unsqueeze(-1) * torch.exp(-math.log(10000.0) * exponent)
    return torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)


class EncoderLayer(nn.Module):
    """Pre-norm self-attention over the leaves of a program, then a feed-forward block."""

    def __init__(self, config: NetworkConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm_attention = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_feed = nn.LayerNorm(config.width)
        self.feed = nn.Sequential(
            nn.Linear(config.width, config.feed_forward),
            nn.GELU(),
            nn.Linear(config.feed_forward, config.width),
        )

    def forward(self, tokens: Tensor, mask: Tensor | None) -> Tensor:
        """tokens (programs, leaves, width), mask (programs, leaves) True = real."""
        rows, leaves, width = tokens.shape
        q, k, v = (
            self.qkv(self.norm_attention(tokens))
            .view(rows, leaves, 3, self.heads, width // self.heads)
            .permute(2, 0, 3, 1, 4)
        )
        bias = None if mask is None else mask[:, None, None, :]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        tokens = tokens + self.out(mixed.transpose(1, 2).reshape(rows, leaves, width))
        out: Tensor = tokens + self.feed(self.norm_feed(tokens))
        return out


class Residual(nn.Module):
    """Pre-norm residual block of the head."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, width)
        self.down = nn.Linear(width, width)
        self.dropout = nn.Dropout(dropout)
        nn.init.zeros_(self.down.weight)
        nn.init.zeros_(self.down.bias)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, width) -> (rows, width)."""
        out: Tensor = x + self.dropout(self.down(nn.functional.silu(self.up(self.norm(x)))))
        return out


class LatencyNetwork(nn.Module):
    """Leaves and question -> log(latency / reference): a point and quantiles.

    Device 0 of the embedding is "not one that was trained on"; training hides known devices behind it now
    and then, so that the rest of the network learns to do without.
    """

    leaf_mean: Tensor
    leaf_scale: Tensor
    input_mean: Tensor
    input_scale: Tensor
    _meets: Tensor
    _position_table: Tensor

    def __init__(self, config: NetworkConfig, devices: int) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.register_buffer("leaf_mean", torch.zeros(config.leaf_width))
        self.register_buffer("leaf_scale", torch.ones(config.leaf_width))
        self.register_buffer("input_mean", torch.zeros(INPUT_WIDTH))
        self.register_buffer("input_scale", torch.ones(INPUT_WIDTH))
        self.register_buffer("_meets", torch.tensor(LEAF_MEETS_DEVICE), persistent=False)
        # Sines and cosines would be a twentieth of a forward pass; positions beyond the table are computed.
        table = positional_encoding(torch.arange(POSITION_TABLE), width)
        self.register_buffer("_position_table", table, persistent=False)
        self.leaf_in = nn.Linear(config.leaf_width + len(DEVICE_LOGS), width)
        self.condition = nn.Linear(INPUT_WIDTH, width)
        self.layers = nn.ModuleList(EncoderLayer(config) for _ in range(config.layers))
        self.pool_norm = nn.LayerNorm(width)
        self.pool_score = nn.Linear(width, config.heads)
        self.device = nn.Embedding(devices + 1, config.device_width)
        nn.init.normal_(self.device.weight, std=0.1)
        self.head_in = nn.Linear(2 * width + INPUT_WIDTH + config.device_width, config.head_width)
        self.head = nn.Sequential(
            *(Residual(config.head_width, config.dropout) for _ in range(config.head_layers)),
            nn.LayerNorm(config.head_width),
        )
        self.out = nn.Linear(config.head_width, (4 if config.head == "structured" else 1) + len(LEVELS))
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)

    def encode(
        self, leaves: Tensor, positions: Tensor, mask: Tensor | None, inputs: Tensor, logs: Tensor
    ) -> Tensor:
        """Latent of each program on its device.

        Parameters
        ----------
        leaves : (rows, leaves, NetworkConfig.leaf_width)
        positions : (rows, leaves) or (leaves,)
        mask : (rows, leaves) bool, True for real leaves; None when all are
        inputs : (rows, INPUT_WIDTH), already standardised
        logs : (rows, len(DEVICE_LOGS))
        """
        meets = leaves[:, :, self._meets] - logs[:, None, :] - 10.0
        scaled = (leaves - self.leaf_mean) * self.leaf_scale
        tokens = self.leaf_in(torch.cat((scaled, meets * 0.1), dim=-1))
        tokens = tokens + self._encoded(positions) + self.condition(inputs)[:, None, :]
        for layer in self.layers:
            tokens = layer(tokens, mask)
        tokens = self.pool_norm(tokens)
        score = self.pool_score(tokens)
        if mask is not None:
            score = score.masked_fill(~mask[:, :, None], -1e4)
        weight = score.softmax(dim=1)
        rows, count, _ = tokens.shape
        parts = tokens.view(rows, count, self.config.heads, -1)
        pooled = (parts * weight[..., None]).sum(dim=1).flatten(1)
        if mask is None:
            mean = tokens.mean(dim=1)
        else:
            mean = (tokens * mask[:, :, None]).sum(dim=1) / mask.sum(dim=1, keepdim=True)
        return torch.cat((pooled, mean), dim=-1)

    def _encoded(self, positions: Tensor) -> Tensor:
        if int(positions.max()) < POSITION_TABLE:
            return self._position_table[positions]
        return positional_encoding(positions, self.config.width)

    def standardise(self, inputs: Tensor) -> Tensor:
        """Inputs in units of the training set's spread, clipped: far outside is "far", not "how far"."""
        return ((inputs - self.input_mean) * self.input_scale).clamp(-6.0, 6.0)

    def decode(self, latent: Tensor, inputs: Tensor, device: Tensor) -> tuple[Tensor, Tensor]:
        """Point (rows,) and quantiles (rows, LEVELS) of log(latency / reference)."""
        x = self.head_in(torch.cat((latent, inputs, self.device(device)), dim=-1))
        raw = self.out(self.head(nn.functional.silu(x)))
        structured = self.config.head == "structured"
        point = self._structured(raw[:, :4], inputs) if structured else raw[:, 0]
        steps = nn.functional.softplus(raw[:, -len(LEVELS) :] - 3.0)
        middle = LEVELS.index(0.5)
        # Quantiles grow outwards from the median, so they never cross.
        below = -steps[:, :middle].flip(1).cumsum(1).flip(1)
        above = steps[:, middle + 1 :].cumsum(1)
        median = point + 0.1 * raw[:, -len(LEVELS) + middle]
        return point, torch.cat((below, torch.zeros_like(median)[:, None], above), dim=1) + median[:, None]

    def _structured(self, raw: Tensor, inputs: Tensor) -> Tensor:
        """Utilisations of arithmetic and memory, their overlap and a floor (docs/accuracy.md)."""
        columns = inputs / self.input_scale.clamp_min(1e-6) + self.input_mean
        base = len(SUMMARY_COLUMNS)
        ln2 = math.log(2.0)
        compute, memory = columns[:, base] * ln2, columns[:, base + 1] * ln2
        reference, floor = columns[:, base + 3] * ln2, torch.log(columns[:, base + 4].clamp_min(1e-6))
        power = 1.0 + 3.0 * torch.sigmoid(raw[:, 2] - 2.0)
        use_c = compute - torch.log(1.5 * torch.sigmoid(raw[:, 0] + 0.7))
        use_m = memory - torch.log(2.5 * torch.sigmoid(raw[:, 1] - 0.4))
        both = torch.logsumexp(torch.stack((use_c, use_m)) * power, dim=0) / power
        return torch.logaddexp(both - reference, floor + raw[:, 3])

    def forward(
        self,
        leaves: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        inputs: Tensor,
        logs: Tensor,
        device: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Raw inputs to (point, quantiles); see :meth:`encode` and :meth:`decode`."""
        inputs = self.standardise(inputs)
        return self.decode(self.encode(leaves, positions, mask, inputs, logs), inputs, device)


def parameter_count(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
