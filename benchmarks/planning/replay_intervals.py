"""Whether intervals of whole networks hold, by how far errors of different programs are taken to go together.

``python -m benchmarks.planning.replay_intervals --public-data DIR`` writes
``benchmarks/results/replay_intervals.json``; three minutes on one core. The networks and labels are those of
:mod:`benchmarks.end_to_end`: kernels one after the other, as calls from the host.
"""

from __future__ import annotations

import argparse
import statistics
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.end_to_end.labels import Label, read_labels
from benchmarks.end_to_end.study import launches_of
from benchmarks.report.results import write_result
from cdmpp.data.load import public_data_dir
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.requests.request import PriceRequest
from cdmpp.simulate.replay.solver import spread_of

RESULT = Path(__file__).parents[1] / "results" / "replay_intervals.json"
CORRELATIONS = (0.0, 0.25, 0.5, 0.75, 1.0)
LEVELS, SAMPLES = (0.1, 0.9), 512


def intervals(label: Label, predictor: LatencyPredictor) -> list[tuple[bool, float]]:
    """For each correlation: whether the interval has the measured time, and its width over the prediction."""
    counts = Counter(launch.spec for launch in launches_of(label))
    prices = predictor.predict(list(counts), label.device, protocol="eager", framework="pytorch")
    programs = [PriceRequest("", {"operator": spec.operator}, label.device) for spec in counts]
    seconds = np.array([n * (p.latency_s or 0.0) for n, p in zip(counts.values(), prices, strict=True)])
    spread = spread_of(programs, prices)
    results = []
    for correlation in CORRELATIONS:
        # One stream: the makespan is the sum.
        lower, upper = np.quantile(spread.factors(SAMPLES, 0, correlation) @ seconds, LEVELS)
        results.append((bool(lower <= label.measured_s <= upper), float((upper - lower) / seconds.sum())))
    return results


def main() -> None:
    """Coverage and width by source and mode."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--public-data", type=Path, help="folder of the public tables")
    labels = read_labels(public_data_dir(parser.parse_args().public_data)).kept
    predictor = LatencyPredictor.load()
    groups: dict[tuple[str, str], list[list[tuple[bool, float]]]] = {}
    for label in labels:
        groups.setdefault((label.source, label.mode), []).append(intervals(label, predictor))
    rows: list[dict[str, Any]] = []
    for (source, mode), found in groups.items():
        for i, correlation in enumerate(CORRELATIONS):
            rows.append(
                {
                    "source": source,
                    "mode": mode,
                    "labels": len(found),
                    "correlation": correlation,
                    "coverage": statistics.mean(one[i][0] for one in found),
                    "median_width": statistics.median(one[i][1] for one in found),
                }
            )
            print(rows[-1])
    write_result(
        RESULT,
        {
            "command": "python -m benchmarks.planning.replay_intervals --public-data DIR",
            "model_id": predictor.model_id,
            "nominal": LEVELS[1] - LEVELS[0],
            "samples": SAMPLES,
            "rows": rows,
        },
    )


if __name__ == "__main__":
    main()
