"""The transformers of NeuSight's labels, in plain torch: BERT-large, GPT-2-large and GPT-3-XL,
attention written out.

The labels were measured on Hugging Face's modules with ``attn_implementation="eager"``; these make the same
calls. :func:`listed_kernels` holds them against the operator lists that the source published of one layer.
"""

from __future__ import annotations

import ast
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cdmpp.programs.frontends.torch_eager import EagerLaunch


@dataclass(frozen=True)
class Size:
    """Dimensions of a transformer; the feed-forward part is four times as wide."""

    layers: int
    width: int
    heads: int
    vocabulary: int
    positions: int


SIZES: Mapping[str, Size] = {
    "bert_large": Size(24, 1024, 16, 30522, 512),
    "gpt2_large": Size(36, 1280, 20, 50257, 1024),
    "gpt3_xl": Size(24, 3072, 24, 50257, 2048),
}


class _Heads(nn.Module):
    """Attention of ``[batch, tokens, width]``; three products (BERT) or one (GPT-2) before it."""

    def __init__(self, size: Size, causal: bool) -> None:
        super().__init__()
        self.heads, self.dim, self.causal = size.heads, size.width // size.heads, causal
        if causal:
            self.joint = nn.Linear(size.width, 3 * size.width)
            mask = torch.ones(1, 1, size.positions, size.positions, dtype=torch.bool).tril()
            self.register_buffer("mask", mask)
        else:
            self.query, self.key, self.value = (nn.Linear(size.width, size.width) for _ in range(3))
        self.out = nn.Linear(size.width, size.width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        batch, tokens, width = x.shape
        parts = self.joint(x).split(width, dim=2) if self.causal else (self.query(x), self.key(x), self.value(x))
        q, k, v = (part.view(batch, tokens, self.heads, self.dim).permute(0, 2, 1, 3) for part in parts)
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(self.dim)
        if self.causal:
            least = torch.full([], -1e9, device=scores.device)
            scores = torch.where(self.mask[:, :, :tokens, :tokens], scores, least)
        elif padding is not None:
            scores = scores + padding
        weights = self.dropout(torch.softmax(scores, dim=-1))
        context = torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous()
        result: Tensor = self.out(context.view(batch, tokens, width))
        return result


class _BertLayer(nn.Module):
    """Post-norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.attention = _Heads(size, causal=False)
        self.dropout, self.norm = nn.Dropout(0.1), nn.LayerNorm(size.width)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)
        self.last_dropout, self.last_norm = nn.Dropout(0.1), nn.LayerNorm(size.width)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        x = self.norm(self.dropout(self.attention(x, padding)) + x)
        wide = nn.functional.gelu(self.up(x))
        result: Tensor = self.last_norm(self.last_dropout(self.down(wide)) + x)
        return result


class Bert(nn.Module):
    """A classifier of sequences; with ``pretraining`` the two heads of pre-training instead."""

    def __init__(self, size: Size, pretraining: bool) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.kinds = nn.Embedding(2, size.width)
        self.positions = nn.Embedding(size.positions, size.width)
        self.norm, self.dropout = nn.LayerNorm(size.width), nn.Dropout(0.1)
        self.layers = nn.ModuleList(_BertLayer(size) for _ in range(size.layers))
        self.pooler = nn.Linear(size.width, size.width)
        self.classifier = nn.Linear(size.width, 2)
        self.pretraining = pretraining
        if pretraining:
            self.transform, self.transform_norm = nn.Linear(size.width, size.width), nn.LayerNorm(size.width)
            self.decoder = nn.Linear(size.width, size.vocabulary)
            self.decoder.weight = self.words.weight  # tied: one gradient is added to the other

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        attended = torch.ones(tokens.shape[0], 1, 1, tokens.shape[1], device=tokens.device)
        padding = (1.0 - attended) * -1e9
        x = self.words(tokens) + self.kinds(torch.zeros_like(tokens))
        x = x + self.positions(torch.arange(tokens.shape[1], device=tokens.device)[None])
        x = self.dropout(self.norm(x))
        for layer in self.layers:
            x = layer(x, padding)
        pooled = torch.tanh(self.pooler(x[:, 0]))
        if not self.pretraining:
            return (self.classifier(pooled),)
        hidden = self.transform_norm(nn.functional.gelu(self.transform(x)))
        return self.decoder(hidden), self.classifier(pooled)


class _GptLayer(nn.Module):
    """Pre-norm."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm, self.last_norm = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = _Heads(size, causal=True)
        self.dropout, self.last_dropout = nn.Dropout(0.1), nn.Dropout(0.1)
        self.up, self.down = nn.Linear(size.width, 4 * size.width), nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.attention(self.norm(x))) + x
        wide = self.up(self.last_norm(x))
        # "gelu_new": eight kernels.
        wide = 0.5 * wide * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * torch.pow(wide, 3.0))))
        return x + self.last_dropout(self.down(wide))


