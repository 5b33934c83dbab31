"""Columns of a leaf in a GPU program: what its threads, warps and block ask for, from launches.

They depend on the program alone; program and device meet in :mod:`cdmpp.model.nn.launch_inputs`. A program without
thread bindings has zeros in every column. Counts are those of :mod:`cdmpp.features.launch`: a warp's requests are
evaluated lane by lane, and buffers have the sizes that a thread or a block holds.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from cdmpp.features.ast import OPERATIONS, CompactAST
from cdmpp.features.launch import Kernel, WarpRequest, kernels_of
from cdmpp.features.launch_schema import GPU_FLAGS, GPU_WIDTH, SECTOR_BYTES, WARP
from cdmpp.features.leaf import element_bytes
from cdmpp.features.statements import BLOCKS, THREADS, Recorder, Statement
from cdmpp.features.walk import broken_nodes, build_ast
from cdmpp.programs.tvm_json import Nodes

Array = np.ndarray[Any, np.dtype[np.float32]]

#: Points at which a statement's addresses are evaluated.
POINTS = 32
_COUNT = {name: i for i, name in enumerate(OPERATIONS)}
_FLOATS = [_COUNT[f"float_{name}"] for name in ("add", "mul", "compare")]
_INTEGERS = [_COUNT[name] for name in ("int_add", "int_mul", "int_compare", "int_other", "select")]
_SLOW = [_COUNT[name] for name in ("float_div", "float_math", "float_cast", "int_div", "other_call")]
_BOUND = frozenset((*THREADS, *BLOCKS))


def recorded_ast(nodes: Nodes, root: int, function: str | None = None) -> CompactAST:
    """The compact AST; that of a program with thread bindings has the columns of its launches.

    Arguments and errors as of :func:`cdmpp.features.walk.build_ast`.
    """
    if not any(type(data := node.get("data")) is str and data in _BOUND for node in nodes.values()):
        return build_ast(nodes, root, function=function)
    recorder = Recorder(nodes, {})
    ast = recorder.build(root, function)
    with broken_nodes():
        ast.launches = launch_columns(recorder)
    return ast


def launch_columns(recorder: Recorder, points: int = POINTS) -> Array:
    """Columns of the leaves of a program.

    ``recorder``: after its walk.
    ``points``: as in :func:`cdmpp.features.launch.launch_summary`.
    Returns float32, (leaves, GPU_WIDTH): magnitudes as log2(1 + x), shares as they are; columns named by
    :data:`cdmpp.features.launch_schema.GPU_COLUMNS`.
    """
    out = np.zeros((len(recorder.ast.leaves), GPU_WIDTH))
    row = {id(leaf): i for i, leaf in enumerate(recorder.ast.leaves)}
    for number, kernel in enumerate(kernels_of(recorder)):
        launch = *kernel.held_bytes(), kernel.async_stages()
        for statement in kernel.statements:
            out[row[id(statement.leaf)]] = [number, *_columns(kernel, statement, launch, points)]
    magnitudes = GPU_WIDTH - len(GPU_FLAGS)
    out[:, :magnitudes] = np.log2(1 + np.maximum(out[:, :magnitudes], 0))
    return out.astype(np.float32)


def _columns(kernel: Kernel, statement: Statement, launch: tuple[int, int, int], points: int) -> list[float]:
    """Columns behind the kernel's number; ``launch`` is local words, shared bytes and asynchronous stages."""
    loops, leaf = kernel.loops, statement.leaf
    thread_loops = kernel.own(statement)
    limit = max((loops[p].unroll_step for p in statement.path), default=0)
    unrolled = _unrolled(kernel, thread_loops, limit)
    trips, active, requests = kernel.requests(statement, points)
    done = trips * active
    floats, integers, slow = (sum(leaf.counts[i] for i in group) for group in (_FLOATS, _INTEGERS, _SLOW))
    # A multiplication and an addition are one instruction.
    floats -= min(leaf.counts[_COUNT["float_fma"]], floats)
    floats *= not statement.tensor_ops

    def of(scope: str, read: bool) -> tuple[float, float]:
        """Instructions of a thread, sectors or cycles of a warp."""
        chosen = [r for r in requests if r.scope == scope and r.read is read]
        return sum(r.instructions for r in chosen), sum(r.transactions for r in chosen)

    outputs = math.prod(float(loops[p].extent) for p in thread_loops if p not in leaf.reduce_loops)
    written = outputs * active * kernel.threads * kernel.blocks
    buffer = leaf.store.buffer
    size = float(math.prod(int(s) for s in buffer.shape))
    reduces = bool(leaf.reduce_loops.intersection(thread_loops)) and not leaf.is_init
    widths = [max((r.bytes for r in requests if r.scope == s), default=0.0) for s in ("global", "shared")]
    return [
        float(kernel.blocks),
        float(kernel.threads),
        float(kernel.vthreads),
        float(launch[0]),
        float(launch[1]),
        float(limit),
        float(launch[2]),
        float(trips),
        floats * done,
        integers * done,
        slow * done,
        statement.tensor_ops * done,
        float(sum(r.instructions * r.terms for r in requests)),
        _loop_steps(kernel, thread_loops, unrolled),
        *of("global", True),
        sum(r.instructions * r.bytes for r in requests if r.scope == "global" and r.read),
        *of("global", False),
        *of("shared", True),
        *of("shared", False),
        _barriers(kernel, statement),
        _spilled(kernel, statement, thread_loops, unrolled),
        float(kernel.words(buffer)) if reduces and buffer.scope == "local" else 0.0,
        math.prod(float(loops[p].extent) for p in unrolled),
        *widths,
        _footprint(statement, requests, kernel),
        active,
        kernel.threads / (WARP * math.ceil(kernel.threads / WARP)),
        float(reduces),
        min(size / written, 1.0) if buffer.is_parameter and written else 1.0,
    ]


