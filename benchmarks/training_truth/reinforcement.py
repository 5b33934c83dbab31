"""Planned against measured steps of reinforcement learning: NeMo-RL's published GRPO steps on H100.

docs/rl.md states what is assumed. Each step is planned with its published layouts and sizes. Factors of the stages are
those fitted to the steps of all other models, or to these and one measured step of the same model.

    python -m benchmarks.training_truth.reinforcement --public-data DIR
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp import LatencyPredictor, make_plan
from cdmpp.data.load import public_data_dir
from cdmpp.plan.rl import measured
from cdmpp.plan.rl.from_config import request_from_config
from cdmpp.plan.rl.measured import MeasuredStep, StageFactors

TABLE = "e2e_llm_training.csv.gz"
#: Standard deviation of the logarithm of lengths, and number of lengths.
SPREAD, LENGTHS = 0.7, 512
#: Standard deviation of the logarithm of a step of another model, beside the factors.
OTHER_MODELS = 0.1


def lengths(mean: float, longest: int) -> list[int]:
    """Log-normal lengths whose mean is ``mean`` after they are cut at ``longest``."""
    normal = statistics.NormalDist(0.0, SPREAD)
    quantiles = np.exp([normal.inv_cdf((i + 0.5) / LENGTHS) for i in range(LENGTHS)])
    low, high = 1.0, 1e7
    for _ in range(80):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if np.minimum(longest, middle * quantiles).mean() < mean else (low, middle)
    return [max(1, round(value)) for value in np.minimum(longest, low * quantiles).tolist()]


def _whole(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, text
    return int(match[1].replace(",", ""))


@dataclass(frozen=True)
class RlStep:
    """A published step."""

    model: str
    fp8: bool
    gpus: int
    samples: int
    mini_batch: int
    mean: int
    prompt: int
    longest: int
    colocated: bool
    generation_tp: int
    degrees: dict[str, int]
    step_s: float


def read_steps(public_data: Path) -> list[RlStep]:
    """The GRPO steps of the table; DAPO generates an unpublished number of batches."""
    text = gzip.decompress((public_data / TABLE).read_bytes()).decode()
    cells: dict[tuple[str, ...], dict[str, dict[str, str]]] = {}
    for row in csv.DictReader(io.StringIO(text)):
        if row["source"] == "nemo-rl" and row["note"].startswith("GRPO"):
            key = tuple(row[name] for name in ("model", "device", "gpus", "parallelism", "note"))
            cells.setdefault(key, {})[row["quantity"]] = row
    steps = []
    for (model, device, gpus, layout, note), rows in cells.items():
        row, step_s = rows["rl_step_time"], float(rows["rl_step_time"]["value"])
        samples, mean = _whole(r"G-GBS=([\d,]+)", row["batch"]), _whole(r"([\d,]+)", row["output_tokens"])
        tokens = float(rows["rl_tokens_per_s_per_gpu"]["value"]) * int(gpus) * step_s
        names, numbers = (part.split(",") for part in re.findall(r"\[([^\]]*)\]", layout.partition("train")[2]))
        # Some layouts have one number more than names; their last two are stages and parts of stages.
        kept = numbers[: len(names)] if len(numbers) == len(names) else [*numbers[: len(names) - 2], *numbers[-2:]]
        degrees = {name: int(value) for name, value in zip(names, kept, strict=True) if name != "vpp"}
        steps.append(
            RlStep(
                model=model,
                fp8="FP8" in device,
                gpus=int(gpus),
                samples=samples,
                mini_batch=_whole(r"T-GBS=([\d,]+)", row["batch"]),
                mean=mean,
                prompt=max(1, round(tokens / samples - mean)),
                longest=_whole(r"max_seq=([\d,]+)", note),
                colocated="On policy" in note,
                generation_tp=_whole(r"gen\[tp,pp\]=\[(\d+)", layout),
                degrees=degrees,
                step_s=step_s,
            )
        )
    return steps


def plan(step: RlStep, config: Path, predictor: LatencyPredictor) -> dict[str, Any]:
    """The plan of a step with its published layouts."""
    request = request_from_config(
        config,
        "h100-sxm",
        gpus=step.gpus,
        lengths=lengths(step.mean, step.longest - step.prompt),
        samples=step.samples,
        mini_batch=step.mini_batch,
        prompt=step.prompt,
        products="float8_e4m3" if step.fp8 else None,
        weights="float8_e4m3" if step.fp8 else None,
        generation_tp=step.generation_tp,
        degrees=step.degrees,
        layout="shared" if step.colocated else "separate",
        staleness=None if step.colocated else 1,
        predictor=predictor,
    )
    return make_plan("rl", request, predictor)


def stages(answer: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Predicted seconds by stage, before factors."""
    by_name = {part["name"]: part["predicted_s"] or 0.0 for part in answer["breakdown"]}
    transfer = by_name.get("transfer of weights", 0.0) + by_name.get("training state", 0.0)
    return np.array([*(by_name.get(name, 0.0) for name in measured.STAGES[:3]), transfer])


