"""Fields of a configuration that contradict the architecture as which it is read."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from cdmpp.llm.config import LLMConfig
from cdmpp.llm.families.fields import Fields

#: Kind of layers -> names of fields that describe them. A family whose reader does not read such a field lacks them.
_KINDS = {
    "experts": r"(n|num)_\w*experts(_per_tok(en)?)?$|(moe|expert)_(\w+_)?(size|freq|period|offset|step|layers|top_?k|"
    r"interval|dim|experts|experts_per_tok)$|first_k_dense_replace$|decoder_sparse_step$|mlp_only_layers$|top_k_experts$",
    "Mamba layers": r"mamba_|ssm_|(d_(state|conv)|state_size|conv_kernel|(time_step|dt)_rank|conv1d_width|lru_width)$",
    "latent attention": r"(kv|q)_lora_rank$|qk_(rope|nope)_head_dim$|v_head_dim$",
    "linear attention": r"linear_(num|key|value|conv|attn)_|lightning_|full_attention_interval$|attention_hidden_size$",
    "sparse attention": r"index(er)?_|\w*sparse_attention|compress_ratios$",
    "layers of several kinds": r"layers?_(block_)?types?$|block_(types|configs)$|hybrid_|attn_(layer_\w+|type_list)$|"
    r"attention_(types|layers)$|altup_|laurel_|hidden_size_per_layer_input$",
    "an encoder or cross attention": r"(encoder|decoder)_(layers|ffn_dim|attention_heads)$|num_decoder_layers$|"
    r"(add_)?cross_attention\w*$|is_encoder_decoder$",
    "a feed-forward layer without a gate": r"(n_inner|ffn_dim|activation_function|expansion_ratio)$",
}
_UNGATED = re.compile(
    "phi|gptj|gpt_?neox?|gpt_?bigcode|bloom|falcon|starcoder2|codegen|persimmon|nemotron|xglm|biogpt|gpt2|opt|mpt"
)
_UNGATED_ACTIVATIONS = ("gelu_new", "gelu_fast", "relu", "relu2", "squared_relu")
#: Fields at these values describe nothing.
_NEUTRAL: tuple[Any, ...] = (None, False, 0, 1, "", [], {}, "full_attention")
_OTHER = re.compile(r"rope|quantization|vision|audio|label|generation|_dtype$|_act$")


def contradictions(config: LLMConfig, fields: Fields, own_type: str) -> list[str]:
    """Descriptions of the fields, as the family of ``config`` read them, that it does not have.

    ``own_type``: ``model_type`` or class that the configuration states.
    """
    names_of_kind: dict[str, list[str]] = {}
    for name in _described(fields.values, fields.read):
        for kind, pattern in _KINDS.items():
            if re.match(pattern, name):
                names_of_kind.setdefault(kind, []).append(name)
    if config.gated:
        family = re.sub(r"forcausallm|lmheadmodel", "", own_type.casefold())
        ungated = names_of_kind.setdefault("a feed-forward layer without a gate", [])
        ungated += [family] * (_UNGATED.fullmatch(family) is not None)
        activation = fields.values.get("hidden_act")
        ungated += [f"hidden_act={activation}"] * (activation in _UNGATED_ACTIVATIONS)
    return [f"{kind} ({', '.join(names[:6])})" for kind, names in names_of_kind.items() if names]


def _described(values: Mapping[str, Any], read: set[str], depth: int = 0) -> Iterator[str]:
    """Names of fields that were not read and describe something, those of nested parts included."""
    for name, value in values.items():
        if not isinstance(name, str) or name in read or _OTHER.search(name):
            continue
        if isinstance(value, Mapping) and depth < 8:
            yield from _described(value, read, depth + 1)
        kinds = value if isinstance(value, list) and value else [value]
        told = any(kind is True or kind not in _NEUTRAL for kind in kinds)
        if told and (len(kinds) == 1 or any(kind != kinds[0] for kind in kinds)):
            yield name
