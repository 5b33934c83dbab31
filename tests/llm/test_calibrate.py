"""Calibration: the figures of an engine are found again from durations, and wrong rows are named."""

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import cdmpp
from cdmpp.devices import DeviceSpec, lookup
from cdmpp.errors import DataError, FieldError
from cdmpp.llm import calibrate, estimate, read_config, simulate
from cdmpp.llm.engines import EngineProfile, load_engine
from cdmpp.llm.engines.profile import Engine
from cdmpp.llm.serving.calibrate import fit_engine, read_measurements
from cdmpp.predict.predictor import LatencyPredictor
from tests.llm.test_read_config import EXAMPLES

LLAMA = read_config(EXAMPLES / "llama-3.1-8b.json")
HOST = {"step_s": 3e-3, "sequence_s": 1e-4, "ranks_s": 1e-3}
MINE = EngineProfile.of(
    {"name": "mine", "framework": "vllm", "kernel_factor": 1.2, "graph_prefill": True, "host": HOST}, "mine"
)
SHAPES = [
    {"batch": batch, "input": tokens, "output": output, "tp": tp}
    for batch, tokens, output, tp in (
        (1, 128, 64, 1),
        (64, 256, 64, 1),
        (16, 1024, 32, 2),
        (4, 2048, 16, 1),
        (32, 64, 96, 2),
    )
]


@pytest.fixture(scope="module")
def measured(predictor: LatencyPredictor) -> list[dict[str, Any]]:
    rows = []
    for shape in SHAPES:
        value = estimate(LLAMA, "h100-sxm", engine=MINE, predictor=predictor, **shape)
        assert value.tpot is not None
        rows.append({**shape, "total_s": value.total.point, "tpot_s": value.tpot.point})
    return rows


def test_figures_are_found_again(measured: list[dict[str, Any]], predictor: LatencyPredictor) -> None:
    result = fit_engine(LLAMA, "h100-sxm", measured, "kernels-only", predictor)
    assert result.before > 0.3 and result.after < 0.02
    assert result.left_out is not None and result.left_out < 0.1
    found = result.profile
    assert found.kernel_factor == pytest.approx(1.2, rel=0.1)
    assert found.host.step_s + 16 * found.host.sequence_s == pytest.approx(4.6e-3, rel=0.1)
    # Two rows move it sensibly: every row is nearer than before.
    two = calibrate(LLAMA, "h100-sxm", measured[:2], "vllm-2024", predictor)
    for row, shape in zip(measured, SHAPES, strict=True):
        before, after = (
            abs(
                estimate(LLAMA, "h100-sxm", engine=engine, predictor=predictor, **shape).total.point / row["total_s"]
                - 1
            )
            for engine in (load_engine("kernels-only"), two)
        )
        assert after < before


@pytest.mark.parametrize(("share", "waves"), [(1.0, False), (0.5, True)])
def test_calibration_finds_requests_in_waves(predictor: LatencyPredictor, share: float, waves: bool) -> None:
    rows = []
    for batch, output in ((8, 32), (32, 64), (64, 128), (128, 64)):
        request = {"batch": batch, "input": 1024, "output": output}
        value = estimate(LLAMA, "h200", engine="sglang", predictor=predictor, **request)
        assert value.tpot is not None
        others_s = share * (1 - 1 / batch) / (output - 1) * value.prefill.point
        rows.append({**request, "closed_loop": True, "tpot_s": value.tpot.point + others_s})
    result = fit_engine(LLAMA, "h200", rows, "sglang", predictor)
    assert result.waves is waves and result.after < 0.01
    # Only prompts that run alone make waves.
    assert not fit_engine(LLAMA, "h200", rows, "vllm", predictor).waves


def test_calibrated_requests_are_covered(measured: list[dict[str, Any]], predictor: LatencyPredictor) -> None:
    profile = calibrate(LLAMA, "h100-sxm", measured, "vllm", predictor)
    assert {"h100-sxm", "b200"} <= set(profile.measured.devices)
    here, there = (
        estimate(LLAMA, device, engine=profile, batch=16, output=32, predictor=predictor)
        for device in ("h100-sxm", "a100-sxm4-80gb")
    )
    assert here.engine_domain == ("in", "") and there.engine_domain[0] == "near"


LOADS: list[dict[str, Any]] = [
    {"batch": 64, "closed_loop": True},
    {"batch": 8, "closed_loop": True},
    {"rate": 4.0},
    {"batch": 16, "closed_loop": True, "prefix_hit": 0.5},
    {"batch": 8, "prefix_hit": 0.5},
]


