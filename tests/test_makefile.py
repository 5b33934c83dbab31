"""The Makefile's targets for marked tests, with a stand-in for the environment's interpreter."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (shutil.which("make") and shutil.which("bash")), reason="no make or bash")


def make(target: str, status: int, venv: Path) -> subprocess.CompletedProcess[str]:
    """Run a target whose interpreter says how it was called and ends with ``status``."""
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    python.chmod(0o755)
    (venv / ".ready").touch()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "PYTEST_"))}
    command = ["make", target, f"VENV={venv}"]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("kind", ["native", "browser"])
def test_no_marked_test_is_one_line_and_no_failure(kind: str, tmp_path: Path) -> None:
    done = make(f"test-{kind}", 5, tmp_path)
    assert done.returncode == 0
    called, said = done.stdout.splitlines()
    assert called == f"-m pytest -m {kind} tests"
    assert said == f"make test-{kind}: no test carries the marker {kind}, nothing to run"


@pytest.mark.parametrize(("status", "good"), [(0, True), (1, False), (2, False), (4, False)])
def test_every_other_outcome_is_pytests(status: int, good: bool, tmp_path: Path) -> None:
    done = make("test-browser", status, tmp_path)
    assert (done.returncode == 0) is good
    assert "nothing to run" not in done.stdout
