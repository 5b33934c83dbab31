"""Kernel Tuner's brute-forced schedule spaces, as scheduled TensorIR programs: one module per kernel.

:mod:`.template` is the contract of a kernel, :mod:`.blocks` builds programs, :mod:`.check` compares them with the
launch that their parameters state, and :mod:`.tables` imports the measured tables.
"""

from __future__ import annotations

from cdmpp.data.importers.kernel_tuner import convolution, dedispersion, gemm, pnpoly
from cdmpp.data.importers.kernel_tuner.template import TunedKernel

KERNELS: tuple[TunedKernel, ...] = (gemm.KERNEL, convolution.KERNEL, dedispersion.KERNEL, pnpoly.KERNEL)

__all__ = ["KERNELS", "TunedKernel"]
