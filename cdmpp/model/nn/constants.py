"""Constants of the network, for its torch form and its ONNX form."""

from __future__ import annotations

#: Counts whose costs overlap, with their initial cost: vectors of 8 in fused multiply-adds at peak, the others in
#: cycles. The initial costs come from a short training on measured CPU programs.
OVERLAP = {"vector_ops": 1.2, "vector_loads": 0.35, "vector_stores": 0.4, "chained_ops": 0.8}
#: Counts whose costs add up, with their initial cost in cycles.
ADD = {
    "lines_32768": 0.4,
    "lines_1048576": 1.5,
    "lines_16777216": 1.2,
    "pages_1024": 6.0,
    "pages_64": 0.4,
    "bodies": 0.06,
    "library_calls": 12.0,
    "split_indices": 3.0,
    "branches": 1.0,
    "regions": 50.0,
    "odd_updates": 8.0,
}
#: Column that only programs with thread bindings have above 0; the counts above are of a CPU.
THREADS = "gpu_threads"
#: Initial cycles of a call and seconds of a cycle.
CALL_CYCLES, CYCLE_S = 40.0, 0.4e-9
#: A multiply-add of 8 lanes, in operations.
VECTOR_FLOPS = 16.0
#: Largest change (natural logarithm) of a cost by a token.
REACH = 4.0
#: Exponent of the power mean that combines overlapping costs.
POWER = 3.0
#: Positions of log2 peak flop/s and log2 units among the device's logarithms, and the centre of the former.
PEAK_LOG, UNITS_LOG, PEAK_CENTRE = 0, 3, 20.0
