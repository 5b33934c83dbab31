"""Profiles for LLMServingSim, of predictions in place of measurements.

The simulator interpolates tables of layer latencies that its profiler measures with vLLM on a GPU. This module writes
such tables for any device. Files and columns are those of casys-kaist/LLMServingSim, ``docs/docs/profiler/
output-bundle.md`` and ``adding-hardware.md`` ("Adding non-GPU hardware").
"""

from __future__ import annotations

import csv
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from cdmpp import __version__
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, FieldError
from cdmpp.integrations.serving_batch import EngineBatch, StepPricer
from cdmpp.llm import Layout, LLMConfig, read_config
from cdmpp.predict.interface import Predictor

#: Layers of ``dense.csv``, by number of tokens -> parts of a step.
DENSE = {
    "embedding": "embedding",
    "layernorm": "attention_norm",
    "qkv_proj": "qkv_proj",
    "qk_norm": "qk_norm",
    "rotary_emb": "rotary",
    "o_proj": "o_proj",
    "gate_up_proj": "gate_up_proj",
    "act_fn": "activation",
    "down_proj": "down_proj",
    "final_layernorm": "final_norm",
}
#: Layers of ``per_sequence.csv``, by number of sequences.
PER_SEQUENCE = {"lm_head": "lm_head", "sampler": "sampling"}
#: vLLM's attention writes the cache, too.
ATTENTION = ("attention_prefill", "attention_decode", "kv_cache_save")
#: Names of element types in a variant.
_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float8_e4m3": "fp8", "int8": "int8", "int4": "int4"}
_LEAST_CHUNK = _LEAST_CACHED = 16

Row = Sequence[str | int | float]


