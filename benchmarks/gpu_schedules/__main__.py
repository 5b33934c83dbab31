"""Leave one GPU out on brute-forced schedules: cdmpp beside XGBoost on raw parameters and a roofline.

``python -m benchmarks.gpu_schedules --public-data DIR [--kernels gemm,pnpoly] [--features FOLDER]``. The features of
the programs are computed once and kept in ``--features``. ``--thin N`` takes a seeded sample of N configurations of
each kernel. Of the measured configurations of the left-out GPU some are chosen by KMeans over our columns, the others
are those that are then predicted best, in two rounds; XGBoost measures what it predicts best itself. A line of the
table has KMeans alone. Every choice (blend, scales of the residuals, use of the measurements, share of configurations
that are predicted best) is made on GPUs that are not left out.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_schedules.pool import Pool
from benchmarks.gpu_schedules.programs import program_features
from benchmarks.gpu_schedules.study import Study
from benchmarks.gpu_schedules.tables import KERNELS, TWINS, load_kernel
from benchmarks.report.results import rounded, write_result

OUT = Path("benchmarks/results/gpu_schedules.json")


def means(devices: dict[str, Any]) -> dict[str, Any]:
    """Mean of each figure over all kernels and left-out GPUs, by method and number of measurements."""
    out: dict[str, Any] = {}
    first = next(iter(devices.values()))["methods"]
    for method, by_count in first.items():
        for count in by_count:
            cells = [f for d in devices.values() for f in d["methods"][method][count].values()]
            names = ("tau", "top1", "top5", "mape")
            out.setdefault(method, {})[count] = {name: float(np.mean([c[name] for c in cells])) for name in names}
    return out


def main() -> None:
    """Run the study and write its result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--public-data", type=Path, required=True, help="folder of the public tables")
    parser.add_argument("--kernels", default=",".join(KERNELS), help=f"of {', '.join(KERNELS)}")
    parser.add_argument("--features", type=Path, default=Path("runs/gpu-schedules"), help="folder of the features")
    parser.add_argument("--measurements", type=int, default=40, help="on the left-out GPU")
    parser.add_argument("--thin", type=int, help="configurations of each kernel")
    parser.add_argument("--devices", help="a,b: GPUs to leave out; by default each in turn")
    parser.add_argument("--out", type=Path, default=OUT, help="result file")
    options = parser.parse_args()
    names = options.kernels.split(",")
    if unknown := sorted(set(names) - set(KERNELS)):
        raise SystemExit(f"--kernels: {', '.join(unknown)} is not one of {', '.join(KERNELS)}")
    tables = [load_kernel(name, options.public_data, options.thin) for name in names]
    pool = Pool(tables, [program_features(table, options.features, print) for table in tables])
    study = Study(pool, options.measurements, print)
    wanted = options.devices.split(",") if options.devices else pool.devices
    if unknown := sorted(set(wanted) - set(pool.devices)):
        raise SystemExit(f"--devices: {', '.join(unknown)} is not one of {', '.join(pool.devices)}")
    found = {name: study.result(pool.devices.index(name)) for name in wanted}
    about = {
        "command": "python -m benchmarks.gpu_schedules --public-data DIR",
        "measurements": options.measurements,
        "thin": options.thin,
        "twins": [list(pair) for pair in TWINS],
        "kernels": {
            t.name: {"configurations": len(t.configurations), "left_out": t.left_out, "gpus": len(t.devices)}
            for t in tables
        },
    }
    result = {**about, "means": rounded(means(found)), "devices": rounded(found)}
    write_result(options.out, result)
    for method, by_count in result["means"].items():
        for count, m in by_count.items():
            print(f"{method}, {count} measurements: " + ", ".join(f"{k} {v:.3f}" for k, v in m.items()))


if __name__ == "__main__":
    main()
