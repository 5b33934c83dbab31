"""Training of a dense transformer as requests: layers of ``split`` and stages of ``simulate``, with their costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdmpp.errors import FieldError
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.memory import TRAINING_BYTES
from cdmpp.plan.formats.registry import Imported
from cdmpp.predict.requests.memory import devices_on_node

WEIGHT_BYTES = TRAINING_BYTES
_HALF = 2
NOTES = (
    "a backward pass is priced as two products for each linear layer, twice the forward pass of attention, and twice "
    "that of norms and activations",
    f"{WEIGHT_BYTES} bytes for each weight: 16-bit weight, 32-bit gradient, master weight and two moments",
    "activations are the 16-bit inputs of linear layers, norms and attention; scores are not kept",
    "norms are priced as fused layer norms, also where they are RMS norms",
)
Form = dict[str, Any]
Works = list[tuple[Form, int]]


@dataclass(frozen=True)
class PipelineJob:
    """A training job with pipeline parallelism."""

    model: LLMConfig
    run: Training
    pp: int  # ranks of the pipeline
    micro_batches: int  # of a step of one data-parallel copy
    device: Any
    virtual: int = 1  # stages on each rank
    dp: int = 1  # data-parallel copies
    schedule: Any = "1f1b"  # of a ``simulate`` request
    # Numbers of "embedding", "block" and "head" in each stage; default: equal numbers of blocks.
    stages: Sequence[Mapping[str, int]] | None = None
    recompute: bool = False  # whether activations are recomputed

    @property
    def ranks(self) -> int:
        """Devices of the job."""
        return self.run.tp * self.dp * self.pp

    def imported(self, kind: str, ignored: tuple[str, ...], notes: Sequence[str]) -> Imported:
        """The request of a planner, "split" or "simulate".

        Raises FieldError: the tensor-parallel ranks do not divide the model, or the stages its layers.
        """
        check_dense(self.model)
        if self.pp * self.virtual > self.model.layers + 2:
            raise FieldError.at(
                "pipeline",
                f"{self.pp} ranks of {self.virtual} stages are too many for {self.model.layers} layers",
                hint="use fewer stages",
            )
        check_tensor_parallel(self.model, self.run.tp, "tensor-parallel size")
        request = self._split() if kind == "split" else self._simulate()
        more = list(notes) + list(NOTES)
        if kind == "split" and self.virtual > 1:
            more.append(f"a split has one stage on each rank: the {self.virtual} stages on each rank are not imported")
        if kind == "split" and self.ranks > devices_on_node(self.device):
            more.append("a split decides which layers are on neighbouring nodes: all transfers cross nodes")
        return Imported(request, ignored, tuple(more))

    def _split(self) -> dict[str, Any]:
        send = transfer_form(self.model, self.run, self.device, self.ranks) if self.pp > 1 else None
        memory = {"memory": "recompute"} if self.recompute else {}
        return memory | {
            "layers": layer_forms(self.model, self.run, send),
            "ranks": [{"device": self.device} for _ in range(self.pp)],
            "micro_batches": self.micro_batches,
            "goal": "step",
        }

    def _simulate(self) -> dict[str, Any]:
        stages = self.stages or even_stages(self.model.layers, self.pp * self.virtual)
        memory = {"memory": "recompute"} if self.recompute else {}
        forms = [stage_form(self.model, self.run, stage, self.device, **memory) for stage in stages]
        sizes = {"micro_batches": self.micro_batches, "schedule": self.schedule, "ranks": self.pp}
        request: dict[str, Any] = {"stages": forms, **sizes}
        if self.pp > 1:
            spans = [self._span(s % self.pp, (s + 1) % self.pp) for s in range(len(forms) - 1)]
            sends = [transfer_form(self.model, self.run, self.device, span) for span in spans]
            request["transfer"] = sends if len(set(spans)) > 1 else sends[0]
        if self.dp > 1:
            max_bytes = max(form["weight_bytes"] for form in forms) * self.virtual
            gradients = {"operator": "all_reduce", "bytes": max_bytes / WEIGHT_BYTES * 4, "ranks": self.dp}
            # Tensor-parallel ranks are neighbours, then come the data-parallel copies, then the stages.
            gradients["span"] = self.dp * self.run.tp
            request["replicas"] = [self.micro_batches] * (self.dp - 1)
            request["gradient_sync"] = {"collective": gradients, "device": self.device}
        return request

    def _span(self, first: int, second: int) -> int:
        """Devices over which a transfer between two pipeline ranks is spread: the whole job where it crosses nodes."""
        low, high = sorted((first, second))
        width, node = self.run.tp * self.dp, devices_on_node(self.device)
        crosses = any((low * width + r) // node != (high * width + r) // node for r in range(width))
        return self.ranks if crosses else (high - low + 1) * width


def micro_batch_count(sequences: int, micro_batch: int, dp: int, option: str) -> int:
    """Micro-batches of a data-parallel copy. Raises FieldError: the sequences of a step cannot be divided into them."""
    if sequences % (micro_batch * dp):
        raise FieldError.at(
            option,
            f"{sequences} sequences are no multiple of {micro_batch} in a micro-batch times {dp} copies",
            hint="correct the file, or give the option dp",
        )
    return sequences // (micro_batch * dp)


@dataclass(frozen=True)
class Training:
    """How a transformer is trained."""

    # Sequences of a micro-batch; tokens of a sequence.
    micro_batch: int
    sequence: int
    tp: int = 1  # tensor-parallel ranks of each stage
    dtype: str = "bfloat16"
    # Whether each tensor-parallel rank has a part of the tokens between the linear layers.
    sequence_parallel: bool = False
    # Scaling of the FP8 products in the linear layers of the blocks; None: they compute in ``dtype``.
    fp8_scaling: str | None = None
    fp8_weight_gradient: bool = True  # whether the gradients of the weights are FP8 products too

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.micro_batch * self.sequence

    @property
    def product_types(self) -> Form:
        """Element types of the products in the linear layers of a block."""
        if self.fp8_scaling is None:
            return {"dtype": self.dtype}
        return {"dtype": "float8_e4m3", "scaling": self.fp8_scaling}

    @property
    def weight_gradient_types(self) -> Form:
        """Element types of the products that give the gradients of their weights."""
        return self.product_types if self.fp8_weight_gradient else {"dtype": self.dtype}

    def notes(self) -> list[str]:
        """Assumptions of the price."""
        exact = not self.sequence_parallel or self.tp == 1
        return [] if exact else ["sequence parallelism is priced as all-reduces of the same bytes"]

    @property
    def row_tokens(self) -> int:
        """Tokens of a tensor-parallel rank between the linear layers."""
        return -(-self.tokens // self.tp) if self.sequence_parallel else self.tokens


def check_dense(model: LLMConfig) -> None:
    """Raise FieldError for a model with experts, latent attention or layers that differ: no price for training."""
    if model.experts is not None or model.latent is not None or model.mixers or model.feed_forwards:
        what = "latent attention" if model.latent is not None else "layers that differ"
        what = "layers of experts" if model.experts is not None else what
        raise FieldError.at(
            "model", f"{what} cannot be imported", hint="write the layers of the request by hand (docs/pipelines.md)"
        )


def check_tensor_parallel(model: LLMConfig, tp: int, option: str) -> None:
    """Raise FieldError where the tensor-parallel ranks do not divide the heads or the columns."""
    for name in ("heads", "kv_heads", "intermediate", "vocab"):
        count = getattr(model, name)
        if count % tp and not (name == "kv_heads" and tp % count == 0):
            raise FieldError.at(option, f"{tp} ranks do not divide {count} ({name})", hint="choose a divisor")


def layer_forms(model: LLMConfig, run: Training, transfer: Form | None = None) -> list[Form]:
    """Layers of a ``split`` request; ``transfer``: predicted cost of sending a layer's output to another rank."""
    size = {"boundary_bytes": _boundary_bytes(model, run)}
    send = size if transfer is None else size | {"transfer": transfer}
    return [
        {"name": "embedding"} | _layer(*_embedding(model, run)) | _sizes(model, run, "embedding") | send,
        {"name": "block", "count": model.layers} | _layer(*_block(model, run)) | _sizes(model, run, "block") | send,
        {"name": "head"} | _layer(*_head(model, run)) | _sizes(model, run, "head") | size,
    ]


