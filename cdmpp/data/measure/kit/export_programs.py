"""Export of scheduled CUDA programs as parts: sources and launches travel, TIR stays in ``home/``.

Sources and launches are from TVM's own lowering, in worker processes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from hashlib import sha256
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any

from cdmpp.data.measure.building import argument_list, compile_source, import_tvm_alone, require_nvcc
from cdmpp.data.measure.collect import Collector, check_flushing
from cdmpp.data.measure.kit.parts import HOME, Entry, write_parts
from cdmpp.data.measure.pools import WorkerPool
from cdmpp.data.measure.runtime.programs import size_of
from cdmpp.data.measure.settings import CollectSettings, ProgressListener
from cdmpp.data.measure.store import Store
from cdmpp.data.measure.targets import Configuration, describe
from cdmpp.data.measure.timing import index_bound
from cdmpp.errors import DataError, InvalidDeviceError, MeasurementError

#: The pass after which the host function has the kernel launches, and its parameters are still buffers.
_SPLIT = "tirx.SplitHostDevice"
_DYNAMIC_SHARED = "tirx.use_dyn_shared_memory"
_AXES = {f"{kind}Idx.{axis}": (kind, i) for kind in ("block", "thread") for i, axis in enumerate("xyz")}
KIND = "programs"
_REENABLED = ("OPERATORS", "CONVERSIONS")
#: Flags with which TVM 0.27 calls nvcc (tvm.support.nvcc), without the architecture.
NVCC_FLAGS = (
    *("--cubin", "-O3"),
    *(f"-U__CUDA_NO_{kind}_{what}__" for kind in ("HALF", "BFLOAT16", "BFLOAT162") for what in _REENABLED),
    *("--expt-relaxed-constexpr", "--expt-extended-lambda", "--use_fast_math"),
    "--ptxas-options=-v,--register-usage-level=10,--warn-on-local-memory-usage",
)


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
            shape = [int(extent) for extent in statement.buffer.ty.shape]
            workspaces.append(size_of(shape, str(statement.buffer.ty.dtype).removeprefix("T.")))
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
                read += size_of(shape, dtype) * min(1.0, count / max(1, prod(shape)))
    return {"flops": float(analysis.estimate_tir_flops(module)), "read_bytes": read}


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


def nvcc_flags(arch: str) -> list[str]:
    """Return the flags of nvcc for an architecture such as "sm_90"."""
    suffix = arch.removeprefix("sm_")
    return [*NVCC_FLAGS[:2], "-gencode", f"arch=compute_{suffix},code=sm_{suffix}", *NVCC_FLAGS[2:]]


def export_programs(
    sources: Sequence[str],
    configuration: Configuration,
    out: str | Path,
    settings: CollectSettings | None = None,
    *,
    part_mib: float = 20.0,
    tasks: int = 0,
    cubins: bool = False,
    progress: ProgressListener | None = None,
    dims: Mapping[str, int] | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Lower, sample and export programs; a repeated call resumes the lowering of networks and the sampling.

    Parameters
    ----------
    sources, settings, progress, dims
        As for :func:`cdmpp.data.measure.collect.collect`.
    configuration : Configuration
        Of a CUDA target.
    out : path
        Job folder. It is complete once it has ``home/job.json``, which is written last.
    part_mib : float
        Largest size of a part file in MiB.
    tasks : int
        Largest number of tasks, taken from the networks in turn; 0: all.
    cubins : bool
        Compile here, with nvcc, so that the GPU machine needs no compiler.
    command : str
        Command that reproduces the job, for the card.

    Returns
    -------
    dict
        Content of ``home/job.json``.

    Raises
    ------
    InvalidDeviceError
        The target is not CUDA.
    MeasurementError
        The settings request a search, which needs measurements.
    MissingDependencyError
        ``cubins``, and nvcc is not installed.
    DataError
        No program can be exported, a task exceeds the size of a part, or the settings request a flush of a CPU's
        caches.
    CdmppError
        See :meth:`cdmpp.data.measure.collect.Collector.prepare`.
    """
    settings = settings or CollectSettings()
    if configuration.kind != "cuda":
        raise InvalidDeviceError(
            f"--standalone is for CUDA, not for {configuration.kind}", hint="use --target cuda:DEVICE"
        )
    if settings.tune:
        raise MeasurementError("a search for good schedules needs measurements", hint="omit --tune with --build-only")
    check_flushing(settings, [configuration])
    if cubins:
        require_nvcc()
    folder = Path(out)
    with Store(folder / HOME) as store:
        exporter = _Exporter(store, settings, configuration, tasks, progress)
        exporter.prepare(sources, dims)
        entries, failures = exporter.entries(cubins)
        if not entries:
            raise DataError(
                f"no program can be exported: {next(iter(failures.values()), 'there are none')}",
                hint="name other networks or another target",
            )
        job = write_parts(
            folder,
            {KIND: entries},
            device=configuration.name,
            part_mib=part_mib,
            about={KIND: exporter.about(failures, command)},
            settings={KIND: exporter.part_settings()},
        )
    return job


