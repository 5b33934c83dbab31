"""Former names of the service, which work in a checkout for one release."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.waiting import PATIENCE_S

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("command", "output"),
    [
        (["-m", "server", "hash-key"], "hash: "),
        (["-W", "always", "-c", "from server.app import create_app; print(create_app.__module__)"], "cdmpp_server.app"),
    ],
)
def test_former_name_works_with_a_deprecation_warning(command: list[str], output: str) -> None:
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert output in done.stdout
    assert "DeprecationWarning" in done.stderr


def test_wheel_has_no_package_named_server() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["cdmpp", "server/cdmpp_server"]
