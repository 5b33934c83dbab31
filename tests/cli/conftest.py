"""Fixtures that run the command in this process or in a subprocess."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from cdmpp.cli.main import app
from tests.waiting import PATIENCE_S

Run = Callable[..., Result]
Spawn = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[2]
LINEAR = "linear:m=512,n=4096,k=1024,dtype=float16"


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the user's settings and cache."""
    for name in list(os.environ):
        if name.startswith("CDMPP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CDMPP_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def run() -> Run:
    """Function that runs the command in this process, as in ``run("predict", ...)``."""

    def invoke(*arguments: object) -> Result:
        return CliRunner().invoke(app, [str(a) for a in arguments])

    return invoke


@pytest.fixture
def spawn(tmp_path: Path) -> Spawn:
    """Function that runs the command in a subprocess, outside the checkout."""

    def invoke(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **options.pop("env", {})}  # type: ignore[dict-item]
        return subprocess.run(
            [sys.executable, "-m", "cdmpp.cli.main", *map(str, arguments)],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            encoding="utf-8",
            timeout=PATIENCE_S,
            check=False,
            **options,
        )  # type: ignore[call-overload,no-any-return]

    return invoke
