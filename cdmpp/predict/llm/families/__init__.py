"""Architectures: how the configuration of each ``model_type`` becomes a description of layers."""

from __future__ import annotations

from collections.abc import Callable

from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.families.classic import CLASSIC
from cdmpp.predict.llm.families.fields import Fields
from cdmpp.predict.llm.families.mixed import MIXED
from cdmpp.predict.llm.families.recurrent import RECURRENT
from cdmpp.predict.llm.families.sparse import SPARSE

#: ``model_type`` -> how its configuration is read.
FAMILIES: dict[str, Callable[[Fields], LLMConfig]] = {**CLASSIC, **MIXED, **SPARSE, **RECURRENT}
#: Class names that replace a missing ``model_type``.
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "Qwen3NextForCausalLM": "qwen3_next",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GPT2LMHeadModel": "gpt2",
    "OPTForCausalLM": "opt",
    "MPTForCausalLM": "mpt",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "GlmMoeDsaForCausalLM": "glm_moe_dsa",
    "Glm4MoeForCausalLM": "glm4_moe",
    "GptOssForCausalLM": "gpt_oss",
    "MiniMaxM2ForCausalLM": "minimax_m2",
    "MiniMaxM3ForCausalLM": "minimax_m3",
    "MiniMaxM3SparseForCausalLM": "minimax_m3",
    "NemotronHForCausalLM": "nemotron_h",
    "KimiLinearForCausalLM": "kimi_linear",
}
