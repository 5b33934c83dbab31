"""Reading of Hugging Face's ``config.json``: its fields, and one function for each architecture.

Defaults are those of the configuration classes of transformers: published files leave out fields at their default.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from cdmpp.errors import DataError, FieldError
from cdmpp.predict.engines.profile import engine_fields
from cdmpp.predict.llm.config import Experts, Latent, LLMConfig
from cdmpp.predict.llm.quantisation import quantised, with_separate_file
from cdmpp.utils.files import MAX_CONFIG_BYTES, read_bytes

#: Largest accepted size: above every published model by a factor of more than 30.
MAX_SIZE, MAX_LAYERS = 2**24, 10_000


class Fields:
    """Fields of a configuration, checked as they are read."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values, self.path = values, path

    def size(self, name: str, default: int | None = None, *, least: int = 1, most: int = MAX_SIZE) -> int:
        """A whole number of the configuration; without a default it is required.

        Raises
        ------
        FieldError
        """
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise self.error(name, "missing", f"a config.json of this model_type has {name}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.error(name, f"{str(value)[:80]!r} is not allowed", f"a whole number from {least} to {most}")
        return value

    def flag(self, name: str, default: bool) -> bool:
        """A truth value of the configuration.

        Raises
        ------
        FieldError
        """
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"{str(value)[:80]!r} is not allowed", "true or false")
        return value

    def text(self, name: str, default: str) -> str:
        """A text of the configuration.

        Raises
        ------
        FieldError
        """
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > 100:
            raise self.error(name, f"{str(value)[:80]!r} is not allowed", "a short text")
        return value

    def sizes(self, name: str) -> list[int]:
        """A list of whole numbers; empty where the field is not given.

        Raises
        ------
        FieldError
        """
        values = self.values.get(name)
        if values is None:
            return []
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise self.error(name, f"{str(values)[:80]!r} is not allowed", "a list of whole numbers")
        return values

    def error(self, name: str, problem: str, hint: str = "") -> FieldError:
        """The error of one field."""
        path = f"{self.path}.{name}"
        return FieldError(f"{path}: {problem}", path=path, hint=hint)


def _common(f: Fields, **own: Any) -> LLMConfig:
    """Fields that most decoders share; ``own`` are those of the family."""
    layers, hidden = f.size("num_hidden_layers", most=MAX_LAYERS), f.size("hidden_size")
    heads = own.pop("heads", None) or f.size("num_attention_heads")
    kv_heads = own.pop("kv_heads", None) or f.size("num_key_value_heads", heads)
    head_dim = own.pop("head_dim", None) or f.values.get("head_dim")
    if head_dim is None and hidden % heads:
        raise f.error("num_attention_heads", f"{heads} does not divide hidden_size={hidden}", "or give head_dim")
    if heads % kv_heads:
        raise f.error("num_key_value_heads", f"{kv_heads} does not divide num_attention_heads={heads}")
    window, windowed = own.pop("window", (None, 0))
    values: dict[str, Any] = {
        "model_type": f.text("model_type", "llama"),
        "layers": layers,
        "hidden": hidden,
        "vocab": f.size("vocab_size"),
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": hidden // heads if head_dim is None else f.size("head_dim", head_dim),
        "intermediate": f.size("intermediate_size"),
        "activation": f.text("hidden_act", "silu"),
        "tied": f.flag("tie_word_embeddings", False),
        "window": window if windowed else None,
        "windowed_layers": windowed,
    }
    return LLMConfig(**{**values, **own})


def _window(f: Fields, layers_without_types: int, *, default: int | None = None) -> tuple[int | None, int]:
    """Window, and the number of layers that have it: counted in ``layer_types`` where it is given."""
    if f.values.get("sliding_window") is None and default is None:
        return None, 0
    window, types = f.size("sliding_window", default), f.values.get("layer_types")
    if types is None:
        return window, layers_without_types
    if not isinstance(types, list) or len(types) != f.size("num_hidden_layers", most=MAX_LAYERS):
        raise f.error("layer_types", "is not a list with one type per layer")
    unknown = [t for t in types if t not in ("full_attention", "sliding_attention")]
    if unknown:
        raise f.error("layer_types", f"{str(unknown[0])[:80]!r} is not known", "full_attention or sliding_attention")
    return window, types.count("sliding_attention")


def _layers(f: Fields) -> int:
    return f.size("num_hidden_layers", most=MAX_LAYERS)


