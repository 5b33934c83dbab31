"""Whether sources mean the same by the same words: ``python -m benchmarks.audit --public-data DIR``.

Rows of one program, device, protocol and implementation that occur in several sources, or under several frameworks of
one source, are compared: for each pair and operator the number of programs, the median ratio and its 10th and 90th
percentile. Host times and other excluded rows are left out. Pairs beyond :data:`APART` are marked; docs/data.md
explains them. The result is written to ``benchmarks/results/audit.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cdmpp.data.load import load_public
from cdmpp.data.table import MeasurementTable
from cdmpp.programs.elements import types_label

Array = np.ndarray[Any, np.dtype[Any]]
RESULT = Path(__file__).parent / "results" / "audit.json"
#: Ratio of medians that has to be explained, and the fewest common programs of a pair.
APART, MIN_PROGRAMS = 1.5, 20


class Pair(NamedTuple):
    """Two sources, or two frameworks of one source, on the same programs and devices.

    Attributes
    ----------
    operator, types, first, second : str
        ``first`` and ``second`` are a source and a framework each.
    programs : int
        Pairs of program, device and protocol that both have.
    ratio, low, high : float
        Median, 10th and 90th percentile of the second latency over the first.
    """

    operator: str
    types: str
    first: str
    second: str
    programs: int
    ratio: float
    low: float
    high: float

    @property
    def is_apart(self) -> bool:
        """Whether the medians are further apart than :data:`APART`."""
        return max(self.ratio, 1 / self.ratio) > APART


def audit(table: MeasurementTable) -> list[Pair]:
    """Compare all pairs of a table; those furthest apart come first."""
    ratios: dict[tuple[str, str, str, str], list[Array]] = {}
    usable = table.trainable
    for block in table.specs:
        index = block.row_index[usable[block.row_index]]
        columns = (table.program_key, table.device.codes, table.protocol.codes, table.implementation.codes)
        _, place = np.unique(np.stack([c[index] for c in columns], axis=1), axis=0, return_inverse=True)
        launched = np.stack([table.source.codes[index], table.framework.codes[index]], axis=1)
        named, code = np.unique(launched, axis=0, return_inverse=True)
        medians = [
            _medians(place.reshape(-1), code.reshape(-1) == i, table.latency_s[index]) for i in range(len(named))
        ]
        names = [f"{table.source.names[s]} {table.framework.names[f]}".strip() for s, f in named.tolist()]
        form = " module" if block.flags.get("module") else ""
        for one, other in itertools.combinations(sorted(range(len(named)), key=names.__getitem__), 2):
            ratio = medians[other] / medians[one]
            label = (block.operator + form, types_label(block.dtype, block.flags), names[one], names[other])
            ratios.setdefault(label, []).append(ratio[np.isfinite(ratio)])
    pairs = []
    for label, parts in ratios.items():
        ratio = np.concatenate(parts)
        if len(ratio) >= MIN_PROGRAMS:
            low, middle, high = (float(x) for x in np.quantile(ratio, (0.1, 0.5, 0.9)))
            pairs.append(Pair(*label, len(ratio), middle, low, high))
    return sorted(pairs, key=lambda pair: -abs(np.log(pair.ratio)))


def _medians(place: Array, chosen: Array, latency_s: Array) -> Array:
    """Median latency of the chosen rows at each place; NaN where there are none."""
    out = np.full(int(place.max(initial=-1)) + 1, np.nan)
    order = np.lexsort((latency_s[chosen], place[chosen]))
    places, first, count = np.unique(place[chosen][order], return_index=True, return_counts=True)
    ordered = latency_s[chosen][order]
    out[places] = (ordered[first + (count - 1) // 2] + ordered[first + count // 2]) / 2
    return out


def main() -> int:
    """Print the pairs and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--public-data", type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    options = parser.parse_args()
    pairs = audit(load_public(options.public_data))
    print("| operator | types | first | second | programs | ratio | 10 % | 90 % | apart |")
    print("| --- | --- | --- | --- | ---: | ---: | ---: | ---: | --- |")
    for pair in pairs:
        figures = " | ".join(f"{x:.2f}" for x in (pair.ratio, pair.low, pair.high))
        print(f"| {' | '.join(pair[:4])} | {pair.programs:,} | {figures} | {'yes' if pair.is_apart else ''} |")
    rows = [{name: round(v, 3) if isinstance(v, float) else v for name, v in p._asdict().items()} for p in pairs]
    result = {"command": "python -m benchmarks.audit --public-data DIR", "pairs": rows}
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
