"""Dimensions of torchtitan's dense models by name and flavor, as in torchtitan 0.2.2."""

from __future__ import annotations

from typing import Any

from cdmpp.errors import FieldError
from cdmpp.predict.llm.config import LLMConfig

#: layers, hidden, heads, kv_heads, head_dim, intermediate, vocab
_FLAVORS: dict[str, dict[str, tuple[int, int, int, int, int, int, int]]] = {
    "llama3": {
        "debugmodel": (6, 256, 16, 16, 16, 768, 2048),
        "8B": (32, 4096, 32, 8, 128, 14336, 128256),
        "70B": (80, 8192, 64, 8, 128, 28672, 128256),
        "405B": (126, 16384, 128, 8, 128, 53248, 128256),
    },
    "qwen3": {
        "debugmodel": (8, 256, 16, 8, 128, 3072, 2048),
        "0.6B": (28, 1024, 16, 8, 128, 3072, 151936),
        "1.7B": (28, 2048, 16, 8, 128, 6144, 151936),
        "4B": (36, 2560, 32, 8, 128, 9728, 151936),
        "8B": (36, 4096, 32, 8, 128, 12288, 151936),
        "14B": (40, 5120, 40, 8, 128, 17408, 151936),
        "32B": (64, 5120, 64, 8, 128, 25600, 151936),
    },
}


def torchtitan_model(name: Any, flavor: Any) -> LLMConfig:
    """Dimensions of a flavor; the variants of its attention (``8B_flex``) have the same.

    Raises
    ------
    FieldError
        The model or the flavor is not known.
    """
    flavors = _FLAVORS.get(str(name))
    plain = str(flavor).removesuffix("_attn").removesuffix("_flex").removesuffix("_varlen")
    sizes = (flavors or {}).get(plain)
    if sizes is None:
        known = "; ".join(f"{model}: {', '.join(table)}" for model, table in _FLAVORS.items())
        raise FieldError(
            f"model: the dimensions of {name!r}, flavor {flavor!r}, are not known",
            path="model.flavor",
            hint=f"known are {known}; for others give the option model, a config.json of Hugging Face",
        )
    layers, hidden, heads, kv_heads, head_dim, intermediate, vocab = sizes
    return LLMConfig(str(name), layers, hidden, vocab, heads, kv_heads, head_dim, intermediate)
