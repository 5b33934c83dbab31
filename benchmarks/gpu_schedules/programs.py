"""Features of the configurations as programs, kept in a folder: some 38,000 programs take a few minutes of one core."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.gpu_schedules.tables import KernelTable
from cdmpp.data.importers.kernel_tuner.template import Launch
from cdmpp.errors import DataError
from cdmpp.features import gpu_schedule
from cdmpp.features.class_features import argument_bytes
from cdmpp.features.gpu_schedule import GPU_HASH, gpu_columns
from cdmpp.features.leaf import ast_matrix
from cdmpp.features.schema import COLUMN, SCHEMA_HASH
from cdmpp.features.walk import build_ast
from cdmpp.model.nn.gpu_inputs import summarise_schedule
from cdmpp.programs.tvm_json import load
from cdmpp.utils.writing import replacing

Array = np.ndarray[Any, np.dtype[Any]]

#: Behind the summary of the schedule: log2 of the flops of the loop nest and of the bytes of the arguments.
EXTRA = ("flops", "bytes", "leaves", "predicated")


def program_features(
    table: KernelTable, folder: Path, report: Callable[[str], None] = lambda text: None
) -> tuple[Array, Array]:
    """Features and argument bytes of every configuration; computed once, then read.

    Returns
    -------
    features : float32, (configurations, GPU_WIDTH + len(EXTRA))
    program_bytes : float64, (configurations,)

    Raises
    ------
    DataError
        A program launches other threads, or takes other shared memory, than its parameters say.
    """
    key = hashlib.sha256(table.configurations.tobytes())
    for text in (GPU_HASH, SCHEMA_HASH, *(Path(name).read_text("utf-8") for name in _sources(table))):
        key.update(text.encode())
    path = folder / f"{table.name}-{key.hexdigest()[:16]}.npz"
    if path.is_file():
        with np.load(path) as stored:
            return stored["features"], stored["bytes"]
    features, size = [], []
    for row in range(len(table.configurations)):
        if row % 1000 == 0:
            report(f"{table.name}: {row} of {len(table.configurations)} programs")
        vector, program_bytes = _encode(table, table.mapping(row))
        features.append(vector)
        size.append(program_bytes)
    out = np.stack(features), np.array(size)
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(path) as part, part.open("wb") as file:
        np.savez_compressed(file, features=out[0], bytes=out[1])
    return out


def _sources(table: KernelTable) -> tuple[str, ...]:
    """Files whose code decides the features."""
    return __file__, gpu_schedule.__file__, table.kernel.build.__code__.co_filename


def _encode(table: KernelTable, parameters: dict[str, int]) -> tuple[Array, float]:
    import tvm

    program = table.kernel.build(parameters)
    ast = build_ast(*load(tvm.ir.save_json(tvm.IRModule({"main": program}))))
    summary = summarise_schedule(gpu_columns(ast))
    _check(table.name, parameters, table.kernel.launch(parameters), 2.0 ** summary[:5].astype(np.float64) - 1)
    leaves = ast_matrix(ast)
    flops = np.log2(1 + (np.exp2(leaves[:, COLUMN["flops"]].astype(np.float64)) - 1).sum())
    total = float(argument_bytes(ast))
    extra = [flops, np.log2(1 + total), len(ast.leaves), sum(bool(leaf.predicated) for leaf in ast.leaves)]
    return np.concatenate([summary, extra]).astype(np.float32), total


def _check(name: str, parameters: dict[str, int], launch: Launch, summary: Array) -> None:
    threads, blocks, shared = summary[0], summary[1], summary[4]
    expected = launch.threads, launch.blocks, launch.shared_bytes
    for what, own, wanted in zip(
        ("threads", "blocks", "shared bytes"), (threads, blocks, shared), expected, strict=True
    ):
        if abs(own - wanted) > 1e-3 * max(wanted, 1):
            raise DataError(
                f"{name} {parameters}: the program has {own:.0f} {what}, its parameters say {wanted}",
                hint="the template does not do the configured work",
            )
