"""Random seeds of parametrised tests: five in every run, the others in ``make test-nightly``."""

from typing import Any

import pytest

EVERY_RUN = 5


def seeds(count: int) -> list[Any]:
    """Seeds 0 to ``count`` - 1 as parameters of a test."""
    return [pytest.param(seed, marks=pytest.mark.nightly if seed >= EVERY_RUN else ()) for seed in range(count)]
