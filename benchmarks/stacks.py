"""Spread between serving stacks: how much the same problem differs between frameworks, and whether intervals cover it.

``python -m benchmarks.stacks --public-data DIR [--model models/base] [--write]`` writes
``benchmarks/results/stacks.json``:

* ``command``, ``model_id``, ``problems``: problems (program, device, protocol) that at least two frameworks measured;
* ``overall``: the ratio of any two frameworks on one problem, both ways round;
* ``pairs``: of each operator with its types, protocol and pair of frameworks the ``n`` problems, and the ``median``,
  ``low`` (10 %) and ``high`` (90 %) of second / first latency;
* ``devices``: of each operator and device the ``n`` problems, and the same figures of slowest / fastest latency;
* ``coverage``: of each operator of the sources that the model was trained on, on held-out sizes that several
  frameworks measured, the share of measurements inside the 80 % interval of a query that states the framework
  (``stated``), of one that does not (``open``), and the ``width`` of both: upper / lower bound, median.

``--write`` puts the tables into docs/accuracy.md.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.report.results import write_result
from benchmarks.unseen_shapes import held_out_rows
from cdmpp.data.importers import PROGRAM_SOURCES
from cdmpp.data.labels import Labels
from cdmpp.data.load import load_public
from cdmpp.data.table import MeasurementTable
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.domain.calibration import read_quantiles
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.train.config import TrainConfig
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.evaluation.query_batches import query_parts
from cdmpp.train.evaluation.tables import INTERVAL

Array = np.ndarray[Any, np.dtype[Any]]
OUT = Path("benchmarks/results/stacks.json")
DOCS = Path(__file__).parents[1] / "docs" / "accuracy.md"
BEGIN, END = "<!-- stacks: python -m benchmarks.stacks --public-data DIR --write -->", "<!-- end of stacks -->"
#: Figures of fewer problems are not reported.
LEAST = 100
#: Measurements per operator and device for the coverage.
SAMPLE = 1000


@dataclass(frozen=True)
class Problems:
    """Latencies of problems that at least two frameworks measured.

    Attributes
    ----------
    operator, device, protocol : (n,) object
        ``operator`` has its types, e.g. "linear float8_e4m3 channel".
    latency_s : (n, frameworks)
        Median of the problem's rows; NaN where the framework did not measure it.
    frameworks : tuple of str
    """

    operator: Array
    device: Array
    protocol: Array
    latency_s: Array
    frameworks: tuple[str, ...]


def operator_names(table: MeasurementTable) -> Array:
    """Operator and types of every program of a table, by key."""
    names = np.full(table.n_programs, "tir", dtype=object)
    for block in table.programs:
        flags = block.given_flags
        parts = [block.operator, block.dtype]
        parts += [f"x {flags['weight_dtype']}"] if flags.get("weight_dtype") else []
        parts += [str(flags["scaling"])] if flags.get("scaling") else []
        parts += ["module"] if flags.get("module") else []
        names[block.row_index] = " ".join(parts)
    return names


def shared_problems(table: MeasurementTable) -> Problems:
    """Problems of a table's trainable rows that at least two frameworks measured."""
    rows = np.flatnonzero(table.trainable & (table.program_key >= 0) & (table.framework.array() != ""))
    framework = table.framework.take(rows)
    used = framework.used()
    column = np.array([used.index(name) if name in used else -1 for name in framework.names])[framework.codes]
    key = np.stack([table.program_key[rows], table.device.codes[rows], table.protocol.codes[rows]], axis=1)
    problems, problem = np.unique(key, axis=0, return_inverse=True)
    latency = _medians(problem.reshape(-1) * len(used) + column, table.latency_s[rows], len(problems) * len(used))
    latency = latency.reshape(len(problems), len(used))
    several = (~np.isnan(latency)).sum(axis=1) > 1
    keys, devices, protocols = problems[several].T
    return Problems(
        operator_names(table)[keys],
        np.array(table.device.names, dtype=object)[devices],
        np.array(table.protocol.names, dtype=object)[protocols],
        latency[several],
        used,
    )


