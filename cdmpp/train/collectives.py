"""``python -m cdmpp.train.collectives``: fit the model of collectives into a model folder, and report its errors.

The network of the folder is not touched, and its identity stays. Hyperparameters and functions are fitted to the
training sizes, the intervals' factors to the validation sizes and to devices left out. The test sizes are used once,
for the figures that are stored with the model.
"""

from __future__ import annotations

import argparse
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.load import load_public, load_table
from cdmpp.data.splits import TEST, TRAIN, VALIDATION, device_group, program_parts
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError
from cdmpp.model.collectives.context import collective_rows
from cdmpp.model.collectives.few import informative_rows
from cdmpp.model.collectives.fit import MeasuredCollectives, ResidualFit
from cdmpp.model.collectives.model import CollectiveModel
from cdmpp.model.collectives.residual import Correction
from cdmpp.model.collectives.store import HEADER, TENSORS, device_sheets, model_files
from cdmpp.model.domain.calibration import fit_factor
from cdmpp.model.domain.score import label
from cdmpp.model.raw_predictions import RawPredictions
from cdmpp.programs.collectives import COLLECTIVES
from cdmpp.utils.writing import replacing

logger = logging.getLogger(__name__)
Array = np.ndarray[Any, np.dtype[Any]]

SOURCE = "comm_collectives"
#: Measurements of a new device or link for the adapted figures, and seeds of their choice.
FEW, SEEDS = 8, 3
#: Minimum factors: a context that training did not have is never surer than one that it had.
_MIN_FACTORS = {"in": 0.5, "near": 1.0, "out": 1.5}


class Rows:
    """Measured collectives of a table with the part of the split of each."""

    def __init__(self, table: MeasurementTable) -> None:
        usable = np.flatnonzero(table.collective & table.trainable & (table.latency_s > 0))
        if not len(usable):
            raise DataError("the table has no usable rows of collectives", hint=f"one of: {', '.join(COLLECTIVES)}")
        rows = collective_rows(table, usable, lambda device: device.name)
        self.measured = MeasuredCollectives(rows.contexts, rows.context, rows.bytes, np.log(table.latency_s[usable]))
        self.part = program_parts(table)[table.program_key[usable]]
        self.device = np.array([c.device for c in rows.contexts])[rows.context]
        self.operator = np.array([c.operator for c in rows.contexts])[rows.context]
        self.devices = sorted({c.device for c in rows.contexts})


def relative_error(output: RawPredictions, measured: MeasuredCollectives) -> Array:
    """abs(predicted / measured - 1) of each row."""
    return np.asarray(np.abs(np.expm1(output.point - measured.log_s)))


def predict(model: CollectiveModel, measured: MeasuredCollectives) -> RawPredictions:
    """Predictions of measured rows."""
    return model.predict(measured.contexts, measured.context, measured.bytes)


def without_device(measured: MeasuredCollectives, names: Sequence[str]) -> MeasuredCollectives:
    """The rows as queries of devices that the model does not have."""
    contexts = [c._replace(device="") if c.device in names else c for c in measured.contexts]
    return MeasuredCollectives(contexts, measured.context, measured.bytes, measured.log_s)


def adapted_error(model: CollectiveModel, held: MeasuredCollectives, seed: int) -> float:
    """Mean error on a left-out device's other rows after :data:`FEW` of them are measured for each link.

    The measurements are chosen as ``cdmpp adapt`` does.
    """
    places = [held.contexts[i].place for i in held.context.tolist()]
    errors, weights = [], []
    for place in sorted(set(places)):
        rows = np.flatnonzero([p == place for p in places])
        chosen = rows[informative_rows(model, held.contexts, held.context[rows], held.bytes[rows], FEW, seed)]
        chosen_rows = held.take(chosen)
        order = [chosen_rows.contexts[i] for i in chosen_rows.context.tolist()]
        correction = Correction.fit(model, order, chosen_rows.bytes, np.exp(chosen_rows.log_s))
        corrected = replace(model, corrections=(*model.corrections, correction))
        rest = held.take(np.setdiff1d(rows, chosen))
        if len(rest):
            errors.append(relative_error(predict(corrected, rest), rest).mean())
            weights.append(len(rest))
    return float(np.average(errors, weights=weights))


def train(table: MeasurementTable, *, report: Callable[[str], None] = logger.info, seed: int = 0) -> CollectiveModel:
    """Fit, calibrate and evaluate; the figures are in :attr:`CollectiveModel.metrics`."""
    rows = Rows(table)
    report(f"{len(rows.measured)} rows, {len(rows.measured.contexts)} contexts, {len(rows.devices)} devices")
    return finish(rows, ResidualFit(rows.measured.take(rows.part == TRAIN), seed=seed), report)


