"""Arithmetic, least traffic, roofline and memory of every operator, on arrays; and the rows that break physics.

The counts are those of the operator's definition (no winograd, no recomputation), every input read once and
every output written once. Scaled products and expert layers read activations in their own type and write results of 16
bits; scales are not counted. The counts serve to tell an impossible measurement from a slow one, and as the roofline
baseline; the model has its own, finer features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cdmpp.data.contradictions import contradicting_rows, host_bound_rows
from cdmpp.data.labels import Labels, Mask
from cdmpp.errors import UnknownDeviceError
from cdmpp.programs.attention import Attention
from cdmpp.programs.collectives import is_collective, link_seconds
from cdmpp.programs.elements import DTYPE_BYTES
from cdmpp.programs.operators import OperatorSpec, derived_sizes, operator_family
from cdmpp.programs.products import Moe
from cdmpp.programs.vectors import Binary, Conv2d, output_hw

if TYPE_CHECKING:
    from cdmpp.data.table import MeasurementTable, OperatorBlock
    from cdmpp.devices.spec import DeviceSpec

Flags = Mapping[str, bool | int | str | None]
Sizes = Mapping[str, NDArray[Any]]
#: Bytes of a result of a scaled product.
_WIDE = 2.0
Float64 = NDArray[np.float64]
#: Rules by which a row is kept, but left out of training. The constants are chosen from the real tables;
#: docs/data.md has the distribution and the counts.
EXCLUDED = {
    "failed": "the program could not be built or run; column failure has the reason",
    "no_latency": "the row has no latency, or it is not a number",
    "latency_not_positive": "the latency is zero or negative",
    "too_slow": "slower than 300 x its roofline + 10 ms, or over 5 s and slower than 20 x its roofline",
    "too_fast": "faster than a tenth of its roofline",
    "weights_not_read": "an expert layer of aiconfigurator_moe with weights over 4 x L2, faster than the memory "
    "delivers them (power-law routing: than twice its bandwidth): probably not all experts ran",
    "host_bound": "host time: it does not grow with the work, and other frameworks are several times faster on the "
    "device (cdmpp.data.contradictions)",
    "contradicts_sibling": "slower than on a device of the same chip, and than its own 16-bit form, by more than half: "
    "not the kernel that the framework runs (cdmpp.data.contradictions)",
    "slower_kernel": "an expert layer of aiconfigurator_moe that its framework also ran faster, with another kernel",
}
#: The measurer's reason for a record whose repeats disagree by more than the stated spread.
UNSTABLE = "unstable"
SLOW_FACTOR = 300.0
SLOW_OFFSET_S = 10e-3  # small programs are bound by launch and latency, not by the roofline
LONG_S = 5.0  # a program of seconds has parallelism enough for a twentieth of the peak
LONG_FACTOR = 20.0
#: Source of expert layers that may not have run every expert; the weights of a doubtful row exceed this many times L2.
DOUBTFUL_EXPERTS, EXPERTS_BEYOND_L2 = "aiconfigurator_moe", 4.0
#: Bandwidth of the L2 cache over that of the memory. Few devices state it.
L2_SPEED = 5.0
UNSTATED_L2 = 128e6  # bytes, for a device whose specification states no L2 cache
FAST_FACTOR = 0.1  # winograd and reads from cache reach 0.2 to 0.5
#: Operations for each element of the result, of operators without products.
_PER_ELEMENT = {
    name: operations
    for operations, names in (
        (0.0, "copy embedding kv_cache_save moe_shuffle"),
        (1.0, "reduce_mean argmax"),
        (2.0, "sqrt batch_norm"),
        (3.0, "rotary_embedding"),
        (4.0, "rmsnorm sigmoid exp log"),
        (5.0, "softmax fused_add_rms_norm softmax_cross_entropy silu_and_mul silu moe_gating"),
        (6.0, "tanh erf"),
        (8.0, "layernorm gelu pow pow_scalar"),
        (11.0, "rmsnorm_backward"),
        (14.0, "layernorm_backward"),
    )
    for name in names.split()
}
#: Operators that read two tensors of their size.
_TWO_INPUTS = ("silu_and_mul", "fused_add_rms_norm", "rmsnorm_backward", "layernorm_backward")


def weight_bytes(dtype: str, flags: Flags) -> float:
    """Bytes of an element of the weight: ``weight_dtype``, or ``dtype`` where it is None."""
    return DTYPE_BYTES[str(flags.get("weight_dtype") or dtype)]


def product_work(dtype: str, flags: Flags, f: Sizes) -> tuple[Float64, Float64]:
    """``linear`` and ``bmm``."""
    batch = f.get("batch", np.float64(1))
    flops = 2 * batch * f["m"] * f["n"] * f["k"]
    element_size = DTYPE_BYTES[dtype]
    out = (
        4.0
        if flags.get("out_dtype") == "float32"
        else max(element_size, _WIDE)
        if flags.get("scaling")
        else element_size
    )
    moved = batch * (
        f["m"] * f["k"] * element_size + f["k"] * f["n"] * weight_bytes(dtype, flags) + f["m"] * f["n"] * out
    )
    if flags.get("bias"):
        flops, moved = flops + f["m"] * f["n"], moved + f["n"] * out
    return flops, moved


def experts_work(operator: str, dtype: str, flags: Flags, sizes: Sizes) -> tuple[Float64, Float64]:
    """``moe``, ``moe_w13`` and ``grouped_gemm`` of the rank with most rows; only experts with rows are read."""
    load = {n: v.astype(np.float64) for n, v in derived_sizes(operator, {**flags, **sizes}).items()}
    f = {name: column.astype(np.float64) for name, column in sizes.items()}
    element_size, weight = DTYPE_BYTES[dtype], weight_bytes(dtype, flags)
    out = max(element_size, _WIDE)
    rows, active = load["rank_rows"], load["active"]
    if operator == "grouped_gemm":
        flops = 2 * rows * f["n"] * f["k"]
        return flops, rows * f["k"] * element_size + active * f["n"] * f["k"] * weight + rows * f["n"] * out
    inner, hidden = load["rank_intermediate"], f["hidden"]
    columns = inner * (2 if flags["gated"] else 1)
    tokens = np.minimum(f["tokens"], rows)
    flops, moved = 2 * rows * hidden * columns, tokens * hidden * element_size + active * hidden * columns * weight
    if operator == "moe_w13":
        return flops, moved + rows * columns * out
    return flops + 2 * rows * hidden * inner, moved + active * hidden * inner * weight + tokens * hidden * out


def expert_weight_bytes(operator: str, dtype: str, flags: Flags, sizes: Sizes) -> Float64:
    """Bytes of the weights of all experts with at least one row."""
    load = derived_sizes(operator, {**flags, **sizes})
    columns = 2 if flags["gated"] else 1
    columns += operator == "moe"
    each = load["rank_intermediate"].astype(np.float64) * sizes["hidden"] * columns
    return np.asarray(load["active"] * each * weight_bytes(dtype, flags))


def latent_attention_work(operator: str, dtype: str, flags: Flags, f: Sizes) -> tuple[Float64, Float64]:
    """``mla_prefill`` and ``mla_decode``; the least traffic of both reads the latent cache once."""
    element_size = DTYPE_BYTES[dtype]
    cache = DTYPE_BYTES[str(flags.get("kv_dtype") or dtype)]
    keys, new = f["past_len"] + f["q_len"], f["batch"] * f["q_len"]
    pairs = new * f["heads"] * (f["past_len"] + (f["q_len"] + 1) / 2)
    decode = operator == "mla_decode"
    query = f["latent"] + f["rope"] if decode else f["nope"] + f["rope"]
    value = f["latent"] if decode else f["v_dim"]
    flops = 2 * pairs * (query + value)
    moved = f["batch"] * keys * (f["latent"] + f["rope"]) * cache
    if not flags.get("module"):
        return flops, moved + new * f["heads"] * (query * element_size + value * max(element_size, _WIDE))
    down = f["hidden"] * (f["q_latent"] + f["latent"] + f["rope"])
    up = f["q_latent"] * f["heads"] * (f["nope"] + f["rope"])
    expand = f["latent"] * f["heads"] * (f["nope"] + f["v_dim"])
    last = f["heads"] * f["v_dim"] * f["hidden"]
    weights = (down + up + expand + last) * weight_bytes(dtype, flags)
    # The prefill form expands the latents of all keys, the absorbed form multiplies queries and results instead.
    expanded = new if decode else f["batch"] * keys
    flops = flops + 2 * (new * (down + up + last) + expanded * expand)
    return flops, moved + weights + 2 * new * f["hidden"] * _WIDE


def uses_matrix_units(operator: str) -> bool:
    """Whether the operator's arithmetic can run on matrix units (tensor cores)."""
    return operator_family(operator) in ("gemm", "moe", "conv", "attention")


