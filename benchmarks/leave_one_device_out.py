"""Train without a device (and its near twins), then predict it from its specification alone.

``python -m benchmarks.leave_one_device_out --public-data DIR [CONFIG ...]``: by default the two
configurations ``configs/leave-out-*.toml``. Prints, per source and operator of the held-out device, the
model beside XGBoost and the roofline on the same rows, and the width factor that an 80 % interval needed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.tables import error_rows
from cdmpp.training.config import load_config
from cdmpp.training.run import train_model


def main() -> None:
    """Train and print one section per configuration."""
    parser = argparse.ArgumentParser(description=__doc__)
    shipped = sorted(map(str, Path("configs").glob("leave-out-*.toml")))
    parser.add_argument("configs", nargs="*", default=shipped)
    parser.add_argument("--public-data")
    parser.add_argument("--runs", default="runs", help="for checkpoints and models; a run is continued")
    options = parser.parse_args()
    for path in options.configs:
        config = load_config(path)
        run = Path(options.runs) / config.name
        result = train_model(
            config, out=run / "model", run=run, public_data=options.public_data,
            progress=lambda step, steps, m: print(f"\r{step}/{steps} {m['loss']}", end="", flush=True),
        )  # fmt: skip
        held = result["metrics"]["held_out_devices"]
        seconds = result["train"]["train_seconds"]
        rows = result["train"]["train_rows"]
        print(f"\n\n### {config.name}: {rows:,} training rows, {seconds / 60:.1f} minutes\n")
        width = held["interval_factor"] / result["calibration"]["in"]
        print(f"80 % of these rows need intervals {width:.2f} times as wide as on known devices.\n")
        print(error_rows({**held["by_source"], "all rows": held["overall"]}))
        print()
        groups = {f"{g['device']}, {g['source']}, {g['op']}": g for g in held["groups"] if g["n"] >= 100}
        print(error_rows(groups))


if __name__ == "__main__":
    main()
