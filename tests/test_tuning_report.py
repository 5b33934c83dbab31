"""Report of the tuning benchmark, on synthetic searches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.tuning.document import document, draw
from benchmarks.tuning.finished import FinishedSearches
from benchmarks.tuning.results import best_at, best_so_far, over_time, ratios, summarise


def search(method: str, rounds: list[list[float | None]], seed: int = 0, task: str = "matmul") -> dict[str, Any]:
    """Search whose trials have these latencies in seconds; each trial takes two seconds."""
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
    searches = [search(m, r, s) for s in (0, 1) for m, r in (("xgboost", SLOW), ("frozen", FAST))]
    unpaired = search("xgboost", SLOW, 2)  # the other method has no search with this seed
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
    return about | summarise([*searches, unpaired], 32)


def test_best_latency_by_trial_and_by_time() -> None:
    frozen = search("frozen", FAST)
    assert best_so_far(frozen) == [float("inf"), 4e-3, 2e-3, 2e-3]
    assert best_at(frozen, 2) == 4e-3 and best_at(frozen, 100) == 2e-3
    # A round takes 1 s of search, 0.25 s of update and two trials of 2 s.
    assert over_time(frozen) == [(5.25, 4e-3), (10.5, 2e-3)]


def test_ratios_are_relative_to_the_final_latency_of_the_other_method() -> None:
    summary = result()
    assert summary["against"] == "xgboost at 32 trials" and summary["searches"] == 4
    frozen = ratios(summary, "frozen")
    assert 1 not in frozen, "no program ran after the first trial"
    assert frozen[2] == pytest.approx(1.0) and frozen[32] == pytest.approx(0.5)
    assert ratios(summary, "xgboost")[32] == pytest.approx(1.0)
    assert summary["reached"]["frozen"] == {"searches": 2, "reached": 2, "after": [2, 2]}
    assert summary["per_round"]["frozen"]["cost_model_s"] == pytest.approx(0.75)
    assert summary["per_round"]["frozen"]["search_s"] == pytest.approx(1.25)
    assert summary["tasks"][0]["seeds"] == [0, 1]


def test_page_and_figure_are_rendered(tmp_path: Path) -> None:
    text = Path("docs/tuning.md").read_text(encoding="utf-8")
    page = document(result(), text)
    assert "| cdmpp, frozen | 0.500 | 0.500 | 0.500 | 0.500 |" in page and "4 searches of 6 requested" in page
    assert "after 24 trials the best latency is 50.0 % below" in page and "(goal 0.7: missed)" in page
    assert "Not measured yet: `python -m benchmarks.tuning --defaults`" in page
    assert document(result(), page) == page
    with_defaults = document(result(), page, result() | {"population": 512})
    assert "population 512" in with_defaults and "Not measured yet" not in with_defaults
    draw(result(), tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


def test_finished_searches_are_found_again_for_the_same_model_and_device(tmp_path: Path) -> None:
    def folder(device: str = "d", model_id: str = "m", label: str = "16-64x3-16") -> FinishedSearches:
        return FinishedSearches(tmp_path, device, model_id, label)

    for method in ("xgboost", "frozen"):
        folder().add(search(method, FAST))
    found = folder().find("matmul", "frozen", 0)
    assert found is not None and best_so_far(found) == best_so_far(search("frozen", FAST))
    assert folder().find("matmul", "frozen", 1) is None
    # XGBModel does not depend on the predictor.
    assert folder(model_id="other").find("matmul", "frozen", 0) is None
    assert folder(model_id="other").find("matmul", "xgboost", 0) is not None
    assert folder(device="other").find("matmul", "xgboost", 0) is None
    assert folder(label="16-512x4-16").find("matmul", "xgboost", 0) is None


def test_searches_without_xgboost_are_reported() -> None:
    about = result() | summarise([search("frozen", FAST), search("random", SLOW)], 32)
    text = document(about, Path("docs/tuning.md").read_text(encoding="utf-8"))
    assert "No search was finished by every method, XGBModel among them." in text
    assert "| matmul | random |" in text
