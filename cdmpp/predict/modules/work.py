"""Latency of kernels with work that their program does not have, by sustained rates of the device.

The constants are fitted to data/pytorch-h100 (``python -m benchmarks.torch_kernels``): they belong to PyTorch's and
cuDNN's kernels. Rates of other devices follow from their data sheets.
"""

from __future__ import annotations

import math

from cdmpp.devices.spec import DeviceSpec
from cdmpp.programs.frontends.kernel_work import AttentionWork, ConvolutionWork, KernelWork, Work

#: Operations of a unit's tensor cores in a cycle that cuDNN's convolutions and FlashAttention sustain at most.
CONVOLUTION_RATE, ATTENTION_RATE = 700.0, 2600.0
#: FlashAttention: queries of a tile, cycles of a tile without work, seconds without work, share of the bandwidth.
QUERIES, TILE_CYCLES, ATTENTION_S, ATTENTION_BANDWIDTH = 128, 4500.0, 4e-6, 0.7
#: Share of the peak that products inside convolutions reach on vector units.
VECTOR_SHARE = 0.226
#: Places and channels of a tile of the result (both kinds of units), and input channels to which tensor cores pad.
TILE, TENSOR_CHANNELS, VECTOR_CHANNELS, CHANNELS_IN = (64, 128), 64, 32, 8
#: Share of the memory bandwidth of the kernel, and of the pass that adds the bias.
KERNEL_BANDWIDTH, BIAS_BANDWIDTH = 0.71, 0.53
#: Bytes that a unit moves in a cycle where it changes layouts.
LAYOUT_BYTES_PER_CYCLE = 8.4
#: Tensors below this share of the cache move so many times faster.
CACHE_SHARE, CACHE_FACTOR = 0.49, 3.25
#: Seconds of a convolution's kernels without work, and of each further group.
CONVOLUTION_S, GROUP_S = 6.6e-6, 4e-6
#: Transposed with a stride, tensor cores multiply zeros too; vector units skip them, in slower kernels.
VECTOR_GRADIENT = 2.8


#: Seconds of a kernel without work, and bandwidth of the cache over that of the memory: of element-wise kernels on
#: whole tensors, and of all others.
STREAM, GATHER = (1.5e-6, 1.6), (3e-6, 0.9)
_GATHERED = """
    sum mean amax amin max min argmax argmin prod linalg_vector_norm norm cat stack clone copy _to_copy index index_put
    gather scatter scatter_add roll flip repeat constant_pad_nd where masked_fill tril triu native_layer_norm _softmax
    _log_softmax _fused_rms_norm
    """
GATHERED = frozenset(_GATHERED.split())


def cached_s(program_s: float, traffic_s: float, call: str, device: DeviceSpec) -> float:
    """Seconds of an element-wise kernel, a movement or a normalisation, which the last level of cache may serve.

    ``program_s``: predicted latency. ``traffic_s``: bytes over the memory bandwidth. ``call``: PyTorch's call.
    """
    if traffic_s * device.mem_bandwidth_bytes_per_s > (device.l2_bytes or 0.0):
        return program_s
    least_s, factor = GATHER if call.removesuffix("_") in GATHERED else STREAM
    return min(program_s, least_s + traffic_s / factor)


def seconds_of(work: Work, program_s: float, device: DeviceSpec) -> float:
    """Seconds of a kernel: the longest of its program's latency and the bounds of its work.

    ``program_s``: latency of the program in its place.
    """
    if device.kind == "cpu":  # these are bounds of GPUs
        return program_s * (work.steps if isinstance(work, KernelWork) else 1.0)
    if isinstance(work, ConvolutionWork):
        return _convolution_s(work, program_s, device)
    if isinstance(work, AttentionWork):
        return _attention_s(work, program_s, device)
    waves = max(1.0, work.blocks / (work.resident * device.compute_units))
    known_s = 0.0 if work.replaces else program_s * (1 + work.step_share * (work.steps - 1))
    return max(known_s, work.operations / _instruction_rate(device), waves * work.cycles / device.clock_hz)


def _instruction_rate(device: DeviceSpec) -> float:
    """Instructions a second, a multiply-add as two: NVIDIA's units issue one for 128 threads in a cycle."""
    lanes = 128 if device.vendor.startswith("NVIDIA") else device.cores_per_unit
    return 2.0 * lanes * device.compute_units * device.clock_hz


