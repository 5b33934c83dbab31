"""Assignment of programs to training, validation and test part."""

from __future__ import annotations

import logging

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.networks import assert_tasks_apart, network_parts
from cdmpp.data.splits import PART_NAMES, TEST, TRAIN, UNUSED, VALIDATION, program_parts
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError
from cdmpp.train.config import DataConfig

logger = logging.getLogger(__name__)


def choose_parts(table: MeasurementTable, data: DataConfig) -> NDArray[np.int8]:
    """Part per program key (see :mod:`cdmpp.data.splits`).

    ``split = "shape"``: by the hash of an operator's shape or of a TVM program's task; ``"network"``: see
    :func:`cdmpp.data.networks.network_parts`.

    Raises
    ------
    DataError
        No record names a test network, or a task would be in two parts.
    """
    if data.split == "shape":
        parts = program_parts(table, test=data.test_share, validation=data.validation_share)
    else:
        parts = network_parts(table, data.test_networks, validation=data.validation_share)
    assert_tasks_apart(table, parts)
    return parts


def parts_of_rows(table: MeasurementTable, data: DataConfig, rows: NDArray[np.int64]) -> tuple[NDArray[np.int8], str]:
    """Part per program key, such that no part of these rows is empty.

    ``split = "shape"`` leaves a part of few tasks empty. Then single programs are split by their hash, and a warning
    is logged.

    Parameters
    ----------
    rows : (n,) int
        Rows of devices that are not held out, with a program and a latency.

    Returns
    -------
    parts : (programs,) int8
    unit : str
        What is split: "task" (shapes of operators, tasks of TVM programs), "network" or "program".

    Raises
    ------
    DataError
        A part stays empty; also as :func:`choose_parts`.
    """
    parts = choose_parts(table, data)
    empty = _empty_parts(parts, table.program_key[rows])
    if not empty:
        return parts, "network" if data.split == "network" else "task"
    if data.split == "network":
        raise DataError(
            f"the {' and the '.join(empty)} part is empty with data.test_networks = {', '.join(data.test_networks)}",
            hint="measure more networks, raise data.validation_share, or use data.split = 'shape'",
        )
    parts = _parts_of_few(table, data, rows)
    counts = {
        name: int(np.isin(table.program_key[rows], np.flatnonzero(parts == part)).sum())
        for part, name in PART_NAMES.items()
    }
    logger.warning(
        "the records have too few tasks for a %s part: split by program instead, %s rows. The errors below are about "
        "other programs of trained tasks, not about new tasks",
        " and a ".join(empty),
        ", ".join(f"{name} {count:,}" for name, count in counts.items()),
    )
    return parts, "program"


def _empty_parts(parts: NDArray[np.int8], keys: NDArray[np.int64]) -> list[str]:
    present = set(parts[keys].tolist())
    return [name for part, name in PART_NAMES.items() if part not in present]


def _parts_of_few(table: MeasurementTable, data: DataConfig, rows: NDArray[np.int64]) -> NDArray[np.int8]:
    """Parts by rank of the programs' hashes; test and validation have at least one program each."""
    hashes = table.program_hashes
    digests = sorted({hashes[key] for key in np.unique(table.program_key[rows]).tolist()})
    if len(digests) < len(PART_NAMES):
        raise DataError(
            f"the records have {len(digests)} usable programs: training, validation and test need one each",
            hint="measure more programs, at least some dozens; `cdmpp data info FILE` counts them. `cdmpp adapt` "
            "adapts a trained model by few measurements",
        )
    test = max(1, round(data.test_share * len(digests)))
    validation = max(1, round(data.validation_share * len(digests)))
    part_of = dict.fromkeys(digests, TRAIN)
    part_of |= dict.fromkeys(digests[:test], TEST) | dict.fromkeys(digests[test : test + validation], VALIDATION)
    return np.array([part_of.get(digest, UNUSED) for digest in hashes], dtype=np.int8)
