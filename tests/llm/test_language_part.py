"""Configurations of several inputs, sparse ones, encoders, embedding models, and fields that contradict a family."""

from typing import Any

import pytest

from cdmpp.errors import FieldError
from cdmpp.llm import Layout, estimate, read_config, simulate, step_operators
from cdmpp.llm.memory import parameter_count
from cdmpp.llm.operators import Prefill
from cdmpp.predict.predictor import LatencyPredictor

QWEN = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
INTERNLM = {
    "architectures": ["InternLM2ForCausalLM"],
    "hidden_size": 6144,
    "intermediate_size": 16384,
    "num_hidden_layers": 48,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "vocab_size": 92553,
    "bias": False,
}
VISION = {"model_type": "clip_vision_model", "hidden_size": 1024, "num_hidden_layers": 24}
MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
LLAMA = {**MISTRAL, "model_type": "llama"}
#: Configuration, ``model_type`` of the language part, parameters in billions, other parts.
PARTS: dict[str, tuple[dict[str, Any], str, float, tuple[str, ...]]] = {
    "internvl": (
        {"model_type": "internvl_chat", "llm_config": INTERNLM, "vision_config": VISION},
        "internlm2",
        19.86,
        ("vision_config",),
    ),
    "ovis": (
        {"model_type": "ovis", "hidden_size": 3584, "llm_config": {"model_type": "qwen2", **QWEN}},
        "qwen2",
        7.616,
        (),
    ),
    "deepseek-vl": (
        {"language_config": {"model_type": "llama", "num_hidden_layers": 30, "vocab_size": 102400}},
        "llama",
        6.91,
        (),
    ),
    "qwen2.5-omni": (
        {
            "model_type": "qwen2_5_omni",
            "thinker_config": {
                "model_type": "qwen2_5_omni_thinker",
                "audio_config": {"num_hidden_layers": 32},
                "text_config": {"model_type": "qwen2_5_omni_text", **QWEN},
            },
            "talker_config": {"model_type": "qwen2", "hidden_size": 896, "text_config": {"model_type": "qwen2"}},
        },
        "qwen2_5_omni_text",
        7.616,
        ("talker_config", "thinker_config.audio_config"),
    ),
    "a part of another name, three levels down": (
        {"model_type": "agent", "core": {"backbone": {"reader": {"model_type": "qwen2", **QWEN}}}},
        "qwen2",
        7.616,
        (),
    ),
    "llava-1.5": (
        {"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32064}, "vision_config": VISION},
        "llama",
        6.739,
        ("vision_config",),
    ),
    "llava without a type": ({"model_type": "llava", "text_config": {"vocab_size": 32064}}, "llama", 6.739, ()),
    "sparse mistral": ({"model_type": "llava_next", "text_config": {"model_type": "mistral"}}, "mistral", 7.242, ()),
    "paligemma": (
        {
            "model_type": "paligemma",
            "text_config": {
                **{"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_attention_heads": 8},
                **{"num_hidden_layers": 18, "num_key_value_heads": 1, "vocab_size": 257216},
            },
        },
        "gemma",
        2.51,
        (),
    ),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_language_part_is_found_at_any_depth(name: str) -> None:
    fields, model_type, billions, left_out = PARTS[name]
    config = read_config(fields)
    assert (config.model_type, config.left_out) == (model_type, left_out)
    assert parameter_count(config) == pytest.approx(billions * 1e9, rel=0.002)


def test_fields_at_null_keep_null_and_the_outermost_level_has_no_defaults() -> None:
    sparse = {"model_type": "deepseek_v3", "q_lora_rank": None, "num_hidden_layers": 2}
    config = read_config({"model_type": "kimi_vl", "text_config": sparse})
    assert config.latent is not None and (config.latent.q_rank, config.hidden) == (0, 7168)
    with pytest.raises(FieldError, match="num_hidden_layers: missing"):
        read_config(sparse | {"num_hidden_layers": None})


def test_quantisation_of_any_level_counts() -> None:
    stated = {"quant_method": "gptq", "bits": 8, "group_size": 128}
    outer: dict[str, Any] = {"model_type": "x", "thinker_config": {"text_config": {"model_type": "qwen2", **QWEN}}}
    inner = {
        "model_type": "x",
        "thinker_config": {"text_config": {"model_type": "qwen2", **QWEN}, "quantization_config": stated},
    }
    for fields in ({**outer, "quantization_config": stated}, inner):
        assert read_config(fields).weights == "int8"


@pytest.mark.parametrize(
    ("fields", "family", "message"),
    [
        ({"attn_layer_period": 8, "num_experts": 16, "mamba_d_state": 16}, "llama", "experts.*num_experts"),
        ({"mamba_expand": 2}, "llama", "Mamba layers .mamba_expand"),
        ({"ssm_cfg": {"d_state": 16}}, "mistral", "Mamba layers"),
        ({"kv_lora_rank": 512}, "qwen2", "latent attention"),
        ({"linear_num_value_heads": 32}, "qwen3", "linear attention"),
        ({"index_topk": 2048}, "llama", "sparse attention"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "llama", "layers of several kinds"),
        ({"encoder_layers": 12}, "llama", "an encoder or cross attention"),
        ({"add_cross_attention": True}, "llama", "an encoder or cross attention"),
        ({"ffn_config": {"moe_num_experts": 16}}, "llama", "experts .moe_num_experts"),
        ({"num_local_experts": 8, "moe_intermediate_size": 64}, "mixtral", "experts .moe_intermediate_size"),
        ({"model_type": "phi"}, "llama", "feed-forward layer without a gate .phi"),
        ({"architectures": ["GPTNeoXForCausalLM"], "model_type": None}, "llama", "without a gate"),
        ({"hidden_act": "gelu_new"}, "llama", "without a gate .hidden_act=gelu_new"),
    ],
)
def test_fields_of_layers_that_a_family_lacks_are_refused(fields: dict[str, Any], family: str, message: str) -> None:
    with pytest.raises(FieldError, match=rf"fields contradict {family}: .*{message}"):
        read_config({**LLAMA, "model_type": "new", **fields}, family=family)


def test_fields_that_describe_nothing_contradict_nothing() -> None:
    empty = {"num_experts": 0, "mlp_only_layers": [], "layer_types": ["full_attention"] * 32, "kv_lora_rank": None}
    assert read_config({**LLAMA, "model_type": "new", **empty}, family="llama").layers == 32
    own = {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, "moe_top_k": 2}
    assert read_config(own, family="mixtral").experts is not None


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "bert", "architectures": ["BertModel"]},
        {"model_type": "xlm-roberta"},
        {"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]},
        {"model_type": "deberta-v2"},
        {"model_type": "vit"},
        {"model_type": "siglip_text_model"},
        {"model_type": None, "architectures": ["RobertaModel"]},
        {"model_type": "clip", "text_config": {"model_type": "clip_text_model"}},
        {"model_type": "t5", "is_encoder_decoder": True},
        {"model_type": "bart"},
        {"model_type": "whisper"},
    ],
)
@pytest.mark.parametrize("family", [None, "llama"])
def test_encoders_are_refused_with_that_reason(fields: dict[str, Any], family: str | None) -> None:
    with pytest.raises(FieldError, match=r"is an encoder, which does not decode|has an encoder beside its decoder"):
        read_config({**LLAMA, **fields}, family=family)


