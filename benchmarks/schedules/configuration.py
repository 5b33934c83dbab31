"""Error on a configuration without training rows, after some of its programs were measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.schedules.methods import Contest, Predict, figures
from benchmarks.schedules.parts import Scheduled
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.trained import save_artifact
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.train.adaptation.adapt import adapt, answers_after
from cdmpp.train.adaptation.records import device_records, survey
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.finish import calibrate, fit_domain

MEASURED, SEEDS = 40, (0, 1, 2)


def after_measurements(
    data: Scheduled, contest: Contest, network: LatencyNetwork, baselines: Mapping[str, Predict], folder: Path
) -> dict[str, dict[str, Any]]:
    """Figures of each method on each held-out configuration before and after :data:`MEASURED` measurements.

    ``cdmpp adapt`` chooses the programs by KMeans and adapts the network. Each baseline is multiplied by one factor:
    the exponential of its median log error on the same measured programs. Figures are of the other programs, means
    over :data:`SEEDS`.

    Parameters
    ----------
    data : Scheduled
    contest : Contest
        Of a split that holds configurations out.
    network : LatencyNetwork
        Trained on the split.
    baselines : mapping of str to callable
        Log latency of rows, by name of the method.
    folder : Path
        Model folder to write.

    Returns
    -------
    dict
        Configuration -> method -> ``before``, ``after``.
    """
    dataset, held = contest.dataset, contest.split.held_devices
    save_artifact(
        folder,
        network,
        fit_domain(dataset, contest.train, contest.config.seed),
        name=contest.config.name,
        devices=["" if d.name in held else d.name for d in dataset.devices],
        calibration=calibrate(network, contest.inputs, dataset, contest.config),
        device_specs=dataset.devices,
        details={"config": contest.config.model_dump(mode="json")},
    )
    artifact = load_artifact(folder)
    pipeline, cache = InferencePipeline(artifact), FeatureCache(schedule=artifact.reads_schedules)
    test = next(iter(contest.split.tests.values()))
    result: dict[str, dict[str, Any]] = {}
    for name in held:
        code = next(i for i, d in enumerate(dataset.devices) if d.name == name)
        index = test[dataset.rows.device[test] == code]
        records = device_records(data.table.select(index), dataset.devices[code], artifact)
        known = survey(pipeline, records, cache)
        position = records.origin[known.rows]
        per_seed: dict[str, list[tuple[dict[str, Any], dict[str, Any]]]] = {}
        for seed in SEEDS:
            made = adapt(artifact, records, k=MEASURED, seed=seed, cache=cache, known=known)
            chosen = np.isin(position, made.report["selected"])
            rest = dataset.rows.take(index[position[~chosen]])
            measured = dataset.rows.take(index[position[chosen]])
            query = known.query[~chosen]
            pairs = {"cdmpp": (known.point[query], answers_after(made.artifact, known)[0][query])}
            for method, predict in baselines.items():
                factor = float(np.median(measured.log_latency - predict(measured)))
                pairs[method] = (predict(rest), predict(rest) + factor)
            for method, (before, after) in pairs.items():
                entry = tuple(figures(dataset, rest, log) for log in (before, after))
                per_seed.setdefault(method, []).append(entry)  # type: ignore[arg-type]
        result[name] = {
            method: {key: _mean([pair[i] for pair in entries]) for i, key in enumerate(("before", "after"))}
            for method, entries in per_seed.items()
        }
    return result


def _mean(entries: list[dict[str, Any]]) -> dict[str, Any]:
    """Mean of each figure over seeds; None where a seed has none."""
    keys = [key for key in entries[0] if key != "devices"]
    values = {key: [entry[key] for entry in entries] for key in keys}
    means = {key: None if None in column else float(np.mean(column)) for key, column in values.items()}
    # Counts are the same for every seed.
    return means | {key: entries[0][key] for key in ("n", "ranked_groups")}