def write_profile(
    config: LLMConfig | Mapping[str, Any] | str | PathLike[str],
    device: DeviceSpec | str,
    folder: str | PathLike[str],
    *,
    hardware: str,
    model: str,
    tp: Sequence[int] = (1,),
    dtype: str = "bfloat16",
    weights: str | None = None,
    kv_dtype: str | None = None,
    max_tokens: int = 2048,
    max_sequences: int = 256,
    max_cached: int = 16_384,
    framework: str = "vllm",
    predictor: Predictor | None = None,
) -> Path:
    """Write a profile of a dense model on a device.

    Parameters
    ----------
    config : path, mapping or LLMConfig
        A ``config.json`` of Hugging Face, of a model with gated feed-forward layers, RMS norms and full attention.
    device : DeviceSpec or str
    folder : path
        The simulator's ``profiler/perf``.
    hardware, model : str
        Names of the profile: a folder name, and "organisation/name". A cluster configuration refers to them.
    tp : sequence of int
        Degrees of tensor parallelism, a folder each.
    dtype, weights, kv_dtype : str, str or None
        Types of activations, of quantised weights, and of the cache where it differs.
    max_tokens, max_sequences, max_cached : int
        Largest number of tokens and of sequences of a step, and of cached tokens of a sequence. The grids double.
    framework : str
    predictor : Predictor, optional
        Default: the shipped model.

    Returns
    -------
    Path
        Folder of the profile, ``FOLDER/HARDWARE/MODEL/VARIANT``: ``meta.yaml``, and in each ``tpN`` the tables
        ``dense.csv``, ``per_sequence.csv`` and ``attention.csv``, with times in microseconds.

    Raises
    ------
    FieldError
        The model has parts that these tables do not have, a name or number is not allowed, or the layout does not
        divide the model.
    DataError
        The profile exists already, or cannot be written.
    """
    llm = read_config(config)
    _check_model(llm)
    _check_names(hardware, model)
    for name, value, least in (
        ("max_tokens", max_tokens, _LEAST_CHUNK),
        ("max_sequences", max_sequences, 1),
        ("max_cached", max_cached, _LEAST_CACHED),
    ):
        if type(value) is not int or value < least:
            raise FieldError(f"{name}: {value!r} is not allowed", path=name, hint=f"a whole number from {least}")
    variant = _SHORT.get(weights or dtype, weights or dtype) + (
        f"-kv{_SHORT.get(kv_dtype, kv_dtype)}" if kv_dtype else ""
    )
    target = Path(folder) / hardware / model / variant
    if target.exists():
        raise DataError(f"{target} exists already", hint="remove it, or choose another hardware name")
    pricers = {
        degree: StepPricer(
            llm,
            Layout(degree),
            device,
            dtype=dtype,
            weights=weights,
            kv_dtype=kv_dtype,
            framework=framework,
            cuda_graph=False,
            predictor=predictor,
        )
        for degree in tp
    }
    aside = target.with_name(f".{variant}.part")
    try:
        shutil.rmtree(aside, ignore_errors=True)
        for degree, pricer in pricers.items():
            folder_of_degree = aside / f"tp{degree}"
            folder_of_degree.mkdir(parents=True)
            _write_tables(folder_of_degree, pricer, max_tokens, max_sequences, max_cached)
        fields = {
            "profiler_version": f"cdmpp-{__version__}",
            "vllm_version": "n/a",
            "gpu": next(iter(pricers.values())).device.name,
            "hardware": hardware,
            "variant": variant,
            "model": model,
        }
        lines = [f"{name}: {value!r}" for name, value in fields.items()]
        lines += [f"tp_degrees: {list(pricers)}", "engine_effective:"]
        lines += [f"  max_num_batched_tokens: {max_tokens}", f"  max_num_seqs: {max_sequences}"]
        (aside / "meta.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
        aside.replace(target)
    except OSError as error:
        raise DataError(f"cannot write {target}: {error.strerror or error}", hint="check the folder") from None
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return target


def _write_tables(folder: Path, pricer: StepPricer, max_tokens: int, max_sequences: int, max_cached: int) -> None:
    def times(batch: EngineBatch) -> dict[str, float]:
        """Microseconds of one run of each part."""
        step = pricer.price(batch)
        return {part.name: 1e6 * s / part.count for part, s in zip(step.parts, step.seconds[0].tolist(), strict=True)}

    tokens = {n: times(EngineBatch(((n, 0),))) for n in _doubling(1, max_tokens)}
    present = [layer for layer, part in DENSE.items() if part in tokens[1]]
    dense = [(layer, n, parts[DENSE[layer]]) for layer in present for n, parts in tokens.items()]
    _write(folder / "dense.csv", ("layer", "tokens", "time_us"), dense)

    sequences = {n: times(EngineBatch((), (1,) * n)) for n in _doubling(1, max_sequences)}
    rows = [(layer, n, parts[part]) for layer, part in PER_SEQUENCE.items() for n, parts in sequences.items()]
    _write(folder / "per_sequence.csv", ("layer", "sequences", "time_us"), rows)

    def attention_us(batch: EngineBatch) -> float:
        measured = times(batch)
        return sum(measured.get(name, 0.0) for name in ATTENTION)

    cached = [0, *_doubling(_LEAST_CACHED, max_cached)]
    chunks = {
        (chunk, past + chunk // 2): attention_us(EngineBatch(((chunk, past),)))
        for chunk in _doubling(_LEAST_CHUNK, max_tokens)
        for past in cached
    }
    decodes = {
        (n, past): attention_us(EngineBatch((), (past,) * n))
        for n in _doubling(1, max_sequences)
        for past in cached[1:]
    }
    # The kernels of chunks and of decoding sequences run one after the other.
    none = {(0, 0): 0.0}
    table = [
        ("attention", chunk, key, n, past, 1, chunk_us + decode_us)
        for (chunk, key), chunk_us in (none | chunks).items()
        for (n, past), decode_us in (none | decodes).items()
        if chunk or n
    ]
    columns = ("layer", "prefill_chunk", "prefill_key", "n_decode", "kv_decode", "decode_q_len", "time_us")
    _write(folder / "attention.csv", columns, table)


def _doubling(first: int, last: int) -> list[int]:
    """First, its doubles, and last."""
    values = [first]
    while values[-1] * 2 < last:
        values.append(values[-1] * 2)
    return values if values[-1] == last else [*values, last]


def _write(path: Path, columns: Sequence[str], rows: Iterable[Row]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([*row[:-1], f"{row[-1]:.6g}"] for row in rows)


def _check_model(llm: LLMConfig) -> None:
    """Raise :class:`FieldError` for a model with parts that the three tables do not have."""
    problems = {
        "experts": llm.experts is not None,
        "latent attention": llm.latent is not None,
        "sliding windows": llm.windowed_layers > 0,
        "layers that differ": bool(llm.mixers or llm.feed_forwards),
        "learned positions": llm.positions > 0,
        "four norms in a layer": llm.norms != 2,
        "feed-forward layers without a gate": not llm.gated,
        "other norms than RMS": llm.norm != "rmsnorm",
    }
    present_problems = [name for name, present in problems.items() if present]
    if present_problems:
        raise FieldError(
            f"config: {llm.model_type} has {', '.join(present_problems)}",
            path="config",
            hint="profiles are written for dense models such as Llama, Mistral without windows, Qwen2 and Qwen3",
        )


def _check_names(hardware: str, model: str) -> None:
    for field, value, pattern, example in (
        ("hardware", hardware, r"[\w.+-]+", "B200"),
        ("model", model, r"[\w.+-]+(/[\w.+-]+)?", "meta-llama/Llama-3.1-8B"),
    ):
        if not re.fullmatch(pattern, value) or set(value.split("/")) & {".", ".."}:
            raise FieldError(f"{field}: {value!r} is not allowed", path=field, hint=f"such as {example}")
