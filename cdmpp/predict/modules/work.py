"""Latency of kernels with work that their program does not have, by sustained rates of the device."""

from __future__ import annotations

from dataclasses import dataclass

from cdmpp.devices.spec import DeviceSpec
from cdmpp.programs.frontends.kernel_work import KernelWork


@dataclass(frozen=True)
class Rate:
    """Sustained rates of a kind of kernel.

    Attributes
    ----------
    peak_share : float
        Share of the device's fp32 vector peak that its arithmetic reaches.
    block_bytes_per_cycle : float
        Bytes that a thread block moves in a cycle.
    step_cycles : float
        Cycles of a step, besides its program.
    step_share : float
        Share of the program's latency that a step takes.
    start_s : float
        Seconds before the first step.
    """

    peak_share: float = 0.5
    block_bytes_per_cycle: float = 16.0
    step_cycles: float = 0.0
    step_share: float = 1.0
    start_s: float = 0.0


#: Kind of kernel -> its rates, fitted to data/pytorch-h100 (python -m benchmarks.torch_truth --kernels).
RATES: dict[str, Rate] = {
    "recurrent": Rate(step_cycles=4000.0),
    "recurrent-layers": Rate(step_cycles=2000.0, step_share=0.6),
    "recurrent-persistent": Rate(step_cycles=850.0, start_s=5e-6),
}


def seconds_of(work: KernelWork, program_s: float, device: DeviceSpec) -> float:
    """Seconds of a kernel: the longest of its program's latency and the bounds of its work.

    Parameters
    ----------
    work : KernelWork
    program_s : float
        Latency of the program in its place.
    device : DeviceSpec
    """
    rate = RATES[work.kind]
    moved_s = 0.0
    if work.blocks:
        busy_units = min(work.blocks, device.compute_units)
        moved_s = work.moved_bytes / (busy_units * rate.block_bytes_per_cycle * device.clock_hz)
    arithmetic_s = work.operations / (rate.peak_share * device.peak_flops_fp32)
    known_s = 0.0 if work.replaces else program_s * (work.steps * rate.step_share if work.steps else 1.0)
    stepped_s = work.steps * rate.step_cycles / device.clock_hz
    return max(known_s, moved_s, arithmetic_s) + stepped_s + rate.start_s
