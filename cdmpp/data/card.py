"""The card of a dataset folder: ``README.md``, made from the data alone.

Every figure is counted in the files. Known faults and the command that makes the data again cannot be counted:
the caller passes them in, or the card leaves them out.
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
from cdmpp.data.networks import networks_of, task_of
from cdmpp.data.noise import measured
from cdmpp.data.physics import UNSTABLE
from cdmpp.data.split_file import read_splits
from cdmpp.data.summary import summarise
from cdmpp.data.table import MeasurementTable
from cdmpp.data.writing import replacing
from cdmpp.errors import DataError, UnknownDeviceError
from cdmpp.units import format_latency

_MOST_REASONS, _REASON_LENGTH = 12, 100
_FILES = {
    RECORDS: "project records, one row a measurement",
    REPEATS: "second measurements of some programs, for the noise floor; no data to train on",
    SPLITS: "parts by task, by network, by device",
}


def write_card(
    folder: str | PathLike[str], *, command: str = "", faults: Sequence[str] = (), notes: Sequence[str] = ()
) -> Path:
    """Write ``README.md`` of a dataset folder; written aside, then renamed.

    Parameters
    ----------
    folder : path
        A folder with ``records.parquet``.
    command : str
        What makes the data again; left out of the card unless given.
    faults : sequence of str
        Known faults, a sentence each.
    notes : sequence of str
        How it was measured, a sentence each: what the records do not say themselves.

    Returns
    -------
    Path
        The card.

    Raises
    ------
    DataError
        There are no records, or the card cannot be written.
    """
    place = Path(folder)
    records_file(place)  # a file of records has no card of its own
    if not place.is_dir():
        raise DataError(f"{place} is no folder", hint="a card describes a dataset folder")
    text = card_text(place, command=command, faults=faults, notes=notes)
    with replacing(place / CARD) as aside:
        aside.write_text(text, encoding="utf-8")
    return place / CARD


def card_text(folder: Path, *, command: str = "", faults: Sequence[str] = (), notes: Sequence[str] = ()) -> str:
    """The card as Markdown; parameters as :func:`write_card`."""
    table = load_table(folder)
    again = repeats_file(folder)
    summary = summarise(table, None if again is None else load_table(again))
    parts = [
        f"# {folder.resolve().name}",
        _what(table, summary),
        _section("How it was measured", _bullets(notes)),
        _section("Devices", _devices(table, summary)),
        _section("Networks", _networks(table)),
        _section("Programs by origin", _origins(table)),
        _section("Latency", _latency(table, summary)),
        _section("Failed and flagged", _reasons(table, summary)),
        _section("Splits", _splits(folder)),
        _section("Known faults", _bullets(faults)),
        _section("Files", _files(folder)),
        _section("Made by", f"```\n{command}\n```" if command else ""),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _what(table: MeasurementTable, summary: dict[str, Any]) -> str:
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
    moments = _texts(table, "measured_at")
    if moments:
        lines.append(f"Measured {moments[0]} to {moments[-1]}.")
    versions = _texts(table, "tvm")
    if versions:
        lines.append(f"TVM {', '.join(versions)}.")
    lines.append(
        f"Fingerprint {summary['fingerprint']}; `cdmpp data info` shows the same counts, and docs/data.md "
        "describes the columns."
    )
    return "\n".join(filter(None, lines))


def _devices(table: MeasurementTable, summary: dict[str, Any]) -> str:
    rows = []
    sources = []
    for name in summary["devices"]:
        here = table.device.array() == name
        rows_of_device = table.select(here)
        try:
            spec = table.device_spec(name)
        except UnknownDeviceError:
            rows.append((name, "not described", "", "", "", "", *_conditions(rows_of_device)))
            continue
        rows.append(
            (
                name,
                f"{spec.vendor} {spec.arch}",
                f"{spec.compute_units} x {spec.cores_per_unit}",
                f"{spec.clock_hz / 1e9:.3g} GHz",
                f"{spec.peak_flops_fp32 / 1e9:,.4g} Gflop/s",
                f"{spec.mem_bandwidth_bytes_per_s / 1e9:.3g} GB/s",
                *_conditions(rows_of_device),
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
    names = sorted({name for names_of_row in networks for name in names_of_row})
    good = np.bincount(table.program_key[measured(table) & (table.program_key >= 0)], minlength=table.n_programs)
    rows = []
    for name in names:
        keys = [key for key, names_of_row in enumerate(networks) if name in names_of_row]
        own = sum(networks[key] == {name} for key in keys)
        count = len({tasks[key] for key in keys})
        rows.append((name, f"{count:,}", f"{len(keys):,}", f"{own:,}", f"{int(good[keys].sum()):,}"))
    header = ("network", "tasks", "programs", "of no other network", "records")
    return _markdown(header, rows) if rows else ""


def _origins(table: MeasurementTable) -> str:
    column = table.provenance.get("origin")
    if column is None:
        return ""
    good = measured(table)
    rows = []
    for origin in sorted(column.used()):
        here = column.is_(origin)
        programs = len(np.unique(table.program_key[here]))
        rows.append((origin or "(not given)", f"{programs:,}", f"{int((here & good).sum()):,}"))
    return _markdown(("origin", "programs", "records"), rows)


def _latency(table: MeasurementTable, summary: dict[str, Any]) -> str:
    spread, rows = _spread(table), []
    floors = summary["noise_floor_by_device"]
    for name in summary["devices"]:
        here = (table.device.array() == name) & measured(table)
        if not here.any():
            continue
        quantiles = np.quantile(table.latency_s[here], [0, 0.5, 1])
        low, middle, high = (format_latency(float(value)) for value in quantiles)
        within = spread[here][np.isfinite(spread[here])]
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
        "device",
        "records",
        "range",
        "median",
        "spread, median",
        "spread, 90 %",
        "measured twice",
        "noise, median",
        "noise, 90 %",
    )
    said = (
        "Spread: interquartile range / median of the raw repeats of a record (4 or more). Noise: relative "
        "difference |a - b| / mean of two measurements of a program, some time apart."
    )
    return f"{_markdown(header, rows)}\n\n{said}" if rows else ""


def _spread(table: MeasurementTable) -> Any:
    """Interquartile range / median of each row's repeats; NaN where there are fewer than four."""
    result = np.full(len(table), np.nan)
    for row, repeats in enumerate([] if table.repeats_s is None else table.repeats_s.to_pylist()):
        if repeats is not None and len(repeats) >= 4:
            low, middle, high = np.quantile(repeats, [0.25, 0.5, 0.75])
            result[row] = (high - low) / middle
    return result


