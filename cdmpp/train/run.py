"""One training run, from configuration to model folder (``cdmpp train``); or to the folder that another machine trains
(:mod:`cdmpp.train.loop`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file

from cdmpp.data.importers import PROGRAM_SOURCES
from cdmpp.data.load import load_public, load_table
from cdmpp.data.pool import POOL, pool_of
from cdmpp.data.split_file import sealed_networks, without_sealed
from cdmpp.data.splits import TRAIN
from cdmpp.data.table import MeasurementTable, concat
from cdmpp.errors import DataError
from cdmpp.model.artifact.folder import BOOSTERS, ERROR_TABLE
from cdmpp.model.artifact.trained import save_artifact
from cdmpp.model.domain.peers import Peers
from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.model.nn.network import parameter_count
from cdmpp.train.baselines import fit_baselines
from cdmpp.train.boosters import RowPredictor, fit_boosters
from cdmpp.train.config import DataConfig, TrainConfig
from cdmpp.train.dataset import Dataset, make_dataset
from cdmpp.train.finish import calibrate, error_table, fit_domain, with_training_rows
from cdmpp.train.fit import job_of, read_trained, train, training_rows
from cdmpp.train.limits import with_limits
from cdmpp.train.loop import START, Progress, first_network
from cdmpp.train.ranks import ALONE, Ranks
from cdmpp.train.start import check_start, start_from
from cdmpp.utils.files import parse_file, parse_json

CONFIG = "config.json"


def load_training_table(
    config: TrainConfig, public_data: str | Path | None, records: Sequence[str | Path], *, keep_sealed: bool = False
) -> MeasurementTable:
    """The concatenated tables of a configuration, and of further ``records``, without the programs of sealed networks.

    ``keep_sealed`` keeps programs that ``splits.parquet`` beside the records seals. Only the benchmark that evaluates
    the sealed networks sets it, and it trains on none of them (:mod:`cdmpp.data.split_file`).
    """
    paths = (*config.data.records, *records)
    tables = [load_table(path) for path in paths]
    if config.data.schedules:
        data = config.data
        tables.insert(0, load_public(public_data, data.schedules, data.schedule_share, data.schedules_per_task))
    if config.data.public:
        tables.insert(0, load_public(public_data, PROGRAM_SOURCES))
    if not tables:
        raise DataError("nothing to train on", hint="name --records FILE, or set data.public = true")
    table = concat(tables)
    return table if keep_sealed else without_sealed(table, paths)


def training_part(table: MeasurementTable, dataset: Dataset, data: DataConfig) -> MeasurementTable:
    """A table's rows of the training part, also those excluded from training, without held-out devices."""
    assert dataset.part_of is not None
    chosen = (table.program_key >= 0) & (dataset.part_of[table.program_key] == TRAIN)
    return table.select(np.flatnonzero(chosen & ~np.isin(table.device.array(), data.holdout_devices)))


