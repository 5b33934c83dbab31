"""Sweeps: points equal single estimates, goals and prices, the Pareto front, reports and wrong requests."""

import csv
import itertools
import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from cdmpp.cli.main import app
from cdmpp.errors import CdmppError
from cdmpp.llm import estimate, goodput, simulate
from cdmpp.llm.serving.load import share_met
from cdmpp.plan.sweep.points import pareto_front, read_sweep
from cdmpp.predict.predictor import LatencyPredictor

pytestmark = pytest.mark.usefixtures("shipped_model_is_loaded_once")

ROOT = Path(__file__).parents[3]
CONFIG = ROOT / "examples/llm/llama-3.1-8b.json"
SWEEP = """
config = "{config}"
devices = ["h100-sxm", "l4"]
tp = [1, 3, 4]
batch = [1, 64]
precisions = ["bfloat16", "bfloat16/float8_e4m3"]
output = 32
price_per_gpu_hour = {{ h100-sxm = 3.0, l4 = 0.5 }}
[goals]
tpot_s = 0.02
price_per_hour = 10
"""


def write(folder: Path, text: str = SWEEP) -> Path:
    path = folder / "sweep.toml"
    path.write_text(text.format(config=CONFIG))
    return path


@pytest.fixture(scope="module")
def answer(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The sweep as JSON, with its files beside it."""
    folder = tmp_path_factory.mktemp("sweep")
    path = write(folder)
    arguments = ["sweep", str(path), "--json", "--out", str(folder / "out.csv"), "--plot", str(folder / "front.png")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0 and result.stderr == "", result.output
    value: dict[str, Any] = json.loads(result.stdout)
    return value | {"folder": folder}


def test_points_are_the_product_with_the_figures_of_single_estimates(
    answer: dict[str, Any], predictor: LatencyPredictor
) -> None:
    points = answer["points"]
    settings = itertools.product(["h100-sxm", "l4"], [None, "float8_e4m3"], [1, 3, 4], [1, 64])
    for point, (device, weights, tp, batch) in zip(points, settings, strict=True):
        assert (point["device"], point["weights"], point["tp"], point["batch"]) == (device, weights, tp, batch)
        options: dict[str, Any] = {"tp": tp, "batch": batch, "output": 32, "weights": weights, "predictor": predictor}
        try:
            single = estimate(CONFIG, device, **options)
        except CdmppError as error:
            assert (point["status"], point["reason"], point["gpus"]) == ("infeasible", error.message, None)
            continue
        figures = single.to_dict()
        for name in ("ttft_s", "ttft_upper_s", "tpot_s", "tpot_upper_s", "total_s", "throughput_tokens_per_s", "gpus"):
            assert point[name] == figures[name]
        per_hour = single.gpus * {"h100-sxm": 3.0, "l4": 0.5}[device]
        assert point["price_per_hour"] == per_hour
        assert point["price_per_million_tokens"] == pytest.approx(
            per_hour * single.total.point / single.tokens / 3600 * 1e6
        )
        met = figures["tpot_s"] <= 0.02 and per_hour <= 10
        assert point["status"] == ("met" if met else "missed")
        assert ("tpot" in (point["reason"] or "")) == (figures["tpot_s"] > 0.02)
        assert ("price per hour" in (point["reason"] or "")) == (per_hour > 10)
    assert {point["status"] for point in points} == {"met", "missed", "infeasible"}


def test_front_has_the_points_that_no_other_dominates(answer: dict[str, Any]) -> None:
    met = [p for p in answer["points"] if p["status"] == "met"]
    objectives = [(p["price_per_million_tokens"], p["tpot_s"]) for p in met]
    best = [not any(o != mine and o[0] <= mine[0] and o[1] <= mine[1] for o in objectives) for mine in objectives]
    assert [p["pareto"] for p in met] == best and any(best) and not all(best)


def test_files_have_all_points(answer: dict[str, Any]) -> None:
    folder = answer["folder"]
    rows = list(csv.DictReader((folder / "out.csv").open()))
    assert rows == [{k: "" if v is None else str(v) for k, v in point.items()} for point in answer["points"]]
    assert (folder / "front.png").read_bytes().startswith(b"\x89PNG")
    # The same points in the other formats, of one device.
    path = write(folder, SWEEP.replace('"h100-sxm", "l4"', '"h100-sxm"').replace(", l4 = 0.5", ""))
    for name in ("out.parquet", "out.json"):
        assert CliRunner().invoke(app, ["sweep", str(path), "--out", str(folder / name)]).exit_code == 0
    points = json.loads((folder / "out.json").read_text())["points"]
    assert pq.read_table(folder / "out.parquet").to_pylist() == points
    assert [p | {"pareto": None} for p in points] == [p | {"pareto": None} for p in answer["points"][: len(points)]]


def test_text_lists_front_and_infeasible_points(answer: dict[str, Any], tmp_path: Path) -> None:
    text = CliRunner().invoke(app, ["sweep", str(write(tmp_path))]).stdout
    front = [p for p in answer["points"] if p["pareto"]]
    assert f"{len(front)} points are on the Pareto front of price_per_million_tokens and tpot_s" in text
    assert "tp: 3 does not divide the model" in text and "the model needs" in text
    nothing = CliRunner().invoke(app, ["sweep", str(write(tmp_path, SWEEP.replace("0.02", "1e-6")))])
    assert nothing.exit_code == 1 and "no point meets the goals; the cheapest" in nothing.stdout
    assert "no point meets the goals" in nothing.stderr


@pytest.mark.slow
def test_points_have_the_largest_rate_that_keeps_the_goals(tmp_path: Path, predictor: LatencyPredictor) -> None:
    text = SWEEP.replace("[goals]", "[load]\nshare = 0.8\ncount = 100\n[goals]").replace("[1, 3, 4]", "[1]")
    text = text.replace(', "bfloat16/float8_e4m3"', "").replace("0.02", "0.03")
    points = json.loads(CliRunner().invoke(app, ["sweep", str(write(tmp_path, text)), "--json"]).stdout)["points"]
    options: dict[str, Any] = {"output": 32, "predictor": predictor}
    single = goodput(CONFIG, "h100-sxm", tpot_s=0.03, share=0.8, count=100, **options)
    for point in points[:2]:
        assert point["goodput_requests_per_s"] == single.requests_per_s
        assert point["saturation_requests_per_s"] == single.saturation_requests_per_s >= single.requests_per_s
        assert point["goodput_price_per_million_tokens"] == pytest.approx(3.0 / 3600 / single.requests_per_s / 32 * 1e6)
    kept, beyond = (
        simulate(CONFIG, "h100-sxm", rate=rate * single.requests_per_s, count=100, **options) for rate in (1.0, 2.0)
    )
    assert share_met(kept, None, 0.03) >= 0.8 > share_met(beyond, None, 0.03)
    # A token takes longer on an L4 than the goal allows, whatever the load.
    assert (points[2]["goodput_requests_per_s"], points[2]["status"]) == (0.0, "missed")


@pytest.mark.slow
def test_goals_under_load_are_judged_by_the_simulation(tmp_path: Path, predictor: LatencyPredictor) -> None:
    head = """
config = "{config}"
devices = ["h100-sxm", "t4"]
tp = [1, 2]
batch = [64, 1]
output = 16
price_per_gpu_hour = {{ h100-sxm = 3.0, t4 = 0.3 }}
[load]
count = 40
[goals]
ttft_s = 0.15
tpot_s = 0.04
price_per_million_tokens = 1.6
"""

    def points(text: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(
            CliRunner().invoke(app, ["sweep", str(write(tmp_path, text)), "--json"]).stdout
        )["points"]
        return rows

    whole = points(head)
    assert {p["status"] for p in whole} == {"met", "missed", "infeasible"}
    # A batch of 64 misses the first token's goal on each device; requests that come one by one do not.
    for small, large in zip(whole[::2], whole[1::2], strict=True):
        assert {**small, "batch": 1} == {**large, "batch": 1}
    options: dict[str, Any] = {"output": 16, "ttft_s": 0.15, "tpot_s": 0.04, "count": 40, "predictor": predictor}
    met = [p for p in whole if p["goodput_requests_per_s"]]
    for point in met:
        limit = goodput(CONFIG, point["device"], tp=point["tp"], **options)
        dollars = point["price_per_hour"] / 3600 / (limit.requests_per_s * 16) * 1e6
        assert point["price_per_million_tokens"] == point["goodput_price_per_million_tokens"] == pytest.approx(dollars)
        assert point["throughput_tokens_per_s"] == limit.requests_per_s * 16
        assert point["ttft_s"] == limit.result.percentile("ttft_s", 90) <= 0.15
        assert point["tpot_s"] == limit.result.percentile("tpot_s", 90) <= 0.04
        assert point["status"] == ("met" if dollars <= 1.6 else "missed"), point["reason"]
    best = {(p["price_per_million_tokens"], p["tpot_s"]) for p in met if p["status"] == "met"}
    front = {x for x in best if not any(o != x and o[0] <= x[0] and o[1] <= x[1] for o in best)}
    assert {(p["price_per_million_tokens"], p["tpot_s"]) for p in whole if p["pareto"]} == front
    # The model does not fit on one T4, which takes nothing from the others; its error says what does.
    assert "on each t4 with tp=1, pp=1, weights take 16.1 GB" in whole[4]["reason"] and met
    head = head.replace('"h100-sxm", "t4"', '"h100-sxm"').replace(", t4 = 0.3", "")
    table = CliRunner().invoke(app, ["sweep", str(write(tmp_path, head))]).stdout.splitlines()
    assert sum(" any " in line for line in table) == len(front)
    # Upper bounds allow less.
    upper = points(head.replace("[goals]", '[goals]\nfigure = "upper"'))
    assert all(
        u["goodput_requests_per_s"] <= p["goodput_requests_per_s"] for u, p in zip(upper, whole[:4], strict=True)
    )
    assert sum(p["goodput_requests_per_s"] or 0 for p in upper) < sum(p["goodput_requests_per_s"] or 0 for p in whole)


def test_upper_bounds_can_be_the_goal(tmp_path: Path, answer: dict[str, Any]) -> None:
    point = next(p for p in answer["points"] if p["status"] == "met")
    middle = (point["tpot_s"] + point["tpot_upper_s"]) / 2
    text = SWEEP.replace("tpot_s = 0.02", f'tpot_s = {middle}\nfigure = "upper"')
    points = json.loads(CliRunner().invoke(app, ["sweep", str(write(tmp_path, text)), "--json"]).stdout)["points"]
    same = next(p for p in points if all(p[k] == point[k] for k in ("device", "tp", "batch", "weights")))
    assert same["status"] == "missed" and same["reason"].startswith("tpot ")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("l4 = 0.5", "t4 = 0.5", "price_per_gpu_hour has no price of l4"),
        ("tp = [1, 3, 4]", "tp = []", "tp: "),
        ("tp = [1, 3, 4]", "tp = [1, 1]", "tp repeats a value"),
        ("tp = [1, 3, 4]", "tensor = [1]", "tensor: unknown field"),
        ("bfloat16/float8_e4m3", "fp8", "precisions: fp8 is not DTYPE or DTYPE/WEIGHTS"),
        ("tp = [1, 3, 4]", "tp = [1", "not TOML"),
        ("output = 32", 'objectives = ["speed", "tpot_s"]', "objectives.0"),
        ("[goals]\ntpot_s = 0.02", "[load]\n[goals]", "load needs goals"),
        ("output = 32", 'objectives = ["gpus", "goodput_price_per_million_tokens"]', "needs load"),
        ("batch = [1, 64]", f"batch = {list(range(1, 9001))}", "the product has 108000 points"),
    ],
)
def test_wrong_request_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(CdmppError, match=message):
        read_sweep(write(tmp_path, SWEEP.replace(old, new)))


def test_wrong_files_are_refused(tmp_path: Path) -> None:
    path = str(write(tmp_path))
    for arguments, message in (
        (["sweep", str(tmp_path / "none.toml")], "cannot be read"),
        (["sweep", path, "--out", "x.txt"], "not written in this format"),
        (["sweep", path, "--plot", str(tmp_path / "none" / "x.png")], "the folder does not exist"),
        (["sweep", str(write(tmp_path, SWEEP.replace("l4", "l4000")))], "no device named 'l4000'"),
    ):
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 1 and message in result.stderr, result.output


def test_pareto_front_equals_brute_force() -> None:
    rng = random.Random(0)
    points = [tuple(float(rng.randrange(6)) for _ in range(3)) for _ in range(80)]
    expected = [
        i
        for i, mine in enumerate(points)
        if not any(other != mine and all(a <= b for a, b in zip(other, mine, strict=True)) for other in points)
    ]
    assert pareto_front(points) == expected
