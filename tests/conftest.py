"""Fixtures that many tests share, the order of the test files, and skips for missing tools."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from cdmpp.predict.predictor import LatencyPredictor
from tests.waiting import PATIENT

#: Files whose tests start many processes, compile or train, longest first: they are marked slow and run first, so that
#: none of them is left at the end of a run with several processes.
SLOW_FILES = (
    "tests/benchmarks/test_smoke.py",
    "tests/server/test_process.py",
    "tests/data/measure/test_collect.py",
    "tests/programs/zoo/test_lowering.py",
    "tests/server/test_reload.py",
    "tests/server/test_jobs_process.py",
    "tests/server/test_page.py",
    "tests/plan/distributed/test_tables.py",
    "tests/plan/distributed/test_cluster.py",
    "tests/plan/distributed/test_sweep.py",
    "tests/plan/distributed/test_seeds.py",
    "tests/server/test_sandbox.py",
    "tests/data/measure/test_archive.py",
    "tests/data/measure/test_remote.py",
    "tests/model/nn/test_loop.py",
    "tests/integrations/test_measuring.py",
    "tests/server/test_adapt.py",
    "tests/data/measure/test_tuning.py",
    "tests/test_packaging.py",
    "tests/server/test_connections.py",
    "tests/server/test_serving.py",
    "tests/data/measure/test_pools.py",
    "tests/integrations/test_metaschedule.py",
    "tests/integrations/test_online.py",
    "tests/integrations/test_sklearn.py",
    "tests/train/test_run.py",
    "tests/train/test_ranks.py",
    "tests/server/test_store.py",
    "tests/server/test_fuzz.py",
    "tests/server/test_three_doors.py",
    "tests/server/test_observe_postgres.py",
    "tests/server/test_observe_process.py",
    "tests/train/adaptation/test_adapt.py",
    "tests/plan/test_multimodal.py",
    "tests/plan/test_rl_limits.py",
    "tests/plan/test_rl_mix.py",
    "tests/plan/test_rl_check.py",
    "tests/plan/test_multimodal_designs.py",
    "tests/programs/zoo/test_numerics.py",
    "tests/features/test_class_way.py",
    "tests/test_without_torch.py",
    "tests/test_regression_gate.py",
    "tests/stored_answers/test_stored_answers.py",
    "tests/cli/test_command.py",
    "tests/train/test_reference.py",
    "tests/train/test_domain.py",
    "tests/train/test_baselines.py",
    "tests/server/test_plans.py",
    "tests/server/test_adapt_process.py",
    "tests/server/test_proposals.py",
    "tests/predict/client/test_transport.py",
    "tests/train/evaluation/test_tables.py",
    "tests/programs/test_lowering_runs.py",
    "tests/features/test_hostile_json.py",
    "tests/model/nn/test_engine.py",
    "tests/model/nn/test_artifact.py",
    "tests/plan/test_precision_search.py",
    "tests/plan/test_rl_dispatch.py",
    "tests/plan/test_fused.py",
    "tests/data/measure/test_sampling.py",
    "tests/simulate/traces/test_recorded.py",
    "tests/cli/test_replay_trace.py",
    "tests/cli/test_replay.py",
    "tests/cli/test_eval.py",
    "tests/cli/test_curve.py",
    "tests/cli/test_predict.py",
    "tests/programs/frontends/test_tasks.py",
    "tests/server/test_hosts.py",
    "tests/cli/test_train_and_serve.py",
    "tests/predict/client/test_plans.py",
    "tests/plan/test_multimodal_1f1b.py",
    "tests/server/test_quotas.py",
    "tests/plan/test_afd.py",
    "tests/test_unseen_shapes.py",
    "tests/test_end_to_end.py",
)


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import slow files where slow tests are deselected."""
    if config.option.markexpr != "not slow":
        return None
    return True if any(collection_path.match(file) for file in SLOW_FILES) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put slow files and notebooks first, mark slow files, and skip tests whose tool is missing."""
    position = {file: number for number, file in enumerate(SLOW_FILES)}

    def rank(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        return 4 if file.endswith(".ipynb") else position.get(file, len(position))

    for item in items:
        if item.nodeid.partition("::")[0] in position:
            item.add_marker("slow")
    items.sort(key=rank)
    needs = {
        "native": (("cc", "gcc", "clang"), "needs a C compiler (cc, gcc or clang); then: make test-native"),
        "browser": (("chromium", "chromium-browser", "google-chrome"), "needs chromium; then: make test-browser"),
        "gpu": (("nvidia-smi", "rocm-smi"), "needs a GPU and its driver"),
    }
    for item in items:
        for marker, (tools, reason) in needs.items():
            if item.get_closest_marker(marker) and not any(map(shutil.which, tools)):
                item.add_marker(pytest.mark.skip(reason=reason))
