"""The examples in docs/examples run and show what docs/serving-and-clusters.md claims."""

import json
import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cdmpp.plan.registry import PLANNERS
from cdmpp.predict.requests.pricing import PredictedCost
from cdmpp.programs.frontends.load import program_from_request

FOLDER = Path(__file__).parents[1] / "docs" / "examples"


def example(name: str) -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(FOLDER / f"{name}.py")))


def json_block(page: str) -> Any:
    """The JSON block about collectives of a page."""
    text = (FOLDER.parent / page).read_text()
    return json.loads(text[text.index("## Collectives as costs") :].split("```json", 1)[1].split("```", 1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_requests_in_the_folder_are_valid(path: Path) -> None:
    request = PLANNERS[path.stem.partition("_")[0]].read(json.loads(path.read_text()))
    request.check()
    assert all(program.path for program in request.price_requests())


def test_request_on_a_page_is_valid() -> None:
    assert PLANNERS["replay"].read(json_block("replay.md")).price_requests()


def test_collective_in_planning_md_is_a_cost() -> None:
    [request] = PredictedCost.model_validate(json_block("planning.md")).price_requests("cost")
    program = program_from_request(request.program)
    assert program.operator is not None and program.operator.operator == "all_reduce"


def test_adsp_computes_more_steps_than_bulk_synchronous_training(capsys: pytest.CaptureFixture[str]) -> None:
    one_step, equal_steps, adsp = example("adsp").main().values()
    assert one_step < equal_steps < adsp
    assert "steps/s" in capsys.readouterr().out


def test_bulk_synchronous_training_matches_a_calculation_by_hand() -> None:
    adsp = example("adsp")
    # Each round takes the step and the commit of the slower worker.
    timeline = adsp.train([1.0, 3.0], [1, 1], rounds=2, synchronous=True)
    assert timeline.makespan_s == pytest.approx(2 * (3.0 + adsp.COMMIT))


def test_bottleneck_moves_from_the_network_with_the_cache_hit_rate(capsys: pytest.CaptureFixture[str]) -> None:
    by_hit_rate = example("bgl").main()
    rates = [by_hit_rate[hits]["unchanged"] for hits in (0.0, 0.5, 0.9)]
    assert rates == sorted(rates)
    assert max(by_hit_rate[0.0], key=by_hit_rate[0.0].__getitem__) == "fetch halved"
    assert max(by_hit_rate[0.9], key=by_hit_rate[0.9].__getitem__) != "fetch halved"
    assert "batches/s" in capsys.readouterr().out


def test_pipeline_runs_at_the_rate_of_its_slowest_stage() -> None:
    bgl = example("bgl")
    seconds = {"sample": 1.0, "fetch": 4.0, "gather": 1.0, "copy": 1.0, "train": 2.0}
    assert bgl.pipeline(seconds, 10, ahead=4).run().makespan_s == pytest.approx(1 + 10 * 4 + 1 + 1 + 2)


def test_ring_of_equal_links_matches_the_formula(capsys: pytest.CaptureFixture[str]) -> None:
    pod = example("infinitepod")
    seconds = pod.main()
    link = pod.Link(pod.ALPHA_S, 1 / pod.BYTES_PER_S)
    assert seconds["none broken"] == pytest.approx(pod.collective_s("all_reduce", 32, 64e6, link))
    assert "hops" in capsys.readouterr().out


def test_slowest_link_determines_the_time_of_a_ring() -> None:
    pod = example("infinitepod")
    members = [(0, 1), (1, 2), (3, 1)]
    slow = pod.Link(pod.ALPHA_S + pod.HOP_S, 1 / pod.BYTES_PER_S).seconds(1e6 / 3)
    assert 3 * slow < pod.all_reduce_s(members, 1e6) <= 4 * slow
    with pytest.raises(ValueError, match="a gap of 4"):
        pod.ring(8, {1, 2, 3}, k=3)


@pytest.mark.slow
def test_packed_block_is_faster_than_padded_and_looped_ones() -> None:
    pytest.importorskip("torch.nn.attention.varlen")
    answer = example("packed_attention").main()
    assert answer["packed"] < answer["padded"] < answer["loop"]
