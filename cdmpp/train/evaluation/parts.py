"""Part of a model's split that each measured row belongs to: training, validation or test.

The part of a row follows from its shape, task or network (:mod:`cdmpp.data.splits`), so it is known for any table,
whether the model was trained on that table or not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cdmpp.data.splits import PART_NAMES, TEST, TRAIN, UNUSED, network_parts, program_parts, sealed_programs
from cdmpp.data.table import MeasurementTable
from cdmpp.errors import DataError
from cdmpp.model.artifact.model import Artifact

Array = np.ndarray[Any, np.dtype[Any]]

#: Names of the parts by code; rows without a program are in no part.
CODES = {name: code for code, name in PART_NAMES.items()}


def row_parts(artifact: Artifact, table: MeasurementTable) -> Array:
    """Part of every row by the split that the model was trained with, (n,) int8.

    Rows of a device that the model held out are test rows. Programs of sealed networks are in no part. A model without
    a split, or with one by network where the table names none, is a DataError.
    """
    data = _split(artifact)
    if data.get("split") == "network":
        parts = network_parts(table, tuple(data["test_networks"]), validation=data["validation_share"])
    else:
        parts = program_parts(table, test=data["test_share"], validation=data["validation_share"])
    rows: Array = np.append(parts, np.int8(UNUSED))[table.program_key]
    for name in data.get("holdout_devices", ()):
        rows[table.device.is_(name) & (rows != UNUSED)] = TEST
    if sealed := artifact.manifest.get("data", {}).get("sealed"):
        rows[np.append(sealed_programs(table, sealed), False)[table.program_key]] = UNUSED
    if artifact.scheduled is not None:
        rows = np.where(table.backend.is_("tvm"), row_parts(artifact.scheduled, table), rows)
    return rows


def trained_on(artifact: Artifact, table: MeasurementTable, parts: Array) -> Array:
    """Mask of the rows that were training rows: training part, and a source and device of the training data."""
    sources = set(artifact.manifest.get("data", {}).get("sources", ()))
    source = np.array([name in sources for name in table.source.names], dtype=bool)[table.source.codes]
    known = set(filter(None, artifact.devices))
    device = np.array([*(name in known for name in table.device.names), False], dtype=bool)[table.device.codes]
    mask: Array = (parts == TRAIN) & source & device & ~table.collective
    if artifact.scheduled is not None:
        mask = np.where(table.backend.is_("tvm"), trained_on(artifact.scheduled, table, parts), mask)
    model = artifact.collectives
    if model is not None:
        measured = {context.device for context in model.known}
        device = np.array([*(name in measured for name in table.device.names), False], dtype=bool)[table.device.codes]
        mask |= (parts == TRAIN) & table.collective & table.source.is_("comm_collectives") & device
    return mask


def _split(artifact: Artifact) -> Mapping[str, Any]:
    data = artifact.manifest.get("config", {}).get("data", {})
    if not {"test_share", "validation_share"} <= data.keys():
        raise DataError(
            "the model's manifest does not name its split", hint="evaluate without --split, or train the model again"
        )
    split: Mapping[str, Any] = data
    return split
