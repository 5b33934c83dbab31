"""The regressor: a masked transformer over leaves, conditioned on device and protocol, with quantile outputs.

CDMPP section 4.2-4.3 with these deviations: any number of leaves in one model (padding mask and attention
pooling in place of one flatten layer per leaf count); the network predicts log(latency / reference), the
reference being arithmetic + traffic + launch floor of the device at hand; the device conditions every leaf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from cdmpp.model.nn.config import LEVELS, NetworkConfig
from cdmpp.model.nn.encoder import EncoderLayer, Part, attention_bias, split_parts
from cdmpp.model.nn.inputs import DEVICE_LOGS, INPUT_WIDTH, LEAF_MEETS_DEVICE, QUESTION_COLUMNS, SUMMARY_COLUMNS
from cdmpp.model.nn.leaf_times import LeafTimes
from cdmpp.model.nn.positions import PositionEncoding

__all__ = ["INPUT_WIDTH", "LEVELS", "TIMED_MULTIPLE", "LatencyNetwork", "NetworkConfig", "Residual", "parameter_count"]

#: In training, rows of scheduled programs are padded to a multiple of this.
TIMED_MULTIPLE = 32


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
    """Predicts log(latency / reference), a point and quantiles, from leaves and query.

    With ``config.members`` it contains further networks, and the prediction is the mean of all. Latents of the members
    are columns behind each other.

    Device 0 of the embedding means "not trained on". Training replaces some known devices by it, so that the
    rest of the network learns to predict without an embedding.
    """

    leaf_mean: Tensor
    leaf_scale: Tensor
    input_mean: Tensor
    input_scale: Tensor
    _meets: Tensor

    def __init__(self, config: NetworkConfig, devices: int) -> None:
        super().__init__()
        self.config = config
        width = config.width
        self.register_buffer("leaf_mean", torch.zeros(config.leaf_width))
        self.register_buffer("leaf_scale", torch.ones(config.leaf_width))
        self.register_buffer("input_mean", torch.zeros(INPUT_WIDTH))
        self.register_buffer("input_scale", torch.ones(INPUT_WIDTH))
        self.register_buffer("_meets", torch.tensor(LEAF_MEETS_DEVICE), persistent=False)
        self.leaf_in = nn.Linear(config.leaf_width + len(DEVICE_LOGS), width)
        self.condition = nn.Linear(INPUT_WIDTH, width)
        self.encoding: nn.Module = PositionEncoding(config.positions, width)
        self.layers = nn.ModuleList(
            EncoderLayer(width, config.heads, config.feed_forward) for _ in range(config.layers)
        )
        self.pool_norm = nn.LayerNorm(width)
        self.pool_score = nn.Linear(width, config.heads)
        self.leaf_times = LeafTimes(width, INPUT_WIDTH, config.leaf_width) if config.schedule else None
        self.device = nn.Embedding(devices + 1, config.device_width)
        nn.init.normal_(self.device.weight, std=0.1)
        latent = 2 * width + (2 if self.leaf_times else 0)
        self.head_in = nn.Linear(latent + INPUT_WIDTH + config.device_width, config.head_width)
        self.head = nn.Sequential(
            *(Residual(config.head_width, config.dropout) for _ in range(config.head_layers)),
            nn.LayerNorm(config.head_width),
        )
        self.out = nn.Linear(config.head_width, (4 if config.head == "structured" else 1) + len(LEVELS))
        nn.init.zeros_(self.out.weight)
        nn.init.zeros_(self.out.bias)
        self.timed = nn.Linear(config.head_width, 1) if self.leaf_times else None
        if self.timed is not None:
            nn.init.zeros_(self.timed.weight)
            nn.init.zeros_(self.timed.bias)
        alone = config.model_copy(update={"members": 1})
        self.members = nn.ModuleList(LatencyNetwork(alone, devices) for _ in range(config.members - 1))

    def all_members(self) -> list[LatencyNetwork]:
        """This network and the further ones."""
        return [self, *self.members]

    def encode(self, leaves: Tensor, positions: Tensor, mask: Tensor | None, inputs: Tensor, logs: Tensor) -> Tensor:
        """Latent of each program on its device.

        Parameters
        ----------
        leaves : (rows, leaves, NetworkConfig.leaf_width)
        positions : (rows, leaves) or (leaves,)
        mask : (rows, leaves) bool, True for real leaves; None when all are
        inputs : (rows, INPUT_WIDTH), already standardised
        logs : (rows, len(DEVICE_LOGS))
        """
        return self.encode_parts([Part(leaves, positions, mask)], inputs, logs)

    def encode_parts(self, parts: Sequence[Part], inputs: Tensor, logs: Tensor, *, multiple: int = 1) -> Tensor:
        """:meth:`encode` of rows with several leaf counts; ``inputs`` and ``logs`` follow the order of the parts.

        All leaves go through each matrix product together: one large product is faster than one for every
        leaf count. ``multiple`` pads the number of leaves to a multiple, because kernels of lower precision are
        prepared per shape; results of the padding are not used.

        Returns
        -------
        (rows, .)
            In the parts' order.
        """
        return torch.cat([one._encode(parts, inputs, logs, multiple) for one in self.all_members()], dim=-1)

    def _encode(self, parts: Sequence[Part], inputs: Tensor, logs: Tensor, multiple: int) -> Tensor:
        """:meth:`encode_parts` of this network alone."""
        rows = [part.shape[0] for part in parts]
        leaves, places, biases = [], [], []
        conditions = torch.split(self.condition(inputs), rows)
        for part, condition, log in zip(parts, conditions, torch.split(logs, rows), strict=True):
            meets = part.leaves[:, :, self._meets] - log[:, None, :] - 10.0
            scaled = (part.leaves - self.leaf_mean) * self.leaf_scale
            leaves.append(torch.cat((scaled, meets * 0.1), dim=-1).flatten(0, 1))
            place = condition[:, None, :].expand(*part.shape, -1) + self.encoding(part.positions)
            places.append(place.flatten(0, 1))
            biases.append(self.attention_bias(part))
        left = -sum(part.tokens for part in parts) % multiple
        if left:
            leaves.append(leaves[0].new_zeros(left, leaves[0].shape[1]))
            places.append(places[0].new_zeros(left, places[0].shape[1]))
        tokens = self.leaf_in(torch.cat(leaves)) + torch.cat(places)
        for layer in self.layers:
            tokens = layer(tokens, parts, biases)
        tokens = self.pool_norm(tokens)
        scores = self.pool_score(tokens)
        pooled = map(self._pool, parts, split_parts(tokens, parts), split_parts(scores, parts))
        latent = torch.cat(list(pooled))
        if self.leaf_times is not None:
            # The padding comes last and belongs to no part.
            own = zip(parts, split_parts(tokens, parts), strict=False)
            per_part = zip(own, torch.split(inputs, rows), torch.split(logs, rows), strict=True)
            times = [self._timed(part, token.view(*part.shape, -1), x, log) for (part, token), x, log in per_part]
            latent = torch.cat((latent, torch.cat(times)), dim=-1)
        return latent

    def attention_bias(self, part: Part) -> Tensor | None:
        """Attention mask of a part; None when all leaves are real."""
        return attention_bias(part.mask)

    def _timed(self, part: Part, tokens: Tensor, inputs: Tensor, logs: Tensor) -> Tensor:
        """:class:`LeafTimes` of a part, (rows, 2).

        Training computes the scheduled programs only, which are few among library operators, padded so that
        shapes repeat. A prediction computes all rows: its shapes must not depend on the other rows.
        """
        assert self.leaf_times is not None
        if not self.training:
            times: Tensor = self.leaf_times(part.leaves, tokens, part.mask, inputs, logs)
            return times
        chosen = self.leaf_times.scheduled(part.leaves).nonzero()[:, 0]
        out = tokens.new_zeros(len(tokens), 2)
        if not len(chosen):
            return out
        padded = torch.cat((chosen, chosen[:1].expand(-len(chosen) % TIMED_MULTIPLE)))
        mask = None if part.mask is None else part.mask[padded]
        seconds = self.leaf_times(part.leaves[padded], tokens[padded], mask, inputs[padded], logs[padded])
        placed: Tensor = out.index_copy(0, chosen, seconds[: len(chosen)])
        return placed

    def _pool(self, part: Part, tokens: Tensor, score: Tensor) -> Tensor:
        """Attention pooling and mean over the leaves: (rows * leaves, width) -> (rows, 2 * width)."""
        rows, count = part.shape
        tokens, score = tokens.view(rows, count, -1), score.view(rows, count, -1)
        if part.mask is not None:
            score = score.masked_fill(~part.mask[:, :, None], -1e4)
        weight = score.softmax(dim=1)
        parts = tokens.view(rows, count, self.config.heads, -1)
        pooled = (parts * weight[..., None]).sum(dim=1).flatten(1)
        if part.mask is None:
            mean = tokens.mean(dim=1)
        else:
            mean = (tokens * part.mask[:, :, None]).sum(dim=1) / part.mask.sum(dim=1, keepdim=True)
        return torch.cat((pooled, mean), dim=-1)

    def standardise(self, inputs: Tensor) -> Tensor:
        """Inputs in units of the training set's standard deviation, clipped to ±6."""
        return ((inputs - self.input_mean) * self.input_scale).clamp(-6.0, 6.0)

    def decode(self, latent: Tensor, inputs: Tensor, device: Tensor) -> tuple[Tensor, Tensor]:
        """Point (rows,) and quantiles (rows, LEVELS) of log(latency / reference)."""
        return self.decode_seen(latent, inputs, device)[:2]

    def decode_seen(self, latent: Tensor, inputs: Tensor, device: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`decode`, and the last hidden layer of the first member, (rows, NetworkConfig.head_width)."""
        outputs = self.decode_each(latent, inputs, device)
        if len(outputs) == 1:
            return outputs[0]
        point, levels = (torch.stack([output[i] for output in outputs]).mean(dim=0) for i in (0, 1))
        return point, levels, outputs[0][2]

    def decode_each(self, latent: Tensor, inputs: Tensor, device: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """:meth:`decode_seen` of each member."""
        parts = latent.chunk(len(self.members) + 1, dim=1)
        return [one._decode(part, inputs, device) for one, part in zip(self.all_members(), parts, strict=True)]

    def _decode(self, latent: Tensor, inputs: Tensor, device: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`decode_seen` of this network alone."""
        leaf_times = None
        if self.leaf_times is not None:
            latent, leaf_times, timed = (latent[:, :-2], latent[:, -2] - self._log_reference(inputs), latent[:, -1])
            seen = torch.stack((0.2 * leaf_times * timed, timed), dim=1)
            latent = torch.cat((latent, seen), dim=-1)
        x = self.head_in(torch.cat((latent, inputs, self.device(device)), dim=-1))
        hidden = self.head(nn.functional.silu(x))
        raw = self.out(hidden)
        structured = self.config.head == "structured"
        point = self._structured(raw[:, :4], inputs) if structured else raw[:, 0]
        if leaf_times is not None and self.timed is not None:
            point = torch.where(timed > 0, leaf_times + self.timed(hidden)[:, 0], point)
        steps = nn.functional.softplus(raw[:, -len(LEVELS) :] - 3.0)
        middle = LEVELS.index(0.5)
        # Quantiles grow outwards from the median, so they never cross.
        below = -steps[:, :middle].flip(1).cumsum(1).flip(1)
        above = steps[:, middle + 1 :].cumsum(1)
        median = point + 0.1 * raw[:, -len(LEVELS) + middle]
        levels = torch.cat((below, torch.zeros_like(median)[:, None], above), dim=1) + median[:, None]
        return point, levels, hidden

    def _log_reference(self, inputs: Tensor) -> Tensor:
        """Natural logarithm of the reference in seconds, recovered from the inputs."""
        place = len(SUMMARY_COLUMNS) + QUESTION_COLUMNS.index("log_reference_us")
        column = inputs[:, place] / self.input_scale[place].clamp_min(1e-6) + self.input_mean[place]
        return column * math.log(2.0) + math.log(1e-6)

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
        self, leaves: Tensor, positions: Tensor, mask: Tensor | None, inputs: Tensor, logs: Tensor, device: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Raw inputs to (point, quantiles); see :meth:`encode` and :meth:`decode`."""
        inputs = self.standardise(inputs)
        return self.decode(self.encode(leaves, positions, mask, inputs, logs), inputs, device)


def parameter_count(model: nn.Module) -> int:
    """Number of trainable parameters."""
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