def train_model(
    config: TrainConfig,
    *,
    out: str | Path,
    run: str | Path | None = None,
    public_data: str | Path | None = None,
    records: Sequence[str | Path] = (),
    progress: Progress | None = None,
    ranks: Ranks = ALONE,
    on: str = "cpu",
    trained: Path | None = None,
) -> dict[str, Any]:
    """Train, calibrate, evaluate on the test part, write the model folder ``out``, which is replaced when it exists.

    ``run`` is the folder of the checkpoint and ``metrics.jsonl``; default ``runs/<name>``. An interrupted run there is
    continued; a finished one is only evaluated and written again. ``public_data`` is the folder of the public tables
    (default: the environment's CDMPP_PUBLIC_DATA), ``records`` are further tables. ``progress`` is called with (step,
    steps, metrics) every 50 steps. ``ranks`` are processes that share the training
    (:func:`cdmpp.train.ranks.process_group`); the first one calibrates, evaluates and writes. ``on``, "cpu" or "cuda",
    is the device that trains. ``trained``: folder with the weights that :mod:`cdmpp.train.loop` trained elsewhere;
    nothing is trained here then.

    Returns ``model_id``, ``out``, ``split`` (:attr:`Dataset.split`), ``train``, ``calibration`` and ``metrics`` (see
    :func:`error_table`); empty on all ranks but the first.
    """
    run = Path(run) if run is not None else Path("runs") / config.name
    sealed = check_start(config, sealed_networks((*config.data.records, *records)))
    table = load_training_table(config, public_data, records)
    if config.reference is not None:
        from cdmpp.train.reference.train import train_reference

        if ranks.size > 1:
            raise DataError("[reference] trains in one process", hint="start it without torchrun")
        return train_reference(config, table, out=Path(out), progress=progress)
    dataset = make_dataset(table, config.data, schedule=config.network.schedule, every_part=True)
    if trained is None:
        network, summary = train(dataset, config, run, progress=progress, ranks=ranks, on=on)
    else:
        network, summary = read_trained(dataset, config, trained)
    if not ranks.first:
        return {}
    inputs = NetworkInputs(dataset.store, dataset.device_matrix)
    index = training_rows(dataset, config)[0]
    domain = with_limits(fit_domain(dataset, index, config.seed), training_part(table, dataset, config.data))
    predict, extra = None, {}
    if config.finish.boosters:
        embedding = np.arange(1, len(dataset.devices) + 1)
        predict = RowPredictor(network, inputs, dataset, embedding, domain.contexts)
        boosters = fit_boosters(predict, index, config.seed)
        predict, extra = replace(predict, boosters=boosters), {BOOSTERS: boosters.save()}
    calibration = calibrate(network, inputs, dataset, config, predict)
    baselines = fit_baselines(dataset, inputs, config, index, config.finish.baselines)
    held = [i for i, d in enumerate(dataset.devices) if d.name in config.data.holdout_devices]
    # The test part is used here only, once; all choices were made on the validation part.
    test = np.flatnonzero((dataset.rows.part == 2) & ~np.isin(dataset.rows.device, held))
    metrics = error_table(network, inputs, dataset, dataset.rows.take(test), calibration, baselines, predict=predict)
    metrics["types"] = with_training_rows(metrics["types"], dataset, dataset.rows.take(index))
    if held:
        rows = dataset.rows.take(np.flatnonzero(np.isin(dataset.rows.device, held)))
        metrics["held_out_devices"] = error_table(
            network,
            inputs,
            dataset,
            rows,
            calibration,
            baselines,
            known=False,
            interval="near",
            peers=Peers([(i + 1, d) for i, d in enumerate(dataset.devices) if i not in held], domain),
        )
    summary["parameters"] = parameter_count(network)
    manifest = save_artifact(
        Path(out),
        network,
        domain,
        name=config.name,
        # A held-out device keeps its index in the embedding, without a name, because it was not trained on.
        devices=["" if i in held else d.name for i, d in enumerate(dataset.devices)],
        calibration=calibration,
        device_specs=dataset.devices,
        details={
            "config": config.model_dump(mode="json"),
            "data": {
                "fingerprint": dataset.fingerprint,
                "split": dataset.split,
                "sources": dict(table.source.counts()),
                "sealed": sealed,
            },
            "train": summary,
            "metrics": {"overall": metrics["overall"], "by_source": metrics["by_source"]},
        },
        extra=extra
        | {
            ERROR_TABLE: (json.dumps(metrics, indent=1) + "\n").encode(),
            POOL: pool_of(table, dataset.rows.program[index]),
        },
    )
    return {
        "model_id": manifest["model_id"],
        "out": str(out),
        "split": dataset.split,
        "train": summary,
        "calibration": calibration,
        "metrics": metrics,
    }


def prepare(
    config: TrainConfig, folder: Path, *, public_data: str | Path | None = None, records: Sequence[str | Path] = ()
) -> int:
    """Write all that the steps of a run need into a new folder, in files below 20 MiB; returns their bytes."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} is not an empty folder", hint="choose a new one")
    if config.reference is not None:
        raise DataError("[reference] cannot be prepared", hint="train the original with --out")
    check_start(config, sealed_networks((*config.data.records, *records)))
    table = load_training_table(config, public_data, records)
    dataset = make_dataset(table, config.data, schedule=config.network.schedule, every_part=True)
    job = job_of(dataset, config)
    network = first_network(job, NetworkInputs(job.store, job.device_matrix))
    if config.optimiser.start_from:
        start_from(Path(config.optimiser.start_from), network, dataset, config)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(network.state_dict(), str(folder / START))
    (folder / CONFIG).write_text(config.model_dump_json(), encoding="utf-8")
    job.write(folder)
    return sum(path.stat().st_size for path in folder.iterdir())


def prepared_config(folder: Path) -> TrainConfig:
    """The configuration of a prepared folder."""
    hint = "cdmpp train --config FILE --prepare DIR writes it"
    return parse_file(
        folder / CONFIG, lambda text: TrainConfig.model_validate(parse_json(text)), "a configuration", hint
    )