@pytest.mark.parametrize(
    "name",
    [
        "MistralModel",
        "MistralForSequenceClassification",
        "MistralForTokenClassification",
        "MistralRewardModel",
        "NVEmbedModel",
        "MistralBidirectionalModel",
    ],
)
def test_models_without_output_tokens_are_answered_for_the_prompt(name: str, predictor: LatencyPredictor) -> None:
    fields = {**MISTRAL, "architectures": [name]}
    config = read_config(fields)
    assert config.prompt_only == name
    # No output layer.
    plain = read_config(MISTRAL)
    assert parameter_count(plain) - parameter_count(config) == 32000 * 4096
    names = [part.name for part in step_operators(config, Layout(), Prefill([128]))]
    assert names[-1] == "final_norm"
    answer = estimate(fields, "h100-sxm", input=128, output=64, predictor=predictor)
    assert (answer.settings.output, answer.decode, answer.total.point) == (1, None, answer.prefill.point)
    assert any(name in remark for remark in answer.remarks)
    served = simulate(fields, "h100-sxm", rate=1.0, input=128, count=8, predictor=predictor)
    assert served.output.max() == 1


def test_generating_models_of_several_inputs_have_outputs() -> None:
    fields = {"architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "llm_config": INTERNLM}
    assert read_config(fields).prompt_only is None
    assert read_config({**MISTRAL, "architectures": ["MistralForCausalLM"]}).prompt_only is None


def test_a_decoder_inside_of_a_decoder_is_not_its_language_part() -> None:
    assert read_config({**LLAMA, "speculator": {**LLAMA, "num_hidden_layers": 1}}).layers == 32
