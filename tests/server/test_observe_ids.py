"""prediction_id: round trip, and refusal of every other text."""

import re
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cdmpp.predict.prediction import ErrorInfo, Prediction
from cdmpp.programs.query_options import BACKENDS, FRAMEWORKS, PROTOCOLS
from cdmpp_server.observe.ids import MAX_ID, Signer

QUERY = ("0123456789abcdef" * 2, "t4", "library", "eager", "pytorch", "base-05a1db0f61a3")
FIGURES = {"domain": "in", "domain_score": 0.1, "roofline_s": 5e-4}
ANSWER = Prediction("linear:m=1", *QUERY, latency_s=1.1e-3, lower_s=1e-3, upper_s=2e-3, **FIGURES)
DIGEST = "00ff" * 4
KEY = b"the key of a test"
SIGNER = Signer(KEY)
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
        **FIGURES,
    )


def token(answer: Prediction, digest: str = DIGEST, signer: Signer = SIGNER) -> str:
    return signer.receipts(1)[0] + signer.content(answer, digest)


@given(answer=answers(), digest=st.text(hexadecimal, min_size=16, max_size=16))
def test_id_round_trip(answer: Prediction, digest: str) -> None:
    text = token(answer, digest)
    assert len(text) <= MAX_ID
    assert re.fullmatch("[A-Za-z0-9_-]+", text)
    assert SIGNER.content(answer, digest) == SIGNER.content(answer, digest)
    read = Signer(KEY).read(text)  # another worker
    same = ("program_hash", "backend", "protocol", "framework", "latency_s", "lower_s", "upper_s")
    assert [getattr(read, name) for name in same] == [getattr(answer, name) for name in same]
    assert read.device_digest == digest
    for name, sent, limit in ((read.device, answer.device, 110), (read.model_id, answer.model_id, 98)):
        assert name == sent if len(sent.encode()) <= limit else len(name.encode()) <= limit


def test_long_names_stay_distinct_and_within_the_limit() -> None:
    one, two = (token(replace(ANSWER, device="ü" * 99 + end, model_id="ü" * 300)) for end in "ab")
    assert len(one) <= MAX_ID
    assert SIGNER.read(one).device != SIGNER.read(two).device
    assert SIGNER.read(one).device.startswith("ü" * 50)


def test_control_characters_of_a_name_do_not_reach_the_database() -> None:
    assert SIGNER.read(token(replace(ANSWER, device="a\x00b\n"))).device == "a?b?"


def test_results_of_a_response_have_different_receipts() -> None:
    for count in (0, 1, 2, 63, 64, 65, 300):
        receipts = SIGNER.receipts(count)
        assert len({SIGNER.read(receipt + SIGNER.content(ANSWER, DIGEST)).receipt for receipt in receipts}) == count


@example(position=31, other="/")
@example(position=3, other="A")
@given(position=st.integers(min_value=0), other=st.characters(codec="ascii"))
def test_changed_character_is_detected(position: int, other: str) -> None:
    text = token(ANSWER)
    position %= len(text)
    changed = text[:position] + other + text[position + 1 :]
    if changed == text:
        assert SIGNER.read(changed) == SIGNER.read(text)
    else:
        with pytest.raises(ValueError, match="prediction_id"):
            SIGNER.read(changed)


@given(st.text(max_size=500))
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="prediction_id"):
        SIGNER.read(text)


@given(st.integers(min_value=0, max_value=400))
def test_cut_id_is_refused(length: int) -> None:
    text = token(ANSWER)
    if length < len(text):
        with pytest.raises(ValueError, match="prediction_id"):
            SIGNER.read(text[:length])


def test_id_of_another_service_is_refused() -> None:
    other = Signer(b"another key")
    for text in (
        token(ANSWER, signer=other),
        other.receipts(1)[0] + SIGNER.content(ANSWER, DIGEST),
        SIGNER.receipts(1)[0] + other.content(ANSWER, DIGEST),
    ):
        with pytest.raises(ValueError, match="not one of this service"):
            SIGNER.read(text)


def test_prediction_with_an_error_has_no_id() -> None:
    failed = Prediction("p", None, "t4", "library", "kernel", None, "m", error=ErrorInfo("c", "m"))
    with pytest.raises(ValueError, match="with an error has no id"):
        SIGNER.content(failed, DIGEST)
