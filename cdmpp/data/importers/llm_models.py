"""Published dimensions of the language models that the tables of LLMServingSim name.

A layer of a table states its model, its degree of tensor parallelism and its tokens; the sizes follow from here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelDimensions:
    """Dimensions of a decoder, as its configuration file states them.

    Attributes
    ----------
    experts, topk : int
        Experts of a layer and experts per token; 0 for a dense model.
    intermediate : int
        Columns between the projections of the feed-forward layer, or of one expert.
    """

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    experts: int = 0
    topk: int = 0
    norm: str = "rmsnorm"


MODELS: dict[str, ModelDimensions] = {
    "meta-llama/Llama-3.1-8B": ModelDimensions(4096, 14336, 32, 8, 128, 128256),
    "meta-llama/Llama-3.1-70B": ModelDimensions(8192, 28672, 64, 8, 128, 128256),
    "mistralai/Mixtral-8x7B-v0.1": ModelDimensions(4096, 14336, 32, 8, 128, 32000, experts=8, topk=2),
    "microsoft/Phi-mini-MoE-instruct": ModelDimensions(
        4096, 960, 32, 8, 128, 32064, experts=16, topk=2, norm="layernorm"
    ),
    "Qwen/Qwen3-32B": ModelDimensions(5120, 25600, 64, 8, 128, 151936),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": ModelDimensions(2048, 768, 32, 4, 128, 151936, experts=128, topk=8),
}