def work(
    operator: str, dtype: str, flags: Mapping[str, bool | int | str | None], sizes: Mapping[str, NDArray[np.int64]]
) -> tuple[Float64, Float64]:
    """Floating-point operations and least bytes moved, per operator of a block."""
    f = {name: column.astype(np.float64) for name, column in sizes.items()}
    family = operator_family(operator)
    if family == "gemm":
        return product_work(dtype, flags, f)
    if family == "moe":
        return experts_work(operator, dtype, flags, sizes)
    if operator.startswith("mla_"):
        return latent_attention_work(operator, dtype, flags, f)
    # Keys and values may be narrower than queries.
    cached = DTYPE_BYTES[str(flags.get("kv_dtype") or dtype)] / DTYPE_BYTES[dtype]
    if operator == "attention_mixed":
        pairs = f["q_len"] * (f["past_len"] + (f["q_len"] + 1) / 2) + f["decodes"] * (f["decode_past_len"] + 1)
        keys = f["past_len"] + f["q_len"] + f["decodes"] * (f["decode_past_len"] + 1)
        flops = 4 * f["heads"] * pairs * f["head_dim"]
        moved = 2 * f["head_dim"] * ((f["q_len"] + f["decodes"]) * f["heads"] + keys * f["kv_heads"] * cached)
    elif operator == "conv2d":
        oh, ow = (axis.astype(np.float64) for axis in output_hw(sizes))
        weight = f["c_out"] * (f["c_in"] // f["groups"]) * f["kh"] * f["kw"]
        flops = 2 * f["n"] * oh * ow * weight
        # A stride longer than the kernel skips rows of the input.
        rows, cols = np.minimum(f["h"], oh * f["kh"]), np.minimum(f["w"], ow * f["kw"])
        moved = f["n"] * (f["c_in"] * rows * cols + f["c_out"] * oh * ow) + weight
    elif operator == "attention_backward":
        pairs = f["q_len"] * ((f["q_len"] + 1) / 2 if flags.get("causal") else f["q_len"])
        each = pairs * (3 * f["head_dim"] + 2 * f["v_dim"]) + f["q_len"] * f["v_dim"]
        flops = 2 * f["batch"] * f["heads"] * each
        read = (f["heads"] + f["kv_heads"]) * (f["head_dim"] + f["v_dim"]) + f["heads"] * f["v_dim"]
        written = f["heads"] * f["head_dim"] + f["kv_heads"] * (f["head_dim"] + f["v_dim"])
        wider = max(_WIDE / DTYPE_BYTES[dtype], 1.0)  # no gradient has 8 bits
        moved = f["batch"] * f["q_len"] * (read + written * wider)
    elif operator.startswith("attention"):
        keys = f["past_len"] + f["q_len"]
        causal = operator != "attention_encoder"
        pairs = f["q_len"] * (f["past_len"] + (f["q_len"] + 1) / 2 if causal else keys)
        flops = 4 * f["batch"] * f["heads"] * pairs * f["head_dim"]
        moved = 2 * f["batch"] * f["head_dim"] * (f["q_len"] * f["heads"] + keys * f["kv_heads"] * cached)
    elif operator in ("max_pool2d", "avg_pool2d"):
        oh, ow = (axis.astype(np.float64) for axis in output_hw(sizes))
        out = f["n"] * f["c"] * oh * ow
        rows, cols = np.minimum(f["h"], oh * f["kh"]), np.minimum(f["w"], ow * f["kw"])
        flops, moved = out * f["kh"] * f["kw"], out + f["n"] * f["c"] * rows * cols
    else:
        cells = f["rows"] * f["cols"] if "rows" in f else f["n"] * f["c"] * f["h"] * f["w"]
        inputs = float(flags.get("inputs") or (2 if operator in _TWO_INPUTS else 1))
        flops = cells * _PER_ELEMENT.get(operator, max(inputs - 1, 1.0))
        written = f["rows"] if operator in ("reduce_mean", "argmax") else cells
        if operator == "softmax_cross_entropy":
            written = {"fwd": f["rows"], "bwd": cells}.get(str(flags["direction"]), cells + f["rows"])
        if operator == "fused_add_rms_norm":  # the sum and its norm
            written = 2 * cells
        if operator == "moe_gating":  # one pass per chosen expert
            flops = flops + f["topk"] * cells
        if operator in ("moe_gating", "moe_shuffle"):
            written = f["topk"] * (f["rows"] if operator == "moe_gating" else cells)
        read = np.minimum(f["rows"], f["table_rows"]) * f["cols"] if operator == "embedding" else cells * inputs
        moved = read + written
    return flops, moved * DTYPE_BYTES[dtype]


def roofline_s(block: OperatorBlock, device: DeviceSpec) -> Float64:
    """Roofline of every operator of a block on one device, in seconds: a lower bound in the main."""
    if is_collective(block.operator):
        return collective_roofline_s(block, device)
    return _bound_s(block, device, *work(block.operator, block.dtype, block.flags, block.sizes))


def bounds_s(block: OperatorBlock, device: DeviceSpec) -> tuple[Float64, Float64]:
    """Seconds of arithmetic at peak, and of the least traffic at the speed of the memory or, if it fits, of the L2."""
    flops, moved = work(block.operator, block.dtype, block.flags, block.sizes)
    peak = device.peak(block.dtype, matrix=uses_matrix_units(block.operator))
    speed = np.where(moved <= (device.l2_bytes or 0), L2_SPEED, 1.0) * device.mem_bandwidth_bytes_per_s
    return np.asarray(flops / peak), np.asarray(moved / speed)


def _bound_s(block: OperatorBlock, device: DeviceSpec, flops: Float64, moved: Float64) -> Float64:
    matrix = uses_matrix_units(block.operator)
    peak = device.peak(block.dtype, matrix=matrix)
    if block.flags.get("module") and block.flags.get("weight_dtype"):
        peak = max(peak, device.peak(str(block.flags["weight_dtype"]), matrix=matrix))  # of the projections
    return np.asarray(np.maximum(flops / peak, moved / device.mem_bandwidth_bytes_per_s))


def collective_roofline_s(block: OperatorBlock, device: DeviceSpec) -> Float64:
    """Roofline of collectives: traffic over the nominal bandwidth of the slowest link, in seconds."""
    per_node, link, span = (block.flags[name] for name in ("ranks_per_node", "link", "span"))
    out = np.empty(len(block))
    for ranks in np.unique(block.sizes["ranks"]).tolist():
        rows = block.sizes["ranks"] == ranks
        bytes_ = block.sizes["bytes"][rows].astype(np.float64)
        out[rows] = link_seconds(block.operator, bytes_, ranks, per_node, link, device, span)  # type: ignore[arg-type]
    return out


def table_roofline_s(table: MeasurementTable) -> Float64:
    """Roofline of every row, in seconds; NaN for TVM programs and for rows without program or device."""
    result = np.full(len(table), np.nan)
    for block in table.specs:
        if is_collective(block.operator):
            for rows, device in by_device(table, block):
                result[block.row_index[rows]] = collective_roofline_s(block.take(rows), device)
            continue
        distinct, inverse = _distinct(table, block)
        flops, moved = work(block.operator, block.dtype, block.flags, distinct.sizes)
        for rows, device in by_device(table, block):
            at = inverse[rows]
            result[block.row_index[rows]] = _bound_s(block, device, flops[at], moved[at])
    return result


def by_device(table: MeasurementTable, block: OperatorBlock) -> Iterator[tuple[NDArray[np.int64], DeviceSpec]]:
    """Positions of a block of rows, by device; rows of unknown devices are left out."""
    devices = table.device.codes[block.row_index]
    for code in np.unique(devices):
        try:
            device = table.device_spec(table.device.names[code])
        except UnknownDeviceError:
            continue
        yield np.flatnonzero(devices == code), device


def _distinct(table: MeasurementTable, block: OperatorBlock) -> tuple[OperatorBlock, NDArray[np.int64]]:
    """Distinct programs of a block of rows, and the position of each row's program among them."""
    _, first, inverse = np.unique(table.program_key[block.row_index], return_index=True, return_inverse=True)
    return block.take(first), inverse


def experts_read_s(table: MeasurementTable) -> Float64:
    """Seconds in which the memory delivers the experts' weights; NaN for rows without doubt (:data:`EXCLUDED`)."""
    result = np.full(len(table), np.nan)
    doubtful = table.source.is_(DOUBTFUL_EXPERTS)
    for block in table.specs if doubtful.any() else ():
        if block.operator != "moe":
            continue
        distinct, inverse = _distinct(table, block)
        weights = expert_weight_bytes(block.operator, block.dtype, block.flags, distinct.sizes)[inverse]
        # Drawn routings leave more experts without rows than the estimate.
        share = 1.0 if block.flags["balance"] == "balanced" else 0.5
        for rows, device in by_device(table, block):
            beyond = weights[rows] > EXPERTS_BEYOND_L2 * (device.l2_bytes or UNSTATED_L2)
            beyond &= doubtful[block.row_index[rows]]
            read_s = share * weights[rows] / device.mem_bandwidth_bytes_per_s
            result[block.row_index[rows]] = np.where(beyond, read_s, np.nan)
    return result


def slower_kernels(table: MeasurementTable) -> Mask:
    """Rows of :data:`DOUBTFUL_EXPERTS` whose problem has a faster row of the same device, framework and protocol."""
    rows = np.flatnonzero(table.source.is_(DOUBTFUL_EXPERTS) & (table.program_key >= 0) & (table.latency_s > 0))
    slower = np.zeros(len(table), dtype=np.bool_)
    key = table.program_key[rows]
    for labels in (table.device, table.framework, table.protocol):
        key = key * len(labels.names) + labels.codes[rows]
    order = np.lexsort((table.latency_s[rows], key))
    slower[rows[order[1:]]] = key[order][1:] == key[order][:-1]
    return slower


def flag_rows(table: MeasurementTable) -> Labels:
    """Apply the rules of :data:`EXCLUDED`, the first that holds; "" where none does."""
    reasons = ("", *EXCLUDED)
    code = {name: i for i, name in enumerate(reasons)}
    flags = np.zeros(len(table), dtype=np.int32)
    latency, bound = table.latency_s, table_roofline_s(table)
    with np.errstate(invalid="ignore"):  # NaN compares false: no bound, no rule
        flags[host_bound_rows(table, bound)] = code["host_bound"]
        flags[contradicting_rows(table)] = code["contradicts_sibling"]
        flags[slower_kernels(table)] = code["slower_kernel"]
        flags[latency < experts_read_s(table)] = code["weights_not_read"]
        flags[latency < FAST_FACTOR * bound] = code["too_fast"]
        flags[latency > SLOW_FACTOR * bound + SLOW_OFFSET_S] = code["too_slow"]
        flags[(latency > LONG_S) & (latency > LONG_FACTOR * bound)] = code["too_slow"]
        flags[latency <= 0] = code["latency_not_positive"]
    flags[~np.isfinite(latency)] = code["no_latency"]
    flags[table.failed] = code["failed"]
    return Labels(flags, reasons)


def needed_bytes(spec: OperatorSpec, *, gpu: bool = False) -> float:
    """Return the bytes of all tensors that a call holds at once, with its result and known scratch space.

    ``gpu``: half-precision attention is one fused kernel there, for any number of heads.
    """
    return spec.tensor_bytes() + DTYPE_BYTES[spec.dtype] * _scratch_elements(spec, gpu)


def _scratch_elements(spec: OperatorSpec, gpu: bool) -> float:
    if isinstance(spec, Binary):
        return spec.rows * spec.cols * (spec.inputs > 2)  # an intermediate result beside the next one
    if isinstance(spec, Conv2d):
        height, width = spec.output_hw()
        # Libraries may copy all tensors into another layout, and unfold the input of at least one image.
        return spec.tensor_bytes() / DTYPE_BYTES[spec.dtype] + spec.c_in * spec.kh * spec.kw * height * width
    if isinstance(spec, Attention):
        keys = spec.q_len + spec.past_len
        masked = spec.operator == "attention_prefill" and spec.past_len > 0
        fused = (spec.kv_heads == spec.heads and not masked) or (gpu and spec.dtype != "float32")
        # Without a fused kernel keys and values are repeated for all heads, and the scores are written out,
        # before and after the softmax.
        repeated = spec.head_dim * keys * (spec.heads - spec.kv_heads)
        return 0 if fused else 2 * spec.batch * (repeated + spec.heads * spec.q_len * keys)
    if isinstance(spec, Moe) and spec.operator == "moe":
        sizes = spec.bindings()
        # Rows between the products, before and after the activation, and the second product's before they are combined.
        columns = sizes["rank_intermediate"] * (2 + spec.gated) + spec.hidden
        return sizes["rank_rows"] * columns
    return 0
