"""Reading of Hugging Face's ``config.json``."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from cdmpp.errors import DataError, FieldError
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.families import FAMILIES
from cdmpp.predict.llm.fields import Fields
from cdmpp.utils.files import MAX_CONFIG_BYTES, read_bytes

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

    Raises
    ------
    DataError
        The file cannot be read, or is not a JSON object.
    """
    shown, hint = str(path)[:200], "pass the config.json of a model"
    try:
        file = Path(path)
        text = read_bytes(file / "config.json" if file.is_dir() else file, MAX_CONFIG_BYTES)
    except OSError as error:
        raise DataError(f"{shown} cannot be read: {error.strerror}", hint=hint) from None
    except ValueError:  # a null character in the path
        raise DataError(f"{shown!r} is not a path", hint=hint) from None
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
    weights, scaling = _quantised(quantisation, f"{path}.quantization_config")
    return replace(read, left_out=left_out, weights=weights, weight_scaling=scaling)


def with_configs(request: Any) -> Any:
    """A request in which every ``{"llm": {"config": path}}`` has the content of the file.

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
    if key == "llm" and isinstance(value, Mapping) and isinstance(value.get("config"), str | PathLike):
        return {**value, "config": config_fields(value["config"])}
    return _replaced(value)


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


def _quantised(value: Any, path: str) -> tuple[str | None, str | None]:
    """Element type and scaling of the weights that ``quantization_config`` states."""
    if value is None:
        return None, None
    method = value.get("quant_method") if isinstance(value, Mapping) else None
    if method == "fp8":
        return "float8_e4m3", "block128" if value.get("weight_block_size") is not None else "channel"
    bits = value.get("bits", value.get("w_bit", 4)) if isinstance(value, Mapping) else None
    if method in ("gptq", "awq") and bits == 4:
        return "int4", "block128"
    width = f" with {str(bits)[:20]} bits" if method in ("gptq", "awq") else ""
    raise FieldError(
        f"{path}: quant_method={str(method)[:80]!r}{width} is not supported",
        path=path,
        hint="supported: fp8, gptq with 4 bits, awq with 4 bits; or remove the field and state the type of the weights",
    )