def loaded(load: dict[str, Any], device: DeviceSpec, engine: Engine, predictor: LatencyPredictor) -> dict[str, Any]:
    """A measurement: what a simulation says."""
    arrivals: dict[str, Any] = {"rate": load.get("rate"), "concurrency": load.get("batch")}
    if "closed_loop" not in load and "batch" in load:
        arrivals = {"requests": [(0.0, 1024, 128)] * load["batch"]}
    hit = load.get("prefix_hit", 0.0)
    result = simulate(
        LLAMA, device, engine=engine, input=1024, output=128, prefix_hit=hit, predictor=predictor, **arrivals
    )
    names = {"ttft_s": "ttft_s", "tpot_s": "tpot_s", "total_s": "latency_s"}
    seconds = {name: float(result.measured(key).mean()) for name, key in names.items()}
    if "requests" in arrivals:
        seconds = {"ttft_s": float(result.ttft_s.max()), "total_s": result.duration_s}
    return {**load, "input": 1024, "output": 128, **seconds}


@pytest.mark.slow
def test_rows_under_load_are_simulated(predictor: LatencyPredictor) -> None:
    # A card that cannot hold 64 requests at once: they queue.
    small = lookup("h100-sxm").model_copy(update={"name": "small", "memory_bytes": 24e9})
    rows = [loaded(load, small, MINE, predictor) for load in LOADS]
    assert rows[0]["ttft_s"] > 10 * rows[1]["ttft_s"]
    same = fit_engine(LLAMA, small, rows, MINE, predictor)
    assert same.before < 0.05 and same.profile.kernel_factor == pytest.approx(1.2, rel=0.1)
    far = fit_engine(LLAMA, small, rows, "kernels-only", predictor)
    assert far.before > 0.2 > 0.05 > far.after
    # The fit holds for a load that it did not see.
    new: dict[str, Any] = {"batch": 24, "closed_loop": True}
    truth, start, fitted = (loaded(new, small, e, predictor) for e in (MINE, "kernels-only", far.profile))
    assert abs(fitted["total_s"] / truth["total_s"] - 1) < 0.05 < abs(start["total_s"] / truth["total_s"] - 1)
    # tpot_s alone of a closed loop that does not queue needs no simulation, and has the answer that it had.
    rate = [{**rows[2], "ttft_s": ""}, {**rows[2], "rate": "4", "prefix_hit": ""}]
    assert calibrate(LLAMA, small, rate, predictor=predictor).kernel_factor > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rate": 4.0}, "row 2: rate beside batch or closed_loop"),
        ({"rate": "fast"}, "row 2: rate 'fast' is no number"),
        ({"total_s": "1_2"}, "row 2: total_s '1_2' is no duration"),
        ({"rate": -1, "batch": None}, "row 2: rate: '-1.0' is not allowed"),
        ({"prefix_hit": 1.0}, "row 2: prefix_hit: '1.0' is not allowed"),
        ({"prefix_hit": 0.5, "batch": 10**9}, "row 2: batch 1,000,000,000, input 128: "),
        ({"prefix_hit": 0.5, "batch": 2000, "input": 1_000_000}, "row 2: batch 2,000, input 1,000,000: "),
        ({"closed_loop": True, "batch": 10**9}, "row 2: batch 1,000,000,000, input 128: "),
        ({"batch": None}, "row 2: batch is missing"),
    ],
)
def test_wrong_loads_are_named(change: dict[str, Any], message: str, predictor: LatencyPredictor) -> None:
    row = {"batch": 4, "input": 128, "output": 64, "total_s": 3.0}
    with pytest.raises(DataError) as caught:
        calibrate(LLAMA, "h100-sxm", [row, {**row, **change}], predictor=predictor)
    assert caught.value.message.startswith(message)


@pytest.mark.slow
def test_rows_that_are_simulated_are_limited(predictor: LatencyPredictor) -> None:
    row = {"batch": 4, "input": 16, "output": 8, "total_s": 3.0, "closed_loop": True}
    with pytest.raises(DataError, match="row 51: more than 50 rows are simulated"):
        calibrate(LLAMA, "h100-sxm", [row] * 60, predictor=predictor)
    rates = [{"rate": 4.0, "input": 16, "output": 8, "tpot_s": 0.02}] * 51
    with pytest.raises(DataError, match="51 rows are simulated; at most 50"):
        calibrate(LLAMA, "h100-sxm", rates, predictor=predictor)


def test_wrong_rows_are_named_by_their_number(measured: list[dict[str, Any]], predictor: LatencyPredictor) -> None:
    def refused(rows: list[dict[str, Any]]) -> str:
        with pytest.raises(DataError) as caught:
            calibrate(LLAMA, "h100-sxm", rows, predictor=predictor)
        return caught.value.message

    good = measured[0]
    assert refused([good]) == "1 measurements"
    assert refused([good, {**good, "total_s": 0.01}]).startswith("row 2: total_s 0.01 is below the ")
    assert refused([good, {**good, "tp": 3}]).startswith("row 2: tp: 3 does not divide")
    assert refused([good, {"batch": 1, "input": 2, "output": 3}]) == "row 2: no duration"
    assert refused([good, {**good, "total_s": "fast"}]) == "row 2: total_s 'fast' is no duration"
    assert refused([good, {**good, "batch": 1.5}]) == "row 2: batch '1.5' is no whole number"
    assert refused([good, {**good, "speed": 1}]) == "row 2: unknown column 'speed'"
    assert refused([{"input": 2, "output": 3, "total_s": 1}, good]) == "row 1: batch is missing"
    assert refused([good, {**good, "output": 1}]) == "row 2: tpot_s of a single output token"


