"""docs/related-systems.md: each system has commands, and they run as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.printed_outputs import ROOT, Runner

SYSTEMS = [
    *(
        "CDMPP",
        "dPRO",
        "PipeWeaver",
        "SEMU",
        "RLHFuse",
        "StreamRL",
        "QSync",
        "ByteComp",
        "Aryl",
        "Teola",
        "AFD",
        "ADSP",
    ),
    *("ADSP", "BGL", "InfinitePOD", "ByteTransformer", "DSV", "gating", "MFA"),
    *("Step-Video", "Step-Audio", "NextStep-1", "Step1X-Edit"),
]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "related-systems.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and "---" not in line
][1:]
COMMANDS = [command for row in ROWS for command in re.findall(r"`((?:cdmpp|python) [^`]+)`", row[1])]


def test_each_system_has_a_row_with_a_command() -> None:
    assert [name for name in SYSTEMS if not any(name in row[0] for row in ROWS)] == []
    for row in ROWS:
        assert len(row) == 4 and re.search(r"`(cdmpp|python) ", row[1]), row[0]


def test_files_of_the_commands_exist() -> None:
    files = [word for command in COMMANDS for word in command.split() if re.search(r"\.(json|gz|onnx|py|csv)$", word)]
    assert len(files) > 15 and all((ROOT / name).exists() for name in files)


@pytest.mark.nightly
@pytest.mark.parametrize("command", COMMANDS)
def test_command_runs_as_written(command: str, tmp_path: Path) -> None:
    if "published_blocks" in command or "packed_attention" in command:
        pytest.importorskip("torch.nn.attention.varlen")
    printed = Runner(tmp_path).command(command, "")
    row = next(row for row in ROWS if command in row[1])
    if "published_blocks" in command and "`out`" in row[2]:
        assert re.search(r", out$", printed, re.MULTILINE)
