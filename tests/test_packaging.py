"""Packaging: pinned dependencies, the content of the wheel, and the files that describe the project."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from itertools import chain
from pathlib import Path

import pytest
import yaml

import cdmpp
from tests.waiting import ROOT, run_python

pytestmark = pytest.mark.slow

VERSION = cdmpp.__version__
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    entries = (line.split("==") for line in lines if line and not line.startswith("#"))
    return {name.lower().replace("_", "-"): version for name, version in entries}


def test_every_dependency_is_pinned() -> None:
    requirements = [*PROJECT["dependencies"], *chain.from_iterable(PROJECT["optional-dependencies"].values())]
    names = {re.split(r"[\[=<>; ]", text)[0].lower() for text in requirements} - {"cdmpp"}
    assert names - set(pins()) == set()


@pytest.mark.parametrize("name", ["torch", "apache-tvm", "apache-tvm-ffi"])
def test_pinned_version_is_installed(name: str) -> None:
    assert importlib.metadata.version(name).partition("+")[0] == pins()[name]


def test_extra_all_contains_every_extra() -> None:
    extras = set(PROJECT["optional-dependencies"]) - {"all"}
    assert PROJECT["optional-dependencies"]["all"] == [f"cdmpp[{','.join(sorted(extras))}]"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheel built from a copy of the files that it needs."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("cdmpp", "server", "models"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    done = run_python("-m", "build", "--wheel", "--no-isolation", "--outdir", out, source)
    assert done.returncode == 0, done.stderr[-2000:]
    (path,) = out.glob("*.whl")
    return path


def test_wheel_contains_two_packages_and_the_model(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.partition("/")[0] for name in names}
    assert top == {"cdmpp", "cdmpp_server", f"cdmpp-{VERSION}.dist-info"}
    model = {"manifest.json", "model.safetensors", "programs.json", "errors.json"}
    assert {f"cdmpp/_models/base/{name}" for name in model} <= set(names)
    assert {"cdmpp/py.typed", "cdmpp/__main__.py", "cdmpp/programs/templates.json.gz"} <= set(names)
    assert not [name for name in names if "__pycache__" in name or "/tests/" in name]


def test_wheel_metadata_passes_twine_check(wheel: Path) -> None:
    done = run_python("-m", "twine", "check", "--strict", wheel)
    assert done.returncode == 0, done.stdout + done.stderr


def test_unpacked_wheel_predicts(wheel: Path, tmp_path: Path) -> None:
    """``python -m cdmpp`` with the wheel's content alone on the path, outside of the checkout."""
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    command = [sys.executable, "-m", "cdmpp", "predict", "linear:m=64,n=64,k=64", "--device", "t4"]
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "t4" in done.stdout


@pytest.mark.parametrize(
    ("schema", "files"),
    [
        ("vendor.github-workflows", ".github/workflows/*.yml"),
        ("vendor.github-issue-forms", ".github/ISSUE_TEMPLATE/[!c]*.yml"),
        ("vendor.citation-file-format", "CITATION.cff"),
    ],
)
def test_project_file_matches_its_schema(schema: str, files: str) -> None:
    paths = sorted(map(str, ROOT.glob(files)))
    assert paths
    done = run_python("-m", "check_jsonschema", "--builtin-schema", schema, *paths)
    assert done.returncode == 0, done.stdout + done.stderr


def test_pre_commit_hooks_are_local() -> None:
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert {repo["repo"] for repo in config["repos"]} == {"local"}


def test_versions_and_release_date_agree() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert citation["version"] == VERSION
    assert f"## {VERSION} - {citation['date-released']}" in changelog


def test_every_public_name_is_in_the_api_reference() -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    names = {name for name in cdmpp.__all__ if name != "__version__" and not name.endswith("Error")}
    assert {name for name in names if not re.search(rf"^::: cdmpp\.[\w.]*\b{name}$", page, re.MULTILINE)} == set()
    assert "::: cdmpp.errors" in page


def test_every_page_is_in_the_navigation() -> None:
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    assert pages == set(re.findall(r"- ([\w./-]+\.md)$", navigation, re.MULTILINE))


def test_shell_completion_lists_the_commands() -> None:
    words = {"_CDMPP_COMPLETE": "complete_bash", "COMP_WORDS": "cdmpp pre", "COMP_CWORD": "1"}
    done = run_python("-c", "from cdmpp.cli.main import main; main()", **words)
    assert "predict" in done.stdout, done.stderr
