"""Applications on batching engines against hand-computed, replayed and exhaustive results."""

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
from cdmpp.errors import InfeasibleError
from cdmpp.plan.application import Application, BatchingEngine, Policy, Primitive, simulate
from cdmpp.plan.application.schema import ApplicationPlan, ApplicationRequest
from cdmpp.plan.application.search import PolicySearch, replay_graph, without_idle_time
from cdmpp.plan.application.solver import draw
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.rendering import render
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.simulate.replay import replay

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "application.json"


def engine(name: str, one_s: float, more_s: float, most: int = 4, device: str | None = None) -> BatchingEngine:
    return BatchingEngine(name, device or name, np.array([1.0, most]), np.array([one_s, one_s + more_s]), most)


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


@settings(max_examples=40)
@given(applications(), st.lists(st.integers(0, 5).map(float), min_size=1, max_size=2), st.booleans())
def test_replay_of_a_run_has_equal_times(app: Application, arrivals: list[float], batching: bool) -> None:
    run = simulate(app, arrivals, Policy(batching))
    timeline = replay(replay_graph(app, run, arrivals))
    assert timeline.start_s[len(arrivals) :].tolist() == pytest.approx([b.start_s for b in run.batches])
    assert timeline.end_s[len(arrivals) :].tolist() == pytest.approx([b.end_s for b in run.batches])


@settings(max_examples=30)
@given(applications(), st.lists(st.integers(0, 3).map(float), min_size=1, max_size=2))
def test_search_is_between_the_optimum_and_its_baselines(app: Application, arrivals: list[float]) -> None:
    result = PolicySearch(app, app, arrivals, SearchControl(), max_steps=100).run()
    best = exhaustive(app, tuple(arrivals))
    assert app.bound_s(arrivals) <= best + 1e-9
    assert best <= result.known.run.mean_s + 1e-9
    assert all(result.known.run.mean_s <= other.mean_s + 1e-9 for other in result.baselines.values())


def test_search_is_optimal_where_waiting_gains_nothing() -> None:
    # The deep branch has to go first on the engine that both begin with.
    app = Application(
        (engine("e", 2, 6), engine("f", 5, 0)),
        (Primitive("shallow", 0, 1, ()), Primitive("deep", 0, 2, ()), Primitive("end", 1, 1, (1,))),
    )
    result = PolicySearch(app, app, [0.0], SearchControl(), max_steps=100).run()
    assert result.known.run.mean_s == exhaustive(app, (0.0,)) == 9.0
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
        for e, app_engine in enumerate(app.engines):
            if app_engine.device in busy:
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
                    if size > 1 and items > app_engine.max_items:
                        continue
                    batch = (now + app_engine.batch_s(items), e, members)
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
    value = {**json.loads(EXAMPLE.read_text()), "budget_s": 60}
    answer = make_plan("application", value, predictor)
    plan = ApplicationPlan.model_validate(answer)
    assert answer == make_plan("application", value, predictor)
    assert answer["mean_latency_s"] <= min(answer["baselines"].values())
    assert answer["gap"] >= 0
    assert any("linear:" in line for line in answer["explanation"])
    assert answer["mean_latency_s"] == answer["online_s"] >= answer["known_s"] >= answer["lower_bound_s"]
    assert any(line.startswith("the engines learn arrivals as they come") for line in answer["explanation"])
    known = make_plan("application", {**value, "knows_arrivals": True}, predictor)
    assert known["mean_latency_s"] == answer["known_s"] and known["online_gap"] == answer["online_gap"]
    assert any(line.startswith("assumed: all arrivals are known") for line in known["explanation"])
    request = ApplicationRequest.model_validate(value)
    assert "the lower bound of all plans is" in render(plan.report())
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
PART: dict[str, Any] = {"items": 1, "after": []}


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
        ({"primitives": [{"id": "a", "engine": "e", "items": 3, "parts": [PART, PART]}]}, "primitives.0.parts"),
        ({"arrivals_s": []}, "arrivals_s"),
        ({"arrivals_s": [-1.0]}, "arrivals_s.0"),
    ],
)
def test_error_names_the_field(change: dict[str, Any], path: str) -> None:
    with pytest.raises(FieldError) as caught:
        make_plan("application", {**ONE, **change})
    assert caught.value.path == path


