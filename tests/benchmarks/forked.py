"""Modules run as commands in processes that are forked from one with the imports that most of them share."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

#: Importing these takes 3 to 6 seconds. TVM is not among them: many commands import it without torch.
PRELOADED = (
    "torch._dynamo",
    "scipy.stats",
    "sklearn.neighbors",
    "xgboost",
    "numba",
    "cdmpp.predict.predictor",
    "fastapi",
)


@dataclass(frozen=True)
class Done:
    """How a command ended."""

    status: int | None
    output: str
    error: str


def run_command(module: str, options: Sequence[str], folder: Path) -> Done:
    """Run ``python -m module options`` with one thread; its output goes through files of a folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    output, error = folder / "output", folder / "error"
    # The server inherits the variable when it starts, before it imports anything.
    before = os.environ.get("OMP_NUM_THREADS")
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        process = context.Process(target=_run, args=(module, list(options), output, error))
        process.start()
    finally:
        if before is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = before
    process.join()
    return Done(process.exitcode, output.read_text(), error.read_text())


def _run(module: str, options: list[str], output: Path, error: Path) -> None:
    for path, stream in ((output, 1), (error, 2)):
        with path.open("wb") as file:
            os.dup2(file.fileno(), stream)
    sys.argv = [module, *options]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
