"""Rules that map ATen calls to the operators that an eager framework launches on a GPU.

Where a call is an operator of :mod:`cdmpp.programs.operators`, it becomes that. Everything else that only
streams memory (casts, copies, masks, dropout, reductions, gradients of element-wise functions) becomes a ``relu`` of
float32 that moves the same number of bytes: element-wise kernels differ by their traffic and hardly by their
arithmetic or type, and ``relu`` of float32 is in the training data of cost models. ``remark`` names the substitution.
No torch is imported: any object with a shape and a dtype is a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cdmpp.programs.attention import equal_sequences
from cdmpp.programs.elements import BASIC_DTYPES, DTYPE_BYTES
from cdmpp.programs.frontends.graph import NoRuleError
from cdmpp.programs.frontends.kernel_work import AttentionWork, ConvolutionWork, KernelWork, Work

Fields = dict[str, Any]


@dataclass(frozen=True)
class AtenCall:
    """One dispatched call: the ATen name without its overload, arguments, and what it returned."""

    name: str
    args: Sequence[Any]
    kwargs: dict[str, Any]
    out: Any

    def arg(self, index: int, name: str = "", default: Any = None) -> Any:
        """A positional argument, or the keyword argument of that name."""
        return self.args[index] if index < len(self.args) else self.kwargs.get(name, default)

    @property
    def tensors(self) -> list[Any]:
        """Tensors among the arguments, those in lists included."""
        rules = []
        for value in (*self.args, *self.kwargs.values()):
            for item in value if isinstance(value, list | tuple) else (value,):
                if is_tensor(item):
                    rules.append(item)
        return rules

    @property
    def results(self) -> list[Any]:
        """Tensors that it returned."""
        values = self.out if isinstance(self.out, list | tuple) else (self.out,)
        return [value for value in values if is_tensor(value)]


@dataclass(frozen=True)
class Launches:
    """Fields of the operators that a call launches, in order; none for a call that launches nothing."""

    launches: tuple[Fields, ...] = ()
    remark: str = ""  # why the operators are not the call's own
    works: tuple[Work | None, ...] = ()  # bounds of the first kernels besides those of their operators
    host: str = ""  # kind of the call for the host, where its name does not say it


def is_tensor(value: Any) -> bool:
    """Whether a value is a tensor, of whatever library."""
    return hasattr(value, "shape") and hasattr(value, "dtype") and hasattr(value, "numel")


def dtype_of(tensor: Any) -> str:
    """Element type by its name: ``"float32"``."""
    return str(tensor.dtype).removeprefix("torch.")


def number_type(tensor: Any) -> str:
    """Element type, if operators may have it. Raises NoRuleError: float64, complex or integer arithmetic."""
    name = dtype_of(tensor)
    if name not in BASIC_DTYPES:
        raise NoRuleError(f"no operator has elements of type {name}")
    return name


def size_bytes(tensor: Any) -> int:
    """Bytes of a tensor, read or written once; a broadcast axis is not read again and again."""
    stored = 1
    strides = tensor.stride() if callable(getattr(tensor, "stride", None)) else (1,) * len(tensor.shape)
    for extent, stride in zip(tensor.shape, strides, strict=True):
        stored *= extent if stride or extent == 1 else 1
    return stored * int(tensor.element_size())


def rows_cols(tensor: Any) -> Fields:
    """A tensor as rows of its last axis."""
    shape = tuple(tensor.shape)
    return {"rows": max(math.prod(shape[:-1]), 1), "cols": shape[-1] if shape else 1}


def traffic(moved: float, like: Any) -> Fields:
    """An element-wise pass that reads and writes ``moved`` bytes in all, on rows as long as ``like``'s."""
    return traffic_of(moved, like.shape[-1] if len(like.shape) else 1)


def traffic_of(moved: float, cols: int) -> Fields:
    """An element-wise pass that reads and writes ``moved`` bytes in all, on rows of ``cols``."""
    elements = max(math.ceil(moved / (2 * DTYPE_BYTES["float32"])), 1)
    cols = min(cols, elements)
    return {"operator": "relu", "dtype": "float32", "rows": math.ceil(elements / cols), "cols": cols}


def over(operator: str, tensor: Any, **more: Any) -> Fields:
    """Fields of an operator on all elements of a tensor."""
    return {"operator": operator, "dtype": number_type(tensor), **rows_cols(tensor), **more}


def one(fields: Fields, remark: str = "", work: Work | None = None) -> Launches:
    """An outcome of one launch."""
    return Launches((fields,), remark, (work,))


def moves(call: AtenCall, moved: float, like: Any, work: KernelWork | None = None) -> Launches:
    """A call by the bytes that it moves, as :func:`traffic`."""
    return one(traffic(moved, like), f"aten.{call.name} as relu: the same bytes moved", work)


# --- element by element -------------------------------------------------------------------------------


