"""A real Ray of two workers on this machine, shared by the tests of this folder."""

from collections.abc import Iterator
from typing import Any

import pytest

from cdmpp.plan.distributed import ray_cluster


# Its twenty processes end with the folder: they would slow down the tests of all others.
@pytest.fixture(scope="package")
def ray() -> Iterator[Any]:
    """The connected module ``ray``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("RAY_ADDRESS", raising=False)
        with ray_cluster(processors=2) as connected:
            yield connected
