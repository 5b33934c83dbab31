"""Kernel Tuner's brute-forced schedule spaces, as scheduled TensorIR programs.

:mod:`.template` has the contract of a kernel, the builder of programs, and the check of a program against the launch
that its parameters state. :mod:`.gemm`, :mod:`.convolution` and :mod:`.loops` have the kernels, and :mod:`.tables`
imports the measured tables.
"""
