"""The loop of an engine over many replicas: the choice of the replica, and the work of the loop."""

from typing import Any

import numpy as np
import pytest

from cdmpp.errors import FieldError
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.serving.loop import STEP_WORK, Replica, ServedRequest, WorkLimit, open_loop
from cdmpp.llm.training import memory
from cdmpp.llm.training.layout import TrainingLayout


class Tables:
    """Steps of a fixed duration and a little for each sequence."""

    launched_s = eager_s = decode_launched_s = 0.0

    def mixed_kernels_s(self, chunks: Any, sequences: int, cached: float) -> float:
        return 0.01 * len(chunks) + 0.001 * sequences

    def mixed_s(self, kernels_s: float, sequences: int) -> float:
        return kernels_s

    def decode_kernels_s(self, sequences: int, cached: Any) -> Any:
        return 0.01 + 0.001 * sequences + 1e-7 * np.asarray(cached)

    def decode_s(self, kernels_s: Any, sequences: int) -> Any:
        return kernels_s


def lanes(count: int, effort: WorkLimit) -> list[Replica]:
    return [Replica(Tables(), 2048, 8, 1e5, False, 0.0, effort=effort) for _ in range(count)]  # type: ignore[arg-type]


def requests(count: int, rate: float) -> list[ServedRequest]:
    rng = np.random.default_rng(0)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    return [ServedRequest(i, float(at), *map(int, rng.integers(1, 200, 2))) for i, at in enumerate(arrivals)]


def every_replica_at_every_arrival(lanes: list[Replica], requests: list[ServedRequest]) -> None:
    for request in requests:
        for lane in lanes:
            lane.catch_up(request.arrival_s)
        min(lanes, key=lambda lane: lane.load).add(request)
    for lane in lanes:
        lane.catch_up(np.inf)


@pytest.mark.parametrize(("count", "rate"), [(1, 1.0), (3, 4.0), (40, 50.0)])
def test_replicas_that_run_on_late_serve_as_those_that_run_on_at_every_arrival(count: int, rate: float) -> None:
    effort, all_effort = WorkLimit(), WorkLimit()
    served, reference = requests(400, rate), requests(400, rate)
    open_loop(lanes(count, effort), served)
    every_replica_at_every_arrival(lanes(count, all_effort), reference)
    assert [r.done_s for r in served] == pytest.approx([r.done_s for r in reference], rel=1e-9)
    assert [r.first_s for r in served] == pytest.approx([r.first_s for r in reference], rel=1e-9)
    # A request has a step of its prompt, one in which it ends, and those of its replica when others arrive and end.
    assert effort.spent < 400 * 6 * (STEP_WORK + 8)


def test_loop_ends_at_its_bound() -> None:
    with pytest.raises(FieldError, match="more work than 1,000 "):
        open_loop(lanes(2, WorkLimit(1000)), requests(100, 5.0))


@pytest.mark.parametrize(("layers", "pp"), [(7, 3), (10, 4), (61, 16), (30, 32)])
def test_each_layer_goes_to_the_stage_with_least_work(layers: int, pp: int) -> None:
    config = LLMConfig("llama", layers, 1024, 50_000, 8, 8, 128, 4096)
    layout = TrainingLayout(pp, 1, pp, 1024, pp=pp)
    work, head = memory.RankParameters.of(config, layout).layer.dense, config.vocab * config.hidden
    counts, load = [0] * pp, [0.05 * head, *[0.0] * (pp - 2), head]
    for _ in range(layers):
        least = load.index(min(load))
        counts[least], load[least] = counts[least] + 1, load[least] + work
    assert memory.stage_layers(config, layout) == counts
