"""The label and reason of a domain agree at all interfaces: support, single predictions, totals, curves, modules."""

from typing import Any

import pytest

from cdmpp.model.domain.score import LABELS
from cdmpp.predict.curves.plan import predict_curve
from cdmpp.predict.curves.template import Template
from cdmpp.predict.prediction import Prediction, Query
from cdmpp.predict.prediction_total import PredictionTotal
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.support import domain_on
from cdmpp.programs.operators import lowered_operators
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import PROTOCOLS

#: Sizes of layers as training has them; other required fields are 8.
SIZES = {"rows": 4096, "cols": 1024, "m": 512, "n": 1024, "k": 1024, "q_len": 512, "heads": 16, "kv_heads": 16}
SIZES |= {"head_dim": 128, "v_dim": 128, "tokens": 512, "hidden": 4096, "intermediate": 1536, "experts": 64, "h": 56}
SIZES |= {"w": 56, "c": 64, "c_in": 64, "c_out": 64, "kh": 3, "kw": 3, "past_len": 2048, "decode_past_len": 2048}
SIZES |= {"table_rows": 32768, "topk": 8}
DEVICES = ["t4", "v100-sxm2-32gb", "p100-pcie-16gb", "a100-sxm4-80gb", "h100-sxm", "b200", "b300", "rtx-2080-ti"]
DEVICES += ["mi100", "mi300x", "rx-6800-xt", "titan-xp", "rtx-3090", "l4"]


def program(operator: str, dtype: str) -> TensorProgram | None:
    """A layer of usual sizes; None for a type that the operator has only with a scaling."""
    kind = lowered_operators()[operator]
    fields: dict[str, Any] = {
        name: SIZES.get(name, 8)
        for name, field in kind.model_fields.items()
        if field.is_required() and name not in ("operator", "dtype")
    }
    if operator.startswith("attention_encoder") or operator.endswith("prefill"):
        fields["q_len"] = 512
    if operator.endswith("decode"):
        fields["past_len"] = 2048
    if operator in ("avg_pool2d", "max_pool2d", "batch_norm", "conv2d"):
        fields["n"] = 8
    try:
        return TensorProgram.from_operator({"operator": operator, "dtype": dtype, **fields})
    except ValueError:
        return None


@pytest.fixture(scope="module")
def sweep(predictor: LatencyPredictor) -> dict[tuple[str, str, str, str], Prediction]:
    """Predictions by operator, type, device and protocol."""
    programs = {
        (operator, dtype): made
        for operator, kind in lowered_operators().items()
        for dtype in kind.dtypes
        if (made := program(operator, dtype)) is not None
    }
    keys = [(*key, device, protocol) for key in programs for device in DEVICES for protocol in PROTOCOLS]
    queries = [Query(programs[key[0], key[1]], key[2], key[3]) for key in keys]
    return dict(zip(keys, predictor.predict_queries(queries), strict=True))


def test_every_doubtful_prediction_has_a_reason(sweep: dict[tuple[str, str, str, str], Prediction]) -> None:
    predicted = {key: p for key, p in sweep.items() if p.error is None}
    assert len(predicted) > 5_000
    assert [key for key, p in predicted.items() if p.domain != "in" and not p.domain_reason] == []


def test_no_prediction_is_better_than_its_cell_of_support(
    predictor: LatencyPredictor, sweep: dict[tuple[str, str, str, str], Prediction]
) -> None:
    rows = {(row["operator"], row["dtype"]): row for row in predictor.support()["matrix"]["rows"] if not row["scaling"]}
    better = [
        (key, prediction.domain)
        for key, prediction in sweep.items()
        if key[:2] in rows and LABELS.index(prediction.domain or "out") < LABELS.index(domain_on(rows[key[:2]], key[2]))
    ]
    assert better == []


def test_type_without_units_is_never_better_than_the_type_of_the_device(
    predictor: LatencyPredictor, sweep: dict[tuple[str, str, str, str], Prediction]
) -> None:
    without = [device for device in DEVICES if not predictor.artifact.device(device).has_units("bfloat16")]
    assert {"t4", "v100-sxm2-32gb", "rtx-2080-ti"} <= set(without) and "a100-sxm4-80gb" not in without
    for (operator, dtype, device, protocol), prediction in sweep.items():
        other = sweep.get((operator, "float16", device, protocol))
        if dtype != "bfloat16" or device not in without or other is None or prediction.error or other.error:
            continue
        assert LABELS.index(prediction.domain or "out") >= LABELS.index(other.domain or "out"), (operator, device)
        if prediction.domain == "out":
            assert prediction.domain_reason
        if device == "t4":
            assert "no units for bfloat16" in (prediction.domain_reason or "")


@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "bfloat16"), ("bfloat16", "float32")])
def test_curve_and_total_have_one_domain(predictor: LatencyPredictor, dtypes: tuple[str, str]) -> None:
    sizes = "rows=4096,cols=1024", "rows=64,cols=64"
    texts = [f"add:{size},dtype={dtype}" for size, dtype in zip(sizes, dtypes, strict=True)]
    predictions = predictor.predict(texts, "t4", protocol="eager")
    total = PredictionTotal.of((p, 1) for p in predictions)
    templates = [Template.parse(text.replace("4096", "n")) for text in texts]
    [only] = predict_curve(predictor, templates, {"n": [4096]}, ["t4"], protocol="eager").points
    assert (only.domain, only.domain_reason, only.latency_s) == (total.domain, total.domain_reason, total.latency_s)
    assert (total.domain_reason is None) == all(p.domain == "in" for p in predictions)


def test_kernel_of_a_module_is_not_out_where_its_program_is_in(predictor: LatencyPredictor) -> None:
    torch = pytest.importorskip("torch")
    module = torch.nn.Sequential(torch.nn.Conv2d(64, 64, 3, padding=1), torch.nn.ReLU(), torch.nn.BatchNorm2d(64))
    answer = predictor.predict_module(module, (torch.zeros(8, 64, 56, 56),), "t4")
    alone = predictor.predict([row.prediction.name for row in answer.programs], "t4", protocol="kernel")
    assert any(row.prediction.latency_s != p.latency_s for row, p in zip(answer.programs, alone, strict=True))
    for row, prediction in zip(answer.programs, alone, strict=True):
        assert row.domain != "out" or prediction.domain == "out", row.program
        assert row.domain == "in" or row.prediction.domain_reason