def _reasons(table: MeasurementTable, summary: dict[str, Any]) -> str:
    lines = [
        f"{summary['failed']:,} failed, {summary['flagged']:,} flagged as {UNSTABLE} (kept, not trained on), "
        f"{summary['duplicates']:,} measured before under the same conditions."
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
        lines.append(_markdown(("why it failed", "rows"), rows) if rows else "")
    other = {k: n for k, n in summary["excluded"].items() if k not in (UNSTABLE, "failed")}
    if other or summary["unsupported"]:
        every = {**other, **summary["unsupported"]}
        lines.append("Left out for other reasons: " + ", ".join(f"{k} {n:,}" for k, n in every.items()) + ".")
    return "\n\n".join(filter(None, lines))


def _splits(folder: Path) -> str:
    if not (folder / SPLITS).is_file():
        return ""
    splits = read_splits(folder / SPLITS)
    rows = []
    for name, parts in splits.counts().items():
        unit = "programs" if name in splits.programs else "devices"
        rows.append((name, unit, *(f"{parts[part]:,}" for part in ("train", "validation", "test", "unused"))))
    held = splits.about.get("test_networks") or []
    text = _markdown(("split", "of", "train", "validation", "test", "unused"), rows)
    return text + (f"\n\nTest networks: {', '.join(held)}." if held else "")


def _files(folder: Path) -> str:
    rows = [
        (f"`{name}`", f"{(folder / name).stat().st_size / 1e6:.2f} MB", about)
        for name, about in _FILES.items()
        if (folder / name).is_file()
    ]
    return _markdown(("file", "size", "what"), rows)


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
