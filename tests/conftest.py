"""Fixtures that many tests share, the order of the test files, and skips for missing tools."""

import asyncio
import importlib.util
import inspect
import os
import shutil
from collections.abc import Iterator

import pytest
from hypothesis import settings

from cdmpp.predict.predictor import LatencyPredictor
from tests.waiting import PATIENT

# Several processes test at once. With more threads than processors OpenMP waits in busy loops: four times the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# An example may take as long as it takes: the time limit of the test ends one that hangs.
settings.register_profile("tests", deadline=None)
settings.load_profile("tests")


@pytest.fixture(scope="session", autouse=True)
def _service_settings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Services of tests store their database in a folder of this run and do not time out on a busy machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        # Applications that are called directly get any name or none; tests/server/test_hosts.py is about names.
        patch.setenv("CDMPP_ALLOWED_HOSTS", "*")
        for name, value in PATIENT.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="session")
def predictor() -> LatencyPredictor:
    """The model that ships with the package."""
    return LatencyPredictor.load()


@pytest.fixture(scope="module")
def shipped_model_is_loaded_once(predictor: LatencyPredictor) -> Iterator[None]:
    """Commands that run in this process take the shipped model from ``predictor``."""
    load = LatencyPredictor.load
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LatencyPredictor, "load", lambda path=None: predictor if path is None else load(path))
        yield


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run an ``async def`` test in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put notebooks and files with slow tests first, and skip tests whose tool is missing."""
    slow = {item.path for item in items if item.path.suffix == ".ipynb" or item.get_closest_marker("slow")}
    # None of them is left at the end of a run with several processes. Tests of a file stay together.
    items.sort(key=lambda item: item.path not in slow)
    needs = {
        "native": (("cc", "gcc", "clang"), "needs a C compiler (cc, gcc or clang); then: make test-native"),
        "browser": (("chromium", "chromium-browser", "google-chrome"), "needs chromium; then: make test-browser"),
        "gpu": (("nvidia-smi", "rocm-smi"), "needs a GPU and its driver"),
    }
    without_tvm = importlib.util.find_spec("tvm") is None
    for item in items:
        if without_tvm and item.get_closest_marker("tvm"):
            item.add_marker(pytest.mark.skip(reason="needs apache-tvm"))
        for marker, (tools, reason) in needs.items():
            if item.get_closest_marker(marker) and not any(map(shutil.which, tools)):
                item.add_marker(pytest.mark.skip(reason=reason))
