"""The examples in docs/examples run, and what they show holds."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "examples"


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"doc_example_{name}", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_workers_that_do_not_wait_do_more_steps(capsys: pytest.CaptureFixture[str]) -> None:
    found = example("adsp").main()
    one, equal, adsp = found.values()
    assert one < equal < adsp
    assert "steps/s" in capsys.readouterr().out


def test_bulk_synchronous_steps_by_hand() -> None:
    adsp = example("adsp")
    # The slower worker's step, then its commit; the faster one's commit is done by then.
    timeline = adsp.train([1.0, 3.0], [1, 1], rounds=2, synchronous=True)
    assert timeline.makespan_s == pytest.approx(2 * (3.0 + adsp.COMMIT))


def test_the_bottleneck_moves_from_the_network_as_the_cache_hits(capsys: pytest.CaptureFixture[str]) -> None:
    found = example("bgl").main()
    rates = [found[hits]["as it is"] for hits in (0.0, 0.5, 0.9)]
    assert rates == sorted(rates)
    assert max(found[0.0], key=found[0.0].__getitem__) == "fetch halved"
    assert max(found[0.9], key=found[0.9].__getitem__) != "fetch halved"
    assert "batches/s" in capsys.readouterr().out


def test_a_pipeline_runs_at_the_pace_of_its_slowest_stage() -> None:
    bgl = example("bgl")
    seconds = {"sample": 1.0, "fetch": 4.0, "gather": 1.0, "copy": 1.0, "train": 2.0}
    assert bgl.pipeline(seconds, 10, ahead=4).run().makespan_s == pytest.approx(1 + 10 * 4 + 1 + 1 + 2)


def test_an_even_ring_takes_what_the_formula_says(capsys: pytest.CaptureFixture[str]) -> None:
    pod = example("infinitepod")
    found = pod.main()
    link = pod.Link(pod.ALPHA_S, 1 / pod.BYTES_PER_S)
    assert found["whole"] == pytest.approx(pod.collective_s("all_reduce", 32, 64e6, link))
    assert "hops" in capsys.readouterr().out


def test_the_slowest_link_sets_the_pace_of_a_ring() -> None:
    pod = example("infinitepod")
    members = [(0, 1), (1, 2), (3, 1)]
    slow = pod.Link(pod.ALPHA_S + pod.HOP_S, 1 / pod.BYTES_PER_S).seconds(1e6 / 3)
    assert 3 * slow < pod.all_reduce_s(members, 1e6) <= 4 * slow
    with pytest.raises(ValueError, match="a gap of 4"):
        pod.ring(8, {1, 2, 3}, k=3)
