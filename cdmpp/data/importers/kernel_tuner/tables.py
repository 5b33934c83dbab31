"""Importers of Kernel Tuner's tables: each row becomes a measurement of a scheduled program.

A configuration becomes the TensorIR program of its kernel's template; equal programs count once. Rows carry the columns
``kernel``, ``parameters`` (the configuration as text), ``collection`` (the source's file) and ``origin``
("brute-force"). Rows that no template can express have the reason ``inexpressible_schedule`` and a column
``inexpressible`` that says why. Building takes 7 ms a program, so these tables are loaded on request only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cdmpp.data.assemble import CODE, Reasons, mark
from cdmpp.data.importers.base import Importer
from cdmpp.data.importers.built import BuiltProgram, BuiltPrograms
from cdmpp.data.importers.kernel_tuner import convolution, gemm, loops
from cdmpp.data.importers.kernel_tuner.template import Parameters, TunedKernel
from cdmpp.data.labels import Labels, Mask
from cdmpp.data.raw import RawTable
from cdmpp.data.table import Int64, MeasurementTable
from cdmpp.errors import DataError

ORIGIN = "brute-force"


@dataclass(frozen=True)
class Space:
    """Rows of one kernel in a table."""

    source: str  # value of the ``source`` column
    kernel: TunedKernel
    label: str = ""  # value of the column ``kernel``; "" where the whole table is of this kernel
    defaults: Mapping[str, int] = field(default_factory=dict)  # parameters that the table does not have
    # Returns why rows of a collection did not run as a configuration says; "" where they did.
    misstated: Callable[[str, Parameters], str] = lambda collection, parameters: ""


@dataclass(frozen=True)
class TunedImporter(Importer):
    """Importer of a table of brute-forced configurations."""

    spaces: tuple[Space, ...] = ()

    def columns(self) -> frozenset[str]:
        """Every column that is read."""
        parameters = (name for space in self.spaces for name in space.kernel.parameters)
        return super().columns() | {"kernel", "collection", *parameters}

    def table(self, raw: RawTable, share: float = 1.0, sources: Collection[str] | None = None) -> MeasurementTable:
        """Build the programs and the checked table.

        ``share`` of the configurations, in (0, 1], is kept. They are chosen by the hash of the configuration: the same
        ones on every device and in every collection. ``sources``: those whose rows are kept, by default all; the
        programs of others are not built.
        """
        if not 0 < share <= 1:
            raise DataError(f"share {share} of the configurations", hint="pass a number above 0 and up to 1")
        programs = _Programs(len(raw), share)
        kernels = raw.labels("kernel")
        for number, space in enumerate(self.spaces):
            rows = kernels.is_(space.label) if space.label else np.ones(len(raw), dtype=np.bool_)
            programs.space[rows] = number
            if sources is None or space.source in sources:
                programs.add(space, raw, rows)
        mark(programs.reason, programs.space < 0, "unknown_operator")
        table = programs.built.table(
            self,
            raw,
            programs.key,
            programs.reason,
            _named(programs.space, [space.kernel.name.partition(":")[0] for space in self.spaces]),
            ORIGIN,
            provenance={
                "parameters": Labels.of(programs.parameters),
                "inexpressible": Labels.of(programs.inexpressible),
                **({"collection": raw.labels("collection")} if "collection" in raw.columns else {}),
            },
        )
        return table if share == 1 and sources is None else table.select(programs.kept)


class _Programs:
    """Distinct programs of a table, and the program of each row."""

    def __init__(self, rows: int, share: float) -> None:
        self.share = share
        self.key: Int64 = np.full(rows, -1, dtype=np.int64)
        self.reason: Reasons = np.zeros(rows, dtype=np.int32)
        self.space: Int64 = np.full(rows, -1, dtype=np.int64)
        self.kept: Mask = np.zeros(rows, dtype=np.bool_)
        self.parameters = [""] * rows
        self.inexpressible = [""] * rows
        self.built = BuiltPrograms()
        self._of_configuration: dict[str, int] = {}

    def add(self, space: Space, raw: RawTable, rows: Mask) -> None:
        """Build the programs of a space's rows."""
        self.kept[rows] = True
        names = space.kernel.parameters
        values = np.zeros((len(raw), len(names)), dtype=np.int64)
        for position, name in enumerate(names):
            column = raw.ints(name)
            default = space.defaults.get(name)
            values[:, position] = np.where(column.missing, -1 if default is None else default, column.values)
            mark(self.reason, rows & column.invalid, "invalid_size")
            if default is None:
                mark(self.reason, rows & column.missing, "missing_size")
        collection = raw.labels("collection")
        index = np.flatnonzero(rows & (self.reason == 0))
        keyed = np.column_stack([values[index], collection.codes[index]])
        distinct, inverse = np.unique(keyed, axis=0, return_inverse=True)
        ordered = index[np.argsort(inverse.ravel(), kind="stable")]
        ends = np.cumsum(np.bincount(inverse.ravel(), minlength=len(distinct)))
        for row, first, last in zip(distinct.tolist(), [0, *ends.tolist()], ends.tolist(), strict=False):
            parameters = dict(zip(names, row, strict=False))
            self._configuration(space, parameters, collection.names[row[-1]], ordered[first:last])

    def _configuration(self, space: Space, parameters: Parameters, collection: str, rows: Int64) -> None:
        kernel, text = space.kernel, configuration(space.kernel, parameters)
        why = kernel.inexpressible(parameters) or space.misstated(collection, parameters)
        effective = parameters if why else kernel.canonical(parameters)
        name = f"{kernel.name};{configuration(kernel, effective)}"
        self.kept[rows] = kept = is_kept(name, self.share)
        for row in rows.tolist():
            self.parameters[row], self.inexpressible[row] = text, why
        if why:
            self.reason[rows] = CODE["inexpressible_schedule"]
        elif kept:
            if name not in self._of_configuration:
                self._of_configuration[name] = self._build(kernel, effective)
            self.key[rows] = self._of_configuration[name]

    def _build(self, kernel: TunedKernel, parameters: Parameters) -> int:
        from cdmpp.programs.frontends.tir import programs_from_tir

        (program,) = programs_from_tir(kernel.build(parameters))
        return self.built.add(BuiltProgram.of(program), kernel.name)


