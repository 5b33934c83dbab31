"""Rows, programs and options of a training, in memory and as files. It needs numpy alone."""

from __future__ import annotations

import json
import lzma
import zipfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.errors import DataError
from cdmpp.model.nn.config import NetworkConfig
from cdmpp.model.nn.rows import LeafBucket, ProgramStore, QueryRows
from cdmpp.train.options import DomainConfig, OptimiserConfig
from cdmpp.utils.files import MAX_REQUEST_BYTES, read_json, read_npz, read_xz

Array = np.ndarray[Any, np.dtype[Any]]

#: Programs and rows of one file, which keep it below 20 MiB; fewer programs where they are long.
FILE_PROGRAMS, FILE_VALUES, FILE_ROWS = 20_000, 1 << 25, 1_000_000
_JOB, _ROWS = "job.json", "rows"
#: Half the size of numpy's own compression.
_SUFFIX = ".npz.xz"


@dataclass(frozen=True)
class LabelledRows(QueryRows):
    """Queries with their measured latency."""

    log_latency: Array  # (n,) float64: natural log of the measured seconds


@dataclass(frozen=True)
class TrainingJob:
    """Encoded programs, rows, devices and options of a training."""

    network: NetworkConfig
    optimiser: OptimiserConfig
    domain: DomainConfig
    seed: int
    store: ProgramStore
    device_matrix: Array  # (devices, .): :func:`cdmpp.model.nn.figures.stack_devices` of the devices
    rows: LabelledRows
    task: Array  # (rows,): task and device of each row as one number, -1 for a program without a task
    # (rows,): rows that eager PyTorch composes of several kernels; their framework says so, and is not hidden
    composed: Array
    index: Array  # positions of the training rows
    weight: Array  # of each training row: mean number of draws in an epoch
    target: Array  # positions of the unlabelled target's rows (:class:`DomainConfig`)
    identity: dict[str, str]  # fields of a checkpoint that must match for it to be continued

    def write(self, folder: Path) -> None:
        """Write the programs and rows that are trained on as files below 20 MiB; latencies as float32."""
        used = np.union1d(self.index, self.target)
        programs, program = np.unique(self.rows.program[used], return_inverse=True)
        columns = {field.name: getattr(self.rows, field.name)[used] for field in fields(LabelledRows)}
        columns |= {"program": program, "log_latency": columns["log_latency"].astype(np.float32)}
        columns |= {"task": self.task[used], "composed": self.composed[used], "weight": np.full(len(used), np.nan)}
        columns["weight"][np.searchsorted(used, self.index)] = self.weight
        columns["target"] = np.isin(used, self.target)
        for number, start in enumerate(range(0, len(used), FILE_ROWS)):
            part = {name: _smallest(values[start : start + FILE_ROWS]) for name, values in columns.items()}
            _write(folder / f"{_ROWS}-{number:04}{_SUFFIX}", part)
        for number, part in enumerate(self._program_parts(programs)):
            _write(folder / f"programs-{number:04}{_SUFFIX}", part)
        options = {
            "network": asdict(self.network),
            "optimiser": asdict(self.optimiser),
            "domain": asdict(self.domain),
            "seed": self.seed,
            "programs": len(programs),
            "rows": len(used),
            "width": self.store.width,
            "devices": self.device_matrix.tolist(),
            "identity": self.identity,
        }
        (folder / _JOB).write_text(json.dumps(options), encoding="utf-8")

    def _program_parts(self, programs: Array) -> Iterator[dict[str, Array]]:
        """Arrays of each file of programs; ``key`` counts the given programs."""
        sizes = self.store.bucket[programs]
        for size in np.unique(sizes).tolist():
            keys, bucket = np.flatnonzero(sizes == size), self.store.buckets[size]
            count = max(1, min(FILE_PROGRAMS, FILE_VALUES // (size * self.store.width)))
            for part in np.split(keys, range(count, len(keys), count)):
                slots = self.store.slot[programs[part]]
                leaves = bucket.leaves[slots].reshape(len(part), -1)
                table = np.concatenate([leaves, self.store.summary[programs[part]]], axis=1)
                yield {
                    "key": part,
                    "size": np.array(size),
                    "positions": _smallest(bucket.positions[slots]),
                    "mask": bucket.mask[slots],
                    **_packed(table),
                }

    @classmethod
    def read(cls, folder: Path) -> TrainingJob:
        """Read the files of :meth:`write`."""
        stored = read_json(folder / _JOB, "cdmpp train --prepare writes the folder", max_bytes=MAX_REQUEST_BYTES)
        store = ProgramStore(stored["programs"], stored["width"])
        for part in _files(folder, "programs"):
            size, keys = int(part["size"]), part["key"]
            table = _unpacked(part)
            leaves = table[:, : size * store.width].reshape(len(keys), size, store.width)
            bucket = LeafBucket(leaves, part["positions"].astype(np.int32), part["mask"])
            store.place(keys, bucket, table[:, size * store.width :])
        store.finish()
        parts = list(_files(folder, _ROWS))
        columns = {name: np.concatenate([part[name] for part in parts]) for name in (parts[0] if parts else ())}
        if not parts or len(columns["program"]) != stored["rows"] or not (store.bucket > 0).all():
            raise DataError(f"{folder} lacks some of its files", hint="copy the whole folder")
        rows = LabelledRows(
            program=columns["program"].astype(np.int64),
            device=columns["device"].astype(np.int32),
            log_latency=columns["log_latency"].astype(np.float64),
            **{name: columns[name].astype(np.int16) for name in ("backend", "protocol", "framework")},
        )
        index = np.flatnonzero(np.isfinite(columns["weight"]))
        return cls(
            network=NetworkConfig(**stored["network"]),
            optimiser=OptimiserConfig(**_with_tuples(stored["optimiser"])),
            domain=DomainConfig(**_with_tuples(stored["domain"])),
            seed=stored["seed"],
            store=store,
            device_matrix=np.array(stored["devices"]),
            rows=rows,
            task=columns["task"].astype(np.int64),
            composed=columns["composed"],
            index=index,
            weight=columns["weight"][index],
            target=np.flatnonzero(columns["target"]),
            identity=stored["identity"],
        )


def _with_tuples(options: dict[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def _write(path: Path, arrays: dict[str, Array]) -> None:
    with lzma.open(path, "wb") as file:
        np.savez(file, **arrays)  # type: ignore[arg-type]  # their stub


def _files(folder: Path, name: str) -> Iterator[dict[str, Array]]:
    for path in sorted(folder.glob(f"{name}-*{_SUFFIX}")):
        try:
            arrays = read_npz(read_xz(path, 16 * FILE_VALUES))
        except (OSError, EOFError, ValueError, lzma.LZMAError, zipfile.BadZipFile) as error:
            raise DataError(f"{path} is damaged: {error}", hint="copy it again") from None
        yield arrays


def _smallest(values: Array) -> Array:
    """Integers in the smallest type that holds them."""
    if values.dtype.kind not in "iu" or not values.size:
        return values
    return values.astype(np.promote_types(np.min_scalar_type(values.min()), np.min_scalar_type(values.max())))


def _packed(table: Array) -> dict[str, Array]:
    """A table of at most 2^16 rows, (rows, columns) float32, as distinct values of each column and, by row, the index
    of its value. Columns with equal indices share them: most columns of programs follow from a few sizes."""
    shared: dict[bytes, int] = {}
    values, which, distinct = [], [], []
    for column in table.T:
        known, index = np.unique(column, return_inverse=True)
        values.append(known)
        code = index.astype(np.uint16)
        if code.tobytes() not in shared:
            distinct.append(code)
        which.append(shared.setdefault(code.tobytes(), len(shared)))
    return {
        "codes": np.stack(distinct),
        "which": np.array(which, dtype=np.uint32),
        "counts": np.array([len(v) for v in values], dtype=np.uint32),
        "values": np.concatenate(values),
    }


def _unpacked(part: dict[str, Array]) -> Array:
    """Inverse of :func:`_packed`."""
    codes, which, ends = part["codes"], part["which"], np.cumsum(part["counts"])
    out = np.empty((len(which), codes.shape[1]), dtype=np.float32)
    for column, (code, end, count) in enumerate(zip(which, ends, part["counts"], strict=True)):
        out[column] = part["values"][end - count : end][codes[code]]
    return np.ascontiguousarray(out.T)
