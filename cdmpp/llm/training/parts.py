"""Operators and messages of the halves of a layer in training, forward and backward.

A linear layer has three products: the result, the gradient of its input and that of its weight. Attention, norms and
the loss have backward operators of their own. The backward pass of any other operator is a stated multiple of its
forward pass, by the bytes or operations that it needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from cdmpp.errors import CdmppError
from cdmpp.llm.config import Dense, Experts, FeedForward, LLMConfig, Mixer
from cdmpp.llm.engines.profile import TrainingLoop
from cdmpp.llm.layout import Types
from cdmpp.llm.mixers import add_mixer
from cdmpp.llm.operators import PREFILL_PARTS
from cdmpp.llm.step_builder import StepBuilder, StepPart
from cdmpp.llm.steps import Prefill
from cdmpp.llm.training.layout import TrainingLayout
from cdmpp.llm.training.links import distinct
from cdmpp.programs.elements import DTYPE_BYTES
from cdmpp.programs.operators import OperatorSpec, make_operator

#: Ranks that exchange a message.
Group = Literal["tp", "cp", "ep"]
#: Backward over forward time of operators without a backward operator, by the tensors that each reads and writes. The
#: embedding, which sorts its rows, is as measured on an H100.
BACKWARD: dict[str, float] = {
    "silu_and_mul": 5 / 3,
    "gelu": 3 / 2,
    "silu": 3 / 2,
    "relu": 3 / 2,
    "tanh": 3 / 2,
    "mul": 5 / 3,
    "add": 0.0,
    "embedding": 13.0,
    "mul_scalar": 1.0,
    "rotary_embedding": 1.0,
    "softmax": 3 / 2,
    "bmm": 2.0,
}
#: 16-bit products of gradients over forward products of the same sizes, which read their operands in another order: the
#: median of 33 sizes on an H100. Quantised operands are stored in both orders.
_GRADIENT = 1.06
#: Elements that an activation function with clamps moves beyond a fused one, over those of its result.
UNFUSED_PASSES = 11
#: Norms that add the residual, as those of twice as many rows.
_WITH_RESIDUAL = ("attention_norm", "mlp_norm", "final_norm")
#: Operators over the pairs of a sequence's tokens, which context parallelism divides.
_PER_PAIR = tuple(name for name in PREFILL_PARTS if name != "kv_b_proj")


@dataclass(frozen=True)
class Message:
    """A collective of one rank: its larger buffer in bytes, and the ranks that take part.

    ``topk``: of an exchange of tokens, the experts of each token; ``bytes`` are those of the tokens then. Each token
    is sent once to each rank that has one of its experts, and over the network once to each node.
    """

    operator: str
    bytes: float
    group: Group
    topk: float = 0

    def size(self, ranks: int) -> float:
        """Bytes of the larger buffer among ``ranks``."""
        return self.bytes * (distinct(ranks, self.topk) if self.topk else 1.0)


@dataclass(frozen=True)
class StepItem:
    """A kernel, a pass over memory or a message."""

    name: str  # its place in the model
    backward: bool = False
    program: OperatorSpec | None = None
    traffic: float = 0.0  # bytes read and written, of an item without program
    message: Message | None = None
    # Runs of the program or message in one pass; a fraction or multiple where another program's time stands for it.
    runs: float = 1.0
    launches: float = 1
    stated: bool = False  # a ratio stands for a kernel


class LayerBuilder:
    """Items of the parts of a model on one rank.

    ``block_scaled``: operands are quantised by rows and by columns, each from the 16-bit tensor (block scales).
    """

    def __init__(
        self, config: LLMConfig, layout: TrainingLayout, types: Types, loop: TrainingLoop, *, block_scaled: bool = False
    ) -> None:
        self.config, self.layout, self.types = config, layout, types
        self._gradient_bytes, self._loss_bytes = loop.gradient_bytes, loop.loss_bytes
        self._gathers = loop.backward_gathers
        self._casts = 2 if block_scaled else 1
        #: Rows that a rank holds between the halves of a layer (sequence parallelism divides them by tp).
        self._rows = -(-layout.tokens // layout.tp)

    def attention_half(self, mixer: Mixer) -> list[StepItem]:
        """Norm, projections and attention."""
        b = self._builder()
        self._norm(b, "attention_norm")
        add_mixer(b, mixer, Prefill([self.layout.sequence] * self.layout.micro_batch))
        items = list(self._both(b.parts))
        return items + list(self._tensor_parallel("attention")) + list(self._context_parallel(mixer))

    def feed_forward_half(self, half: FeedForward) -> list[StepItem]:
        """Norm and feed-forward layer, dense or of experts."""
        b = self._builder()
        self._norm(b, "mlp_norm")
        if isinstance(half, Dense):
            self._dense(b, half.columns, "", "dense")
            return list(self._both(b.parts)) + list(self._tensor_parallel("mlp"))
        return list(self._both(b.parts)) + list(self._experts(half))

    def first(self) -> list[StepItem]:
        """Embedding of the tokens."""
        config, b = self.config, self._builder()
        b.add(
            "embedding", "embedding", rows=b.tokens, cols=config.hidden, table_rows=-(-config.vocab // self.layout.tp)
        )
        if config.positions:
            b.vector("position_add", "add", config.hidden)
        return list(self._both(b.parts)) + list(self._tensor_parallel("embedding", half=True))

    def last(self) -> list[StepItem]:
        """Final norm, logits and loss."""
        config, b = self.config, self._builder()
        self._norm(b, "final_norm")
        columns = -(-config.vocab // self.layout.tp)
        b.linear("lm_head", columns, config.hidden, None)
        items = list(self._both(b.parts)) + list(self._tensor_parallel("lm_head", half=True))
        loss = self.layout.tokens * columns * self._loss_bytes
        items.append(StepItem("loss", traffic=0.4 * loss, launches=3))
        items.append(StepItem("loss", backward=True, traffic=0.6 * loss, launches=2))
        return items

    def _builder(self, tokens: int | None = None) -> StepBuilder:
        """A builder for rows of a layer; default: those of a micro-batch."""
        return StepBuilder(self.config, self.layout.layer, self.types, tokens or self.layout.tokens)

    def _norm(self, b: StepBuilder, name: str) -> None:
        """A norm with the sum of the residual: as one of twice as many rows."""
        b.add(name, self.config.norm, rows=2 * self._rows, cols=self.config.hidden)

    def _dense(self, b: StepBuilder, columns: int, prefix: str, part: str) -> None:
        config, local = self.config, -(-columns // self.layout.tp)
        if config.gated:
            b.linear(f"{prefix}gate_up_proj", 2 * local, config.hidden, part)
            b.vector(f"{prefix}activation", "silu_and_mul", local)
        else:
            b.linear(f"{prefix}up_proj", local, config.hidden, part)
            b.vector(f"{prefix}activation", "relu" if "relu" in config.activation else "gelu", local)
        b.linear(f"{prefix}down_proj", config.hidden, local, part)

    def _both(self, parts: list[StepPart]) -> Iterator[StepItem]:
        """Forward and backward items of forward operators."""
        for part in parts:
            if part.name == "kv_cache_save":
                continue
            runs = float(part.count) / (self.layout.cp if part.name in _PER_PAIR else 1)
            yield StepItem(part.name, program=part.program, runs=runs, launches=part.count)
            yield from self._backward(part, runs)

    def _backward(self, part: StepPart, runs: float) -> Iterator[StepItem]:
        program, name = part.program, part.name
        fields = program.model_dump(exclude_none=True)
        if program.operator == "linear":
            yield from self._products(name, fields, runs)
        elif program.operator in ("attention_prefill", "mla_prefill"):
            yield from self._attention(part, fields, runs)
        elif program.operator in ("rmsnorm", "layernorm"):
            residual = 2 if name in _WITH_RESIDUAL else 1
            sizes = {"rows": -(-fields["rows"] // residual), "cols": fields["cols"]}
            gradient = make_operator({"operator": f"{program.operator}_backward", "dtype": fields["dtype"], **sizes})
            yield StepItem(name, True, gradient, runs=runs, launches=2)
            if residual == 2:
                yield StepItem(name, True, traffic=3.0 * sizes["rows"] * sizes["cols"] * self.types.bytes * runs)
        else:
            # The backward pass of a scan computes its states again.
            ratio = 3.0 if name.startswith("scan_") else BACKWARD.get(program.operator, 2.0)
            if ratio:
                yield StepItem(name, True, program, runs=ratio * runs, launches=part.count, stated=True)

    def _products(self, name: str, fields: dict[str, Any], runs: float) -> Iterator[StepItem]:
        """Gradients of input and weight, with the casts of quantised operands."""
        m, n, k = fields["m"], fields["n"], fields["k"]
        slower = runs * self._gradient(fields)
        yield StepItem(name, True, self._linear(fields, m=m, n=k, k=n), runs=slower)
        yield StepItem(name, True, self._linear(fields, m=n, n=k, k=m), runs=slower)
        yield self._accumulation(name, runs * n * k)
        if DTYPE_BYTES[fields["dtype"]] < self.types.bytes:
            result_bytes = DTYPE_BYTES[fields["dtype"]]
            yield from self._quantisation(runs * m * k, runs * m * n, result_bytes)

    def _accumulation(self, name: str, elements: float) -> StepItem:
        """Sum of a weight's gradient beyond 16 bits: the product writes 16, the sum reads and writes the gradient."""
        bytes_each = max(0.0, 2 * self._gradient_bytes - self.types.bytes) if self._gradient_bytes > 2 else 0.0
        return StepItem(name, True, traffic=elements * bytes_each, launches=0)

    def _gradient(self, fields: dict[str, Any]) -> float:
        return _GRADIENT if DTYPE_BYTES[fields["dtype"]] == self.types.bytes else 1.0

    def _linear(self, fields: dict[str, Any], **sizes: int) -> OperatorSpec:
        try:
            return make_operator({**fields, **sizes})
        except CdmppError:
            # Scales of blocks need sizes that they divide; a gradient without is computed in 16 bits.
            return make_operator({"operator": "linear", "dtype": self.types.dtype, **sizes})

    def _attention(self, part: StepPart, fields: dict[str, Any], runs: float) -> Iterator[StepItem]:
        if fields["operator"] == "mla_prefill":
            widths = {"head_dim": fields["nope"] + fields["rope"], "v_dim": fields["v_dim"]}
            kv_heads = fields["heads"]
        else:
            widths, kv_heads = {"head_dim": fields["head_dim"]}, fields["kv_heads"]
        length, past = fields["q_len"], fields.get("past_len", 0)
        # Gradients are known for whole sequences; a window has a share of their pairs.
        share = (length / 2 + past) / (length / 2)
        gradient = make_operator(
            {
                "operator": "attention_backward",
                "dtype": self.types.dtype,
                "batch": fields["batch"],
                "q_len": length,
                "heads": fields["heads"],
                "kv_heads": kv_heads,
                **widths,
            }
        )
        yield StepItem(part.name, True, gradient, runs=runs * share, launches=3, stated=past > 0)

    def _tensor_parallel(self, name: str, *, half: bool = False) -> Iterator[StepItem]:
        """Gather before and scatter behind a half of a layer; the weight's gradient gathers the input again."""
        if self.layout.tp == 1:
            return
        size = self.layout.tokens * self.config.hidden * self.types.bytes
        gather, scatter = Message("all_gather", size, "tp"), Message("reduce_scatter", size, "tp")
        yield StepItem(f"{name}_gather", message=gather)
        yield StepItem(f"{name}_scatter", True, message=scatter)
        if not half:
            yield StepItem(f"{name}_scatter", message=scatter)
            yield StepItem(f"{name}_gather", True, message=gather, runs=self._gathers)

    def _context_parallel(self, mixer: Mixer) -> Iterator[StepItem]:
        """Keys and values of the other ranks; behind them their gradients."""
        if self.layout.cp == 1:
            return
        heads = getattr(mixer, "kv_heads", None)
        if heads is None:  # latents are expanded on each rank
            columns = (getattr(mixer, "kv_rank", 0) or getattr(mixer, "head_dim", 0)) + getattr(mixer, "rope", 0)
        else:
            width = getattr(mixer, "head_dim", 0) + getattr(mixer, "values", 0)
            columns = max(1, heads // self.layout.tp) * width
        size = self.layout.micro_batch * self.layout.sequence * columns * self.types.bytes
        yield StepItem("keys_values", message=Message("all_gather", size, "cp"))
        yield StepItem("keys_values", True, message=Message("all_gather", size, "cp"))
        yield StepItem("keys_values", True, message=Message("reduce_scatter", size, "cp"))

    def _experts(self, experts: Experts) -> Iterator[StepItem]:
        config, layout, rows = self.config, self.layout, self._rows
        b = self._builder(rows)
        b.linear("router", experts.count, config.hidden, None)
        b.vector("router_topk", "softmax", experts.count, dtype="float32")
        width = experts.latent or config.hidden
        if experts.latent:
            b.linear("expert_latent_proj", experts.latent, config.hidden, None)
            b.linear("expert_output_proj", config.hidden, experts.latent, None)
        yield from self._both(b.parts)
        if experts.shared:
            b = self._builder()
            self._dense(b, experts.shared, "shared_", "shared")
            yield from self._both(b.parts)
            yield from self._tensor_parallel("shared")
        # Tokens of the ranks that share the experts, evenly spread.
        routed, local = round(rows * experts.topk), experts.count // layout.ep
        yield from self._grouped("experts_up", routed, local, (1 + config.gated) * experts.intermediate, width)
        activation = "silu_and_mul" if config.gated else "gelu"
        b = self._builder(routed)
        b.vector("experts_activation", activation, experts.intermediate)
        yield from self._both(b.parts)
        yield from self._grouped("experts_down", routed, local, width, experts.intermediate)
        if config.mlp_bias:
            # Biases and the clamped activation of gpt-oss are passes of their own.
            sums, passes = (1 + config.gated) * experts.intermediate + width, UNFUSED_PASSES * experts.intermediate
            for backward, elements in ((False, 2 * sums + passes), (True, sums + 2 * passes)):
                yield StepItem(
                    "unfused_bias_activation", backward, traffic=routed * elements * self.types.bytes, launches=8
                )
        moved = rows * width * self.types.bytes
        tensors = 2 * (1 + experts.topk) + (4 * experts.topk if layout.ep > 1 else 0)
        for backward in (False, True):
            yield StepItem("expert_permutation", backward, traffic=moved * tensors, launches=4)
            if layout.ep > 1:
                message = Message("all_to_all", moved, "ep", experts.topk)
                yield StepItem("expert_exchange", backward, message=message, runs=2)

    def _grouped(self, name: str, rows: int, groups: int, n: int, k: int) -> Iterator[StepItem]:
        """Products of each expert's rows with its weight: as one product of all rows, and the weights' traffic."""
        fields = {"operator": "linear", **self.types.product("experts")}
        if fields.get("scaling") == "channel":
            fields["scaling"] = "tensor"
        forward = self._linear(fields, m=rows, n=n, k=k)
        spec = forward.model_dump(exclude_none=True)
        weights = (groups - 1) * n * k * DTYPE_BYTES[spec["dtype"]]
        yield StepItem(name, program=forward, launches=groups, stated=True)
        yield StepItem(name, traffic=weights, launches=0)
        slower = self._gradient(spec)
        yield StepItem(name, True, self._linear(fields, m=rows, n=k, k=n), runs=slower, launches=groups, stated=True)
        yield StepItem(name, True, traffic=weights, launches=0)
        rows_each = max(1, rows // groups)
        weight = self._linear(fields, m=n, n=k, k=rows_each)
        yield StepItem(name, True, weight, runs=slower * groups, launches=groups, stated=True)
        yield self._accumulation(name, groups * n * k)
        if DTYPE_BYTES[spec["dtype"]] < self.types.bytes:
            result_bytes = DTYPE_BYTES[spec["dtype"]]
            yield from self._quantisation(rows * k, rows * n, result_bytes)

    def _quantisation(self, inputs: float, results: float, result_bytes: float) -> Iterator[StepItem]:
        """Casts of the input of a product and of its result's gradient, each in both orders."""
        bytes_each = self._casts * self.types.bytes + 2 * result_bytes
        yield StepItem("quantisation", traffic=inputs * bytes_each, launches=self._casts)
        yield StepItem("quantisation", True, traffic=results * bytes_each, launches=self._casts)


def program_flops(program: OperatorSpec) -> float:
    """Operations of a product or of causal attention, forward or backward; 0 of other programs."""
    f = program.model_dump(exclude_none=True)
    if program.operator == "linear":
        return float(2.0 * f["m"] * f["n"] * f["k"])
    if program.operator not in ("attention_prefill", "mla_prefill", "attention_backward"):
        return 0.0
    width = f["head_dim"] if "head_dim" in f else f["nope"] + f["rope"]
    pairs = f["batch"] * f["heads"] * f["q_len"] * (f["q_len"] / 2 + f.get("past_len", 0))
    forward = 2.0 * pairs * (width + f.get("v_dim", width))
    return float(2.5 * forward if program.operator == "attention_backward" else forward)


def merged_items(items: list[StepItem], times: float = 1.0) -> list[StepItem]:
    """``times`` of items, with those of one name, direction and program added up."""
    merged: dict[Any, StepItem] = {}
    for item in items:
        key = (item.name, item.backward, item.program, item.message)
        runs, traffic, launches = (times * value for value in (item.runs, item.traffic, item.launches))
        if key in merged:
            before = merged[key]
            runs, traffic, launches = runs + before.runs, traffic + before.traffic, launches + before.launches
        merged[key] = replace(item, runs=runs, traffic=traffic, launches=launches)
    return list(merged.values())