def configuration(kernel: TunedKernel, parameters: Parameters) -> str:
    """Write a configuration as text: ``MWG=64,NWG=32,...``."""
    return ",".join(f"{name}={parameters[name]}" for name in kernel.parameters)


def is_kept(configuration: str, share: float) -> bool:
    """Whether thinning to ``share`` keeps a configuration; a larger share keeps every one that a smaller keeps."""
    digest = hashlib.sha256(f"thin\0{configuration}".encode()).digest()
    return int.from_bytes(digest[:4], "big") < share * 2**32


def _named(codes: Int64, names: list[str]) -> Labels:
    """Labels by index; "" for -1."""
    return Labels(np.where(codes < 0, len(names), codes).astype(np.int32), (*names, ""))


def _without_padding(collection: str, parameters: Parameters) -> str:
    """The collections "convolution/..." ran without padding, whatever ``use_padding`` says (docs/data.md)."""
    padded = collection.startswith("convolution/") and convolution.padding_columns(parameters)
    return "padding that the collection ran without" if padded else ""


_GEMM = Space("kernel_tuner_gemm", gemm.KERNEL)
_CONVOLUTION = Space("kernel_tuner_convolution", convolution.KERNEL)
_OLDER_CONVOLUTION = Space(
    "kernel_tuner_convolution_older",
    convolution.KERNEL,
    label="convolution_kernel",
    defaults={"use_shmem": 1, "use_cmem": 1},
    misstated=_without_padding,
)
_DEDISPERSION = Space("kernel_tuner_dedispersion", loops.DEDISPERSION, label="dedispersion_kernel")
_PNPOLY = Space("kernel_tuner_pnpoly", loops.PNPOLY, label="cn_pnpoly")
_HUB = (_OLDER_CONVOLUTION, _DEDISPERSION, _PNPOLY)


def _importer(
    space: Space, file_name: str, origin: str, needs: set[str], lacks: set[str] | None = None
) -> TunedImporter:
    return TunedImporter(
        name=space.source,
        file_name=file_name,
        repository="AutoTuningAssociation/benchmark_hub",
        commit="8eeb99e7",
        origin=origin,
        licence="MIT",
        protocol="kernel",
        needs=frozenset({"device", *needs}),
        lacks=frozenset(lacks or ()),
        spaces=(space,),
    )


GEMM_IMPORTER = _importer(
    _GEMM,
    "sched_kerneltuner_gemm.parquet",
    "currently_unused/cachefiles/KernelTuner data/gemm",
    {"MWG", "NWG", "KWG", "MDIMC", "NDIMC", "SA", "SB"},
)
CONVOLUTION_IMPORTER = _importer(
    _CONVOLUTION,
    "sched_kerneltuner_conv2d_15x15.parquet",
    "cachefiles/convolution_milo",
    {"block_size_x", "block_size_y", "tile_size_x", "tile_size_y", "use_shmem"},
    {"kernel"},
)


def _hub_source(raw: RawTable) -> Labels:
    """Source of each row of the table of several kernels."""
    named = {space.label: space.source for space in _HUB}
    return raw.labels("kernel").map(lambda kernel: named.get(kernel, kernel))


HUB_IMPORTERS = tuple(
    replace(
        _importer(
            space,
            "sched_benchmark_hub.parquet",
            "cachefiles/dedispersion_milo, currently_unused/cachefiles",
            {"kernel", "collection", "block_size_x"},
        ),
        spaces=_HUB,
        row_source=_hub_source,
        source_columns=frozenset({"kernel"}),
        read_by="" if number == 0 else _HUB[0].source,
    )
    for number, space in enumerate(_HUB)
)
IMPORTERS = (GEMM_IMPORTER, CONVOLUTION_IMPORTER, *HUB_IMPORTERS)
