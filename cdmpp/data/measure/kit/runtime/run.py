"""Runs part files on the machine with the GPU, and packs the results into small files.

Each item is measured in a child process. A child that crashes or exceeds the time limit is replaced, and the item is a
failure. Finished items are lines of a log, so that the same command goes on after any interruption.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import numpy as np

FORMAT = 1
#: Largest size of a result file in bytes.
MAX_RESULT_BYTES = 16 * 2**20
COMPLETE, FAILED, UNFINISHED, INTERRUPTED = 0, 1, 3, 130
#: Attempts to start a child, before the run stops: a GPU that is lost fails no item.
_STARTS = 3
_OPEN_LIMIT_S = 180.0
_REPORT_EVERY_S = 15.0
#: Seconds that the end of a run needs: the child ends, the result is packed.
_RESERVE_S = 5.0
#: Fields of nvidia-smi that describe the GPU and its present state.
_SMI_FIELDS = (
    "name,uuid,compute_cap,driver_version,memory.total,clocks.sm,clocks.mem,clocks.max.sm,clocks.max.mem,"
    "power.limit,power.draw,temperature.gpu,utilization.gpu"
)


class KitError(Exception):
    """An expected error, whose message is for the user."""


class DeadlineError(Exception):
    """The time of this call has ended; the same command goes on."""


class Part:
    """A part file.

    Attributes
    ----------
    path : Path
    about : dict
        Content of ``part.json``.
    job, kind, device : str
    number, count : int
        Number of this part, and of all parts of the job.
    items : list of dict
        Each has a unique "id".
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._archive: zipfile.ZipFile | None = None
        try:
            about = json.loads(self.read("part.json"))
            if about["format"] != FORMAT:
                raise KitError(f"{path} has format {about['format']}, not {FORMAT}: use the run.py beside the parts")
            self.about: dict[str, Any] = about
            self.job, self.kind, self.device = str(about["job"]), str(about["kind"]), str(about["device"])
            self.number, self.count = int(about["part"]), int(about["parts"])
            self.items: list[dict[str, Any]] = about["items"]
        except FileNotFoundError:
            raise KitError(f"{path} does not exist: name the part files, such as part-*.zip") from None
        except (OSError, ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
            raise KitError(f"{path} is not a part file, or is damaged ({error}): copy it again") from None

    @property
    def name(self) -> str:
        """Name of the part's log and result."""
        return f"part-{self.number:03d}"

    def read(self, member: str) -> bytes:
        """Return a member of the file."""
        if self._archive is None:  # its list of members takes long to read
            self._archive = zipfile.ZipFile(self.path)
        return self._archive.read(member)


class Kind(Protocol):
    """What a kind of part provides: the class ``Kind`` of the module of its name.

    An exception in :meth:`measure` fails the item, and the child is replaced. A harmless failure is a result with
    the reason as "failure"; the child is kept then.
    """

    def __init__(self, part: Part, folder: Path) -> None:
        """``folder``: where files may be kept between calls."""

    def prepare(self, deadline: float) -> None:
        """Prepare all items, in the parent, until ``time.monotonic()`` reaches the deadline.

        Raises :class:`DeadlineError` if time is up. What is finished is kept for the next call.
        """

    def open(self) -> Mapping[str, Any] | None:
        """Open the device, in the child. Returns facts of it for the result, such as {"gpu": NAME}."""

    def measure(self, item: dict[str, Any]) -> dict[str, Any]:
        """Measure an item, in the child: {"repeats_s": {protocol: [seconds]}, ..., "failure": ""}."""


def load_kind(module: str, part: Part, folder: Path) -> Kind:
    """Return the ``Kind`` of a module for a part."""
    kind: Kind = importlib.import_module(module).Kind(part, folder)
    return kind


class Child:
    """A child process that measures items; it is started when needed and replaced after a failure."""

    def __init__(self, module: str, part: Part, folder: Path, limit_s: float) -> None:
        self._arguments = (module, str(part.path), str(folder))
        self._limit_s = limit_s
        self._context = multiprocessing.get_context("spawn")
        self._process: Any = None
        self._connection: Any = None
        #: Facts of the device, from the kind's ``open``.
        self.device: dict[str, Any] = {}

    def measure(self, item: dict[str, Any]) -> dict[str, Any]:
        """Return the result of an item.

        Raises
        ------
        KitError
            The device cannot be opened.
        """
        if self._process is None:
            self._start()
        self._connection.send(item)
        answer = self._receive(self._limit_s)
        if answer is None:
            alive = self._process.is_alive()
            failure = f"exceeded {self._limit_s:g} s" if alive else f"crashed ({self._ending()})"
        else:
            state, content = answer
            if state == "result":
                return dict(content)
            failure = str(content)
        self.close()
        return {"failure": failure}

    def _start(self) -> None:
        reason = ""
        for _ in range(_STARTS):
            self._connection, other = self._context.Pipe()
            self._process = self._context.Process(target=_serve, args=(other, *self._arguments), daemon=True)
            self._process.start()
            other.close()
            answer = self._receive(_OPEN_LIMIT_S)
            if answer is not None and answer[0] == "opened":
                self.device.update(answer[1])
                return
            reason = str(answer[1]) if answer else f"no answer within {_OPEN_LIMIT_S:g} s, or a crash"
            self.close()
        raise KitError(f"the device cannot be opened: {reason}")

    def _receive(self, limit_s: float) -> tuple[str, Any] | None:
        try:
            if self._connection.poll(limit_s):
                answer: tuple[str, Any] = self._connection.recv()
                return answer
        except (EOFError, OSError):
            self._process.join(5)
        return None

    def _ending(self) -> str:
        code = self._process.exitcode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._connection.close()
            self._process = None


def _serve(connection: Connection, module: str, part: str, folder: str) -> None:
    """Answer items until the parent ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    _end_with_parent()
    try:
        kind = load_kind(module, Part(Path(part)), Path(folder))
        connection.send(("opened", dict(kind.open() or {})))
    except Exception as error:
        connection.send(("unready", _text(error)))
        return
    while True:
        try:
            item = connection.recv()
        except EOFError:
            return
        try:
            answer: tuple[str, Any] = ("result", kind.measure(item))
        except Exception as error:
            answer = ("failed", _text(error))
        connection.send(answer)


def _end_with_parent() -> None:
    """Ask Linux to kill this process when its parent ends, even in the middle of a kernel."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _text(error: BaseException) -> str:
    name = type(error).__name__
    return f"{name}: {error}"[:500] if name not in ("KitError", "CudaError") else str(error)[:500]


class Log:
    """Finished items of a part, one JSON line each; an incomplete last line is dropped."""

    def __init__(self, path: Path, part: Part) -> None:
        self.path = path
        #: Results by item, and descriptions of the machine, one for each call.
        self.results: dict[str, dict[str, Any]] = {}
        self.machines: list[dict[str, Any]] = []
        head = {"format": FORMAT, "job": part.job, "part": part.number}
        if path.exists():
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if len(whole) < len(content):
                os.truncate(path, len(whole))
            lines = [json.loads(line) for line in whole.splitlines()]
            if lines and lines[0] != head:
                raise KitError(f"{path} has results of another job: choose another --out")
            for line in lines[1:]:
                self._take(line)
        self._file = path.open("a", encoding="utf-8")
        if not self._file.tell():
            self._write(head)

    def _take(self, line: dict[str, Any]) -> None:
        if "machine" in line:
            call, facts = int(line["call"]), line["machine"]
            if call == len(self.machines):
                self.machines.append({})
            self.machines[call].update(facts)
        else:
            self.results[line["id"]] = line

    def add(self, line: dict[str, Any]) -> None:
        """Append a line: a result, or facts of the machine for a call."""
        self._take(line)
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def pack(log: Log, part: Part, path: Path) -> None:
    """Write the result file of a part; it replaces an earlier one atomically."""
    results = [log.results[item["id"]] for item in part.items if item["id"] in log.results]
    values: list[float] = []
    offsets, owners, protocols = [0], [], []
    for position, result in enumerate(results):
        for protocol, repeats in result.get("repeats_s", {}).items():
            values.extend(repeats)
            offsets.append(len(values))
            owners.append(position)
            protocols.append(protocol)
    rest = [{k: v for k, v in r.items() if k not in ("id", "failure", "repeats_s")} for r in results]
    head = {
        "format": FORMAT,
        "job": part.job,
        "kind": part.kind,
        "part": part.number,
        "parts": part.count,
        "device": part.device,
        "items": len(part.items),
        "unit": "s",
    }
    aside = path.with_name(f"{path.name}.part")
    with aside.open("wb") as file:
        np.savez_compressed(
            file,
            head=np.array(json.dumps(head)),
            machine=np.array(json.dumps(log.machines)),
            ids=np.array([r["id"] for r in results], dtype=np.str_),
            failures=np.array([r.get("failure", "") for r in results], dtype=np.str_),
            fields=np.array([json.dumps(r) for r in rest], dtype=np.str_),
            repeats_s=np.array(values, dtype=np.float64),
            offsets=np.array(offsets, dtype=np.int64),
            owners=np.array(owners, dtype=np.int64),
            protocols=np.array(protocols, dtype=np.str_),
        )
        file.flush()
        os.fsync(file.fileno())
    size = aside.stat().st_size
    if size > MAX_RESULT_BYTES:
        aside.unlink()
        raise KitError(
            f"{path} would have {size:,} bytes, more than {MAX_RESULT_BYTES:,}: the results stay in {log.path}; "
            "export the job again with a smaller --part-mib"
        )
    os.replace(aside, path)


def gpu_state() -> dict[str, Any]:
    """Return what nvidia-smi reports of the first visible GPU: names, versions, clocks, power, temperature."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0] or "0"
    command = ["nvidia-smi", f"--id={visible}", f"--query-gpu={_SMI_FIELDS}", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        return {"nvidia_smi": f"not available: {error}"[:200]}
    values = [value.strip() for value in done.stdout.strip().splitlines()[0].split(",")]
    return dict(zip(_SMI_FIELDS.split(","), values, strict=False))


def host_facts() -> dict[str, Any]:
    """Return processor, versions and the date."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    facts = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "cpu": cpu,
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "nvcc": _nvcc_version(),
    }
    for name in ("torch", "triton"):
        try:
            facts[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            facts[name] = ""
    return facts


def _nvcc_version() -> str:
    if shutil.which("nvcc") is None:
        return ""
    done = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if "release" in line]
    return lines[-1].strip() if lines else ""


