"""The regressor: a masked transformer over leaves, conditioned on device and protocol, with quantile outputs.

CDMPP section 4.2-4.3 with these deviations: any number of leaves in one model (padding mask and attention
pooling in place of one flatten layer per leaf count); the network predicts log(latency / reference), the
reference being arithmetic + traffic + launch floor of the device at hand; the device conditions every leaf.

All leaves go through each matrix product together; attention is computed for one leaf count at a time.

The time of a program scheduled for a CPU is the sum of its leaves' times (:meth:`LatencyNetwork.leaf_seconds`) in
``timed_members``, because a program runs its leaves one after the other. Each of a leaf's counts
(:mod:`cdmpp.features.instructions`: vector instructions, cache lines, library calls, ...) has a cost, which the leaf's
token adjusts within bounds. The program's time is the sum over leaves plus a constant. Costs of instructions that can
overlap are combined by a power mean, the others add up. The counts are of a CPU. Leaves of a GPU program carry its
launch on the device instead (:mod:`cdmpp.model.nn.launch_inputs`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cdmpp.features.schedule import SCHEDULE_COLUMNS
from cdmpp.features.schema import WIDTH
from cdmpp.model.nn.config import (
    ADD,
    CALL_CYCLES,
    CYCLE_S,
    LEVELS,
    OVERLAP,
    PEAK_CENTRE,
    PEAK_LOG,
    POWER,
    REACH,
    THREAD_START,
    UNITS_LOG,
    VECTOR_FLOPS,
    NetworkConfig,
)
from cdmpp.model.nn.inputs import INPUT_WIDTH, LEAF_DEVICE_RATIOS, QUERY_COLUMNS, SUMMARY_COLUMNS
from cdmpp.model.nn.layers import NetworkLayer, member_layers
from cdmpp.model.nn.positions import encode_positions


@dataclass(frozen=True)
class PaddedRows:
    """Rows of one padded leaf count."""

    leaves: Tensor  # (rows, leaves, columns)
    positions: Tensor  # (rows, leaves) or (leaves,)
    mask: Tensor | None  # (rows, leaves) bool, True for real leaves; None when all are

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and leaves."""
        return self.leaves.shape[0], self.leaves.shape[1]

    @property
    def tokens(self) -> int:
        """Leaves of all rows, padding counted."""
        return self.leaves.shape[0] * self.leaves.shape[1]


def split_parts(tokens: Tensor, parts: Sequence[PaddedRows]) -> tuple[Tensor, ...]:
    """Tokens of each part, then the padding at the end."""
    sizes = [part.tokens for part in parts]
    return torch.split(tokens, [*sizes, len(tokens) - sum(sizes)])


def _counted(leaves: Tensor) -> Tensor:
    """Mask of the leaves with counts of a CPU, (rows, leaves); ``leaves`` (rows, leaves, columns), unscaled."""
    return leaves[:, :, _COUNTS[0]] > 0


#: In training, rows of scheduled programs are padded to a multiple of this.
TIMED_MULTIPLE = 32


#: Columns of a leaf with counts of a CPU, and the logarithm of their initial costs.
_COUNTS = torch.tensor([WIDTH + SCHEDULE_COLUMNS.index(name) for name in (*OVERLAP, *ADD)])
#: Position of the parallel regions among the counts.
_REGIONS = (*OVERLAP, *ADD).index("regions")
_LOG_COSTS = torch.tensor([math.log(cost) for cost in (*OVERLAP.values(), *ADD.values())])
_RATIOS = torch.tensor(LEAF_DEVICE_RATIOS)


