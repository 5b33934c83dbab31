"""Correction of the collectives by a few measurements: ``cdmpp adapt``, and a model of one machine."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cdmpp.devices import lookup
from cdmpp.errors import ArtifactError, DataError, InvalidProgramError
from cdmpp.model.collectives.context import context_of
from cdmpp.model.collectives.few import as_collective, collective_seconds, fit_collectives, informative_rows
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp_server.adapt.work import pack

SIZES = [2**power for power in range(12, 28)]


def seconds(bytes_: float, ranks: int) -> float:
    """Latencies of a machine with another link than the specification's: 30 us and 60 GB/s."""
    return 30e-6 + 5e-6 * ranks + bytes_ * 2 * (ranks - 1) / ranks / 60e9


def rows(ranks: tuple[int, ...] = (2, 4, 8)) -> list[tuple[dict[str, Any], float]]:
    return [
        ({"operator": "all_reduce", "bytes": size, "ranks": n, "library": "nccl"}, seconds(size, n))
        for n in ranks
        for size in SIZES
    ]


def mean_error(predictor: LatencyPredictor, measured: Any) -> float:
    predictions = predictor.predict([program for program, _ in measured], "mi300x")
    return float(np.mean([abs(p.latency_s / s - 1) for p, (_, s) in zip(predictions, measured, strict=True)]))


def test_eight_measurements_of_a_new_link_halve_the_error(predictor: LatencyPredictor, tmp_path: Path) -> None:
    measured = rows()
    adapted = predictor.adapt(measured, "mi300x", k=8)
    report = adapted.adaptation
    assert report is not None
    assert report["k"] == 8
    assert report["families"] == {"collective": 8}
    assert mean_error(adapted, measured) < 0.5 * mean_error(predictor, measured)
    # Other devices keep their predictions.
    text = "all_reduce:bytes=1048576,ranks=8"
    assert adapted.predict([text], "h100-sxm")[0].latency_s == predictor.predict([text], "h100-sxm")[0].latency_s
    assert adapted.model_id != predictor.model_id
    adapted.save(tmp_path / "mine")
    again = LatencyPredictor.load(tmp_path / "mine")
    assert again.model_id == adapted.model_id
    assert again.predict([text], "mi300x") == adapted.predict([text], "mi300x")
    with pytest.raises(ArtifactError, match="adapted already"):
        again.adapt(measured, "mi300x")


def test_corrected_latencies_rise_with_bytes_and_stay_below_the_link(predictor: LatencyPredictor) -> None:
    fast = [(program, latency / 50) for program, latency in rows()]
    model = fit_collectives(predictor.collectives, fast, lookup("mi300x"), protocol="kernel")
    for ranks in (2, 4, 8, 16):
        program = {"operator": "all_reduce", "ranks": ranks, "library": "nccl"}
        latencies = [collective_seconds(model, {**program, "bytes": size}, lookup("mi300x")) for size in SIZES]
        assert (np.diff(latencies) >= 0).all()
        bus = np.array(SIZES) * 2 * (ranks - 1) / ranks / latencies
        assert bus.max() <= 1.06 * 448e9 * (1 + 1e-9)


def test_model_of_one_machine_follows_its_own_measurements(predictor: LatencyPredictor) -> None:
    device = lookup("core-i7-12700h")
    measured = [
        ({"operator": "all_reduce", "bytes": size, "ranks": 2, "library": "gloo"}, 80e-6 + size / 1.2e9)
        for size in SIZES[::2]
    ]
    model = fit_collectives(predictor.collectives, measured, device)
    for size in SIZES[1:-1:2]:
        program = {"operator": "all_reduce", "bytes": size, "ranks": 2, "library": "gloo"}
        assert collective_seconds(model, program, device) == pytest.approx(80e-6 + size / 1.2e9, rel=0.15)


def test_table_of_a_device_is_adapted_to(predictor: LatencyPredictor, tmp_path: Path) -> None:
    measured = rows()
    columns = {
        "op": ["all_reduce"] * len(measured),
        "device": ["AMD Instinct MI300X"] * len(measured),
        "library": ["nccl"] * len(measured),
        "mode": ["kernel"] * len(measured),
        "message_bytes": [program["bytes"] for program, _ in measured],
        "ranks": [program["ranks"] for program, _ in measured],
        "latency_us": [1e6 * latency for _, latency in measured],
    }
    pq.write_table(pa.table(columns), tmp_path / "comm.parquet")
    report = predictor.adapt(tmp_path / "comm.parquet", k=8).adaptation
    assert report is not None
    assert report["device"] == "mi300x"
    assert len(report["selected"]) == 8
    assert report["after"]["overall"]["mape"] < report["before"]["overall"]["mape"]


def test_service_refuses_to_adapt_collectives_with_a_way_out(predictor: LatencyPredictor) -> None:
    with pytest.raises(ArtifactError, match="collectives") as caught:
        pack({}, predictor.adapt(rows(), "mi300x", k=2))
    assert "cdmpp adapt" in caught.value.hint


def test_mixed_records_adapt_the_network_and_say_so(predictor: LatencyPredictor) -> None:
    programs: list[Any] = [
        ({"operator": "linear", "m": 128 * i, "n": 1024, "k": 1024, "dtype": "float16"}, 1e-5 * i) for i in range(1, 9)
    ]
    report = predictor.adapt([*programs, *rows()[:3]], "mi300x").adaptation
    assert report is not None
    assert "collectives_not_used" in {entry["code"] for entry in report["warnings"]}


def test_bad_measurements_are_refused(predictor: LatencyPredictor) -> None:
    device = lookup("mi300x")
    with pytest.raises(DataError, match="no measurements"):
        fit_collectives(predictor.collectives, [], device)
    with pytest.raises(DataError, match="no time"):
        fit_collectives(predictor.collectives, [("all_reduce:bytes=8,ranks=2", 0.0)], device)
    with pytest.raises(InvalidProgramError, match="no collective"):
        fit_collectives(predictor.collectives, [("relu:rows=8,cols=2", 1.0)], device)
    with pytest.raises(DataError, match="k = 99"):
        predictor.adapt(rows(), "mi300x", k=99)


def test_chosen_measurements_cover_operators_ranks_and_sizes(predictor: LatencyPredictor) -> None:
    device, model = lookup("mi300x"), predictor.collectives
    assert model is not None
    programs = [
        as_collective({"operator": operator, "bytes": size, "ranks": ranks, "library": "nccl"})
        for operator in ("all_reduce", "all_gather")
        for ranks in (2, 8)
        for size in SIZES
    ]
    contexts = [context_of(program, device, "kernel", device.name) for program in programs]
    bytes_ = np.array([float(program.bytes) for program in programs])
    chosen = informative_rows(model, contexts, np.arange(len(programs)), bytes_, 8)
    assert len(set(chosen.tolist())) == 8
    assert {(contexts[i].operator, contexts[i].ranks) for i in chosen} == {
        (operator, ranks) for operator in ("all_reduce", "all_gather") for ranks in (2, 8)
    }
    assert np.ptp(np.log2(bytes_[chosen])) > 0.5 * np.ptp(np.log2(bytes_))
    again = informative_rows(model, contexts, np.arange(len(programs)), bytes_, 8)
    assert again.tolist() == chosen.tolist()