def one_engine_cases(seed: int, count: int, requests: tuple[int, int], most_primitives: int) -> list[Any]:
    """Random applications on one engine, and arrivals."""
    random = np.random.default_rng(seed)
    cases = []
    for _ in range(count):
        most = int(random.integers(2, 6))
        server = engine("e", float(random.integers(1, 9)), float(random.integers(0, 6)), most)
        chain = tuple(
            Primitive(str(i), 0, int(random.integers(1, 3)), (i - 1,) if i else ())
            for i in range(int(random.integers(1, most_primitives + 1)))
        )
        arrivals = np.cumsum(random.integers(0, 6, int(random.integers(*requests)))).tolist()
        cases.append((Application((server,), chain), [float(at) for at in arrivals]))
    return cases


@pytest.mark.parametrize(("requests", "most_primitives", "count"), [((3, 6), 1, 60), ((3, 4), 2, 20)])
def test_one_engine_is_planned_to_the_optimum(requests: tuple[int, int], most_primitives: int, count: int) -> None:
    for app, arrivals_s in one_engine_cases(3, count, requests, most_primitives):
        result = PolicySearch(app, app, arrivals_s, SearchControl(), max_steps=20_000).run()
        assert result.known.run.mean_s == pytest.approx(exhaustive(app, tuple(arrivals_s)), rel=1e-9)


@settings(max_examples=40)
@given(st.integers(0, 10**6), st.lists(st.integers(0, 4), max_size=12))
def test_runs_with_choices_are_valid_and_lose_nothing_without_idle_time(seed: int, choices: list[int]) -> None:
    ((app, arrivals_s),) = one_engine_cases(seed, 1, (2, 6), 3)
    run = simulate(app, arrivals_s, Policy(choices=tuple(choices)))
    early = without_idle_time(app, run, arrivals_s)
    assert early.mean_s <= run.mean_s + 1e-9
    for simulated in (run, early):
        members = [member for batch in simulated.batches for member in batch.members]
        assert sorted(members) == sorted(itertools.product(range(len(arrivals_s)), range(len(app.primitives))))
        ended = {member: batch.end_s for batch in simulated.batches for member in batch.members}
        for batch in simulated.batches:
            for request, primitive in batch.members:
                assert batch.start_s >= arrivals_s[request]
                assert all(batch.start_s >= ended[request, i] for i in app.primitives[primitive].after)
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(simulated.batches))


@settings(max_examples=40)
@given(st.integers(0, 10**6))
def test_online_policy_does_not_depend_on_later_arrivals(seed: int) -> None:
    ((app, arrivals_s),) = one_engine_cases(seed, 1, (2, 6), 3)
    result = PolicySearch(app, app, arrivals_s, SearchControl(), max_steps=200).run()
    assert result.known.run.mean_s <= result.online.run.mean_s + 1e-12
    assert all(result.online.run.mean_s <= other.mean_s + 1e-9 for other in result.baselines.values())
    # Rules chosen at each arrival: what they do before the last arrival is the same without that arrival.
    search = PolicySearch(app, app, arrivals_s, SearchControl())
    rules = [Policy(), Policy(batching=False), Policy(priority=tuple(app.depths()), by_request=False)]
    changes = search.changes_at_arrivals(app, rules)
    fewer = PolicySearch(app, app, arrivals_s[:-1], SearchControl()).changes_at_arrivals(app, rules)
    until = arrivals_s[-1]
    assert [c for c in changes if c[0] < until] == [c for c in fewer if c[0] < until]

    def begun(arrivals: list[float], changes: list[tuple[float, Policy]]) -> list[Any]:
        return [b for b in simulate(app, arrivals, rules[0], changes).batches if b.start_s < until]

    assert begun(arrivals_s, changes) == begun(arrivals_s[:-1], fewer)


def test_language_models_on_a_device_fit_with_their_largest_batches() -> None:
    request = json.loads((EXAMPLE.parent / "application_llm.json").read_text())
    form = ApplicationRequest.model_validate(request)
    form.check()  # prefill and decode share 16 GB of weights on 47.7 GB
    assert form.unchecked_memory() == ["engines search are no language models"]
    request["engines"][2] |= {"max_items": 512}  # 512 caches of 1,025 tokens: 69 GB
    with pytest.raises(InfeasibleError, match=r"'gpu-1' .* needs 85\.1 GB .* of the 47\.7 GB") as error:
        ApplicationRequest.model_validate(request).check()
    assert error.value.path == "engines.2" and error.value.hint.startswith("0.458 of the batches fit")
    ApplicationRequest.model_validate({**request, "ignore_memory": True}).check()