def _llama(f: Fields) -> LLMConfig:
    bias = f.flag("attention_bias", False)
    return _common(f, qkv_bias=bias, o_bias=bias, mlp_bias=f.flag("mlp_bias", False))


def _mistral(f: Fields) -> LLMConfig:
    return _common(f, window=_window(f, _layers(f)))


def _mixtral(f: Fields) -> LLMConfig:
    intermediate = f.size("intermediate_size")
    experts = Experts(
        f.size("num_local_experts", 8), f.size("num_experts_per_tok", 2), intermediate, 0, False, _layers(f)
    )
    return _common(f, window=_window(f, _layers(f)), experts=_checked(f, experts, "num_local_experts"))


def _qwen(f: Fields, *, bias: bool, qk_norm: bool, experts: Experts | None = None, **own: Any) -> LLMConfig:
    window: tuple[int | None, int] = (None, 0)
    if f.flag("use_sliding_window", False):
        window = _window(f, max(0, _layers(f) - f.size("max_window_layers", 28, least=0)))
    o_bias = f.flag("attention_bias", False)
    return _common(f, window=window, qkv_bias=bias or o_bias, o_bias=o_bias, qk_norm=qk_norm, experts=experts, **own)


def _qwen2(f: Fields) -> LLMConfig:
    return _qwen(f, bias=True, qk_norm=False)


def _qwen3(f: Fields) -> LLMConfig:
    return _qwen(f, bias=False, qk_norm=True, head_dim=f.size("head_dim", 128))


def _qwen_experts(f: Fields, count: int, topk: int, intermediate: int, shared: int) -> Experts:
    """Experts of Qwen; layers that ``decoder_sparse_step`` or ``mlp_only_layers`` exclude are dense."""
    step, dense = f.size("decoder_sparse_step", 1), set(f.sizes("mlp_only_layers"))
    layers = sum(1 for layer in range(_layers(f)) if (layer + 1) % step == 0 and layer not in dense)
    experts = Experts(
        f.size("num_experts", count),
        f.size("num_experts_per_tok", topk),
        f.size("moe_intermediate_size", intermediate),
        f.size("shared_expert_intermediate_size", shared, least=0) if shared else 0,
        bool(shared),
        layers,
    )
    return _checked(f, experts, "num_experts")


def _qwen2_moe(f: Fields) -> LLMConfig:
    return _qwen(f, bias=True, qk_norm=False, experts=_qwen_experts(f, 60, 4, 1408, 5632))


def _qwen3_moe(f: Fields) -> LLMConfig:
    experts = _qwen_experts(f, 128, 8, 768, 0)
    return _qwen(f, bias=False, qk_norm=True, experts=experts, head_dim=f.values.get("head_dim"))


def _gemma(f: Fields, *, heads: int | None = None, kv_heads: int | None = None, **own: Any) -> LLMConfig:
    bias = f.flag("attention_bias", False)
    activation = f.values.get("hidden_activation") or f.values.get("hidden_act") or "gelu_pytorch_tanh"
    return _common(
        f,
        heads=f.size("num_attention_heads", heads),
        kv_heads=f.size("num_key_value_heads", kv_heads),
        head_dim=f.size("head_dim", 256),
        activation=str(activation)[:100],
        tied=f.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        scaled_embedding=True,
        **own,
    )


def _gemma1(f: Fields) -> LLMConfig:
    return _gemma(f)


