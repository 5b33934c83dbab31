"""Traces that are recorded once for all tests of this folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).parents[3]


def run_ranks(folder: Path, world: int) -> None:
    """Record in processes of their own: a profiler's threads must not outlive a test."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.simulate.traces.record", str(folder), str(rank), str(world)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    for process in processes:
        said, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, said


@pytest.fixture(scope="session")
def cpu_trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three iterations of training on the CPU, with shapes."""
    folder = tmp_path_factory.mktemp("cpu")
    run_ranks(folder, 1)
    return folder / "trace.json.gz"


@pytest.fixture(scope="session")
def gloo_traces(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Three iterations of data-parallel training of two processes."""
    folder = tmp_path_factory.mktemp("gloo")
    run_ranks(folder, 2)
    return [folder / f"rank{rank}.json" for rank in range(2)]