def run_part(part: Part, module: str, out: Path, deadline: float, limit_s: float) -> bool:
    """Measure the remaining items of a part until the deadline; returns whether the part is complete."""
    log = Log(out / f"{part.name}.jsonl", part)
    call = len(log.machines)
    child = Child(module, part, out, limit_s)
    try:
        waiting = [item for item in part.items if item["id"] not in log.results]
        if waiting:
            log.add({"call": call, "machine": {**host_facts(), "before": gpu_state()}})
            try:
                _measure(part, module, out, log, child, waiting, call, deadline)
            finally:
                log.add({"call": call, "machine": {"device": child.device, "after": gpu_state()}})
    finally:
        child.close()
        log.close()
        pack(log, part, out / f"{part.name}.npz")
    return all(item["id"] in log.results for item in part.items)


def _measure(
    part: Part,
    module: str,
    out: Path,
    log: Log,
    child: Child,
    waiting: Sequence[dict[str, Any]],
    call: int,
    deadline: float,
) -> None:
    try:
        load_kind(module, part, out).prepare(deadline)
    except DeadlineError as error:
        print(f"{part.name}: {error}", flush=True)
        return
    started = reported = time.monotonic()
    failed = 0
    for done, item in enumerate(waiting):
        now = time.monotonic()
        if now >= deadline:
            return
        if now - reported > _REPORT_EVERY_S:
            reported = now
            left_s = (len(waiting) - done) * (now - started) / done if done else 0.0
            print(
                f"{part.name}: {len(log.results)} of {len(part.items)} items, {failed} of this call failed, "
                f"{left_s / 60:.0f} min left",
                flush=True,
            )
        result = child.measure(item)
        failed += bool(result.get("failure"))
        log.add({"id": item["id"], "call": call, "at": round(time.time(), 1), **result})