def test_files_are_read(measured: list[dict[str, Any]], predictor: LatencyPredictor, tmp_path: Path) -> None:
    table = tmp_path / "mine.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, [*measured[0], "dtype"], restval="")
        writer.writeheader()
        writer.writerows(measured)
    listed = tmp_path / "mine.json"
    listed.write_text(json.dumps(measured))
    expected = calibrate(LLAMA, "h100-sxm", measured, predictor=predictor)
    for path in (table, listed):
        assert cdmpp.llm.calibrate(LLAMA, "h100-sxm", path, predictor=predictor) == expected
    # A result of vllm bench serve or sglang.bench_serving: a closed loop.
    bench = {"completed": 100, "total_input_tokens": 51_200, "total_output_tokens": 12_800, "mean_tpot_ms": 12.5}
    free = {"max_concurrency": None, "mean_ttft_ms": 412.5, "duration": 20.0}
    benchmark = tmp_path / "bench.jsonl"
    benchmark.write_text(json.dumps({**bench, "max_concurrency": 16}) + "\n" + json.dumps({**bench, **free}) + "\n")
    assert read_measurements(benchmark) == [
        {"batch": batch, "input": 512, "output": 128, "tpot_s": 0.0125, "closed_loop": True} for batch in (16, 10)
    ]
    benchmark.write_text(json.dumps({"completed": 3, "mean_tpot_ms": 1.0}))
    with pytest.raises(DataError, match="has no total_output_tokens"):
        read_measurements(benchmark)
    with pytest.raises(DataError, match="cannot be read"):
        read_measurements(tmp_path / "absent.csv")
    benchmark.write_text(
        json.dumps({**bench, "max_concurrency": 1}) + "\n" + json.dumps({**bench, "mean_tpot_ms": None})
    )
    with pytest.raises(DataError, match="row 2: a benchmark's result has no mean_tpot_ms: None"):
        read_measurements(benchmark)
    table.write_text("batch;input;output;tpot_s\n16;1024;256;0,0083\n", encoding="utf-8")
    assert read_measurements(table) == [{"batch": "16", "input": "1024", "output": "256", "tpot_s": "0.0083"}]
    # As spreadsheets write tables.
    table.write_text("\ufeffBatch; Input; output; total_s\n1; 2; 3; 0.5\n", encoding="utf-8")
    assert read_measurements(table) == [{"batch": "1", "input": "2", "output": "3", "total_s": "0.5"}]
    table.write_text("batch,input\n1,2,3\n")
    with pytest.raises(DataError, match="row 1: it has more cells than the header"):
        read_measurements(table)


def test_hosts_far_from_the_prior_and_contradictions(predictor: LatencyPredictor) -> None:
    slow = MINE.model_copy(update={"kernel_factor": 1.0, "host": MINE.host.model_copy(update={"step_s": 0.03})})
    rows = []
    for shape in SHAPES[:4]:
        value = estimate(LLAMA, "h100-sxm", engine=slow, predictor=predictor, **shape)
        rows.append({**shape, "total_s": value.total.point})
    result = fit_engine(LLAMA, "h100-sxm", rows, "vllm", predictor)
    assert result.after < 0.05 and result.profile.host.step_s == pytest.approx(0.03, rel=0.2)
    # Few rows do not make a profile surer than the one at the start.
    assert result.profile.residual >= 0.05
    with pytest.raises(DataError, match="contradict"):
        calibrate(LLAMA, "h100-sxm", [rows[0], {**rows[0], "total_s": 1e6}], predictor=predictor)


def test_one_far_row_hardly_moves_the_fit(measured: list[dict[str, Any]], predictor: LatencyPredictor) -> None:
    rows = [{name: value for name, value in row.items() if name != "tpot_s"} for row in measured]
    # A full cache, or a wrong row: three times as slow.
    rows[2] = {**rows[2], "total_s": 3 * rows[2]["total_s"]}
    profile = fit_engine(LLAMA, "h100-sxm", rows, MINE, predictor).profile
    assert profile.kernel_factor == pytest.approx(MINE.kernel_factor, rel=0.1)
    assert profile.host.step(16, 2, 1) == pytest.approx(MINE.host.step(16, 2, 1), rel=0.2)


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    MINE.write(path)
    assert load_engine(path) == MINE
    path.write_text("name = 'x'\nspeed = 3\n")
    with pytest.raises(FieldError, match=r"mine\.toml: speed: Extra inputs"):
        load_engine(path)
    path.write_text("name = ")
    with pytest.raises(DataError, match="not TOML"):
        load_engine(path)
