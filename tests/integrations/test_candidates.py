"""Features of candidates: those of every other door, each distinct program once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cdmpp.features.encode import encode_tvm_json
from tests.integrations.conftest import Draw

pytestmark = pytest.mark.tvm
pytest.importorskip("tvm")


def test_features_are_those_of_the_programs_text(tvm: Any, draw: Draw) -> None:
    from cdmpp.integrations.candidates import CandidateEncoder

    _, candidates = draw(6)
    found = CandidateEncoder().encode([c.sch.mod for c in candidates])
    for each, candidate in zip(found, candidates, strict=True):
        assert each is not None
        again = encode_tvm_json(str(tvm.ir.save_json(candidate.sch.mod["main"])), schedule=True)
        np.testing.assert_array_equal(each.features.leaves, again.leaves)
        np.testing.assert_array_equal(each.features.positions, again.positions)
        np.testing.assert_array_equal(each.features.totals, again.totals)


def test_equal_programs_are_encoded_once_and_the_oldest_forgotten(draw: Draw) -> None:
    from cdmpp.integrations.candidates import CandidateEncoder

    modules = [c.sch.mod for c in draw(4)[1]]
    # The same draw again: other objects of the same structure.
    again = [c.sch.mod for c in draw(4)[1]]
    encoder = CandidateEncoder(kept=2)
    first = encoder.encode(modules)
    assert first[3] is encoder.encode([again[3]])[0]
    assert first[0] is not encoder.encode([again[0]])[0]
    assert first[3] is not encoder.encode([again[3]], "another target")[0]
