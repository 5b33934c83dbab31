"""The Makefile's test targets, run with a fake interpreter, and the progress of its set-up."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

pytestmark = pytest.mark.skipif(not (shutil.which("make") and shutil.which("bash")), reason="no make or bash")


def make(
    target: str, status: int, venv: Path, *variables: str, stamp: str = ".ready"
) -> subprocess.CompletedProcess[str]:
    """Run a target with an interpreter that prints its arguments and ends with ``status``."""
    python = venv / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    python.write_text(f'#!/bin/sh\necho "$@"\nexit {status}\n')
    python.chmod(0o755)
    if stamp:
        (venv / stamp).touch()
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "PYTEST_"))}
    command = ["make", target, f"VENV={venv}", *variables]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_demonstration_installs_what_it_needs_and_the_tests_the_rest(tmp_path: Path) -> None:
    demo = make("demo", 0, tmp_path, stamp="").stdout
    assert "about 50 packages" in demo and ".[demo]" in demo and demo.endswith("-m cdmpp.cli.demo\n")
    assert ".[all]" in make("test-nightly", 0, tmp_path, stamp="").stdout
    assert "pip install" not in make("demo", 0, tmp_path, stamp="").stdout
    (tmp_path / ".serves").unlink()
    assert make("demo", 1, tmp_path, stamp="").returncode != 0
    assert not (tmp_path / ".serves").exists()


@pytest.mark.parametrize("kind", ["native", "browser"])
def test_target_succeeds_if_no_test_has_the_marker(kind: str, tmp_path: Path) -> None:
    done = make(f"test-{kind}", 5, tmp_path)
    assert done.returncode == 0
    arguments, message = done.stdout.splitlines()
    assert arguments == f"-m pytest -m {kind} tests"
    assert message == f"make test-{kind}: no test carries the marker {kind}, nothing to run"


@pytest.mark.parametrize(("status", "good"), [(0, True), (1, False), (2, False), (4, False)])
def test_target_fails_if_pytest_fails(status: int, good: bool, tmp_path: Path) -> None:
    done = make("test-browser", status, tmp_path)
    assert (done.returncode == 0) is good
    assert "nothing to run" not in done.stdout


def test_test_targets_state_their_duration_and_select_tests(tmp_path: Path) -> None:
    first, *_, command = make("test", 0, tmp_path / "all").stdout.splitlines()
    assert "about 10 minutes" in first and command.endswith("-m not nightly tests --nbmake notebooks")
    first, *_, command = make("test-fast", 0, tmp_path / "fast").stdout.splitlines()
    assert "about 2 minutes" in first and command.endswith("-m not slow and not nightly tests")
    *_, command = make("test-nightly", 0, tmp_path / "nightly").stdout.splitlines()
    assert command.endswith("-m nightly tests")
    assert make("test", 1, tmp_path / "failing").returncode != 0


def test_gpu_job_exports_the_standard_job_for_the_device(tmp_path: Path) -> None:
    command = tmp_path / "bin" / "cdmpp"
    command.parent.mkdir()
    command.write_text('#!/bin/sh\necho "$@"\n')
    command.chmod(0o755)
    exported = make("gpu-job", 0, tmp_path, "DEVICE=a100", "GPU_JOB=job", "PUBLIC_DATA=data").stdout.splitlines()
    standard = "collect --build-only --standalone --target cuda:a100 --schedules 15 --tasks 300"
    assert f"{standard} --ansor data/sched_ansor.parquet --out job" in exported


def test_stress_target_takes_files_and_rounds(tmp_path: Path) -> None:
    assert make("test-stress", 0, tmp_path / "default").stdout.split("\n")[-2] == "-m tests.stress"
    chosen = make("test-stress", 0, tmp_path / "chosen", "STRESS_ROUNDS=2", "STRESS_FILES=tests/test_units.py")
    assert chosen.stdout.split("\n")[-2] == "-m tests.stress --rounds 2 tests/test_units.py"


def test_setup_shows_packages_and_errors_but_not_the_configuration_warnings() -> None:
    output = """\
WARNING: Location 'file:///missing/' is ignored: it is neither a file nor a directory.
Looking in indexes: https://pypi.org/simple
Obtaining file:///checkout
Collecting numpy>=2.1 (from cdmpp==0.1.0)
  Downloading numpy-2.4.6-cp311-cp311-manylinux_2_28_x86_64.whl (16.9 MB)
Processing /wheels/rich-15.0.0-py3-none-any.whl (from cdmpp==0.1.0)
Installing collected packages: numpy, rich
Successfully installed numpy-2.4.6 rich-15.0.0
ERROR: No matching distribution found for nothing==1
"""
    script = [sys.executable, str(ROOT / ".ci" / "pip_progress.py")]
    done = subprocess.run(script, input=output, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "3 packages: Installing collected packages: numpy, rich",
        "installed 2 packages",
        "ERROR: No matching distribution found for nothing==1",
    ]