def _medians(group: Array, values: Array, groups: int) -> Array:
    """Median of the values of each group; NaN for a group without values."""
    order = np.lexsort((values, group))
    counts = np.bincount(group, minlength=groups)
    first = np.cumsum(counts) - counts
    ordered = np.append(values[order], np.nan)
    low = ordered[np.where(counts > 0, first + (counts - 1) // 2, -1)]
    high = ordered[np.where(counts > 0, first + counts // 2, -1)]
    return np.asarray((low + high) / 2)


def _figures(ratio: Array) -> dict[str, Any]:
    low, median, high = np.quantile(ratio, (0.1, 0.5, 0.9))
    return {
        "n": len(ratio),
        "median": round(float(median), 3),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
    }


def pair_ratios(problems: Problems) -> Iterator[dict[str, Any]]:
    """Ratio of two frameworks, by operator and protocol."""
    for operator, protocol in sorted(set(zip(problems.operator, problems.protocol, strict=True))):
        own = problems.latency_s[(problems.operator == operator) & (problems.protocol == protocol)]
        for first, second in combinations(range(len(problems.frameworks)), 2):
            ratio = own[:, second] / own[:, first]
            ratio = ratio[~np.isnan(ratio)]
            if len(ratio) >= LEAST:
                pair = {"first": problems.frameworks[first], "second": problems.frameworks[second]}
                yield {"operator": operator, "protocol": protocol, **pair, **_figures(ratio)}


def overall_ratio(problems: Problems) -> dict[str, Any]:
    """Ratio of any two frameworks on one problem, both ways round."""
    columns = problems.latency_s.T
    ratios = np.concatenate([b / a for i, a in enumerate(columns) for j, b in enumerate(columns) if i != j])
    return _figures(ratios[~np.isnan(ratios)])


def device_spread(problems: Problems) -> Iterator[dict[str, Any]]:
    """Slowest over fastest framework, by operator and device."""
    slowest = np.nanmax(problems.latency_s, axis=1) / np.nanmin(problems.latency_s, axis=1)
    for operator in sorted(set(problems.operator)):
        of_operator = problems.operator == operator
        for device in sorted(set(problems.device[of_operator])):
            ratio = slowest[of_operator & (problems.device == device)]
            if len(ratio) >= LEAST:
                yield {"operator": operator, "device": device, **_figures(ratio)}


def shared_rows(table: MeasurementTable, rows: Array, seed: int = 0) -> Array:
    """A sample of rows, ordered by program, of problems that at least two frameworks measured."""
    key = np.stack([table.program_key[rows], table.device.codes[rows], table.protocol.codes[rows]], axis=1)
    problem = np.unique(key, axis=0, return_inverse=True)[1].reshape(-1)
    pairs = np.unique(np.stack([problem, table.framework.codes[rows]], axis=1), axis=0)
    stacks = np.bincount(pairs[:, 0], minlength=int(problem.max(initial=-1)) + 1)
    shared = rows[stacks[problem] > 1]
    names = operator_names(table)[table.program_key[shared]]
    group = np.unique(np.char.add(names.astype(str), table.device.codes[shared].astype(str)), return_inverse=True)[1]
    rng = np.random.default_rng(seed)
    chosen = [
        rng.permutation(members)[:SAMPLE]
        for members in np.split(np.argsort(group, kind="stable"), np.cumsum(np.bincount(group))[:-1])
    ]
    sample = shared[np.concatenate(chosen)] if len(shared) else shared
    return np.asarray(sample[np.argsort(table.program_key[sample], kind="stable")])


def interval_bounds(pipeline: InferencePipeline, table: MeasurementTable, rows: Array) -> Array:
    """log of the bounds of the 80 % interval of each row, (n, 2); NaN where a program cannot be encoded."""
    bounds = np.full((len(rows), 2), np.nan)
    cache = FeatureCache(schedule=pipeline.artifact.reads_schedules)
    for part in query_parts(table, rows, cache, half_type=pipeline.half_type):
        output = pipeline.forward(part.batch)
        levels = read_quantiles(output.levels, output.factor, INTERVAL)
        low = np.minimum(levels[:, 0], output.point)
        high = np.maximum(levels[:, 1], output.point)
        bounds[part.index] = np.stack([low, high], axis=1)[part.position]
    return bounds


def coverage(artifact: Artifact, table: MeasurementTable, rows: Array) -> Iterator[dict[str, Any]]:
    """Coverage of intervals with and without the framework, by operator, then over all ("")."""
    pipeline = InferencePipeline(artifact)
    measured = np.log(table.latency_s[rows])
    stated = interval_bounds(pipeline, table, rows)
    without = replace(table, framework=Labels.constant("", len(table)))
    unstated = interval_bounds(pipeline, without, rows)
    operator = operator_names(table)[table.program_key[rows]]
    for name in (*sorted(set(operator)), ""):
        own = ~np.isnan(stated[:, 0]) & ((operator == name) | (name == ""))
        if own.sum() < LEAST:
            continue
        entry: dict[str, Any] = {"operator": name, "n": int(own.sum())}
        for label, bounds in (("stated", stated), ("open", unstated)):
            low, high = bounds[own].T
            inside = (measured[own] >= low) & (measured[own] <= high)
            width = float(np.exp(np.median(high - low)))
            entry[label] = {"inside": round(float(inside.mean()), 4), "width": round(width, 3)}
        yield entry


def study(artifact: Artifact, public_data: str | None) -> dict[str, Any]:
    """The whole result file but its command."""
    table = load_public(public_data, PROGRAM_SOURCES)
    problems = shared_problems(table)
    rows = held_out_rows(table, TrainConfig.of_manifest(artifact.manifest["config"]))
    trained = np.isin(np.array(table.source.names), list(artifact.manifest["data"]["sources"]))
    rows = shared_rows(table, rows[trained[table.source.codes[rows]]])
    return {
        "model_id": artifact.model_id,
        "problems": len(problems.operator),
        "overall": overall_ratio(problems),
        "pairs": list(pair_ratios(problems)),
        "devices": list(device_spread(problems)),
        "coverage": list(coverage(artifact, table, rows)),
    }


def tables_of(result: dict[str, Any]) -> str:
    """The tables in Markdown."""
    low, high = result["overall"]["low"], result["overall"]["high"]
    lines = [
        f"{result['problems']:,} problems (program, device, protocol) were measured by at least two frameworks. Of all",
        f"ratios between two of them, 80 % lie between {low:.2f} and {high:.2f}.",
        "",
        "| operator | protocol | frameworks | problems | ratio, median | 10-90 % |",
        "| --- | --- | --- | ---: | ---: | ---: |",
    ]
    for row in result["pairs"]:
        pair = f"{row['second']} / {row['first']}"
        figures = f"{row['n']:,} | {row['median']:.2f} | {row['low']:.2f}-{row['high']:.2f}"
        lines.append(f"| {row['operator']} | {row['protocol']} | {pair} | {figures} |")
    lines += ["", "<details><summary>Slowest / fastest framework, by operator and device</summary>", ""]
    lines += ["| operator | device | problems | median | 10-90 % |", "| --- | --- | ---: | ---: | ---: |"]
    for row in result["devices"]:
        figures = f"{row['n']:,} | {row['median']:.2f} | {row['low']:.2f}-{row['high']:.2f}"
        lines.append(f"| {row['operator']} | {row['device']} | {figures} |")
    lines += [
        "",
        "</details>",
        "",
        "Held-out sizes that several frameworks measured, each measurement against the 80 %",
    ]
    lines += [
        "interval of a query with its framework, and of a query without. Width is upper / lower bound, median.",
        "",
    ]
    lines += ["| operator | measurements | inside, with | width | inside, without | width |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for row in result["coverage"]:
        cells = [f"{100 * row[k]['inside']:.1f} % | {row[k]['width']:.2f}" for k in ("stated", "open")]
        lines.append(f"| {row['operator'] or 'all'} | {row['n']:,} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the study, write its figures, and put the tables into the documentation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--public-data")
    parser.add_argument("--model", default="models/base")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--write", action="store_true", help=f"put the tables into {DOCS.name}")
    options = parser.parse_args()
    result = study(load_artifact(options.model), options.public_data)
    command = f"python -m benchmarks.stacks --public-data DIR --model {options.model}"
    write_result(options.out, {"command": command, **result})
    print(json.dumps(result["coverage"], indent=1))
    if options.write:
        before, _, rest = DOCS.read_text(encoding="utf-8").partition(BEGIN)
        text = f"{before}{BEGIN}\n\n{tables_of(result)}\n\n{END}{rest.partition(END)[2]}"
        DOCS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
