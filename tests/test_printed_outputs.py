"""What README.md and docs/*.md print is what their commands print: ``make printed-outputs`` writes it."""

import re
from pathlib import Path

import pytest

from tests.printed_outputs import PAGES, ROOT, abridged, outputs, regenerate, same

#: Pages whose commands take more than ten seconds together.
LONG = {"docs/exports.md", "docs/integrations.md", "docs/modules.md"}
WITH_OUTPUT = [page for page in PAGES if any(True for _ in outputs((ROOT / page).read_text(encoding="utf-8")))]


@pytest.mark.slow
@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.nightly) if page in LONG else page for page in WITH_OUTPUT]
)
def test_page_shows_what_its_commands_print(page: str) -> None:
    differences, _ = regenerate(page, check=True)
    assert not differences, "run make printed-outputs\n" + "\n".join(differences)


def test_outputs_are_found_by_their_place() -> None:
    text = "```\n$ a \\\n  b\none\n\n$ c\ntwo\n```\n\n```python\nprint(3)\n```\n\n```\n3\n```\n\n"
    text += "<!-- not run: reason -->\n\n```\n$ d\nfour\n```\n"
    commands = [(text[start:end], command, is_python) for start, end, command, is_python in outputs(text)]
    assert commands == [("one\n\n", "a \\\n  b\n", False), ("two\n", "c\n", False), ("3\n", "print(3)\n", True)]


@pytest.mark.parametrize(
    ("shown", "printed", "agree"),
    [
        ("1,000 ms  in", "1,001 ms  in", True),
        ("1,000 ms  in", "1,010 ms  in", False),
        ("1,000 ms  in", "1,000 ms  near", False),
        ("optimal after 3.1 s", "optimal after 9.9 s", True),
        ("a 1", "a 1 2", False),
    ],
)
def test_numbers_are_compared_with_a_tolerance(shown: str, printed: str, agree: bool) -> None:
    assert same(shown, printed) is agree


def test_lines_that_a_page_leaves_out_are_left_out() -> None:
    assert abridged("a\nb\nc\nd\ne\n", "a\n...\ne\n") == "a\n...\ne\n"
    assert abridged("head\nb 1\nc\nd\n", "b 1\nc\n") == "b 1\nc\n"


def test_output_of_a_failing_command_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.printed_outputs.ROOT", tmp_path)
    for name in ("examples", "docs/examples"):
        (tmp_path / name).mkdir(parents=True)
    page = "```\n$ cat a.txt\n7\n\n$ cat b\\ c\nold\n\n$ cat a.txt | tr 7 8\n9\n```\n"
    (tmp_path / "page.md").write_text(page)
    differences, failed = regenerate("page.md", check=False)
    assert failed and len(differences) == 2
    assert (tmp_path / "page.md").read_text() == page.replace("9\n", "8\n")


def test_files_of_the_commands_in_the_readme_exist() -> None:
    commands = re.findall(r"^cdmpp [^\n]*", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = {name for command in commands for name in re.findall(r"(?:docs/)?examples/[\w./-]+", command)}
    assert named and all((ROOT / name.rstrip(".")).exists() for name in named)
    tables = [word for command in commands for word in command.split() if word.endswith((".csv", ".parquet"))]
    assert all((ROOT / name).exists() for name in tables if name not in ("answers.parquet",))
