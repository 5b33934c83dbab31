"""Applications on batching engines against hand-computed, replayed and exhaustive results."""

from __future__ import annotations

import itertools
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cdmpp import FieldError, make_plan
from cdmpp.compose.budget import SearchControl
from cdmpp.compose.render import render
from cdmpp.planning.application import Application, Engine, Policy, Primitive, simulate
from cdmpp.planning.application.schema import ApplicationPlan, ApplicationRequest
from cdmpp.planning.application.search import replay_graph, search
from cdmpp.planning.application.view import draw
from cdmpp.predictor import LatencyPredictor
from cdmpp.replay import replay

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "application.json"


def engine(name: str, one_s: float, more_s: float, most: int = 4, device: str | None = None) -> Engine:
    return Engine(name, device or name, np.array([1.0, most]), np.array([one_s, one_s + more_s]), most)


def test_a_batch_is_shared_and_a_chain_is_not_overlapped() -> None:
    app = Application((engine("e", 2, 0), engine("f", 1, 3)), (Primitive("a", 0, 1, ()), Primitive("b", 1, 1, (0,))))
    run = simulate(app, [0.0, 0.0], Policy())
    # Both embed together until 2, then the other engine takes both in one batch of 1 + 3/3.
    assert [(b.engine, b.start_s, b.end_s, len(b.members)) for b in run.batches] == [(0, 0, 2, 2), (1, 2, 4, 2)]
    assert run.latency_s == [4.0, 4.0]
    alone = simulate(app, [0.0, 0.0], Policy(batching=False))
    assert alone.latency_s == [3.0, 5.0]


def test_parallel_branches_overlap_and_modules_in_turn_do_not() -> None:
    app = Application(
        (engine("e", 2, 0), engine("f", 3, 0)),
        (Primitive("a", 0, 1, ()), Primitive("b", 1, 1, ()), Primitive("c", 0, 1, (0, 1))),
    )
    assert simulate(app, [0.0], Policy()).mean_s == 5.0
    assert simulate(app.chained(), [0.0], Policy()).mean_s == 7.0
    assert app.bound_s([0.0]) == 5.0


def test_engines_of_one_device_take_turns() -> None:
    app = Application(
        (engine("e", 2, 0, device="gpu"), engine("f", 3, 0, device="gpu")),
        (Primitive("a", 0, 1, ()), Primitive("b", 1, 1, ())),
    )
    assert simulate(app, [0.0], Policy()).makespan_s == 5.0
    # One request: the longest path. Many requests: the work of the shared device.
    assert app.bound_s([0.0]) == 3.0
    assert app.bound_s([0.0] * 100) == pytest.approx((2 / 4 + 3 / 4) * 101 / 2)


@st.composite
def applications(draw: st.DrawFn) -> Application:
    engines = tuple(
        engine(
            str(e),
            draw(st.integers(1, 4)),
            draw(st.integers(0, 4)),
            draw(st.integers(2, 3)),
            draw(st.sampled_from(["gpu", f"own {e}"])),
        )
        for e in range(2)
    )
    primitives = tuple(
        Primitive(
            str(i),
            draw(st.integers(0, 1)),
            draw(st.integers(1, 2)),
            tuple(draw(st.sets(st.integers(0, i - 1), max_size=2)) if i else ()),
        )
        for i in range(draw(st.integers(1, 3)))
    )
    return Application(engines, primitives)


@settings(max_examples=40, deadline=None)
@given(applications(), st.lists(st.integers(0, 5).map(float), min_size=1, max_size=2), st.booleans())
def test_replay_of_a_run_has_equal_times(app: Application, arrivals: list[float], batching: bool) -> None:
    run = simulate(app, arrivals, Policy(batching))
    timeline = replay(replay_graph(app, run, arrivals))
    assert timeline.start_s[len(arrivals) :].tolist() == pytest.approx([b.start_s for b in run.batches])
    assert timeline.end_s[len(arrivals) :].tolist() == pytest.approx([b.end_s for b in run.batches])


@settings(max_examples=30, deadline=None)
@given(applications(), st.lists(st.integers(0, 3).map(float), min_size=1, max_size=2))
def test_search_is_between_the_optimum_and_its_baselines(app: Application, arrivals: list[float]) -> None:
    found = search(app, app, arrivals, SearchControl(), max_steps=100)
    best = exhaustive(app, tuple(arrivals))
    assert app.bound_s(arrivals) <= best + 1e-9
    assert best <= found.run.mean_s + 1e-9
    assert all(found.run.mean_s <= other.mean_s + 1e-9 for other in found.baselines.values())


def test_search_is_optimal_where_waiting_gains_nothing() -> None:
    # The deep branch has to go first on the engine that both begin with.
    app = Application(
        (engine("e", 2, 6), engine("f", 5, 0)),
        (Primitive("shallow", 0, 1, ()), Primitive("deep", 0, 2, ()), Primitive("end", 1, 1, (1,))),
    )
    found = search(app, app, [0.0], SearchControl(), max_steps=100)
    assert found.run.mean_s == exhaustive(app, (0.0,)) == 9.0
    assert simulate(app, [0.0], Policy(batching=False)).mean_s == 11.0