def _gemma2(f: Fields) -> LLMConfig:
    # Layers 0, 2, 4, ... have the window.
    window = _window(f, (_layers(f) + 1) // 2, default=4096)
    return _gemma(f, norms=4, window=window, soft_cap=f.values.get("final_logit_softcapping", 30.0) is not None)


def _gemma3(f: Fields) -> LLMConfig:
    # Every sixth layer attends to all tokens.
    pattern = f.size("sliding_window_pattern", 6)
    window = _window(f, _layers(f) - _layers(f) // pattern, default=4096)
    f = Fields({**f.values, "vocab_size": f.size("vocab_size", 262_208)}, f.path)
    return _gemma(f, heads=8, kv_heads=4, norms=4, qk_norm=True, window=window)


def _gpt2(f: Fields) -> LLMConfig:
    hidden = f.size("n_embd")
    names = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}
    values = {**f.values, **{name: f.size(own) for name, own in names.items()}, "num_key_value_heads": None}
    return _common(
        Fields({**values, "intermediate_size": f.size("n_inner", 4 * hidden)}, f.path),
        gated=False,
        activation=f.text("activation_function", "gelu_new"),
        norm="layernorm",
        positions=f.size("n_positions", 1024),
        tied=f.flag("tie_word_embeddings", True),
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
    )


def _opt(f: Fields) -> LLMConfig:
    hidden, bias = f.size("hidden_size"), f.flag("enable_bias", True)
    if f.size("word_embed_proj_dim", hidden) != hidden:
        raise f.error(
            "word_embed_proj_dim",
            f"{f.values['word_embed_proj_dim']} differs from hidden_size={hidden}",
            "only models whose embedding has hidden_size columns are read (all OPT models but 350m)",
        )
    return _common(
        Fields({**f.values, "intermediate_size": f.size("ffn_dim"), "num_key_value_heads": None}, f.path),
        gated=False,
        activation=f.text("activation_function", "relu"),
        norm="layernorm",
        final_norm=f.flag("do_layer_norm_before", True) and not f.flag("_remove_final_layer_norm", False),
        # OPT's table of positions has two further rows.
        positions=f.size("max_position_embeddings", 2048) + 2,
        tied=f.flag("tie_word_embeddings", True),
        qkv_bias=bias,
        o_bias=bias,
        mlp_bias=bias,
    )


def _deepseek(f: Fields) -> LLMConfig:
    layers = _layers(f)
    count = f.values.get("n_routed_experts")
    experts = None
    if count is not None:
        first, step = f.size("first_k_dense_replace", 0, least=0), f.size("moe_layer_freq", 1)
        width = f.size("moe_intermediate_size")
        experts = Experts(
            f.size("n_routed_experts"),
            f.size("num_experts_per_tok"),
            width,
            f.size("n_shared_experts", 0, least=0) * width,
            False,
            sum(1 for layer in range(layers) if layer >= first and layer % step == 0),
        )
        experts = _checked(f, experts, "n_routed_experts")
    latent = Latent(
        f.size("q_lora_rank", 0, least=0),
        f.size("kv_lora_rank"),
        f.size("qk_rope_head_dim"),
        f.size("qk_nope_head_dim"),
        f.size("v_head_dim"),
    )
    heads = f.size("num_attention_heads")
    return _common(f, kv_heads=heads, head_dim=latent.rope + latent.nope, experts=experts, latent=latent)


def _checked(f: Fields, experts: Experts, name: str) -> Experts | Any:
    """The experts, or None where no layer has them."""
    if experts.topk > experts.count:
        raise f.error("num_experts_per_tok", f"{experts.topk} exceeds {name}={experts.count}")
    return experts if experts.layers else None


#: ``model_type`` -> how its configuration is read.
FAMILIES: dict[str, Callable[[Fields], LLMConfig]] = {
    "llama": _llama,
    "mistral": _mistral,
    "mixtral": _mixtral,
    "qwen2": _qwen2,
    "qwen2_moe": _qwen2_moe,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma1,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3,
    "gpt2": _gpt2,
    "opt": _opt,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
}


#: Class names that replace a missing ``model_type``.
_ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GemmaForCausalLM": "gemma",
    "Gemma2ForCausalLM": "gemma2",
    "Gemma3ForCausalLM": "gemma3_text",
    "Gemma3ForConditionalGeneration": "gemma3",
    "GPT2LMHeadModel": "gpt2",
    "OPTForCausalLM": "opt",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
}
#: Parts of a configuration that belong to other inputs than text.
_OTHER_INPUTS = ("vision_config", "audio_config")


def read_config(config: LLMConfig | Mapping[str, Any] | str | PathLike[str], path: str = "config") -> LLMConfig:
    """Dimensions of a language model.

    Parameters
    ----------
    config : LLMConfig, mapping or path
        The content of a ``config.json`` of Hugging Face, or the path of the file. A configuration of several inputs
        has the language model in ``text_config``; the other parts are listed in ``left_out``.
    path : str
        Name of the configuration in error messages.

    Raises
    ------
    DataError
        The file cannot be read, or is not a JSON object.
    FieldError
        The architecture is not known, or a field is missing or impossible.

    Examples
    --------
    >>> read_config("examples/llm/llama-3.1-8b.json").layers
    32
    """
    if isinstance(config, LLMConfig):
        return config
    fields = config_fields(config) if isinstance(config, str | PathLike) else config
    if not isinstance(fields, Mapping):
        raise FieldError(f"{path}: {str(fields)[:80]!r} is not a configuration", path=path, hint="pass a JSON object")
    return _read(fields, path)


