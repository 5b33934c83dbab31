"""Operators and collectives of one inference step of a language model, as a serving engine runs them.

Biases are added in the products (their cost is not separate), residuals in the norms, and the activation of a gated
feed-forward layer is one kernel with its product.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, FieldError
from cdmpp.predict.llm.config import Experts, Latent, LLMConfig
from cdmpp.predict.llm.layout import Layout, Types
from cdmpp.programs.elements import MAX_EXTENT
from cdmpp.programs.operators import OperatorSpec, make_operator


@dataclass(frozen=True)
class StepPart:
    """An operator or collective of a step.

    Attributes
    ----------
    name : str
        Its place in the model, such as "qkv_proj" or "attention_all_reduce".
    program : OperatorSpec
        Operator or collective of one rank.
    count : int
        Runs in the step.
    padded : tuple of OperatorSpec
        The same of more rows, which an engine could compute instead: no step takes longer than a larger one.
    """

    name: str
    program: OperatorSpec
    count: int
    padded: tuple[OperatorSpec, ...] = ()


class StepBuilder:
    """Collects the parts of a step.

    Parameters
    ----------
    tokens : int
        Rows of the activations of one rank.

    Attributes
    ----------
    parts : list of StepPart
        Parts so far.
    """

    def __init__(self, config: LLMConfig, layout: Layout, types: Types, tokens: int) -> None:
        self.config, self.layout, self.types, self.tokens = config, layout, types, tokens
        self.parts: list[StepPart] = []
        #: Field of attention operators for the type of the cache.
        self.cache = {} if types.kv_dtype is None else {"kv_dtype": types.kv_dtype}
        self._count = 1

    @contextmanager
    def times(self, count: int) -> Iterator[None]:
        """Parts added inside run ``count`` times; none is added for a count of 0."""
        before, self._count = self._count, count
        try:
            yield
        finally:
            self._count = before

    #: The same, inside of :meth:`times`, for a part of the layers.
    only = times

    def add(self, name: str, operator: str, **fields: Any) -> None:
        """Add an operator; its ``dtype`` is that of the activations if not given.

        Raises
        ------
        FieldError
            The step is too large for the operator.
        """
        if not self._count:
            return
        try:
            program = make_operator({"operator": operator, "dtype": self.types.dtype, **fields})
        except CdmppError as error:
            raise FieldError(
                f"config: cannot compute the model's part {name!r}: {error.message}",
                path="config",
                hint=f"{error.hint}. These sizes follow from the batch, the input length and config.json",
            ) from None
        self.parts.append(StepPart(name, program, self._count))

    def vector(self, name: str, operator: str, cols: int, **fields: Any) -> None:
        """Add an operator on ``[tokens, cols]``."""
        self.add(name, operator, rows=self.tokens, cols=cols, **fields)

    def norm(self, name: str, cols: int, *, residual: bool = False) -> None:
        """Add a norm of ``[tokens, cols]``.

        ``residual``: the kernel adds the residual too. It reads and writes two tensors instead of one, as a norm of
        twice as many rows does.
        """
        self.add(name, self.config.norm, rows=self.tokens * (1 + residual), cols=cols)

    def linear(self, name: str, n: int, k: int, part: str | None = "attention", *, rows: int | None = None) -> None:
        """Add a linear layer from ``k`` to ``n`` columns, of all tokens or of ``rows``.

        ``part``: part of a layer whose type its weights have; None: they are not quantised.
        """
        types = self.types.product(part) if part is not None else {}
        self.add(name, "linear", **types, m=self.tokens if rows is None else rows, n=n, k=k)

    def all_reduce(self, name: str) -> None:
        """Add the sum of the activations over the ranks of a layer; nothing for a single rank."""
        self._collective(name, "all_reduce", self._activations(), self.layout.tp)

    def all_gather(self, name: str, cols: int) -> None:
        """Add the concatenation of columns over the ranks of a layer, ``cols`` in total."""
        self._collective(name, "all_gather", self.tokens * cols * self.types.bytes, self.layout.tp)

    def exchange(self, name: str, element_bytes: float, topk: int, *, back: bool = False) -> None:
        """Add the exchange of tokens between experts of several replicas of the attention.

        Where each expert is on one rank, each rank sends its share of the replica's tokens once to each rank that has
        one of a token's experts. Otherwise all ranks get all tokens, and add up their parts of the results.
        """
        layout = self.layout
        if layout.dp == 1:
            return
        row = self.config.hidden * element_bytes
        if layout.expert_tp == 1:
            share = -(-self.tokens // layout.tp)
            self._collective(name, "all_to_all", share * min(topk, layout.ep) * row, layout.ep)
        else:
            operator = "reduce_scatter" if back else "all_gather"
            self._collective(name, operator, self.tokens * layout.dp * row, layout.stage_ranks)

    def transfer(self, name: str, count: int) -> None:
        """Add transfers of the activations to the next stage."""
        with self.times(count):
            self._collective(name, "send_recv", self._activations(), 2, self.layout.gpus)

    def _activations(self) -> float:
        return self.tokens * self.config.hidden * self.types.bytes

    def _collective(self, name: str, operator: str, size: float, ranks: int, span: int | None = None) -> None:
        """Add a collective; the device decides which ranks share a node. ``span``: see ``Collective``."""
        if ranks > 1:
            spread = span if span is not None and span > ranks else None
            self.add(name, operator, bytes=max(1, round(size)), ranks=ranks, span=spread)


def latent_attention(b: StepBuilder, latent: Latent, calls: Sequence[tuple[str, dict[str, int]]]) -> None:
    """Add the operators of one layer's attention, with its projections.

    Prefill expands the latents to keys and values of each head. Decode multiplies the queries with the expansion
    instead (the absorbed form), and reads the latents of the cache. The compressed queries, keys and values are not
    split over ranks; heads are.

    Parameters
    ----------
    calls : sequence of (str, dict)
        Calls of the attention: "prefill" or "decode", and batch and lengths.
    """
    hidden, heads = b.config.hidden, b.config.heads // b.layout.tp
    compressed = latent.kv_rank + latent.rope
    queries = heads * (latent.nope + latent.rope)
    if latent.q_rank:
        b.linear("qkv_a_proj", latent.q_rank + compressed, hidden)
        b.norm("q_a_norm", latent.q_rank)
        b.linear("q_b_proj", queries, latent.q_rank)
    else:
        b.linear("q_proj", queries, hidden)
        b.linear("kv_a_proj", compressed, hidden)
    b.norm("kv_a_norm", latent.kv_rank)
    b.vector("rotary", "rotary_embedding", (heads + 1) * latent.rope, head_dim=latent.rope)
    b.vector("kv_cache_save", "kv_cache_save", compressed)
    sizes = {"heads": heads, "latent": latent.kv_rank, "rope": latent.rope, "nope": latent.nope, "v_dim": latent.v_dim}
    for operator, call in calls:
        if operator == "prefill":
            # Cached latents are expanded, too.
            rows = b.tokens + call["batch"] * call.get("past_len", 0)
            b.linear("kv_b_proj", heads * (latent.nope + latent.v_dim), latent.kv_rank, rows=rows)
            b.add("attention", "mla_prefill", **call, **sizes, **b.cache)
        else:
            b.add("k_absorb", "bmm", batch=heads, m=b.tokens, n=latent.kv_rank, k=latent.nope)
            b.add("attention", "mla_decode", **call, **sizes, **b.cache)
            b.add("v_expand", "bmm", batch=heads, m=b.tokens, n=latent.v_dim, k=latent.kv_rank)
    b.linear("o_proj", hidden, heads * latent.v_dim, "output")


#: Activations that are operators of the same name; any other one costs as much as gelu.
_ACTIVATIONS = {"relu": "relu", "silu": "silu", "tanh": "tanh"}


@dataclass(frozen=True)
class Prefill:
    """A step over whole prompts.

    Attributes
    ----------
    lengths : tuple of int
        New tokens of each sequence of the batch.
    past_len : int
        Cached tokens in front of each sequence's new ones: chunks of a prompt before this one.
    """

    lengths: tuple[int, ...]
    past_len: int = 0

    def __init__(self, lengths: Sequence[int], past_len: int = 0) -> None:
        object.__setattr__(self, "lengths", tuple(lengths))
        object.__setattr__(self, "past_len", past_len)
        if not self.lengths or not all(type(n) is int and 1 <= n <= MAX_EXTENT for n in self.lengths):
            raise FieldError("lengths: a prefill step has one or more sequences of at least one token", path="lengths")

    @property
    def batch(self) -> int:
        """Sequences."""
        return len(self.lengths)

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return sum(self.lengths)


@dataclass(frozen=True)
class Decode:
    """A step that adds one token to each sequence.

    Attributes
    ----------
    batch : int
        Sequences.
    past_len : int
        Cached tokens of each sequence, before this step.
    past_total : int or None
        Cached tokens of all sequences, in place of ``past_len``, where their lengths differ.
    """

    batch: int
    past_len: int = 0
    past_total: int | None = None

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.batch

    @property
    def cached(self) -> int:
        """Cached tokens of a sequence, on average."""
        return self.past_len if self.past_total is None else round(self.past_total / self.batch)


#: Parts of a prefill and of a decode step that only its own sequences pass, and those behind the last layer.
PREFILL_PARTS = ("attention", "window_attention", "kv_b_proj")
DECODE_PARTS = ("attention", "window_attention", "k_absorb", "v_expand")
OUTPUT_PARTS = ("lm_head", "logits_all_gather", "logits_soft_cap", "sampling")
Step = Prefill | Decode
#: Routing of real prompts: equal loads would make 32 tokens of 8 experts each read all 256 experts, measured steps of
#: DeepSeek-R1 read about as many as this distribution does.
ROUTING = "power_law_1.01"
#: Half of the layers.
Only = Literal["attention", "ffn"]


def step_operators(
    config: LLMConfig,
    layout: Layout,
    step: Step,
    *,
    dtype: str = "bfloat16",
    weights: str | None = None,
    kv_dtype: str | None = None,
    device: DeviceSpec | None = None,
    only: Only | None = None,
) -> list[StepPart]:
    """Operators and collectives of one step, in order, as one rank runs them.

    With several pipeline stages the list holds the work of all stages and the transfers between them: the sum of
    its latencies is the time of one batch from the first stage to the last. With several replicas of the attention
    (``layout.dp``) it is that of the replica with most sequences.

    Parameters
    ----------
    config : LLMConfig
    layout : Layout
    step : Prefill or Decode
        Of the whole batch.
    dtype : str
        Type of activations.
    weights : str, optional
        Type of quantised weights (:class:`cdmpp.predict.llm.layout.Types`). The router, the embedding and the output
        layer are never quantised.
    kv_dtype : str, optional
        Type of the cache.
    device : DeviceSpec, optional
        Where it has no units for the type of the weights, products widen them.
    only : {"attention", "ffn"}, optional
        The attention or the feed-forward halves of all layers, without embedding, output and transfers.

    Returns
    -------
    list of StepPart
        Parts of equal layers are merged: ``count`` is the number of runs in the step.

    Raises
    ------
    FieldError
        The model cannot be split as the layout says, or has no such types.
    """
    layout.check(config)
    types = Types.of(config, dtype, weights, kv_dtype, device)
    local = replica_step(step, layout)
    b = StepBuilder(config, layout, types, local.tokens)
    if only is None:
        _embedding(b)
    if only != "ffn":
        with b.times(config.layers):
            _attention_half(b, local)
    if only != "attention":
        with b.times(config.dense_layers):
            _dense(b)
        if config.experts is not None:
            with b.times(config.moe_layers):
                _experts(b, config.experts, step.tokens)
    if only is None:
        if layout.pp > 1:
            b.transfer("stage_transfer", layout.pp - 1)
        _output(b, local.batch)
    return b.parts


#: Products of up to this many sequences are compared with those of more.
MAX_PADDED = 64
_PADDED = ("linear", "bmm", "moe")


def padded_decode(step: Decode, parts_of: Callable[[Decode], list[StepPart]]) -> list[StepPart]:
    """Parts of a decode step, its products with those of slightly more sequences (:attr:`StepPart.padded`).

    Parameters
    ----------
    parts_of : callable
        From a step to its parts.
    """
    return with_padding(parts_of(step), [parts_of(Decode(n, step.cached)) for n in padded_sizes(step.batch)])


def padded_sizes(batch: int) -> list[int]:
    """Numbers of sequences that the products of a decode step are compared with."""
    if batch > MAX_PADDED:
        return []
    power = 1 << batch.bit_length()
    return sorted({batch + 1, power}) if batch < 8 else [power]


def with_padding(parts: list[StepPart], larger: Sequence[list[StepPart]]) -> list[StepPart]:
    """Parts of a step, its products with those of larger steps."""
    return [
        replace(part, padded=tuple(one.program for one in others if one.program != part.program))
        if part.program.operator in _PADDED
        else part
        for part, *others in zip(parts, *larger, strict=True)
    ]


def replica_step(step: Step, layout: Layout) -> Step:
    """The step of the replica of the attention that has most sequences."""
    if layout.dp == 1:
        return step
    if isinstance(step, Prefill):
        return Prefill(step.lengths[:: layout.dp], step.past_len)
    return Decode(-(-step.batch // layout.dp), step.cached)


def attention_batches(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Batch and length of the attention calls that stand for one call over sequences of several lengths.

    Equal lengths are one call. Sequences of different lengths run in one call too, whose work grows with the square
    of the length: it is priced as a batch of equal sequences with the same numbers of tokens and of query-key pairs.
    """
    if len(set(lengths)) == 1:
        return [(len(lengths), lengths[0])]
    tokens, squares = sum(lengths), sum(n * n for n in lengths)
    batch = max(1, round(tokens * tokens / squares))
    return [(batch, max(1, round((squares / batch) ** 0.5)))]


