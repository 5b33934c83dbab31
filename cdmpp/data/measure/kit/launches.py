"""CUDA source and kernel launches of a scheduled PrimFunc, from TVM's own lowering; runs in worker processes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from cdmpp.data.measure.building import argument_list
from cdmpp.data.measure.cuda import compile_source
from cdmpp.data.measure.imports import import_tvm_alone
from cdmpp.data.measure.timing import index_bound
from cdmpp.errors import MeasurementError

#: The pass after which the host function has the kernel launches, and its parameters are still buffers.
_SPLIT = "tirx.SplitHostDevice"
_DYNAMIC_SHARED = "tirx.use_dyn_shared_memory"
_AXES = {f"{kind}Idx.{axis}": (kind, i) for kind in ("block", "thread") for i, axis in enumerate("xyz")}


def launches(tvm_json: str, target: Mapping[str, Any], cubin: bool = False) -> dict[str, Any]:
    """Lower a scheduled PrimFunc and return its CUDA source and launches.

    Parameters
    ----------
    tvm_json : str
        The PrimFunc, with its loops bound to threads.
    target : mapping
        CUDA target, as JSON.
    cubin : bool
        Compile the source with nvcc.

    Returns
    -------
    dict
        ``code`` (bytes of the source, or machine code); ``kernels`` in launch order, each with ``name``, ``grid``,
        ``block``, ``shared`` (bytes of dynamic shared memory) and ``arguments`` (["argument", i], ["workspace", i] or
        [type, value]); ``workspaces`` (bytes); ``arguments`` (shape, type, written) and ``bound`` (integer inputs are
        below it).

    Raises
    ------
    MeasurementError
        The shapes are dynamic, nvcc refuses the source, or the host function does more than allocate workspaces and
        launch kernels.
    """
    tvm = import_tvm_alone()
    # If TVM finds a GPU, it compiles the source itself.
    os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")
    function = tvm.ir.load_json(tvm_json)
    arguments = argument_list(function)
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    split: list[Any] = []

    @tvm.instrument.pass_instrument
    class Capture:
        def run_after_pass(self, after: Any, info: Any) -> None:
            if info.name == _SPLIT:
                split.append(after)

    cuda = tvm.target.Target(dict(target))
    with tvm.transform.PassContext(instruments=[Capture()]):
        built = tvm.compile(module, cuda).mod
    if len(split) != 1 or len(built.imports) != 1:
        raise MeasurementError(
            "this version of TVM lowers CUDA programs in an unknown way", hint="install the pinned apache-tvm"
        )
    kernels, workspaces = _host(split[0]["main"])
    source = str(built.imports[0].inspect_source())
    return {
        "code": compile_source(source, cuda) if cubin else source.encode(),
        "kernels": kernels,
        "workspaces": workspaces,
        "arguments": [[list(shape), dtype, written] for shape, dtype, written in arguments],
        "bound": index_bound(arguments),
    }


def _host(function: Any) -> tuple[list[dict[str, Any]], list[int]]:
    """Return kernels and workspaces of a host function."""
    from tvm import tirx

    memory: list[tuple[Any, list[Any]]] = [(p, ["argument", i]) for i, p in enumerate(function.params)]
    kernels: list[dict[str, Any]] = []
    workspaces: list[int] = []

    def where(buffer: Any) -> list[Any]:
        return next(place for known, place in memory if buffer.same_as(known))

    body = function.body
    for statement in body.seq if isinstance(body, tirx.SeqStmt) else [body]:
        if isinstance(statement, tirx.AllocBuffer):
            memory.append((statement.buffer, ["workspace", len(workspaces)]))
            workspaces.append(_bytes(statement.buffer))
        elif isinstance(statement, tirx.DeclBuffer):
            memory.append((statement.buffer, where(statement.data.args[0])))
        elif isinstance(statement, tirx.Evaluate) and statement.value.op.name == "tirx.call_ffi_kernel":
            kernels.append(_kernel(statement.value, where))
        else:
            raise MeasurementError(
                f"the host function has a {type(statement).__name__}, not only kernel launches",
                hint="measure this program with TVM's runtime: omit --standalone",
            )
    return kernels, workspaces


def _kernel(call: Any, where: Any) -> dict[str, Any]:
    names = [str(name) for name in call.attrs.launch_params]
    name, *rest = call.args
    passed, sizes = rest[: len(rest) - len(names)], rest[len(rest) - len(names) :]
    extents = {"block": [1, 1, 1], "thread": [1, 1, 1]}
    shared = 0
    for launch_parameter, size in zip(names, sizes, strict=True):
        if launch_parameter == _DYNAMIC_SHARED:
            shared = int(size)
        else:
            kind, axis = _AXES[launch_parameter]
            extents[kind][axis] = int(size)
    return {
        "name": str(name.value),
        "grid": extents["block"],
        "block": extents["thread"],
        "shared": shared,
        "arguments": [_argument(value, where) for value in passed],
    }


def _argument(value: Any, where: Any) -> list[Any]:
    from tvm import tirx

    if isinstance(value, tirx.IntImm | tirx.FloatImm):
        return [str(value.ty), value.value]
    if value.op.name == "tirx.buffer_data":
        return list(where(value.args[0]))
    raise MeasurementError(
        f"a kernel has the argument {value}, which is neither memory nor a constant",
        hint="measure this program with TVM's runtime: omit --standalone",
    )


def _bytes(buffer: Any) -> int:
    from cdmpp.data.measure.kit.runtime.programs import size_of

    return size_of([int(extent) for extent in buffer.ty.shape], str(buffer.ty.dtype).removeprefix("T."))


def work(tvm_json: str) -> dict[str, float]:
    """Return operations and necessary input bytes of an unscheduled PrimFunc, for physical limits of its time.

    ``read_bytes`` counts each input once, and not more elements than the program loads. A program with an integer
    input may read a part of the others, so it counts none.
    """
    tvm = import_tvm_alone()
    from tvm.s_tir import analysis

    function = tvm.ir.load_json(tvm_json)
    module = tvm.IRModule({"main": function.with_attr("global_symbol", "main")})
    arguments = argument_list(function)
    read = 0.0
    if all(dtype.startswith(("float", "bfloat")) for _, dtype, _ in arguments):
        loads = _loads(function)
        for count, (shape, dtype, written) in zip(loads, arguments, strict=True):
            if not written:
                size = _size(shape, dtype)
                elements = max(1, _size(shape, "int8"))
                read += size * min(1.0, count / elements)
    return {"flops": float(analysis.estimate_tir_flops(module)), "read_bytes": read}


def _size(shape: Any, dtype: str) -> int:
    from cdmpp.data.measure.kit.runtime.programs import size_of

    return size_of(list(shape), dtype)


def _loads(function: Any) -> list[int]:
    """Return the number of loads of each parameter: loads in a block, times its iterations."""
    import tvm_ffi
    from tvm.ir import TensorLoad
    from tvm.s_tir import SBlock

    counts = [0] * len(function.params)

    def block(node: Any) -> None:
        if not isinstance(node, SBlock) or node.name_hint == "root":
            return
        iterations = 1
        for axis in node.iter_vars:
            iterations *= int(axis.dom.extent)

        def load(inner: Any) -> None:
            if isinstance(inner, TensorLoad):
                for i, parameter in enumerate(function.params):
                    if inner.source.same_as(parameter):
                        counts[i] += iterations

        tvm_ffi.structural_walk(node.body, (tvm_ffi.Object, load), order="pre")

    tvm_ffi.structural_walk(function.body, (tvm_ffi.Object, block), order="pre")
    return counts
