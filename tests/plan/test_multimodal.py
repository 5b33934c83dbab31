"""Multimodal pipelines: modules, placements, memory, plans, requests through the command line, and the check."""

from __future__ import annotations

import copy
import itertools
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure
from typer.testing import CliRunner

from cdmpp.cli.main import app
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.plan.base.solve import predict_prices, read_request
from cdmpp.plan.multimodal import Module
from cdmpp.plan.multimodal.check import check
from cdmpp.plan.multimodal.knobs import choose_knobs, least_bytes, peak_bytes
from cdmpp.plan.multimodal.modules import MemoryOptions, chunk_cost, link_items, shared_units, split_evenly
from cdmpp.plan.multimodal.placement import balanced_cuts, contiguous, in_segments
from cdmpp.plan.multimodal.schema import MultimodalPlan, MultimodalRequest
from cdmpp.plan.multimodal.solver import draw
from cdmpp.plan.multimodal.tasks import (
    RULES,
    data_order_key,
    least_memory_orders,
    list_schedule,
    schedule_orders,
    sequence_by,
)
from cdmpp.plan.registry import make_plan
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.predict.rendering import render
from cdmpp.predict.requests.budget import Progress, SearchControl
from cdmpp_server.plan_limits import DEFAULTS
from tests.plan.multimodal_cases import module, step

pytestmark = pytest.mark.slow

EXAMPLE = Path("docs/examples/pipeline_modules.json")


def form(name: str, layers: Any, forward_s: float, after: list[str] | None = None, **more: Any) -> dict[str, Any]:
    sizes = [1, 2, 4, 8]
    return {
        "name": name,
        "layers": layers,
        "after": after or [],
        "cost": {
            "sizes": sizes,
            "forward_s": [forward_s * (0.25 + n) for n in sizes],
            "backward_s": [2 * forward_s * (0.25 + n) for n in sizes],
        },
        **more,
    }


def request(**more: Any) -> dict[str, Any]:
    base = {
        "modules": [
            form("vision", 8, 0.5),
            form("language", 12, 1.0, ["vision"]),
            form("diffusion", 10, 0.75, ["language"]),
        ],
        "batch": {"vision": 12, "language": 8, "diffusion": 5},
        "ranks": 4,
        "budget_s": 600,
        "max_steps": 250,
    }
    return {name: value for name, value in (base | more).items() if value is not None}


MEMORY = [
    form("vision", 8, 0.5, activation_bytes=3.0, boundary_bytes=0.5, weight_bytes=10.0),
    form("language", 12, 1.0, ["vision"], activation_bytes=10.0, boundary_bytes=1.0, weight_bytes=40.0),
    form("diffusion", 10, 0.75, ["language"], activation_bytes=5.0, weight_bytes=20.0),
]


def faults(value: dict[str, Any], answer: dict[str, Any]) -> list[str]:
    return check(read_request(MultimodalRequest, value), json.loads(json.dumps(answer)))


# Modules


def test_efficient_size_is_the_smallest_with_the_share() -> None:
    sizes, seconds = np.array([1.0, 2, 4, 8]), np.array([1.0, 1.2, 2.0, 3.9])
    unit_layer = Module("a", (1.0,), sizes, seconds, seconds)
    # Items a second: 1, 1.67, 2, 2.05 (twice that is spent).
    assert [unit_layer.efficient_size(share) for share in (0.4, 0.8, 0.95, 0.98, 1.0)] == [1, 2, 4, 8, 8]
    assert unit_layer.efficiency(8) == 1.0
    assert unit_layer.layer_s(6) == ((2.0 + 3.9) / 2, (2.0 + 3.9) / 2)
    assert split_evenly(10, 4) == (3, 3, 2, 2)


