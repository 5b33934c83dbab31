"""Accuracy of torch modules on KernelBench: ``python -m benchmarks.torch_truth DIR --public-data DIR``.

``DIR`` is a checkout of KernelBench: ``level1`` to ``level3``, or folders of versions with these. Each problem
is its own ``Model`` with its own inputs, on ``meta``; it is timed as it is made, without gradients. Nothing of it is
copied. Fits use the problems of one half (by a hash of the name), the figures are of the other half.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import hashlib
import importlib.util
import json
import math
import statistics
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from cdmpp.devices import lookup
from cdmpp.errors import CdmppError
from cdmpp.predict.predictor import LatencyPredictor

#: Name of a timing in the public table -> execution.
MODES = {
    "torch": "eager",
    "torch_compile_inductor_default": "compiled",
    "torch_compile_inductor_max-autotune-no-cudagraphs": "compiled-max",
}
VERSION = "v0"


def measured(public_data: Path) -> dict[tuple[str, str], dict[str, dict[str, float]]]:
    """(level, problem) -> execution -> device -> seconds, the median of repeated measurements."""
    times: dict[Any, list[float]] = defaultdict(list)
    with gzip.open(public_data / "e2e_kernelbench.csv.gz", "rt") as file:
        for row in csv.DictReader(file):
            if row["mode"] in MODES and row["bench_version"].startswith(VERSION + "-"):
                key = (row["level"], row["problem"], MODES[row["mode"]], lookup(row["device"]).name)
                times[key].append(1e-6 * float(row["mean_us"]))
    table: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    for (level, problem, execution, device), values in times.items():
        by_execution = table.setdefault((level, problem), {})
        by_execution.setdefault(execution, {})[device] = statistics.median(values)
    return table


def load(path: Path) -> tuple[torch.nn.Module, Any]:
    """A problem's module and inputs on ``meta``; on the CPU where its constructor looks at values."""
    spec = importlib.util.spec_from_file_location("problem", path)
    assert spec is not None and spec.loader is not None
    source = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(source)
    try:
        with torch.device("meta"):
            module = source.Model(*source.get_init_inputs())
    except RuntimeError:
        module = source.Model(*source.get_init_inputs())
    with torch.device("meta"):
        return module, source.get_inputs()


def rows_of(folder: Path, public_data: Path, executions: Sequence[str]) -> Iterator[dict[str, Any]]:
    """One row per problem, execution and device, with what was measured and predicted."""
    predictor = LatencyPredictor.load()
    truth = measured(public_data)
    for (level, problem), by_execution in sorted(truth.items()):
        # Rules and factors are chosen on one half of the problems.
        fitted = hashlib.sha256(problem.encode()).digest()[0] % 2 == 0
        common = {"level": level, "problem": problem, "fitted": fitted}
        try:
            module, inputs = load(folder / level / f"{problem}.py")
            devices = sorted({device for timed in by_execution.values() for device in timed})
            sums = predictor.predict_module(module, inputs, devices, mode="forward", protocol="eager")
            answers = {
                execution: predictor.predict_module(
                    module, inputs, devices, mode="forward", execution=execution.removesuffix("-max")
                )
                for execution in executions
            }
        except (CdmppError, ImportError) as error:
            yield {**common, "error": str(error)[:200]}
            continue
        for execution, predictions in answers.items():
            for device, total, prediction in zip(devices, sums, predictions, strict=True):
                if device not in by_execution.get(execution, {}):
                    continue
                roofline = sum(p.count * (p.prediction.roofline_s or 0.0) for p in total.programs)
                yield {
                    **common,
                    **{"execution": execution, "device": device, "measured_s": by_execution[execution][device]},
                    **{"latency_s": prediction.latency_s, "lower_s": prediction.lower_s, "upper_s": prediction.upper_s},
                    "lower_bound": prediction.lower_bound,
                    "timeline": None if prediction.timeline is None else prediction.to_dict()["timeline"],
                    "sum_s": total.latency_s,
                    "roofline_s": roofline,
                }


