"""Dataset card, the ``README.md`` of a dataset folder; and dataset folders of several machines as one.

All figures of a card are counted in the files. Facts that cannot be counted (known faults, the command that made the
data) are arguments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from cdmpp.data.folder import CARD, RECORDS, REPEATS, SPLITS, records_file, repeats_file
from cdmpp.data.load import load_table
from cdmpp.data.physics import UNSTABLE
from cdmpp.data.records import write_records
from cdmpp.data.split_file import make_splits, read_seal, read_splits, write_splits
from cdmpp.data.splits import SEALED, SEALED_FROM, networks_of, sealed_names, task_of
from cdmpp.data.summary import MIN_REPEATS, measured, spread, summarise
from cdmpp.data.table import MeasurementTable, concat
from cdmpp.errors import DataError, UnknownDeviceError
from cdmpp.utils.units import format_latency
from cdmpp.utils.writing import check_new_folder, write_text

_MOST_REASONS, _REASON_LENGTH = 12, 100
_FILES = {
    RECORDS: "measurement records, one row per measurement",
    REPEATS: "second measurements of some programs, for the noise floor; not for training",
    SPLITS: "splits by task, by network, by device, and the sealed networks",
}


def write_card(
    folder: str | PathLike[str], *, command: str = "", faults: Sequence[str] = (), notes: Sequence[str] = ()
) -> Path:
    """Write ``README.md`` of a dataset folder, which is replaced atomically.

    ``command`` reproduces the data (empty: no such section); ``faults`` (known ones) and ``notes`` (how the data were
    measured) are sentences. Returns the path of the card.
    """
    path = Path(folder)
    records_file(path)  # raises if there are no records
    if not path.is_dir():
        raise DataError(f"{path} is not a folder", hint="pass a dataset folder, not a file of records")
    text = card_text(path, command=command, faults=faults, notes=notes)
    write_text(path / CARD, text)
    return path / CARD


def card_text(folder: Path, *, command: str = "", faults: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """Render the card as Markdown. The parameters are those of :func:`write_card`."""
    table = load_table(folder)
    repeats = repeats_file(folder)
    summary = summarise(table, None if repeats is None else load_table(repeats))
    parts = [
        f"# {folder.resolve().name}",
        _overview(table, summary),
        _section("How it was measured", _bullets(notes)),
        _section("Devices", _devices(table, summary)),
        _section("Networks", _networks(table)),
        _section("Programs by origin", _origins(table)),
        _section("Latency", _latency(table, summary)),
        _section("Failed and flagged", _reasons(table, summary)),
        _section("Splits", _splits(folder)),
        _section("Known faults", _bullets(faults)),
        _section("Files", _files(folder)),
        _section("Command", f"```\n{command}\n```" if command else ""),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _overview(table: MeasurementTable, summary: dict[str, Any]) -> str:
    counts = (
        f"{summary['records']:,} measurements of {summary['programs']:,} programs"
        + (f" ({summary['tasks']:,} tasks, {len(summary['networks'])} networks)" if summary["tasks"] else "")
        + f" on {len(summary['devices'])} device{'s' * (len(summary['devices']) != 1)}."
    )
    conditions = "; ".join(
        f"{name}: {', '.join(f'{key} {n:,}' for key, n in summary[name].items() if key)}"
        for name in ("backend", "protocol", "framework")
        if any(summary[name])
    )
    lines = [counts, f"{conditions}." if conditions else ""]
    times = _texts(table, "measured_at")
    if times:
        lines.append(f"Measured from {times[0]} to {times[-1]}.")
    versions = _texts(table, "tvm")
    if versions:
        lines.append(f"TVM {', '.join(versions)}.")
    lines.append(
        f"Fingerprint: {summary['fingerprint']}. `cdmpp data info` shows the same counts. docs/data.md "
        "describes the columns."
    )
    return "\n".join(filter(None, lines))


def _devices(table: MeasurementTable, summary: dict[str, Any]) -> str:
    rows = []
    sources = []
    for name in summary["devices"]:
        records = table.select(table.device.array() == name)
        try:
            spec = table.device_spec(name)
        except UnknownDeviceError:
            rows.append((name, "no specification", "", "", "", "", *_conditions(records)))
            continue
        rows.append(
            (
                name,
                f"{spec.vendor} {spec.arch}",
                f"{spec.compute_units} x {spec.cores_per_unit}",
                f"{spec.clock_hz / 1e9:.3g} GHz",
                f"{spec.peak_flops_fp32 / 1e9:,.4g} Gflop/s",
                f"{spec.mem_bandwidth_bytes_per_s / 1e9:.3g} GB/s",
                *_conditions(records),
            )
        )
        sources.append(f"{name}: {spec.source}")
    header = ("device", "CPU or board", "units x lanes", "clock", "fp32 peak", "memory", "threads", "cores", "target")
    return f"{_markdown(header, rows)}\n\n{_bullets(sources)}"


def _conditions(table: MeasurementTable) -> tuple[str, str, str]:
    """Threads, cores and target of the rows of one device."""
    threads, cores, targets = (", ".join(_texts(table, name)) for name in ("threads", "affinity", "target"))
    return threads, cores, f"`{targets}`" if targets else ""


def _networks(table: MeasurementTable) -> str:
    networks, tasks = networks_of(table), task_of(table)
    names = sorted({name for users in networks for name in users})
    records = np.bincount(table.program_key[measured(table) & (table.program_key >= 0)], minlength=table.n_programs)
    rows = []
    for name in names:
        keys = [key for key, users in enumerate(networks) if name in users]
        exclusive = sum(networks[key] == {name} for key in keys)
        count = len({tasks[key] for key in keys})
        rows.append((name, f"{count:,}", f"{len(keys):,}", f"{exclusive:,}", f"{int(records[keys].sum()):,}"))
    header = ("network", "tasks", "programs", "programs of this network only", "records")
    return _markdown(header, rows) if rows else ""


def _origins(table: MeasurementTable) -> str:
    column = table.provenance.get("origin")
    if column is None:
        return ""
    valid = measured(table)
    rows = []
    for origin in sorted(column.used()):
        here = column.is_(origin)
        programs = len(np.unique(table.program_key[here]))
        rows.append((origin or "(unknown)", f"{programs:,}", f"{int((here & valid).sum()):,}"))
    return _markdown(("origin", "programs", "records"), rows)


def _latency(table: MeasurementTable, summary: dict[str, Any]) -> str:
    spreads, rows = spread(table), []
    floors = summary["noise_floor_by_device"]
    for name in summary["devices"]:
        here = (table.device.array() == name) & measured(table)
        if not here.any():
            continue
        quantiles = np.quantile(table.latency_s[here], [0, 0.5, 1])
        low, middle, high = (format_latency(float(value)) for value in quantiles)
        within = spreads[here][np.isfinite(spreads[here])]
        floor = floors.get(name)
        noise = ("-",) * 3
        if floor:
            noise = (f"{floor['n']:,}", _percent(floor["median"]), _percent(floor["p90"]))
        rows.append(
            (
                name,
                f"{int(here.sum()):,}",
                f"{low} to {high}",
                middle,
                _percent(np.median(within)) if len(within) else "-",
                _percent(np.quantile(within, 0.9)) if len(within) else "-",
                *noise,
            )
        )
    header = (
        *("device", "records", "range", "median", "spread, median"),
        *("spread, 90 %", "measured twice", "noise, median", "noise, 90 %"),
    )
    note = (
        f"Spread is the interquartile range / median of the repeats of a record with at least {MIN_REPEATS} repeats. "
        "Noise is the relative difference |a - b| / mean of two measurements of the same program at different times; "
        "its median is the noise floor of the device."
    )
    return f"{_markdown(header, rows)}\n\n{note}" if rows else ""


def _reasons(table: MeasurementTable, summary: dict[str, Any]) -> str:
    lines = [
        f"{summary['failed']:,} failed, {summary['flagged']:,} flagged as {UNSTABLE} (kept, not for training), "
        f"{summary['duplicates']:,} duplicates of an earlier measurement under the same conditions."
    ]
    if table.failure is not None:
        counts: Counter[str] = Counter()
        for reason, n in table.failure.counts().items():
            if reason:
                counts[" ".join(reason.split())[:_REASON_LENGTH]] += n
        shown = counts.most_common(_MOST_REASONS)
        rows = [(reason.replace("|", "\\|"), f"{n:,}") for reason, n in shown]
        rest = counts.total() - sum(n for _, n in shown)
        rows += [("others", f"{rest:,}")] if rest else []
        lines.append(_markdown(("reason of the failure", "rows"), rows) if rows else "")
    other = {k: n for k, n in summary["excluded"].items() if k not in (UNSTABLE, "failed")}
    if other or summary["unsupported"]:
        every = {**other, **summary["unsupported"]}
        lines.append("Excluded for other reasons: " + ", ".join(f"{k} {n:,}" for k, n in every.items()) + ".")
    return "\n\n".join(filter(None, lines))


def _splits(folder: Path) -> str:
    if not (folder / SPLITS).is_file():
        return ""
    splits = read_splits(folder / SPLITS)
    rows = []
    for name, parts in splits.counts().items():
        unit = "programs" if name in splits.programs else "devices"
        rows.append((name, unit, *(f"{parts[part]:,}" for part in ("train", "validation", "test", "unused"))))
    held, sealed = (splits.about.get(name) or [] for name in ("test_networks", SEALED))
    text = _markdown(("split", "of", "train", "validation", "test", "unused"), rows)
    text += f"\n\nTest networks: {', '.join(held)}." if held else ""
    if sealed:
        text += (
            f"\n\nSealed networks: {', '.join(sealed)}. They have the smallest sha256('sealed-1:' + name) of the "
            f"{len(splits.about[SEALED_FROM])} networks that the file states. No training, choice of a parameter or "
            "error analysis may read a program of a task that they use; `cdmpp train` leaves these programs out. "
            "Only the final evaluation of a model may read them, once per issue, with its date and model recorded."
        )
    return text


def _files(folder: Path) -> str:
    rows = [
        (f"`{name}`", f"{(folder / name).stat().st_size / 1e6:.2f} MB", about)
        for name, about in _FILES.items()
        if (folder / name).is_file()
    ]
    return _markdown(("file", "size", "content"), rows)


def _texts(table: MeasurementTable, name: str) -> list[str]:
    column = table.provenance.get(name)
    return sorted(filter(None, column.used())) if column is not None else []


def _percent(fraction: float) -> str:
    return f"{100 * fraction:.1f} %"


def _section(title: str, text: str) -> str:
    return f"## {title}\n\n{text}" if text else ""


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)


def merge_folders(
    folders: Sequence[str | PathLike[str]], out: str | PathLike[str], *, command: str = "", notes: Sequence[str] = ()
) -> Path:
    """Write the records and second measurements of dataset folders into a new or empty folder, with a card.

    Networks that a folder seals stay sealed: the new folder gets splits by task and by device, and the sealed split. A
    program that several folders have is stored once. Folders that contradict each other about a device or about the
    sealed networks are an error.
    """
    path = Path(out)
    check_new_folder(path)
    seals = {seal for folder in folders if (seal := read_seal(Path(folder) / SPLITS))[1]}
    if len(seals) > 1:
        named = "; ".join(sorted(", ".join(sealed_names(*seal)) for seal in seals))
        raise DataError(
            f"the folders seal different networks: {named}", hint="merge folders that seal the same networks"
        )
    records = concat([load_table(folder) for folder in folders])
    repeats = [load_table(repeats_path) for repeats_path in map(repeats_file, folders) if repeats_path is not None]
    path.mkdir(parents=True, exist_ok=True)
    # The seal first: a merge that is killed leaves no records without it.
    for stated, count in seals:
        write_splits(make_splits(records, sealed=count, sealed_from=stated), path / SPLITS)
    if repeats:
        write_records(concat(repeats), path / REPEATS)
    write_records(records, path / RECORDS)
    write_card(path, command=command, notes=notes)
    return path
