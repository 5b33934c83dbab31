"""Garbage collection while an application runs: rare, but cycles are still collected."""

from __future__ import annotations

import gc
import weakref

from cdmpp_server.concurrency import THRESHOLDS, infrequent_gc


def test_thresholds_are_higher_inside_and_restored_afterwards() -> None:
    before = gc.get_threshold()
    with infrequent_gc():
        assert gc.get_threshold() == THRESHOLDS
        assert gc.get_freeze_count() > 0
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0


def test_cycles_are_still_collected() -> None:
    class Node:
        def __init__(self) -> None:
            self.me = self

    with infrequent_gc():
        node = weakref.ref(Node())
        # New objects that stay alive trigger a collection. Other threads may free objects and so delay it.
        alive: list[list[None]] = []
        while node() is not None and len(alive) < 100 * THRESHOLDS[0]:
            alive.append([])
        assert node() is None
