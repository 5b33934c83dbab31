"""The table of known devices, and lookup by name.

``table.csv`` has one row per board, units in the column names. It keeps the units of the data sheets (MHz, GB, Tflop/s)
so that a row can be compared with its source by eye; they become base units here and nowhere else. An empty cell is a
missing figure. ``source`` names the document of a row and ``source_of`` the figures that come from elsewhere;
``sources.csv`` lists the documents.

Names are compared without case, punctuation and the vendors' brand words, so ``"NVIDIA GeForce RTX
3090"``, ``rtx3090`` and ``RTX-3090`` are one. A family name that several boards share (``a100``,
``v100``, ``h100``) is refused with the list: the boards differ by up to 30 % in bandwidth, and a
silent choice among them would be an invented figure.
"""

from __future__ import annotations

import csv
import difflib
import io
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files

from cdmpp.devices.spec import SPECIFICATION_HINT, DeviceSpec
from cdmpp.errors import UnknownDeviceError

#: Column of the table -> field of DeviceSpec and factor to base units. Memory is in nominal GB (10^9) of the sheet, and
#: in GiB as programs see it; cache sizes are binary, as every vendor counts them.
COLUMNS: dict[str, tuple[str, float]] = {
    "clock_mhz": ("clock_hz", 1e6),
    "memory_gb": ("nominal_memory_bytes", 1e9),
    "memory_gib": ("memory_bytes", float(2**30)),
    "mem_bandwidth_gb_per_s": ("mem_bandwidth_bytes_per_s", 1e9),
    "peak_fp32_tflops": ("peak_flops_fp32", 1e12),
    "peak_fp32_matrix_tflops": ("peak_flops_fp32_matrix", 1e12),
    "peak_fp16_matrix_tflops": ("peak_flops_fp16_matrix", 1e12),
    "peak_bf16_matrix_tflops": ("peak_flops_bf16_matrix", 1e12),
    "peak_int8_tops": ("peak_ops_int8", 1e12),
    "peak_fp64_tflops": ("peak_flops_fp64", 1e12),
    "peak_tf32_matrix_tflops": ("peak_flops_tf32_matrix", 1e12),
    "peak_fp8_matrix_tflops": ("peak_flops_fp8_matrix", 1e12),
    "peak_fp4_matrix_tflops": ("peak_flops_fp4_matrix", 1e12),
    "l2_mib": ("l2_bytes", float(2**20)),
    "l2_bandwidth_gb_per_s": ("l2_bandwidth_bytes_per_s", 1e9),
    "sustained_clock_mhz": ("sustained_clock_hz", 1e6),
    "matrix_flops_per_cycle_per_unit": ("matrix_flops_per_cycle_per_unit", 1.0),
    "tdp_w": ("tdp_w", 1.0),
}


def _read(file_name: str) -> list[dict[str, str]]:
    text = files("cdmpp.devices").joinpath(file_name).read_text(encoding="utf-8")
    return list(csv.DictReader(io.StringIO(text)))


def sources() -> dict[str, str]:
    """Documents of the table: key to title."""
    return {row["source"]: row["document"] for row in _read("sources.csv")}


def _cite(row: dict[str, str], documents: dict[str, str]) -> str:
    """One line for a reader: the row's document, then the figures that come from elsewhere."""
    parts = [documents[row["source"]]]
    columns: dict[str, list[str]] = {}
    for item in filter(None, row["source_of"].split(";")):
        column, key = item.split("=")
        columns.setdefault(key, []).append(column)
    parts += [f"{', '.join(names)}: {documents[key]}" for key, names in columns.items()]
    if row["note"]:
        parts.append(f"note: {row['note']}")
    return "; ".join(parts)


@cache
def table() -> dict[str, DeviceSpec]:
    """All known devices by name, in the order of the table (by vendor and generation)."""
    documents = sources()
    devices = {}
    for row in _read("table.csv"):
        figures = {
            # 15 digits: 2039 * 1e9 is exact, 12.28 * 1e12 would be 12279999999999.998
            field: float(f"{float(row[column]) * factor:.15g}") if row[column] else None
            for column, (field, factor) in COLUMNS.items()
        }
        devices[row["name"]] = DeviceSpec.model_validate(
            {
                **{name: row[name] for name in ("name", "vendor", "arch", "kind", "status")},
                **{name: int(row[name]) for name in ("compute_units", "cores_per_unit")},
                **figures,
                "link": row["link"] or None,
                **{name: int(row[name]) if row[name] else None for name in ("ranks_per_node", "nvlink_domain")},
                "source": _cite(row, documents),
                "aliases": tuple(row["aliases"].split("|")),
            }
        )
    return devices


_BRANDS = frozenset({"nvidia", "amd", "intel", "geforce", "tesla", "quadro", "instinct", "radeon", "gpu", "hgx", "dgx"})
_MAX_NEAREST = 5
#: Shown when nothing resembles the name: what a valid one looks like.
_WELL_KNOWN = ("a100-pcie-40gb", "h100-sxm", "t4", "rtx-4090", "mi300x")


