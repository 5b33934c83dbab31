"""Fixtures that run the command in this process or in a subprocess."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cdmpp.cli.main import app
from tests.waiting import ROOT, run_python

Spawn = Callable[..., subprocess.CompletedProcess[str]]

LINEAR = "linear:m=512,n=4096,k=1024,dtype=float16"


@pytest.fixture(autouse=True)
def own_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shipped_model_is_loaded_once: None) -> None:
    """Hide the user's settings and cache."""
    for name in list(os.environ):
        if name.startswith("CDMPP_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CDMPP_CACHE", str(tmp_path / "cache"))


class Run:
    """Runs the command in this process, as in ``run("predict", ...)``."""

    def __call__(self, *arguments: object) -> Result:
        return CliRunner().invoke(app, [str(a) for a in arguments])

    def ok(self, *arguments: object) -> Result:
        """The result of a command that succeeds."""
        result = self(*arguments)
        assert result.exit_code == 0, result.output
        return result

    def json(self, *arguments: object) -> Any:
        """What a command that succeeds prints with ``--json``."""
        return json.loads(self.ok(*arguments, "--json").stdout)

    def refused(self, *arguments: object, code: int = 1) -> str:
        """The messages of a command that ends with this exit code and answers nothing."""
        result = self(*arguments)
        assert (result.exit_code, result.stdout) == (code, ""), result.output
        assert "Traceback" not in result.stderr
        return result.stderr


@pytest.fixture
def run() -> Run:
    return Run()


@pytest.fixture
def spawn(tmp_path: Path) -> Spawn:
    """Function that runs the command in a subprocess, outside the checkout."""

    def invoke(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        command = ("-m", "cdmpp.cli.main", *map(str, arguments))
        return run_python(*command, cwd=tmp_path, **{"PYTHONPATH": str(ROOT), **environment})

    return invoke