def stage_form(model: LLMConfig, run: Training, parts: Mapping[str, int], device: Any, **fields: Any) -> Form:
    """A stage of a ``simulate`` request with numbers of "embedding", "block" and "head", and further fields."""
    costs = {"embedding": _embedding, "block": _block, "head": _head}
    stage: Form = {}
    for index, name in enumerate(("forward", "backward")):
        works = [
            {"program": program, "count": count * times}
            for part, times in parts.items()
            if times
            for program, count in costs[part](model, run)[index]
        ]
        stage[name] = {"programs": works, "device": device}
    for field in ("activation_bytes", "weight_bytes"):
        stage[field] = float(sum(times * _sizes(model, run, part)[field] for part, times in parts.items()))
    return stage | {"boundary_bytes": _boundary_bytes(model, run)} | fields


def transfer_form(model: LLMConfig, run: Training, device: Any, ranks: int) -> Form:
    """Cost of sending the output of a stage to the next one; ``ranks``: devices over which both are spread."""
    size = _boundary_bytes(model, run)
    return {"collective": {"operator": "send_recv", "bytes": size, "ranks": 2, "span": ranks}, "device": device}


def _boundary_bytes(model: LLMConfig, run: Training) -> float:
    """Bytes that a layer takes from the one before it, for one micro-batch."""
    return float(run.tokens * model.hidden * _HALF)


