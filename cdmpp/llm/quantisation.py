"""Element types of weights and cache, as ``quantization_config`` and ``hf_quant_config.json`` state them.

Each method of transformers and of serving engines that states a type of 8 or 4 bits is read: as weights only where the
file quantises no activations.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from cdmpp.errors import DataError, FieldError
from cdmpp.llm.config import WEIGHT_PARTS, LLMConfig, PartWeights

#: ``quant_algo`` of ModelOpt -> element type, scaling, and whether activations keep their type.
_ALGORITHMS: dict[str, tuple[str, str, bool]] = {
    "FP8": ("float8_e4m3", "tensor", False),
    "FP8_PER_CHANNEL_PER_TOKEN": ("float8_e4m3", "channel", False),
    "FP8_PB_WO": ("float8_e4m3", "block128", True),
    "MXFP8": ("float8_e4m3", "mx32", False),
    "NVFP4": ("float4_e2m1", "nvfp4", False),
    "NVFP4_AWQ": ("float4_e2m1", "nvfp4", False),
    "W4A16_NVFP4": ("float4_e2m1", "nvfp4", True),
    "W4A16_MXFP4": ("float4_e2m1", "mx32", True),
    "W4A16_AWQ": ("int4", "block128", True),
}
#: Fields that list modules whose weights are not quantised.
_EXCLUDED = "ignore exclude_modules modules_to_not_convert exclude skip_modules llm_int8_skip_modules"
#: Patterns of module names, in order, and the parts of a layer that they mean. No part: weights that are never
#: quantised in an estimate.
_MODULES: tuple[tuple[str, tuple[str, ...]], ...] = (
    (r"indexer|norm|lm_head|embed|vision|visual|projector|mtp|eh_proj|router|gate$|gate\.|conv1d|^head", ()),
    (r"shared_expert|share_expert", ("shared",)),
    (r"experts", ("experts",)),
    (r"(self_attn|attn|attention|mixer)\.(o_proj|out_proj|wo_b)", ("output",)),
    (r"(self_attn|attn|attention|mixer)\.\w+_proj", ("attention",)),
    (r"attn|attention", ("attention", "output")),
    (r"mlp|ffn", ("dense", "shared")),
)
_FEW = "weights of 8 bits are widened in the products: few such kernels are measured"
_SEVERAL = "weights of several types: each part of a layer has the type of most of its layers"
SUPPORTED = (
    "weights of 8 or 4 bits of fp8, fbgemm_fp8, mxfp4, gptq, awq, bitsandbytes, torchao, quark, hqq, auto-round, eetq, "
    "quanto, fp_quant, compressed-tensors, modelopt (" + ", ".join(_ALGORITHMS) + ", MIXED_PRECISION)"
)
#: Patterns of names of types, in order, with their element type and scaling; None: one scale a channel, or blocks.
_TYPES: tuple[tuple[str, str, str | None], ...] = (
    (r"nv_?fp4", "float4_e2m1", "nvfp4"),
    (r"(fp|float)4", "float4_e2m1", "mx32"),
    (r"mx_?fp8", "float8_e4m3", "mx32"),
    (r"(fp|float)8|e4m3", "float8_e4m3", None),
    (r"int4(?!\d)", "int4", "block128"),
    (r"int8(?!\d)", "int8", None),
)
#: Methods that state ``bits``, and the type of the activations where they have one.
_BY_BITS = "gptq gptq_marlin gptq_v2 awq awq_marlin marlin higgs auto-round auto_round intel/auto-round squeezellm"


@dataclass(frozen=True)
class _Weight:
    """Type of the weights of one part."""

    weights: str
    scaling: str | None
    packed: bool = False


def quantised(config: LLMConfig, value: Any, path: str, expert_dtype: Any = None) -> LLMConfig:
    """The configuration with the types that its ``quantization_config`` states; FieldError for an unsupported method.

    ``value``: its content; None: weights are not quantised. ``path``: name of the field in error messages.
    ``expert_dtype``: that field of ``config.json`` (DeepSeek V4: "fp4").
    """
    if value is None:
        return config
    base = _base(value, path)
    parts: dict[str, _Weight | None] = dict.fromkeys(WEIGHT_PARTS, base)
    excluded = _excluded_layers(value, config.layers)
    parts.update({part: None for part, layers in excluded.items() if 2 * layers >= config.layers})
    partly = any(0 < layers < config.layers for layers in excluded.values())
    if expert_dtype == "fp4":
        parts["experts"] = _Weight("float4_e2m1", "mx32")
    if value.get("quant_algo") == "MIXED_PRECISION":
        mixed = _mixed(value, path)
        # ModelOpt lists the layers it quantised itself; the others keep the type of a checkpoint in fp8.
        parts = {part: mixed.get(part, base) for part in WEIGHT_PARTS}
    remarks: tuple[str, ...] = (_SEVERAL,) if partly or value.get("quant_algo") == "MIXED_PRECISION" else ()
    order = ("experts", "dense", "attention", "shared", "output")
    held = [part for part in order if part != "experts" or config.experts is not None]
    main = next((weight for part in held if (weight := parts[part]) is not None), None)
    if main is not None and (main.weights, main.packed) == ("int8", True):
        remarks += (_FEW,)
    if main is None and value.get("quant_algo") == "MIXED_PRECISION":
        raise FieldError.at(
            path, "MIXED_PRECISION without the type of any part", hint="quantized_layers names the types"
        )
    if main is None:
        return replace(config, kv_dtype=cache_type(value))
    others = tuple(
        PartWeights(part, weight.weights, weight.scaling, weight.packed) if weight else PartWeights(part)
        for part in WEIGHT_PARTS
        if (weight := parts[part]) != main
    )
    return replace(
        config,
        weights=main.weights,
        weight_scaling=main.scaling,
        packed=main.packed,
        part_weights=others,
        kv_dtype=cache_type(value),
        remarks=config.remarks + remarks,
    )


_NO_CACHE_TYPE = frozenset({"none", "auto", "bf16", "bfloat16", "fp16", "float16"})


def cache_type(value: Any) -> str | None:
    """Element type of the cache: ``kv_cache_scheme`` or ``kv_cache_quant_algo``."""
    if not isinstance(value, Mapping):
        return None
    scheme = value.get("kv_cache_scheme")
    if isinstance(scheme, Mapping) and scheme.get("num_bits") == 8:
        return "int8" if scheme.get("type") == "int" else "float8_e4m3"
    names = {"FP8": "float8_e4m3", "INT8": "int8"}
    quark = next(iter(_inner(value, "kv_cache_quant_config").values()), None)
    if str(_inner(quark, "output_tensors").get("dtype")).startswith("fp8"):
        return "float8_e4m3"
    for name in (scheme, value.get("kv_cache_quant_algo")):
        if isinstance(name, str) and name.upper() in names:
            return names[name.upper()]
    if unknown := [x for x in (scheme, value.get("kv_cache_quant_algo")) if x and str(x).lower() not in _NO_CACHE_TYPE]:
        raise FieldError.at(
            "kv_cache_scheme",
            f"a cache of type {str(unknown[0])[:80]!r} is not supported",
            hint="supported: FP8, INT8; or remove the field and state the type (--kv-dtype bfloat16)",
        )
    return None


def with_separate_file(fields: dict[str, Any], separate: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Fields of ``config.json`` with those of ModelOpt's ``hf_quant_config.json`` beside it.

    ``config.json`` counts where both state the types. The type of the cache is taken from the other file where only
    that one has it. DataError where that file, called ``name`` in the message, states no type.
    """
    stated = separate.get("quantization")
    names = [stated.get(key) for key in ("quant_algo", "kv_cache_quant_algo")] if isinstance(stated, Mapping) else []
    if not isinstance(stated, Mapping) or not any(names) or not all(isinstance(n, str | None) for n in names):
        raise DataError(
            f"{name[:200]}: no quantization.quant_algo: {str(stated)[:80]!r}",
            hint="copy the file of the checkpoint again, or remove it where the weights are not quantised",
        )
    text = fields.get("text_config")
    quantisation = fields.get("quantization_config") or (
        text.get("quantization_config") if isinstance(text, Mapping) else None
    )
    if quantisation is None:
        return {**fields, "quantization_config": {"quant_method": "modelopt", **stated}}
    if isinstance(quantisation, Mapping) and cache_type(quantisation) is None and cache_type(stated) is not None:
        return {
            **fields,
            "quantization_config": {**quantisation, "kv_cache_scheme": None}
            | {"kv_cache_quant_algo": stated["kv_cache_quant_algo"]},
        }
    return fields


