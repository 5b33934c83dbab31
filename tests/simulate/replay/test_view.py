"""Plots of replays: bars are the nodes of the timeline; the title says where nodes are left out."""

from typing import Any

import pytest

from cdmpp.errors import DataError
from cdmpp.plan.base.solve import read_request, solve_request
from cdmpp.predict.requests import plot
from cdmpp.simulate.replay.schema import ReplayRequest
from cdmpp.simulate.replay.solver import draw

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
    axes = draw(request, solve_request(request)).axes[0]
    boxes = [path.get_extents() for group in axes.collections for path in group.get_paths()]
    bars = sorted((box.x0, box.width, (box.y0 + box.y1) / 2) for box in boxes)
    assert bars == [(0.0, 1.0, 2.0), (0.0, 2.0, 0.0), (2.0, 1.0, 1.0), (2.0, 1.0, 3.0)]
    assert [label.get_text() for label in axes.get_yticklabels()] == ["r0 / 0", "r0 / comm", "r1 / 0", "r1 / comm"]
    assert axes.get_xlabel() == "time (s)"
    assert "part of" not in axes.get_title()


def test_title_says_that_nodes_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plot, "MAX_BARS", 2)
    request = read_request(ReplayRequest, VALUE)
    axes = draw(request, solve_request(request)).axes[0]
    assert sum(len(group.get_paths()) for group in axes.collections) == 2
    assert "part of 3 nodes on 4 streams" in axes.get_title()


def test_plan_without_timeline_is_refused() -> None:
    pytest.importorskip("matplotlib")
    request = read_request(ReplayRequest, {**VALUE, "timeline": False})
    with pytest.raises(DataError, match="no timeline"):
        draw(request, solve_request(request))
