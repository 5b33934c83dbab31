"""Training rows and test errors by operator, element types, scaling and device: what ``cdmpp support`` shows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cdmpp.train.dataset import Dataset, MeasuredRows

Array = np.ndarray[Any, np.dtype[Any]]

#: Names of the parts of :attr:`Dataset.types`.
TYPE_FIELDS = ("operator", "dtype", "weight_dtype", "scaling")


def errors_by_types(dataset: Dataset, rows: MeasuredRows, log_predicted: Array) -> list[dict[str, Any]]:
    """Errors of predictions of ``rows`` for each operator, types and device.

    Parameters
    ----------
    dataset : Dataset
    rows : MeasuredRows
    log_predicted : (rows,)
        log of the predicted seconds.

    Returns
    -------
    list of dict
        :data:`TYPE_FIELDS`, ``device``, ``n``, ``mape``, ``median_ape``.
    """
    if dataset.type_of is None or not len(rows):
        return []
    error = np.abs(np.expm1(log_predicted - rows.log_latency))
    entries = []
    for labels, members in _groups(dataset, rows):
        part = error[members]
        figures = {"n": len(part), "mape": float(part.mean()), "median_ape": float(np.median(part))}
        entries.append({**labels, **figures})
    return entries


def with_training_rows(entries: Sequence[dict[str, Any]], dataset: Dataset, rows: MeasuredRows) -> list[dict[str, Any]]:
    """Entries of :func:`errors_by_types` with the number of training rows, ``rows``; sorted.

    Parameters
    ----------
    rows : MeasuredRows
        The training rows.
    """
    keys = (*TYPE_FIELDS, "device")
    merged: dict[tuple[Any, ...], dict[str, Any]] = {}
    if dataset.type_of is not None and len(rows):
        for labels, members in _groups(dataset, rows):
            merged[tuple(labels[k] for k in keys)] = {**labels, "rows": len(members)}
    for entry in entries:
        key = tuple(entry[k] for k in keys)
        merged[key] = {**merged.get(key, {k: entry[k] for k in keys} | {"rows": 0}), **entry}
    return [merged[key] for key in sorted(merged, key=lambda key: tuple(part or "" for part in key))]


def _groups(dataset: Dataset, rows: MeasuredRows) -> list[tuple[dict[str, Any], Array]]:
    assert dataset.type_of is not None
    codes = np.stack([dataset.type_of[rows.program], rows.device], axis=1)
    distinct, inverse = np.unique(codes, axis=0, return_inverse=True)
    order = np.argsort(inverse.ravel(), kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(inverse.ravel()))[:-1])
    return [
        ({**dict(zip(TYPE_FIELDS, dataset.types[kind], strict=True)), "device": dataset.devices[device].name}, members)
        for (kind, device), members in zip(distinct.tolist(), parts, strict=True)
    ]