def _base(value: Any, path: str) -> _Weight | None:
    """Type of the weights that no further rule of the file changes."""
    value = value if isinstance(value, Mapping) else {}
    method, algorithm = value.get("quant_method"), value.get("quant_algo")
    if method == "fp8":
        return _Weight("float8_e4m3", "block128" if value.get("weight_block_size") is not None else "channel")
    if method == "fbgemm_fp8":
        return _Weight("float8_e4m3", "channel")
    if method == "mxfp4":
        return _Weight("float4_e2m1", "mx32")
    if method == "compressed-tensors" and (weight := _compressed(value)) is not None:
        return weight
    if method in (None, "modelopt", "modelopt_fp4", "modelopt_mixed") and isinstance(algorithm, str):
        if algorithm == "MIXED_PRECISION":
            return None
        if algorithm in _ALGORITHMS:
            return _Weight(*_ALGORITHMS[algorithm])
    named = _stated_type(method, value)
    if named is not None and (weight := _of_type(*named)) is not None:
        return weight
    shown = f"quant_method={str(method)[:80]!r}"
    if algorithm is not None:
        shown += f" with quant_algo={str(algorithm)[:80]!r}"
    elif named is not None:
        shown += f" with weights of type {named[0][:80]!r}"
    raise FieldError.at(
        path,
        f"{shown} is not supported",
        hint=f"supported: {SUPPORTED}; or remove the field and state the type of the weights (--weights int4)",
    )


