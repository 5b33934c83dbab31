"""A request of the RL planner from a model's configuration, a number of devices and measured response lengths."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from os import PathLike, fspath
from typing import Any

from cdmpp.errors import DataError, FieldError, InfeasibleError
from cdmpp.llm import Layout, read_config, search_layouts
from cdmpp.llm.estimate_plan import resolved_device, shipped_predictor
from cdmpp.llm.layout import Types, allowed_tp, expert_fits
from cdmpp.llm.memory import cache_tokens, parameter_count, part_memory
from cdmpp.llm.read import config_fields
from cdmpp.predict.interface import Predictor
from cdmpp.utils.files import MAX_CONFIG_BYTES, parse_csv, parse_file

#: Samples of mean length that the cache of a generation instance holds at least.
_IN_FLIGHT = 16
#: Bytes of a weight that is sent to the generation instances, and bytes per second of one device's adapter.
_WEIGHT_BYTES, _NETWORK = 2, 50e9
MAX_LENGTH_BYTES, MAX_LENGTHS = 64 * MAX_CONFIG_BYTES, 10**7


def read_lengths(path: str | PathLike[str]) -> list[int]:
    """Response lengths of a CSV file: its first column, with or without a header.

    Raises
    ------
    DataError
    """
    rows = parse_file(
        path, lambda text: parse_csv(text, MAX_LENGTHS), "CSV", "give a CSV file", max_bytes=MAX_LENGTH_BYTES
    )
    cells = [row[0] for row in rows if row[0]]
    if cells and not cells[0].isdecimal():
        cells = cells[1:]
    wrong = next((cell for cell in cells if not re.fullmatch(r"\d{1,9}", cell) or int(cell) < 1), None)
    if not cells or wrong is not None:
        found = "no lengths" if wrong is None else f"{wrong[:80]!r} is no length"
        raise DataError(f"{fspath(path)}: {found}", hint="one number of tokens on each line")
    return [int(cell) for cell in cells]


def request_from_config(
    config: Mapping[str, Any] | str | PathLike[str],
    device: str,
    *,
    gpus: int,
    lengths: Sequence[int],
    samples: int = 512,
    prompt: int = 512,
    forwards: int = 0,
    products: str | None = None,
    engine: str | None = None,
    train_engine: str = "megatron",
    predictor: Predictor | None = None,
) -> dict[str, Any]:
    """A request of ``cdmpp plan rl`` whose costs are predicted for one language model on one kind of device.

    A unit is a generation instance of the fewest tensor-parallel ranks that hold the model and the cache of some
    samples. Training has the fastest layout of all devices for samples of mean length; its tokens cost as much with
    fewer units in proportion.

    Parameters
    ----------
    lengths : sequence of int
        Response lengths in tokens.
    samples, prompt : int
        Samples of a step, and tokens of each prompt.
    forwards : int
        Passes of reward, reference or old policy over each sample, models of the same size: each costs a third of its
        training.
    products : str, optional
        Type of the training's products.
    engine, train_engine : str
        Profiles of generation and training.

    Raises
    ------
    FieldError, InfeasibleError
        No instance or no training layout fits the devices.
    """
    predictor = shipped_predictor() if predictor is None else predictor
    fields = dict(config) if isinstance(config, Mapping) else config_fields(config)
    model, spec = read_config(fields), resolved_device(device, predictor)
    mean, longest = prompt + round(sum(lengths) / len(lengths)), prompt + max(lengths)
    tp, ep = _instance(fields, spec.memory_bytes, spec.name, gpus, mean, longest)
    if gpus % tp:
        raise FieldError(f"gpus: {gpus} is no multiple of {tp}, the devices of an instance", path="gpus")
    units = gpus // tp
    batch = max(gpus, samples // gpus * gpus)
    best = search_layouts(
        model,
        spec,
        gpus=gpus,
        global_batch=batch,
        sequence=mean,
        products=products,
        engine=train_engine,
        predictor=predictor,
        most=1,
    ).steps[0]
    x = best.layout
    train: dict[str, Any] = {
        "virtual_pp": x.virtual_pp,
        "cp": x.cp,
        "sharding": x.sharding,
        "micro_batch": x.micro_batch,
        "recompute": x.recompute,
        "overlap": x.overlap,
        "products": products,
    }
    each = x.micro_batch * x.dp
    form = {
        "config": fields,
        "phase": "train",
        "input": mean,
        **{name: getattr(x, name) for name in ("tp", "pp", "ep", "dp")},
        "engine": train_engine,
        "train": train,
    }
    decode: dict[str, Any] = {
        "config": fields,
        "past_len": mean - round(sum(lengths) / len(lengths) / 2),
        "tp": tp,
        "ep": ep,
    }
    if engine is not None:
        decode["engine"] = engine
    first = max(each, batch // 4 // each * each)
    return {
        "lengths": {"samples": list(lengths)},
        "samples_per_step": samples,
        "prompt_tokens": prompt,
        "decode": {"batch": [1, 8, 32, 64, 128, 256], "llm": decode},
        "training": {
            "curve": {"batch": [first, max(2 * first, batch)], "device": device, "llm": form},
            "curve_units": units,
        },
        "inference": forwards * best.step_s / batch * units / 3,
        "kv": {"bytes_per_token": _cache_bytes(fields, tp, ep, mean)},
        "pools": [{"name": spec.name, "units": units, "device": device}],
        "weights": {
            "transfer": {
                "bytes": float(_WEIGHT_BYTES * parameter_count(model)),
                "ranks": tp,
                "same_site": {"bandwidth_bytes_per_s": _NETWORK, "latency_s": 1e-5},
            }
        },
    }


def _cache_bytes(fields: Mapping[str, Any], tp: int, ep: int, tokens: int) -> float:
    """Bytes of one token's keys and values on all ranks of an instance, on average of a sample of ``tokens``."""
    config = read_config(fields)
    types = Types.of(config, "bfloat16", None, None)
    return tp * part_memory(config, Layout(tp, 1, ep), types, None, tokens)[1] / tokens


def _instance(
    fields: Mapping[str, Any], capacity: float | None, device: str, gpus: int, mean: int, longest: int
) -> tuple[int, int]:
    """Tensor-parallel ranks of a generation instance, and groups of its experts."""
    config = read_config(fields)
    types = Types.of(config, "bfloat16", None, None)
    for tp in (n for n in allowed_tp(config) if n & (n - 1) == 0 and n <= gpus):
        ep = 1
        if config.experts is not None:
            ep = next((n for n in range(1, tp + 1) if expert_fits(config, tp, n)), 1)
        tokens = cache_tokens(config, Layout(tp, 1, ep), types, capacity, 0.9, longest)
        if tokens >= max(longest, _IN_FLIGHT * mean):
            return tp, ep
    raise InfeasibleError(
        f"no instance of up to {gpus} {device} holds the model and {_IN_FLIGHT} samples of {mean} tokens",
        path="gpus",
        hint="use more devices, or devices with more memory",
    )
