"""The picture of a replay: bars where the timeline has them, and a word where it shows a part."""

from __future__ import annotations

from typing import Any

import pytest

from cdmpp.compose.solve import read_request, solve
from cdmpp.errors import DataError
from cdmpp.replay import plot
from cdmpp.replay.schema import ReplayRequest

VALUE: dict[str, Any] = {
    "nodes": [
        {"id": "a", "device": "r0", "duration_s": 2.0},
        {"id": "b", "device": "r1", "duration_s": 1.0},
        {
            "id": "reduce",
            "collective": {"op": "all_reduce", "ranks": ["r0", "r1"], "bytes": 0, "link": "net"},
            "deps": ["a", "b"],
        },
    ],
    "links": {"net": {"alpha_s": 0.5}},
}


def test_bars_are_the_timeline_and_collectives_are_on_all_ranks() -> None:
    pytest.importorskip("matplotlib")
    request = read_request(ReplayRequest, VALUE)
    axes = plot.draw(request, solve(request)).axes[0]
    bars = sorted((bar.get_x(), bar.get_width(), bar.get_y() + 0.35) for bar in axes.patches)
    assert bars == [(0.0, 1.0, 2.0), (0.0, 2.0, 0.0), (2.0, 1.0, 1.0), (2.0, 1.0, 3.0)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["r0 / 0", "r0 / comm", "r1 / 0", "r1 / comm"]
    assert axes.get_xlabel() == "time (s)"
    assert "part" not in axes.get_title()


def test_a_part_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plot, "_MOST_BARS", 2)
    request = read_request(ReplayRequest, VALUE)
    axes = plot.draw(request, solve(request)).axes[0]
    assert len(axes.patches) == 2
    assert "of 3 nodes on 4 streams, a part" in axes.get_title()


def test_without_a_timeline_there_is_nothing_to_draw() -> None:
    pytest.importorskip("matplotlib")
    request = read_request(ReplayRequest, {**VALUE, "timeline": False})
    with pytest.raises(DataError, match="no timeline"):
        plot.draw(request, solve(request))
