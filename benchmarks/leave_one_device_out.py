"""Devices that training never saw, near twins left out together: before and after k measurements.

``python -m benchmarks.leave_one_device_out --public-data DIR [--models runs] [GROUP ...]``: for each group
its network is trained (or read where ``--models`` has it), then tested on the rows of the devices that it
was trained without, and adapted to each of them. The results of a group go into
``benchmarks/results/leave_one_device_out.json`` as they come and stay until it is run again. Fractions, never
per cent::

    {"format": 1, "command", "rows_per_table",
     "groups": {GROUP: {
       "model_id", "held_out": [device], "train": {"steps", "train_rows", "train_seconds"},
       "known": METRICS,            known devices' validation rows
       "domain": {"off", "auc_held_out", "auc_pooled", "n_held_out", "n_known", "off_held_out", "off_known"},
       "tables": [{
         "device", "source", "available", "rows",        rows: a seeded sample of what is available
         "specification": FIGURES,  no measurement, data sheet only
         "coverage_curve": {"nominal": [share], "empirical": [share]},      of the same
         "ceilings": FIGURES|null, "sustained": {...}|null,   with rates from its training-part rows
         "baselines": {"roofline"|"mean"|"xgboost"|"utilisation": FIGURES},
         "adapted": [{"k", "sampler", "seed", "before": FIGURES, "after": FIGURES,
                      "weight", "tuned", "width"}]
       }], "seconds"}}}

    FIGURES = {"overall": METRICS, "families": {family: METRICS}, "macro": mean of the families' "mape"}
    METRICS = as cdmpp.train.evaluation.metrics.measure

Of NeuSight's rows those count that its authors keep (``neusight_filter``). ``auc``: how well the domain score
ranks rows that are ``off`` by more than 30 %, among the held-out rows and with the known devices' validation
rows beside them. The k measurements are chosen without their latencies; both figures of an adaptation are on
the rows that were not chosen.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.report.results import GROUPS
from benchmarks.unseen_devices.group import HeldOutGroup
from benchmarks.unseen_devices.study import ROWS_PER_TABLE, Study, network_of
from cdmpp.train.config import TrainConfig, load_config
from cdmpp.utils.writing import write_text

RESULTS = Path("benchmarks/results/leave_one_device_out.json")
#: The last run of models/base took 4,211.
STEPS = 2500


def config_of(name: str, base: TrainConfig) -> TrainConfig:
    """The configuration of the shipped model without the devices of a group, from random weights."""
    # What is asked of it is a device that it does not know.
    unseen = {"hide_device": 0.5, "virtual_known": 0.3}
    short = {"seconds": None, "steps": STEPS, "start_from": None, "start_has_seen": (), "average_decay": 0.995}
    return base.model_copy(
        update={
            "name": f"leave-out-{name}",
            "data": base.data.model_copy(update={"holdout_devices": GROUPS[name]}),
            "optimiser": replace(base.optimiser, **unseen, **short),
            "finish": base.finish.model_copy(update={"xgboost_rows": 100_000, "boosters": False}),
        }
    )


def merged(path: Path, name: str, entry: dict[str, Any]) -> dict[str, Any]:
    """The results in a file with those of one group put in."""
    content = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    groups = content.get("groups", {}) | {name: entry}
    return {
        "format": 1,
        "command": "python -m benchmarks.leave_one_device_out --public-data DIR",
        "rows_per_table": ROWS_PER_TABLE,
        "groups": {key: groups[key] for key in GROUPS if key in groups},
    }


def main() -> None:
    """Measure the groups and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(GROUPS))
    parser.add_argument("--public-data")
    parser.add_argument("--models", type=Path, default=Path("runs"), help="folder of the groups' networks")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    wanted = options.groups or list(GROUPS)
    unknown = sorted(set(wanted) - set(GROUPS))
    if unknown:
        parser.error(f"no group is called {unknown[0]!r}; there are: {', '.join(GROUPS)}")
    study: Study | None = None
    for name in wanted:
        config = config_of(name, load_config("configs/base.toml"))
        study = study or Study.load(config, options.public_data)
        dataset = study.without(config.data.holdout_devices)
        artifact = network_of(config, dataset, options.models / config.name)
        options.out.parent.mkdir(parents=True, exist_ok=True)
        for entry in HeldOutGroup(study, config, dataset, artifact).measure():
            content = merged(options.out, name, entry)
            write_text(options.out, json.dumps(content, indent=1) + "\n")
        print(f"{name}: {entry['seconds']} s, in {options.out}", flush=True)


if __name__ == "__main__":
    main()
