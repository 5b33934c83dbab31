"""The 16-bit form of a program with narrow types, from which predictions of untrained types are derived."""

import numpy as np
import pytest

from cdmpp.features.encode import encode_as, encode_operator
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.operators import parse_operator

NARROW = {
    "linear:m=64,n=512,k=256,dtype=fp8,scaling=channel": "linear:m=64,n=512,k=256,dtype=float16",
    "linear:m=64,n=512,k=256,dtype=bf16,weight_dtype=int4": "linear:m=64,n=512,k=256,dtype=float16",
    "linear:m=64,n=512,k=256,dtype=fp8,layout=nn": "linear:m=64,n=512,k=256,dtype=float16,layout=nn",
    "moe:tokens=8,hidden=64,intermediate=64,experts=4,topk=2,dtype=nvfp4,balance=power_law_1.2": (
        "moe:tokens=8,hidden=64,intermediate=64,experts=4,topk=2,dtype=float16,balance=power_law_1.2"
    ),
    "mla_decode:batch=2,past_len=64,heads=4,dtype=bf16,kv_dtype=fp8,module=true,weight_dtype=fp8": (
        "mla_decode:batch=2,past_len=64,heads=4,dtype=float16,module=true"
    ),
}


@pytest.mark.parametrize(("narrow", "half"), NARROW.items())
def test_form_has_the_features_of_the_same_program_in_one_type(narrow, half):
    spec = parse_operator(narrow)
    sizes = np.array([list(spec.sizes().values())])
    form, wanted = encode_as(spec.structural_class(), "float16", sizes), encode_operator(parse_operator(half))
    assert np.array_equal(form.leaves, wanted.leaves)
    assert np.array_equal(form.totals, wanted.totals)


def test_predictor_answers_every_combination_of_types():
    predictor = LatencyPredictor.load()
    for prediction in predictor.predict(list(NARROW), "h100-sxm"):
        assert prediction.latency_s > 0