def _layer(forward: Works, backward: Works) -> Form:
    return {
        name: {"programs": [{"program": program, "count": count} for program, count in works]}
        for name, works in (("forward", forward), ("backward", backward))
    }


def _linear(m: int, n: int, k: int, types: Form) -> Form:
    return {"operator": "linear", "m": m, "n": n, "k": k, **types}


def _gradients(m: int, n: int, k: int, types: Form, weight_types: Form) -> Works:
    """Products of a linear layer's backward pass: gradients of its input and of its weight."""
    return [(_linear(m, k, n, types), 1), (_linear(n, k, m, weight_types), 1)]


def _products(model: LLMConfig, run: Training) -> list[tuple[int, int, int]]:
    """Rows, columns and depth of the linear layers of a block on one tensor-parallel rank."""
    tokens, h, f = run.tokens, model.hidden, model.intermediate // run.tp
    kv_heads = max(model.kv_heads // run.tp, 1)
    heads = model.heads // run.tp
    up = f * (2 if model.gated else 1)
    qkv = (heads + 2 * kv_heads) * model.head_dim
    return [(tokens, qkv, h), (tokens, h, heads * model.head_dim), (tokens, up, h), (tokens, h, f)]


def _block(model: LLMConfig, run: Training) -> tuple[Works, Works]:
    dtype, tokens = run.dtype, run.tokens
    products = _products(model, run)
    attention = {
        "operator": "attention_prefill",
        "batch": run.micro_batch,
        "q_len": run.sequence,
        "heads": model.heads // run.tp,
        "kv_heads": max(model.kv_heads // run.tp, 1),
        "head_dim": model.head_dim,
        "dtype": dtype,
    }
    norm = {"operator": "layernorm", "rows": run.row_tokens, "cols": model.hidden, "dtype": dtype}
    activation = {
        "operator": "silu_and_mul" if model.gated else "gelu",
        "rows": tokens,
        "cols": model.intermediate // run.tp,
        "dtype": dtype,
    }
    rest: Works = [(attention, 1), (norm, 2), (activation, 1)]
    sums: Works = [] if run.tp == 1 else [(_sum(model, run), 2)]
    types = run.product_types
    forward: Works = [(_linear(*sizes, types), 1) for sizes in products]
    backward = [work for sizes in products for work in _gradients(*sizes, types, run.weight_gradient_types)]
    return forward + rest + sums, backward + [(form, 2 * count) for form, count in rest] + sums


def _sum(model: LLMConfig, run: Training) -> Form:
    size = run.tokens * model.hidden * _HALF
    return {"operator": "all_reduce", "bytes": size, "ranks": run.tp, "dtype": run.dtype}


def _embedding(model: LLMConfig, run: Training) -> tuple[Works, Works]:
    lookup = {
        "operator": "embedding",
        "rows": run.tokens,
        "cols": model.hidden,
        "table_rows": model.vocab // run.tp,
        "dtype": run.dtype,
    }
    works: Works = [(lookup, 1)] if run.tp == 1 else [(lookup, 1), (_sum(model, run), 1)]
    return works, [(lookup, 1)]


def _head(model: LLMConfig, run: Training) -> tuple[Works, Works]:
    sizes = (run.tokens, model.vocab // run.tp, model.hidden)
    types = {"dtype": run.dtype}
    return [(_linear(*sizes, types), 1)], _gradients(*sizes, types, types)


def _sizes(model: LLMConfig, run: Training, part: str) -> Form:
    """Bytes on one tensor-parallel rank: weights with gradients and optimizer, and activations of a micro-batch."""
    table, row = model.vocab // run.tp * model.hidden, model.hidden * _HALF
    if part != "block":
        inputs = row if part == "head" else 0
        return {"weight_bytes": float(table * WEIGHT_BYTES), "activation_bytes": float(run.tokens * inputs)}
    products = _products(model, run)
    weights = sum(n * k for _, n, k in products) + 2 * model.hidden
    # Inputs of the products; queries, keys and values; inputs of the activation. Between them: two norms.
    columns = 2 * model.hidden + sum(k for _, _, k in products) + products[0][1] + products[2][1]
    return {"weight_bytes": float(weights * WEIGHT_BYTES), "activation_bytes": float(run.tokens * columns * _HALF)}


def even_stages(layers: int, stages: int) -> list[dict[str, int]]:
    """Blocks of each stage, as many on each; the first has the embedding, the last the head.

    Raises FieldError: the stages do not divide the layers.
    """
    if layers % stages:
        raise FieldError(f"{layers} layers cannot be divided equally among {stages} stages", hint="give a layout")
    return ended([{"block": layers // stages} for _ in range(stages)])


def ended(stages: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    """Stages with the embedding in the first and the head in the last one."""
    parts = [{"embedding": 0, **stage, "head": 0} for stage in stages]
    parts[0]["embedding"] = parts[-1]["head"] = 1
    return parts
