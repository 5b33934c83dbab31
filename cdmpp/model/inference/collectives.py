"""Inference on collectives: queries to contexts, and the model of latency and bandwidth."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import UnsupportedOperatorError
from cdmpp.features.encode import EncodedProgram
from cdmpp.model.artifact.folder import default_model
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.collectives.context import CollectiveContext, collective_rows, context_of
from cdmpp.model.collectives.model import CollectiveModel
from cdmpp.model.collectives.store import read_model
from cdmpp.model.raw_predictions import RawPredictions
from cdmpp.programs.collectives import Collective, link_remarks
from cdmpp.programs.program import TensorProgram

if TYPE_CHECKING:
    from cdmpp.data.table import MeasurementTable

Array = np.ndarray[Any, np.dtype[Any]]


class CollectiveQuery(NamedTuple):
    """A collective on a device, with the options of its query."""

    operator: Collective
    device: DeviceSpec
    protocol: str
    framework: str | None


def is_collective_program(program: TensorProgram | EncodedProgram) -> bool:
    """Whether a program is a collective."""
    return isinstance(program.operator, Collective)


@lru_cache(maxsize=1)
def _shipped() -> CollectiveModel | None:
    return read_model(default_model())


def collectives_of(artifact: Artifact) -> CollectiveModel:
    """The model of collectives of a model folder; the one that ships with the package where the folder has none.

    Raises UnsupportedOperatorError where neither has one.
    """
    model = artifact.collectives or _shipped()
    if model is None:
        raise UnsupportedOperatorError(
            f"{artifact.model_id} has no model of collectives",
            hint="fit one: python -m cdmpp.train.collectives --public-data DIR --out MODEL",
        )
    return model


def predict_collectives(model: CollectiveModel, queries: Sequence[CollectiveQuery]) -> RawPredictions:
    """Predict collectives, in their order; predictions do not depend on each other."""
    numbers: dict[CollectiveContext, int] = {}
    context = [numbers.setdefault(_context(model, query), len(numbers)) for query in queries]
    bytes_ = np.array([float(query.operator.bytes) for query in queries])
    return model.predict(list(numbers), np.array(context), bytes_)


def explain_collective(model: CollectiveModel, query: CollectiveQuery) -> str:
    """What of a query the measurements lacked, and what was assumed of its link; "" where they lacked nothing."""
    lacking = model.explain(_context(model, query), query.operator.bytes)
    return "; ".join(filter(None, [lacking, *link_remarks([query.operator], query.device)]))


def predict_rows(
    model: CollectiveModel, table: MeasurementTable, rows: Array, specs: Mapping[str, DeviceSpec] | None = None
) -> RawPredictions:
    """Predict rows of a table, all of them collectives of known devices, in their order."""
    collectives = collective_rows(table, rows, model.known_as, dict(specs or {}))
    return model.predict(collectives.contexts, collectives.context, collectives.bytes)


def _context(model: CollectiveModel, query: CollectiveQuery) -> CollectiveContext:
    operator, device, protocol, framework = query
    return context_of(operator, device, protocol, model.known_as(device), framework or "")
