"""Figures of the tuning benchmark from made-up searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tuning.document import document, draw
from benchmarks.tuning.results import best_at, best_so_far, over_time, summarise


def search(method: str, rounds: list[list[float | None]], seed: int = 0, task: str = "matmul") -> dict[str, Any]:
    """A search whose trials took these seconds, each at a cost of two."""
    return {
        "task": task,
        "hash": "0" * 32,
        "method": method,
        "seed": seed,
        "rounds": [
            {
                "trials": [(f"{seed}-{i}-{j}-{s}", s, 2.0) for j, s in enumerate(latencies)],
                "search_s": 1.0,
                "predict_s": 0.5,
                "update_s": 0.25,
                "predicted": 100,
            }
            for i, latencies in enumerate(rounds)
        ],
    }


FAST = [[None, 4e-3], [2e-3, 3e-3]]
SLOW = [[8e-3, 8e-3], [4e-3, 9e-3]]


def result() -> dict[str, Any]:
    made = [search(m, r, s) for s in (0, 1) for m, r in (("xgboost", SLOW), ("frozen", FAST))]
    alone = search("xgboost", SLOW, 2)  # whose rival has not ended
    about = {
        "command": "python -m benchmarks.tuning",
        "model_id": "m",
        "device": "d",
        "target": "{}",
        "asked": 6,
        "trials_per_round": 2,
        "population": 8,
        "generations": 1,
        "programs": 7,
    }
    return about | summarise([*made, alone], 32)


def test_the_best_so_far_and_when() -> None:
    one = search("frozen", FAST)
    assert best_so_far(one) == [float("inf"), 4e-3, 2e-3, 2e-3]
    assert best_at(one, 2) == 4e-3 and best_at(one, 100) == 2e-3
    # A round: 1 s of search, 0.25 s of learning, two trials of 2 s.
    assert over_time(one) == [(5.25, 4e-3), (10.5, 2e-3)]


def test_ratios_are_to_what_the_other_had_in_the_end() -> None:
    found = result()
    assert found["against"] == "xgboost at 32 trials" and found["searches"] == 4
    assert found["summary"]["frozen"]["32"] == pytest.approx(0.5)
    assert found["summary"]["xgboost"]["32"] == pytest.approx(1.0)
    assert found["reached"]["frozen"] == {"searches": 2, "reached": 2, "after": [2, 2]}
    assert found["per_round"]["frozen"]["cost_model_s"] == pytest.approx(0.75)
    assert found["per_round"]["frozen"]["search_s"] == pytest.approx(1.25)
    assert found["tasks"][0]["seeds"] == [0, 1]


def test_page_and_figure(tmp_path: Path) -> None:
    text = Path("docs/tuning.md").read_text(encoding="utf-8")
    page = document(result(), text)
    assert "| cdmpp, frozen | 0.500 | 0.500 |" in page and "4 searches of 6 that were asked for" in page
    assert document(result(), page) == page
    draw(result(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000
