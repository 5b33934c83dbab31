"""Report on devices left out of training on the tables of quantised products, experts and latent attention."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from benchmarks.report.known import baseline_columns, baseline_header, title
from benchmarks.report.markdown import ERROR_COLUMNS, error_cells, folded, percent, table
from benchmarks.report.results import Results, not_measured

#: Operators of a source and device with fewer rows are in their table only.
_LEAST = 30


def left_out(results: Results) -> str:
    """One table by source, one by source and device, and a folded one by operator."""
    result = results.get("left_out")
    if result is None:
        return not_measured("left_out")
    entries = sorted(result["tables"], key=lambda entry: (title(entry["source"]), entry["device"]))
    groups = [entry for entry in result["groups"] if entry["n"] >= _LEAST]
    groups.sort(key=lambda entry: (title(entry["source"]), entry["device"], entry["op"]))
    most = result["rows_per_table"]
    about = f"Devices left out: {', '.join(result['held_out'])}."
    if most:
        about += f" At most {most:,} rows of each source and device, drawn with a seed."
    by_source = {name: m for name, m in result["by_source"].items() if name in {e["source"] for e in entries}}
    blocks = [
        about,
        _table(("source",), ([title(name)] for name in by_source), list(by_source.values())),
        _table(("source", "device left out"), ([title(e["source"]), e["device"]] for e in entries), entries),
        folded(
            "Every operator",
            _table(
                ("source", "device left out", "operator"),
                ([title(e["source"]), e["device"], e["op"]] for e in groups),
                groups,
            ),
        ),
    ]
    return "\n\n".join(blocks)


def _table(header: tuple[str, ...], labels: Iterable[list[str]], entries: list[Mapping[str, Any]]) -> str:
    names = baseline_columns(entries)
    rows = (
        [*label, *error_cells(m), *(percent(m["baselines"].get(name, {}).get("mape")) for name in names)]
        for label, m in zip(labels, entries, strict=True)
    )
    return table((*header, *ERROR_COLUMNS, *baseline_header(names)), rows, left=len(header))
