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
from cdmpp.data.importers.kernel_tuner.tables import IMPORTERS as KERNEL_TUNER
from cdmpp.data.importers.kernel_tuner.tables import TunedImporter
from cdmpp.data.importers.tuning_logs import ANSOR, METASCHEDULE, TuningLogImporter
from cdmpp.programs.frontends.metaschedule import metaschedule_program

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

#: Importers of tables of schedules. Building their programs takes long: they are loaded only where they are named.
SCHEDULE_IMPORTERS: tuple[TunedImporter | TuningLogImporter, ...] = (*KERNEL_TUNER, ANSOR, METASCHEDULE)

__all__ = [
    "IMPORTERS",
    "PROGRAM_SOURCES",
    "SCHEDULE_IMPORTERS",
    "Importer",
    "TunedImporter",
    "TuningLogImporter",
    "ansor_program",
    "metaschedule_program",
]