def _embedding(b: StepBuilder) -> None:
    config = b.config
    b.add("embedding", "embedding", rows=b.tokens, cols=config.hidden, table_rows=-(-config.vocab // b.layout.tp))
    if config.positions:
        b.add("position_embedding", "embedding", rows=b.tokens, cols=config.hidden, table_rows=config.positions)
        b.vector("position_add", "add", config.hidden)
    if config.scaled_embedding:
        b.vector("embedding_scale", "mul_scalar", config.hidden)
    b.all_reduce("embedding_all_reduce")


def _attention_half(b: StepBuilder, step: Step) -> None:
    config, tp = b.config, b.layout.tp
    b.norm("attention_norm", config.hidden, residual=True)
    if config.latent is not None:
        latent_attention(b, config.latent, _calls(step, None))
    else:
        heads, kv_heads = config.heads // tp, max(1, config.kv_heads // tp)
        b.linear("qkv_proj", (heads + 2 * kv_heads) * config.head_dim, config.hidden)
        if config.qk_norm:
            b.add("qk_norm", config.norm, rows=b.tokens * (heads + kv_heads), cols=config.head_dim)
        if not config.positions:
            b.vector("rotary", "rotary_embedding", (heads + kv_heads) * config.head_dim, head_dim=config.head_dim)
        b.vector("kv_cache_save", "kv_cache_save", 2 * kv_heads * config.head_dim)
        sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": config.head_dim}
        for name, layers, window in (
            ("attention", config.layers - config.windowed_layers, None),
            ("window_attention", config.windowed_layers, config.window),
        ):
            with b.only(layers):
                for operator, call in _calls(step, window):
                    b.add(name, f"attention_{operator}", **call, **sizes, **b.cache)
        b.linear("o_proj", config.hidden, heads * config.head_dim, "output")
    b.all_reduce("attention_all_reduce")
    if config.norms == 4:
        b.norm("attention_output_norm", config.hidden)


def _calls(step: Step, window: int | None) -> list[tuple[str, dict[str, int]]]:
    """Calls of the attention: "prefill" or "decode", and its sizes."""
    if isinstance(step, Decode):
        cached = step.cached if window is None else min(step.cached, window - 1)
        return [("decode", {"batch": step.batch, "past_len": cached})]
    if step.past_len:
        past = step.past_len if window is None else min(step.past_len, window - 1)
        return [
            ("prefill", {"batch": n, "q_len": length, "past_len": past})
            for n, length in attention_batches(step.lengths)
        ]
    if window is None or max(step.lengths) <= window:
        return [("prefill", {"batch": n, "q_len": length}) for n, length in attention_batches(step.lengths)]
    # Blocks of queries that have as many keys as a causal window: the first block has its own, further blocks have
    # cached ones in front.
    blocks = Counter[tuple[int, int]]()
    for length in step.lengths:
        blocks[min(length, window), 0] += 1
        whole, rest = divmod(max(0, length - window), window)
        blocks[window, window // 2] += whole
        blocks[rest, window - rest // 2] += rest > 0
    return [("prefill", {"batch": n, "q_len": length, "past_len": past}) for (length, past), n in blocks.items() if n]


def _dense(b: StepBuilder) -> None:
    config = b.config
    b.norm("mlp_norm", config.hidden, residual=True)
    _feed_forward(b, "", config.intermediate // b.layout.tp)
    b.all_reduce("mlp_all_reduce")
    if config.norms == 4:
        b.norm("mlp_output_norm", config.hidden)


def _feed_forward(b: StepBuilder, prefix: str, columns: int) -> None:
    config, part = b.config, "shared" if prefix else "dense"
    if config.gated:
        b.linear(f"{prefix}gate_up_proj", 2 * columns, config.hidden, part)
        b.vector(f"{prefix}activation", "silu_and_mul", columns)
    else:
        b.linear(f"{prefix}up_proj", columns, config.hidden, part)
        b.vector(f"{prefix}activation", _ACTIVATIONS.get(config.activation, "gelu"), columns)
    b.linear(f"{prefix}down_proj", config.hidden, columns, part)


def _experts(b: StepBuilder, experts: Experts, tokens: int) -> None:
    """``tokens``: of all replicas of the attention."""
    config, layout = b.config, b.layout
    b.norm("mlp_norm", config.hidden, residual=True)
    b.linear("router", experts.count, config.hidden, None)
    # One kernel in serving engines. The tables hold the unfused form, softmax and top-k by PyTorch (`moe_gating`, 55 us
    # for 128 experts on the H800), so a softmax of the same size stands for it.
    b.vector("router_topk", "softmax", experts.count, dtype="float32")
    if experts.shared:
        _feed_forward(b, "shared_", -(-experts.shared // layout.tp))
        if experts.shared_gate:
            b.linear("shared_gate", 1, config.hidden, None)
            b.vector("shared_gate_mul", "mul", config.hidden)
    b.exchange("expert_dispatch", b.types.exchanged_bytes, experts.topk)
    b.add(
        "experts",
        "moe",
        **b.types.product("experts"),
        tokens=tokens,
        hidden=config.hidden,
        intermediate=experts.intermediate,
        experts=experts.count,
        topk=experts.topk,
        balance=ROUTING,
        tp=layout.expert_tp,
        ep=layout.ep,
    )
    b.exchange("expert_combine", b.types.bytes, experts.topk, back=True)
    if experts.shared:
        b.vector("shared_add", "add", config.hidden)
    b.all_reduce("mlp_all_reduce")
    if config.norms == 4:
        b.norm("mlp_output_norm", config.hidden)


def _output(b: StepBuilder, batch: int) -> None:
    """Logits of the last token of each sequence, and the choice of the next one."""
    config, tp = b.config, b.layout.tp
    if config.final_norm:
        b.norm("final_norm", config.hidden, residual=True)
    b.tokens = batch
    b.linear("lm_head", -(-config.vocab // tp), config.hidden, None)
    b.all_gather("logits_all_gather", config.vocab)
    if config.soft_cap:
        b.vector("logits_soft_cap", "tanh", config.vocab)
    b.vector("sampling", "argmax", config.vocab)
