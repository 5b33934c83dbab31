"""TVM programs to measure: pools of them, and the folder that ``cdmpp select --backend tvm`` writes.

The folder is a collection whose programs are given: ``collect.sqlite`` has them, ``device.toml`` the device, and
``select.json`` the parameters of the choice and the predictions.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cdmpp.data.folder import DEVICE, RECORDS
from cdmpp.data.measure.collect import Collector
from cdmpp.data.measure.settings import CollectSettings, ProgressListener
from cdmpp.data.measure.store import Store, StoredProgram
from cdmpp.data.measure.targets import Configuration, configurations
from cdmpp.data.measure.todo import ABOUT
from cdmpp.devices.loading import load_device, specification_toml
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError
from cdmpp.programs.frontends.load import load_programs
from cdmpp.programs.frontends.metaschedule import WORKLOADS
from cdmpp.utils.writing import check_new_folder, write_text

#: Files of a pool folder: TVM JSON and TVMScript.
_SUFFIXES = (".json", ".py")


def network_programs(
    device: DeviceSpec, networks: Sequence[str], schedules: int, seed: int = 0, progress: ProgressListener | None = None
) -> list[StoredProgram]:
    """Return the default and up to ``schedules`` random schedules of each task of some networks.

    Errors are those of :meth:`cdmpp.data.measure.collect.Collector.prepare`.
    """
    settings = CollectSettings(schedules=schedules, seed=seed)
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder) / "pool") as store:
        path = _write_device(device, Path(folder))
        Collector(store, settings, device_configurations(str(path), remote=True), progress=progress).prepare(networks)
        return list(store.all_programs())


def _write_device(device: DeviceSpec, folder: Path) -> Path:
    write_text(folder / DEVICE, specification_toml(device))
    return folder / DEVICE


def device_configurations(device: str, *, remote: bool = False) -> tuple[Configuration, ...]:
    """Return the one configuration of a device, by name or file: an NVIDIA GPU, or this machine's CPU with its threads.

    ``remote``: no core of this machine is reserved.
    """
    spec = load_device(device)
    target = f"cuda:{device}" if spec.kind == "gpu" else f"native@{spec.compute_units}"
    return configurations((target,), device=device, remote=remote)


def read_scheduled_pool(path: Path) -> list[StoredProgram]:
    """Return the distinct TVM programs of a folder of TVM JSON or TVMScript files, or of any table. Latencies of a
    table are not read, and its sealed programs are left out."""
    files = sorted(p for p in path.iterdir() if p.suffix in _SUFFIXES) if path.is_dir() else []
    if files and not any((path / name).is_file() for name in (RECORDS, WORKLOADS)):
        programs = [program for file in files for program in _of_file(file)]
    else:
        programs = _of_table(path)
    if not programs:
        raise DataError(f"{path} holds no TVM programs", hint="--pool FOLDER with TVM JSON or TVMScript, or networks")
    return list({program.hash: program for program in programs}.values())


def _of_file(file: Path) -> list[StoredProgram]:
    import tvm

    programs = []
    for p in load_programs(file, "tvm").programs:
        node = tvm.ir.load_json(p.tvm_json)
        if isinstance(node, tvm.IRModule):  # a build takes the function alone
            node = node[p.function or p.name]
        name = f"{file.stem}:{p.name}"
        programs.append(StoredProgram(p.hash, p.hash, name, (), "given", str(tvm.ir.save_json(node))))
    return programs


def _of_table(path: Path) -> list[StoredProgram]:
    from cdmpp.data.load import load_table
    from cdmpp.data.split_file import without_sealed
    from cdmpp.data.splits import networks_of

    table = without_sealed(load_table(path), [path])
    tvm, networks, column = table.tvm, networks_of(table), table.provenance.get("task_name")
    names = {} if column is None else dict(zip(table.program_key.tolist(), column.array().tolist(), strict=True))
    return [
        StoredProgram(digest, task or digest, names.get(key) or task, tuple(sorted(networks[key])), "given", text)
        for key, (digest, task, text) in enumerate(zip(tvm.hashes, tvm.tasks, tvm.texts, strict=True), tvm.first_key)
    ]


def write_scheduled_todo(
    programs: Sequence[StoredProgram],
    expected_s: Sequence[float],
    device: DeviceSpec,
    about: Mapping[str, Any],
    folder: Path,
) -> None:
    """Write a new or empty folder: programs in the order of choice, and their predicted latencies in seconds."""
    check_new_folder(folder)
    with Store(folder) as store:
        store.add_given(programs)
    listed = [
        {"program": p.hash, "task": p.task, "task_name": p.task_name, "origin": p.origin, "expected_latency_s": seconds}
        for p, seconds in zip(programs, expected_s, strict=True)
    ]
    _write_device(device, folder)
    text = json.dumps({**about, "device": device.name, "programs": listed}, indent=1)
    write_text(folder / ABOUT, f"{text}\n")