def test_items_are_linked_to_samples() -> None:
    vision, language = module("vision", 1, 1, 1), module("language", 1, 1, 1, (0,))
    diffusion = module("diffusion", 1, 1, 1, (1,))
    items = link_items([vision, language, diffusion], [6, 4, 2])
    assert items.samples == 1
    # Images to sequences 0 0 1 2 2 3; the two images that are made are of sequences 0 and 2.
    assert items.sample_of(0, [6, 4, 2]).tolist() == [0, 0, 1, 2, 2, 3]
    assert items.sample_of(2, [6, 4, 2]).tolist() == [0, 2]
    to_language, to_diffusion = sorted(items.all, key=lambda link: link.single)
    assert (to_language.single, to_language.other, to_language.forward) == (0, 1, True)
    assert (to_diffusion.single, to_diffusion.other, to_diffusion.forward) == (2, 1, False)
    assert shared_units((3, 3), (2, 2)).tolist() == [[0, 0], [1, 1]]
    assert shared_units((4, 2), (2, 2)).tolist() == [[0, 0], [0, 1], [1, 1]]
    # Without sequences the images go straight on.
    (only,) = link_items([vision, language, diffusion], [6, 0, 2]).all
    assert (only.single, only.other, only.forward) == (0, 2, True)


def test_cycles_of_modules_are_refused() -> None:
    ring = [form("a", 4, 1.0, ["b"]), form("b", 4, 1.0, ["a"])]
    with pytest.raises(FieldError, match="wait for each other: a, b") as caught:
        make_plan("pipeline", request(modules=ring, batch={"a": 1, "b": 1}))
    assert caught.value.path == "modules.0.after"


# Placements


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=7), st.lists(st.integers(0, 9), min_size=1, max_size=4))
def test_balanced_cuts_are_the_best_of_all_cuts(layers: list[int], load: list[int]) -> None:
    def value(cuts: tuple[int, ...]) -> int:
        ends = (0, *cuts, len(layers))
        return sum((b + sum(layers[i:j])) ** 2 for b, i, j in zip(load, ends, ends[1:], strict=False))

    cuts = balanced_cuts(np.array(layers, float), np.array(load, float)).tolist()
    assert cuts[0] == 0 and cuts[-1] == len(layers)
    every = itertools.combinations_with_replacement(range(len(layers) + 1), len(load) - 1)
    assert value(tuple(cuts[1:-1])) == min(map(value, every))


def test_odd_layers_of_segments_and_modules_are_balanced() -> None:
    modules = [module("a", 9, 1, 1), module("b", 11, 1, 1)]
    placement = in_segments(modules, [2, 2], [9.0, 11.0], 4)
    load = [0] * 4
    for row in placement.chunks:
        assert [chunk.segment for chunk in row] == [0] * 4 + [1] * 4
        assert [chunk.rank for chunk in row] == [0, 1, 2, 3] * 2
        for chunk in row:
            load[chunk.rank] += chunk.layers
    assert load == [5, 5, 5, 5]
    packed = contiguous(modules, [9.0, 11.0], 4)
    assert [[(c.rank, c.layers) for c in row] for row in packed.chunks] == [[(0, 5), (1, 4)], [(1, 1), (2, 5), (3, 5)]]


# Memory


def test_chunk_cost_under_each_knob() -> None:
    one = module("a", 4, 1.0, 2.0, activation_bytes=6.0, boundary_bytes=2.0)
    memory = MemoryOptions(100.0, ("keep", "recompute", "offload"), 8.0)
    assert chunk_cost(one, (1, 2), 3, "keep", memory) == (6.0, 12.0, 36.0, 0.0, 0.0)
    assert chunk_cost(one, (1, 2), 3, "recompute", memory) == (6.0, 18.0, 6.0, 0.0, 30.0)
    # 36 bytes at 8 bytes a second: 4.5 s, hidden beside both passes; at 4, forward is as long as it.
    assert chunk_cost(one, (1, 2), 3, "offload", memory) == (6.0, 12.0, 0.0, 36.0, 36.0)
    slow = MemoryOptions(100.0, memory.knobs, 4.0)
    assert chunk_cost(one, (1, 2), 3, "offload", slow) == (9.0, 12.0, 0.0, 36.0, 36.0)


