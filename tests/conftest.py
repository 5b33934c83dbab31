"""Fixtures that many tests share, and skips that name what is missing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from cdmpp.predictor import LatencyPredictor
from tests.waiting import PATIENT


@pytest.fixture(scope="session", autouse=True)
def _service_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Services of tests store their database in a folder of this run and do not time out on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def predictor() -> LatencyPredictor:
    """The model that ships with the package."""
    return LatencyPredictor.load()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests whose tools pip does not install, naming the tool."""
    needs = {
        "native": (("cc", "gcc", "clang"), "needs a C compiler (cc, gcc or clang); then: make test-native"),
        "browser": (("chromium", "chromium-browser", "google-chrome"), "needs chromium; then: make test-browser"),
        "gpu": (("nvidia-smi", "rocm-smi"), "needs a GPU and its driver"),
    }
    for item in items:
        for marker, (tools, reason) in needs.items():
            if item.get_closest_marker(marker) and not any(map(shutil.which, tools)):
                item.add_marker(pytest.mark.skip(reason=reason))
