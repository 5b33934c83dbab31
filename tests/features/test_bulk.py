"""Features in bulk: what is written is read, and nothing of what is read is taken on trust."""

import json
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import save

from cdmpp.devices import known
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError
from cdmpp.features.encode import encode_operator
from cdmpp.features.tensor_bytes import MAX_HEADER_BYTES, read
from cdmpp.predict.bulk import FeatureAnswers, FeaturePart, FeatureQueries
from cdmpp.programs.operators import parse_operator

TEXTS = (
    "linear:m=5,n=6,k=7,dtype=float16",
    "softmax:rows=10,cols=20",
    "attention_prefill:batch=1,q_len=5,heads=4,kv_heads=2,head_dim=64",
)


def queries() -> FeatureQueries:
    parts = []
    for text in TEXTS:
        spec = parse_operator(text)
        for device in ("t4", *known()[:2]):
            parts.append(FeaturePart(encode_operator(spec), spec.operator, device, framework="pytorch"))
    return FeatureQueries.of(parts, quantiles=(0.05, 0.5), model="base-x")


GOOD = queries()
BYTES = GOOD.to_bytes()


def taken_apart() -> tuple[dict[str, np.ndarray[Any, Any]], dict[str, str]]:
    size = int.from_bytes(BYTES[:8], "little")
    header = json.loads(BYTES[8 : 8 + size])
    arrays = {f.name: getattr(GOOD, f.name) for f in fields(GOOD)}
    tensors = {k: v for k, v in arrays.items() if isinstance(v, np.ndarray)}
    return tensors, header["__metadata__"]


def test_write_and_read_round_trip() -> None:
    back = FeatureQueries.from_bytes(BYTES)
    for field in fields(GOOD):
        value, read_back = getattr(GOOD, field.name), getattr(back, field.name)
        if isinstance(value, np.ndarray):
            np.testing.assert_array_equal(value, read_back)
        else:
            assert value == read_back
    assert back.families == ("gemm", "vector", "attention")
    assert back.devices[0] == "t4"


def test_padding_is_never_read() -> None:
    one, many = encode_operator(parse_operator(TEXTS[0])), GOOD.leaves.shape[1]
    real = one.leaves.shape[1]
    assert real < many
    assert GOOD.leaf_count[0] == real
    np.testing.assert_array_equal(GOOD.leaves[0, :real], one.leaves[0])
    assert not GOOD.leaves[0, real:].any()


def test_every_known_device_travels() -> None:
    encoded = encode_operator(parse_operator(TEXTS[0]))
    made = FeatureQueries.of([FeaturePart(encoded, "linear", device) for device in known()])
    assert FeatureQueries.from_bytes(made.to_bytes()).devices == tuple(known())


def test_one_device_is_listed_once() -> None:
    assert len(GOOD.devices) == 3
    assert GOOD.device.tolist() == [0, 1, 2] * 3


def test_no_rows_are_no_rows() -> None:
    empty = FeatureQueries.from_bytes(FeatureQueries.of([]).to_bytes())
    assert len(empty) == 0


def changed(name: str, value: Any) -> bytes:
    tensors, metadata = taken_apart()
    if name in tensors:
        tensors[name] = value(tensors[name].copy())
    else:
        metadata[name] = value
    return bytes(save({k: np.ascontiguousarray(v) for k, v in tensors.items()}, metadata))