@pytest.mark.parametrize("seed", range(4))
def test_chosen_knobs_add_the_least_time_of_all_choices(seed: int) -> None:
    rng = np.random.default_rng(seed)
    figures = rng.integers(1, 8, (3, 5)).astype(float)
    modules = [
        module(f"m{i}", 4, f, b, (i - 1,) if i else (), activation_bytes=a, boundary_bytes=c / 4, weight_bytes=w)
        for i, (f, b, a, c, w) in enumerate(figures)
    ]
    free = MemoryOptions(float("inf"), ("keep", "recompute", "offload"), 3.0)
    tasks = step(modules, (3, 2, 3), (1, 1, 1), 2, free)
    orders = list_schedule(tasks, sequence_by(tasks, data_order_key(tasks)), RULES[0]).orders
    chunks = [
        [(i, at) for i, row in enumerate(tasks.placement.chunks) for at, c in enumerate(row) if c.rank == r]
        for r in range(2)
    ]

    def every(rank: int) -> list[tuple[float, float]]:
        out = []
        for knobs in itertools.product(free.knobs, repeat=len(chunks[rank])):
            rows = [list(row) for row in tasks.knobs]
            for (i, at), knob in zip(chunks[rank], knobs, strict=True):
                rows[i][at] = knob
            other = tasks.with_knobs(tuple(map(tuple, rows)))
            out.append((peak_bytes(other, orders)[rank], float(other.duration_s.sum())))
        return out

    least = max(min(peak for peak, _ in every(rank)) for rank in range(2))
    assert least_bytes(tasks, orders) == pytest.approx(least, rel=1e-9)
    most = max(peak_bytes(tasks, orders))
    for limit in np.linspace(least, most, 5):
        limited = step(modules, (3, 2, 3), (1, 1, 1), 2, MemoryOptions(float(limit), free.knobs, 3.0))
        knobs = choose_knobs(limited, orders)
        assert knobs is not None
        chosen = limited.with_knobs(knobs)
        assert max(peak_bytes(chosen, orders)) <= limit * (1 + 1e-12)
        alone = float(tasks.duration_s.sum())
        added = sum(min(s for peak, s in every(rank) if peak <= limit) - alone for rank in range(2))
        assert float(chosen.duration_s.sum()) - alone == pytest.approx(added, abs=1e-9)
    tight = step(modules, (3, 2, 3), (1, 1, 1), 2, MemoryOptions(least * 0.999, free.knobs, 3.0))
    assert choose_knobs(tight, orders) is None


def test_least_memory_orders_hold_one_unit_of_a_chain_at_a_time() -> None:
    modules = [module("a", 2, 1, 1, activation_bytes=1.0), module("b", 2, 1, 1, (0,), activation_bytes=1.0)]
    tasks = step(modules, (4, 4), (1, 1), 2, MemoryOptions(1e9))
    orders = least_memory_orders(tasks)
    assert np.isfinite(schedule_orders(tasks, orders).makespan_s)
    assert peak_bytes(tasks, orders) == [2.0, 2.0]


@pytest.mark.parametrize("knobs", [["keep"], ["keep", "recompute"], ["recompute", "keep", "offload"]])
def test_limits_are_kept_and_the_least_feasible_one_is_named(knobs: list[str]) -> None:
    more: dict[str, Any] = {"modules": MEMORY, "knobs": knobs, "host_bandwidth_bytes_per_s": 30.0, "max_steps": 60}
    free = make_plan("pipeline", request(**more))
    most = max(rank["peak_bytes"] for rank in free["memory"])
    with pytest.raises(InfeasibleError, match="the leanest plan that was found needs") as caught:
        make_plan("pipeline", request(**more, memory_bytes=1.0))
    assert caught.value.path == "memory_bytes"
    least = float(caught.value.message.rpartition(" ")[2])
    spans = []
    for limit in (most, (least + most) / 2, least):
        value = request(**more, memory_bytes=limit)
        answer = make_plan("pipeline", value)
        assert faults(value, answer) == []
        assert max(rank["peak_bytes"] for rank in answer["memory"]) <= limit * (1 + 1e-12)
        spans.append(answer["makespan_s"])
    assert free["makespan_s"] * (1 - 1e-12) <= min(spans)
    used = {knob for rank in answer["memory"] for row in rank["knobs"].values() for knob in row}
    assert len(used) == 1 if knobs == ["keep"] else "recompute" in used or "offload" in used