def _of_type(name: str, packed: bool, usual: str) -> _Weight | None:
    """Weights of a named type (int8, uint4, fp8_e4m3, mx_fp4); None where it is not known."""
    for pattern, weights, scaling in _TYPES:
        if re.search(pattern, name.casefold()):
            if weights == "int8" and not packed and usual == "block128":
                usual = "channel"
            return _Weight(weights, scaling or usual, packed)
    return None


def _stated_type(method: Any, value: Mapping[str, Any]) -> tuple[str, bool, str] | None:
    """Name of the type of the weights, whether activations keep theirs, and the scaling where the type has several."""
    grouped = "channel" if value.get("group_size") in (None, -1, 0) else "block128"
    if method == "bitsandbytes":
        # LLM.int8 computes the columns of outliers in 16 bits: what it saves is the weights' memory.
        loaded = [
            bits for bits in (4, 8) if True in (value.get(f"load_in_{bits}bit"), value.get(f"_load_in_{bits}bit"))
        ]
        return (f"int{loaded[0]}", True, "channel") if loaded else None
    if method == "torchao":
        return _torchao(_inner(value, "quant_type").get("default", value.get("quant_type")), value)
    if method == "quark":
        stated = _inner(value, "global_quant_config")
        weight = _inner(stated, "weight")
        name = str(weight.get("dtype")).replace("fp4", "mxfp4" if weight.get("group_size") == 32 else "nvfp4")
        scaling = {"per_tensor": "tensor", "per_group": "block128"}.get(str(weight.get("qscheme")), "channel")
        return name, not _inner(stated, "input_tensors"), scaling
    if method == "hqq":
        stated = _inner(value, "quant_config")
        layers = [_inner(part, "weight_quant_params") for part in (stated, *stated.values())]
        weight = next((layer for layer in layers if layer), {})
        return f"int{weight.get('nbits')}", True, "block128"
    if method in ("eetq", "quanto"):
        return str(value.get("weights", "int8")), value.get("activations") is None, "channel"
    if method == "fp_quant":
        return str(value.get("forward_dtype", "mxfp4")), False, "channel"
    if not isinstance(method, str) or method.casefold() not in _BY_BITS.split():
        return None
    bits = next((value[key] for key in ("bits", "w_bit", "weight_bits") if key in value), 4)
    activations = value.get("act_bits")
    return f"{value.get('data_type', 'int')}{bits}", not isinstance(activations, int) or activations > 8, grouped


