"""Requests and plans of precision planning: priced programs, refused requests, and the plan's figures."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from cdmpp import LatencyPredictor
from cdmpp.devices.registry import lookup
from cdmpp.errors import FieldError
from cdmpp.plan.base.solve import solve_request
from cdmpp.plan.precision.schema import PrecisionPlan, PrecisionRequest
from cdmpp.plan.precision.tables import MEASURED, MEASURED_COPY_BYTES_PER_S, scaled
from cdmpp.plan.registry import PLANNERS, make_plan
from cdmpp.predict.rendering import render
from cdmpp.predict.requests.budget import Progress, SearchControl

EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "precision.json"


def solved(**changes: Any) -> PrecisionPlan:
    """The plan of :func:`small` with changes."""
    return PrecisionRequest.model_validate(small(**changes)).solve(SearchControl(None))


def cost(dtype: str, seconds: float, device: str | None = None) -> dict[str, Any]:
    return {"dtype": dtype, "forward_s": seconds, "backward_s": 2 * seconds, "device": device}


def small(**more: Any) -> dict[str, Any]:
    """Two operators in a row on two unlike devices."""
    operators = [
        {
            "id": name,
            "deps": deps,
            "output_elements": 1000,
            "weight_elements": 500,
            "costs": [cost("float16", 0.010), cost("float32", 0.016), cost("float32", 0.040, "slow")],
            "sensitivity": {"float16": error},
        }
        for name, deps, error in (("first", [], 1.0), ("second", ["first"], 3.0))
    ]
    casts = [
        {"source": a, "target": b, "s_per_element": 1e-6, "overhead_s": 0.001}
        for a, b in (("float16", "float32"), ("float32", "float16"))
    ]
    devices = [
        {"name": "fast", "dtypes": ["float16", "float32"], "casts": casts, "workers": 2},
        {"name": "slow", "dtypes": ["float32", "float16"], "casts": casts, "update_s": 0.002},
    ]
    return {"devices": devices, "operators": operators, "max_steps": 2000, **more}


def test_figures_computed_by_hand() -> None:
    """Within 0.16 s the slow device has time for one raise, the fast one for both."""
    plan = solved(iteration_limit_s=0.16)
    fast, slow = plan.devices
    assert fast.dtypes == {"first": "float32", "second": "float32"}
    # Raising `second` on the slow device: 0.010 x 3 and 0.040 x 3; casts between them cost 0.002 each way;
    # `first` has a copy of its weights made and its gradient cast, 0.0015 each, and the update is 0.002.
    assert slow.dtypes == {"first": "float16", "second": "float32"}
    assert slow.iteration_s == pytest.approx(0.03 + 0.12 + 2 * 0.002 + 2 * 0.0015 + 0.002)
    assert slow.casts_s == pytest.approx(2 * 0.002)
    assert plan.sensitivity == plan.lower_bound == 1.0
    assert plan.gap == 0.0
    assert fast.proven and slow.proven
    assert plan.baselines["all_lowest"] == 2 * 4.0 + 4.0
    assert {"best_uniform", "start", "heap"} <= plan.baselines.keys()
    assert "all_float32" not in plan.baselines
    assert [(refused.device, refused.operator, refused.breaks) for refused in plan.rejected] == [
        ("slow", "first", "time")
    ]
    # Per weight: master weight and gradient 8 bytes, Adam 8, the copy of `first` 2. Per element of its output: 4.
    assert slow.memory_bytes == 16 * 1000 + 2 * 500 + 4 * 1000


def test_exchanges_of_two_devices_follow_the_published_rule() -> None:
    """QSync's rule for communication nodes as published, on the timelines of both devices."""
    buckets = [{"operators": ["second"], "duration_s": 0.03}, {"operators": ["first"], "duration_s": 0.01}]
    plan = solved(iteration_limit_s=0.16, communication={"buckets": buckets})
    ready = {}
    for device in plan.devices:
        seconds = {"fast": {"float16": 0.010, "float32": 0.016}, "slow": {"float16": 0.010, "float32": 0.040}}
        first, second = (seconds[device.name][device.dtypes[name]] for name in ("first", "second"))
        weights = {name: 0.0015 if device.dtypes[name] == "float16" else 0.0 for name in ("first", "second")}
        cast = 0.002 if device.dtypes["first"] != device.dtypes["second"] else 0.0
        after_second = first + cast + second + 2 * second + weights["first"] + 2 * weights["second"]
        ready[device.name] = [after_second, after_second + cast + 2 * first + weights["first"]]
    last = {"fast": 0.0, "slow": 0.0}
    for k, duration in enumerate((0.03, 0.01)):
        start = {name: max(last[name], ready[name][k]) for name in last}
        for name in last:
            lasts = max(start.values()) - start[name] + duration
            last[name] = start[name] + lasts
    ends = [last["fast"], last["slow"] + 0.002, ready["slow"][1] + 0.002, ready["fast"][1]]
    assert plan.iteration_s == pytest.approx(max(ends))