def finish(rows: Rows, fit: ResidualFit, report: Callable[[str], None]) -> CollectiveModel:
    """Calibrate and evaluate a fit."""
    model = fit.model(device_sheets(rows.devices))
    validation = rows.measured.take(rows.part == VALIDATION)
    inside = predict(model, validation)
    report(f"validation: {100 * relative_error(inside, validation).mean():.2f} %")
    factors = {"in": fit_factor(validation.log_s, inside.levels)}
    left: dict[str, dict[str, Any]] = {}
    far: list[tuple[RawPredictions, MeasuredCollectives]] = []
    for name in rows.devices:
        fitted = fit.model(device_sheets(set(rows.devices) - {name}), without=[name])
        held = rows.measured.take(rows.device == name)
        output = predict(fitted, without_device(held, [name]))
        far.append((output, held))
        adapted = float(np.mean([adapted_error(fitted, held, s) for s in range(SEEDS)]))
        left[name] = {"rows": len(held), "error": float(relative_error(output, held).mean()), "adapted": adapted}
        report(f"without {name}: {100 * left[name]['error']:.1f} %, after {FEW} measurements {100 * adapted:.1f} %")
    for name in ("near", "out"):
        weights = [np.array([label(x) == name for x in output.coverage]) for output, _ in far]
        if sum(int(w.sum()) for w in weights) >= 200:
            logs = np.concatenate([held.log_s[w] for (_, held), w in zip(far, weights, strict=True)])
            levels = np.concatenate([output.levels[w] for (output, _), w in zip(far, weights, strict=True)])
            factors[name] = fit_factor(logs, levels)
    factors.setdefault("near", max(factors["in"], 1.5))
    factors.setdefault("out", 1.5 * factors["near"])
    factors = {name: round(max(value, _MIN_FACTORS[name]), 4) for name, value in factors.items()}
    test = rows.measured.take(rows.part == TEST)
    error = relative_error(predict(model, test), test)
    groups = _left_groups(fit, rows)
    weight = [entry["rows"] for entry in left.values()]
    places = np.array([f"{o}|{d}" for o, d in zip(rows.operator.tolist(), rows.device.tolist(), strict=True)])
    metrics: dict[str, Any] = {
        "test_error": float(error.mean()),
        "test_median": float(np.median(error)),
        "test_rows": len(test),
        "by_device": _groups(error, rows.device[rows.part == TEST]),
        "by_operator": _groups(error, rows.operator[rows.part == TEST]),
        "by_operator_and_device": _groups(error, places[rows.part == TEST]),
        "left_out": left,
        "left_out_groups": groups,
        "left_out_groups_error": _mean(groups),
        "left_out_error": _mean(left),
        "adapted_error": float(np.average([e["adapted"] for e in left.values()], weights=weight)),
    }
    report(f"test {100 * metrics['test_error']:.2f} %, device left out {100 * metrics['left_out_error']:.1f} %")
    return replace(model, calibration=factors, metrics=metrics)


def _left_groups(fit: ResidualFit, rows: Rows) -> dict[str, dict[str, Any]]:
    """Error on each group of similar devices with the whole group left out."""
    groups: dict[str, list[str]] = {}
    for name in rows.devices:
        groups.setdefault(device_group(name), []).append(name)
    out = {}
    for group, names in groups.items():
        held = rows.measured.take(np.isin(rows.device, names))
        fitted = fit.model(device_sheets(set(rows.devices) - set(names)), without=names)
        error = relative_error(predict(fitted, without_device(held, names)), held)
        out[group] = {"devices": names, "rows": len(held), "error": float(error.mean())}
    return out


def _mean(parts: Mapping[str, Mapping[str, Any]]) -> float:
    return float(np.average([p["error"] for p in parts.values()], weights=[p["rows"] for p in parts.values()]))


def _groups(error: Array, names: Array) -> dict[str, dict[str, float]]:
    return {
        str(name): {"rows": int((names == name).sum()), "error": float(error[names == name].mean())}
        for name in np.unique(names)
    }


def write(model: CollectiveModel, folder: Path) -> None:
    """Write the two files into a model folder; each is replaced atomically."""
    for name, content in model_files(model).items():
        with replacing(folder / name) as aside:
            aside.write_bytes(content)


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m cdmpp.train.collectives", description=__doc__)
    parser.add_argument("--public-data", type=Path, help="folder of the public tables; default $CDMPP_PUBLIC_DATA")
    parser.add_argument("--records", type=Path, nargs="*", help="tables to fit to instead of the public one")
    parser.add_argument("--out", type=Path, required=True, help=f"model folder, which gains {TENSORS} and {HEADER}")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if not options.out.is_dir():
        raise SystemExit(f"error: no model folder at {options.out}")
    tables = [load_table(path) for path in options.records or ()]
    table = tables[0] if tables else load_public(options.public_data, [SOURCE])
    model = train(table, seed=options.seed)
    write(model, options.out)
    print(json.dumps(model.metrics, indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
