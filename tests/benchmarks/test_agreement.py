"""Random predictions agree: the limits of benchmarks/agreement.py on a small walk."""

import pytest

from benchmarks.agreement import walk
from cdmpp import LatencyPredictor


@pytest.mark.slow
def test_random_predictions_keep_to_the_limits() -> None:
    counts, predictions = walk(LatencyPredictor.load(), 300, seed=5)
    assert predictions > 3000
    assert counts.rate("roofline") < 1e-3, counts.examples
    assert counts.rate("engines") < 0.01, counts.examples
    assert counts.rate("unmeasured") <= 0.005, counts.examples
    assert counts.rate("monotone") < 2e-3, counts.examples
    assert counts.rate("siblings") < 0.02, counts.examples
    assert counts.rate("fused") == 0.0, counts.examples
