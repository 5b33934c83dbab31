"""Features in bulk: the same queries as JSON numbers and as the binary body of ``/predict``.

``python -m benchmarks.bulk [--rows 2000] [--repeats 5]``: what writing and reading a body takes each way (the
median of the repeats, one thread), its size, and the ratio. Both ways are checked to give the same arrays.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from cdmpp.features.encode import encode_shapes
from cdmpp.predict.bulk import FeaturePart, FeatureQueries

T = TypeVar("T")
_ARRAYS = ("leaves", "leaf_count", "positions", "totals", "kind", "device", "backend", "protocol", "framework")


def queries(rows: int) -> FeatureQueries:
    """Distinct attention programs, the operators with most leaves."""
    ones = np.ones(rows, dtype=np.int64)
    sizes = {
        "batch": ones,
        "q_len": np.arange(2, rows + 2),
        "past_len": 0 * ones,
        "heads": 8 * ones,
        "kv_heads": 2 * ones,
        "head_dim": 64 * ones,
    }
    parts = [
        FeaturePart(encoded, "attention_prefill", "t4")
        for _, encoded in encode_shapes("attention_prefill", "float16", {}, sizes)
    ]
    return FeatureQueries.of(parts)


def as_json(batch: FeatureQueries) -> bytes:
    """Serialise the same arrays as JSON."""
    return json.dumps({name: getattr(batch, name).tolist() for name in _ARRAYS}).encode()


def from_json(body: bytes) -> dict[str, np.ndarray[Any, Any]]:
    """Back to arrays."""
    return {name: np.array(value) for name, value in json.loads(body).items()}


def timed(work: Callable[[], T], repeats: int) -> tuple[T, float]:
    """Result of the function, and the median of its seconds."""
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        out = work()
        seconds.append(time.perf_counter() - started)
    return out, statistics.median(seconds)


def measure(rows: int, repeats: int) -> dict[str, Any]:
    """Both ways, seconds and bytes."""
    batch = queries(rows)
    text, write_json_s = timed(lambda: as_json(batch), repeats)
    read, read_json_s = timed(lambda: from_json(text), repeats)
    body, write_binary_s = timed(batch.to_bytes, repeats)
    back, read_binary_s = timed(lambda: FeatureQueries.from_bytes(body), repeats)
    for name in _ARRAYS:
        np.testing.assert_array_equal(read[name].astype(getattr(back, name).dtype), getattr(back, name))
    return {
        "rows": rows,
        "leaves": int(batch.leaves.shape[1]),
        "json_bytes": len(text),
        "binary_bytes": len(body),
        "write_json_s": write_json_s,
        "write_binary_s": write_binary_s,
        "read_json_s": read_json_s,
        "read_binary_s": read_binary_s,
        "times_faster": (write_json_s + read_json_s) / (write_binary_s + read_binary_s),
    }


def main() -> None:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--repeats", type=int, default=5)
    chosen = parser.parse_args()
    print(json.dumps(measure(chosen.rows, chosen.repeats), indent=1))


if __name__ == "__main__":
    main()
