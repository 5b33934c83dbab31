"""Devices left out of training on the tables of quantised products, experts, latent attention and AMD libraries.

``python -m benchmarks.left_out --public-data DIR [--model FOLDER]`` trains ``configs/leave-out-hopper-cdna.toml`` into
FOLDER if there is no model, and stores its errors on the devices that it was trained without in
``benchmarks/results/left_out_new_tables.json``. Without ``--public-data`` FOLDER must hold the trained model.

The result has ``command``, ``config``, ``model_id``, ``held_out`` (names of devices), ``rows_per_table`` (the largest
sample of a source and device, null for all rows), ``train`` (steps, rows, seconds), and of the error table
(:func:`cdmpp.train.finish.error_table`) ``overall``, ``by_source``, ``tables`` (source and device) and ``groups``
(source, device and operator), each with the baselines :data:`BASELINES`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from benchmarks.report.results import rounded, write_result
from cdmpp.errors import CdmppError, DataError
from cdmpp.model.artifact.folder import ERROR_TABLE, MANIFEST
from cdmpp.train.config import load_config
from cdmpp.train.run import train_model

CONFIG = Path("configs/leave-out-hopper-cdna.toml")
MODEL = Path("runs/leave-out-hopper-cdna/model")
OUT = Path("benchmarks/results/left_out_new_tables.json")
COMMAND = "python -m benchmarks.left_out --public-data DIR"
#: Baselines that the report compares with.
BASELINES = ("xgboost", "roofline")
#: Parts of an error table that are stored.
PARTS = ("overall", "by_source", "tables", "groups")


def result_of(folder: Path) -> dict[str, Any]:
    """Errors of a trained model on the devices that its configuration held out.

    Raises
    ------
    DataError
        A file is missing or invalid, no device was held out, or a baseline of :data:`BASELINES` is absent.
    """
    manifest, errors = _read(folder / MANIFEST), _read(folder / ERROR_TABLE)
    held = errors.get("held_out_devices")
    if not held:
        raise DataError(
            f"{folder / ERROR_TABLE} has no errors of held-out devices", hint=f"train the model with {CONFIG}"
        )
    absent = [name for name in PARTS if name not in held]
    absent += [name for name in BASELINES if name not in held.get("overall", {}).get("baselines", {})]
    if absent:
        raise DataError(
            f"the errors of held-out devices in {folder / ERROR_TABLE} lack {', '.join(absent)}",
            hint=f"train the model with {CONFIG}: finish.baselines names {' and '.join(BASELINES)}",
        )
    config, train = manifest["config"], manifest["train"]
    return {
        "command": COMMAND,
        "config": str(CONFIG),
        "model_id": manifest["model_id"],
        "held_out": list(config["data"]["holdout_devices"]),
        "rows_per_table": config["finish"].get("held_out_rows"),
        "train": {name: train[name] for name in ("steps", "train_rows", "train_seconds")},
        **{name: rounded(held[name]) for name in PARTS},
    }


def _read(path: Path) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = f"pass --public-data DIR to train {CONFIG}, or --model FOLDER with its model"
        raise DataError(f"cannot read {path}: {error.strerror}", hint=hint) from None
    except ValueError as error:
        raise DataError(f"{path} is not valid JSON: {error}", hint="train the model again") from None
    return content


def main() -> None:
    """Train if necessary, then write the result."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.left_out", description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, default=MODEL, help=f"model folder (default: {MODEL})")
    parser.add_argument("--public-data", help="folder of the public tables, to train the model if it is missing")
    parser.add_argument("--out", type=Path, default=OUT, help=f"result file (default: {OUT})")
    options = parser.parse_args()
    try:
        if options.public_data and not (options.model / MANIFEST).is_file():
            # An interrupted run is continued.
            run = options.model.with_name(options.model.name + ".run")
            train_model(
                load_config(CONFIG),
                out=options.model,
                run=run,
                public_data=options.public_data,
                progress=lambda step, steps, m: print(f"step {step:,} of {steps:,}, loss {m['loss']}", flush=True),
            )
        write_result(options.out, result_of(options.model))
    except CdmppError as error:
        raise SystemExit(f"error: {error.message}\nhint: {error.hint}") from None
    print(options.out)


if __name__ == "__main__":
    main()
