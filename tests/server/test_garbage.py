"""Searching for garbage: seldom while an application runs, as before afterwards; cycles still go."""

from __future__ import annotations

import gc
import weakref

from cdmpp_server.gc_tuning import THRESHOLDS, infrequent_gc


def test_searches_are_rare_inside_and_as_before_outside() -> None:
    before = gc.get_threshold()
    with infrequent_gc():
        assert gc.get_threshold() == THRESHOLDS
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_cycles_are_still_found() -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self

    with infrequent_gc():
        gone = weakref.ref(Node())
        # Each stays alive while the next are made: that is what the search counts.
        kept = [[] for _ in range(THRESHOLDS[0] + 10)]
        assert gone() is None
        assert len(kept) > THRESHOLDS[0]