def test_an_exchange_over_a_link_is_a_ring_of_all_workers() -> None:
    link = {"alpha_s": 0.001, "bandwidth_bytes_per_s": 1e6}
    slow = solved(communication={"link": link, "bucket_bytes": 1e9}, iteration_limit_s=1.0).devices[1]
    # 4000 bytes among three workers: 4 steps of alpha + a third of the bytes.
    ring = 4 * (0.001 + 4000 / 3 / 1e6)
    assert slow.iteration_s == pytest.approx(slow.compute_s + ring + 0.002)


def test_programs_of_the_example_are_priced_on_both_devices(predictor: LatencyPredictor) -> None:
    request = PrecisionRequest.model_validate_json(EXAMPLE.read_text())
    programs = request.price_requests()
    assert {entry.program["dtype"] for entry in programs} == {"int8", "float16", "float32"}
    # Backward programs of int8 operators are float16.
    assert all(entry.program["dtype"] != "int8" for entry in programs if ".backward." in entry.path)
    plan = solve_request(request, predictor)
    assert plan.iteration_s <= plan.iteration_limit_s
    assert plan.iteration_lower_s <= plan.iteration_s <= plan.iteration_upper_s
    assert plan.sensitivity <= min(plan.baselines.values())
    assert plan.devices[0].memory_bytes <= request.devices[0].memory_bytes
    assert plan.model_id == predictor.model_id
    assert any("linear" in sentence for sentence in plan.explanation)
    figure = request.sibling("solver").draw(request, plan)
    assert next(axes.get_xlabel() for axes in figure.axes) == "iteration (ms)"
    assert PrecisionPlan.model_validate(plan.model_dump()) == plan


def test_tables_show_types_figures_and_baselines() -> None:
    text = render(solved().report())
    for part in ("operator  fast", "casts given", "sensitivity", "heap", "breaks a limit", "the time limit of"):
        assert part in text


def test_gap_is_relative_to_the_lowest_precision_where_the_bound_is_zero() -> None:
    plan = solved()
    assert plan.gap == 0.0
    unproven = plan.model_copy(update={"lower_bound": 0.0})
    assert unproven.gap == pytest.approx(plan.sensitivity / plan.baselines["all_lowest"])


def test_statistics_give_sensitivities() -> None:
    request = small(gamma=2.0, iteration_limit_s=10.0)
    tensor = {"elements": 10, "norm2": 90.0, "max_abs": 5.0}
    for operator in request["operators"]:
        del operator["sensitivity"]
        operator["statistics"] = {"input": tensor, "weight": tensor, "gradient": tensor}
    plan = PrecisionRequest.model_validate(request).solve(SearchControl(None))
    lowest = next(baseline for baseline in plan.baseline_plans if baseline.name == "all_lowest")
    # Both variances are 2 x 90 x 10 x 2^-14 / 6; gamma (2 - 1) + 1 of them, and gamma 0 + 2; three workers.
    variance = 2 * 90 * 10 * 2.0**-14 / 6
    assert lowest.sensitivity == pytest.approx(3 * (3 * variance + 2 * variance))
    assert plan.sensitivity == 0.0


def test_answers_of_progress_do_not_change_afterwards() -> None:
    reports: list[Progress] = []
    request = PrecisionRequest.model_validate(small())
    request.solve(SearchControl(1.0, reports.append, every_s=0.0))
    assert reports
    for progress in reports:
        assert progress.answer is not None and progress.bound is not None and progress.best is not None
        plan = progress.answer()
        assert plan.sensitivity == progress.best
        assert progress.bound <= progress.best + 1e-9


def broken(change: Any) -> dict[str, Any]:
    request = copy.deepcopy(small())
    change(request)
    return request


