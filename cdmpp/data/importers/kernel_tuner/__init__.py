"""Kernel Tuner's brute-forced schedule spaces, as scheduled TensorIR programs.

:mod:`.template` has the contract of a kernel and the builder of programs. :mod:`.gemm`, :mod:`.convolution` and
:mod:`.loops` have the kernels, and :mod:`.tables` imports the measured tables.
"""
