"""Time of casts between element types on one core of this machine, with a linear fit.

``python -m benchmarks.planning.casts``: times PyTorch's casts into tensors that are there already, fits
``seconds = overhead_s + s_per_element x elements`` and writes ``benchmarks/results/casts.json``. The overhead
is that of 64 elements; the slope is fitted, by least squares of the relative error, to 2^18 to 2^24 elements.
The smaller of them a cache holds and the larger not, so the line is off by 8 to 40 % on average.
:data:`cdmpp.plan.precision.casts.MEASURED` holds the figures of a run on a quiet machine. To int8 is a
search for the largest magnitude, a multiplication and a rounding; from int8 a multiplication.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.report.results import write_result
from cdmpp.devices.bandwidth import measure_copy

OUT = Path("benchmarks/results/casts.json")
SMALL, SIZES = 64, tuple(2**k for k in range(18, 25))
TYPES = {"int8": torch.int8, "float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_ROUND_S = 5e-4


def cast_s(source: str, target: str, elements: int, rounds: int) -> float:
    """Seconds of one cast: the fastest of ``rounds``, since other work only makes a round slower."""
    values = torch.randn(elements) * 40
    x, out = values.to(TYPES[source]), torch.zeros(elements, dtype=TYPES[target])

    def cast() -> None:
        if target == "int8":
            scale = 127.0 / x.abs().max()
            out.copy_((x * scale).round_())
        elif source == "int8":
            out.copy_(x).mul_(0.01)
        else:
            out.copy_(x)

    cast()
    began = time.perf_counter()
    cast()
    runs = max(1, int(_ROUND_S / (time.perf_counter() - began)))
    best = np.inf
    for _ in range(rounds):
        began = time.perf_counter()
        for _ in range(runs):
            cast()
        best = min(best, (time.perf_counter() - began) / runs)
    return float(best)


def fit(small_s: float, elements: Sequence[int], seconds: list[float]) -> tuple[float, float, float]:
    """Seconds an element, overhead in seconds, and the mean relative error of the line over the sizes."""
    sizes, times = np.array(elements, float), np.array(seconds)
    # Least squares of (overhead + slope x size) / time - 1.
    slope = float((sizes / times) @ (1 - small_s / times) / np.sum((sizes / times) ** 2))
    return slope, small_s, float(np.abs((small_s + slope * sizes) / times - 1).mean())


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="timed rounds of each cast")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES, help="numbers of elements")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    for source, target in permutations(TYPES, 2):
        per_element, overhead, error = fit(
            cast_s(source, target, SMALL, options.rounds),
            options.sizes,
            [cast_s(source, target, n, options.rounds) for n in options.sizes],
        )
        rows.append(
            {
                "source": source,
                "target": target,
                "s_per_element": float(f"{per_element:.3g}"),
                "overhead_s": float(f"{overhead:.3g}"),
                "mean_relative_error": round(error, 3),
            }
        )
        print(
            f"{source:>8} -> {target:<8} {per_element * 1e9:.3f} ns an element + {overhead * 1e6:.2f} µs "
            f"(the line is off by {100 * error:.0f} % on average)"
        )
    copied = measure_copy([0], 2**28)
    print(f"a plain copy moves {copied / 1e9:.1f} GB/s")
    write_result(options.out, {"threads": 1, "copy_bytes_per_s": float(f"{copied:.3g}"), "casts": rows})


if __name__ == "__main__":
    main()
