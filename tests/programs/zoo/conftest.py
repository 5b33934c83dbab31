"""All networks lowered once for all tests of this folder: some twenty seconds of CPU."""

from collections.abc import Callable
from functools import cache

import pytest

from cdmpp.programs.frontends.tasks import TaskList, network_tasks


@pytest.fixture(scope="session")
def lowered() -> Callable[[str], TaskList]:
    """``network_tasks`` that remembers."""
    return cache(network_tasks)
