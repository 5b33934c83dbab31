"""prediction_id: round trip, and refusal of every other text."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdmpp.prediction import ErrorInfo, Prediction
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS
from cdmpp_server.observe.ids import MAX_ID, make_id, read_id

ANSWER = Prediction(
    "linear:m=1",
    "0123456789abcdef" * 2,
    "t4",
    "library",
    "eager",
    "pytorch",
    "base-05a1db0f61a3",
    latency_s=1.1e-3,
    lower_s=1e-3,
    upper_s=2e-3,
    domain="in",
    domain_score=0.1,
    roofline_s=5e-4,
)
DIGEST = "00ff" * 4
seconds = st.floats(min_value=1e-9, max_value=1e6)
hexadecimal = st.sampled_from("0123456789abcdef")
names = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=100)


@st.composite
def answers(draw: st.DrawFn) -> Prediction:
    lower, latency, upper = sorted(draw(st.tuples(seconds, seconds, seconds)))
    return Prediction(
        "p",
        draw(st.text(hexadecimal, min_size=32, max_size=32)),
        draw(names),
        draw(st.sampled_from(BACKENDS)),
        draw(st.sampled_from(PROTOCOLS)),
        draw(st.sampled_from([None, *FRAMEWORKS])),
        draw(names),
        latency_s=latency,
        lower_s=lower,
        upper_s=upper,
        domain="in",
        domain_score=0.0,
        roofline_s=1e-6,
    )


@given(answer=answers(), digest=st.text(hexadecimal, min_size=16, max_size=16))
def test_id_round_trip(answer: Prediction, digest: str) -> None:
    text = make_id(answer, digest)
    assert len(text) <= MAX_ID
    assert re.fullmatch("[A-Za-z0-9_-]+", text)
    assert make_id(answer, digest) == text
    read = read_id(text)
    same = ("program_hash", "backend", "protocol", "framework", "latency_s", "lower_s", "upper_s")
    assert [getattr(read, name) for name in same] == [getattr(answer, name) for name in same]
    assert read.device_digest == digest
    for name, sent, limit in ((read.device, answer.device, 120), (read.model_id, answer.model_id, 110)):
        assert name == sent if len(sent.encode()) <= limit else len(name.encode()) <= limit


def test_long_names_stay_distinct() -> None:
    one, two = (make_id(replace(ANSWER, device="ü" * 99 + end), DIGEST) for end in "ab")
    assert len(one) <= MAX_ID
    assert read_id(one).device != read_id(two).device
    assert read_id(one).device.startswith("ü" * 50)


@example(position=31, other="/")
@given(position=st.integers(min_value=0), other=st.characters(codec="ascii"))
def test_changed_character_is_detected(position: int, other: str) -> None:
    text = make_id(ANSWER, DIGEST)
    position %= len(text)
    changed = text[:position] + other + text[position + 1 :]
    if changed == text:
        assert read_id(changed) == read_id(text)
    else:
        with pytest.raises(ValueError):
            read_id(changed)


@given(st.text(max_size=500))
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="prediction_id"):
        read_id(text)


@given(st.binary(min_size=70, max_size=290))
def test_valid_checksum_with_invalid_content_is_refused(content: bytes) -> None:
    raw = b"\x01" + content
    text = base64.urlsafe_b64encode(raw + hashlib.blake2b(raw, digest_size=6).digest()).rstrip(b"=").decode()
    try:
        read = read_id(text)
    except ValueError as error:
        assert "prediction_id" in str(error)
    else:
        assert 0 < read.lower_s <= read.latency_s <= read.upper_s


def test_prediction_with_an_error_has_no_id() -> None:
    failed = Prediction("p", None, "t4", "library", "kernel", None, "m", error=ErrorInfo("c", "m"))
    with pytest.raises(ValueError, match="with an error has no id"):
        make_id(failed, DIGEST)
