"""Programs that importers build from schedules: equal ones count once, and a cache keeps those of earlier runs."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cdmpp import __version__
from cdmpp.data.arrow import pa, pq
from cdmpp.data.assemble import Reasons, complete_table
from cdmpp.data.importers.base import Importer
from cdmpp.data.labels import Labels, PackedTexts
from cdmpp.data.raw import RawTable
from cdmpp.data.table import Int64, MeasurementTable, TvmPrograms
from cdmpp.errors import DataError, InvalidProgramError
from cdmpp.programs.program import TensorProgram
from cdmpp.utils.cache import cache_dir
from cdmpp.utils.writing import replacing

logger = logging.getLogger(__name__)

#: To be raised when a schedule becomes another program.
VERSION = 1
_COLUMNS = ("key", "hash", "text", "refusal")


class BuiltProgram(NamedTuple):
    """A program's structural hash and its packed TVM JSON, or why a schedule has none."""

    hash: str
    text: bytes | str
    refusal: str = ""

    @classmethod
    def of(cls, program: TensorProgram) -> BuiltProgram:
        """Hash and pack a program."""
        return cls(program.hash, PackedTexts.entries(PackedTexts([program.tvm_json or ""]))[0])


class BuiltPrograms:
    """Distinct programs of a table, in order of first appearance."""

    def __init__(self) -> None:
        self._keys: dict[str, int] = {}
        self._texts: list[bytes | str] = []
        self._tasks: list[str] = []

    def add(self, program: BuiltProgram, task: str) -> int:
        """Key of a program; of equal ones the first keeps its task."""
        key = self._keys.setdefault(program.hash, len(self._keys))
        if key == len(self._texts):
            self._texts.append(program.text)
            self._tasks.append(task)
        return key

    def table(
        self, importer: Importer, raw: RawTable, key: Int64, reason: Reasons, op: Labels, origin: str, **columns: Any
    ) -> MeasurementTable:
        """The checked table of an importer's rows. ``key`` and ``reason``, (rows,): key of each row's program or -1,
        and why it has none (:data:`cdmpp.data.assemble.REASONS`). ``columns``: further fields of the table;
        ``provenance`` needs no ``origin``."""
        rows = len(raw)
        provenance = {"origin": Labels.constant(origin, rows), **columns.pop("provenance")}
        columns = {"latency_s": raw.latency_s(), **columns}
        return complete_table(
            (),
            key,
            reason,
            raw.labels("device"),
            {},
            op=op,
            backend=Labels.constant("tvm", rows),
            protocol=Labels.constant(importer.protocol, rows),
            framework=importer.framework(raw),
            implementation=importer.implementation(raw),
            source=importer.sources(raw),
            provenance=provenance,
            tvm=TvmPrograms(0, tuple(self._keys), PackedTexts(self._texts), tuple(self._tasks)),
            **columns,
        )


class ProgramCache:
    """Built programs of one workload, in one file of the user's cache. An unreadable file counts as empty.

    ``workload`` is a text that determines a program together with the schedule. ``build`` raises InvalidProgramError
    for a schedule without a program; its message is kept. ``folder`` is by default below
    :func:`cdmpp.utils.cache.cache_dir`.
    """

    def __init__(self, workload: str, build: Callable[[str], TensorProgram], folder: Path | None = None) -> None:
        name = hashlib.sha256(f"{__version__}\0{VERSION}\0{workload}".encode()).hexdigest()[:32]
        self._path = (folder or cache_dir() / "schedules") / f"{name}.parquet"
        self._build = build
        self._programs = self._read()
        self._read_count = len(self._programs)

    def get(self, schedule: str) -> BuiltProgram:
        """The program of a schedule, built unless an earlier run built it."""
        key = hashlib.sha256(schedule.encode("utf-8", "surrogatepass")).hexdigest()
        if key not in self._programs:
            try:
                self._programs[key] = BuiltProgram.of(self._build(schedule))
            except InvalidProgramError as error:
                self._programs[key] = BuiltProgram("", b"", error.message)
        return self._programs[key]

    def write(self) -> None:
        """Keep the programs if new ones were built; where the cache cannot be written, they are not kept."""
        if len(self._programs) == self._read_count:
            return
        columns = zip(*((key, *program) for key, program in self._programs.items()), strict=True)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(self._path) as aside:
                table = pa.table(dict(zip(_COLUMNS, map(pa.array, columns), strict=True)))
                pq.write_table(table, aside, compression="zstd", write_page_checksum=True)
        except (OSError, DataError) as error:
            logger.info("built programs are not kept: %s", error)

    def _read(self) -> dict[str, BuiltProgram]:
        try:
            table = pq.read_table(self._path, page_checksum_verification=True)
            columns = [table.column(name).to_pylist() for name in _COLUMNS]
        except (OSError, KeyError, pa.ArrowException):
            return {}
        return {key: BuiltProgram(*program) for key, *program in zip(*columns, strict=True)}