def put(place: Any, value: float) -> Any:
    def change(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        array[place] = value
        return array

    return change


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("leaves", put((0, 0, 0), np.nan), "leaves"),
        ("leaves", put((0, 0, 0), np.inf), "leaves"),
        ("leaves", put((0, 0, 0), 3e38), "leaves"),
        ("leaves", lambda a: a[:, :, :50], "columns"),
        ("leaves", lambda a: a.astype(np.float64), "F32"),
        ("leaves", lambda a: a[:, 0], "dimensions"),
        ("leaves", lambda a: a[:, :0], "leaves"),
        ("leaf_count", put(0, 0), "leaf_count"),
        ("leaf_count", put(0, 99), "leaf_count"),
        ("positions", put((0, 0), -1), "positions"),
        ("totals", put((0, 0), -1.0), "totals"),
        ("totals", put((0, 0), np.nan), "totals"),
        ("totals", lambda a: a[:, :4], "totals"),
        ("kind", put(0, 3), "kind"),
        ("kind", lambda a: a[:-1], "rows"),
        ("device", put(0, -1), "device"),
        ("backend", put(0, 2), "backend"),
        ("protocol", put(0, -1), "protocol"),
        ("framework", put(0, 100), "framework"),
        ("format", "something-else", "format"),
        ("feature_schema", "0123", "schema"),
        ("kinds", '[["linear"]]', "kinds"),
        ("kinds", '[["nonsense", "float32"], ["linear", "float32"], ["linear", "float32"]]', "nonsense"),
        ("kinds", '[["linear", "float64"], ["linear", "float32"], ["linear", "float32"]]', "float64"),
        ("kinds", "[" * 100_000, "kinds"),
        ("devices", "{}", "devices"),
        ("devices", '["t4", "t4", 3]', "devices"),
        ("quantiles", "[NaN]", "quantiles"),
        ("quantiles", "[true]", "quantiles"),
        ("quantiles", "[]", "quantiles"),
        ("model", "3", "model"),
    ],
)
def test_impossible_values_are_refused(name: str, value: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        FeatureQueries.from_bytes(changed(name, value))


def test_an_invalid_device_is_named() -> None:
    with pytest.raises(InvalidDeviceError, match="clock_hz"):
        FeatureQueries.from_bytes(changed("devices", '["t4", "t4", {"name": "x"}]'))


def test_tensors_are_neither_missing_nor_unknown() -> None:
    tensors, metadata = taken_apart()
    tensors["extra"] = tensors.pop("totals")
    with pytest.raises(DataError, match=r"missing: totals; unknown: extra"):
        FeatureQueries.from_bytes(save(tensors, metadata))


@pytest.mark.parametrize("huge", [2**63, MAX_HEADER_BYTES + 1, 10**6])
def test_a_header_with_a_wrong_length_is_refused(huge: int) -> None:
    with pytest.raises(DataError, match="header"):
        FeatureQueries.from_bytes(huge.to_bytes(8, "little") + BYTES[8:])


@given(st.binary(max_size=200))
def test_any_bytes_are_refused_in_words(body: bytes) -> None:
    with pytest.raises(DataError):
        FeatureQueries.from_bytes(body)


@given(st.data())
def test_a_damaged_body_is_refused_or_still_a_table(data: st.DataObject) -> None:
    body = bytearray(BYTES)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.one_of(st.integers(0, 1200), st.integers(0, len(body) - 1)))
        body[place] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        body = body[: data.draw(st.integers(0, len(body)))]
    try:
        FeatureQueries.from_bytes(body).check()
    except CdmppError as error:
        assert error.message


def answers(rows: int, model_id: str = "base-x") -> FeatureAnswers:
    drawn = np.random.default_rng(0)
    point = drawn.lognormal(-9.0, 1.0, rows)
    return FeatureAnswers(
        point,
        point * 0.9,
        point * 1.1,
        np.stack([point * 0.9, point * 1.1], 1),
        drawn.integers(0, 3, rows).astype(np.int8),
        point,
        point * 0.5,
        (0.1, 0.9),
        model_id,
    )


def test_answers_travel() -> None:
    batch = answers(7)
    back = FeatureAnswers.from_bytes(batch.to_bytes())
    assert (back.levels, back.model_id, back.labels) == (batch.levels, batch.model_id, batch.labels)
    np.testing.assert_array_equal(back.latency_s, batch.latency_s)
    np.testing.assert_array_equal(back.quantiles, batch.quantiles)
    joined = FeatureAnswers.concat([batch, back])
    np.testing.assert_array_equal(joined.take(np.arange(7, 14)).upper_s, batch.upper_s)


def test_answers_of_two_models_are_no_table() -> None:
    with pytest.raises(DataError, match="several models"):
        FeatureAnswers.concat([answers(2), answers(2, "other")])


def test_answers_with_levels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="levels"):
        FeatureAnswers.from_bytes(replace(answers(2), levels=(0.1,)).to_bytes())


def test_a_tensor_layout_is_exact() -> None:
    body = save({"a": np.zeros((2, 3), np.float32)}, {})
    with pytest.raises(DataError, match="3, not 2"):
        read(body, {"a": ("f32", ("n", "n"))})
