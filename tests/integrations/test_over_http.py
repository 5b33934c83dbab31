"""The same cost model with a URL in place of a model: scores of a real server on loopback."""

from __future__ import annotations

import numpy as np
import pytest

from cdmpp.devices.spec import DeviceSpec
from cdmpp.predict.predictor import LatencyPredictor
from tests.integrations.conftest import Draw
from tests.predict.client.conftest import Serve, serve

__all__ = ["serve"]

pytestmark = pytest.mark.tvm
pytest.importorskip("tvm")


@pytest.mark.slow
def test_a_server_gives_the_scores_of_the_model_in_this_process(
    draw: Draw, predictor: LatencyPredictor, device: DeviceSpec, serve: Serve
) -> None:
    from tvm.s_tir import meta_schedule as ms

    from cdmpp.integrations.metaschedule import CdmppCostModel

    context, candidates = draw(40)
    sources = (serve(deadline_s=60), predictor)
    models = [CdmppCostModel(source, device=device, update="fine-tune") for source in sources]
    over_http, here = (model.predict(context, candidates) for model in models)
    np.testing.assert_array_equal(over_http, here)
    assert models[0].model_id == predictor.model_id
    # What is learned from runs is learned on this side.
    runs = [ms.runner.RunnerResult([1e-6 * (1 + i % 7)], None) for i in range(16)]
    for model in models:
        model.update(context, candidates[:16], runs)
    over_http, here = (model.predict(context, candidates) for model in models)
    np.testing.assert_array_equal(over_http, here)
    models[0].close()
    models[1].close()  # nothing to end