def _add_layer(network: nn.Module, name: str, layer: NetworkLayer) -> None:
    """Add a layer with its initial weights; its name contains the names of the modules around it."""
    *path, own_name = name.split(".")
    for part in path:
        if part not in network._modules:
            network.add_module(part, nn.Module())
        network = network.get_submodule(part)
    module: nn.Linear | nn.LayerNorm | nn.Embedding
    if layer.kind == "linear":
        module = nn.Linear(layer.inputs, layer.outputs)
    elif layer.kind == "norm":
        module = nn.LayerNorm(layer.outputs)
    else:
        module = nn.Embedding(layer.inputs, layer.outputs)
        nn.init.normal_(module.weight, std=0.1)
    if layer.zero:
        for parameter in module.parameters():
            nn.init.zeros_(parameter)
    network.add_module(own_name, module)


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

    def __init__(self, config: NetworkConfig, devices: int) -> None:
        super().__init__()
        self.config = config
        for name, width in (("leaf", config.leaf_width), ("input", INPUT_WIDTH)):
            self.register_buffer(f"{name}_mean", torch.zeros(width))
            self.register_buffer(f"{name}_scale", torch.ones(width))
        for name, layer in member_layers(config, devices).items():
            _add_layer(self, name, layer)
        self.members = nn.ModuleList(LatencyNetwork(config.member(i), devices) for i in range(1, config.members))

    def all_members(self) -> list[LatencyNetwork]:
        """This network and the further ones."""
        return [self, *self.members]

    def encode(self, leaves: Tensor, positions: Tensor, mask: Tensor | None, inputs: Tensor, logs: Tensor) -> Tensor:
        """Latent of each program on its device; ``leaves``, ``positions`` and ``mask`` as of :class:`PaddedRows`.

        ``inputs``: (rows, INPUT_WIDTH), already standardised. ``logs``: (rows, len(DEVICE_LOGS)).
        """
        return self.encode_parts([PaddedRows(leaves, positions, mask)], inputs, logs)

    def encode_parts(self, parts: Sequence[PaddedRows], inputs: Tensor, logs: Tensor, *, multiple: int = 1) -> Tensor:
        """:meth:`encode` of rows with several leaf counts; all arrays follow the order of the parts.

        All leaves go through each matrix product together: one large product is faster than one for every leaf count.
        ``multiple`` pads the number of leaves to a multiple, because kernels of lower precision are prepared per shape;
        results of the padding are not used.
        """
        members = [member._encode(parts, inputs, logs, multiple) for member in self.all_members()]
        return torch.cat(members, dim=-1)

    def _apply_layer(self, name: str, x: Tensor) -> Tensor:
        """Output of the layer of this name."""
        out: Tensor = self.get_submodule(name)(x)
        return out

    def _encode(self, parts: Sequence[PaddedRows], inputs: Tensor, logs: Tensor, multiple: int) -> Tensor:
        """:meth:`encode_parts` of this member."""
        tokens = self._first_tokens(parts, inputs, logs, multiple)
        for layer in range(self.config.layers):
            tokens = self._layer(tokens, f"layers.{layer}", parts)
        tokens = self._apply_layer("pool_norm", tokens)
        scores = self._apply_layer("pool_score", tokens)
        pooled = map(self._pool, parts, split_parts(tokens, parts), split_parts(scores, parts))
        latent = torch.cat(list(pooled))
        if self.config.schedule:
            # The padding comes last and belongs to no part.
            times, start = [], 0
            for part, token in zip(parts, split_parts(tokens, parts), strict=False):
                rows = slice(start, start + part.shape[0])
                times.append(self._timed(part, token.view(*part.shape, -1), inputs[rows], logs[rows]))
                start = rows.stop
            latent = torch.cat((latent, torch.cat(times)), dim=-1)
        return latent

    def _first_tokens(self, parts: Sequence[PaddedRows], inputs: Tensor, logs: Tensor, multiple: int) -> Tensor:
        """First token of each leaf, (leaves, width); padding up to the multiple comes last."""
        width, rows = self.config.width, [part.shape[0] for part in parts]
        conditions = torch.split(self._apply_layer("condition", inputs), rows)
        leaves, added = [], []
        for part, condition, log in zip(parts, conditions, torch.split(logs, rows), strict=True):
            scaled = (part.leaves - self.leaf_mean) * self.leaf_scale
            positions = part.positions.numpy(force=True)
            place = torch.from_numpy(encode_positions(self.config.positions, positions, width)).to(scaled.device)
            ratios = part.leaves[:, :, _RATIOS] - log[:, None, :] - 10.0
            scaled = torch.cat((scaled, ratios * 0.1), dim=-1)
            place = condition[:, None, :] + place.expand(*part.shape, -1)
            leaves.append(scaled.flatten(0, 1))
            added.append(place.flatten(0, 1))
        padding = -sum(part.tokens for part in parts) % multiple
        if padding:
            leaves.append(leaves[0].new_zeros(padding, leaves[0].shape[1]))
            added.append(added[0].new_zeros(padding, width))
        columns = torch.cat(leaves)
        tokens = self._apply_layer("leaf_in", columns) + torch.cat(added)
        if self.config.leaf_hidden:
            hidden = nn.functional.gelu(self._apply_layer("leaf_hidden.in", columns))
            tokens = tokens + self._apply_layer("leaf_hidden.out", hidden)
        return tokens

    def _layer(self, tokens: Tensor, name: str, parts: Sequence[PaddedRows]) -> Tensor:
        """Pre-norm self-attention over the leaves of a program, then a feed-forward block.

        ``tokens``: (tokens, width), leaves of all parts one below the other, padding rows at the end.
        """
        mixed = []
        projected = self._apply_layer(f"{name}.qkv", self._apply_layer(f"{name}.norm_attention", tokens))
        for part, projection in zip(parts, split_parts(projected, parts), strict=False):
            rows, leaves = part.shape
            if leaves == 1:  # attends to itself alone
                mixed.append(projection[:, 2 * projection.shape[1] // 3 :])
                continue
            q, k, v = projection.view(rows, leaves, 3, self.config.heads, -1).permute(2, 0, 3, 1, 4)
            mask = None if part.mask is None else part.mask[:, None, None, :]
            attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            mixed.append(attended.transpose(1, 2).reshape(rows * leaves, -1))
        padding = len(tokens) - sum(len(m) for m in mixed)
        if padding:
            mixed.append(tokens.new_zeros(padding, tokens.shape[1]))
        tokens = tokens + self._apply_layer(f"{name}.out", torch.cat(mixed))
        wide = self._apply_layer(f"{name}.feed.0", self._apply_layer(f"{name}.norm_feed", tokens))
        return tokens + self._apply_layer(f"{name}.feed.2", nn.functional.gelu(wide))

    def _timed(self, part: PaddedRows, tokens: Tensor, inputs: Tensor, logs: Tensor) -> Tensor:
        """:meth:`leaf_seconds` of the rows of a part, (rows, 2); zeros of a member that sums up no times.

        Training computes the programs scheduled for a CPU only, padded so that shapes repeat. A prediction computes
        all rows: its shapes must not depend on the other rows.
        """
        if not self.config.timed_members:
            return tokens.new_zeros(len(inputs), 2)
        if not self.training:
            return self.leaf_seconds(part.leaves, tokens, part.mask, inputs, logs)
        chosen, count = _counted(part.leaves).any(dim=1).nonzero()[:, 0], len(inputs)
        if not len(chosen):
            return tokens.new_zeros(count, 2)
        padded = torch.cat((chosen, chosen[:1].expand(-len(chosen) % TIMED_MULTIPLE)))
        mask = None if part.mask is None else part.mask[padded]
        seconds = self.leaf_seconds(part.leaves[padded], tokens[padded], mask, inputs[padded], logs[padded])
        return tokens.new_zeros(count, 2).index_copy(0, chosen, seconds[: len(chosen)])

    def leaf_seconds(self, leaves: Tensor, tokens: Tensor, mask: Tensor | None, inputs: Tensor, logs: Tensor) -> Tensor:
        """Log seconds of scheduled programs from tokens and counts of their leaves, and 1, (rows, 2).

        Two zeros for a program without schedule columns. ``leaves``: (rows, leaves, columns), unscaled. ``tokens``:
        (rows, leaves, width). ``mask``: as of :class:`PaddedRows`. ``inputs``: (rows, .), standardised. ``logs``:
        (rows, len(DEVICE_LOGS)).
        """
        counts = torch.exp2(leaves[:, :, _COUNTS].clamp(0.0, 60.0)) - 1
        real = _counted(leaves)
        real = real if mask is None else real & mask
        known = real.any(dim=1)
        token = self._apply_layer("leaf_times.norm", tokens)
        hidden = nn.functional.silu(self._apply_layer("leaf_times.hidden", token))
        moved = REACH * torch.tanh(self._apply_layer("leaf_times.costs", token + hidden) / REACH)
        costs = counts * torch.exp(moved[:, :, :-1] + _LOG_COSTS.to(moved.device))
        # Vector arithmetic scales with the device's peak, everything else with the number of its units.
        cycle = math.log(CYCLE_S) - logs[:, UNITS_LOG] * math.log(2.0)
        vector = math.log(VECTOR_FLOPS) - (logs[:, PEAK_LOG] + PEAK_CENTRE) * math.log(2.0)
        first = costs[:, :, :1] * torch.exp(vector - cycle)[:, None, None]
        overlap = torch.cat((first, costs[:, :, 1 : len(OVERLAP)]), dim=2)
        together = (overlap.clamp_max(1e12).pow(POWER).sum(dim=2) + 1e-9).pow(1 / POWER)
        threads = THREAD_START * (torch.exp2(logs[:, UNITS_LOG]) - 1).clamp_min(0.0)
        adding = costs[:, :, len(OVERLAP) :].sum(dim=2) + costs[:, :, _REGIONS] * threads[:, None]
        cycles = (together + adding) * torch.exp(moved[:, :, -1])
        call = CALL_CYCLES * torch.exp(self._apply_layer("leaf_times.call", inputs)[:, 0].clamp(-REACH, 2 * REACH))
        seconds = torch.log(torch.where(real, cycles, 0.0).sum(dim=1) + call) + cycle
        return torch.stack((torch.where(known, seconds, 0.0), known.to(seconds.dtype)), dim=1)

    def _pool(self, part: PaddedRows, tokens: Tensor, score: Tensor) -> Tensor:
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
        return self.decode_with_hidden(latent, inputs, device)[:2]

    def decode_with_hidden(self, latent: Tensor, inputs: Tensor, device: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`decode`, and the last hidden layer of the first member, (rows, NetworkConfig.head_width)."""
        outputs = self.decode_each(latent, inputs, device)
        if len(outputs) == 1:
            return outputs[0]
        point, levels = (torch.stack([output[i] for output in outputs]).mean(dim=0) for i in (0, 1))
        return point, levels, outputs[0][2]

    def decode_each(self, latent: Tensor, inputs: Tensor, device: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
        """:meth:`decode_with_hidden` of each member."""
        parts = latent.chunk(len(self.members) + 1, dim=1)
        return [member._decode(part, inputs, device) for member, part in zip(self.all_members(), parts, strict=True)]

    def _decode(self, latent: Tensor, inputs: Tensor, device: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """:meth:`decode_with_hidden` of this member."""
        times = scheduled = None
        if self.config.schedule:
            latent, times, scheduled = latent[:, :-2], latent[:, -2] - self._log_reference(inputs), latent[:, -1]
            latent = torch.cat((latent, torch.stack((0.2 * times * scheduled, scheduled), dim=1)), dim=-1)
        embedded = self._apply_layer("device", device)
        x = nn.functional.silu(self._apply_layer("head_in", torch.cat((latent, inputs, embedded), dim=-1)))
        for layer in (f"head.{i}" for i in range(self.config.head_layers)):
            up = nn.functional.silu(self._apply_layer(f"{layer}.up", self._apply_layer(f"{layer}.norm", x)))
            down = self._apply_layer(f"{layer}.down", up)
            x = x + nn.functional.dropout(down, self.config.dropout, self.training)
        hidden = self._apply_layer(f"head.{self.config.head_layers}", x)
        raw = self._apply_layer("out", hidden)
        structured = self.config.head == "structured"
        point = self._structured(raw[:, :4], inputs) if structured else raw[:, 0]
        if times is not None and scheduled is not None:
            point = torch.where(scheduled > 0, times + self._apply_layer("timed", hidden)[:, 0], point)
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
        place = len(SUMMARY_COLUMNS) + QUERY_COLUMNS.index("log_reference_us")
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