#: Commonest board of a short name that several boards share.
_COMMONEST = {
    name: board
    for board, names in {
        "a100-sxm4-80gb": ("a100", "a100 80gb", "a100 sxm", "a100 sxm4"),
        "a100-sxm4-40gb": ("a100 40gb",),
        "a100-pcie-40gb": ("a100 pcie",),
        "a800-sxm4-80gb": ("a800", "a800 80gb"),
        "arc-pro-b60": ("arc b60", "b60"),
        "b200": ("b200 sxm",),
        "b300": ("b300 sxm",),
        "gb200": ("gb200 nvl72",),
        "gb300": ("gb300 nvl72",),
        "h100-sxm": ("h100", "h100 80gb"),
        "h200": ("h200 141gb", "h200 sxm5"),
        "mi300x": ("mi300",),
        "mi350x": ("mi350",),
        "p100-pcie-16gb": ("p100",),
        "rtx-pro-6000-server": ("rtx pro 6000", "rtx pro 6000 blackwell"),
        "v100-sxm2-16gb": ("v100", "v100 16gb", "v100 sxm2"),
        "v100-sxm2-32gb": ("v100 32gb",),
        "v100-pcie-16gb": ("v100 pcie",),
    }.items()
    for name in names
}
#: Names of a series that are no beginning of its boards' names.
_SERIES = {"mi300": ("mi300x", "mi300a", "mi308x"), "mi350": ("mi350x", "mi355x")}
#: Chips that measured tables name and that have no published figures.
_WITHOUT_FIGURES = {"gfx1250": "unreleased hardware without a published specification"}
#: Product lines that people leave out: "4090".
_LINES = ("rtx", "gtx", "rx")


def _words(name: str) -> list[str]:
    return [word for word in re.findall(r"[a-z0-9]+", name.casefold()) if word not in _BRANDS]


def normalise(name: str) -> str:
    """The form in which names are compared: ``"NVIDIA A100-PCIE-40GB"`` gives ``"a100pcie40gb"``."""
    return "".join(_words(name))


@cache
def _index() -> dict[str, str]:
    """Normalised name or alias -> name in the table."""
    index: dict[str, str] = {}
    for name, spec in table().items():
        for text in (name, *spec.aliases):
            key = normalise(text)
            if index.setdefault(key, name) != name:
                raise AssertionError(f"devices {index[key]} and {name} share the name {text!r}")
    return index


def known() -> list[DeviceSpec]:
    """All devices of the table, grouped by vendor and generation."""
    return list(table().values())


def family(name: str) -> list[str]:
    """Names of the boards that a short name such as ``"a100"``, ``"mi300"`` or ``"gfx942"`` may mean."""
    words = _words(name)
    if not words:
        return []
    if len(words) == 1 and words[0] in _SERIES:
        return list(_SERIES[words[0]])
    chip = words[0] if len(words) == 1 and words[0].startswith("gfx") else None
    return [
        board
        for board, spec in table().items()
        if _words(board)[: len(words)] == words or (chip is not None and chip in _words(spec.arch))
    ]


def commonest(name: str) -> DeviceSpec | None:
    """The commonest board of a short name (``"h100"``, ``"4090"``), or None if it is not a short name.

    :func:`lookup` refuses these names, because measured tables must name the board exactly.
    """
    words = " ".join(_words(name[:200]))
    board = _COMMONEST.get(words)
    if board is None:
        board = next((index for line in _LINES if (index := _index().get(normalise(f"{line} {words}")))), None)
    return None if board is None else table()[board]


def other_boards(name: str) -> list[str]:
    """Boards that a short name may also mean, without its commonest."""
    board = commonest(name)
    return [other for other in family(name[:200]) if board is not None and other != board.name]


def nearest_names(name: str) -> list[str]:
    """Up to five known names most like ``name``, best first."""
    index = _index()
    # Long inputs make difflib quadratic; no device has a longer name than this.
    key = normalise(name[:200])[:64]
    matches = difflib.get_close_matches(key, index, n=4 * _MAX_NEAREST, cutoff=0.5)
    return list(dict.fromkeys(index[match] for match in matches))[:_MAX_NEAREST]


def find_known(name: str) -> DeviceSpec | None:
    """The device that :func:`lookup` finds; None where it finds none."""
    try:
        return lookup(name)
    except UnknownDeviceError:
        return None


def lookup_board(name: str, others: Mapping[str, DeviceSpec] | None = None) -> DeviceSpec:
    """As :func:`lookup`, but a short name is its commonest board."""
    try:
        return lookup(name, others)
    except UnknownDeviceError:
        board = commonest(name)
        if board is None:
            raise
        return board


def lookup(name: str, others: Mapping[str, DeviceSpec] | None = None) -> DeviceSpec:
    """Find a device of the table by its name or one of its aliases; case, punctuation and brand words do not matter.

    ``others``: devices that the table lacks, by their exact names: those that records or a model bring. A family name
    that several boards share is unknown, too.

    >>> lookup("Tesla T4").name
    't4'
    """
    spec = _index().get(normalise(name[:200]))
    if spec is not None:
        return table()[spec]
    if others and name in others:
        return others[name]
    shown = name if len(name) <= 80 else name[:77] + "..."
    boards = family(name[:200])
    if len(boards) > 1:
        raise UnknownDeviceError(
            f"{shown!r} may mean several devices: {', '.join(boards)}",
            hint="name one of them: they differ in memory, bandwidth and power",
        )
    for chip, reason in _WITHOUT_FIGURES.items():
        if chip in _words(name[:200]):
            raise UnknownDeviceError(f"no device named {shown!r}: {chip} is {reason}", hint=SPECIFICATION_HINT)
    nearest = nearest_names(name)
    advice = (
        f"nearest known names: {', '.join(nearest)}"
        if nearest
        else f"nothing like it among {len(table())} known names, such as {', '.join(_WELL_KNOWN)}"
    )
    raise UnknownDeviceError(f"no device named {shown!r}; {advice}", hint=SPECIFICATION_HINT)