def streamed(call: AtenCall) -> Launches:
    """Every tensor argument read, every result written once."""
    # Written in place, the result is the first argument: it is read and written all the same.
    moved = sum(size_bytes(t) for t in (*call.tensors, *call.results))
    largest = max((*call.results, *call.tensors), key=lambda t: t.numel())
    return moves(call, moved, largest)


def unary(operator: str) -> Callable[[AtenCall], Launches]:
    """A function of each element; in 16 bit by its bytes, since large ones were measured in float32 only."""

    def rule(call: AtenCall) -> Launches:
        result = call.results[0]
        return one(over(operator, result)) if dtype_of(result) == "float32" else streamed(call)

    return rule


def binary(operator: str) -> Callable[[AtenCall], Launches]:
    """Two tensors of one size, or one and a scalar; a smaller one that is broadcast costs nothing to read.

    Other types than float32 by their bytes, as :func:`unary`.
    """

    def rule(call: AtenCall) -> Launches:
        result = call.results[0]
        full = [t for t in call.tensors[:2] if 2 * t.numel() > result.numel()]
        if {dtype_of(t) for t in (result, *full)} != {"float32"}:
            return streamed(call)
        if len(full) == 2:
            return one(over(operator, result))
        if operator in ("add", "mul", "div", "pow"):
            return one(over(f"{operator}_scalar", result))
        return streamed(call)

    return rule


def small_or(rule: Callable[[AtenCall], Launches]) -> Callable[[AtenCall], Launches]:
    """Nothing for what is computed on the host: scalars wrapped as tensors without a device of their own.

    A counter is on the device: batch normalisation adds to one in training.
    """

    def small(call: AtenCall) -> Launches:
        if any(t.shape for t in call.tensors):
            return rule(call)
        counts = call.tensors and dtype_of(call.tensors[0]) == "int64" and call.out is call.tensors[0]
        return streamed(call) if counts else Launches()

    return small


# --- rows ---------------------------------------------------------------------------------------------


