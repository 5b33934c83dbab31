"""Dimensions and parameter counts of published configurations, and errors of others."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz.seeds import DEEPSEEK_V2_LITE
from cdmpp.devices.registry import lookup
from cdmpp.errors import DataError, FieldError
from cdmpp.llm import read_config
from cdmpp.llm.layout import Types
from cdmpp.llm.memory import parameter_count
from cdmpp.llm.read import FAMILIES

EXAMPLES = Path(__file__).parents[2] / "examples" / "llm"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
}
#: Published numbers of parameters, in billions.
PUBLISHED = {
    "deepseek-v3": 671.0,
    "gemma-2-9b": 9.24,
    "gpt2-xl": 1.558,
    "llama-3.1-70b": 70.6,
    "llama-3.1-8b": 8.03,
    "mixtral-8x7b": 46.7,
    "qwen2.5-14b": 14.77,
    "qwen3-30b-a3b": 30.5,
}
#: Further architectures: fields of the published file, and parameters in billions.
OTHERS: dict[str, tuple[dict[str, Any], float]] = {
    "llama-2-7b": (LLAMA, 6.738),
    "mistral-7b": ({**LLAMA, "model_type": "mistral", "intermediate_size": 14336, "num_key_value_heads": 8}, 7.242),
    "qwen3-8b": (
        {
            **LLAMA,
            "model_type": "qwen3",
            "intermediate_size": 12288,
            "num_hidden_layers": 36,
            "num_key_value_heads": 8,
            "vocab_size": 151936,
        },
        8.19,
    ),
    "qwen2-57b-a14b": (
        {
            "model_type": "qwen2_moe",
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "vocab_size": 151936,
            "num_experts": 64,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 2560,
            "shared_expert_intermediate_size": 20480,
        },
        57.4,
    ),
    "gemma-2b": (
        {
            "model_type": "gemma",
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "vocab_size": 256000,
        },
        2.506,
    ),
    "gemma-3-4b": (
        {
            "model_type": "gemma3",
            "vision_config": {"hidden_size": 1152},
            "text_config": {
                "model_type": "gemma3_text",
                "hidden_size": 2560,
                "intermediate_size": 10240,
                "num_hidden_layers": 34,
                "sliding_window": 1024,
            },
        },
        3.88,
    ),
    "opt-6.7b": (
        {
            "architectures": ["OPTForCausalLM"],
            "hidden_size": 4096,
            "ffn_dim": 16384,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 50272,
            "max_position_embeddings": 2048,
            "word_embed_proj_dim": 4096,
        },
        6.658,
    ),
    "deepseek-v2-lite": (DEEPSEEK_V2_LITE, 15.7),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_examples_have_the_published_number_of_parameters(name: str) -> None:
    count = parameter_count(read_config(EXAMPLES / f"{name}.json"))
    assert count == pytest.approx(PUBLISHED[name] * 1e9, rel=0.01)


def test_every_example_is_listed_above() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.json")) == sorted(PUBLISHED)


@pytest.mark.parametrize("name", OTHERS)
def test_other_architectures_have_the_published_number_of_parameters(name: str) -> None:
    fields, billions = OTHERS[name]
    assert parameter_count(read_config(fields)) == pytest.approx(billions * 1e9, rel=0.01)


def test_text_config_is_read_and_other_inputs_are_listed() -> None:
    gemma = read_config(OTHERS["gemma-3-4b"][0])
    assert gemma.left_out == ("vision_config",)
    assert (gemma.heads, gemma.kv_heads, gemma.head_dim, gemma.tied) == (8, 4, 256, True)
    # Every sixth of 34 layers attends to all tokens.
    assert (gemma.window, gemma.windowed_layers) == (1024, 29)


def test_first_layers_of_deepseek_v3_are_dense() -> None:
    config = read_config(EXAMPLES / "deepseek-v3.json")
    assert (config.dense_layers, config.moe_layers) == (3, 58)
    assert config.experts is not None
    assert config.experts.shared == 2048
    assert (config.weights, config.weight_scaling) == ("float8_e4m3", "block128")


def test_layer_types_give_the_number_of_windowed_layers() -> None:
    types = ["sliding_attention"] * 20 + ["full_attention"] * 12
    config = read_config({**LLAMA, "model_type": "mistral", "sliding_window": 512, "layer_types": types})
    assert (config.window, config.windowed_layers) == (512, 20)


def test_unused_window_of_qwen2_is_ignored() -> None:
    fields = {**LLAMA, "model_type": "qwen2", "sliding_window": 4096, "max_window_layers": 28}
    assert read_config(fields).windowed_layers == 0
    assert read_config({**fields, "use_sliding_window": True}).windowed_layers == 4


def test_unknown_architecture_lists_the_known_ones() -> None:
    with pytest.raises(FieldError, match=r"config\.model_type: 'mamba' is not known") as caught:
        read_config({**LLAMA, "model_type": "mamba"})
    assert all(name in caught.value.hint for name in FAMILIES)
    with pytest.raises(FieldError, match="did you mean llama"):
        read_config({**LLAMA, "model_type": "Llama2"})


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"hidden_size": None}, r"config\.hidden_size: missing"),
        ({"hidden_size": "4096"}, r"config\.hidden_size: '4096' is not allowed"),
        ({"num_hidden_layers": 0}, r"config\.num_hidden_layers: '0' is not allowed"),
        ({"num_attention_heads": True}, r"config\.num_attention_heads: 'True' is not allowed"),
        ({"num_attention_heads": 31}, r"31 does not divide hidden_size=4096"),
        ({"num_key_value_heads": 5}, r"5 does not divide num_attention_heads=32"),
        ({"tie_word_embeddings": "yes"}, r"config\.tie_word_embeddings: 'yes' is not allowed"),
        ({"model_type": None}, r"config\.model_type: missing"),
        ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, "3 exceeds num_local_experts=2"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "'bitsandbytes' is not supported"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 3}}, "'gptq' with weights of type 'int3'"),
        ({"quantization_config": {"quant_method": "vptq", "bits": 4}}, "'vptq' is not supported"),
        ({"quantization_config": {"quant_method": "torchao", "quant_type": "autoquant"}}, "of type 'autoquant'"),
        ({"quantization_config": {"quant_method": "hqq", "quant_config": {}}}, "of type 'intNone'"),
        ({"quantization_config": {"quant_algo": "FP8", "kv_cache_quant_algo": "NVFP4"}}, "a cache of type 'NVFP4'"),
        ({"quantization_config": {"quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 4}}}, "a cache of type"),
        ({"quantization_config": {"quant_algo": "MIXED_PRECISION"}}, "MIXED_PRECISION without the type of any part"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {}}}},
            "'compressed-tensors' is not supported",
        ),
        ({"model_type": "mistral", "sliding_window": 8, "layer_types": ["full_attention"]}, "one type per layer"),
        ({"model_type": "opt", "ffn_dim": 1, "word_embed_proj_dim": 512}, "512 differs from hidden_size=4096"),
    ],
)
def test_impossible_fields_are_errors_that_name_the_field(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError, match=message):
        read_config({**LLAMA, **changed})


def test_unreadable_files_are_errors(tmp_path: Path) -> None:
    broken, number = tmp_path / "broken.json", tmp_path / "number.json"
    broken.write_text('{"model_type": ')
    number.write_text("3")
    for path, message in (
        (broken, "not JSON"),
        (number, "is not a JSON object"),
        (tmp_path / "absent.json", "cannot be read"),
        ("x" * 5000, "cannot be read"),
        ("a\0b", "null byte"),
    ):
        with pytest.raises(DataError, match=message):
            read_config(path)


def test_folder_of_a_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path).intermediate == 11008


@pytest.mark.parametrize(
    ("stated", "weights", "scaling", "kv_dtype"),
    [
        (
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
            "float4_e2m1",
            "nvfp4",
            "float8_e4m3",
        ),
        ({"quant_algo": "FP8", "kv_cache_scheme": "FP8"}, "float8_e4m3", "tensor", "float8_e4m3"),
        ({"quant_method": "fbgemm_fp8"}, "float8_e4m3", "channel", None),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}, "input_activations": None}
                },
            },
            "int4",
            "block128",
            None,
        ),
    ],
)
def test_quantisation_is_read_as_published(
    stated: dict[str, Any], weights: str, scaling: str, kv_dtype: str | None
) -> None:
    config = read_config({**LLAMA, "quantization_config": stated})
    assert (config.weights, config.weight_scaling, config.kv_dtype) == (weights, scaling, kv_dtype)


def _torchao(name: str, **data: Any) -> dict[str, Any]:
    return {"quant_method": "torchao", "quant_type": {"default": {"_type": name, "_data": data, "_version": 1}}}


def _quark(dtype: str, inputs: str | None, **weight: Any) -> dict[str, Any]:
    stated = {"weight": {"dtype": dtype, **weight}, "input_tensors": inputs and {"dtype": inputs}}
    return {"quant_method": "quark", "global_quant_config": stated}


_OF_MODULES = {"module_fqn_to_config": {"_default": {"_type": "Int8DynamicActivationInt4WeightConfig", "_data": {}}}}


@pytest.mark.parametrize(
    ("stated", "weights", "weights_only"),
    [
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "int8", True),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "int4", True),
        ({"quant_method": "awq", "w_bit": 4}, "int4", True),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8", True),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, "int4", True),
        ({"quant_method": "torchao", "quant_type": "int4_weight_only"}, "int4", True),
        ({"quant_method": "torchao", "quant_type": "int8_weight_only"}, "int8", True),
        ({"quant_method": "torchao", "quant_type": "int8_dynamic_activation_int8_weight"}, "int8", False),
        (_torchao("Int8WeightOnlyConfig"), "int8", True),
        (_torchao("Float8WeightOnlyConfig"), "float8_e4m3", True),
        (_torchao("Float8DynamicActivationFloat8WeightConfig"), "float8_e4m3", False),
        (_torchao("IntxWeightOnlyConfig", weight_dtype={"_type": "torch.dtype", "_data": "int4"}), "int4", True),
        (_torchao("ModuleFqnToConfig", **_OF_MODULES), "int4", True),
        (_quark("fp8_e4m3", "fp8_e4m3", qscheme="per_tensor"), "float8_e4m3", False),
        (_quark("int8", None, qscheme="per_channel"), "int8", True),
        (_quark("uint4", None, qscheme="per_group", group_size=128), "int4", True),
        (_quark("fp4", "fp4", qscheme="per_group", group_size=32), "float4_e2m1", False),
        ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4}}}, "int4", True),
        ({"quant_method": "hqq", "quant_config": {"q_proj": {"weight_quant_params": {"nbits": 8}}}}, "int8", True),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "int", "act_bits": 16}, "int4", True),
        ({"quant_method": "auto-round", "bits": 8, "data_type": "int", "act_bits": 8}, "int8", False),
        ({"quant_method": "auto-round", "bits": 4, "data_type": "mx_fp", "act_bits": 4}, "float4_e2m1", False),
        ({"quant_method": "eetq", "weights": "int8"}, "int8", True),
        ({"quant_method": "fp_quant", "forward_dtype": "nvfp4"}, "float4_e2m1", False),
    ],
)
def test_methods_are_read_by_their_bits(stated: dict[str, Any], weights: str, weights_only: bool) -> None:
    config = read_config({**LLAMA, "quantization_config": stated})
    product = Types.of(config, device=lookup("b200")).product()
    assert config.weights == weights
    assert product.get("weight_dtype", product["dtype"]) == weights
    assert (product["dtype"] == "bfloat16") == weights_only


def test_quantisation_stands_beside_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(tmp_path).weights is None
    text = json.dumps(
        {"quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    )
    (tmp_path / "hf_quant_config.json").write_text(text)
    assert (read_config(tmp_path).weights, read_config(tmp_path).kv_dtype) == ("float8_e4m3", "float8_e4m3")
    with pytest.raises(FieldError, match="quant_algo"):
        read_config({**LLAMA, "quantization_config": {"quant_method": "modelopt", "quant_algo": "W2A2"}})