def _torchao(stated: Any, value: Mapping[str, Any]) -> tuple[str, bool, str]:
    """The type in names such as ``int4_weight_only`` and ``Float8DynamicActivationFloat8WeightConfig``."""
    data = _inner(stated, "_data") or _inner(value, "quant_type_kwargs")
    of_modules = _inner(data, "module_fqn_to_config") or _inner(data, "fqn_to_config")
    if of_modules:
        return _torchao(of_modules.get("_default") or next(iter(of_modules.values())), {})
    shown = str(stated.get("_type") if isinstance(stated, Mapping) else stated)
    name = shown.casefold().replace("_", "")
    weight = re.search(r"(mxfp8|mxfp4|nvfp4|u?int\d|float8|fp8)weight", name) or re.search(r"(mxfp\d|nvfp4)", name)
    kind = weight[1] if weight else _inner(data, "weight_dtype").get("_data") or data.get("weight_dtype") or shown
    packed = "activation" not in name and "inference" not in name
    return str(kind).removeprefix("torch."), packed, "block128" if "group_size" in data else "channel"


def _inner(value: Any, name: str) -> Mapping[str, Any]:
    part = value.get(name) if isinstance(value, Mapping) else None
    return part if isinstance(part, Mapping) else {}


def _compressed(value: Mapping[str, Any]) -> _Weight | None:
    """Type of the weights of the first group of compressed-tensors; None where it is not supported."""
    groups = value.get("config_groups")
    group = next(iter(groups.values()), None) if isinstance(groups, Mapping) else None
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        return None
    bits, kind, strategy = weights.get("num_bits"), weights.get("type", "int"), weights.get("strategy")
    packed = group.get("input_activations") is None
    if bits == 8 and kind == "float":
        return _Weight("float8_e4m3", {"tensor": "tensor", "block": "block128"}.get(str(strategy), "channel"), packed)
    if bits == 8 and kind == "int":
        return _Weight("int8", "channel", packed)
    if bits == 4 and kind == "int":
        return _Weight("int4", "block128")
    if bits == 4 and kind == "float":
        return _Weight("float4_e2m1", "nvfp4" if weights.get("group_size") == 16 else "mx32", packed)
    return None


def _parts_of(module: str) -> tuple[str, ...]:
    """Parts of a layer that a module's name, or a pattern of names, means."""
    module = module.removeprefix("re:").replace("\\", "").replace(".*", "*").strip("*")
    return next((parts for pattern, parts in _MODULES if re.search(pattern, module)), ())


def _excluded_layers(value: Mapping[str, Any], layers: int) -> dict[str, int]:
    """Layers of each part that are not quantised."""
    places: dict[str, set[str]] = defaultdict(set)
    everywhere: set[str] = set()
    for module in _names(value):
        number = re.search(r"layers\.(\d+)", module)
        for part in _parts_of(module):
            if number is None:
                everywhere.add(part)
            else:
                places[part].add(number[1])
    return {part: layers if part in everywhere else len(places[part]) for part in WEIGHT_PARTS}


def _names(value: Mapping[str, Any]) -> Iterator[str]:
    for field in _EXCLUDED.split():
        names = value.get(field)
        if isinstance(names, list):
            yield from (name for name in names if isinstance(name, str))


def _mixed(value: Mapping[str, Any], path: str) -> dict[str, _Weight]:
    """Most frequent type of each part that ``quantized_layers`` or ``moe_quant_algo`` names."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    layers = value.get("quantized_layers")
    for module, stated in layers.items() if isinstance(layers, Mapping) else ():
        algorithm = stated.get("quant_algo") if isinstance(stated, Mapping) else None
        if isinstance(algorithm, str):
            for part in _parts_of(str(module)):
                counts[part][algorithm] += 1
    if isinstance(experts := value.get("moe_quant_algo"), str):
        counts["experts"] = Counter({experts: 1})
    weights = {}
    for part, counter in counts.items():
        algorithm = counter.most_common(1)[0][0]
        if algorithm not in _ALGORITHMS:
            raise FieldError.at(path, f"quant_algo={algorithm[:80]!r} is not supported", hint=f"supported: {SUPPORTED}")
        weights[part] = _Weight(*_ALGORITHMS[algorithm])
    return weights
