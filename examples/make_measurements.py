"""Make ``mi308x_gemm.csv``: 200 public measurements of a GPU that the shipped model was not trained on.

The rows are drawn at random from the GEMMs of an AMD MI308X in ROCm/aiter @ e4048607 (MIT licence), table
``ops_aiter_gemm.parquet`` of docs/data.md.

    python examples/make_measurements.py PUBLIC_DATA [FOLDER]
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import numpy as np

from cdmpp.data.load import load_table

DEVICE, ROWS, SEED = "mi308x", 200, 0


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser()
    parser.add_argument("public_data", type=Path, help="folder with ops_aiter_gemm.parquet")
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    table = load_table(arguments.public_data / "ops_aiter_gemm.parquet")
    usable = np.flatnonzero(table.device.is_(DEVICE) & table.trainable)
    chosen = np.sort(np.random.default_rng(SEED).choice(usable, ROWS, replace=False))
    rows = table.select(np.isin(np.arange(len(table)), chosen))
    programs = {int(row): block.spec(i).text() for block in rows.specs for i, row in enumerate(block.row_index)}
    with (arguments.folder / f"{DEVICE}_gemm.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("program", "latency_us", "device", "protocol", "framework"))
        for row in range(len(rows)):
            latency_us = f"{1e6 * rows.latency_s[row]:.6g}"
            writer.writerow((programs[row], latency_us, DEVICE, rows.protocol[row], rows.framework[row]))


if __name__ == "__main__":
    main()