def fitted(steps: Sequence[tuple[RlStep, np.ndarray[Any, Any]]], usual: Any, prior: Any, noise: float) -> StageFactors:
    """Factors from a prior and steps."""
    rows = [
        MeasuredStep(step_s=step.step_s, generation_units=1, training_units=None if step.colocated else 1)
        for step, _ in steps
    ]
    return StageFactors.fit(rows, [predicted for _, predicted in steps], 1, usual, prior, noise)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--public-data", type=Path, help="folder of the public tables")
    parser.add_argument("--configs", type=Path, help="folder of the models' config.json, with aliases.csv")
    options = parser.parse_args()
    data = public_data_dir(options.public_data)
    configs = options.configs or data.parent / "model_configs"
    with (configs / "aliases.csv").open(encoding="utf-8") as file:
        names = {row["name"]: configs / row["config"] for row in csv.DictReader(file) if row["table"] == "training"}
    predictor = LatencyPredictor.load()
    planned = [(step, stages(plan(step, names[step.model], predictor))) for step in read_steps(data)]
    wide, none = np.array([0.3, 0.4, 0.3, 0.7]), np.ones(4)
    print("| model | GPUs | policy | measured | as predicted | factors of other models | and one step of this one |")
    print("| --- | ---: | --- | ---: | ---: | ---: | ---: |")
    ratios: dict[str, list[float]] = {"stages": [], "others": [], "one": []}
    for step, predicted in planned:
        others = fitted([item for item in planned if item[0].model != step.model], none, wide, OTHER_MODELS)
        same_model = [item for item in planned if item[0].model == step.model and item[0] is not step]

        def whole(factors: Any, step: RlStep = step, predicted: Any = predicted) -> float:
            return measured.step_s(factors * predicted, step.colocated, 1)

        after_one = [whole(fitted([item], others.values, measured.PRIOR, measured.NOISE).values) for item in same_model]
        values = {"stages": [whole(none)], "others": [whole(others.values)], "one": after_one}
        for name, seconds in values.items():
            ratios[name] += [max(s / step.step_s, step.step_s / s) for s in seconds]
        text = [" / ".join(f"{s:.1f} s" for s in seconds) for seconds in values.values()]
        policy = "on-policy" if step.colocated else "one step off"
        model = f"{step.model}{', FP8' if step.fp8 else ''}"
        print(f"| {model} | {step.gpus} | {policy} | {step.step_s:g} s | {' | '.join(text)} |")
    medians = [f"{statistics.median(values):.2f}" for values in ratios.values()]
    print(f"| median ratio, larger over smaller | | | | {' | '.join(medians)} |")
    print("factors fitted to all steps:", np.round(fitted(planned, none, wide, OTHER_MODELS).values, 2).tolist())


if __name__ == "__main__":
    main()
