"""Ablations of the network and its training: one small fixed budget per run, several seeds for the important choices.

``python -m benchmarks.ablations --public-data DIR [STUDY ...]``. Every run trains the same number of steps on
NeuSight's operators and aiconfigurator's products without two devices (one of each source), and answers

* ``ns_zero_shot``, ``aic_zero_shot``: the held-out device from its specification, by the network alone (no
  peers), macro mean of products, convolutions and vector programs, and mean over products;
* ``ns_shapes``, ``aic_shapes``: *validation* shapes on devices that were trained on. No test row is read.

Results are added to ``benchmarks/results/ablations.json`` run by run; a run that is there is not repeated.
The cross-model study has rows of its own: measured CPU programs, the target being networks left out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.ablation_variants.labels import LabelObjective, fit_label, predict_log
from benchmarks.ablation_variants.network import NETWORKS
from cdmpp.model.nn.batch import Inputs
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import Dataset, MeasuredRows, make_dataset
from cdmpp.train.draw import target_rows
from cdmpp.train.loop import train
from cdmpp.train.reference.box_cox import BoxCox
from cdmpp.train.run import load_training_table
from cdmpp.train.step import Objective

RESULTS = Path(__file__).parent / "results" / "ablations.json"
STEPS, CPU_STEPS = 300, 400
#: The A100 and the L40S: their peers lie on both sides, and neither is a near twin of another.
HELD = ("a100-pcie-40gb", "a100-pcie-80gb", "l40s")
CPU_HELD = ("resnet18", "bert-tiny", "llama-decode", "vae-3d")

BASE: dict[str, Any] = {
    "name": "ablation",
    "data": {"public": False, "holdout_devices": HELD, "max_rows_per_source": 80_000},
    "network": {"head": "structured"},
    "optimiser": {
        "steps": STEPS,
        "batch_rows": 1024,
        "warmup_steps": 50,
        "average_decay": 0.98,
        "precision": "medium",
        "hide_device": 0.5,
        "virtual_hidden": 1.0,
        "virtual_known": 0.3,
        "threads": 1,
    },
}
CPU: dict[str, Any] = {
    "name": "ablation-cpu",
    "data": {"public": False},
    "network": {
        "width": 64,
        "feed_forward": 128,
        "head_width": 192,
        "head_layers": 2,
        "dropout": 0.1,
        "schedule": True,
    },
    "optimiser": {
        "steps": CPU_STEPS,
        "batch_rows": 256,
        "learning_rate": 1.5e-3,
        "weight_decay": 0.1,
        "warmup_steps": 60,
        "average_decay": 0.98,
        "hide_device": 0.1,
        "hide_framework": 0.0,
        "threads": 1,
    },
}

_DOMAIN = {"target_devices": HELD}
_NETWORKS = {"target_networks": CPU_HELD}
#: Study -> variant -> (changes to the base configuration, seeds); "variant" and "label" name code of
#: :mod:`benchmarks.ablation_variants`. "default" is the base, shared by all studies.
STUDIES: dict[str, dict[str, tuple[dict[str, Any], int]]] = {
    "default": {"default": ({}, 3)},
    "virtual devices": {
        "none": ({"optimiser": {"virtual_hidden": 0.0, "virtual_known": 0.0}}, 3),
        "hidden rows only": ({"optimiser": {"virtual_known": 0.0}}, 1),
    },
    "domain loss": {
        "CMD, weight 0.1": ({"domain": {"loss": "cmd", "weight": 0.1, **_DOMAIN}}, 3),
        "CMD, weight 1": ({"domain": {"loss": "cmd", "weight": 1.0, **_DOMAIN}}, 1),
        "MMD, weight 0.1": ({"domain": {"loss": "mmd", "weight": 0.1, **_DOMAIN}}, 1),
        "CORAL, weight 0.1": ({"domain": {"loss": "coral", "weight": 0.1, **_DOMAIN}}, 1),
    },
    "positions": {
        "none": ({"variant": "no positions"}, 1),
        "published": ({"network": {"positions": "published"}}, 1),
        "structural": ({"variant": "structural"}, 1),
    },
    "head": {"ratio": ({"network": {"head": "ratio"}}, 1)},
    "label": {
        "latency": ({"label": "latency", "network": {"head": "ratio"}}, 1),
        "box-cox": ({"label": "box-cox", "network": {"head": "ratio"}}, 1),
    },
    "device inputs": {"absolute": ({"variant": "absolute"}, 1)},
    "source devices": {
        "2 of each source fewer": ({"data": {"holdout_devices": (*HELD, "p4", "p100-pcie-16gb", "b300", "gb300")}}, 1)
    },
    "size": {
        "half": ({"network": {"width": 48, "feed_forward": 96, "head_width": 192, "head_layers": 2}}, 1),
        "double": ({"network": {"width": 144, "feed_forward": 288, "head_width": 768}}, 1),
    },
    "cross-model domain loss": {
        "none": ({"domain": {"loss": "cmd", "weight": 0.0, **_NETWORKS}}, 3),
        "CMD, weight 0.1": ({"domain": {"loss": "cmd", "weight": 0.1, **_NETWORKS}}, 3),
        "CMD, weight 1": ({"domain": {"loss": "cmd", "weight": 1.0, **_NETWORKS}}, 1),
    },
}


def merged(base: dict[str, Any], change: dict[str, Any]) -> dict[str, Any]:
    """A configuration with some fields changed, section by section."""
    out = dict(base)
    for key, value in change.items():
        if key not in ("variant", "label"):  # not part of the configuration
            out[key] = {**base.get(key, {}), **value} if isinstance(value, dict) else value
    return out


def mape(predicted: Any, rows: MeasuredRows) -> float:
    """Mean |predicted / measured - 1| of log latencies."""
    return float(np.abs(np.expm1(np.clip(predicted - rows.log_latency, -9.0, 9.0))).mean())


def sampled(index: Any, most: int = 6000) -> Any:
    """A seeded sample of rows, in order."""
    rng = np.random.default_rng(0)
    return np.sort(rng.choice(index, min(len(index), most), replace=False))


def figures(dataset: Dataset, config: TrainConfig, network: LatencyNetwork, label: BoxCox | None) -> dict[str, float]:
    """Errors of a run, as described in the module's docstring."""
    inputs, rows = Inputs(dataset.store, dataset.device_matrix), dataset.rows
    held = np.isin(rows.device, [i for i, d in enumerate(dataset.devices) if d.name in HELD])
    left_out = [i for i, d in enumerate(dataset.devices) if d.name in config.data.holdout_devices]
    known = ~np.isin(rows.device, left_out)
    products = [dataset.ops.index(op) for op in ("linear", "bmm") if op in dataset.ops]
    family = np.where(np.isin(rows.op, products), 0, np.where(rows.op == dataset.ops.index("conv2d"), 1, 2))
    scores: dict[str, float] = {}
    for name, source in (("ns", "neusight"), ("aic", "aiconfigurator_gemm")):
        of = (rows.source == dataset.sources.index(source)) & rows.report
        errors = []
        for kind in range(3 if name == "ns" else 1):
            chosen = np.flatnonzero(of & held & (rows.part != 2) & (family == kind))
            part = rows.take(sampled(chosen))
            errors.append(mape(predict_log(network, inputs, part, label, known=False), part))
        scores[f"{name}_zero_shot"] = float(np.mean(errors))
        part = rows.take(sampled(np.flatnonzero(of & known & (rows.part == 1))))
        scores[f"{name}_shapes"] = mape(predict_log(network, inputs, part, label), part)
    return scores


