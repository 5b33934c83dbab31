"""The project's measurement records: one Parquet file, one row per measurement.

The column ``program`` is dictionary-encoded, in memory and on disk: each program's text is stored once per
row group (:data:`ROW_GROUP_ROWS` rows, fewer if the texts are long), whatever the number of its measurements,
and a file that was filtered with other tools still carries every program it needs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from cdmpp.data.arrow import pa, pq
from cdmpp.data.assemble import (
    CODE,
    REASONS,
    SETTINGS,
    Group,
    Reasons,
    canonical_devices,
    check_groups,
    mark,
    settings_known,
    stated_or_default,
)
from cdmpp.data.device_specs import read_specs, spec_text
from cdmpp.data.labels import Codes, Labels, PackedTexts
from cdmpp.data.physics import EXCLUDED, flag_rows
from cdmpp.data.raw import IntColumn, RawTable
from cdmpp.data.table import (
    UNSUPPORTED,
    Int64,
    MeasurementTable,
    OperatorBlock,
    TvmPrograms,
    default_dtype,
    flag_defaults,
    integer_fields,
)
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidProgramError
from cdmpp.programs.operators import operator_types, parse_operator
from cdmpp.utils.files import check_parquet
from cdmpp.utils.writing import replacing

_ABSENT = object()
#: Characters of TVM programs from which on they are compressed in memory.
PACKED_FROM = 200_000_000
#: Version of the schema, in the file's metadata. Files of a newer version are refused. A column that
#: readers may do without (``device_spec``, ``failure``, ``implementation``) does not raise it.
SCHEMA_VERSION = 1
VERSION_KEY = b"cdmpp_records_version"
ROW_GROUP_ROWS = 1_000_000
ROW_GROUP_TEXT = 2**29
#: Schedules of one task repeat each other: 33 kB of TVM JSON take 1.5 kB at this level (2.3 kB at zstd's own
#: default, 1.4 kB at 15 in fourteen times the time).
ZSTD_LEVEL = 9
_TEXT = pa.dictionary(pa.int32(), pa.string())
#: Column -> (type, what it holds, unit). Further text columns are provenance.
COLUMNS: dict[str, tuple[Any, str, str]] = {
    "program_hash": (_TEXT, "structural hash of the program", ""),
    "program_kind": (_TEXT, "operator (canonical JSON of its fields) or tvm_json", ""),
    "program": (pa.dictionary(pa.int32(), pa.large_string()), "the program itself", ""),
    "task": (_TEXT, "workload that a scheduled program belongs to; empty if none", ""),
    "device": (_TEXT, "canonical device name", ""),
    "device_spec": (_TEXT, "JSON of the device's specification, where the table has none", ""),
    "backend": (_TEXT, "library or tvm", ""),
    "protocol": (_TEXT, "kernel, graph or eager", ""),
    "framework": (_TEXT, "who launched it; empty if not known", ""),
    "implementation": (_TEXT, "fused, composed, compiled or tuned; empty: the default of operator and framework", ""),
    "latency_s": (pa.float64(), "the label, by the source's statistic; null if not measured", "s"),
    "repeats_s": (pa.list_(pa.float64()), "raw repeats, where there are any", "s"),
    "failure": (_TEXT, "why the program could not be built or run; empty if it ran", ""),
    "flagged": (pa.bool_(), "true if the row is left out of training", ""),
    "excluded_reason": (_TEXT, "why it is left out; empty if it is not", ""),
    "unsupported_reason": (_TEXT, "why the row cannot be predicted; empty if it can", ""),
    "row_filter": (pa.bool_(), "the source's own filter, for reports; null if it has none", ""),
    "source": (_TEXT, "data set the row comes from", ""),
    "source_row": (pa.int64(), "row in the source's table", ""),
    "source_op": (_TEXT, "operator as the source calls it", ""),
    "source_device": (_TEXT, "device as the source calls it", ""),
}
NEEDED = frozenset({"program_hash", "program_kind", "program", "device", "backend", "protocol", "latency_s"})
#: Reasons against a row that a device takes away.
_OF_THE_DEVICE = ("unknown_device", "invalid_device")


@dataclass(frozen=True)
class Measurement:
    """One measurement, as measuring tools write it."""

    program: str  # this field and the next are as in :data:`COLUMNS`
    program_kind: str
    device: str
    latency_s: float | None  # None if the measurement failed
    program_hash: str = ""  # may be left empty for an operator: ``OperatorSpec.hash()``
    backend: str = "library"
    protocol: str = "kernel"
    framework: str = ""
    repeats_s: tuple[float, ...] = ()  # raw repeats
    task: str = ""
    source: str = "measured"
    excluded_reason: str = ""
    provenance: Mapping[str, str] | None = None  # versions, clocks, driver, date: each key becomes a column
    # required if :mod:`cdmpp.devices` does not have ``device``, which it is named after
    device_spec: DeviceSpec | None = None
    failure: str = ""  # why the program could not be built or run, "" if it ran; a failed one has no latency
    # one of :data:`cdmpp.programs.query_options.IMPLEMENTATIONS`; "": the default of operator and framework
    implementation: str = ""

    def __post_init__(self) -> None:
        if self.failure and self.latency_s is not None:
            raise DataError(f"a failed measurement ({self.failure}) has a latency", hint="leave latency_s None")


def from_measurements(rows: list[Measurement]) -> MeasurementTable:
    """Build a checked table from single measurements; each distinct text is kept once."""
    names = (
        *("program_hash", "program_kind", "program", "task", "device", *SETTINGS),
        *("source", "excluded_reason", "failure"),
    )
    texts: dict[str, Iterable[str]] = {n: map(attrgetter(n), rows) for n in names}
    specs = {id(r.device_spec): spec_text(r.device_spec) for r in rows if r.device_spec is not None}
    texts["device_spec"] = (specs.get(id(r.device_spec), "") for r in rows)
    for name in sorted({key for r in rows for key in r.provenance or {}}):
        if name in COLUMNS:
            raise DataError(f"provenance may not be called {name!r}", hint="choose another column name")
        texts[name] = [(r.provenance or {}).get(name, "") for r in rows]
    # A program of 30 kB occurs in every record of it: encoded before pyarrow sees it.
    columns = {n: _dictionary(Labels.of(column), pa.large_string()) for n, column in texts.items()}
    columns["latency_s"] = pa.array([r.latency_s for r in rows], type=pa.float64())
    columns["repeats_s"] = pa.array([list(r.repeats_s) or None for r in rows], type=COLUMNS["repeats_s"][0])
    return table_from_arrow(pa.table(columns), Path("measurements"))


def write_records(table: MeasurementTable, path: str | PathLike[str], *, level: int = ZSTD_LEVEL) -> None:
    """Write a table as project records; written aside, then renamed, so that no half file is ever seen. ``level``:
    zstd's, 1 to 22."""
    with replacing(path) as aside:
        # The dictionary page must hold all texts, else Parquet falls back to storing one per row.
        pq.write_table(
            to_arrow(table),
            aside,
            compression="zstd",
            compression_level=level,
            row_group_size=_row_group(table),
            dictionary_pagesize_limit=2**31 - 1,
        )