# Plans


@settings(max_examples=6, deadline=None)
@given(
    st.lists(st.integers(0, 12), min_size=3, max_size=3).filter(any),
    st.integers(1, 5),
    st.sampled_from([[], ["vision"]]),
)
def test_plans_pass_the_check_and_are_not_longer_than_1f1b(batch: list[int], ranks: int, after: list[str]) -> None:
    modules = [
        form("vision", 5, 0.5),
        form("language", [1, 2, 1, 1, 3, 1, 1], 1.0, after),
        form("diffusion", 9, 0.75, ["language"]),
    ]
    value = request(
        modules=modules,
        batch=dict(zip(("vision", "language", "diffusion"), batch, strict=True)),
        ranks=ranks,
        max_steps=40,
    )
    answer = make_plan("pipeline", value)
    assert faults(value, answer) == []
    assert answer["makespan_s"] <= min(answer["baselines"].values())
    assert answer["lower_bound_s"] <= answer["makespan_s"]


def test_a_single_module_gives_1f1b_of_known_makespan() -> None:
    # 12 micro-batches of one item on 4 ranks with 2 layers each: (M + P - 1)(f + b), which is the bound too.
    one = form("language", 8, 1.0)
    one["cost"] = {"sizes": [1], "forward_s": [1.0], "backward_s": [2.0]}
    answer = make_plan("pipeline", request(modules=[{**one, "segments": 1}], batch={"language": 12}))
    assert answer["baselines"] == {"1f1b": 90.0, "1f1b_segments": 90.0}
    assert answer["makespan_s"] == answer["lower_bound_s"] == 90.0
    assert answer["gap"] == 0.0 and answer["complete"]
    # Two segments halve filling and draining: a rank waits for one layer rather than for two.
    answer = make_plan("pipeline", request(modules=[{**one, "segments": 2}], batch={"language": 12}))
    assert answer["makespan_s"] == answer["lower_bound_s"] == 81.0


def test_plan_states_the_rule_size_and_its_own() -> None:
    answer = make_plan("pipeline", request())
    for cut in answer["sub_batches"].values():
        assert cut["rule_size"] == 4  # (4 / 4.25) / (8 / 8.25) is 0.97; of 2 it is 0.92
        assert cut["size"] == max(cut["items"])
    assert make_plan("pipeline", request(efficiency=0.8))["sub_batches"]["vision"]["rule_size"] == 1


def test_several_steps_share_a_placement_and_are_summed() -> None:
    batches = [
        {"vision": 12, "language": 8, "diffusion": 0},
        {"vision": 0, "language": 8, "diffusion": 5},
        {"vision": 3, "language": 0, "diffusion": 5},
    ]
    value = request(batch=None, batches=batches)
    answer = make_plan("pipeline", value)
    assert faults(value, answer) == []
    assert [plan["batch"] for plan in answer["plans"]] == batches
    assert all(plan["layout"] == answer["layout"] for plan in answer["plans"])
    assert answer["makespan_s"] == pytest.approx(sum(plan["makespan_s"] for plan in answer["plans"]))
    assert answer["makespan_s"] <= answer["baselines"]["1f1b"] * (1 + 1e-12)
    assert answer["order"] is None


def test_equal_requests_give_equal_plans_and_the_cache_is_counted() -> None:
    value = request(batch={"vision": 4, "language": 4, "diffusion": 2}, max_steps=600)
    answer = make_plan("pipeline", value)
    assert make_plan("pipeline", value) == answer
    cache = answer["cache"]
    assert cache["hits"] + cache["misses"] == answer["steps"]
    assert cache["hit_rate"] == cache["hits"] / answer["steps"] > 0


