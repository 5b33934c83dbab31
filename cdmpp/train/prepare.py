"""A training that another machine runs: the folder that it takes there (:mod:`cdmpp.train.loop`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from cdmpp.data.split_file import sealed_networks
from cdmpp.errors import DataError
from cdmpp.model.nn.batch import NetworkInputs
from cdmpp.train.config import TrainConfig
from cdmpp.train.dataset import make_dataset
from cdmpp.train.fit import job_of
from cdmpp.train.loop import START, first_network
from cdmpp.train.run import load_training_table
from cdmpp.train.start import check_start, start_from
from cdmpp.utils.files import parse_file, parse_json

CONFIG = "config.json"


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
