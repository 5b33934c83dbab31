"""Cost of a cast between element types: a straight line in the number of elements, for each direction."""

from __future__ import annotations

from dataclasses import dataclass

from cdmpp.devices.spec import DeviceSpec
from cdmpp.programs.query_options import FLOOR_S, Protocol

#: Bytes per second that a plain copy read and wrote on the machine of :data:`MEASURED`.
MEASURED_COPY_BYTES_PER_S = 1.75e10


@dataclass(frozen=True)
class CastCost:
    """Seconds = overhead_s + s_per_element x elements."""

    s_per_element: float
    overhead_s: float

    def seconds(self, elements: float) -> float:
        """Seconds of one cast; 0 for no elements."""
        return self.overhead_s + self.s_per_element * elements if elements else 0.0


#: (from, to), measured on one core of an idle x86 server CPU with PyTorch on one thread
#: (`planning.casts` in docs/benchmarks.md). One line for small and large tensors is off by 8 to 40 % on average:
#: too slow for tensors that fit into a cache, too fast for the others.
MEASURED: dict[tuple[str, str], CastCost] = {
    ("int8", "float16"): CastCost(1.00e-09, 2.82e-06),
    ("int8", "bfloat16"): CastCost(3.84e-10, 2.80e-06),
    ("int8", "float32"): CastCost(2.38e-10, 2.63e-06),
    ("float16", "int8"): CastCost(1.05e-09, 8.84e-06),
    ("float16", "bfloat16"): CastCost(9.27e-10, 7.70e-07),
    ("float16", "float32"): CastCost(1.57e-10, 5.10e-07),
    ("bfloat16", "int8"): CastCost(8.31e-10, 8.14e-06),
    ("bfloat16", "float16"): CastCost(6.11e-10, 7.40e-07),
    ("bfloat16", "float32"): CastCost(1.53e-10, 7.10e-07),
    ("float32", "int8"): CastCost(9.68e-10, 8.36e-06),
    ("float32", "float16"): CastCost(1.41e-10, 5.50e-07),
    ("float32", "bfloat16"): CastCost(1.94e-10, 7.10e-07),
}


def scaled(device: DeviceSpec, protocol: Protocol) -> dict[tuple[str, str], CastCost]:
    """The measured lines scaled to a device by the ratio of memory bandwidths, with its launch cost.

    This is an estimate: casts on a GPU are limited by memory bandwidth, and some of the measured ones by the
    arithmetic of the core. Give ``casts`` where they matter.
    """
    ratio = MEASURED_COPY_BYTES_PER_S / device.mem_bandwidth_bytes_per_s
    launch_s = FLOOR_S[protocol]
    return {pair: CastCost(cost.s_per_element * ratio, launch_s) for pair, cost in MEASURED.items()}
