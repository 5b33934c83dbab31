"""Choice of schedules from a pool: order, origins, disagreement and distance."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from cdmpp.data.measure import choosing
from cdmpp.data.measure.choosing import Array, EnsembleChooser
from cdmpp.data.measure.sampling import SampledProgram
from cdmpp.errors import DataError
from cdmpp.features.encode import EncodedPrograms

PROGRAMS = [SampledProgram(str(i), str(i), "sampled" if i else "default") for i in range(8)]


@pytest.fixture(autouse=True)
def numbers_as_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program's text is its only feature; "5" cannot be encoded."""

    def encode(program: SampledProgram) -> EncodedPrograms | None:
        leaves = np.full((1, 1, 2), float(program.tvm_json), dtype=np.float32)
        text = program.tvm_json
        return None if text == "5" else EncodedPrograms(leaves, np.zeros(1), np.zeros((1, 6)), "float32", "tir")

    monkeypatch.setattr(choosing, "_encode", encode)


def member(latencies: dict[int, float]) -> choosing.Member:
    """Log seconds by number; 0 elsewhere."""

    def predict(encoded: Sequence[EncodedPrograms]) -> Array:
        return np.array([latencies.get(int(e.leaves[0, 0, 0]), 0.0) for e in encoded])

    return predict


def test_default_good_random_and_active_schedules_take_turns() -> None:
    members = [member({3: -2.0, 6: 1.0, 7: 0.1}), member({3: -2.0, 6: -0.5, 7: -0.1})]
    chooser = EnsembleChooser(members, pool=7, good=1, active=2, names=("a", "b"))
    chosen = chooser(PROGRAMS, 2)
    assert [(p.hash, p.origin) for p in chosen] == [
        ("0", "default"),
        ("3", "good"),
        ("1", "sampled"),
        ("6", "active"),  # on which the members disagree
        ("2", "sampled"),
        ("7", "active"),
    ]
    assert chooser.description == {"pool": 7, "good": 1, "active": 2, "models": ["a", "b"]}


def test_members_that_agree_leave_the_choice_to_the_distance() -> None:
    chooser = EnsembleChooser([member({1: -1.0})] * 2, pool=7, good=1, active=1, names=("a", "a"))
    assert [p.hash for p in chooser(PROGRAMS, 0)] == ["0", "1", "7"]


def test_a_small_pool_is_taken_whole() -> None:
    chooser = EnsembleChooser([member({})] * 2, pool=7, good=3, active=3, names=("a", "a"))
    assert [p.hash for p in chooser(PROGRAMS[:2], 3)] == ["0", "1"]
    assert len(chooser(PROGRAMS[:4], 1)) == 4


def test_active_choice_needs_two_members() -> None:
    with pytest.raises(DataError, match="1 models cannot choose 1 good and 2 active"):
        EnsembleChooser([member({})], pool=7, good=1, active=2, names=("a",))
