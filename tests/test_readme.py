"""The README's example runs and prints what the README says; its files exist."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path("README.md").read_text(encoding="utf-8")
_NUMBER = re.compile(r"\d+\.\d+")


def test_first_example_prints_what_stands_below_it() -> None:
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", README, flags=re.DOTALL)[:2]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    assert _NUMBER.sub("#", out.getvalue()).split() == _NUMBER.sub("#", shown).split()
    printed, written = (list(map(float, _NUMBER.findall(text))) for text in (out.getvalue(), shown))
    assert printed == pytest.approx(written, rel=1e-3)


def test_linked_and_named_files_exist() -> None:
    named = set(re.findall(r"\]\(([\w./-]+)\)", README))
    named |= set(re.findall(r"`((?:cdmpp|docs|configs)/[\w./-]+)`", README))
    assert len(named) > 8
    missing = [name for name in named if not Path(name).exists()]
    assert not missing
