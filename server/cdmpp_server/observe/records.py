"""Rows of observations and of their running error, within one transaction."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from sqlalchemy import Row, Select, delete, func, insert, select, tuple_, update
from sqlalchemy.engine import Connection

from cdmpp_server.observe.figures import Running, Sums
from cdmpp_server.observe.ids import PredictedBefore
from cdmpp_server.observe.tables import observations, running
from cdmpp_server.shares import excess

#: Maximum number of devices and models with a running error; beyond it, the least recently observed of the sender with
#: most are removed.
MAX_RUNNING = 1000
# Variables per statement; SQLite's limit is 32,766.
AT_ONCE = 5000
_Key = tuple[str, str, str]


@dataclass(frozen=True)
class Observation:
    """A measured latency and its prediction.

    Attributes
    ----------
    predicted : PredictedBefore
    latency_s : float
        Measured, in seconds.
    sender : str
        Who reports it.
    shared : bool
        Whether the device and the model are the service's own: every sender's observations of them are counted in one
        row, which belongs to no sender.
    """

    predicted: PredictedBefore
    latency_s: float
    sender: str = ""
    shared: bool = True


@dataclass(frozen=True)
class Stored:
    """Result of an observation.

    Attributes
    ----------
    id : str
        32 hexadecimal digits that sort by time. For a receipt that was observed before, the id of that observation.
    latency_s : float
        The stored measurement; it differs from the sent one if the receipt was observed before with another latency.
    new : bool
        Whether this observation was counted.
    """

    id: str
    latency_s: float
    new: bool


def add(
    connection: Connection, observed: Sequence[Observation], now: float, upsert: Callable[..., Any]
) -> list[Stored]:
    """Store observations whose receipt is new, and update the running errors."""
    rows = [_row(id, observation, now) for id, observation in zip(_ids(len(observed), now), observed, strict=True)]
    receipts = sorted({row["receipt"] for row in rows if row["receipt"] is not None})
    seen: dict[str, Stored] = {}
    for part in parts(receipts):
        columns = (observations.c.receipt, observations.c.id, observations.c.latency_s)
        for receipt, id, latency_s in connection.execute(select(*columns).where(columns[0].in_(part))):
            seen[receipt] = Stored(id, latency_s, new=False)
    results, new = [], []
    for row in rows:
        stored = seen.get(row["receipt"])
        if stored is None:
            new.append(row)
            stored = Stored(row["id"], row["latency_s"], new=True)
            if row["receipt"] is not None:
                seen[row["receipt"]] = Stored(row["id"], row["latency_s"], new=False)
        results.append(stored)
    if new:
        owners = {key_of(row): "" if o.shared else o.sender for row, o in zip(rows, observed, strict=True)}
        connection.execute(insert(observations), new)
        # A fixed order, so that two processes cannot deadlock.
        created = [
            _update_running(connection, key, owners[key], list(group), now, upsert)
            for key, group in groupby(sorted(new, key=key_of), key=key_of)
        ]
        if any(created):
            _drop(connection, running, MAX_RUNNING, running.c.last_at)
    return results


def drop_oldest(connection: Connection, most: int) -> None:
    """Keep at most ``most`` observations; the senders with most lose their oldest."""
    _drop(connection, observations, most, observations.c.id)


def summaries(connection: Connection) -> Iterable[tuple[Row[Any], Running]]:
    """Rows of all running errors with their state, most recently observed first."""
    query: Select[Any] = select(running).order_by(running.c.last_at.desc()).limit(MAX_RUNNING)
    return [(row, _running(row)) for row in connection.execute(query)]


def _ids(count: int, now: float) -> list[str]:
    moment, random = f"{int(now * 1000) % 2**48:012x}", secrets.token_hex(10 * count)
    return [moment + random[20 * i : 20 * (i + 1)] for i in range(count)]


def _row(id: str, observation: Observation, now: float) -> dict[str, Any]:
    predicted = observation.predicted
    return {
        "id": id,
        "program_hash": predicted.program_hash,
        "device": predicted.device,
        "device_digest": predicted.device_digest,
        "backend": predicted.backend,
        "protocol": predicted.protocol,
        "framework": predicted.framework,
        "model_id": predicted.model_id,
        "predicted_s": predicted.latency_s,
        "lower_s": predicted.lower_s,
        "upper_s": predicted.upper_s,
        "latency_s": observation.latency_s,
        "received_at": now,
        "sender": observation.sender,
        "receipt": predicted.receipt,
    }


def _update_running(
    connection: Connection, key: _Key, owner: str, rows: list[dict[str, Any]], now: float, upsert: Callable[..., Any]
) -> bool:
    """Add observations of a device and a model to their running error; returns whether its row is new."""
    device, digest, model = key
    names = {"device": device, "device_digest": digest, "model_id": model, "sender": owner}
    empty = {**names, **_columns(Running(), now)}
    new_row = upsert(running).values(empty).on_conflict_do_nothing().returning(running.c.device)
    created = connection.execute(new_row).first() is not None
    key_matches = tuple_(running.c.device, running.c.device_digest, running.c.model_id) == tuple_(*key)
    # SQLAlchemy omits FOR UPDATE for SQLite, which does not need it.
    state = _running(connection.execute(select(running).where(key_matches).with_for_update()).one())
    state.add(*(np.array([row[c] for row in rows]) for c in ("latency_s", "predicted_s", "lower_s", "upper_s")))
    connection.execute(update(running).where(key_matches).values(**_columns(state, now)))
    return created


def _drop(connection: Connection, table: Any, most: int, age: Any) -> None:
    """Delete the rows with the smallest ``age`` of the senders with most rows, until ``most`` rows are left."""
    newest = func.max(age)
    counts = select(table.c.sender, func.count()).group_by(table.c.sender).order_by(newest)
    for sender, number in excess({sender: count for sender, count in connection.execute(counts)}, most).items():
        # An alias: the inner query must not refer to the row of the outer one.
        inner = table.alias()
        oldest = select(*(inner.c[column.name] for column in table.primary_key))
        oldest = oldest.where(inner.c.sender == sender).order_by(inner.c[age.name]).limit(number)
        connection.execute(delete(table).where(tuple_(*table.primary_key).in_(oldest)))


def key_of(row: Mapping[str, Any]) -> _Key:
    """Device, its digest and the model of a row."""
    return row["device"], row["device_digest"], row["model_id"]


def parts(values: Sequence[str]) -> Iterable[Sequence[str]]:
    """Parts that fit into one statement."""
    return (values[i : i + AT_ONCE] for i in range(0, len(values), AT_ONCE))


def _columns(state: Running, now: float) -> dict[str, Any]:
    return {
        "number": state.ratios.count,
        "total": state.ratios.total,
        "squares": state.ratios.squares,
        "relative_error": state.relative_error,
        "covered": state.covered,
        "recent": state.recent.astype("<f8").tobytes(),
        "reference_count": state.reference.count,
        "reference_total": state.reference.total,
        "reference_squares": state.reference.squares,
        "last_at": now,
    }


def _running(row: Row[Any]) -> Running:
    return Running(
        Sums(row.number, row.total, row.squares),
        row.relative_error,
        row.covered,
        np.frombuffer(row.recent, "<f8"),
        Sums(row.reference_count, row.reference_total, row.reference_squares),
    )
