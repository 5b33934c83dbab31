"""Cross-source audit: programs that several sources or serving engines measured on one device.

``python -m benchmarks.audit --public-data DIR`` compares rows of the same program, device, protocol and implementation
that training uses, for each pair of (source, framework) with at least 20 common programs. It prints the ratio of their
latencies (median, 10 % and 90 % quantile) by operator and device, and writes ``benchmarks/results/audit.json``.
Pairs whose median is beyond 1.5x are marked; docs/data.md explains them.
"""

from __future__ import annotations

import argparse
import json
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.importers import PROGRAM_SOURCES
from cdmpp.data.load import load_public
from cdmpp.data.table import MeasurementTable
from cdmpp.programs.query_options import SERVING_ENGINES

RESULT = Path(__file__).parent / "results" / "audit.json"
FEWEST_PAIRS = 20
FAR = 1.5


def audit(table: MeasurementTable) -> list[dict[str, Any]]:
    """Compare the groups of rows of one operator, type, device, protocol and implementation.

    Returns
    -------
    list of dict
        One for each pair of groups that share at least :data:`FEWEST_PAIRS` programs: ``first``, ``second`` (source and
        framework), ``pairs``, ``median``, ``p10``, ``p90`` (latency of the second over that of the first), ``far``.
    """
    named = table.framework.is_in(("", *SERVING_ENGINES, "pytorch", "vendor", "deepgemm"))
    groups: dict[tuple[str, ...], dict[str, tuple[Any, Any]]] = {}
    for block in table.specs:
        rows = block.row_index[(table.trainable & named)[block.row_index]]
        columns = [table.device, table.protocol, table.implementation, table.source, table.framework]
        codes = np.stack([column.codes[rows] for column in columns], axis=1)
        distinct, inverse = np.unique(codes, axis=0, return_inverse=True)
        for number, row in enumerate(distinct.tolist()):
            names: list[str] = [column.names[code] for column, code in zip(columns, row, strict=True)]
            device, protocol, implementation, source, framework = names
            chosen = rows[inverse.reshape(-1) == number]
            key, at = np.unique(table.program_key[chosen], return_index=True)
            flags = sorted(f"{name}={value}" for name, value in block.given_flags.items())
            where = (block.operator, block.dtype, *flags, device, protocol, implementation)
            groups.setdefault(where, {})[f"{source} {framework}"] = (key, table.latency_s[chosen][at])
    results = []
    for where, members in groups.items():
        for first, second in combinations(sorted(members), 2):
            _, a, b = np.intersect1d(members[first][0], members[second][0], return_indices=True)
            if len(a) < FEWEST_PAIRS:
                continue
            ratio = members[second][1][b] / members[first][1][a]
            low, middle, high = (float(f"{q:.4g}") for q in np.quantile(ratio, (0.1, 0.5, 0.9)))
            results.append(
                {
                    "operator": " ".join(where[:2]),
                    "types": _types(where),
                    "device": where[-3],
                    "protocol": where[-2],
                    "implementation": where[-1],
                    "first": first,
                    "second": second,
                    "pairs": len(a),
                    "median": middle,
                    "p10": low,
                    "p90": high,
                    "far": not 1 / FAR <= middle <= FAR,
                }
            )
    return results


def _types(where: tuple[str, ...]) -> str:
    """The structural fields of a group that are given, as one text."""
    return " ".join(where[2:-3])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--public-data", help="folder of the public tables; default: the environment variable")
    parser.add_argument("--out", type=Path, default=RESULT, help="result file")
    options = parser.parse_args()
    results = audit(load_public(options.public_data, PROGRAM_SOURCES))
    for r in results:
        print(
            f"{'FAR ' if r['far'] else '    '}{r['operator']} {r['types']} {r['device']} {r['first']} -> {r['second']}"
            f": {r['pairs']} pairs, {r['median']} ({r['p10']} to {r['p90']})"
        )
    print(f"{len(results)} comparisons, {sum(r['far'] for r in results)} beyond {FAR}x")
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