def softmax(call: AtenCall) -> Launches:
    """Over another than the last axis a thread walks along the axis, three times (SpatialSoftMaxForward)."""
    x, axis = call.tensors[0], call.arg(1)
    cols = x.shape[axis]
    fields = {"operator": "softmax", "dtype": number_type(call.results[0]), "rows": x.numel() // cols, "cols": cols}
    inner = math.prod(x.shape[axis % len(x.shape) + 1 :])
    if inner == 1:
        # A block of a long row keeps nothing of it: it reads the row three times.
        return one(fields, work=KernelWork("one block a row", cycles=cols / 5, blocks=fields["rows"]))
    threads = min(inner, 1024)
    beside = 1
    while threads <= 64 <= cols and 2 * beside * threads <= 1024 and 2 * beside <= cols:
        beside *= 2
    steps = 3 * math.ceil(cols / beside)
    work = KernelWork(
        "a thread a column",
        cycles=steps * (400 + 0.45 * threads * beside),
        blocks=x.numel() / cols / threads,
        resident=2048 // (threads * beside),
    )
    return one(fields, work=work)


def norm_of_rows(elements: float, rows: float, cycles_per_element: float) -> KernelWork:
    """Normalisations have one thread block a row, however long it is."""
    return KernelWork("one block a row", cycles=cycles_per_element * elements, blocks=rows)


#: Cycles of a thread block for an element of its row: statistics and result, statistics alone, cuDNN's batch
#: normalisation in training and evaluation.
NORM_CYCLES, MOMENT_CYCLES, BATCH_CYCLES, BATCH_EVALUATION_CYCLES = 3.5, 1.6, 1.3, 2.0


def layernorm(operator: str) -> Callable[[AtenCall], Launches]:
    def rule(call: AtenCall) -> Launches:
        x, cols = call.tensors[0], math.prod(call.arg(1))
        fields = {"operator": operator, "dtype": number_type(x), "rows": x.numel() // cols, "cols": cols}
        if fields["dtype"] == "float32":  # tables have RMS normalisations in 16 bit only; the kernel is the same
            fields["operator"] = "layernorm"
        # A unit holds four blocks; up to as many the rows share its memory path.
        return one(fields, work=norm_of_rows(cols, fields["rows"] / 4, NORM_CYCLES))

    return rule


def layernorm_backward(call: AtenCall) -> Launches:
    """The gradient of the input (reads two tensors, writes one), and one more reading for the weights'."""
    gradient = call.tensors[0]
    data = over("mul", gradient)
    weights = traffic(2 * size_bytes(gradient), gradient)
    return Launches((data, weights), "two passes by their bytes")


def reduce_to(call: AtenCall) -> Launches:
    """A sum, mean or extremum over some axes: short rows waste the threads of a warp."""
    x, result = call.tensors[0], call.results[0]
    row_operations = min(5000 + 300 * x.numel() / max(result.numel(), 1), 15_000)
    work = KernelWork("a warp a row", operations=row_operations * result.numel()) if _reduces_last(call) else None
    return moves(call, size_bytes(x) + sum(map(size_bytes, call.results)), x, work)


def _reduces_last(call: AtenCall) -> bool:
    x, axes = call.tensors[0], call.arg(1, "dim")
    axes = axes if isinstance(axes, list | tuple) else [axes]
    return all(isinstance(axis, int) and not isinstance(axis, bool) for axis in axes) and any(
        axis % max(len(x.shape), 1) == len(x.shape) - 1 for axis in axes
    )


def variance(call: AtenCall) -> Launches:
    """Welford's update divides for every element."""
    x = call.tensors[0]
    return moves(call, size_bytes(x), x, KernelWork("Welford's update", operations=550 * x.numel()))


def logsumexp(call: AtenCall) -> Launches:
    """A maximum, a difference, an exponential and a sum, each a pass; and two of the result."""
    x, result = call.tensors[0], call.results[0]
    passes = [1, 2, 2, 1]
    small = traffic(2 * size_bytes(result), result)
    return Launches((*(traffic(n * size_bytes(x), x) for n in passes), small, small), "passes by their bytes")


def scan(call: AtenCall) -> Launches:
    """Along the last axis blocks of 16 rows go on piece by piece; along another, a thread walks."""
    x, axis = call.tensors[0], call.arg(1, "dim")
    if not x.shape:
        return streamed(call)
    cols = x.shape[axis]
    inner = math.prod(x.shape[axis % len(x.shape) + 1 :])
    moved = size_bytes(x) + sum(map(size_bytes, call.results))
    if inner == 1:
        rows = x.numel() / cols
        # A single row has the parallel scan of CUB.
        work = None if rows == 1 else KernelWork("a scan", operations=650 * x.numel(), cycles=3.5 * cols)
    else:
        work = KernelWork("a thread a column", cycles=300 * cols)
    return moves(call, moved, x, work)


def loss(call: AtenCall) -> Launches:
    """An element-wise pass that writes all values, and their mean or sum."""
    a, b = call.tensors[:2]
    reduction = call.arg(2 if call.name != "binary_cross_entropy" else 3, "reduction", 1)
    first = traffic(size_bytes(a) + size_bytes(b) + a.numel() * a.element_size(), a)
    last = (traffic(size_bytes(a), a),) if reduction else ()
    return Launches((first, *last), "passes by their bytes")


def nll_loss(call: AtenCall) -> Launches:
    """One block of 32 threads adds up the picked values."""
    target = call.tensors[1]
    work = KernelWork("one block", cycles=1000 + 16 * target.numel())
    return moves(call, 2 * size_bytes(target), target, work)


def batch_norm(call: AtenCall) -> Launches:
    """Evaluation: one pass. Training: the same kernel reads for the statistics first."""
    x = call.tensors[0]
    channels = x.shape[1] if len(x.shape) > 1 else 1
    elements = x.numel() / channels
    training = next((value for value in call.args if isinstance(value, bool)), False)
    if not training or call.name.endswith("no_training"):
        planes = x.shape[0] * channels if len(x.shape) > 2 else math.ceil(x.numel() / 4096)
        work = norm_of_rows(x.numel() / planes, planes / 4, BATCH_EVALUATION_CYCLES)
        return one(traffic(2 * size_bytes(x), x), "one pass by its bytes", work)
    if len(x.shape) == 2:
        # Statistics, the result, and the bookkeeping of both.
        small = traffic(8 * channels, x)
        passes = (traffic(size_bytes(x), x), traffic(2 * size_bytes(x), x), small)
        return Launches(passes, "two passes by their bytes")
    affine = any(is_tensor(value) for value in call.args[1:3])
    cycles = BATCH_CYCLES if affine else 2 * MOMENT_CYCLES
    # The statistics and the result of instance normalisations are kernels that share a unit.
    work = norm_of_rows(elements, channels if affine else channels / 2.5, cycles)
    return one(traffic(3 * size_bytes(x), x), "one kernel that reads twice, by its bytes", work)


def batch_norm_backward(call: AtenCall) -> Launches:
    """One kernel that reads the input and the gradient twice and writes one tensor."""
    gradient = call.tensors[0]
    return one(traffic(5 * size_bytes(gradient), gradient), "one kernel that reads twice, by its bytes")


# --- products -----------------------------------------------------------------------------------------


def mm(call: AtenCall) -> Launches:
    a, b = call.tensors[:2]
    b_cols = 1 if len(b.shape) == 1 else b.shape[1]
    if len(a.shape) == 1:
        raise NoRuleError("a product of vectors")
    return one({"operator": "linear", "dtype": number_type(a), "m": a.shape[0], "n": b_cols, "k": a.shape[1]})


def addmm(call: AtenCall) -> Launches:
    bias, a, b = call.tensors[:3]
    fields = {"operator": "linear", "dtype": number_type(a), "m": a.shape[0], "n": b.shape[1], "k": a.shape[1]}
    if len(bias.shape) <= 1:
        return one({**fields, "bias": True})
    return Launches((fields, over("add", call.results[0])), "the added matrix is a pass of its own")


def bmm(call: AtenCall) -> Launches:
    a, b = (t for t in call.tensors if len(t.shape) == 3 and t is not None)
    sizes = {"batch": a.shape[0], "m": a.shape[1], "n": b.shape[2], "k": a.shape[2]}
    return one({"operator": "bmm", "dtype": number_type(a), **sizes})


def _conv_fields(
    x: Any, w: Any, stride: Any, pad: Any, dilation: Any, groups: int, direction: str, **more: Any
) -> Fields:
    """Two axes, whatever the convolution has: one axis is an image of one row, depth is further images and channels."""
    axes = len(x.shape) - 2
    if axes not in (1, 2, 3):
        raise NoRuleError(f"convolution over {axes} axes")

    def of(values: Any) -> tuple[int, ...]:
        return tuple(values) * (axes if len(values) == 1 else 1)

    stride, pad, dilation = of(stride), of(pad), of(dilation)

    def by_axis(name: str, values: Any, of_one_row: int) -> Fields:
        return {f"{name}h": of_one_row if axes == 1 else values[-2], f"{name}w": values[-1]}

    images, depth = x.shape[0], 1
    if axes == 3:
        depth = w.shape[2]
        images *= max((x.shape[2] + 2 * pad[0] - dilation[0] * (depth - 1) - 1) // stride[0] + 1, 1)
    return {
        **{"operator": "conv2d", "direction": direction, "dtype": number_type(x)},
        **{"n": images, "c_in": x.shape[1] * depth, **by_axis("", x.shape[2:], 1)},
        **{"c_out": w.shape[0], **by_axis("k", w.shape[2:], 1)},
        **by_axis("stride_", stride, 1),
        **by_axis("pad_", pad, 0),
        **by_axis("dil_", dilation, 1),
        "groups": groups,
        **more,
    }


def _conv_work(x: Any, w: Any, y: Any, stride: Any, groups: int, bias: bool, transposed: bool) -> Work:
    """Work of a convolution from ``x`` to ``y``; depth-wise ones in float32 are PyTorch's own kernels."""
    taps = math.prod(w.shape[2:])
    dtype = dtype_of(x)
    if groups == x.shape[1] > 1 and not transposed:
        instructions = max(700, (43 if len(x.shape) < 5 else 60) * taps) if dtype == "float32" else 2000 + 90 * taps
        return KernelWork("depth-wise", operations=instructions * y.numel(), replaces=True)
    strides = tuple(stride) * (len(x.shape) - 2 if len(stride) == 1 else 1)
    return ConvolutionWork(
        dtype,
        places=y.shape[0] * math.prod(y.shape[2:]),
        c_in=x.shape[1] // groups,
        c_out=y.shape[1] // groups,
        taps=taps,
        groups=groups,
        x_bytes=size_bytes(x),
        y_bytes=size_bytes(y),
        layout_bytes=0.0 if _is_channels_last(x) else size_bytes(x) + size_bytes(y),
        bias=bias,
        plain=len(x.shape) < 5 and not transposed,
        axes=len(x.shape) - 2,
        strides=math.prod(strides) if transposed else 1.0,
    )


def _is_channels_last(x: Any) -> bool:
    strides = x.stride() if callable(getattr(x, "stride", None)) else ()
    return len(x.shape) > 3 and x.shape[1] > 1 and tuple(strides[1:2]) == (1,)


def convolution(call: AtenCall) -> Launches:
    x, w, bias, stride, pad, dilation, transposed, _, groups = (call.arg(i) for i in range(9))
    y = call.results[0]
    work = _conv_work(x, w, y, stride, groups, bias is not None, transposed)
    remark = "" if len(x.shape) < 5 else "three axes as two: depth as further images and channels"
    if transposed:  # computed as the gradient of the convolution that goes the other way
        return one(_conv_fields(y, w, stride, pad, dilation, groups, "bwd_data"), remark, work)
    if isinstance(work, KernelWork):
        moved = traffic((size_bytes(x) + size_bytes(y)) / 0.75, y)
        fields = moved if groups == x.shape[1] else _conv_fields(x, w, stride, pad, dilation, groups, "fwd")
        remark = "a depth-wise convolution by its bytes"
        return Launches((fields,), remark, (replace(work, replaces=False),), host="depthwise")
    return one(_conv_fields(x, w, stride, pad, dilation, groups, "fwd", bias=bias is not None), remark, work)


def convolution_backward(call: AtenCall) -> Launches:
    gradient, x, w, _, stride, pad, dilation, transposed, _, groups, wanted = (call.arg(i) for i in range(11))
    launches = []
    if wanted[0]:
        if transposed:
            launches.append(_conv_fields(gradient, w, stride, pad, dilation, groups, "fwd"))
        else:
            launches.append(_conv_fields(x, w, stride, pad, dilation, groups, "bwd_data"))
    if wanted[1]:
        inner = gradient if transposed else x
        launches.append(_conv_fields(inner, w, stride, pad, dilation, groups, "bwd_weight"))
    if wanted[2]:
        launches.append(traffic(size_bytes(gradient), gradient))
    return Launches(tuple(launches))


# --- the rest -----------------------------------------------------------------------------------------


def embedding(call: AtenCall) -> Launches:
    table, indices = call.tensors[:2]
    sizes = {"rows": indices.numel(), "cols": table.shape[1], "table_rows": table.shape[0]}
    return one({"operator": "embedding", "dtype": number_type(table), **sizes})


def embedding_backward(call: AtenCall) -> Launches:
    """A table of zeros is written, then the rows are added to it."""
    gradient, table = call.tensors[0], call.results[0]
    return Launches((traffic(size_bytes(table), table), over("add", gradient)), "zeros and added rows, by their bytes")


def pool(operator: str) -> Callable[[AtenCall], Launches]:
    """Pooling over windows: a thread a result, which walks over its window; maxima come with int64 indices."""

    def rule(call: AtenCall) -> Launches:
        x, y, window = call.tensors[0], call.results[0], call.arg(1)
        axes = len(x.shape) - 2 if len(x.shape) > 3 else len(window)
        stride, pad = call.arg(2, "stride") or window, call.arg(3, "padding", [0] * axes)
        taps = math.prod(tuple(window) * (axes if len(window) == 1 else 1))
        largest = operator == "max_pool2d"
        if axes < 3:
            operations = (49 * taps + 566 if largest else 100 * taps + 300) * y.numel()
        else:
            # Blocks of 8 x 32 threads on a plane of results, however small it is.
            height, width = y.shape[-2:]
            threads = y.numel() // (height * width) * math.ceil(height / 8) * math.ceil(width / 32) * 256
            operations = (65 * taps + 300) * threads if largest else max(1000 * threads, 190 * taps * y.numel())
        work = KernelWork("a thread a window", operations=operations, cycles=200 * taps)
        if len(x.shape) != 4:
            return moves(call, size_bytes(x) + sum(map(size_bytes, call.results)), y, work)
        (kh, kw), (stride_h, stride_w), (pad_h, pad_w) = ((v[0], v[-1]) for v in (window, stride, pad))
        n, c, h, w = x.shape
        fields = {"operator": operator, "dtype": number_type(x), "n": n, "c": c, "h": h, "w": w, "kh": kh, "kw": kw}
        fields |= {"stride_h": stride_h, "stride_w": stride_w, "pad_h": pad_h, "pad_w": pad_w}
        return one(fields, work=work)

    return rule


def adaptive_pool(cycles_per_element: float) -> Callable[[AtenCall], Launches]:
    """Pooling to a given size: a block a plane, which walks over all of it. To one element it is a mean."""

    def rule(call: AtenCall) -> Launches:
        x, y = call.tensors[0], call.results[0]
        planes = math.prod(x.shape[:2])
        moved = size_bytes(x) + sum(map(size_bytes, call.results))
        if y.numel() == planes and "avg" in call.name:
            return moves(call, moved, x)
        work = KernelWork(
            "one block a plane", cycles=600 + cycles_per_element * x.numel() / planes, blocks=planes, resident=3
        )
        return moves(call, moved, x, work)

    return rule


def copied(call: AtenCall) -> Launches:
    """Copies without arithmetic: a clone, a cast, a concatenation, the copy of a permutation."""
    result = call.results[0]
    sources = call.tensors[1:] if call.name == "copy" else call.tensors
    moved = size_bytes(result) + sum(size_bytes(t) for t in sources)
    return moves(call, moved, result)


def filled(call: AtenCall) -> Launches:
    """A tensor that is filled without reading one."""
    result = call.results[0]
    return moves(call, size_bytes(result), result)


def gradient_of_view(call: AtenCall) -> Launches:
    """Zeros of the whole tensor, and the piece copied into them."""
    whole, piece = call.results[0], call.tensors[0]
    return moves(call, size_bytes(whole) + 2 * size_bytes(piece), whole)


def grouped_mm(call: AtenCall) -> Launches:
    """Rows of groups with a weight each, or the gradient of these weights."""
    a, b, result = call.tensors[0], call.tensors[1], call.results[0]
    if len(a.shape) == 2 and len(b.shape) == 3:
        groups, rows, k, n = b.shape[0], a.shape[0], a.shape[1], b.shape[2]
    elif len(a.shape) == 2 and len(b.shape) == 2:
        groups, rows, k, n = result.shape[0], a.shape[1], a.shape[0], b.shape[1]
    else:
        raise NoRuleError(f"grouped products of {len(a.shape)} and {len(b.shape)} axes")
    fields = {"operator": "grouped_gemm", "dtype": number_type(a), "groups": groups, "rows": rows, "n": n, "k": k}
    return one(fields, "rows are spread evenly over the groups")


def picked(call: AtenCall) -> Launches:
    """Elements at indices: only those that are picked move."""
    result = call.results[0]
    return moves(call, 2 * size_bytes(result), result)


def put(call: AtenCall) -> Launches:
    """Elements written at indices: only those that are written move; a result of its own is a copy first."""
    result = call.results[0]
    values = call.arg(2)
    moved = 2 * size_bytes(values) + (0 if call.name.endswith("_") else 2 * size_bytes(result))
    return moves(call, moved, result)


def added(call: AtenCall) -> Launches:
    """Rows added at indices: the rows are read, what they are added to is read and written."""
    rows, result = call.arg(3, "source"), call.results[0]
    if not rows.numel():
        return Launches()
    moved = 3 * size_bytes(rows) + (0 if call.name.endswith("_") else 2 * size_bytes(result))
    return moves(call, moved, rows)


#: Longest row that one thread block sorts in its own memory.
BLOCK_SORT = 4096


def sort(call: AtenCall) -> Launches:
    """Short rows: one pass. Long ones: a radix sort, whose passes over 8 bits move keys and int64 indices."""
    x = call.tensors[0]
    axes = [v for v in call.args[1:] if type(v) is int][call.name == "kthvalue" :]
    axis = call.kwargs.get("dim", axes[0] if axes else -1)
    pairs = size_bytes(x) + 8 * x.numel()
    if x.shape and x.shape[axis] <= BLOCK_SORT:
        return moves(call, size_bytes(x) + sum(map(size_bytes, call.results)), x)
    return moves(call, size_bytes(x) + x.element_size() * 2 * pairs, x)


def group_norm(call: AtenCall) -> Launches:
    """One kernel reads for the statistics, a block a group; one reads and writes."""
    x, groups = call.tensors[0], call.arg(6)
    rows = x.shape[0] * groups
    statistics = norm_of_rows(x.numel() / rows, rows / 2, MOMENT_CYCLES)
    return Launches(
        (traffic(size_bytes(x), x), traffic(2 * size_bytes(x), x)), "two passes by their bytes", (statistics,)
    )


def group_norm_backward(call: AtenCall) -> Launches:
    """The sums of the gradient and its product with the input, then the gradient of the input."""
    size = size_bytes(call.tensors[0])
    like = call.tensors[0]
    return Launches((traffic(2 * size, like), traffic(3 * size, like)), "two passes by their bytes")


# --- lists of tensors ---------------------------------------------------------------------------------

#: Elements of a block, blocks of a launch, and tensors of a launch by the number of lists.
CHUNK, BLOCKS = 65_536, 320
TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
#: Columns of the operator that stands for a launch: neither shapes nor types of the tensors matter to it.
COLUMNS = 4096


def foreach(call: AtenCall) -> Launches:
    """Element-wise passes over lists of tensors, which optimizers make on GPUs: every list is read, the result written.

    A launch takes a limited number of tensors and of blocks of 65,536 elements
    (ATen/native/cuda/MultiTensorApply.cuh), so that a call on a large network is many launches.
    """
    lists = [value for value in call.args if isinstance(value, list | tuple) and value and is_tensor(value[0])]
    if not lists or lists[0][0].device.type == "cpu":  # step counters are on the host
        return Launches()
    results = lists[0] if call.name.endswith("_") else call.results
    written = [] if call.name.endswith("_") or not results else [results]
    groups = list(zip(*lists, *written, strict=False))
    per_launch = TENSORS.get(len(lists) + len(written), min(TENSORS.values()))
    launches: list[Fields] = []
    moved, tensors, blocks = 0.0, 0, 0
    for group in groups:
        # Written in place, the first tensor of a group moves twice.
        bytes_moved = sum(map(size_bytes, group)) + (0 if written else size_bytes(group[0]))
        remaining = elements = group[0].numel()
        tensors += 1
        while remaining:
            taken = min(remaining, (BLOCKS - blocks) * CHUNK)
            moved += bytes_moved * taken / elements
            blocks += -(-taken // CHUNK)
            remaining -= taken
            if blocks == BLOCKS or (tensors == per_launch and not remaining):
                launches.append(traffic_of(moved, COLUMNS))
                # The remainder of a tensor counts as one of the next launch.
                moved, tensors, blocks = 0.0, int(remaining > 0), 0
    if moved:
        launches.append(traffic_of(moved, COLUMNS))
    return Launches(tuple(launches), "a pass over lists of tensors as relu: the same bytes moved")


# --- tables -------------------------------------------------------------------------------------------

#: Calls that allocate, rename or describe memory.
_FREE = """
    alias as_strided detach diagonal empty empty_like empty_strided expand is_same_size lift_fresh narrow new_empty
    new_empty_strided permute reshape select set_ slice split split_with_sizes chunk squeeze sym_numel sym_size
    sym_stride t transpose unbind unfold unsqueeze view view_as _reshape_alias _unsafe_view unsafe_split
    _local_scalar_dense _conj resize_ is_pinned _to_cpu
    """
FREE = frozenset(_FREE.split())

_UNARY = ("relu", "gelu", "tanh", "sigmoid", "silu", "exp", "sqrt", "erf", "abs", "neg", "log")
_BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum")
_STREAMED = """
    where masked_fill clamp clamp_min clamp_max hardtanh hardtanh_backward hardswish hardswish_backward hardsigmoid
    hardsigmoid_backward leaky_relu leaky_relu_backward elu rsqrt reciprocal sin cos square sign erfinv
    threshold_backward gelu_backward tanh_backward sigmoid_backward silu_backward native_dropout native_dropout_backward
    _softmax_backward_data _log_softmax_backward_data bitwise_not logical_not eq ne lt le gt ge logical_and logical_or
    tril triu rsub addcmul addcdiv lerp nll_loss_backward max_pool2d_with_indices_backward
    avg_pool2d_backward _adaptive_avg_pool2d_backward upsample_nearest2d upsample_bilinear2d gather index_select
    channel_shuffle roll flip
    """
_WRITTEN = """
    zeros zeros_like ones ones_like full full_like fill zero new_zeros new_ones new_full arange bernoulli randn rand
    randn_like rand_like scalar_tensor diag_embed
    """

#: ATen name, without the overload and without the underscore of in-place forms -> rule.
RULES: dict[str, Callable[[AtenCall], Launches]] = {
    **{name: unary(name) for name in _UNARY},
    **{name: small_or(binary(name)) for name in _BINARY},
    **dict.fromkeys(_STREAMED.split(), small_or(streamed)),
    **dict.fromkeys(_WRITTEN.split(), filled),
    **dict.fromkeys(("clone", "contiguous", "cat", "stack", "copy", "_to_copy", "repeat"), copied),
    **dict.fromkeys(("_softmax", "_log_softmax", "_safe_softmax"), softmax),
    **dict.fromkeys(("sum", "mean", "amax", "amin"), reduce_to),
    "_adaptive_avg_pool2d": adaptive_pool(1.6),
    "_adaptive_avg_pool3d": adaptive_pool(7.0),
    **dict.fromkeys(("adaptive_max_pool2d", "adaptive_max_pool3d"), adaptive_pool(85.0)),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), variance),
    **dict.fromkeys(("max", "min", "argmax", "argmin"), reduce_to),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "logcumsumexp"), scan),
    **dict.fromkeys(("mse_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy"), loss),
    "nll_loss_forward": nll_loss,
    "logsumexp": logsumexp,
    **dict.fromkeys(("slice_backward", "select_backward", "constant_pad_nd", "pad"), gradient_of_view),
    **dict.fromkeys(
        ("native_batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "cudnn_batch_norm"),
        batch_norm,
    ),
    "native_layer_norm": layernorm("layernorm"),
    "_fused_rms_norm": layernorm("rmsnorm"),
    "native_layer_norm_backward": layernorm_backward,
    "native_batch_norm_backward": batch_norm_backward,
    "mm": mm,
    "mv": mm,
    "addmm": addmm,
    "bmm": bmm,
    "baddbmm": bmm,
    "convolution": convolution,
    "convolution_backward": convolution_backward,
    "embedding": embedding,
    "embedding_dense_backward": embedding_backward,
    **dict.fromkeys(("max_pool2d_with_indices", "max_pool3d_with_indices"), pool("max_pool2d")),
    **dict.fromkeys(("avg_pool2d", "avg_pool3d"), pool("avg_pool2d")),
}


#: Largest head of FlashAttention.
MAX_FLASH = 256
#: Forward kernels that stand for the backward kernel of fused attention.
BACKWARD_KERNELS = 3


def attention_kernel(
    dtype: str, batch: int, q_len: int, k_len: int, heads: int, kv_heads: int, head_dim: int, causal: bool
) -> tuple[Fields, Work | None]:
    """The operator of fused attention, and bounds of its kernel."""
    fields: Fields = {
        "operator": "attention_prefill" if causal else "attention_encoder",
        "dtype": dtype,
        "batch": batch,
        "q_len": q_len,
        "past_len": k_len - q_len if causal else 0,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
    }
    flash = dtype in ("float16", "bfloat16") and head_dim <= MAX_FLASH
    return fields, AttentionWork(batch * heads, q_len, k_len, head_dim, causal) if flash else None


def packed_attention(call: AtenCall) -> Launches:
    """``torch.nn.attention.varlen``: one kernel over the tokens of all sequences.

    The lengths are values. Their number n, their mean m and the longest L are known. They are taken to rise as
    L u^(L / m - 1) for u from 0 to 1: their mean is m, and that of their squares m L^2 / (2 L - m).
    """
    backward = call.name.endswith("_backward")
    q, k = call.args[backward : backward + 2]
    starts, longest, causal = (call.arg(i + 3 * backward) for i in (3, 5, 7))
    if q.shape[0] != k.shape[0] or (not backward and call.arg(12, "block_table") is not None):
        raise NoRuleError("packed attention to other tokens than its own")
    tokens, sequences = q.shape[0], max(starts.shape[0] - 1, 1)
    mean = tokens / sequences
    longest = max(longest, mean)
    batch, length = equal_sequences(tokens, tokens * longest**2 / (2 * longest - mean))
    sizes = (batch, length, length, q.shape[1], k.shape[1], q.shape[2])
    fields, work = attention_kernel(dtype_of(q), *sizes, bool(causal))
    kernels = BACKWARD_KERNELS if backward else 1
    remark = "equal sequences with as many tokens and pairs, from the number of sequences, their sum and the longest"
    return Launches((fields,) * kernels, remark, (work,) * kernels)


#: Further calls that stream their tensors once, without a tag in PyTorch that says so.
_FURTHER_STREAMED = """
    _prelu_kernel _prelu_kernel_backward _weight_norm_interface _weight_norm_interface_backward
    nonzero masked_select masked_scatter scatter_reduce searchsorted bucketize histc bincount unique_consecutive
    index_copy index_fill put im2col col2im grid_sampler_2d grid_sampler_3d affine_grid_generator
    upsample_bicubic2d upsample_linear1d upsample_nearest1d upsample_nearest3d upsample_trilinear3d max_unpool2d
    max_unpool3d fractional_max_pool2d
    reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d replication_pad3d
    multi_margin_loss multilabel_margin_loss_forward rrelu_with_noise poisson exponential uniform normal random
    multinomial triu_indices tril_indices renorm complex dot quantize_per_tensor quantize_per_channel dequantize
    linalg_cross isin adaptive_max_pool2d_backward binary_cross_entropy_backward binary_cross_entropy_with_logits
    elu_backward floor_divide glu glu_backward huber_loss_backward log_sigmoid_backward
    log_sigmoid_forward mish_backward mse_loss_backward pixel_shuffle pixel_unshuffle scatter scatter_add
    smooth_l1_loss_backward softplus_backward polar topk vdot
    """
#: Calls that rename memory.
_VIEWS = ("view_as_complex", "view_as_real")
#: ATen name as it is called, with the underscore of in-place forms -> rule.
FURTHER_RULES: dict[str, Callable[[AtenCall], Launches]] = {
    "_grouped_mm": grouped_mm,
    **dict.fromkeys(("_varlen_attn", "_varlen_attn_backward"), packed_attention),
    "index": picked,
    "index_put": put,
    "index_put_": put,
    "native_group_norm": group_norm,
    "native_group_norm_backward": group_norm_backward,
    **dict.fromkeys((name + end for name in _FURTHER_STREAMED.split() for end in ("", "_")), streamed),
    **dict.fromkeys(("index_add", "index_add_"), added),
    **dict.fromkeys(("sort", "_unique2", "mode", "kthvalue", "median", "nanmedian"), sort),
    "take": picked,
    "_int_mm": mm,
    **dict.fromkeys(_VIEWS, lambda call: Launches()),
}


_PRODUCTS = frozenset(("mm", "mv", "addmm", "bmm", "baddbmm"))
#: Signs in names of calls without a rule -> why they have none.
_REASONS = (
    ("fft|stft", "no operator describes the Fourier transforms of cuFFT"),
    ("linalg|cholesky|svd|(^|_)eig|lu_|triangular|^qr", "no operator describes factorisations of matrices"),
    ("sparse|csr|csc|coo", "no operator describes sparse tensors, whose work depends on their values"),
    ("nested|jagged", "no operator describes nested tensors, whose sizes are values"),
    ("", "no operator describes its kernel"),
)


def outcome(call: AtenCall) -> Launches:
    """Operators that a call launches. Raises NoRuleError: no rule exists for the call."""
    if call.name in FREE:
        return Launches()
    name = call.name if call.name in RULES else call.name.removesuffix("_")
    if name in FREE or not call.results or not any(t.numel() for t in call.results):
        return Launches()
    if name not in RULES:
        raise NoRuleError(next(why for sign, why in _REASONS if re.search(sign, name)))
    if name in _PRODUCTS and not all(t.numel() for t in call.tensors):
        return filled(call)
    return RULES[name](AtenCall(name, call.args, call.kwargs, call.out))


def further_outcome(call: AtenCall, *, one_pass: bool) -> Launches:
    """Operators that a call launches, by the further rules, then by :func:`outcome`.

    ``one_pass``: whether PyTorch tags the call as element-wise or as a reduction: without a rule, it streams its
    tensors once.
    Raises NoRuleError: no rule exists for the call.
    """
    rule = foreach if call.name.startswith("_foreach_") else FURTHER_RULES.get(call.name)
    if rule is not None:
        return rule(call)
    known = {call.name, call.name.removesuffix("_")} & (RULES.keys() | FREE)
    return streamed(call) if one_pass and not known and call.results else outcome(call)
