"""Export of scheduled CUDA programs as parts: machine code and launches travel, TIR stays in ``home/``.

Sources and launches are from TVM's own lowering, in worker processes, where nvcc compiles the sources too. A program
that needs too long for that, because its loops are unrolled to the end, is left out.
"""

from __future__ import annotations

import os
import random
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib.metadata import version
from math import prod
from pathlib import Path
from typing import Any

from cdmpp.data.measure.building import argument_list, compile_source, import_tvm_alone, main_module, require_nvcc
from cdmpp.data.measure.collect import Collector, check_settings
from cdmpp.data.measure.kit.content import BlockChooser, ansor_task, best_of_ansor, choose_tasks, is_gpu_size
from cdmpp.data.measure.kit.parts import HOME, Entry, Limits, write_parts
from cdmpp.data.measure.pools import Outcome
from cdmpp.data.measure.runtime.programs import size_of
from cdmpp.data.measure.runtime.run import HOST
from cdmpp.data.measure.runtime.run import PROGRAMS as KIND
from cdmpp.data.measure.settings import CollectSettings, ProgressListener
from cdmpp.data.measure.store import Store, StoredProgram
from cdmpp.data.measure.targets import Configuration, describe
from cdmpp.data.measure.timing import index_bound
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError, InvalidDeviceError, MeasurementError
from cdmpp.programs.frontends.tasks import TaskList

#: The pass after which the host function has the kernel launches, and its parameters are still buffers.
_SPLIT = "tirx.SplitHostDevice"
_DYNAMIC_SHARED = "tirx.use_dyn_shared_memory"
_AXES = {f"{kind}Idx.{axis}": (kind, i) for kind in ("block", "thread") for i, axis in enumerate("xyz")}
#: Limits of a program: bytes of its CUDA source, and CPU seconds of each step of nvcc. Compiling takes half a second.
_MAX_SOURCE_BYTES, _COMPILE_CPU_S = 2**18, 15
#: Schedules of Ansor for each of its workloads.
_ANSOR_SCHEDULES = 2
#: An estimate of a program's seconds on the GPU: fixed, and runs at these shares of the peak rates.
_FIXED_S, _RUNS, _FLOPS_SHARE, _BANDWIDTH_SHARE = 0.06, 12, 0.05, 0.3


