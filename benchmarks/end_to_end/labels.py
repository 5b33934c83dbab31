"""The public whole-model labels: which of them are predicted, and why the others are not."""

from __future__ import annotations

import csv
import gzip
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.end_to_end.images import NETWORKS
from benchmarks.end_to_end.transformers import SIZES
from cdmpp.devices.registry import lookup
from cdmpp.errors import UnknownDeviceError

#: timm's rows: one way to run, so that a difference is the model's.
TIMM_PRECISION, TIMM_LAYOUT = "amp", "nchw"


@dataclass(frozen=True)
class Label:
    """One measured run of a whole network.

    ``size``: tokens of a sequence, or pixels of an image's side. ``parts_s``: forward and backward, where
    the source has them apart.
    ``run``: the source's name of a machine, where it has several of one device.
    """

    source: str
    model: str
    device: str
    mode: str
    precision: str
    batch: int
    size: int
    measured_s: float
    parts_s: tuple[float, float] | None = None
    run: str = ""


@dataclass
class Labels:
    """Labels to predict, and the number of others by source and reason."""

    kept: list[Label]
    left_out: Counter[tuple[str, str]]


def read_labels(folder: Path) -> Labels:
    """All labels of a folder of public data."""
    labels = Labels([], Counter())
    for reader in (_neusight, _torchvision, _timm):
        for label in reader(folder):
            if isinstance(label, Label):
                labels.kept.append(label)
            else:
                labels.left_out[label] += 1
    return labels


def rows(path: Path) -> Iterator[dict[str, str]]:
    """Rows of a compressed CSV file."""
    with gzip.open(path, "rt", encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _device(name: str) -> str | None:
    try:
        return lookup(name).name
    except UnknownDeviceError:
        return None


def _neusight(folder: Path) -> Iterator[Label | tuple[str, str]]:
    source = "neusight"
    for row in rows(folder / "e2e_neusight.csv.gz"):
        device = _device(row["device"])
        if row["variant"] == "fusion":
            yield source, "run through a compiler that fuses kernels"
        elif row["variant"] == "tp4":
            yield source, "four GPUs, tensor parallel: how the layers were divided is not published"
        elif row["variant"]:
            continue  # several GPUs
        elif row["model"] not in SIZES:
            yield source, f"{row['model']}: its sizes are not part of the data"
        elif device is None:
            yield source, f"unknown device {row['device']}"
        else:
            forward, backward = float(row["fw_ms"]) / 1e3, float(row["bwall_ms"]) / 1e3
            mode = {"inf": "inference", "train": "training"}[row["mode"]]
            yield Label(
                source,
                row["model"],
                device,
                mode,
                "float32",
                int(row["batch"]),
                int(row["seqlen"]),
                float(row["e2e_ms"]) / 1e3,
                (forward, backward) if mode == "training" else None,
            )


def _torchvision(folder: Path) -> Iterator[Label | tuple[str, str]]:
    source = "torchvision"
    for row in rows(folder / "e2e_torchvision_ryujaehun.csv.gz"):
        device = _device(row["device"])
        if row["precision"] == "float64":
            yield source, "float64"
        elif row["model"] not in NETWORKS:
            yield source, f"{row['model']}: not built here"
        elif device is None:
            yield source, f"unknown device {row['device']}"
        else:
            mode = {"inf": "inference", "train": "training"}[row["mode"]]
            yield Label(
                source,
                row["model"],
                device,
                mode,
                row["precision"],
                int(row["batch"]),
                224,
                float(row["mean_ms"]) / 1e3,
                run=row["run_folder"],
            )


def _timm(folder: Path) -> Iterator[Label | tuple[str, str]]:
    """Rows of the newest torch of each device; before 2.0 its attention was not fused."""
    source = "timm"
    everything = list(rows(folder / "e2e_timm_infer.csv.gz"))
    newest: dict[str, int] = {}
    for row in everything:
        if _wanted(row):
            newest[row["device"]] = max(newest.get(row["device"], 0), int(row["torch"]))
    seen: dict[tuple[str, ...], list[float]] = {}
    for row in everything:
        device = _device(row["device"])
        if not _wanted(row):
            yield source, f"other than {TIMM_PRECISION}, {TIMM_LAYOUT}, eager"
        elif int(row["torch"]) != newest[row["device"]]:
            yield source, "measured again with a newer torch"
        elif row["model"] not in NETWORKS:
            yield source, "network not built here"
        elif device is None:
            yield source, f"unknown device {row['device']}"
        elif abs(_parameters(row["model"]) / float(row["param_count"]) - 1) > 2e-3:
            yield source, "its count of parameters is another: not the network of that name"
        else:
            key = (row["model"], device, row["batch_size"], row["img_size"])
            seen.setdefault(key, []).append(float(row["step_time_ms"]) / 1e3)
    for (model, device, batch, size), times_s in seen.items():
        yield Label(source, model, device, "inference", "amp", int(float(batch)), int(size), statistics.median(times_s))


def _wanted(row: Mapping[str, str]) -> bool:
    return row["precision"] == TIMM_PRECISION and row["layout"] == TIMM_LAYOUT and row["compile"] in ("False", "")


_COUNTS: dict[str, float] = {}


def _parameters(model: str) -> float:
    """Millions of parameters, as timm counts them."""
    if model not in _COUNTS:
        import torch

        with torch.device("meta"):
            _COUNTS[model] = sum(p.numel() for p in NETWORKS[model]().parameters()) / 1e6
    return _COUNTS[model]