def _unrolled(kernel: Kernel, path: Sequence[int], limit: int) -> set[int]:
    """Loops of a statement that are straight code: marked ones, and inner ones up to the limit of TVM's unrolling."""
    loops = kernel.loops
    chosen = {p for p in path if loops[p].kind in ("unrolled", "vectorized") or loops[p].kind.startswith("vthread")}
    size = 1.0
    for p in reversed(path):
        size *= float(loops[p].extent)
        if size > limit:
            break
        chosen.add(p)
    return chosen


def _loop_steps(kernel: Kernel, loops: Sequence[int], unrolled: set[int]) -> float:
    """Iterations of loops that are not unrolled."""
    total, outside = 0.0, 1.0
    for p in loops:
        if p not in unrolled and kernel.loops[p].extent != 1:
            outside *= float(kernel.loops[p].extent)
            total += outside
    return total


def _footprint(statement: Statement, requests: Sequence[WarpRequest], kernel: Kernel) -> float:
    """Bytes of the global buffers that a statement reads, at most what all its warps request."""
    buffers = {id(a.buffer): a.buffer for a, _, reads in statement.accesses() if reads and a.buffer.scope == "global"}
    whole = sum(math.prod(float(n) for n in b.shape) * element_bytes(b.dtype) for b in buffers.values())
    sectors = sum(r.transactions for r in requests if r.scope == "global" and r.read)
    return min(whole, sectors * SECTOR_BYTES * math.ceil(kernel.threads / WARP) * kernel.blocks)


def _barriers(kernel: Kernel, statement: Statement) -> float:
    """How often a block waits between filling a shared buffer and reading it."""
    buffer = statement.leaf.store.buffer
    if buffer.scope != "shared":
        return 0.0
    readers = [s for s in kernel.statements if any(a.buffer is buffer for a, _, reads in s.accesses() if reads)]
    common = set(kernel.own(statement)).intersection(*(s.path for s in readers)) if readers else set()
    return float(math.prod(float(kernel.loops[p].extent) for p in common))


def _spilled(kernel: Kernel, statement: Statement, path: Sequence[int], unrolled: set[int]) -> float:
    """Local words whose index a loop moves that is not unrolled: a compiler must unroll it, or keep them in memory."""
    largest = 0.0
    rolled = [p for p in path if p not in unrolled]
    for access, _, _ in statement.accesses():
        if access.buffer.scope == "local":
            moved = {p for index in access.indices for p in index.steps}
            count = math.prod(float(kernel.loops[p].extent) for p in rolled if p in moved)
            largest = max(largest, count if count > 1 else 0.0)
    return largest
