"""All-reduces over gloo are predicted after a fit to eight of the measured sizes."""

from __future__ import annotations

import pytest

from benchmarks.planning import gloo
from benchmarks.planning.gloo_link import FITTED, fit_errors, fitted_rows, predicted_link

#: 0.2 ms and 1.5 GB/s, from 4 KiB to 32 MiB.
TABLE = [(2.0**power, 2e-4 + 2.0**power / 1.5e9) for power in range(12, 26)]


def test_fitted_sizes_are_spread_over_the_table() -> None:
    rows = fitted_rows(TABLE)
    assert len(rows) == FITTED
    assert rows[0] == TABLE[0] and rows[-1] == TABLE[-1]
    assert all(row in TABLE for row in rows)


def test_fitted_model_predicts_the_sizes_left_out() -> None:
    errors = fit_errors(TABLE, 2)
    assert errors["held_out_error"] < 0.1 < errors["held_out_error_before"]
    link = predicted_link(TABLE, 2)
    for size, seconds in TABLE:
        assert link.seconds(size) == pytest.approx(seconds, rel=0.2)


def test_document_shows_the_column_of_runs_that_have_it() -> None:
    bucket = {"bucket_bytes": gloo.MIB, "buckets": 2, "measured_ms": 4.0, "rounds_ms": [4.0], "replayed_ms": 3.9}
    bucket |= {"replayed_error": -0.02, "replayed_errors": [-0.02]}
    bucket |= {"without_waiting_error": -0.1, "without_contention_error": -0.2}
    network = {"network": "mlp", "alone_ms": 1.0, "slower_ms": 1.1, "compute_slowdown": 1.0, "comm_slowdown": 1.0}
    result = {"networks": [{**network, "buckets": [bucket]}], "load_before": [0], "load_after": [0]}
    result |= {"cores": 2, "rounds": 1}
    assert "predicted all-reduces" not in gloo.document(result)
    bucket["predicted_all_reduces_error"] = 0.034
    result["networks"] = [{**network, "buckets": [bucket], "all_reduce_fit": fit_errors(TABLE, 2)}]
    text = gloo.document(result)
    assert "predicted all-reduces" in text and "+3.4 %" in text
    assert f"fitted to {FITTED} sizes" in text