def errors(rows: Iterable[dict[str, Any]], field: str = "latency_s") -> list[float]:
    """|predicted / measured - 1| of rows without something left out."""
    return [abs(row[field] / row["measured_s"] - 1) for row in rows if row.get(field) and not row["lower_bound"]]


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """A table in markdown: errors by execution, level and device, with two baselines."""
    lines = [
        "| execution | level | device | problems | median | mean | sum of eager calls | roofline | in interval |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if "execution" in row:
            groups[row["execution"], row["level"], row["device"]].append(row)
            groups[row["execution"], row["level"], "all"].append(row)
    for (execution, level, device), group in sorted(groups.items()):
        misses, whole = errors(group), [row for row in group if not row["lower_bound"]]
        if not misses:
            continue
        inside = statistics.fmean(row["lower_s"] <= row["measured_s"] <= row["upper_s"] for row in whole)
        figures = (statistics.median(misses), statistics.fmean(misses))
        baselines = [statistics.median(errors(group, field)) for field in ("sum_s", "roofline_s")]
        cells = [f"{100 * value:.0f} %" for value in (*figures, *baselines, inside)]
        lines.append(f"| {execution} | {level[-1]} | {device} | {len(misses)} of {len(group)} | {' | '.join(cells)} |")
    return lines


def ranking(rows: Sequence[dict[str, Any]], apart: float = 1.0) -> float:
    """Share of pairs of devices that are ranked as measured, of the same problem, in eager execution.

    ``apart``: least ratio of the two measurements.
    """
    by_problem: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.get("execution") == "eager" and not row["lower_bound"]:
            by_problem[row["level"], row["problem"]].append(row)
    right = [
        (a["latency_s"] - b["latency_s"]) * (a["measured_s"] - b["measured_s"]) > 0
        for group in by_problem.values()
        for i, a in enumerate(group)
        for b in group[:i]
        if max(a["measured_s"], b["measured_s"]) >= apart * min(a["measured_s"], b["measured_s"])
    ]
    return statistics.fmean(right)


def worst(rows: Sequence[dict[str, Any]], count: int = 10) -> list[tuple[str, str, float]]:
    """Level, problem and median of predicted over measured: the largest errors in eager execution."""
    ratios: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in rows:
        if row.get("execution") == "eager" and not row["lower_bound"]:
            ratios[row["level"], row["problem"]].append(row["latency_s"] / row["measured_s"])
    medians = {key: statistics.median(values) for key, values in ratios.items()}
    order = sorted(medians, key=lambda key: -abs(math.log(medians[key])))
    return [(*key, medians[key]) for key in order[:count]]


#: What a problem's name has -> why its error is large.
REASONS = {
    "transpose": "cuDNN has kernels of very different speed for gradients; which one it takes is not modelled",
    "conv_standard_3D": "devices without TF32 have slow kernels for three axes",
    "Average_Pooling_3D": "devices differ in instructions for each element of a window",
    "Mamba": "many small movements of unusual layout",
    "GoogleNet": "convolutions with few input channels or small images",
    "depthwise": "the host and the kernel are of the same length",
    "": "the host: its time by kind of call differs between machines and versions of PyTorch",
}


def reason_of(problem: str) -> str:
    """The first reason whose key is in the problem's name."""
    return next(text for key, text in REASONS.items() if key.casefold() in problem.casefold())


INTRODUCTION = """# Accuracy of torch modules

Written by `python -m benchmarks.torch_truth DIR --public-data DIR --write docs/modules-accuracy.md`.

KernelBench publishes 250 PyTorch programs (level 1: single operators, 2: a few fused, 3: networks) and their times on
cloud GPUs. Each is asked as published, with `mode="forward"`. Factors of hosts and constants of convolutions use one
half of the problems, chosen by a hash of the name. The other constants are fitted to one H100
([pytorch-h100](../data/pytorch-h100/README.md)). No row of that machine is here.
No constant is fitted to the other half. Its figures were seen while rules were written: it is no untouched test set.

- *sum of eager calls* adds the programs by `protocol="eager"`, *roofline* their bounds; both are medians.
- *in interval*: share of the measurements inside of the 80 % interval.
- `compiled-max` is `max-autotune` without graphs.
- Graphs are not here: the backend `cudagraphs` of `torch.compile` was timed, with its guards and copies of inputs. On
  49 modules of pytorch-h100 the median error of `cuda-graph` is 14 % (`python -m benchmarks.torch_kernels`).
""".strip().splitlines()


def page(rows: Sequence[dict[str, Any]]) -> str:
    """The page of the documentation."""
    other, fitted = ([row for row in rows if row["fitted"] is part] for part in (False, True))
    timed = {(row["level"], row["problem"]) for row in rows}
    missing = {(row["level"], row["problem"]) for row in rows if "error" in row or row.get("lower_bound")}
    return "\n".join(
        [
            *INTRODUCTION,
            "",
            f"Answered with nothing left out: {len(timed) - len(missing)} of {len(timed)} problems that were timed.",
            "",
            "## The other half",
            "",
            *summary(other),
            "",
            f"Two devices are ranked as measured for {100 * ranking(other):.0f} % of all problems and pairs (eager), "
            f"for {100 * ranking(other, 1.1):.0f} % where the measurements differ by 10 % or more. Pairs of the two "
            "A100 are half wrong: the one with less bandwidth was measured faster in half of the problems.",
            "",
            "## The half of the fits",
            "",
            *summary(fitted),
            "",
            "## Largest errors in eager execution",
            "",
            "| level | problem | predicted / measured | why |",
            "| --- | --- | ---: | --- |",
            *(f"| {level[-1]} | {name} | {ratio:.2f} | {reason_of(name)} |" for level, name, ratio in worst(rows)),
            "",
        ]
    )


def main() -> None:
    """Predict, then print or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR_OF_KERNELBENCH")
    parser.add_argument("--public-data", type=Path, required=True, metavar="DIR")
    parser.add_argument("--executions", nargs="*", default=list(MODES.values()))
    parser.add_argument("--rows", type=Path, help="also write the rows to this file, as JSON lines")
    parser.add_argument("--write", type=Path, help="write the page to this file")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    folder = options.folder / VERSION if (options.folder / VERSION).is_dir() else options.folder
    rows = list(rows_of(folder, options.public_data, options.executions))
    if options.rows:
        options.rows.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for row in rows:
        if "error" in row:
            print(f"{row['problem']}: {row['error']}")
    if options.write:
        options.write.write_text(page(rows), encoding="utf-8")
    else:
        print(page(rows))


if __name__ == "__main__":
    main()