def config_fields(path: str | PathLike[str]) -> dict[str, Any]:
    """Fields of a ``config.json``; ``path`` may be the folder of the file.

    ModelOpt states the types of weights in ``hf_quant_config.json`` beside it. The two files may have a prefix:
    ``X_config.json`` and ``X_hf_quant_config.json``.

    Raises
    ------
    DataError
        A file cannot be read, or is not a JSON object.
    """
    shown, hint = str(path)[:200], "pass the config.json of a model"
    try:
        file = Path(path)
        file = file / "config.json" if file.is_dir() else file
        fields = _json_object(file, shown, hint)
        separate = file.with_name(file.name.removesuffix("config.json") + "hf_quant_config.json")
        if file.name.endswith("config.json") and separate.is_file():
            fields = with_separate_file(fields, _json_object(separate, str(separate)[:200], hint))
    except DataError:
        raise
    except OSError as error:
        raise DataError(f"{shown} cannot be read: {error.strerror}", hint=hint) from None
    except ValueError:  # a null character in the path
        raise DataError(f"{shown!r} is not a path", hint=hint) from None
    return fields


def _json_object(file: Path, shown: str, hint: str) -> dict[str, Any]:
    text = read_bytes(file, MAX_CONFIG_BYTES)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError(f"{shown} is not JSON", hint=hint) from None
    if not isinstance(value, dict):
        raise DataError(f"{shown} is not a JSON object", hint=hint)
    return value


def _read(config: Mapping[str, Any], path: str) -> LLMConfig:
    left_out = tuple(name for name in _OTHER_INPUTS if config.get(name) is not None)
    quantisation = config.get("quantization_config")
    outer = config
    if isinstance(config.get("text_config"), Mapping):
        path, config = f"{path}.text_config", config["text_config"]
        quantisation = config.get("quantization_config", quantisation)
        if "model_type" not in config and "architectures" not in config:
            config = {**config, "model_type": outer.get("model_type")}
        if "tie_word_embeddings" in outer:
            config = {"tie_word_embeddings": outer["tie_word_embeddings"], **config}
    name = _model_type(config, path)
    read = FAMILIES[name](Fields({**config, "model_type": name}, path))
    read = quantised(read, quantisation, f"{path}.quantization_config", config.get("expert_dtype"))
    positions = config.get("max_position_embeddings")
    return replace(read, left_out=left_out, context=positions if type(positions) is int and positions > 0 else None)


def with_configs(request: Any) -> Any:
    """A request in which every ``{"llm": {"config": path, "engine": path}}`` has the contents of the files.

    Parts of the request without a path are the same objects. A service is never sent paths, and reads none.

    Raises
    ------
    DataError
        A file cannot be read, or is not a JSON object.
    """
    try:
        return _replaced(request)
    except RecursionError:
        return request  # no valid request is nested so deeply


def _replaced(value: Any) -> Any:
    if isinstance(value, Mapping):
        changed = {key: _with_config(key, part) for key, part in value.items()}
        return changed if any(changed[key] is not part for key, part in value.items()) else value
    if isinstance(value, list):
        items = [_replaced(item) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value


def _with_config(key: Any, value: Any) -> Any:
    if key != "llm" or not isinstance(value, Mapping):
        return _replaced(value)
    read: dict[str, Any] = {}
    if isinstance(value.get("config"), str | PathLike):
        read["config"] = config_fields(value["config"])
    if isinstance(engine := value.get("engine"), PathLike) or (isinstance(engine, str) and engine.endswith(".toml")):
        read["engine"] = engine_fields(engine)
    return {**value, **read} if read else value


def _model_type(config: Mapping[str, Any], path: str) -> str:
    name = config.get("model_type")
    if name is None:
        classes = config.get("architectures")
        first = classes[0] if isinstance(classes, list) and classes else None
        name = _ARCHITECTURES.get(first, first) if isinstance(first, str) else None
    known = ", ".join(FAMILIES)
    if not isinstance(name, str):
        raise FieldError(
            f"{path}.model_type: missing, and architectures names no known class",
            path=f"{path}.model_type",
            hint=f"this is no config.json of Hugging Face, or one without an architecture; known: {known}",
        )
    if name not in FAMILIES:
        near = difflib.get_close_matches(name.casefold(), FAMILIES, n=1)
        meant = f"; did you mean {near[0]}?" if near else ""
        raise FieldError(
            f"{path}.model_type: {name[:80]!r} is not known{meant}", path=f"{path}.model_type", hint=f"known: {known}"
        )
    return name
