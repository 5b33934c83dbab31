"""Importers of the public tables, one module per publisher; each importer recognises its table by its columns."""

from __future__ import annotations

from cdmpp.data.importers import (
    aiconfigurator,
    comm_collectives,
    cudnn,
    deepbench,
    frontier,
    infersim,
    liger,
    llmservingsim,
    neusight,
    rocm,
    vidur,
)
from cdmpp.data.importers.ansor import ansor_program
from cdmpp.data.importers.base import Importer
from cdmpp.data.importers.kernel_tuner.tables import IMPORTERS as SCHEDULE_IMPORTERS
from cdmpp.data.importers.kernel_tuner.tables import TunedImporter

IMPORTERS: tuple[Importer, ...] = (
    neusight.IMPORTER,
    aiconfigurator.GEMM,
    aiconfigurator.ATTENTION,
    rocm.MIOPEN,
    vidur.IMPORTER,
    deepbench.IMPORTER,
    comm_collectives.IMPORTER,
    aiconfigurator.QUANTISED_GEMM,
    aiconfigurator.MOE,
    aiconfigurator.MLA,
    vidur.PIPEWEAVE_GEMM,
    vidur.PIPEWEAVE_MOE,
    rocm.TENSILE,
    rocm.AITER_GEMM,
    rocm.AITER_MOE,
    llmservingsim.LAYERS,
    llmservingsim.ATTENTION,
    frontier.IMPORTER,
    infersim.IMPORTER,
    liger.IMPORTER,
    cudnn.ATTENTION,
    cudnn.NORMS,
)

#: Sources of tensor programs, which the network is trained on; the others hold collectives.
PROGRAM_SOURCES = tuple(i.name for i in IMPORTERS if i is not comm_collectives.IMPORTER)

# Tables of brute-forced schedules (SCHEDULE_IMPORTERS) have programs that take minutes to build: they are loaded only
# where their source is named.
__all__ = ["IMPORTERS", "PROGRAM_SOURCES", "SCHEDULE_IMPORTERS", "Importer", "TunedImporter", "ansor_program"]
