"""Assignment of programs to training, validation and test part."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.networks import assert_tasks_apart, network_parts
from cdmpp.data.splits import program_parts
from cdmpp.data.table import MeasurementTable
from cdmpp.train.config import DataConfig


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
