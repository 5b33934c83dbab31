"""Standard output and error: control characters, closed and full outputs."""

import io
import os
import subprocess
import sys

import pytest

from cdmpp.cli.streams import SafeStream
from tests.waiting import PATIENCE_S, ROOT


def cdmpp(arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a shell, with redirections."""
    shell = ["bash", "-c", f"'{sys.executable}' -m cdmpp {arguments}"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(shell, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=PATIENCE_S)


def test_control_characters_are_escaped() -> None:
    raw = io.BytesIO()
    stream = SafeStream(io.TextIOWrapper(raw, encoding="utf-8"))
    print("red \x1b[31m, back \r\b, C1 \x9b, reversed \u202e;\ttab, 12 µs", file=stream, flush=True)
    assert raw.getvalue().decode() == "red \\x1b[31m, back \\r\\x08, C1 \\x9b, reversed \\u202e;\ttab, 12 µs\n"
    print("\x1b[2K", file=stream.unfiltered, flush=True)
    assert raw.getvalue().endswith(b"\x1b[2K\n")


def test_foreign_names_reach_no_stream_raw() -> None:
    result = cdmpp("predict $'li\\e]0;title\\anear:m=1' $'linear:m=\\e[31m' --device t4")
    assert result.returncode == 1 and "\\x1b[31m" in result.stdout + result.stderr
    assert "\x1b" not in result.stdout + result.stderr and "\x07" not in result.stdout + result.stderr


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ("devices >&-", "Bad file descriptor"),
        ("devices > /dev/full", "No space left on device"),
        ("--help > /dev/full", "No space left on device"),
    ],
)
def test_output_that_cannot_be_written_is_one_error(arguments: str, reason: str) -> None:
    result = cdmpp(arguments)
    assert result.returncode == 1
    lines = result.stderr.splitlines()
    assert lines[0] == f"error: cannot write the output: {reason}"
    assert len(lines) == 2 and lines[1].startswith("hint: ")
