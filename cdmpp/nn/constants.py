"""Numbers that the network is made with, for both of its forms (torch and ONNX)."""

from __future__ import annotations

#: Counts that overlap each other, and what one costs at first: vectors of 8 in fused multiply-adds at peak,
#: the others in cycles. Costs in front are those that a short training on measured CPU programs arrives at.
OVERLAP = {"vector_ops": 1.2, "vector_loads": 0.35, "vector_stores": 0.4, "chained_ops": 0.8}
#: Counts whose costs add up, in cycles.
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
#: Cycles of a call, seconds of a cycle: where training starts.
CALL_CYCLES, CYCLE_S = 40.0, 0.4e-9
#: A multiply-add of 8 lanes, in operations.
VECTOR_FLOPS = 16.0
#: How far (natural logarithm) a token may move a cost.
REACH = 4.0
#: Of the mean that joins overlapping costs.
POWER = 3.0
#: log2 of peak flop/s and of units among the device's logarithms, and what was subtracted from the former.
PEAK_LOG, UNITS_LOG, PEAK_CENTRE = 0, 3, 20.0
