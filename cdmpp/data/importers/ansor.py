"""Schedules of Ansor (TVM's former auto_scheduler) as TensorIR programs of today's TVM.

A log has the transform steps of a loop state. Ansor's sketches on GPUs are few, so a schedule is rebuilt from the
parameters of its steps: multi-level tiling with cooperative fetches, or loops that are fused, split and bound one
after the other. Needs the extra ``tvm``.
"""

from __future__ import annotations

import hashlib
import json
import math
import runpy
from collections.abc import Callable, Sequence
from os import PathLike
from typing import Any

from cdmpp.errors import DataError, InvalidProgramError
from cdmpp.programs.program import TensorProgram
from cdmpp.utils.files import read_text

#: Ansor's annotations of a loop.
_UNROLL, _VECTORIZE, _VTHREAD, _BLOCK, _THREAD = 1, 2, 4, 5, 6
#: In the order of the levels of a tile.
_TAGS = {_BLOCK: "blockIdx.x", _VTHREAD: "vthread.x", _THREAD: "threadIdx.x"}
_UNROLL_STEP = "auto_unroll_max_step$"
Step = list[Any]
#: Largest file of workload functions.
_MAX_BYTES = 2**20


def ansor_program(workload: str, steps: str | list[Step], *, epilogue: str = "") -> TensorProgram:
    """The scheduled program of a row of an Ansor log; an InvalidProgramError for an unknown workload function, or steps
    of no known sketch.

    ``workload`` is Ansor's key, JSON: name of the workload function and its arguments. ``steps`` are transform steps as
    Ansor writes them, ``["SP", stage, axis, extent, [lengths], 1]`` and so on. ``epilogue`` ("", "add" or "add_relu")
    is fused behind the workload's result; the key does not say it.
    """
    from cdmpp.programs.frontends.tir import import_tvm

    import_tvm()
    from tvm import ir, s_tir, te

    function = workload_tensors(workload, epilogue)
    try:
        parsed = json.loads(steps) if isinstance(steps, str) else steps
        schedule = s_tir.Schedule(te.create_prim_func(function))
        kinds = {step[0] for step in parsed}
        if "CHR" in kinds and ("CHW" in kinds) == bool(epilogue):
            raise ValueError(f"they are of a result {'without' if epilogue else 'with'} an epilogue")
        (_tiled if "CHR" in kinds else _simple)(schedule, parsed)
    except (IndexError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise InvalidProgramError(
            f"the steps of {workload[:80]} cannot be replayed: {str(error).strip().splitlines()[-1][:200]}",
            hint="steps are those of Ansor's GPU sketches: tiled, element-wise, pooling, reduction",
        ) from None
    return TensorProgram.from_tvm_json(ir.save_json(schedule.mod))


# -- workloads ------------------------------------------------------------------------------------------------
def workload_tensors(key: str, epilogue: str) -> list[Any]:
    """Arguments and result of a workload, as tensor expressions; arguments and errors as of :func:`ansor_program`."""
    from tvm import te, topi

    try:
        name, *arguments = json.loads(key)
        make = WORKLOADS[name]
    except (ValueError, TypeError):
        raise InvalidProgramError(
            f"{key[:80]!r} is not a workload key", hint='a key is JSON such as ["matmul_layer", 128, 2048, 1000]'
        ) from None
    except KeyError:
        raise InvalidProgramError(
            f"unknown workload function {name!r}",
            hint=f"known: {', '.join(WORKLOADS)}; register another with cdmpp data import --workloads FILE.py",
        ) from None
    try:
        *inputs, result = make(*arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidProgramError(
            f"the arguments of {key[:80]} are wrong: {str(error).strip().splitlines()[-1][:200]}",
            hint=f"those of {name}: {', '.join(make.__code__.co_varnames[: make.__code__.co_argcount])}",
        ) from None
    if epilogue not in ("", "add", "add_relu"):
        raise InvalidProgramError(f"unknown epilogue {epilogue!r}", hint='allowed: "", "add", "add_relu"')
    if epilogue:
        inputs.append(te.placeholder(result.shape, name="other"))
        result = topi.add(result, inputs[-1])
    if epilogue == "add_relu":
        result = topi.nn.relu(result)
    return [*inputs, result]


def _conv2d(n: int, ci: int, h: int, w: int, co: int, kh: int, kw: int, stride: int, padding: Any) -> list[Any]:
    from tvm import te, topi

    data, kernel = te.placeholder((n, ci, h, w), name="data"), te.placeholder((co, ci, kh, kw), name="kernel")
    return [data, kernel, topi.nn.conv2d_nchw(data, kernel, stride, padding, 1)]


def _depthwise_conv2d(n: int, ci: int, h: int, w: int, kh: int, kw: int, stride: int, padding: Any) -> list[Any]:
    from tvm import te, topi

    data, kernel = te.placeholder((n, ci, h, w), name="data"), te.placeholder((ci, 1, kh, kw), name="kernel")
    return [data, kernel, topi.nn.depthwise_conv2d_nchw(data, kernel, stride, padding, 1)]


def _pool(kind: str, n: int, ci: int, h: int, w: int, kh: int, kw: int, stride: int, padding: Any) -> list[Any]:
    from tvm import te, topi
    from tvm.topi.nn.utils import get_pad_tuple

    data = te.placeholder((n, ci, h, w), name="data")
    sides = get_pad_tuple(padding, (kh, kw))
    result = topi.nn.pool2d(
        data, (kh, kw), (stride, stride), (1, 1), sides, kind, layout="NCHW", count_include_pad=False
    )
    return [data, result]


def _matmul(m: int, k: int, n: int) -> list[Any]:
    from tvm import te

    a, b = te.placeholder((m, k), name="A"), te.placeholder((k, n), name="B")
    over = te.reduce_axis((0, k), name="k")
    return [a, b, te.compute((m, n), lambda i, j: te.sum(a[i, over] * b[over, j], axis=over), name="C")]


def _batch_matmul(batch: int, c: int, m: int, k: int, n: int) -> list[Any]:
    from tvm import te, topi

    a, b = te.placeholder((batch * c, m, k), name="A"), te.placeholder((batch * c, k, n), name="B")
    return [a, b, topi.nn.batch_matmul(a, b, transpose_a=False, transpose_b=False)]


def _reduction(shape: Sequence[int], axis: Any, keep: bool) -> list[Any]:
    from tvm import te, topi

    data = te.placeholder(tuple(shape), name="data")
    return [data, topi.sum(data, axis=axis, keepdims=keep)]


def _relu(*shape: int) -> list[Any]:
    from tvm import te, topi

    data = te.placeholder(shape, name="data")
    return [data, topi.nn.relu(data)]


#: Workload functions by the name in a workload key; each returns its inputs and its result.
WORKLOADS: dict[str, Callable[..., list[Any]]] = {
    "conv2d_layer": _conv2d,
    "depthwise_conv2d_layer": _depthwise_conv2d,
    "pool_layer": _pool,
    "matmul_layer": _matmul,
    "batch_matmul_layer": _batch_matmul,
    "reduction_layer": _reduction,
    "relu_layer": _relu,
}
#: Digest of the file that registered a workload function.
_FILES: dict[str, str] = {}


def register_workloads(path: str | PathLike[str]) -> list[str]:
    """Register the workload functions of a Python file, which is executed; returns their names.

    Functions return their inputs and their result, ``[*inputs, result]``, as tensor expressions. They are known by
    their names, or by the keys of a dictionary ``WORKLOADS`` if the file has one.
    """
    text, name = read_text(path, _MAX_BYTES), "cdmpp_workloads"
    try:
        namespace = runpy.run_path(str(path), run_name=name)
    except Exception as error:  # the user's own code
        raise DataError(f"{path}: {type(error).__name__}: {error}", hint="the file is run as a Python script") from None
    defined = {n: f for n, f in namespace.items() if callable(f) and getattr(f, "__module__", "") == name}
    functions = namespace.get("WORKLOADS", {n: f for n, f in defined.items() if not n.startswith("_")})
    if not functions:
        raise DataError(f"{path} has no function", hint="def dense(m, n, k): ... return [*inputs, result]")
    WORKLOADS.update(functions)
    _FILES.update(dict.fromkeys(functions, hashlib.sha256(text.encode()).hexdigest()))
    return list(functions)


def registered(name: str) -> str | None:
    """Text that changes with a workload function ("" for the project's own), None for an unknown one."""
    return _FILES.get(name, "") if name in WORKLOADS else None


# -- schedules ------------------------------------------------------------------------------------------------
def _blocks(schedule: Any) -> list[Any]:
    """Blocks in the order of the program, which is Ansor's order of the stages that compute."""
    return list(schedule.get_child_blocks(schedule.get_sblock("root")))


def _unroll(schedule: Any, block: Any, steps: list[Step]) -> None:
    limit = next((int(s[3].removeprefix(_UNROLL_STEP)) for s in steps if s[0] == "PR"), 0)
    if limit:
        loop = schedule.get_loops(block)[0]
        schedule.annotate(loop, "pragma_auto_unroll_max_step", limit)
        schedule.annotate(loop, "pragma_unroll_explicit", 1)


def _tiled(schedule: Any, steps: list[Step]) -> None:
    """Multi-level tiling: S0 S1 S2 R0 R1 S3 R2 S4, with copies to shared memory and a result in registers."""
    blocks = _blocks(schedule)
    place = next(i for i, block in enumerate(blocks) if schedule.get(block).init is not None)
    before, main, after = blocks[:place], blocks[place], blocks[place + 1 :]
    stage = next(s for s in steps if s[0] == "RE")[1]
    tiles = [s[4] for s in steps if s[0] == "SP" and s[1] == stage]
    # One FFSP step for each copy to shared memory, in the order of the copied tensors.
    copied = sorted(s[1] for s in steps if s[0] == "FFSP")
    copies = [next(s[4][0] for s in steps if s[0] == "SP" and s[1] == tensor) for tensor in copied]
    for block in after[:-1]:
        schedule.compute_inline(block)
    if after:
        output = after[-1]
        schedule.set_scope(main, 0, "local")
    else:
        output = schedule.cache_write(main, 0, "local")
    loops = schedule.get_loops(main)
    spatial = sum(len(t) == 4 for t in tiles)
    parts = [schedule.split(loop, [None, *lengths]) for loop, lengths in zip(loops, tiles, strict=True)]
    space, reduce = parts[:spatial], parts[spatial:]
    schedule.reorder(
        *(p[level] for level in range(3) for p in space),
        *(p[level] for level in range(2) for p in reduce),
        *(p[3] for p in space),
        *(p[2] for p in reduce),
        *(p[4] for p in space),
    )
    bound = [schedule.fuse(*(p[level] for p in space)) for level in range(3)]
    for loop, tag in zip(bound, _TAGS.values(), strict=True):
        schedule.bind(loop, tag)
    schedule.reverse_compute_at(output, bound[2], preserve_unit_loops=True)
    threads = math.prod(lengths[1] for lengths in tiles[:spatial])
    last = reduce[-1][0]
    for number, vector in zip((0, 1), copies, strict=True):
        copy = schedule.cache_read(main, number, "shared")
        schedule.compute_at(copy, last, preserve_unit_loops=True)
        fused = schedule.fuse(*schedule.get_loops(copy)[3 + len(reduce) :])
        _, thread, lanes = schedule.split(fused, [None, threads, vector])
        schedule.bind(thread, "threadIdx.x")
        schedule.vectorize(lanes)
    for block in before:
        schedule.compute_inline(block)
    _unroll(schedule, main, steps)


def _simple(schedule: Any, steps: list[Step]) -> None:
    """Loops that are fused, split and bound as the steps say; a stage is computed in its consumer where CI says so."""
    blocks = _blocks(schedule)
    inputs = len(schedule.mod["main"].params) - 1
    stages = dict(enumerate(blocks, inputs))
    loops = {number: list(schedule.get_loops(block)) for number, block in stages.items()}
    for kind, stage, *rest in steps:
        if kind == "CI":
            schedule.compute_inline(stages[stage])
        elif kind == "FU":
            axes = rest[0]
            fused = schedule.fuse(*(loops[stage][i] for i in axes)) if len(axes) > 1 else loops[stage][axes[0]]
            loops[stage][axes[0] : axes[-1] + 1] = [fused]
        elif kind == "SP":
            axis, _, lengths = rest[:3]
            loops[stage][axis : axis + 1] = schedule.split(loops[stage][axis], [None, *lengths])
        elif kind == "AN":
            axis, annotation = rest
            if annotation == _VECTORIZE:
                schedule.vectorize(loops[stage][axis])
            elif annotation == _UNROLL:
                schedule.unroll(loops[stage][axis])
            else:
                schedule.bind(loops[stage][axis], _TAGS[annotation])
        elif kind == "RE":
            loops[stage] = [loops[stage][i] for i in rest[0]]
            schedule.reorder(*loops[stage])
        elif kind == "PR":
            _unroll(schedule, stages[stage], [[kind, stage, *rest]])
        else:
            raise ValueError(f"step {kind} is of no known sketch")
