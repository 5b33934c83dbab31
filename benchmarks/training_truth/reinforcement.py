"""Steps of reinforcement learning, planned from a configuration, against measured ones.

The table has mean lengths only. Lengths are taken as log-normal with a standard deviation of 0.7 in logs, prompts as
256 tokens, and two further passes over each sample (old policy and reference). The layout is the planner's, not the
measured one.
"""

from __future__ import annotations

import csv
from pathlib import Path
from statistics import NormalDist
from typing import Any

from cdmpp import LatencyPredictor, make_plan
from cdmpp.errors import CdmppError
from cdmpp.plan.rl.from_config import request_from_config

SPREAD, PROMPT, FORWARDS, LENGTHS = 0.7, 256, 2, 256


def lengths(mean: int, longest: int) -> list[int]:
    """Lengths of a log-normal distribution with a mean, at most ``longest``."""
    normal = NormalDist(0.0, SPREAD)
    quantiles = [2.718281828459045 ** normal.inv_cdf((i + 0.5) / LENGTHS) for i in range(LENGTHS)]
    scale = mean * LENGTHS / sum(quantiles)
    return [max(1, min(longest, round(scale * q))) for q in quantiles]


def predict_steps(steps: list[dict[str, Any]], configs: Path, predictor: LatencyPredictor) -> list[dict[str, Any]]:
    """The steps with ``predicted_s``, or None where the planner finds none."""
    with (configs / "aliases.csv").open(encoding="utf-8") as file:
        names = {a["name"]: configs / a["config"] for a in csv.DictReader(file) if a["table"] == "training"}
    return [{**step, "predicted_s": _predicted(step, names[step["model"]], predictor)} for step in steps]


def _predicted(step: dict[str, Any], config: Path, predictor: LatencyPredictor) -> float | None:
    try:
        request = request_from_config(
            config,
            "h100-sxm",
            gpus=step["gpus"],
            lengths=lengths(step["mean_length"], step["longest"] - PROMPT),
            samples=step["samples"],
            prompt=PROMPT,
            forwards=FORWARDS,
            products="float8_e4m3" if "FP8" in step["device"] else None,
            predictor=predictor,
        )
        mode = {"layout": "shared"} if step["colocated"] else {"layout": "separate", "mode": "async"}
        plan = make_plan("rl", {**request, **mode, "draws": 2, "max_steps": 8}, predictor)
    except CdmppError:
        return None
    return float(plan["step_s"])
