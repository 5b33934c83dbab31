"""Error on a configuration without training rows, after some of its programs were measured."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.schedules.methods import Contest, Predict, figures
from benchmarks.schedules.parts import Scheduled
from cdmpp.model.adapter import centre_and_spread
from cdmpp.model.artifact.load import load_artifact
from cdmpp.model.artifact.trained import save_artifact
from cdmpp.model.inference.pipeline import InferencePipeline
from cdmpp.model.nn.network import LatencyNetwork
from cdmpp.train.adaptation.adapt import MeasuredQueries, adapt, answers_after, fit_process
from cdmpp.train.adaptation.records import device_records, survey
from cdmpp.train.evaluation.cache import FeatureCache
from cdmpp.train.finish import calibrate, fit_domain

MEASURED, SEEDS = 40, (0, 1, 2)


def after_measurements(
    data: Scheduled, contest: Contest, network: LatencyNetwork, baselines: Mapping[str, Predict], folder: Path
) -> dict[str, dict[str, Any]]:
    """Figures of each method on each held-out configuration before and after :data:`MEASURED` measurements.

    ``cdmpp adapt`` chooses the programs by KMeans and adapts the network, which was trained on the split of ``contest``
    that holds configurations out; ``folder`` is the model folder to write. A Gaussian process with the same inputs is
    fitted to the residuals of each of ``baselines`` (log latency of rows, by name of the method) on the same measured
    programs. Figures are of the other programs, means over :data:`SEEDS`: configuration -> method -> ``before``,
    ``after``.
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
            near, far = known.query[chosen], known.query[~chosen]
            pairs = {"cdmpp": (known.point[far], answers_after(made.artifact, known)[0][far])}
            for method, predict in baselines.items():
                queries = known.levels[near], known.features.take(near)
                fitted = fit_process(MeasuredQueries(measured.log_latency, predict(measured), *queries))
                mean, variance = fitted.process.mean_and_variance(known.features.take(far))
                before, levels = predict(rest), known.levels[far]
                after = centre_and_spread(fitted.process, before, levels, mean, variance, fitted.weight)[0]
                pairs[method] = (before, after)
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
