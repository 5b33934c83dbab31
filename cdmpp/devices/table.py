"""The table of known devices, ``table.csv``: one row per board, units in the column names.

The table keeps the units of the data sheets (MHz, GB, Tflop/s) so that a row can be compared with
its source by eye; they become base units here and nowhere else. An empty cell is a missing figure.
``source`` names the document of a row and ``source_of`` the figures that come from elsewhere;
``sources.csv`` lists the documents.
"""

from __future__ import annotations

import csv
import io
from functools import cache
from importlib.resources import files

from cdmpp.devices.spec import DeviceSpec

#: Column of the table -> field of DeviceSpec and factor to base units. Memory sizes are the sheet's
#: nominal gigabytes (10^9); cache sizes are binary, as every vendor counts them.
COLUMNS: dict[str, tuple[str, float]] = {
    "clock_mhz": ("clock_hz", 1e6),
    "memory_gb": ("memory_bytes", 1e9),
    "mem_bandwidth_gb_per_s": ("mem_bandwidth_bytes_per_s", 1e9),
    "peak_fp32_tflops": ("peak_flops_fp32", 1e12),
    "peak_fp32_matrix_tflops": ("peak_flops_fp32_matrix", 1e12),
    "peak_fp16_matrix_tflops": ("peak_flops_fp16_matrix", 1e12),
    "peak_bf16_matrix_tflops": ("peak_flops_bf16_matrix", 1e12),
    "peak_int8_tops": ("peak_ops_int8", 1e12),
    "peak_fp64_tflops": ("peak_flops_fp64", 1e12),
    "peak_tf32_matrix_tflops": ("peak_flops_tf32_matrix", 1e12),
    "peak_fp8_matrix_tflops": ("peak_flops_fp8_matrix", 1e12),
    "peak_fp4_matrix_tflops": ("peak_flops_fp4_matrix", 1e12),
    "l2_mib": ("l2_bytes", float(2**20)),
    "l2_bandwidth_gb_per_s": ("l2_bandwidth_bytes_per_s", 1e9),
    "sustained_clock_mhz": ("sustained_clock_hz", 1e6),
    "matrix_flops_per_cycle_per_unit": ("matrix_flops_per_cycle_per_unit", 1.0),
    "tdp_w": ("tdp_w", 1.0),
}


def _read(file_name: str) -> list[dict[str, str]]:
    text = files("cdmpp.devices").joinpath(file_name).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def sources() -> dict[str, str]:
    """Documents of the table: key to title."""
    return {row["source"]: row["document"] for row in _read("sources.csv")}


def _cite(row: dict[str, str], documents: dict[str, str]) -> str:
    """One line for a reader: the row's document, then the figures that come from elsewhere."""
    parts = [documents[row["source"]]]
    columns: dict[str, list[str]] = {}
    for item in filter(None, row["source_of"].split(";")):
        column, key = item.split("=")
        columns.setdefault(key, []).append(column)
    parts += [f"{', '.join(names)}: {documents[key]}" for key, names in columns.items()]
    if row["note"]:
        parts.append(f"note: {row['note']}")
    return "; ".join(parts)


@cache
def table() -> dict[str, DeviceSpec]:
    """All known devices by name, in the order of the table (by vendor and generation)."""
    documents = sources()
    devices = {}
    for row in _read("table.csv"):
        figures = {
            # 15 digits: 2039 * 1e9 is exact, 12.28 * 1e12 would be 12279999999999.998
            field: float(f"{float(row[column]) * factor:.15g}") if row[column] else None
            for column, (field, factor) in COLUMNS.items()
        }
        devices[row["name"]] = DeviceSpec.model_validate(
            {
                "name": row["name"],
                "vendor": row["vendor"],
                "arch": row["arch"],
                "kind": row["kind"],
                "compute_units": int(row["compute_units"]),
                "cores_per_unit": int(row["cores_per_unit"]),
                **figures,
                "link": row["link"] or None,
                **{name: int(row[name]) if row[name] else None for name in ("ranks_per_node", "nvlink_domain")},
                "status": row["status"],
                "source": _cite(row, documents),
                "aliases": tuple(row["aliases"].split("|")),
            }
        )
    return devices
