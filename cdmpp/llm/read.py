"""Reading of Hugging Face's ``config.json``: the file, the architecture, and what all architectures share.

:mod:`cdmpp.llm.families` has the architectures.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any

from cdmpp.errors import DataError, FieldError
from cdmpp.llm.config import ConfigLike, LLMConfig
from cdmpp.llm.engines.profile import engine_fields
from cdmpp.llm.families import FAMILIES, architecture_family, default_fields
from cdmpp.llm.families.fields import Fields
from cdmpp.llm.language_part import language_part
from cdmpp.llm.quantisation import quantised, with_separate_file
from cdmpp.utils.files import read_json


def read_config(config: ConfigLike, path: str = "config", *, family: str | None = None) -> LLMConfig:
    """Dimensions of a language model, from the content or the path of a ``config.json`` of Hugging Face.

    Of a configuration of several inputs the language part is read (:mod:`cdmpp.llm.language_part`); the others are
    listed in ``left_out``. ``path``: name of the configuration in error messages. ``family``: architecture in place of
    the configuration's ``model_type``, such as "llama"; fields of layers that it lacks are an error. Raises DataError
    for a file that cannot be read or is no JSON object, and FieldError for an unknown architecture, a missing or an
    impossible field.

    >>> read_config("examples/llm/llama-3.1-8b.json").layers
    32
    """
    if isinstance(config, LLMConfig):
        return config
    fields = config_fields(config) if isinstance(config, str | PathLike) else config
    if not isinstance(fields, Mapping):
        raise FieldError.at(path, f"{str(fields)[:80]!r} is not a configuration", hint="pass a JSON object")
    return _read(fields, path, family)


def config_fields(path: str | PathLike[str]) -> dict[str, Any]:
    """Fields of a ``config.json``; ``path`` may be the folder of the file.

    ModelOpt states the types of weights in ``hf_quant_config.json`` beside it. The two files may have a prefix:
    ``X_config.json`` and ``X_hf_quant_config.json``.
    """
    file = Path(path)
    file = file / "config.json" if os.path.isdir(path) else file
    fields = _json_object(file)
    separate = file.with_name(file.name.removesuffix("config.json") + "hf_quant_config.json")
    if file.name.endswith("config.json") and os.path.lexists(separate):
        fields = with_separate_file(fields, _json_object(separate), str(separate))
    return fields


def _json_object(file: Path) -> dict[str, Any]:
    hint = "pass the config.json of a model"
    value = read_json(file, hint)
    if not isinstance(value, dict):
        raise DataError(f"{str(file)[:200]} is not a JSON object", hint=hint)
    return value


def _read(config: Mapping[str, Any], path: str, family: str | None = None) -> LLMConfig:
    part = language_part(config, path)
    values, path, classes = part.fields, part.path, part.fields.get("architectures")
    name = _model_type(values if family is None else {"model_type": family}, path)
    # transformers writes a nested part without the fields that have their default.
    defaults = default_fields(str(values.get("model_type"))) if part.nested else {}
    fields = Fields({**defaults, **values, "model_type": name}, path)
    read = FAMILIES[name](fields)
    stated = str(values.get("model_type") or (classes[0] if isinstance(classes, list) and classes else ""))
    as_another = FAMILIES[name] is not FAMILIES.get(stated)
    if family is not None and as_another and (problems := contradictions(read, fields, stated)):
        raise FieldError.at(
            path,
            f"fields contradict {family}: " + "; ".join(problems),
            hint="name a family that has such layers, or take the fields out if the model does not use them",
        )
    read = quantised(read, part.quantisation, f"{path}.quantization_config", values.get("expert_dtype"))
    if part.prompt_only is not None:
        read = replace(read, prompt_only=part.prompt_only, tied=True)
    positions = fields.values.get("max_position_embeddings")
    context = positions if type(positions) is int and positions > 0 else None
    return replace(read, left_out=part.left_out, context=context)


def with_configs(request: Any) -> Any:
    """A request in which every ``{"llm": {"config": path, "engine": path}}`` has the contents of the files.

    So has every ``training`` of a job of a cluster.
    So have ``model`` and ``engine`` of a request with ``global_batch``, which asks for a plan of training.
    Parts of the request without a path are the same objects. A service is never sent paths, and reads none.
    """
    if isinstance(request, Mapping) and {"model", "global_batch"} <= request.keys():
        read = _with_config("llm", {"config": request["model"], "engine": request.get("engine")})
        changed = {"model": read["config"]} | ({"engine": read["engine"]} if "engine" in request else {})
        return {**request, **changed}
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
    if key not in ("llm", "training") or not isinstance(value, Mapping) or "config" not in value:
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
        name = (architecture_family(first) or first) if isinstance(first, str) else None
    known = ", ".join(FAMILIES)
    if not isinstance(name, str):
        raise FieldError.at(
            f"{path}.model_type",
            "missing, and architectures names no known class",
            hint=f"this is no config.json of Hugging Face, or one without an architecture; known: {known}",
        )
    if name not in FAMILIES:
        near = difflib.get_close_matches(name.casefold(), FAMILIES, n=1)
        suggestion = f"; did you mean {near[0]}?" if near else ""
        raise FieldError.at(f"{path}.model_type", f"{name[:80]!r} is not known{suggestion}", hint=f"known: {known}")
    return name


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
        describes = any(kind is True or kind not in _NEUTRAL for kind in kinds)
        if describes and (len(kinds) == 1 or any(kind != kinds[0] for kind in kinds)):
            yield name
