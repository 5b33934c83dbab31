"""One side of :mod:`benchmarks.throughput_ab`: predicts batches on command, with the checkout on PYTHONPATH.

Runs with old checkouts too, so it imports nothing from benchmarks. Reads one JSON command per line from stdin:
``{"items": [...]}`` predicts these items and answers ``{"wall_s": ..., "cpu_s": ...}``.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any


def main() -> None:
    """Answer commands until stdin ends."""
    from cdmpp import LatencyPredictor
    from cdmpp.predict import prediction
    from cdmpp.programs.frontends.load import program_from_request

    predictor: Any = LatencyPredictor.load()
    # Commit 283c9af has the names before they were changed.
    predict = getattr(predictor, "predict_queries", None) or predictor.predict_questions
    query_type: Any = getattr(prediction, "Query", None) or prediction.Question  # type: ignore[attr-defined]
    for line in sys.stdin:
        items = json.loads(line)["items"]
        queries = [query_type(program_from_request(item["program"]), item["device"]) for item in items]
        started, cpu = time.perf_counter(), time.process_time()
        predictions = predict(queries)
        seconds = {"wall_s": time.perf_counter() - started, "cpu_s": time.process_time() - cpu}
        faults = [p.error.message for p in predictions if p.error is not None]
        if faults or len(predictions) != len(items):
            raise SystemExit(f"{len(faults)} of {len(items)} items failed: {faults[:1]}")
        print(json.dumps(seconds), flush=True)


if __name__ == "__main__":
    main()