def test_progress_contains_the_best_plan_so_far() -> None:
    reports: list[Progress] = []
    value = request(max_steps=120)
    read_request(MultimodalRequest, value).solve(SearchControl(60.0, reports.append, every_s=0.0))
    last = reports[-1]
    assert last.answer is not None and last.best is not None and last.bound is not None
    assert last.bound <= last.best
    plan = last.answer()
    assert faults(value, plan.model_dump()) == []
    assert plan.makespan_s == last.best


# Requests


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"batch": {"vision": 1, "language": 1}}, "batch"),
        ({"batch": {"vision": 1, "language": 1, "diffusion": 1, "audio": 1}}, "batch"),
        ({"batch": {"vision": 0, "language": 0, "diffusion": 0}}, "batch"),
        ({"batch": {"vision": -1, "language": 0, "diffusion": 0}}, "batch.vision"),
        ({"batches": []}, "batches"),
        ({"modules": []}, "modules"),
        ({"modules": [form("vision", 8, 0.5)] * 2, "batch": {"vision": 1}}, "modules.1.name"),
        ({"modules": [form("vision", 8, 0.5, ["x"])], "batch": {"vision": 1}}, "modules.0.after.0"),
        ({"modules": [form("vision", 8, 0.5, segments=3)], "batch": {"vision": 1}}, "modules.0.segments"),
        ({"samples": "audio"}, "samples"),
        ({"ranks": 0}, "ranks"),
        ({"memory_bytes": 1e9}, "memory_bytes"),
        ({"knobs": ["offload"]}, "host_bandwidth_bytes_per_s"),
        ({"batches": [{"vision": 1, "language": 1, "diffusion": 1}]}, ""),
    ],
)
def test_invalid_requests_are_refused_with_their_path(change: dict[str, Any], path: str) -> None:
    with pytest.raises(FieldError) as caught:
        make_plan("pipeline", request(**change))
    assert caught.value.path == path


@pytest.mark.parametrize(
    ("cost", "path"),
    [
        ({"sizes": [2, 1], "forward_s": [1, 1], "backward_s": [1, 1]}, "modules.0.cost.sizes"),
        ({"sizes": [1, 2], "forward_s": [1], "backward_s": [1, 1]}, "modules.0.cost.forward_s"),
        (
            {"forward": {"batch": [1], "seconds": [1]}, "backward": {"batch": [2], "seconds": [1]}},
            "modules.0.cost.backward.batch",
        ),
        (
            {"forward": {"batch": [1], "seconds": [1e-300]}, "backward": {"batch": [1], "seconds": [1]}},
            "modules.0.cost.forward.seconds",
        ),
        ({"sizes": [1], "forward_s": [1e-300], "backward_s": [1]}, "modules.0.cost.forward_s.0"),
    ],
)
def test_contradicting_curves_are_refused_with_their_path(cost: dict[str, Any], path: str) -> None:
    with pytest.raises(FieldError) as caught:
        make_plan("pipeline", request(modules=[{**form("a", 4, 1.0), "cost": cost}], batch={"a": 2}))
    assert caught.value.path == path


def test_library_plans_steps_of_more_tasks_than_a_service_takes() -> None:
    one = form("a", 64, 1.0)
    one["cost"] = {"sizes": [1], "forward_s": [1.0], "backward_s": [1.0]}
    value = request(modules=[one], batch={"a": 512}, ranks=32, max_steps=4)
    assert read_request(MultimodalRequest, value).sizes()["tasks"] == 2 * 32 * 512 > DEFAULTS["pipeline.tasks"]
    assert make_plan("pipeline", value)["baselines"]["1f1b"] == (512 + 31) * 2 * 2.0


def test_example_is_priced_and_explained_by_its_programs(predictor: LatencyPredictor) -> None:
    value = json.loads(EXAMPLE.read_text()) | {"budget_s": 600, "max_steps": 60}
    answer = make_plan("pipeline", value, predictor)
    assert answer["model_id"] == predictor.model_id
    line = next(line for line in answer["explanation"] if line.startswith("language:"))
    assert "forward: linear:" in line and "backward: linear:" in line
    text = render(MultimodalPlan.model_validate(answer).report())
    assert re.search(r"at their bounds: \d+ ms to \d+ ms", text)
    example = read_request(MultimodalRequest, value)
    assert check(example, answer, predict_prices(example.price_requests(), predictor)) == []


