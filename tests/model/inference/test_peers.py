"""Known devices correct predictions for unseen ones, except those of scheduled programs on CPUs."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from cdmpp.devices import lookup
from cdmpp.features.encode import encode_operator
from cdmpp.model.domain import peers
from cdmpp.model.domain.calibration import scale_quantiles
from cdmpp.model.domain.peers import LIBRARY_RULE, carried_reference, interval_factor, shift, weights
from cdmpp.model.nn.config import LEVELS
from cdmpp.model.nn.figures import stack_devices, summarise
from cdmpp.model.nn.rows import ProgramStore, QueryRows, RowInputs
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.operators import parse_operator
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import PROTOCOLS

RECORDS = Path(__file__).resolve().parents[3] / "data" / "cdmpp-measured" / "records.parquet"


@pytest.fixture
def corrected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of rows of every correction by peers."""
    counts: list[int] = []

    def counted(own: np.ndarray, peers: np.ndarray, weight: np.ndarray, rule: object) -> np.ndarray:
        counts.append(len(own))
        return np.zeros(len(own))

    monkeypatch.setattr(peers, "shift", counted)
    return counts


@pytest.mark.slow
def test_scheduled_programs_on_an_unseen_cpu_are_the_networks_own(
    predictor: LatencyPredictor, corrected: list[int]
) -> None:
    text = pq.read_table(RECORDS, columns=["program"]).slice(0, 1).to_pylist()[0]["program"]
    scheduled = TensorProgram.from_tvm_json(text)
    cpu = lookup("amd-zen3-1t-avx2").model_copy(update={"name": "my-cpu", "clock_hz": 3.1e9})
    (prediction,) = predictor.predict([scheduled], cpu)
    assert prediction.latency_s > 0 and prediction.domain != "in"
    assert not corrected
    gpu = lookup("t4").model_copy(update={"name": "my-gpu", "clock_hz": 2.1e9})
    predictor.predict(["linear:m=512,n=1024,k=1024"], gpu)
    assert corrected == [1]


def test_bare_fp8_products_on_an_unseen_board_keep_the_kernel_of_their_framework(predictor: LatencyPredictor) -> None:
    """Few tiles wait for operands: the one kernel of the framework is slower than the best 16-bit product."""
    board = lookup("h20")
    sizes = "m=64,n=4096,k=7168"
    (narrow,) = predictor.predict([f"linear:{sizes},dtype=float8_e4m3"], board, framework="vendor")
    (half,) = predictor.predict([f"linear:{sizes},dtype=bfloat16"], board, framework="vendor")
    assert narrow.latency_s > half.latency_s
    (open_,) = predictor.predict([f"linear:{sizes},dtype=float8_e4m3"], board)
    assert open_.latency_s < narrow.latency_s


def test_weights_prefer_the_architecture_and_the_figures_of_the_device() -> None:
    names = ("rtx-3090", "rtx-a6000", "l20", "l40", "a100-sxm4-80gb", "h100-sxm", "h200", "t4")
    for name, alike in (("rtx-4090", {"l20", "l40"}), ("h20", {"h100-sxm", "h200"})):
        weight = weights(lookup(name), "linear", "float32", tuple(lookup(n) for n in names))
        assert weight.sum() == pytest.approx(1.0)
        assert sum(w for n, w in zip(names, weight, strict=True) if n in alike) > 0.8


def test_own_prediction_moves_the_mean_of_the_peers_by_a_bounded_ratio() -> None:
    peers, weight = np.array([[0.0, 0.2], [0.0, 0.2]]), np.array([0.5, 0.5])
    by = shift(np.array([0.1, 3.0]), peers, weight, LIBRARY_RULE)
    assert np.array([0.1, 3.0]) + by == pytest.approx([0.1, 0.1 + LIBRARY_RULE.own_reach])


def test_interval_of_an_unseen_device_has_the_networks_own_prediction_and_that_of_the_peers() -> None:
    levels = np.tile(np.linspace(-0.2, 0.2, len(LEVELS)), (3, 1))
    shifted = np.array([0.8, 0.1, 0.1]), np.array([0.1, 0.1, 0.5])
    factor = interval_factor(lookup("rtx-4090"), "linear", levels, shifted, np.ones(3))
    low = scale_quantiles(levels, factor)[:, LEVELS.index(0.1)]
    assert low[0] == pytest.approx(-0.8)
    assert low[2] == pytest.approx(-np.hypot(0.4 * levels[0, LEVELS.index(0.9)], np.hypot(1.4 * 0.5, 0.2)))
    assert low[2] < low[1] < 0  # peers that disagree widen it


def test_reason_names_the_relatives_of_an_unseen_device(predictor: LatencyPredictor) -> None:
    (unseen,) = predictor.predict(["linear:m=512,n=1024,k=1024,dtype=bfloat16"], "rtx-4090", framework="vllm")
    (known,) = predictor.predict(["linear:m=512,n=1024,k=1024,dtype=bfloat16"], "h100-sxm", framework="vllm")
    assert unseen.domain_reason is not None and "carried over from" in unseen.domain_reason
    assert known.domain == "in" and "carried over" not in (known.domain_reason or "")


@pytest.mark.parametrize("m", [16, 64])
@pytest.mark.parametrize("board", ["h20", "h100-sxm", "my-h100"])
def test_protocols_of_bare_fp8_products_are_in_order(predictor: LatencyPredictor, board: str, m: int) -> None:
    device = lookup("h100-sxm" if board == "my-h100" else board)
    if board == "my-h100":
        device = device.model_copy(update={"name": board, "clock_hz": 1.01 * device.clock_hz, "sustained": None})
    text = f"linear:m={m},n=4096,k=7168,dtype=float8_e4m3"
    times = [predictor.predict([text], device, protocol=p, framework="vendor")[0].latency_s for p in PROTOCOLS]
    assert times == sorted(times)


def test_carried_reference_counts_the_cache_for_passes_over_memory_alone() -> None:
    devices = [lookup("rtx-4090").model_copy(update={"l2_bytes": size}) for size in (4e6, 256e6)]
    store = ProgramStore(2)
    for key, text in enumerate(("silu_and_mul:rows=4096,cols=4096,dtype=bfloat16", "linear:m=4096,n=4096,k=4096")):
        encoded = encode_operator(parse_operator(text))
        store.add(np.array([key]), encoded, summarise(encoded))
    store.finish()
    inputs = RowInputs(store, stack_devices(devices))
    rows = QueryRows(*(np.array(column) for column in ([0, 0, 1, 1], [0, 1, 0, 1], [0] * 4, [0] * 4, [-1] * 4)))
    small, large, product, same = carried_reference(inputs.reference(rows), inputs, rows, LIBRARY_RULE)
    assert large < small - 0.3
    assert product == pytest.approx(same)