class _Exporter(Collector):
    """A collector that returns entries of parts and times nothing."""

    def __init__(
        self,
        store: Store,
        settings: CollectSettings,
        configuration: Configuration,
        tasks: int,
        progress: ProgressListener | None,
    ) -> None:
        super().__init__(store, settings, (configuration,), progress=progress)
        self._configuration, self._tasks = configuration, tasks

    def _chosen(self, tasks: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
        wanted = choose_tasks(self.store.tasks_by_network(), self._tasks)
        return [task for task in tasks if task[0] in wanted]

    def entries(self, cubins: bool) -> tuple[list[Entry], dict[str, str]]:
        """Return an entry for each program that can be lowered, and the reasons of the others by hash."""
        wanted = choose_tasks(self.store.tasks_by_network(), self._tasks)
        programs = [p for p in self.store.all_programs() if p.task in wanted]
        tasks = list(dict.fromkeys(p.task for p in programs))
        target = dict(self._configuration.target)
        limits = self.settings.worker(self.settings.build_limit_s)
        self._phase("lowering to CUDA", 0, len(programs))
        entries: list[Entry] = []
        failures: dict[str, str] = {}
        with WorkerPool(self._builders(), limits, import_tvm_alone) as pool:
            works = pool.run(work, [(self.store.task_program(task),) for task in tasks])
            counts = {task: outcome.value or {} for task, outcome in zip(tasks, works, strict=True)}
            outcomes = pool.run(launches, [(program.tvm_json, target, cubins) for program in programs])
            for program, outcome in zip(programs, outcomes, strict=True):
                if outcome.failure:
                    failures[program.hash] = outcome.failure
                else:
                    lowered = dict(outcome.value)
                    code = lowered.pop("code")
                    member = f"code/{sha256(code).hexdigest()[:16]}.{'cubin' if cubins else 'cu'}"
                    item = {"id": program.hash, "task": program.task, "origin": program.origin}
                    item |= {"cubin" if cubins else "source": member, **lowered, **counts[program.task]}
                    entries.append(Entry(item, {member: code}, group=program.task))
                self._step(not outcome.failure)
        return entries, failures

    def about(self, failures: Mapping[str, str], command: str) -> dict[str, Any]:
        """Return what the import of the results needs."""
        from importlib.metadata import version

        return {
            **describe(self._configuration),
            "names": list(self._configuration.names),
            "tvm": version("apache-tvm"),
            "seed": self.settings.seed,
            "command": command,
            "failures": dict(failures),
        }

    def part_settings(self) -> dict[str, Any]:
        """Return what compiling needs on the GPU machine."""
        arch = str(self._configuration.target["arch"])
        return {"arch": arch, "nvcc_flags": nvcc_flags(arch)}


def choose_tasks(networks: Mapping[str, Sequence[str]], count: int) -> set[str]:
    """Return at most ``count`` tasks, one of each network in turn, each network's in the order of their hashes.

    ``count`` = 0 means all tasks.
    """
    ordered = [sorted(tasks) for tasks in networks.values()]
    in_turn = [task for turn in zip_longest(*ordered) for task in turn if task is not None]
    chosen = list(dict.fromkeys(in_turn))
    return set(chosen[:count] if count else chosen)