def test_command_prints_plots_and_checks_plans(tmp_path: Path) -> None:
    (request_file := tmp_path / "request.json").write_text(json.dumps(request(modules=MEMORY, max_steps=30)))
    picture, answer = tmp_path / "plan.png", tmp_path / "answer.json"
    run = CliRunner().invoke(app, ["plan", "pipeline", str(request_file), "--figure", str(picture)])
    assert run.exit_code == 0, run.output
    assert "1f1b_segments" in run.stdout and picture.stat().st_size > 10_000
    layout = run.stdout.partition("layers by module.segment")[2]
    assert re.search(r"^ *3  (vision|language|diffusion)\.0 \d+-\d+", layout, re.MULTILINE)
    run = CliRunner().invoke(app, ["plan", "pipeline", str(request_file), "--json"])
    answer.write_text(run.stdout)
    checked = CliRunner().invoke(app, ["plan", "check", str(request_file), str(answer)])
    assert checked.exit_code == 0 and checked.stdout.startswith("ok")
    plan = json.loads(run.stdout)
    plan["order"][0][0]["start_s"] += 1.0
    answer.write_text(json.dumps(plan))
    assert CliRunner().invoke(app, ["plan", "check", str(request_file), str(answer)]).exit_code == 1


def test_plot_has_a_panel_for_each_step() -> None:
    one = {"vision": 2, "language": 2, "diffusion": 2}
    value = request(batch=None, batches=[one, {**one, "vision": 0}], max_steps=20)
    plan = MultimodalPlan.model_validate(make_plan("pipeline", value))
    figure = draw(read_request(MultimodalRequest, value), plan)
    assert isinstance(figure, Figure) and len(figure.axes) == 2
    assert [axis.get_xlabel() for axis in figure.axes] == ["", "time (s)"]
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["step 0", "step 1"]
    assert sum(str(table).startswith("step ") for table in plan.tables()) == 2


# The check


@pytest.fixture(scope="module")
def checked() -> tuple[dict[str, Any], dict[str, Any]]:
    value = request(modules=MEMORY, memory_bytes=2000.0, knobs=["keep", "recompute"], max_steps=30)
    answer = make_plan("pipeline", value)
    assert faults(value, answer) == []
    return value, answer


def _shift(answer: dict[str, Any]) -> None:
    entry = answer["order"][1][0]
    entry["start_s"], entry["end_s"] = entry["start_s"] - 0.1, entry["end_s"] - 0.1


def _swap(answer: dict[str, Any]) -> None:
    row = answer["order"][0]
    row[0]["micro_batch"], row[-1]["micro_batch"] = row[-1]["micro_batch"], row[0]["micro_batch"]


def _offload(answer: dict[str, Any]) -> None:
    answer["memory"][0]["knobs"]["language"][0] = "offload"


def _recompute(answer: dict[str, Any]) -> None:
    knobs = answer["memory"][0]["knobs"]
    for name, row in knobs.items():
        knobs[name] = ["keep" if knob == "recompute" else "recompute" for knob in row]


