"""Accuracy of single calls of PyTorch on one H100: ``python -m benchmarks.torch_kernels``.

``data/pytorch-h100`` has the device time of each call. Its calls are made again on ``meta`` by its own measuring script
and predicted by the rules of :mod:`cdmpp.programs.frontends.eager_rules`.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import statistics
import sys
import types
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from cdmpp.predict.predictor import LatencyPredictor

DATA = Path(__file__).resolve().parents[1] / "data" / "pytorch-h100"
DEVICE = "h100-sxm"


class Call(torch.nn.Module):
    """A function of tensors as a module."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = (function,)

    def forward(self, *tensors: Any) -> Any:
        """The function's result."""
        return self._function[0](*tensors)


def measuring_script() -> Any:
    """The measuring script as a module whose tensors are on ``meta``; it measures nothing."""
    source = gzip.decompress((DATA / "measure.py.gz").read_bytes()).decode()
    source = source[: source.index("try:\n    if CHECK:\n        run_check()")]
    module = types.ModuleType("measure")
    before, sys.argv = sys.argv, ["measure.py", "--check"]
    try:
        exec(compile(source, "measure.py", "exec"), module.__dict__)
    finally:
        sys.argv = before
    return module


def rows_of(name: str) -> list[dict[str, Any]]:
    """Rows of a file of the data that have a latency."""
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as file:
        return [row for row in map(json.loads, file) if "latency_s" in row]


def ratios() -> dict[str, list[float]]:
    """Operator -> predicted over measured device time of each row."""
    script, predictor = measuring_script(), LatencyPredictor.load()
    cases = script.operator_cases()
    by_name: dict[str, list[float]] = defaultdict(list)
    for row in rows_of("operators"):
        _, name, number, _, sample, _ = cases[row["case"]]
        _, _, make, call = sample(random.Random(f"38-{name}-{number}"), number)
        if (row["config"].get("tf32")) is False:  # predicted as PyTorch's default
            continue
        try:
            answer = predictor.predict_module(Call(call), tuple(make()), DEVICE, mode="forward", execution="cuda-graph")
        except Exception as error:  # a call that launches nothing
            print(f"{name}: {error}", file=sys.stderr)
            continue
        if answer.timeline is not None and not answer.lower_bound:
            by_name[name].append(answer.timeline.device_busy_s / row["latency_s"])
    return by_name


def module_ratios() -> dict[str, list[float]]:
    """Execution and mode -> predicted over measured seconds of whole modules, as benchmarks measure them."""
    script, predictor = measuring_script(), LatencyPredictor.load()
    cases = {(case["name"], dtype, mode): case for case, dtype, mode in script.module_cases() if "build" in case}
    by_name: dict[str, list[float]] = defaultdict(list)
    for row in rows_of("modules") + rows_of("compiled"):
        case = cases.get((row["op"], row["dtype"], row["mode"]))
        fields = {"eager": ("latency_s", "graph_s"), "compiled": ("latency_s",)}.get(row["execution"], ())
        if case is None or "shapes" not in row["config"]:
            continue
        with torch.device("meta"):
            module, inputs = case["build"](), case["inputs"](getattr(torch, row["dtype"]))
        module.train(row["mode"] != "eval")
        mode = "training" if row["mode"] == "training" else "forward"
        for field in fields:
            if not row.get(field):
                continue
            execution = "cuda-graph" if field == "graph_s" else row["execution"]
            options = {"mode": mode, "execution": execution, "dtype": row["dtype"]}
            options |= {"optimizer": "sgd"} if mode == "training" else {}
            answer = predictor.predict_module(module, inputs, DEVICE, host="pytorch-h100", **options)
            by_name[f"{execution}, {mode}, {row['dtype']}"].append((answer.latency_s or 0.0) / row[field])
    return by_name


def main() -> None:
    """Print the errors by operator, and of modules."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for ratios_of in (ratios(), module_ratios()):
        print_table(ratios_of)


def print_table(by_name: dict[str, list[float]]) -> None:
    """Errors in markdown."""
    print("| call | rows | median error | median ratio | 10 % | 90 % |\n| --- | ---: | ---: | ---: | ---: | ---: |")
    for name, values in sorted(by_name.items()):
        logs = sorted(map(math.log, values))
        error = statistics.median(abs(value - 1) for value in values)
        points = [math.exp(logs[int(q * (len(logs) - 1))]) for q in (0.5, 0.1, 0.9)]
        print(f"| {name} | {len(values)} | {100 * error:.0f} % | {' | '.join(f'{point:.2f}' for point in points)} |")


if __name__ == "__main__":
    main()