def exhaustive(app: Application, arrivals: tuple[float, ...]) -> float:
    """Least mean latency over all ways to put ready primitives into batches and to wait for an event."""
    tasks = [(r, p) for r in range(len(arrivals)) for p in range(len(app.primitives))]

    @cache
    def left(now: float, done: frozenset[Any], running: frozenset[Any]) -> float:
        """Sum of the ends of the requests that are not done at ``now``."""
        if len(done) == len(tasks):
            return 0.0
        busy = {app.engines[e].device for _, e, _ in running}
        taken = done | {m for _, _, members in running for m in members}
        best = float("inf")
        for e, one in enumerate(app.engines):
            if one.device in busy:
                continue
            ready = [
                (r, p)
                for r, p in tasks
                if (r, p) not in taken
                and app.primitives[p].engine == e
                and arrivals[r] <= now
                and all((r, q) in done for q in app.primitives[p].after)
            ]
            for size in range(1, len(ready) + 1):
                for members in itertools.combinations(ready, size):
                    items = sum(app.primitives[p].items for _, p in members)
                    if size > 1 and items > one.max_items:
                        continue
                    batch = (now + one.batch_s(items), e, members)
                    best = min(best, left(now, done, running | {batch}))
        events = [end for end, _, _ in running] + [at for at in arrivals if at > now]
        if events:
            later = min(events)
            ended = [batch for batch in running if batch[0] == later]
            after = done | {m for _, _, members in ended for m in members}
            complete = sum(
                all((r, p) in after for p in range(len(app.primitives)))
                and not all((r, p) in done for p in range(len(app.primitives)))
                for r in range(len(arrivals))
            )
            best = min(best, complete * later + left(later, frozenset(after), running - set(ended)))
        return best

    return (left(0.0, frozenset(), frozenset()) - sum(arrivals)) / len(arrivals)


def test_example_is_planned_with_predictions(predictor: LatencyPredictor, tmp_path: Path) -> None:
    value = json.loads(EXAMPLE.read_text())
    answer = make_plan("application", value, predictor)
    plan = ApplicationPlan.model_validate(answer)
    assert answer == make_plan("application", value, predictor)
    assert answer["mean_latency_s"] <= min(answer["baselines"].values())
    assert answer["gap"] >= 0
    assert any("linear:" in line for line in answer["explanation"])
    request = ApplicationRequest.model_validate(value)
    assert "above the lower bound" in render(plan.tables())
    draw(request, plan).savefig(tmp_path / "application.png")


def test_a_split_prefill_starts_before_the_search_ends() -> None:
    request = {
        "engines": [
            {"name": "search", "curve": {"batch": [1], "seconds": [5.0]}},
            {"name": "prefill", "curve": {"batch": [1, 4], "seconds": [1.0, 4.0]}},
        ],
        "primitives": [
            {"id": "search", "engine": "search"},
            {
                "id": "prefill",
                "engine": "prefill",
                "items": 4,
                "parts": [{"items": 3, "after": []}, {"items": 1, "after": ["search"]}],
            },
        ],
        "arrivals_s": [0],
    }
    answer = make_plan("application", request)
    assert answer["baselines"]["first_come"] == 9.0
    assert answer["mean_latency_s"] == 6.0
    assert [m["primitive"] for b in answer["batches"] for m in b["members"]] == ["search", "prefill#0", "prefill#1"]


ONE: dict[str, Any] = {
    "engines": [{"name": "e", "curve": {"batch": [1], "seconds": [1.0]}}],
    "primitives": [{"id": "a", "engine": "e"}],
    "arrivals_s": [0],
}


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"primitives": [{"id": "a", "engine": "f"}]}, "primitives.0.engine"),
        ({"primitives": [{"id": "a", "engine": "e", "after": ["b"]}]}, "primitives.0.after"),
        (
            {"primitives": [{"id": "a", "engine": "e", "after": ["b"]}, {"id": "b", "engine": "e", "after": ["a"]}]},
            "primitives.0.after",
        ),
        ({"primitives": [{"id": "a", "engine": "e"}] * 2}, "primitives.1.id"),
        ({"engines": ONE["engines"] * 2}, "engines.1.name"),
        (
            {
                "primitives": [
                    {
                        "id": "a",
                        "engine": "e",
                        "items": 3,
                        "parts": [{"items": 1, "after": []}, {"items": 1, "after": []}],
                    }
                ]
            },
            "primitives.0.parts",
        ),
        ({"arrivals_s": []}, "arrivals_s"),
        ({"arrivals_s": [-1.0]}, "arrivals_s.0"),
    ],
)
def test_error_names_the_field(change: dict[str, Any], path: str) -> None:
    with pytest.raises(FieldError) as caught:
        make_plan("application", {**ONE, **change})
    assert caught.value.path == path
