"""A pool may be called like a domain: the text says where it is the name of a pool."""

import re

import pytest

from cdmpp import make_plan
from cdmpp.plan.registry import PLANNERS
from cdmpp.predict.rendering import render
from cdmpp_server.plan.warm import REQUESTS


@pytest.mark.parametrize("layout", ["separate", "shared"])
def test_names_of_pools_are_quoted(layout: str) -> None:
    request = {**REQUESTS["rl"][0], "layout": layout, "pools": [{"name": "near", "units": 4}]}
    (model,) = PLANNERS["rl"].models()
    text = render(model.answer_model().model_validate(make_plan("rl", request)).tables())
    assert "units of pool 'near'" in text
    assert not re.search(r"(?<!')\bnear\b(?!')", text)