def launches(tvm_json: str, target: Mapping[str, Any]) -> dict[str, Any]:
    """Lower and compile a scheduled PrimFunc, with its loops bound to threads; return its machine code and launches.

    ``code`` (bytes); ``kernels`` in launch order, each with ``name``, ``grid``, ``block``, ``shared`` (bytes of dynamic
    shared memory) and ``arguments`` (["argument", i], ["workspace", i] or [type, value]); ``workspaces`` (bytes);
    ``arguments`` (shape, type, written) and ``bound`` (integer inputs are below it).

    A MeasurementError: the shapes are dynamic, nvcc refuses the source or takes too long, or the host function does
    more than allocate workspaces and launch kernels.
    """
    tvm = import_tvm_alone()
    # If TVM finds a GPU, it compiles the source itself.
    os.environ.setdefault("TVM_CUDA_COMPILE_MODE", "nvcc")
    module = main_module(tvm_json)
    arguments = argument_list(module["main"])
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
    if len(source) > _MAX_SOURCE_BYTES:
        raise MeasurementError(f"{len(source):,} bytes of source", hint=f"at most {_MAX_SOURCE_BYTES:,} are compiled")
    return {
        "code": compile_source(source, str(target["arch"]), cpu_s=_COMPILE_CPU_S),
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
        return next(reference for known, reference in memory if buffer.same_as(known))

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
    """Return ``flops``, ``bytes`` of arguments, ``read_bytes`` and largest ``outputs`` of an unscheduled PrimFunc.

    ``read_bytes`` counts each input once, and not more elements than the program loads. A program with an integer
    input may read a part of the others, so it counts none. It is for physical limits of the time.
    """
    import_tvm_alone()
    from tvm.s_tir import analysis

    module = main_module(tvm_json)
    function = module["main"]
    arguments = argument_list(function)
    read = 0.0
    if all(dtype.startswith(("float", "bfloat")) for _, dtype, _ in arguments):
        loads = _loads(function)
        for count, (shape, dtype, written) in zip(loads, arguments, strict=True):
            if not written:
                read += size_of(shape, dtype) * min(1.0, count / max(1, prod(shape)))
    return {
        "flops": float(analysis.estimate_tir_flops(module)),
        "bytes": float(sum(size_of(shape, dtype) for shape, dtype, _ in arguments)),
        "read_bytes": read,
        "outputs": float(max(prod(shape) for shape, _, written in arguments if written)),
    }


def _loads(function: Any) -> list[int]:
    """Return the number of loads of each parameter: loads in a block, times its iterations."""
    import tvm_ffi
    from tvm.ir import TensorLoad
    from tvm.s_tir import SBlock

    counts = [0] * len(function.params)

    def block(node: Any) -> None:
        if not isinstance(node, SBlock) or node.name_hint == "root":
            return
        iterations = prod(int(axis.dom.extent) for axis in node.iter_vars)

        def load(inner: Any) -> None:
            if isinstance(inner, TensorLoad):
                for i, parameter in enumerate(function.params):
                    if inner.source.same_as(parameter):
                        counts[i] += iterations

        tvm_ffi.structural_walk(node.body, (tvm_ffi.Object, load), order="pre")

    tvm_ffi.structural_walk(function.body, (tvm_ffi.Object, block), order="pre")
    return counts


def export_programs(
    sources: Sequence[str],
    configuration: Configuration,
    out: str | Path,
    settings: CollectSettings | None = None,
    *,
    limits: Limits | None = None,
    tasks: int = 0,
    ansor: Path | None = None,
    progress: ProgressListener | None = None,
    dims: Mapping[str, int] | None = None,
    command: str = "",
) -> dict[str, Any]:
    """Lower, sample, build and export programs of GPU size; a repeated call resumes. Returns the content of
    ``home/job.json``, which is written last: with it the folder is complete.

    ``sources``, ``settings``, ``progress`` and ``dims`` are those of :func:`cdmpp.data.measure.collect.collect`,
    ``limits`` those of the GPU machine. At most ``tasks`` tasks are taken from the networks in turn; 0: all of GPU
    size. ``ansor`` is a table of Ansor's search logs, whose tasks and fastest schedules are added
    (:func:`cdmpp.data.measure.kit.content.best_of_ansor`). ``command`` reproduces the job, for the card.
    """
    from cdmpp.data.measure.runtime.host import items as host_items

    settings = settings or CollectSettings()
    if configuration.kind != "cuda":
        raise InvalidDeviceError(
            f"--standalone is for CUDA, not for {configuration.kind}", hint="use --target cuda:DEVICE"
        )
    check_settings(settings, [configuration], measures=False)
    require_nvcc()
    folder = Path(out)
    with Store(folder / HOME) as store:
        exporter = _Exporter(store, settings, configuration, tasks, ansor, progress)
        exporter.prepare(sources, dims)
        entries, failures = exporter.entries()
        if not entries:
            raise DataError(
                f"no program can be exported: {next(iter(failures.values()), 'no task has GPU size')}",
                hint="name other networks or another target",
            )
        facts = {
            **describe(configuration),
            "tvm": version("apache-tvm"),
            "seed": settings.seed,
            "tasks": len(exporter.wanted),
            "command": command,
            "failures": failures,
        }
        # An incomplete run is a fair sample.
        random.Random(settings.seed).shuffle(entries)
        job = write_parts(
            folder,
            {KIND: entries, HOST: [Entry(item) for item in host_items()]},
            device=configuration.name,
            limits=limits or Limits(),
            about={KIND: facts},
            settings={KIND: {"arch": str(configuration.target["arch"])}},
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
        ansor: Path | None,
        progress: ProgressListener | None,
    ) -> None:
        chooser = BlockChooser(configuration.device.compute_units // 2)
        super().__init__(store, settings, (configuration,), progress=progress, chooser=chooser)
        self._configuration, self._tasks, self._ansor = configuration, tasks, ansor
        self._works: dict[str, dict[str, float]] = {}
        self.wanted: set[str] = set()

    def _lower(self, given: Sequence[str], dims: Mapping[str, int]) -> None:
        super()._lower(given, dims)
        if self._ansor is None or any(name.startswith("ansor-") for name in self.store.networks()):
            return
        networks = best_of_ansor(self._ansor, _ANSOR_SCHEDULES)
        with self._build_pool() as pool:
            for name, workloads in networks.items():
                outcomes = pool.run(ansor_task, [(*key, schedules) for key, schedules in workloads.items()])
                tasks = [outcome.value for outcome in outcomes if not outcome.failure]
                self.store.add_network(name, TaskList(name, tuple(task for task, _ in tasks)))
                for task, programs in tasks:
                    self.store.add_programs(task.hash, programs, None)

    def _chosen(self, tasks: list[tuple[str, str, str]]) -> list[tuple[str, str, str]]:
        """Choose among the tasks of GPU size."""
        stored = self.store.tasks()
        names = {task: name for task, name, _ in stored}
        with self._build_pool() as pool:
            outcomes = pool.run(work, [(text,) for _, _, text in stored])
            self._works = {task: o.value for task, o in zip(names, outcomes, strict=True) if not o.failure}
        networks = {
            network: [(t, names[t]) for t in tasks_of_it if t in self._works and is_gpu_size(self._works[t])]
            for network, tasks_of_it in self.store.tasks_by_network().items()
        }
        self.wanted = set(choose_tasks(networks, self._tasks))
        return [task for task in tasks if task[0] in self.wanted]

    def entries(self) -> tuple[list[Entry], dict[str, str]]:
        """Return an entry for each program that can be built, and the reasons of the others by hash."""
        programs = [p for p in self.store.all_programs() if p.task in self.wanted]
        target, key = dict(self._configuration.target), self._configuration.build_key

        def facts(_: StoredProgram, __: str, outcome: Outcome) -> tuple[dict[str, Any], bytes]:
            item = dict(outcome.value or {"failure": outcome.failure})
            code: bytes = item.pop("code", b"")
            return item, code

        built = self._build_for_export([(p, key) for p in programs], launches, lambda p, _: (p.tvm_json, target), facts)
        entries: list[Entry] = []
        failures: dict[str, str] = {}
        for program in programs:
            item, code = built[program.hash, key]
            if "failure" in item:
                failures[program.hash] = item["failure"]
                continue
            counts = self._works[program.task]
            member = f"code/{sha256(code).hexdigest()[:16]}.cubin"
            identity = {"id": program.hash, "task": program.task, "origin": program.origin, "cubin": member}
            estimate = {"estimate_s": round(_estimate_s(counts, self._configuration.device), 3)}
            entries.append(Entry(identity | item | counts | estimate, {member: code}))
        return entries, failures


def _estimate_s(counts: Mapping[str, float], device: DeviceSpec) -> float:
    run_s = max(
        counts["flops"] / (_FLOPS_SHARE * device.peak_flops_fp32),
        counts["bytes"] / (_BANDWIDTH_SHARE * device.mem_bandwidth_bytes_per_s),
    )
    return _FIXED_S + _RUNS * run_s
