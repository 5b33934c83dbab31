"""The tasks of the benchmark: six programs of shapes that no model was trained on, unscheduled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import te, tirx, topi

from cdmpp.data.load import load_table
from cdmpp.errors import DataError
from cdmpp.programs.frontends.tir import programs_from_tir


@dataclass(frozen=True)
class TuningTask:
    """One unscheduled PrimFunc.

    Attributes
    ----------
    name : str
    hash : str
        Structural hash.
    function : tvm.tirx.PrimFunc
    """

    name: str
    hash: str
    function: Any


def matmul(m: int, n: int, k: int) -> list[Any]:
    """relu(A B + c)."""
    a, b, c = (te.placeholder(s, name=t) for s, t in (((m, k), "A"), ((k, n), "B"), ((n,), "C")))
    return [a, b, c, topi.nn.relu(topi.add(topi.matmul(a, b), c))]


def conv2d(channels: int, size: int, out: int, kernel: int, stride: int) -> list[Any]:
    """relu of a padded convolution with bias."""
    data = te.placeholder((1, channels, size, size), name="data")
    weight = te.placeholder((out, channels, kernel, kernel), name="weight")
    bias = te.placeholder((1, out, 1, 1), name="bias")
    return [data, weight, bias, topi.nn.relu(topi.add(topi.nn.conv2d_nchw(data, weight, stride, kernel // 2, 1), bias))]


def depthwise(channels: int, size: int, kernel: int, stride: int) -> list[Any]:
    """relu of a padded depthwise convolution with bias."""
    data = te.placeholder((1, channels, size, size), name="data")
    weight = te.placeholder((channels, 1, kernel, kernel), name="weight")
    bias = te.placeholder((1, channels, 1, 1), name="bias")
    output = topi.nn.depthwise_conv2d_nchw(data, weight, stride, kernel // 2, 1)
    return [data, weight, bias, topi.nn.relu(topi.add(output, bias))]


def softmax(rows: int, columns: int) -> list[Any]:
    """softmax over the last axis."""
    a = te.placeholder((rows, columns), name="A")
    return [a, topi.nn.softmax(a, axis=-1)]


def layernorm(rows: int, columns: int) -> list[Any]:
    """Layer norm over the last axis."""
    a = te.placeholder((rows, columns), name="A")
    gamma, beta = (te.placeholder((columns,), name=t) for t in ("gamma", "beta"))
    return [a, gamma, beta, topi.nn.layer_norm(a, gamma, beta, [1], 1e-5)]


def attention(heads: int, length: int, width: int) -> list[Any]:
    """softmax(Q K^T / sqrt(width)) V in one program; K is given transposed."""
    q = te.placeholder((heads, length, width), name="Q")
    k = te.placeholder((heads, width, length), name="K")
    v = te.placeholder((heads, length, width), name="V")
    scores = topi.multiply(_bmm(q, k, "scores"), tirx.const(width**-0.5, "float32"))
    return [q, k, v, _bmm(topi.nn.softmax(scores, axis=-1), v, "mixed")]


def _bmm(a: Any, b: Any, name: str) -> Any:
    heads, rows, inner = a.shape
    step = te.reduce_axis((0, inner), name="k")
    return te.compute(
        (heads, rows, b.shape[2]), lambda h, i, j: te.sum(a[h, i, step] * b[h, step, j], axis=step), name=name
    )


#: Untuned, each takes some milliseconds on one core.
TASKS: dict[str, Callable[[], list[Any]]] = {
    "matmul": lambda: matmul(136, 232, 176),
    "conv2d": lambda: conv2d(22, 26, 44, 3, 1),
    "depthwise conv": lambda: depthwise(84, 52, 3, 1),
    "softmax": lambda: softmax(328, 456),
    "layernorm": lambda: layernorm(312, 712),
    "attention": lambda: attention(5, 88, 44),
}
#: Tasks on which the online correction was chosen; others than those of the benchmark.
DEVELOPMENT: dict[str, Callable[[], list[Any]]] = {
    "matmul, development": lambda: matmul(104, 312, 200),
    "conv2d, development": lambda: conv2d(18, 30, 36, 3, 1),
    "softmax, development": lambda: softmax(264, 584),
    "attention, development": lambda: attention(3, 104, 52),
}


def make_task(name: str) -> TuningTask:
    """A task by name, of the benchmark or of its development."""
    arguments = (TASKS | DEVELOPMENT)[name]()
    function = te.create_prim_func(arguments).with_attr("global_symbol", "main")
    (program,) = programs_from_tir(function)
    return TuningTask(name, program.hash, function)


def check_unseen(tasks: Sequence[TuningTask], records: str) -> None:
    """Make sure that no task's program is in the records that the model was trained on.

    Raises
    ------
    DataError
        One is: it would be a test of what was learned by heart.
    """
    table = load_table(records)
    known = {*table.tvm.hashes, *table.tvm.tasks}
    seen = [task.name for task in tasks if task.hash in known]
    if seen:
        raise DataError(f"{records} has programs of {', '.join(seen)}", hint="choose other shapes")
