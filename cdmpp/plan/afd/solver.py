"""Solver of AFD requests: sides from curves and memory, the best choice, its baselines, and the explanation."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.plan.afd.schema import AfdLinkForm, AfdPlan, AfdRequest, SideForm
from cdmpp.plan.afd.size import (
    IN_FLIGHT,
    AfdLink,
    AfdSide,
    AnyLink,
    LinkCurve,
    Sizing,
    bandwidth_needed,
    bound,
    colocated,
    size,
)
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.memory import check_fits, memory_limit
from cdmpp.predict.requests.plot import new_figure
from cdmpp.predict.requests.pricing import Cost
from cdmpp.programs.operators import make_operator, resident_bytes
from cdmpp.utils.units import format_latency, format_si

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def solve(request: AfdRequest, control: SearchControl) -> AfdPlan:
    """The cheapest instance counts that meet the goal.

    Raises FieldError: a curve contradicts itself.
    Raises InfeasibleError: no choice meets the goal.
    """
    attention, attention_costs = _side(request, "attention")
    ffn, ffn_costs = _side(request, "ffn")
    layers, tpot_s, tokens_per_s = request.layers, request.tpot_s, request.tokens_per_s
    link, link_costs = _link(request.link)
    sized = partial(
        size, attention, ffn, link, layers=layers, tpot_s=tpot_s, tokens_per_s=tokens_per_s, control=control
    )
    best = sized()
    baselines: dict[str, float] = {}
    together = _colocated_sides(request, attention, ffn)
    most = attention.max_instances + ffn.max_instances if request.colocated is None else request.colocated.instances
    alone = None
    if together is not None:
        alone = colocated(*together, layers=layers, tpot_s=tpot_s, tokens_per_s=tokens_per_s, max_instances=most)
    if alone is not None:
        baselines["colocated"] = alone.price_s_per_token
    cheaper = alone is not None and alone.price_s_per_token < best.price_s_per_token * (1 - 1e-9)
    with suppress(FieldError):  # equal counts may not meet the goal
        baselines["equal_counts"] = sized(equal=True).price_s_per_token
    stages = {"attention": best.attention_s, "ffn": best.ffn_s, "communication": best.communication_s}
    slowest = max(stages, key=lambda name: stages[name])
    remarks = {
        "the search was stopped: cheaper choices may exist": not best.complete,
        "disaggregation does not pay: instances that compute whole layers are cheaper per token": cheaper,
    }
    explanation = [
        *(text for text, holds in remarks.items() if holds),
        f"{slowest} is the slowest stage: {format_latency(stages[slowest])} of {format_latency(tpot_s / IN_FLIGHT)}",
        *_dominating("attention", attention_costs),
        *_dominating("ffn", ffn_costs),
        *_dominating("communication", link_costs),
    ]
    if slowest == "communication":
        remedy = _remedy(best, link, layers)
        explanation.append(f"dead zone: the links limit both sides, and more instances do not help; {remedy}")
    return AfdPlan(
        attention_instances=best.attention,
        ffn_instances=best.ffn,
        micro_batch=best.micro_batch,
        tpot_s=best.tpot_s,
        tokens_per_s=best.tokens_per_s,
        stage_s=stages,
        price_s_per_token=best.price_s_per_token,
        lower_bound_price_s_per_token=bound(attention, ffn, layers=layers, tpot_s=tpot_s),
        baselines=baselines,
        recommended="colocated" if cheaper else "disaggregated",
        colocated=alone,
        dead_zone=slowest == "communication",
        explanation=explanation,
    )


def figure_of(request: AfdRequest, plan: AfdPlan) -> float:
    """Price x seconds per token of a plan with the costs of this request, also where its goals are not kept."""
    attention, _ = _side(request, "attention")
    ffn, _ = _side(request, "ffn")
    link, _ = _link(request.link)
    counts = (plan.attention_instances, plan.ffn_instances)
    tokens = np.array([-(-plan.micro_batch // count) for count in counts])
    layer_s = max(*attention.layer_s(tokens[:1]), *ffn.layer_s(tokens[1:]), float(link.layer_s(tokens.max())))
    price = counts[0] * attention.price + counts[1] * ffn.price
    return float(price * request.layers * layer_s / plan.micro_batch)


def _colocated_sides(request: AfdRequest, attention: AfdSide, ffn: AfdSide) -> tuple[AfdSide, ...] | None:
    """Sides that one instance computes in turn where nothing is disaggregated; None where that is not known."""
    forms = {"attention": request.attention, "ffn": request.ffn}
    same_device = request.attention.layer.device == request.ffn.layer.device
    try:
        if request.colocated is not None:
            return (_side(request, "colocated", in_flight=1)[0],)
        if not same_device or request.attention.price != request.ffn.price:
            return None
        held = tokens_in_memory(forms, request.layers, 1, request.ignore_memory)
    except InfeasibleError:
        return None  # one instance does not hold both sides
    # The memory of a disaggregated instance is no limit here.
    sides = [replace(s, max_tokens=f.most_tokens) for s, f in ((attention, request.attention), (ffn, request.ffn))]
    return tuple(side if held is None else replace(side, max_tokens=min(side.max_tokens, held)) for side in sides)


def _side(request: AfdRequest, name: str, in_flight: int = IN_FLIGHT) -> tuple[AfdSide, list[Cost]]:
    """A side with its costs; its instances hold no more tokens than their memory."""
    form: SideForm = getattr(request, name)
    form.layer.check(f"{name}.layer")
    sizes, costs = form.layer.points()
    seconds = np.array([cost.latency_s for cost in costs])
    held = tokens_in_memory({name: form}, request.layers, in_flight, request.ignore_memory)
    max_tokens = form.most_tokens if held is None else min(form.most_tokens, held)
    return AfdSide(sizes, seconds, form.instances, form.price, max_tokens), costs


def tokens_in_memory(forms: dict[str, SideForm], layers: int, in_flight: int, ignore: bool) -> int | None:
    """Tokens of a micro-batch that an instance which computes all these sides holds; None: memory is no limit.

    ``forms``: sides by their field in the request. ``in_flight``: micro-batches that have caches at the same time.
    Raises InfeasibleError: the weights and one sequence of each micro-batch do not fit.
    """
    limit = min(memory_limit(form.memory_bytes, [form.layer.device], ignore) for form in forms.values())
    parts = [side_bytes(form, f"{path}.layer", layers) for path, form in forms.items()]
    weights, cache = sum(part[0] for part in parts), in_flight * sum(part[1] for part in parts)
    path = next(iter(forms))
    check_fits(
        f"one device of an instance ({' and '.join(forms)}) with one sequence in each of {in_flight} micro-batches",
        weights + cache,
        limit,
        path=path,
        fits="use devices with more memory, more devices in an instance (tp, ep), or smaller weights",
    )
    return int((limit - weights) // cache) if cache and limit < float("inf") else None


def side_bytes(form: SideForm, path: str, layers: int) -> tuple[float, float]:
    """Bytes on one device of an instance: weights, and cache of one sequence, in all layers."""
    weights, cache = 0.0, 0.0
    if form.layer.llm is not None:
        weights, cache = form.layer.llm.memory()
        cache /= form.layer.llm.layout.dp
    elif form.layer.works is not None:
        works, largest = form.layer.works, form.layer.batch[-1]
        for work, request in zip(works, form.layer.price_requests(path)[-len(works) :], strict=True):
            fixed, held = resident_bytes(make_operator(request.program))
            weights += layers * work.count * fixed
            cache += layers * work.count * held / largest
    return (
        weights if form.weight_bytes is None else form.weight_bytes,
        cache if form.bytes_per_token is None else form.bytes_per_token,
    )


def _link(form: AfdLinkForm) -> tuple[AnyLink, list[Cost]]:
    if form.layer is None:
        assert form.bytes_per_token is not None and form.bandwidth_bytes_per_s is not None, "checked by the schema"
        return AfdLink(form.bytes_per_token, form.bandwidth_bytes_per_s, form.alpha_s), []
    form.layer.check("link.layer")
    sizes, costs = form.layer.points()
    return LinkCurve(sizes, np.array([cost.latency_s for cost in costs])), costs


def _remedy(best: Sizing, link: AnyLink, layers: int) -> str:
    """A link at which communication would no longer be the slowest stage."""
    if isinstance(link, LinkCurve):
        return f"{format_latency(max(best.attention_s, best.ffn_s) / layers)} in a layer would be fast enough"
    needed = bandwidth_needed(best, link, layers)
    return f"links of {format_si(needed, 'B/s')} would help" if np.isfinite(needed) else "latency limits them"


def _dominating(name: str, costs: Sequence[Cost]) -> list[str]:
    largest = costs[-1].largest() if costs else ""
    return [f"{name} at its largest batch: {largest}"] if largest else []


def draw(request: AfdRequest, plan: AfdPlan) -> Figure:
    """Bars of the stages, with the share of the goal that each may take."""
    figure = new_figure(6, 2.4)
    axes = figure.subplots()
    milliseconds = [1e3 * seconds for seconds in plan.stage_s.values()]
    axes.barh(list(plan.stage_s), milliseconds, color=["#4269d0", "#efb118", "#9498a0"])
    axes.axvline(1e3 * request.tpot_s / IN_FLIGHT, color="#ff725c", label="goal: a third of the time per token")
    axes.set_xlabel("time of one micro-batch in all layers (ms)")
    axes.set_title(
        f"{plan.attention_instances} attention + {plan.ffn_instances} FFN instances, micro-batch {plan.micro_batch}"
    )
    axes.legend(frameon=False)
    return figure
