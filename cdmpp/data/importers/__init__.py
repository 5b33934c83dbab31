"""Importers of the public operator tables, one module per source; each recognises its table by its columns."""

from __future__ import annotations

from cdmpp.data.importers import (
    aiconfigurator_attention,
    aiconfigurator_gemm,
    comm_collectives,
    deepbench,
    miopen,
    neusight,
    vidur,
)
from cdmpp.data.importers.base import Importer

IMPORTERS: tuple[Importer, ...] = (
    neusight.IMPORTER,
    aiconfigurator_gemm.IMPORTER,
    aiconfigurator_attention.IMPORTER,
    miopen.IMPORTER,
    vidur.IMPORTER,
    deepbench.IMPORTER,
    comm_collectives.IMPORTER,
)

__all__ = ["IMPORTERS", "Importer"]
