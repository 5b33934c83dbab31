"""Importers of the public tables, one module per source; each recognises its table by its columns."""

from __future__ import annotations

from cdmpp.data.importers import (
    aiconfigurator_attention,
    aiconfigurator_gemm,
    aiconfigurator_mla,
    aiconfigurator_moe,
    aiter_gemm,
    aiter_moe,
    comm_collectives,
    deepbench,
    frontier,
    infersim,
    llmservingsim_attention,
    llmservingsim_layers,
    miopen,
    neusight,
    pipeweave_moe,
    tensile_gemm,
    vidur,
)
from cdmpp.data.importers.base import Importer
from cdmpp.data.importers.kernel_tuner import tables as kernel_tuner
from cdmpp.data.importers.kernel_tuner.tables import TunedImporter

IMPORTERS: tuple[Importer, ...] = (
    neusight.IMPORTER,
    aiconfigurator_gemm.IMPORTER,
    aiconfigurator_attention.IMPORTER,
    miopen.IMPORTER,
    vidur.IMPORTER,
    deepbench.IMPORTER,
    comm_collectives.IMPORTER,
    aiconfigurator_gemm.QUANTISED_IMPORTER,
    aiconfigurator_moe.IMPORTER,
    aiconfigurator_mla.IMPORTER,
    vidur.PIPEWEAVE_IMPORTER,
    pipeweave_moe.IMPORTER,
    tensile_gemm.IMPORTER,
    aiter_gemm.IMPORTER,
    aiter_moe.IMPORTER,
    llmservingsim_layers.IMPORTER,
    llmservingsim_attention.IMPORTER,
    frontier.IMPORTER,
    infersim.IMPORTER,
)

#: Tables of brute-forced schedules, whose programs take minutes to build: loaded only where their source is named.
SCHEDULE_IMPORTERS: tuple[TunedImporter, ...] = kernel_tuner.IMPORTERS

#: Sources of tensor programs, which the network is trained on; the others hold collectives.
PROGRAM_SOURCES = tuple(i.name for i in IMPORTERS if i is not comm_collectives.IMPORTER)

__all__ = ["IMPORTERS", "PROGRAM_SOURCES", "SCHEDULE_IMPORTERS", "Importer", "TunedImporter"]