def _convolution_s(work: ConvolutionWork, program_s: float, device: DeviceSpec) -> float:
    """The faster of tensor cores with changes of layout and vector units without; tables know plain ones in float32."""
    moved = work.x_bytes + work.y_bytes
    bandwidth = device.mem_bandwidth_bytes_per_s
    if moved < CACHE_SHARE * (device.l2_bytes or 0.0):
        bandwidth *= CACHE_FACTOR
    # PyTorch adds the bias in a kernel of its own.
    bias_s = 2 * work.y_bytes / (BIAS_BANDWIDTH * bandwidth) if work.bias else 0.0
    tensor_peak = tensor_flops(work.dtype, device)
    if work.plain and (tensor_peak is None or not device.vendor.startswith("NVIDIA")):
        return program_s + bias_s
    cycles_per_s = device.compute_units * device.clock_hz

    def product_s(flops: float, places: int, channels: int, channels_in: int, taps: float) -> float:
        rows, cols = max(work.places, places), math.ceil(work.c_out / channels) * channels
        filled = min(1.0, math.ceil(rows / places) * (cols // channels) / device.compute_units)
        depth = taps * math.ceil(work.c_in / channels_in) * channels_in
        return max(work.groups * 2 * rows * cols * depth / (flops * filled), moved / (KERNEL_BANDWIDTH * bandwidth))

    skipping = work.taps if work.strides == 1 else VECTOR_GRADIENT * work.taps / work.strides
    choices = [product_s(VECTOR_SHARE * device.peak_flops_fp32, TILE[0], VECTOR_CHANNELS, 1, skipping)]
    if tensor_peak is not None:
        sustained = cycles_per_s * _sustained(tensor_peak / cycles_per_s, CONVOLUTION_RATE)
        layouts_s = 2 * work.layout_bytes / min(bandwidth, LAYOUT_BYTES_PER_CYCLE * cycles_per_s)
        tensor_s = product_s(sustained, TILE[1], TENSOR_CHANNELS, CHANNELS_IN, work.taps)
        choices.append(tensor_s + layouts_s)
    return min(choices) + bias_s + CONVOLUTION_S + GROUP_S * (work.groups - 1)


def _attention_s(work: AttentionWork, program_s: float, device: DeviceSpec) -> float:
    """Tiles of queries in waves over the units; a causal mask halves most tiles but not the last one."""
    peak = device.peak_flops_fp16_matrix
    if peak is None or device.peak_flops_tf32_matrix is None or not device.vendor.startswith("NVIDIA"):
        return program_s  # other kernels
    rate = _sustained(peak / (device.compute_units * device.clock_hz), ATTENTION_RATE)
    keys, dim = 64 * math.ceil(work.keys / 64), 32 * math.ceil(work.head_dim / 32)
    whole, masked = (
        4 * QUERIES * n * dim / rate + TILE_CYCLES for n in (keys, keys / 2 + 64 if keys > QUERIES else keys)
    )
    waves = max(1.0, work.heads * math.ceil(work.queries / QUERIES) / device.compute_units)
    cycles = max(whole, waves * masked) if work.causal else waves * whole
    moved = 2 * 2 * work.heads * (work.queries + work.keys) * work.head_dim
    memory_s = moved / (ATTENTION_BANDWIDTH * device.mem_bandwidth_bytes_per_s)
    return ATTENTION_S + max(cycles / device.clock_hz, memory_s)


def _sustained(peak: float, limit: float) -> float:
    """A rate near the smaller of the two."""
    return peak / math.hypot(1.0, peak / limit)


def tensor_flops(dtype: str, device: DeviceSpec) -> float | None:
    """Peak of the tensor cores for convolutions: PyTorch lets them round float32 to TF32. None: without."""
    if dtype == "float32":
        return device.peak_flops_tf32_matrix if device.vendor.startswith("NVIDIA") else device.peak_flops_fp32_matrix
    peak = device.peak_flops_fp16_matrix
    if dtype == "bfloat16" and device.peak_flops_bf16_matrix is not None:
        peak = device.peak_flops_bf16_matrix
    # The rate of vector units stands in data sheets for types that tensor cores do not have.
    return None if peak is None or peak <= device.peak_flops_fp32 else peak