def _row_group(table: MeasurementTable) -> int:
    """Rows per row group: a dictionary page may not exceed 2 GiB."""
    share = -(-sum(map(len, table.tvm.texts)) // ROW_GROUP_TEXT)
    return max(1, min(ROW_GROUP_ROWS, len(table) // max(share, 1)))


def to_arrow(table: MeasurementTable) -> Any:
    """The table as a pyarrow Table in the records' schema."""
    texts = [text for block in table.programs for text in block.texts()]
    kinds = Labels(
        np.where(table.program_key < 0, 2, table.program_key >= table.tvm.first_key).astype(np.int32)
        if table.tvm.hashes
        else np.where(table.program_key < 0, 2, 0).astype(np.int32),
        ("operator", "tvm_json", ""),
    )
    failure = table.failure or Labels.constant("", len(table))
    specs = {name: spec_text(spec) for name, spec in table.device_specs.items()}
    tasks = _by_program(table, ("",) * len(texts) + table.tvm.tasks)
    # Texts of one task side by side, whatever the rows' order: the compressor sees some megabytes at a time.
    order = Labels.of([*("",) * len(texts), *table.tvm.tasks, ""]).codes
    columns: dict[str, Any] = {
        "program_hash": _dictionary(_by_program(table, table.program_hashes), order=order),
        "program_kind": _dictionary(kinds),
        "program": _dictionary(_by_program(table, (*texts, *table.tvm.texts)), pa.large_string(), order),
        "task": _dictionary(tasks),
        "device": _dictionary(table.device),
        "device_spec": _dictionary(table.device.map(lambda name: specs.get(name, ""))),
        **{n: _dictionary(getattr(table, n)) for n in SETTINGS},
        "latency_s": pa.array(table.latency_s, from_pandas=True),
        "repeats_s": pa.nulls(len(table), COLUMNS["repeats_s"][0]) if table.repeats_s is None else table.repeats_s,
        "failure": _dictionary(failure),
        "flagged": pa.array(~table.excluded.is_("")),
        "excluded_reason": _dictionary(table.excluded),
        "unsupported_reason": _dictionary(table.unsupported),
        "row_filter": pa.nulls(len(table), pa.bool_()) if table.row_filter is None else pa.array(table.row_filter),
        "source": _dictionary(table.source),
        "source_row": pa.array(table.source_row),
        "source_op": _dictionary(table.op),
        "source_device": _dictionary(table.device_name),
        **{name: _dictionary(labels) for name, labels in table.provenance.items()},
    }
    fields = []
    for name, column in columns.items():
        _, about, unit = COLUMNS.get(name, (None, "provenance", ""))
        metadata = {"description": about, **({"unit": unit} if unit else {})}
        fields.append(pa.field(name, column.type, metadata=metadata))
    schema = pa.schema(fields, metadata={VERSION_KEY: str(SCHEMA_VERSION).encode()})
    return pa.table(list(columns.values()), schema=schema)


def _by_program(table: MeasurementTable, names: tuple[str, ...]) -> Labels:
    """A label per program as a label per row; "" for rows without a program."""
    keys = np.where(table.program_key < 0, len(names), table.program_key)
    return Labels(keys.astype(np.int32), (*names, ""))


def _dictionary(labels: Labels, kind: Any = None, order: Codes | None = None) -> Any:
    """A dictionary array whose dictionary holds only what occurs, sorted by ``order`` (one per name)."""
    used, codes = np.unique(labels.codes, return_inverse=True)
    if order is not None:
        ranked = np.argsort(order[used], kind="stable")
        used, codes = used[ranked], np.argsort(ranked)[codes]
    names = pa.array([labels.names[c] for c in used], type=kind or pa.string())
    return pa.DictionaryArray.from_arrays(pa.array(codes.astype(np.int32)), names)


def read_records(path: str | PathLike[str]) -> MeasurementTable:
    """Read project records. Those that lack columns, or of a newer version, are an error."""
    file = Path(path)
    try:
        check_parquet(file)
        schema = pq.read_schema(file)
        lacking = sorted(NEEDED - set(schema.names))
        if lacking:
            raise DataError(f"{file}: records lack {', '.join(lacking)}", hint="see docs/data.md")
        arrow = pq.read_table(file, read_dictionary=["program", "program_hash"])
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{file} is no readable Parquet file: {error}", hint="write it again") from None
    version = (schema.metadata or {}).get(VERSION_KEY, b"1").decode("ascii", "replace")
    if not version.isdigit() or int(version) > SCHEMA_VERSION:
        raise DataError(
            f"{file}: records of schema version {version}, this package reads up to {SCHEMA_VERSION}",
            hint="install a newer cdmpp",
        )
    return table_from_arrow(arrow, file)


def table_from_arrow(arrow: Any, path: Path) -> MeasurementTable:
    """Check records and build the table. Identities and flags are computed again, not taken from the records."""
    raw = RawTable(arrow, path)
    rows = len(raw)
    parsed = read_programs(raw.labels("program"), raw.labels("program_kind"), raw)
    device_name = raw.labels("source_device") if "source_device" in raw.columns else raw.labels("device")
    device, known = canonical_devices(raw.labels("device"))
    specs, wrong_device = read_specs(device, raw.labels("device_spec"))
    known |= device.is_in(specs)
    settings = {name: raw.labels(name) for name in SETTINGS}
    settings["implementation"] = stated_or_default(settings["implementation"], parsed.op, settings["framework"])
    reason = _stored_reasons(raw, parsed.reason, parsed.key)
    mark(reason, wrong_device, "invalid_device")
    mark(reason, ~known, "unknown_device")
    mark(reason, ~settings_known(settings), "unknown_setting")
    source_row = raw.ints("source_row")
    table = MeasurementTable(
        programs=parsed.blocks,
        program_key=parsed.key,
        latency_s=raw.latency_s(),
        op=raw.labels("source_op") if "source_op" in raw.columns else parsed.op,
        device_name=device_name,
        device=device,
        **settings,
        source=raw.labels("source", path.stem),
        excluded=Labels.constant("", rows),
        unsupported=Labels(reason, REASONS),
        source_row=np.where(source_row.missing, np.arange(rows), source_row.values),
        row_filter=_filter(raw),
        repeats_s=_repeats(arrow),
        failure=raw.labels("failure") if "failure" in raw.columns else None,
        device_specs=specs,
        provenance={name: raw.labels(name) for name in raw.columns if name not in COLUMNS and _is_text(arrow, name)},
        tvm=parsed.tvm,
    )
    return replace(table, excluded=_merge_flags(raw.labels("excluded_reason"), flag_rows(table)))


def _stored_reasons(raw: RawTable, reason: Any, key: Int64) -> Any:
    """Rows without a program keep the reason for which the importer gave it up, if it is a known one."""
    stored = raw.labels("unsupported_reason")
    codes = np.array([CODE.get(n, 0) if n in UNSUPPORTED else 0 for n in stored.names], dtype=np.int32)
    stored_codes = codes[stored.codes] if len(raw) else codes[:0]
    return np.where((key < 0) & (stored_codes > 0), stored_codes, reason).astype(np.int32)


def _merge_flags(stored: Labels, derived: Labels) -> Labels:
    """Reasons that the rules give now; where they give none, stored ones of the measuring tool (unstable)."""
    both = Labels.concat([derived, stored.map(lambda r: "" if r in EXCLUDED else r)])
    derived_codes, stored_codes = both.codes[: len(derived)], both.codes[len(derived) :]
    return Labels(np.where(derived.is_(""), stored_codes, derived_codes).astype(np.int32), both.names)


def _filter(raw: RawTable) -> Any:
    if "row_filter" not in raw.columns or raw.table.column("row_filter").null_count == len(raw):
        return None
    return raw.bools("row_filter")


def _repeats(arrow: Any) -> Any:
    if "repeats_s" not in arrow.column_names:
        return None
    column = arrow.column("repeats_s")
    if column.null_count == len(column):
        return None
    try:
        return pa.concat_arrays(column.cast(COLUMNS["repeats_s"][0]).chunks)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        raise DataError("repeats_s is no list of numbers", hint="list<double>, in seconds") from None


def _is_text(arrow: Any, name: str) -> bool:
    kind = arrow.schema.field(name).type
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def as_device(table: MeasurementTable, device: DeviceSpec) -> MeasurementTable:
    """Assign all measurements to ``device`` and apply the physics rules again.

    ``device_name`` stays what the file calls it, or becomes the device's name where the file has none.
    """
    given = replace(
        table,
        device=Labels.constant(device.name, len(table)),
        device_name=table.device_name.map(lambda name: name or device.name),
        device_specs={device.name: device},
        unsupported=table.unsupported.map(lambda reason: "" if reason in _OF_THE_DEVICE else reason),
    )
    return replace(given, excluded=_merge_flags(table.excluded, flag_rows(given)))


@dataclass(frozen=True)
class ParsedPrograms:
    """Programs of a file, and per row the key, the reason against it (0: none) and the operator's name."""

    blocks: tuple[OperatorBlock, ...]
    tvm: TvmPrograms
    key: Int64
    reason: Reasons
    op: Labels


def read_programs(texts: Labels, kinds: Labels, raw: RawTable) -> ParsedPrograms:
    """Parse each distinct program once. ``texts`` and ``kinds``: columns ``program`` and ``program_kind``; ``raw``
    holds ``program_hash`` and ``task``, which TVM programs need."""
    is_operator, is_tvm = kinds.is_("operator"), kinds.is_("tvm_json")
    blocks, key_of, reason_of, names = _operators(texts, np.unique(texts.codes[is_operator]))
    key = np.where(is_operator, key_of[texts.codes], -1)
    reason = np.where(is_operator, reason_of[texts.codes], CODE["missing_program"]).astype(np.int32)
    op = Labels(np.where(is_operator, texts.codes, len(names)).astype(np.int32), (*names, "tvm"))
    tvm = TvmPrograms(first_key=sum(map(len, blocks)))
    if is_tvm.any():
        tvm = _tvm_programs(texts, raw, np.flatnonzero(is_tvm), tvm.first_key, key, reason)
    return ParsedPrograms(blocks, tvm, key, reason, op.map(str))


def _operators(texts: Labels, codes: Int64) -> tuple[tuple[OperatorBlock, ...], Int64, Reasons, list[str]]:
    """Blocks of the operators at ``codes``; key, reason and operator name for every code of ``texts``."""
    count = len(texts.names)
    reason = np.full(count, CODE["missing_program"], dtype=np.int32)
    names = [""] * count
    dtypes = [""] * count
    members: dict[tuple[Any, ...], list[tuple[int, Mapping[str, Any]]]] = {}
    for code in codes.tolist():
        fields = _fields(texts.names[code])
        operator = fields.get("operator")
        if not isinstance(operator, str):
            continue
        names[code], dtypes[code] = operator, str(fields.get("dtype", default_dtype(operator)))
        if operator not in operator_types():
            reason[code] = CODE["unknown_operator"]
            continue
        flags = {n: fields.get(n, default) for n, default in flag_defaults(operator).items()}
        known = fields.keys() <= operator_types()[operator].model_fields.keys()
        if known and all(isinstance(v, bool | int | float | str | None) for v in flags.values()):
            members.setdefault((operator, dtypes[code], *flags.items()), []).append((code, fields))
    groups = []
    for (operator, dtype, *given), coded in members.items():
        structural = _structural(operator, dtype, dict(given))
        if structural is not None:
            groups.append(_group(operator, structural, coded, count))
    blocks, key_of, checked = check_groups(groups, Labels.of(dtypes))
    for group in groups:
        reason[group.rows] = checked[group.rows]
    return blocks, key_of, reason, names


def _group(operator: str, flags: dict[str, Any], coded: list[tuple[int, Mapping[str, Any]]], count: int) -> Group:
    """Sizes of one operator as columns over all programs."""
    index = np.array([code for code, _ in coded], dtype=np.int64)
    rows = np.zeros(count, dtype=np.bool_)
    rows[index] = True
    sizes = {}
    for info in integer_fields(operator):
        if info.name in flags:
            continue
        default = _ABSENT if info.default is None else info.default
        column = [fields.get(info.name, default) for _, fields in coded]
        whole = [_whole(value) for value in column]
        filled = IntColumn.constant(0, count)
        filled.values[index] = [0 if value is None else value for value in whole]
        missing, invalid = filled.missing, filled.invalid.copy()
        missing[index] = [value is _ABSENT for value in column]
        invalid[index] = [w is None and v is not _ABSENT for w, v in zip(whole, column, strict=True)]
        sizes[info.name] = IntColumn(filled.values, missing, invalid)
    return Group(operator, rows, sizes, flags)


def _fields(text: str) -> dict[str, Any]:
    """Fields of an operator from JSON or from its short text; empty when it is neither."""
    if not text.lstrip().startswith("{"):
        try:
            return parse_operator(text).canonical()
        except CdmppError:
            return {}
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _structural(operator: str, dtype: str, flags: Mapping[str, Any]) -> dict[str, Any] | None:
    """Structural fields as the specification reads them; None when it refuses one or their combination."""
    kind = operator_types()[operator]
    if dtype not in kind.dtypes:
        return dict(flags)  # check_groups gives the reason
    sizes = {info.name: info.low for info in integer_fields(operator) if info.default is None}
    try:
        spec = kind.model_validate({"operator": operator, "dtype": dtype, **sizes, **flags})
        spec.check_types()
    except (ValidationError, InvalidProgramError):
        return None
    return {name: getattr(spec, name) for name in flags}


def _whole(value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return value if type(value) is int and abs(value) < 2**62 else None


def _tvm_programs(
    texts: Labels, raw: RawTable, rows: Int64, first_key: int, key: Int64, reason: Reasons
) -> TvmPrograms:
    """Number the TVM programs by their hash; rows without text or hash keep their reason."""
    hashes, tasks = raw.labels("program_hash"), raw.labels("task")
    index: dict[str, int] = {}
    pairs: list[tuple[str, str]] = []
    numbers = []
    for row in rows.tolist():
        digest, text = hashes[row], texts[row]
        if not digest or not text:
            numbers.append(-1)
            continue
        number = index.setdefault(digest, len(index))
        if number == len(pairs):
            pairs.append((text, tasks[row]))
        numbers.append(number)
    numbered = np.array(numbers, dtype=np.int64)
    good = rows[numbered >= 0]
    key[good] = first_key + numbered[numbered >= 0]
    reason[good] = 0
    long = sum(len(text) for text, _ in pairs) > PACKED_FROM
    programs = (text for text, _ in pairs)
    return TvmPrograms(
        first_key, tuple(index), PackedTexts(programs) if long else tuple(programs), tuple(t for _, t in pairs)
    )
