"""Parts of TVM programs: compiles CUDA sources, compares results, and times kernels with flushed and with warm caches.

An item has "task", "arguments" ([shape, type, written]), "bound" (integers are below it), "kernels" (in launch order:
name, grid, block, shared bytes, and arguments: ["argument", i], ["workspace", i] or [type, value]), "workspaces"
(bytes), "seed", and "source" or "cubin": a member of the part.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import numpy as np

from .driver import Cuda, CudaError, Launch, OutOfMemoryError
from .run import DeadlineError, KitError, Part

#: A run that takes longer is timed once.
ONCE_S = 0.25
#: Length of a warm repeat, number of warm repeats, and most kernels in one graph.
_WARM_REPEAT_S, _WARM_REPEATS, _MAX_GRAPH = 1e-3, 5, 2000
#: Total length of the flushed repeats, and their number.
_FLUSHED_TOTAL_S, _MIN_FLUSHED, _MAX_FLUSHED = 0.03, 5, 20
_COMPILE_LIMIT_S = 120.0
#: Largest difference of two schedules' results, relative to |value| + the root mean square of the array.
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "float16": 2e-2, "bfloat16": 6e-2}
_NUMPY = {"bfloat16": "uint16", "bool": "uint8"}


class Kind:
    """See :class:`.run.Kind`."""

    def __init__(self, part: Part, folder: Path) -> None:
        self._part, self._folder = part, folder
        self._cache = folder / "cubins"
        self._references_path = folder / f"{part.name}-references.json"
        self._by_id = {item["id"]: item for item in part.items}
        self._cuda: Any = None
        self._task: _Task | None = None

    # In the parent

    def prepare(self, deadline: float) -> None:
        """Compile the sources on all cores. A source that nvcc refuses is kept as a failure of its item."""
        self._cache.mkdir(exist_ok=True)
        waiting = [item for item in self._part.items if "source" in item and not self._is_compiled(item)]
        if not waiting:
            return
        self.check_compiler()
        workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        print(f"{self._part.name}: compiling {len(waiting)} programs on {workers} cores", flush=True)
        with ThreadPoolExecutor(workers) as pool:
            futures = [pool.submit(self._compile, item, deadline) for item in waiting]
            try:
                for future in as_completed(futures):
                    future.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        left = sum(not self._is_compiled(item) for item in waiting)
        if left:
            raise DeadlineError(f"{left} of {len(waiting)} programs are not yet compiled")

    def check_compiler(self) -> None:
        """Raise if nvcc is missing."""
        if shutil.which("nvcc") is None:
            raise KitError("nvcc is not in PATH: add CUDA's bin folder to it, such as /usr/local/cuda/bin")

    def _is_compiled(self, item: Mapping[str, Any]) -> bool:
        return self._cubin(item).exists() or self._refusal(item).exists()

    def _cubin(self, item: Mapping[str, Any]) -> Path:
        return self._cache / f"{item['id']}.cubin"

    def _refusal(self, item: Mapping[str, Any]) -> Path:
        return self._cache / f"{item['id']}.txt"

    def _compile(self, item: Mapping[str, Any], deadline: float) -> None:
        left_s = deadline - time.monotonic()
        if left_s <= 0:
            return
        source = self._part.read(item["source"])
        try:
            code = self.compile(source, item, min(left_s, _COMPILE_LIMIT_S))
        except KitError as error:
            _write_aside(self._refusal(item), str(error).encode())
        except subprocess.TimeoutExpired:
            if left_s > _COMPILE_LIMIT_S:
                _write_aside(self._refusal(item), f"nvcc exceeded {_COMPILE_LIMIT_S:g} s".encode())
        else:
            _write_aside(self._cubin(item), code)

    def compile(self, source: bytes, item: Mapping[str, Any], limit_s: float) -> bytes:
        """Return the machine code of a source.

        Raises
        ------
        KitError
            nvcc refuses the source.
        """
        place = self._cache / f"{item['id']}.cu"
        place.write_bytes(source)
        result = place.with_suffix(".part.cubin")
        try:
            return nvcc(place, result, self._part.about["nvcc_flags"], limit_s)
        finally:
            place.unlink(missing_ok=True)
            result.unlink(missing_ok=True)

    # In the child

    def open_driver(self) -> Any:
        """Return the binding of the driver."""
        return Cuda()

    def open(self) -> dict[str, Any]:
        """Open the GPU and check that the programs were built for it."""
        self._cuda = cuda = self.open_driver()
        arch = str(self._part.about["arch"])
        wanted = int("".join(c for c in arch if c.isdigit()))
        major, minor = cuda.capability
        if 10 * major + minor != wanted:
            raise KitError(f"the programs are for {arch}, and {cuda.name} has compute capability {major}.{minor}")
        self._flush_bytes = 2 * cuda.l2_bytes
        self._flush = cuda.allocate(self._flush_bytes)
        self._start, self._end = cuda.event(), cuda.event()
        empty = []
        for _ in range(21):
            cuda.fill(self._flush, 0, self._flush_bytes)
            cuda.record(self._start)
            cuda.record(self._end)
            empty.append(cuda.elapsed_s(self._start, self._end))
        return {
            "gpu": cuda.name,
            "capability": f"{major}.{minor}",
            "cuda_driver": cuda.driver,
            "l2_bytes": cuda.l2_bytes,
            # Seconds between two events without work between them, which every flushed repeat contains.
            "empty_s": float(np.median(empty)),
        }

    def measure(self, item: dict[str, Any]) -> dict[str, Any]:
        """Check the result of a program and time it."""
        if self._refusal(item).exists():
            return {"failure": f"nvcc: {self._refusal(item).read_text()}"}
        try:
            return self._measure(item)
        except OutOfMemoryError as error:
            self._leave_task()
            return {"failure": f"out of memory: {error}"}

    def _measure(self, item: dict[str, Any]) -> dict[str, Any]:
        cuda = self._cuda
        if self._task is None or self._task.name != item["task"]:
            self._leave_task()
            self._task = _Task(cuda, item)
        task = self._task
        references = self._references()
        reference = references.get(item["task"])
        if reference is not None and reference != item["id"] and task.results is None:
            with _Program(cuda, self._by_id[reference], self._code(self._by_id[reference]), task) as program:
                task.results = task.run(program)
        with _Program(cuda, item, self._code(item), task) as program:
            results = task.run(program)
            if task.results is None or reference == item["id"]:
                task.results = results
                # Kept for a child that replaces this one.
                references[item["task"]] = item["id"]
                _write_aside(self._references_path, json.dumps(references).encode())
                difference = 0.0
            else:
                difference, failure = compare(results, task.results, task.result_types)
                if failure:
                    return {"failure": f"differs from {references[item['task']]}: {failure}"}
            return {**self._time(program), "difference": difference, "failure": ""}

    def _time(self, program: _Program) -> dict[str, Any]:
        cuda = self._cuda
        first_s = self._one(program, flush=False)
        if first_s > ONCE_S:
            return {"repeats_s": {"flushed": [self._one(program, flush=True)], "warm": [first_s]}, "once": True}
        run_s = min(self._one(program, flush=False) for _ in range(3))
        count = min(_MAX_FLUSHED, max(_MIN_FLUSHED, int(_FLUSHED_TOTAL_S / run_s)))
        flushed = [self._one(program, flush=True) for _ in range(count)]
        # A graph: kernels of few microseconds would otherwise wait for the host's next launch.
        most = max(1, _MAX_GRAPH // len(program.launches))
        runs = min(most, max(1, math.ceil(_WARM_REPEAT_S / run_s)))
        graph = cuda.graph(program.launches * runs)
        try:
            cuda.launch_graph(graph)
            warm = []
            for _ in range(_WARM_REPEATS):
                cuda.record(self._start)
                cuda.launch_graph(graph)
                cuda.record(self._end)
                warm.append(cuda.elapsed_s(self._start, self._end) / runs)
        finally:
            cuda.free_graph(graph)
        return {"repeats_s": {"flushed": flushed, "warm": warm}, "runs": runs, "once": False}

    def _one(self, program: _Program, *, flush: bool) -> float:
        """Return the seconds of one run between two events."""
        cuda = self._cuda
        if flush:  # also gives the host time to launch the kernels behind it
            cuda.fill(self._flush, 0, self._flush_bytes)
        cuda.record(self._start)
        for launch in program.launches:
            cuda.launch(launch)
        cuda.record(self._end)
        return float(cuda.elapsed_s(self._start, self._end))

    def _code(self, item: Mapping[str, Any]) -> bytes:
        return self._part.read(item["cubin"]) if "cubin" in item else self._cubin(item).read_bytes()

    def _references(self) -> dict[str, str]:
        if not self._references_path.exists():
            return {}
        references: dict[str, str] = json.loads(self._references_path.read_text())
        return references

    def _leave_task(self) -> None:
        if self._task is not None:
            self._task.close()
            self._task = None


class _Task:
    """Inputs of a task on the device, which its programs share, and the results of its first program."""

    def __init__(self, cuda: Any, item: Mapping[str, Any]) -> None:
        self._cuda, self.name = cuda, item["task"]
        arguments = item["arguments"]
        self.result_types = [dtype for _, dtype, written in arguments if written]
        self.results: list[bytes] | None = None
        self.pointers: list[int] = []
        self._written: list[tuple[int, int]] = []
        rng = np.random.default_rng(int(hashlib.sha256(self.name.encode()).hexdigest()[:8], 16))
        try:
            for shape, dtype, written in arguments:
                size = size_of(shape, dtype)
                pointer = cuda.allocate(size)
                self.pointers.append(pointer)
                if written:
                    self._written.append((pointer, size))
                else:
                    cuda.upload(pointer, random_bytes(shape, dtype, item["bound"], rng))
        except BaseException:
            self.close()
            raise

    def run(self, program: _Program) -> list[bytes]:
        """Run a program once and return its results."""
        for pointer, size in self._written:
            self._cuda.fill(pointer, 0xFF, size)  # not a number: an element that is not written differs
        for launch in program.launches:
            self._cuda.launch(launch)
        self._cuda.synchronize()
        return [self._cuda.download(pointer, size) for pointer, size in self._written]

    def close(self) -> None:
        """Free the memory."""
        for pointer in self.pointers:
            self._cuda.free(pointer)
        self.pointers = []


class _Program:
    """A loaded program with its workspaces; a context manager that frees them."""

    def __init__(self, cuda: Any, item: Mapping[str, Any], code: bytes, task: _Task) -> None:
        self._cuda = cuda
        self._workspaces: list[int] = []
        self._module: Any = None
        self.launches: list[Launch] = []
        try:
            for size in item["workspaces"]:
                self._workspaces.append(cuda.allocate(size))
            self._module = cuda.load(code)
            memory = {"argument": task.pointers, "workspace": self._workspaces}
            for kernel in item["kernels"]:
                values = [
                    ("pointer", memory[kind][value]) if kind in memory else (kind, value)
                    for kind, value in kernel["arguments"]
                ]
                self.launches.append(
                    cuda.prepare(
                        self._module, kernel["name"], kernel["grid"], kernel["block"], kernel["shared"], values
                    )
                )
        except OutOfMemoryError:
            self._close()
            raise

    def __enter__(self) -> _Program:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        # After an error of the GPU nothing can be freed: the process ends.
        if kind is None or not issubclass(kind, CudaError) or issubclass(kind, OutOfMemoryError):
            self._close()

    def _close(self) -> None:
        if self._module is not None:
            self._cuda.unload(self._module)
        for pointer in self._workspaces:
            self._cuda.free(pointer)


def nvcc(source: Path, result: Path, flags: Sequence[str], limit_s: float) -> bytes:
    """Compile a source to machine code.

    Raises
    ------
    KitError
        nvcc refuses the source.
    subprocess.TimeoutExpired
    """
    command = ["nvcc", *flags, "-o", str(result), str(source)]
    # In its own session, so that Ctrl-C does not look like a refused source.
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False, start_new_session=True)
    if done.returncode < 0:
        raise KitError(f"ended by signal {-done.returncode}")
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if "error" in line.lower()]
        raise KitError((lines or [done.stderr.strip() or f"exit code {done.returncode}"])[0][:300])
    return result.read_bytes()


def size_of(shape: Sequence[int], dtype: str) -> int:
    """Return the bytes of an array."""
    return math.prod(shape) * np.dtype(_NUMPY.get(dtype, dtype)).itemsize


def random_array(shape: Sequence[int], dtype: str, bound: int, rng: np.random.Generator) -> np.ndarray[Any, Any]:
    """Return random values: floats in [-1, 1), integers in [0, bound), which may be indices; bfloat16 as float32."""
    if dtype == "bool":
        return rng.integers(0, 2, size=tuple(shape)).astype(bool)
    if dtype.startswith(("float", "bfloat")):
        values = rng.random(tuple(shape), dtype=np.float32) * 2 - 1
        return values.astype("float32" if dtype == "bfloat16" else dtype)
    highest = min(bound - 1, int(np.iinfo(dtype).max))
    return rng.integers(0, highest, size=tuple(shape), endpoint=True).astype(dtype)


def random_bytes(shape: Sequence[int], dtype: str, bound: int, rng: np.random.Generator) -> bytes:
    """Return the bytes of :func:`random_array` in its type."""
    values = random_array(shape, dtype, bound, rng)
    if dtype == "bfloat16":
        values = (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.tobytes()


def compare(results: Sequence[bytes], expected: Sequence[bytes], types: Sequence[str]) -> tuple[float, str]:
    """Return the largest relative difference of two sets of arrays, and how they differ beyond the tolerance, or ""."""
    largest = 0.0
    for content, reference, dtype in zip(results, expected, types, strict=True):
        if dtype not in TOLERANCES:
            if content != reference:
                a, b = (np.frombuffer(x, dtype=_NUMPY.get(dtype, dtype)) for x in (content, reference))
                return 1.0, f"{np.count_nonzero(a != b)} of {a.size} values of type {dtype}"
            continue
        difference = _relative(_values(content, dtype), _values(reference, dtype))
        largest = max(largest, difference)
        if difference > TOLERANCES[dtype]:
            return largest, f"relative difference {difference:.3g}, allowed {TOLERANCES[dtype]:g} for {dtype}"
    return largest, ""


def _values(content: bytes, dtype: str) -> np.ndarray[Any, Any]:
    if dtype == "bfloat16":
        return (np.frombuffer(content, dtype=np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(content, dtype=dtype).astype(np.float64)


def _relative(values: np.ndarray[Any, Any], expected: np.ndarray[Any, Any]) -> float:
    finite = np.isfinite(expected)
    same = (values[~finite] == expected[~finite]) | (np.isnan(values[~finite]) & np.isnan(expected[~finite]))
    if not np.all(same) or not np.all(np.isfinite(values[finite])):
        return 1e9  # a number here, none there; JSON has no infinity
    if not finite.any():
        return 0.0
    a, b = values[finite], expected[finite]
    scale = np.abs(b) + math.sqrt(float(np.mean(b * b)))
    with np.errstate(divide="ignore", invalid="ignore"):
        difference = np.where(a == b, 0.0, np.abs(a - b) / scale)
    return float(min(1e9, np.max(difference)))


def _write_aside(path: Path, content: bytes) -> None:
    aside = path.with_name(f"{path.name}.{os.getpid()}.part")
    aside.write_bytes(content)
    os.replace(aside, path)
