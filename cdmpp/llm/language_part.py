"""The language part of a configuration of several inputs, and configurations that do not decode."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from cdmpp.errors import FieldError
from cdmpp.llm.families import FAMILIES, architecture_family

#: Names of the language part, the first one found counts.
_NAMES = (
    "text_config llm_config language_config thinker_config language_model_config text_model_config llm_cfg lm_config "
    "language_model llm"
)
#: Names of parts that belong to other inputs and outputs than text.
_OTHER_PARTS = re.compile(
    r"vision|visual|audio|speech|image|video|talker|2wav|vocoder|codec|projector|^vit|^dit|code_predictor|^draft|adapter"
)
#: Outer ``model_type`` -> that of a language part which names none, where the two differ (transformers' defaults).
_DEFAULT_TYPES = {
    **dict.fromkeys(("idefics2", "mistral3", "pixtral"), "mistral"),
    **dict.fromkeys(("internvl", "llava_onevision", "ovis2", "qwen2_audio", "got_ocr2"), "qwen2"),
    "paligemma": "gemma",
    "blip-2": "opt",
}
_LLAVA = re.compile(r"llava|idefics3|smolvlm|janus|deepseek_vl$|voxtral")
_ENCODER = re.compile(
    r"bert|roberta|^xlm|electra|^mpnet|longformer|big_?bird$|^funnel|^esm|layoutlm|^vit|^deit|^beit|^swin|dino|siglip|clip|"
    r"^wav2vec|hubert|^aimv2|^vision_|_vision|_encoder$|^nomic|^canine|^ernie$|^luke|^splinter"
)
_ENCODER_DECODER = re.compile(
    r"t5|bart|pegasus|marian|^m2m|^nllb|whisper|^led$|prophetnet|^blenderbot|switch_transformers|moonshine|^fsmt|encoder-decoder"
)
_DECODING = re.compile(r"ForCausalLM|LMHeadModel|DoubleHeads")
_PROMPT_ONLY = re.compile(r"Classification|Reward|Embed|Bidirectional|ForQuestionAnswering|Retrieval")


class LanguagePart(NamedTuple):
    """The fields of a decoder.

    ``path`` is their name in error messages, ``nested`` whether they are inside of another configuration,
    ``quantisation`` the ``quantization_config`` of the part or of the nearest one around it, ``left_out`` the other
    parts, and ``prompt_only`` the class of a model that makes no tokens (embeddings, classification, rewards).
    """

    fields: Mapping[str, Any]
    path: str
    nested: bool
    quantisation: Any
    left_out: tuple[str, ...]
    prompt_only: str | None


def language_part(config: Mapping[str, Any], path: str) -> LanguagePart:
    """The language part of a configuration, at any depth; the configuration itself where it has no parts.

    Raises FieldError where the part is an encoder, or has one beside its decoder.
    """
    part, inside, around = config, "", [config]
    left_out = _others(config, "")
    while (below := _below(part)) is not None:
        name, part = below
        inside += f"{name}."
        around.insert(0, part)
        left_out += _others(part, inside)
    part = dict(part)
    if inside and "model_type" not in part and "architectures" not in part:
        outer = str(next((p["model_type"] for p in around[1:] if "model_type" in p), ""))
        part["model_type"] = _DEFAULT_TYPES.get(outer, "llama" if _LLAVA.search(outer) else outer or None)
    stated = next((p["quantization_config"] for p in around if "quantization_config" in p), None)
    if "tie_word_embeddings" in config:
        part = {"tie_word_embeddings": config["tie_word_embeddings"], **part}
    where = f"{path}.{inside}".rstrip(".")
    _check_decodes(part, where)
    return LanguagePart(part, where, bool(inside), stated, tuple(left_out), _prompt_only(config, bool(inside)))


def _parts(config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    return ((key, value) for key, value in config.items() if isinstance(key, str) and isinstance(value, Mapping))


def _others(config: Mapping[str, Any], inside: str) -> list[str]:
    return [f"{inside}{key}" for key, _ in _parts(config) if _OTHER_PARTS.search(key)]


def _below(config: Mapping[str, Any], depth: int = 0) -> tuple[str, Mapping[str, Any]] | None:
    """Name and fields of the nearest language part inside of ``config``."""
    parts = {key: value for key, value in _parts(config) if not _OTHER_PARTS.search(key)}
    known = tuple(FAMILIES)
    # Parts of other names inside of a decoder are drafts and their like.
    parts = {key: part for key, part in parts.items() if key in _NAMES.split() or config.get("model_type") not in known}
    stated = [key for key, value in parts.items() if value.get("model_type") in known]
    for name in (*_NAMES.split(), *stated):
        if name in parts:
            return name, parts[name]
    for key, value in parts.items():
        if depth < 8 and (below := _below(value, depth + 1)) is not None:
            return f"{key}.{below[0]}", below[1]
    return None


def _check_decodes(part: Mapping[str, Any], path: str) -> None:
    """Raise :class:`FieldError` for encoders, whatever family the configuration is read as."""
    classes = part.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    name = str(part.get("model_type") or first)[:80]
    family = name.casefold()
    decodes = family in FAMILIES or part.get("is_decoder") is True or _DECODING.search(first) is not None
    if part.get("is_encoder_decoder") is True or (not decodes and _ENCODER_DECODER.search(family)):
        problem = "has an encoder beside its decoder, and only decoders are estimated"
    elif not decodes and (_ENCODER.search(family) or "ForMaskedLM" in first):
        problem = "is an encoder, which does not decode"
    else:
        return
    raise FieldError.at(
        f"{path}.model_type",
        f"{name!r} {problem}",
        hint="predict its module: cdmpp predict package.module:factory, or an ONNX file",
    )


def _prompt_only(config: Mapping[str, Any], nested: bool) -> str | None:
    """The class of a model without output tokens; the class of the whole counts."""
    classes = config.get("architectures")
    for name in classes if isinstance(classes, list) else ():
        if not isinstance(name, str) or _DECODING.search(name):
            continue
        base = name.endswith("Model") and not nested and architecture_family(name) is not None
        if base or _PROMPT_ONLY.search(name) or config.get("is_causal") is False:
            return name[:100]
    return None