@pytest.mark.parametrize(
    ("spoil", "word"),
    [
        (lambda a: a.update(makespan_s=a["makespan_s"] * 0.9), "makespan_s"),
        (lambda a: a.update(gap=0.5), "gap"),
        (lambda a: a.pop("gap"), "gap"),
        (lambda a: a.update(lower_bound_s=a["makespan_s"] * 1.01), "lower_bound_s"),
        (lambda a: a["baselines"].update({"1f1b": a["makespan_s"] * 0.5}), "shorter than the plan"),
        (_shift, "starts at"),
        (_swap, "order.0"),
        (lambda a: a["order"][2].pop(), "passes of"),
        (lambda a: a["order"][2].append(a["order"][2][0]), "runs twice"),
        (lambda a: a["order"][0][0].update(module="language2"), "no such pass"),
        (lambda a: a["order"][0][0].update(end_s=a["order"][0][0]["end_s"] + 0.01), "its cost is"),
        (lambda a: a["memory"][0].update(peak_bytes=1.0), "memory.0"),
        (lambda a: a["memory"][0]["knobs"].update(language=["recompute"] * 99), "memory.0.knobs.language: 99 knobs"),
        (_recompute, "its cost is"),
        (lambda a: a["layout"][0].update(layers=a["layout"][0]["layers"] + 1), "layout"),
        (lambda a: a["sub_batches"]["vision"]["items"].append(1), "sub_batches.vision"),
        (lambda a: a.update(searched_lower_bound_s=a["makespan_s"] * 1.01), "searched_lower_bound_s"),
        (lambda a: a.update(searched_lower_bound_s=a["lower_bound_s"] * 0.99), "searched_lower_bound_s"),
        (lambda a: a.update(complete=not a["complete"]), "complete"),
        (lambda a: a.update(bubble=a["bubble"] + 0.01), "bubble"),
        (lambda a: a.update(interval={"lower_s": 0.0, "upper_s": 1e9}), "no cost is predicted"),
        (lambda a: a.update(interval={"lower_s": 0.0, "upper_s": 1e-9}), "does not contain makespan_s"),
        (lambda a: a["memory"].pop(), "memory: rows of ranks [0, 1, 2]"),
        (lambda a: a.update(memory=[]), "memory: rows of ranks []"),
        (lambda a: a["memory"][1].update(rank=0), "memory: rows of ranks [0, 0, 2, 3]"),
        (lambda a: a["memory"].append(a["memory"][0]), "memory: rows of ranks"),
        (lambda a: a["memory"][0].update(knobs={}), "memory.0.knobs.vision: 0 knobs for"),
        (lambda a: a["memory"][0]["knobs"].pop("language"), "memory.0.knobs.language: 0 knobs for"),
        (lambda a: a["memory"][0]["knobs"]["vision"].pop(), "memory.0.knobs.vision"),
        (lambda a: a["memory"][0]["knobs"].update(audio=["keep"]), "no module is called 'audio'"),
        (_offload, "the request permits keep, recompute"),
        (lambda a: a["batch"].update(vision=11), "batch"),
        (lambda a: a.pop("order"), "order"),
        (lambda a: a.update(order=None), "order"),
    ],
)
def test_check_reports_each_fault(checked: Any, spoil: Any, word: str) -> None:
    value, answer = copy.deepcopy(checked)
    spoil(answer)
    assert any(word in fault for fault in faults(value, answer))


def test_check_reports_an_exceeded_memory_limit(checked: Any) -> None:
    value, answer = copy.deepcopy(checked)
    value["memory_bytes"] = min(rank["peak_bytes"] for rank in answer["memory"]) * 0.9
    assert any("the limit is" in line for line in faults(value, answer))


@pytest.mark.parametrize(("field", "value", "text"), [("steps", -1, "steps: -1"), ("baselines", {}, "1f1b: missing")])
def test_check_finds_negative_steps_and_missing_baselines(field: str, value: Any, text: str) -> None:
    answer = make_plan("pipeline", request(max_steps=20))
    assert faults(request(max_steps=20), answer) == []
    assert any(text in fault for fault in faults(request(max_steps=20), {**answer, field: value}))


# Transfers, against a simulation of this file


