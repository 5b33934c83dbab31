"""Train a variant on a fixed sample in minutes and compare it with the stored reference.

``python -m benchmarks.quick VARIANT --public-data DIR [--seed 0]``: VARIANT is a file of ``benchmarks/quick/variants``
or a path. Prints the mean relative error by source: held-out sizes of known devices, devices left out of training
(V100, L40S), and these after 40 measurements, each beside the mean of the reference's seeds. Appends the run to
``benchmarks/results/quick.json``::

    {"command", "runs": [{"variant", "seed", "seconds", "rows": {"training", "known", "unseen"},
                          "sources": {SOURCE: {"known", "unseen", "k40"}}}]}

Fractions; None where a source has no such rows. The first run draws the sample, which is kept in ``runs/quick``.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.quick.variant import HELD_OUT, Fitted, QuickSample, QuickVariant
from benchmarks.report.results import rounded, write_result
from benchmarks.unseen_devices.study import ENOUGH
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.train.adaptation.adapt import adapt, answers_after
from cdmpp.train.adaptation.records import survey
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.evaluation.query_batches import query_parts

Array = np.ndarray[Any, np.dtype[Any]]
RESULTS = Path("benchmarks/results/quick.json")
REFERENCE = "base"
#: Mean relative errors by source and column.
Errors = Mapping[str, Mapping[str, float | None]]
COLUMNS = ("known", "unseen", "k40")
MEASUREMENTS = 40


def evaluate(sample: QuickSample, fitted: Fitted, seed: int) -> Errors:
    """Mean relative errors by source."""
    rows, sources = sample.dataset.rows, sample.dataset.sources
    errors: dict[str, dict[str, list[Array]]] = {name: {column: [] for column in COLUMNS} for name in sources}

    def add(column: str, index: Array, log_s: Array) -> None:
        error = np.abs(np.expm1(log_s - rows.log_latency[index]))
        for code in np.unique(rows.source[index]):
            errors[sources[code]][column].append(error[rows.source[index] == code])

    unseen = np.flatnonzero(sample.held_out)
    if fitted.artifact is None:
        assert fitted.log_s is not None
        for column, index in (("known", sample.known), ("unseen", unseen)):
            add(column, index, fitted.log_s(rows.take(index)))
    else:
        pipeline = InferencePipeline(fitted.artifact)
        cache = FeatureCache(schedule=fitted.artifact.reads_schedules)
        for part in query_parts(sample.table, sample.known, cache, half_type=pipeline.half_type):
            add("known", sample.known[part.index], pipeline.forward(part.batch).point[part.position])
        for device in HELD_OUT:
            for source in range(len(sources)):
                of_source = unseen[rows.source[unseen] == source]
                index = of_source[sample.table.device.is_(device)[of_source]]
                if not len(index):
                    continue
                records = sample.study.records(index, sample.study.device(device).nominal(), fitted.artifact)
                survey_ = survey(pipeline, records, cache)
                chosen = index[records.origin[survey_.rows]]
                add("unseen", chosen, survey_.point[survey_.query])
                if len(index) < ENOUGH:
                    continue
                made = adapt(fitted.artifact, records, k=MEASUREMENTS, seed=seed, cache=cache, known=survey_)
                rest = ~np.isin(records.origin[survey_.rows], made.report["selected"])
                add("k40", chosen[rest], answers_after(made.artifact, survey_)[0][survey_.query[rest]])
    return {
        name: {c: float(np.concatenate(values).mean()) if values else None for c, values in columns.items()}
        for name, columns in errors.items()
        if any(columns.values())
    }


def reference(runs: list[dict[str, Any]]) -> dict[str, dict[str, tuple[float, float]]]:
    """Mean and spread (largest minus smallest) over the seeds of the reference, by source and column."""
    stored = [run["sources"] for run in runs if run["variant"] == REFERENCE]
    return {
        source: {
            column: (float(np.mean(values)), float(np.ptp(values)))
            for column in COLUMNS
            if (values := [run[source][column] for run in stored if run.get(source, {}).get(column) is not None])
        }
        for source in (stored[-1] if stored else {})
    }


def table_of(sources: Errors, known: dict[str, dict[str, tuple[float, float]]]) -> str:
    """The errors in per cent, each beside the reference and its spread."""
    heads = "".join(f"{column:>8}{'reference':>18}" for column in COLUMNS)
    lines = [f"{'source':<30}{heads}"]
    known_means = _means({source: {c: mean for c, (mean, _) in columns.items()} for source, columns in known.items()})
    for source, columns in [*sources.items(), ("mean of the sources", _means(sources))]:
        cells = ""
        base = known.get(source, {}) if source in sources else {c: (v, 0.0) for c, v in known_means.items()}
        for column in COLUMNS:
            value = columns.get(column)
            cells += f"{'-' if value is None else f'{100 * value:.1f}':>8}"
            mean, spread = base.get(column, (None, 0.0))
            cells += f"{'-' if mean is None else f'{100 * mean:.1f} ± {50 * spread:.1f}':>18}"
        lines.append(f"{source:<30}{cells}")
    return "\n".join(lines)


def _means(sources: Errors) -> dict[str, float | None]:
    values = {c: [v for row in sources.values() if (v := row.get(c)) is not None] for c in COLUMNS}
    return {c: float(np.mean(v)) for c, v in values.items() if v}


def load_variant(name: str) -> QuickVariant:
    """The variant of a file.

    Raises SystemExit: there is no such file, or it has no VARIANT.
    """
    path = Path(name) if name.endswith(".py") else Path(__file__).parent / "variants" / f"{name}.py"
    if not path.is_file():
        have = ", ".join(sorted(p.stem for p in path.parent.glob("[!_]*.py")))
        raise SystemExit(f"no variant at {path}; there are: {have}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    variant = getattr(module, "VARIANT", None)
    if not isinstance(variant, QuickVariant):
        raise SystemExit(f"{path} has no VARIANT of benchmarks.quick.variant.QuickVariant")
    variant.name = path.stem
    return variant


def main() -> None:
    """Train, evaluate, print and store one run."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("variant", metavar="VARIANT")
    parser.add_argument("--public-data")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    variant = load_variant(options.variant)
    started = time.monotonic()
    sample = QuickSample.load(options.public_data, variant.runs, variant.table)
    fitted = variant.fit(sample, options.seed)
    sources = evaluate(sample, fitted, options.seed)
    runs = json.loads(options.out.read_text(encoding="utf-8"))["runs"] if options.out.is_file() else []
    print(table_of(sources, reference(runs)))
    run = {
        "variant": variant.name,
        "seed": options.seed,
        "seconds": round(time.monotonic() - started),
        "rows": {"training": len(sample.training), "known": len(sample.known), "unseen": int(sample.held_out.sum())},
        "sources": {name: rounded(row) for name, row in sources.items()},
    }
    command = "python -m benchmarks.quick VARIANT --public-data DIR"
    write_result(options.out, {"command": command, "runs": [*runs, run]})
    print(f"{variant.name}, seed {options.seed}: {run['seconds']} s, appended to {options.out}")


if __name__ == "__main__":
    main()