@contextmanager
def _stopped_by_sigterm() -> Iterator[None]:
    """Treat SIGTERM, which ``timeout`` sends, as Ctrl-C: the results are packed."""

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main(arguments: Sequence[str] | None = None, modules: Mapping[str, str] | None = None) -> int:
    """Run the command.

    Parameters
    ----------
    arguments : sequence of str, optional
        Default: those of the process.
    modules : mapping of str to str, optional
        Module of a kind of part, if it is not the neighbour of that name.
    """
    parser = argparse.ArgumentParser(
        prog="run.py",
        description="Measure part files on this machine's GPU. The same command goes on where the last one stopped.",
    )
    parser.add_argument("parts", nargs="+", type=Path, metavar="PART", help="part files, such as part-000.zip")
    parser.add_argument("--out", required=True, type=Path, metavar="DIR", help="folder of the results, part-NNN.npz")
    parser.add_argument("--minutes", type=float, default=9.0, help="time of this call; default: 9")
    parser.add_argument("--limit-s", type=float, default=20.0, help="time limit of one item; default: 20")
    options = parser.parse_args(arguments)
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # as nvidia-smi counts GPUs
    deadline = time.monotonic() + options.minutes * 60 - _RESERVE_S
    try:
        with _stopped_by_sigterm():
            return _run(options, modules or {}, deadline)
    except KitError as error:
        print(f"error: {error}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print(f"stopped; the same command goes on with {options.out}", file=sys.stderr)
        return INTERRUPTED


def _run(options: argparse.Namespace, modules: Mapping[str, str], deadline: float) -> int:
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise KitError(f"cannot write {options.out}: {error.strerror}; choose another --out") from None
    parts = [Part(path) for path in options.parts]
    with _locked(options.out):
        return _run_parts(parts, options, modules, deadline)


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """Keep other runs out of the folder; the operating system unlocks it when the process ends."""
    import fcntl

    with (out / "run.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise KitError(f"another run.py uses {out}: wait for its end, or choose another --out") from None
        yield


def _run_parts(parts: Sequence[Part], options: argparse.Namespace, modules: Mapping[str, str], deadline: float) -> int:
    if len({part.job for part in parts}) > 1:
        raise KitError("the parts belong to several jobs: run each job with its own --out")
    complete = True
    for part in parts:
        module = modules.get(part.kind, f"{__package__}.{part.kind}")
        complete &= run_part(part, module, options.out, deadline, options.limit_s)
        result = options.out / f"{part.name}.npz"
        with np.load(result) as packed:
            done, failed = len(packed["ids"]), int(np.count_nonzero(packed["failures"]))
        print(f"{result}: {done} of {len(part.items)} items, {failed} of them failed", flush=True)
    if not complete:
        print(f"{options.minutes:g} minutes are over; repeat the same command to go on", flush=True)
        return UNFINISHED
    return COMPLETE