@pytest.mark.parametrize(
    ("path", "change"),
    [
        ("operators.0.deps", lambda r: r["operators"][0].update(deps=["second"])),
        ("operators.1.deps.0", lambda r: r["operators"][1].update(deps=["unknown"])),
        ("operators.1.deps.1", lambda r: r["operators"][1].update(deps=["first", "first"])),
        ("operators.1.id", lambda r: r["operators"][1].update(id="first", deps=[])),
        ("devices.1.name", lambda r: r["devices"][1].update(name="fast")),
        ("devices.0.dtypes", lambda r: r["devices"][0].update(dtypes=["int8", "int8"])),
        ("operators.0.dtypes", lambda r: r["operators"][0].update(dtypes=["int8"])),
        ("operators.0.sensitivity", lambda r: r["operators"][0].update(sensitivity=None)),
        ("operators.0.costs", lambda r: r["operators"][0].update(costs=[cost("float16", 1.0)])),
        ("devices.0.casts", lambda r: r["devices"][0].update(casts=[])),
        (
            "devices.0.casts.0",
            lambda r: r["devices"][0].update(casts=[{"source": "int8", "target": "int8", "s_per_element": 0.0}]),
        ),
        ("devices.0.device", lambda r: r["devices"][0].update(device="t5000", casts=None)),
        (
            "devices.0.device",
            lambda r: r["operators"][0].update(
                costs=None, backward=[], forward=[{"program": {"operator": "relu", "rows": 1, "cols": 1}}]
            ),
        ),
        ("operators.0.costs", lambda r: r["operators"][0].update(costs=None)),
        ("operators.0.costs", lambda r: r["operators"][0].update(forward=[], backward=[])),
        ("operators.0.backward", lambda r: r["operators"][0].update(backward_factor=1.0)),
        ("operators.0.backward", lambda r: r["operators"][0].update(costs=None, forward=[])),
        (
            "operators.0.sensitivity",
            lambda r: r["operators"][0].update(statistics={"input": {"elements": 1, "norm2": 1.0, "max_abs": 1.0}}),
        ),
        ("communication.link", lambda r: r.update(communication={})),
        ("communication.link", lambda r: r.update(communication={"link": {}})),
        (
            "communication.buckets.0.operators.0",
            lambda r: r.update(communication={"buckets": [{"operators": ["unknown"]}]}),
        ),
        (
            "communication.buckets.0.operators.1",
            lambda r: r.update(communication={"buckets": [{"operators": ["first", "first"]}]}),
        ),
        (
            "communication.buckets.0.duration_s",
            lambda r: r.update(communication={"buckets": [{"operators": ["first"]}]}),
        ),
    ],
)
def test_a_contradictory_request_names_its_field(path: str, change: Any) -> None:
    with pytest.raises(FieldError) as caught:
        make_plan("precision", broken(change), None)
    assert caught.value.path == path


def test_a_program_without_a_type_is_refused() -> None:
    request = small()
    request["operators"][0].update(costs=None, backward_factor=2.0, forward=[{"program": {"tvm_json": "{}"}}])
    for device in request["devices"]:
        device["device"] = "t4"
    with pytest.raises(FieldError, match="cannot be changed") as caught:
        PLANNERS["precision"].read(request).price_requests()
    assert caught.value.path == "operators.0.forward.0.program"


def test_measured_casts_are_scaled_by_bandwidth() -> None:
    device = lookup("t4")
    casts = scaled(device, "graph")
    pair = ("float32", "float16")
    ratio = MEASURED_COPY_BYTES_PER_S / device.mem_bandwidth_bytes_per_s
    assert casts[pair].s_per_element == pytest.approx(MEASURED[pair].s_per_element * ratio)
    assert casts[pair].overhead_s == 2e-6
    assert casts[pair].seconds(0) == 0.0
    assert len(MEASURED) == 12


def test_request_in_the_documentation_is_solved() -> None:
    text = (EXAMPLE.parent.parent / "precision.md").read_text()
    block = re.search(r"```json\n(.*?)```", text, re.DOTALL)
    device = PrecisionRequest.model_validate_json(block[1]).solve(SearchControl(None)).devices[0]
    # 0.1 s: time for one float32 operator, and the casts between the two.
    assert device.dtypes == {"a": "float16", "b": "float32"}
    assert device.proven