class Gpt(nn.Module):
    """A decoder with its output layer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.words = nn.Embedding(size.vocabulary, size.width)
        self.positions = nn.Embedding(size.positions, size.width)
        self.dropout = nn.Dropout(0.1)
        self.layers = nn.ModuleList(_GptLayer(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, ...]:
        at = torch.arange(tokens.shape[1], device=tokens.device)[None]
        x = self.dropout(self.words(tokens) + self.positions(at))
        for layer in self.layers:
            x = layer(x)
        return (self.head(self.norm(x)),)


class Training(nn.Module):
    """A network and the loss over its first output, as the source's training loop computes it."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: Tensor) -> Tensor:
        scores = self.network(tokens)[0]
        loss: Tensor = nn.functional.cross_entropy(scores.view(-1, scores.shape[-1]), tokens.view(-1))
        return loss


def make(model: str, training: bool, layers: int | None = None) -> nn.Module:
    """A network of :data:`SIZES` on the meta device, in the mode of its labels."""
    size = SIZES[model]
    size = Size(layers or size.layers, size.width, size.heads, size.vocabulary, size.positions)
    with torch.device("meta"):
        network = Bert(size, training) if model == "bert_large" else Gpt(size)
    return network.train(training)


# --- against the source's own lists -----------------------------------------------------------------------

#: Kernels that are compared: what they are called here -> how the source's lists and the traces name them.
_PRODUCTS = ("linear", "bmm")
_ROWS = ("softmax", "layernorm")
_FUNCTIONS = ("gelu", "tanh", "pow_scalar")
Kernel = tuple[str, tuple[int, ...]]


def traced_kernels(launches: Iterable[EagerLaunch]) -> Counter[Kernel]:
    """Products, normalisations and functions of a trace, with their sizes."""
    kernels: Counter[Kernel] = Counter()
    for launch in launches:
        spec = launch.spec
        if launch.call == "relu" or launch.phase == "backward":
            continue
        if spec.operator in _PRODUCTS:
            sizes = spec.sizes()
            kernels[spec.operator, tuple(sizes[k] for k in ("batch", "m", "n", "k") if k in sizes)] += 1
        elif spec.operator in _ROWS:
            kernels[spec.operator, (spec.sizes()["rows"], spec.sizes()["cols"])] += 1
        elif spec.operator in _FUNCTIONS:
            kernels[spec.operator, (spec.sizes()["rows"] * spec.sizes()["cols"],)] += 1
        elif launch.call in ("add", "mul", "div", "where", "native_dropout"):
            sizes = spec.sizes()
            kernels[launch.call, ()] += 1
    return kernels


def listed_kernels(rows: Iterable[Mapping[str, str]]) -> Counter[Kernel]:
    """The same of a list of the source: rows of ``e2e_neusight_model_ops`` with the columns op,
    target, input_shapes,
    output_shape. Bookkeeping on single numbers, and on the mask of one row, is left out."""
    kernels: Counter[Kernel] = Counter()
    for row in rows:
        target, inputs = row["target"].rpartition(".")[2], ast.literal_eval(row["input_shapes"])
        output = tuple(ast.literal_eval(row["output_shape"]))
        count = math.prod(output)
        if target == "addmm":
            (m, k), (_, n) = inputs[1], inputs[2]
            kernels["linear", (m, n, k)] += 1
        elif target == "matmul":
            *batch, m, k = inputs[0]
            kernels["bmm", (math.prod(batch), m, output[-1], k)] += 1
        elif target == "softmax":
            kernels["softmax", (count // output[-1], output[-1])] += 1
        elif target in ("LayerNorm", "ln_1", "ln_2", "ln_f"):
            kernels["layernorm", (count // output[-1], output[-1])] += 1
        elif target in ("gelu", "tanh", "activation", "pow"):
            if count > 1:
                name = {"activation": "tanh", "pow": "pow_scalar"}.get(target, target)
                kernels[name, (count,)] += 1
        elif target in ("query", "key", "value", "dense", "classifier", "decoder", "seq_relationship", "lm_head"):
            kernels["linear", (count // output[-1], output[-1], inputs[0][-1])] += 1
        elif target in ("add", "mul", "truediv", "where") and len(output) > 2:
            kernels[{"truediv": "div"}.get(target, target), ()] += 1
        elif target in ("dropout", "drop", "attn_dropout", "resid_dropout") and row["mode"] == "train":
            kernels["native_dropout", ()] += 1
    return kernels
