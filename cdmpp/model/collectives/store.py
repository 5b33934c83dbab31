"""Files of the model of collectives in a model folder: ``collectives.safetensors`` and ``collectives.json``."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from cdmpp.devices.registry import lookup
from cdmpp.errors import ArtifactError, UnknownDeviceError
from cdmpp.model.collectives.context import CollectiveContext
from cdmpp.model.collectives.model import CollectiveModel, Devices, KnownContext, sheet_of
from cdmpp.model.collectives.residual import COMPONENTS, Key, LinkBaseline
from cdmpp.utils.files import MAX_MODEL_BYTES, parse_json, read_bytes

TENSORS, HEADER = "collectives.safetensors", "collectives.json"
FORMAT = 1


def model_files(model: CollectiveModel) -> dict[str, bytes]:
    """The two files of a model, without corrections."""
    tensors: dict[str, Any] = {
        "baseline.kinds": model.baseline.kinds,
        "baseline.shared": model.baseline.shared,
        "variance": model.variance,
        "length": model.length,
        "known": np.array([[k.spread, k.low, k.high] for k in model.known.values()]),
    }
    keys: dict[str, list[list[Any]]] = {}
    for component, functions in zip(COMPONENTS, model.functions, strict=True):
        keys[component.name] = [list(key) for key in functions]
        if functions:
            tensors[f"function.{component.name}"] = np.stack(list(functions.values())).astype(np.float16)
    header = {
        "format": FORMAT,
        "keys": keys,
        "known": [list(context.stored) for context in model.known],
        "devices": sorted({context.device for context in model.known}),
        "calibration": dict(model.calibration),
        "metrics": model.metrics,
    }
    text = json.dumps(header, sort_keys=True, allow_nan=False) + "\n"
    return {TENSORS: save({k: np.ascontiguousarray(v) for k, v in tensors.items()}), HEADER: text.encode()}


def read_model(folder: Path) -> CollectiveModel | None:
    """The model of a folder; None where the folder has none, and ArtifactError for damaged files."""
    try:
        payload, text = (_content(folder / name) for name in (TENSORS, HEADER))
    except OSError as error:
        raise ArtifactError(f"{folder}: {error.strerror or error}", hint="copy the model folder again") from None
    if payload is None and text is None:
        return None
    if payload is None or text is None:
        missing = TENSORS if payload is None else HEADER
        raise ArtifactError(f"{folder} lacks {missing}", hint="copy the model folder again")
    try:
        header = parse_json(text)
        if header["format"] != FORMAT:
            raise ArtifactError(
                f"{folder / HEADER} has format {header['format']}, this version reads {FORMAT}",
                hint="use the cdmpp version that made it, or fit the collectives again",
            )
        tensors = load(payload)
        functions = [
            _functions(header["keys"][component.name], tensors.get(f"function.{component.name}"))
            for component in COMPONENTS
        ]
        known = {
            CollectiveContext(*context): KnownContext(*row)
            for context, row in zip(header["known"], tensors["known"].tolist(), strict=True)
        }
        return CollectiveModel(
            LinkBaseline(tensors["baseline.kinds"], tensors["baseline.shared"]),
            functions,
            tensors["variance"],
            tensors["length"],
            known,
            device_sheets(header["devices"]),
            header["calibration"],
            header["metrics"],
        )
    except (KeyError, ValueError, TypeError, SafetensorError) as error:
        raise ArtifactError(
            f"{folder}: the model of collectives is damaged: {error}", hint="copy the model folder again"
        ) from None


def device_sheets(names: Iterable[str]) -> Devices:
    """The data sheet of each device, with the names that have it; names outside the device table are left out."""
    sheets: dict[tuple[str, str], tuple[str, ...]] = {}
    for name in sorted(names):
        try:
            sheet = sheet_of(lookup(name))
        except UnknownDeviceError:
            continue
        sheets[sheet] = (*sheets.get(sheet, ()), name)
    return sheets


def _functions(keys: list[list[Any]], values: Any) -> dict[Key, Any]:
    return {
        tuple(key): value.astype(np.float64) for key, value in zip(keys, () if values is None else values, strict=True)
    }


def _content(path: Path) -> bytes | None:
    try:
        return read_bytes(path, MAX_MODEL_BYTES)
    except FileNotFoundError:
        return None