def run(dataset: Dataset, config: TrainConfig, change: dict[str, Any], cross_model: bool) -> dict[str, Any]:
    """Train one variant and return its figures and seconds."""
    started = time.monotonic()
    name = change.get("label")
    label = fit_label(dataset, config, name) if name else None
    with tempfile.TemporaryDirectory() as folder:
        network, _ = train(
            dataset,
            config,
            Path(folder),
            make_network=NETWORKS[change["variant"]] if "variant" in change else LatencyNetwork,
            make_objective=partial(LabelObjective, name=name) if name else Objective,
        )
    seconds = round(time.monotonic() - started, 1)
    if not cross_model:
        return {"seconds": seconds, "figures": figures(dataset, config, network, label)}
    inputs = Inputs(dataset.store, dataset.device_matrix)
    part = dataset.rows.take(target_rows(dataset, config))
    error = mape(predict_log(network, inputs, part, label), part)
    return {"seconds": seconds, "figures": {"unseen_networks": error}}


def main() -> None:
    """Run what is not in the results yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("studies", nargs="*", default=[])
    parser.add_argument("--public-data", required=True, type=Path)
    options = parser.parse_args()
    names = options.studies or list(STUDIES)
    datasets: dict[str, Dataset] = {}
    for study in names:
        cross_model = study == "cross-model domain loss"
        for variant, (change, seeds) in STUDIES[study].items():
            base = CPU if cross_model else BASE
            for seed in range(seeds):
                if _done(study, variant, seed):
                    continue
                config = TrainConfig.model_validate(merged(base, {**change, "seed": seed}))
                key = f"{cross_model} {config.data.holdout_devices}"
                if key not in datasets:
                    datasets.clear()
                    datasets[key] = _dataset(config, options.public_data, cross_model)
                result = run(datasets[key], config, change, cross_model)
                _add(study, variant, seed, result)
                print(study, variant, seed, result, flush=True)


def _dataset(config: TrainConfig, public: Path, cross_model: bool) -> Dataset:
    files = ["data/cdmpp-measured"]
    if not cross_model:
        files = [str(public / f) for f in ("ops_neusight.parquet", "ops_aiconfigurator_gemm_bf16.parquet")]
    table = load_training_table(config, None, files)
    return make_dataset(table, config.data, schedule=config.network.schedule)


def _read() -> dict[str, Any]:
    if RESULTS.exists():
        results: dict[str, Any] = json.loads(RESULTS.read_text())
        return results
    return {"steps": STEPS, "batch_rows": 1024, "held_out": HELD, "studies": []}


def _entry(results: dict[str, Any], study: str, variant: str) -> dict[str, Any] | None:
    for entry in results["studies"]:
        if (entry["study"], entry["variant"]) == (study, variant):
            result: dict[str, Any] = entry
            return result
    return None


def _done(study: str, variant: str, seed: int) -> bool:
    entry = _entry(_read(), study, variant)
    return entry is not None and any(s["seed"] == seed for s in entry["seeds"])


def _add(study: str, variant: str, seed: int, result: dict[str, Any]) -> None:
    results = _read()
    entry = _entry(results, study, variant)
    if entry is None:
        entry = {"study": study, "variant": variant, "default": variant == "default", "seeds": []}
        results["studies"].append(entry)
    entry["seeds"].append({"seed": seed, **result})
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