def simulated_s(request: dict[str, Any], plan: dict[str, Any]) -> float:
    """Makespan of a plan's orders of "a", or of "a" and then "b": a pass waits for its inputs and their transfers."""
    names = [module["name"] for module in request["modules"]]
    items = {name: plan["sub_batches"][name]["items"] for name in names}
    sizes = {
        module["name"]: (
            module["cost"]["sizes"],
            module["cost"]["forward_s"],
            module["cost"]["backward_s"],
            module["transfer_s"],
        )
        for module in request["modules"]
    }
    chains = {name: [entry for entry in plan["layout"] if entry["module"] == name] for name in names}
    unit_of = {name: [u for u, n in enumerate(items[name]) for _ in range(n)] for name in names}
    pairs = set()  # units of a and of b that share items
    if "b" in names:
        n, total = len(unit_of["a"]), len(unit_of["b"])
        single, other = ("a", "b") if n >= total else ("b", "a")
        shared = [(j, j * len(unit_of[other]) // len(unit_of[single])) for j in range(len(unit_of[single]))]
        pairs = {
            (unit_of["a"][j], unit_of["b"][k]) if single == "a" else (unit_of["a"][k], unit_of["b"][j])
            for j, k in shared
        }

    def sent_s(name: str, unit: int) -> float:
        return float(np.interp(items[name][unit], sizes[name][0], sizes[name][3]))

    def waits(name: str, at: int, way: str, unit: int) -> list[tuple[tuple[str, int, str, int], float]]:
        chain, found = chains[name], []
        step = at - 1 if way == "F" else at + 1
        if 0 <= step < len(chain):
            found.append(((name, step, way, unit), sent_s(name, unit)))
        elif way == "F" and name == "b":
            found += [(("a", len(chains["a"]) - 1, "F", u), sent_s("a", u)) for u, v in pairs if v == unit]
        elif way == "B":
            found.append(((name, at, "F", unit), 0.0))
            found += [(("b", 0, "B", v), sent_s("a", unit)) for u, v in pairs if name == "a" and u == unit]
        return found

    ends: dict[Any, float] = {}
    free = [0.0] * request["ranks"]
    places = {(e["module"], e["segment"], e["rank"]): at for name in names for at, e in enumerate(chains[name])}
    queues = [
        [(p["module"], places[p["module"], p["segment"], rank], p["pass"], p["micro_batch"]) for p in row]
        for rank, row in enumerate(plan["order"])
    ]
    while any(queues):
        for rank, queue in enumerate(queues):
            while queue and all(before in ends for before, _ in waits(*queue[0])):
                name, at, way, unit = queue.pop(0)
                curve = sizes[name][1 if way == "F" else 2]
                seconds = chains[name][at]["layers"] * np.interp(items[name][unit], sizes[name][0], curve)
                ready = [
                    ends[before] + (lag if chains[before[0]][before[1]]["rank"] != rank else 0.0)
                    for before, lag in waits(name, at, way, unit)
                ]
                free[rank] = max([free[rank], *ready]) + float(seconds)
                ends[name, at, way, unit] = free[rank]
    return max(ends.values())


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31))
def test_plans_with_transfers_take_as_long_as_simulated(seed: int) -> None:
    rng = np.random.default_rng(seed)
    modules: list[dict[str, Any]] = []
    for name in ("a", "b")[: int(rng.integers(1, 3))]:
        forward = np.cumsum(rng.uniform(0.5, 1.5, 3)).tolist()
        cost = {"sizes": [1, 2, 4], "forward_s": forward, "backward_s": [2 * s for s in forward]}
        sent = np.cumsum(rng.uniform(0, 3, 3)).tolist()
        after = ["a"] if name == "b" else []
        modules.append(
            {"name": name, "layers": int(rng.integers(2, 6)), "cost": cost, "transfer_s": sent, "after": after}
        )
    batch = {module["name"]: int(rng.integers(1, 5)) for module in modules}
    more = {"batch": batch, "ranks": int(rng.integers(1, 4)), "samples": "b" if len(modules) > 1 else "a"}
    if len(modules) > 1 and batch["a"] < batch["b"]:
        more["samples"] = "a"
    request = {"modules": modules, **more, "budget_s": 600, "max_steps": 60}
    plan = make_plan("pipeline", request)
    assert check(MultimodalRequest.model_validate(request), plan) == []
    assert plan["makespan_s"] == pytest.approx(simulated_s(request, plan), rel=1e-9)
    assert plan["lower_bound_s"] <= plan["makespan_s"] * (1 + 1e-9)
    free = make_plan("pipeline", {**request, "modules": [{**module, "transfer_s": 0.0} for module in modules]})
    assert free["lower_bound_s"] <= plan["makespan_s"] * (1 + 1e-9)
