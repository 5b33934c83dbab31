"""``python -m benchmarks.collectives``: errors of the collectives beside XGBoost on the same inputs and a roofline.

XGBoost is fitted to 30,000 rows of the training sizes: of all devices for the test sizes, and of all other devices for
each device left out. The model's own figures are those stored in ``models/base`` by ``python -m
cdmpp.train.collectives``. Writes ``benchmarks/results/collectives.json`` and the marked tables of
docs/collectives.md.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.markdown import fill_document, table
from benchmarks.report.results import write_result
from cdmpp.data.load import load_public
from cdmpp.data.splits import TEST, TRAIN
from cdmpp.devices.links import KINDS
from cdmpp.model.artifact.folder import default_model
from cdmpp.model.collectives.context import CollectiveContext
from cdmpp.model.collectives.fit import MeasuredCollectives
from cdmpp.model.collectives.residual import roofline_seconds
from cdmpp.model.collectives.store import read_model
from cdmpp.programs.collectives import COLLECTIVES, LIBRARIES
from cdmpp.programs.query_options import PROTOCOLS
from cdmpp.train.collectives import SOURCE, Rows

Array = np.ndarray[Any, np.dtype[Any]]

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "collectives.json"
DOCUMENT = ROOT / "docs" / "collectives.md"
#: Training rows of the booster, drawn with a seed.
BOOSTER_ROWS = 30_000
TREES = {"n_estimators": 300, "max_depth": 8, "learning_rate": 0.12, "min_child_weight": 2, "tree_method": "hist"}


def inputs(rows: MeasuredCollectives) -> Array:
    """What the model knows of each row: sizes, operator, library, mode, link, device and its name as a number."""
    names = sorted({c.device for c in rows.contexts})
    columns = np.array([_columns(c, names) for c in rows.contexts])[rows.context]
    return np.column_stack([columns, np.log2(rows.bytes)])


def _columns(c: CollectiveContext, names: list[str]) -> list[float]:
    one_hot = [float(c.operator == name) for name in COLLECTIVES]
    one_hot += [float(c.library == name) for name in LIBRARIES]
    one_hot += [float(c.mode == name) for name in PROTOCOLS]
    one_hot += [float(c.kind == name) for name in KINDS]
    figures = [c.ranks, c.per_node, c.narrow, c.link == "", np.log2(c.bandwidth), c.crosses]
    return [*one_hot, *map(float, figures), *(float(c.device == name) for name in names)]


def xgboost_error(train: MeasuredCollectives, test: MeasuredCollectives, threads: int = 1) -> Array:
    """abs(predicted / measured - 1) of a booster on the logarithm of the latency, per row of ``test``."""
    from xgboost import XGBRegressor

    if len(train) > BOOSTER_ROWS:
        train = train.take(np.random.default_rng(0).choice(len(train), BOOSTER_ROWS, replace=False))
    booster = XGBRegressor(**TREES, n_jobs=threads, random_state=0).fit(inputs(train), train.log_s)
    return np.asarray(np.abs(np.expm1(booster.predict(inputs(test)) - test.log_s)))


def roofline_error(rows: MeasuredCollectives) -> Array:
    """The same of traffic over the nominal bandwidth."""
    bound = np.empty(len(rows))
    for number in np.unique(rows.context).tolist():
        members = rows.context == number
        bound[members] = roofline_seconds(rows.contexts[number], rows.bytes[members])
    return np.asarray(np.abs(bound / np.exp(rows.log_s) - 1))


def study(rows: Rows, metrics: dict[str, Any]) -> dict[str, Any]:
    """All figures."""
    train, test = rows.part == TRAIN, rows.part == TEST
    booster = xgboost_error(rows.measured.take(train), rows.measured.take(test))
    roofline = roofline_error(rows.measured.take(test))
    result: dict[str, Any] = {
        "model": metrics,
        "test": {"model": metrics["test_error"], "xgboost": booster.mean(), "roofline": roofline.mean()},
        "by_device": {},
        "by_operator": {},
        "left_out": {},
    }
    for part, labels in (("by_device", rows.device[test]), ("by_operator", rows.operator[test])):
        for name, figures in metrics[part].items():
            mask = labels == name
            result[part][name] = {
                "rows": figures["rows"],
                "model": figures["error"],
                "xgboost": booster[mask].mean(),
                "roofline": roofline[mask].mean(),
            }
    for name, figures in metrics["left_out"].items():
        held = rows.device == name
        error = xgboost_error(rows.measured.take(train & ~held), rows.measured.take(held))
        result["left_out"][name] = {
            "rows": figures["rows"],
            "model": figures["error"],
            "adapted": figures["adapted"],
            "xgboost": error.mean(),
            "roofline": roofline_error(rows.measured.take(held)).mean(),
        }
    weights = [entry["rows"] for entry in result["left_out"].values()]
    result["left_out_all"] = {
        name: float(np.average([entry[name] for entry in result["left_out"].values()], weights=weights))
        for name in ("model", "adapted", "xgboost", "roofline")
    }
    return _plain(result)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(entry) for key, entry in value.items()}
    return round(float(value), 5) if isinstance(value, float | np.floating) else value


def document(result: dict[str, Any]) -> dict[str, str]:
    """Tables of docs/collectives.md by their marks."""

    def percent(value: float) -> str:
        return f"{100 * value:.1f} %"

    def lines(entries: dict[str, Any], columns: tuple[str, ...]) -> list[list[str]]:
        return [
            [name, f"{entry['rows']:,}", *(percent(entry[c]) for c in columns)]
            for name, entry in sorted(entries.items())
        ]

    held = ("model", "xgboost", "roofline")
    out = ("model", "adapted", "xgboost", "roofline")
    total = ["all", f"{result['model']['test_rows']:,}", *(percent(result["test"][c]) for c in held)]
    left = ["all", "", *(percent(result["left_out_all"][c]) for c in out)]
    return {
        "held-out": table(
            ["device or operator", "rows", "model", "XGBoost", "roofline"],
            [*lines(result["by_device"], held), *lines(result["by_operator"], held), total],
        ),
        "left-out": table(
            ["device left out", "rows", "model", "after 8 measurements of each link", "XGBoost", "roofline"],
            [*lines(result["left_out"], out), left],
        ),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.collectives", description=__doc__)
    parser.add_argument("--public-data", type=Path, help="folder of the public tables; default $CDMPP_PUBLIC_DATA")
    options = parser.parse_args()
    model = read_model(default_model())
    if model is None or not model.metrics:
        raise SystemExit("error: models/base has no figures of collectives: python -m cdmpp.train.collectives")
    result = study(Rows(load_public(options.public_data, [SOURCE])), model.metrics)
    write_result(OUT, result)
    fill_document(DOCUMENT, document(result))
    print(f"test: {result['test']}\nleft out: {result['left_out_all']}")


if __name__ == "__main__":
    main()
