"""Scheduled programs that the tests of the studies share."""

import pytest

from benchmarks.schedules.parts import Scheduled
from cdmpp.train.config import TrainConfig
from tests.benchmarks.scheduled import write_folder


@pytest.fixture(scope="session")
def scheduled_config(tmp_path_factory: pytest.TempPathFactory) -> TrainConfig:
    return write_folder(tmp_path_factory.mktemp("scheduled"))


@pytest.fixture(scope="session")
def scheduled(scheduled_config: TrainConfig) -> Scheduled:
    return Scheduled.load(scheduled_config)
