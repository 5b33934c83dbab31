"""Measured serving batches, and their estimates by cdmpp, without collectives, and by the roofline."""

from __future__ import annotations

import csv
import gzip
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cdmpp.devices.registry import lookup
from cdmpp.model.inference.collectives import is_collective_program
from cdmpp.predict.llm import EstimatePlan, read_config
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.predictor import LatencyPredictor

TABLE = "e2e_pipeweave.csv.gz"
ROOT = Path(__file__).parents[2]
#: Configurations by the table's names of models.
CONFIGS = {"Qwen2.5-14B": "qwen2.5-14b", "Llama-3.1-70B": "llama-3.1-70b"}
FIGURES = ("prefill_s", "decode_s", "total_s")
_COLUMNS = ("prefill_ms", "median_decode_step_ms", "total_ms")


@dataclass(frozen=True)
class Batch:
    """A measured batch: medians over its runs (the first run of most is slower).

    Attributes
    ----------
    lengths : tuple of int
        Tokens of each prompt.
    output : int
        Tokens of each answer.
    measured : dict of str to float
        Seconds by :data:`FIGURES`; ``decode_s`` is the median step.
    """

    device: str
    tp: int
    model: str
    workload: str
    lengths: tuple[int, ...]
    output: int
    measured: dict[str, float]


def read_batches(folder: Path) -> Iterator[Batch]:
    """Batches of the public table; models and requests that are not known here are left out."""
    requests = json.loads(Path(__file__).with_name("requests.json").read_text(encoding="utf-8"))
    runs: dict[tuple[str, ...], list[list[float]]] = {}
    keys = ("device", "tp", "model", "workload", "batch_size", "output_len")
    with gzip.open(folder / TABLE, "rt", encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            times = [1e-3 * float(row[column]) for column in _COLUMNS]
            runs.setdefault(tuple(row[key] for key in keys), []).append(times)
    for (device, tp, model, workload, batch, output), times in runs.items():
        name = f"{workload}_{batch}"
        if model in CONFIGS and name in requests:
            medians = [statistics.median(column) for column in zip(*times, strict=True)]
            measured = dict(zip(FIGURES, medians, strict=True))
            yield Batch(lookup(device).name, int(tp), model, name, tuple(requests[name]), int(output), measured)


def answer(batch: Batch, predictor: LatencyPredictor) -> dict[str, Any]:
    """Seconds of a batch: measured, estimated with bounds and domain, without collectives, and by the roofline."""
    config = read_config(ROOT / "examples" / "llm" / f"{CONFIGS[batch.model]}.json")
    plan = EstimatePlan(config, lookup(batch.device), tp=batch.tp, output=batch.output, lengths=batch.lengths)
    predictions = predictor.predict_queries(plan.queries)
    collective = [is_collective_program(query.program) for query in plan.queries]
    ways = {
        "predicted": predictions,
        "without_collectives": [
            _scaled(p, float(not skipped)) for p, skipped in zip(predictions, collective, strict=True)
        ],
        "roofline": [_scaled(p, (p.roofline_s or 0.0) / (p.latency_s or 1.0)) for p in predictions],
    }
    estimates = {way: plan.estimate(predictor.model_id, values).to_dict() for way, values in ways.items()}
    row: dict[str, Any] = {name: getattr(batch, name) for name in ("device", "tp", "model", "workload")}
    row |= {"domain": estimates["predicted"]["domain"], "measured": rounded(batch.measured)}
    row |= {way: rounded({name: values[name] for name in FIGURES}) for way, values in estimates.items()}
    for end in ("lower", "upper"):
        row[end] = rounded({name: estimates["predicted"][name.replace("_s", f"_{end}_s")] for name in FIGURES})
    return row


def rounded(figures: Mapping[str, float]) -> dict[str, float]:
    """Seconds with five digits."""
    return {name: float(f"{value:.5g}") for name, value in figures.items()}


def _scaled(prediction: Prediction, factor: float) -> Prediction:
    figures = {name: factor * getattr(prediction, name) for name in ("latency_s", "lower_s", "upper_s")}
    return replace(prediction, **figures)


def errors(rows: Sequence[Mapping[str, Any]], way: str = "predicted") -> dict[str, dict[str, float]]:
    """Mean and median of |estimate / measured - 1| by figure."""
    table = {}
    for name in FIGURES:
        values = [abs(row[way][name] / row["measured"][name] - 1) for row in rows]
        table[name] = {"mean": statistics.fmean(values), "median": statistics.median(values)}
    return table
