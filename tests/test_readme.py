"""The README is short, its example prints the output shown, and its links exist."""

import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks.architecture import PATH, floors, picture
from benchmarks.figures import SOURCES
from benchmarks.report.known import title
from cdmpp.cli.main import app
from cdmpp.devices import known

README = Path("README.md").read_text(encoding="utf-8")
FOLDERS = (
    *("cdmpp", "server", "tests", "docs", "configs", "benchmarks", "examples", "notebooks", "models", "deploy"),
    "data/cdmpp-measured",
)
#: Written by commands, or files of another project.
ELSEWHERE = {
    "docs/server.md: cdmpp/compiled",
    "docs/server.md: cdmpp/service-*.sqlite",
    "docs/exports.md: models/*/__init__.py",
}
_NUMBER = re.compile(r"\d+\.\d+")


def test_first_example_prints_the_output_shown() -> None:
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", README, flags=re.DOTALL)[:2]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(code, "README.md", "exec"), {})
    assert _NUMBER.sub("#", out.getvalue()).split() == _NUMBER.sub("#", shown).split()
    printed, written = (list(map(float, _NUMBER.findall(text))) for text in (out.getvalue(), shown))
    assert printed == pytest.approx(written, rel=1e-3)


def test_language_model_example_prints_the_table_shown() -> None:
    command, shown = re.findall(r"```\n(cdmpp llm .*?)\n```\n\n```\n(.*?)```", README, flags=re.DOTALL)[0]
    result = CliRunner().invoke(app, shlex.split(command)[1:])
    assert result.exit_code == 0
    printed = "\n".join(result.output.splitlines()[1 : 1 + len(shown.splitlines())])
    assert _NUMBER.sub("#", printed).split() == _NUMBER.sub("#", shown).split()


def test_linked_files_exist() -> None:
    missing = [name for name in re.findall(r"\]\(([\w./-]+)\)", README) if not Path(name).exists()]
    assert not missing


def test_named_files_of_the_repository_exist() -> None:
    """Paths in backticks that begin with a folder of the repository. Capitals stand for a name, ``*`` for several."""
    missing = []
    for page in (Path("README.md"), Path("CONTRIBUTING.md"), Path("SECURITY.md"), *Path("docs").rglob("*.md")):
        for name in re.findall(rf"`((?:{'|'.join(FOLDERS)})/[\w.*/-]*)`", page.read_text(encoding="utf-8")):
            pattern = re.sub(r"[A-Z]{3,}", "*", name) if "*" in name or "NAME" in name else ""
            if not (any(Path().glob(pattern)) if pattern else Path(name).exists()):
                missing.append(f"{page}: {name}")
    assert set(missing) <= ELSEWHERE


def test_readme_has_at_most_250_lines_beside_the_screen_of_the_demonstration() -> None:
    text = re.sub(r"```\nmodel .*?\n```", "", README, flags=re.DOTALL)
    assert len(text.splitlines()) <= 250


def test_table_and_figure_use_the_same_rows() -> None:
    """The figure has one panel per source of the sample; the table has one row for each of them."""
    errors = json.loads(Path("models/base/errors.json").read_text(encoding="utf-8"))
    sources = set(errors["sample"]["source"])
    assert sources <= set(SOURCES)
    rows = README.partition("<!-- generated:known -->")[2].partition("<!-- end -->")[0].strip().splitlines()[2:]
    assert {row.split("|")[1].strip() for row in rows} == {title(source) for source in sources}


def test_changelog_states_the_number_of_known_devices() -> None:
    changelog = Path("CHANGELOG.md").read_text(encoding="utf-8")
    assert f"{len(known())} known devices" in changelog


def test_picture_of_the_rooms_has_the_present_layers() -> None:
    assert set(PATH) <= {room for floor in floors() for room in floor}
    assert Path("docs/architecture.svg").read_text(encoding="utf-8") == picture(), "run make figures"
