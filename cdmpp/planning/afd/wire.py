"""The request and the answer of AFD sizing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from cdmpp.compose import Asked, Explained, Request, Watch
from cdmpp.compose.costs import BatchCurve, Cost
from cdmpp.compose.request import Closed, PositiveSeconds, Seconds, WholeNumber
from cdmpp.errors import FieldError
from cdmpp.planning.afd.size import IN_FLIGHT, Link, Side, bandwidth_needed, bound, colocated, size
from cdmpp.prediction import Prediction
from cdmpp.units import format_latency, format_si

MAX_INSTANCES, MAX_TOKENS = 64, 8192
#: Choices (counts times batches) of one request: a second or two.
MAX_CHOICES = 40_000_000
Count = Annotated[int, Field(ge=1, le=MAX_INSTANCES), WholeNumber]


class SideForm(Closed):
    """Instances of one kind: seconds of **one layer** by tokens on an instance, how many there are, price."""

    layer: BatchCurve
    instances: Annotated[Count, Field(description="As many may be used.")]
    price: Annotated[float, Field(gt=0, le=1e9, description="Of one instance, in any unit.")] = 1.0
    max_tokens: Annotated[
        Annotated[int, Field(ge=1, le=MAX_TOKENS), WholeNumber] | None,
        Field(description="Tokens (sequences) one instance may hold; null: the curve's last batch size."),
    ] = None


class LinkForm(Closed):
    """The link of one instance; activations go there and back in each layer."""

    bytes_per_token: Annotated[float, Field(gt=0, le=1e12)]
    bandwidth_bytes_per_s: Annotated[float, Field(gt=0, le=1e15)]
    alpha_s: Seconds = 0.0


class AfdRequest(Request):
    """How many attention and feed-forward instances, and which micro-batch, keep a goal at least cost."""

    layers: Annotated[int, Field(ge=1, le=10_000), WholeNumber]
    attention: SideForm
    ffn: SideForm
    link: LinkForm
    tpot_s: Annotated[PositiveSeconds, Field(description="Most seconds between two tokens of a sequence.")]
    tokens_per_s: Annotated[
        float, Field(ge=0, le=1e12, description="Fewest tokens a second of the whole service.")
    ] = 0.0
    colocated: Annotated[
        SideForm | None,
        Field(
            description="The baseline: seconds of both layers in turn on one instance. null: the sum of the "
            "two curves where both are of one device."
        ),
    ] = None

    answer_model: ClassVar[type[BaseModel]]

    def asked(self) -> list[Asked]:
        """Programs of both curves."""
        sides = [("attention", self.attention), ("ffn", self.ffn), ("colocated", self.colocated)]
        return [one for name, side in sides if side for one in side.layer.asked(f"{name}.layer")]

    def solve(self, prices: Sequence[Prediction], watch: Watch) -> dict[str, Any]:
        """See :class:`AfdAnswer`."""
        left = iter(prices)
        attention, a_costs = _side(self.attention, "attention", left)
        ffn, f_costs = _side(self.ffn, "ffn", left)
        choices = (
            attention.most * ffn.most * min(attention.most * attention.max_tokens, ffn.most * ffn.max_tokens)
        )
        if choices > MAX_CHOICES:
            raise FieldError(
                f"attention.max_tokens: {choices:,} choices to try",
                path="attention.max_tokens",
                hint=f"at most {MAX_CHOICES:,}: fewer instances, or fewer tokens for each",
            )
        link = Link(self.link.bytes_per_token, self.link.bandwidth_bytes_per_s, self.link.alpha_s)
        limits = {"layers": self.layers, "tpot_s": self.tpot_s}
        best = size(attention, ffn, link, tokens_per_s=self.tokens_per_s, **limits)  # type: ignore[arg-type]
        baselines: dict[str, float] = {}
        together = self._together(attention, ffn, left)
        alone = None if together is None else colocated(*together, **limits)  # type: ignore[arg-type]
        if alone is not None:
            baselines["colocated"] = alone
        try:
            even = size(attention, ffn, link, tokens_per_s=self.tokens_per_s, equal=True, **limits)  # type: ignore[arg-type]
            baselines["equal_counts"] = even.price_s_per_token
        except FieldError:
            pass  # as many on either side cannot keep the goal
        lowest = bound(attention, ffn, **limits)  # type: ignore[arg-type]
        stages = {"attention": best.attention_s, "ffn": best.ffn_s, "communication": best.communication_s}
        slowest = max(stages, key=lambda name: stages[name])
        needed = bandwidth_needed(best, link, self.layers)
        dead = slowest == "communication"
        explanation = [
            f"{slowest} is the slowest stage: {format_latency(stages[slowest])} of "
            f"{format_latency(self.tpot_s / IN_FLIGHT)}",
            *_programs("attention", a_costs),
            *_programs("ffn", f_costs),
        ]
        if dead:
            explanation.append(
                "dead zone: the links hold both sides back, more instances do not help; "
                + (
                    f"links of {format_si(needed, 'B/s')} would not"
                    if np.isfinite(needed)
                    else "their latency does"
                )
            )
        return {
            "attention_instances": best.attention,
            "ffn_instances": best.ffn,
            "micro_batch": best.micro_batch,
            "tpot_s": best.tpot_s,
            "tokens_per_s": best.tokens_per_s,
            "stage_s": stages,
            "price_s_per_token": best.price_s_per_token,
            "baselines": baselines,
            "lower_bound_price_s_per_token": lowest,
            "gap": best.price_s_per_token / lowest - 1,
            "dead_zone": dead,
            "explanation": explanation,
        }

    def _together(self, attention: Side, ffn: Side, prices: Iterator[Prediction]) -> tuple[Side, ...] | None:
        """What one instance computes in turn where nothing is apart; None where nobody knows."""
        if self.colocated is not None:
            return (_side(self.colocated, "colocated", prices)[0],)
        mine, other = self.attention, self.ffn
        same = mine.layer.device == other.layer.device and mine.price == other.price
        return (attention, ffn) if same else None


class AfdAnswer(Explained):
    """Baselines, bound and gap are of ``price_s_per_token``: price x seconds for one token."""

    model_config = ConfigDict(extra="forbid")

    attention_instances: int
    ffn_instances: int
    micro_batch: Annotated[int, Field(description="Tokens in one of the three micro-batches in flight.")]
    tpot_s: float
    tokens_per_s: float
    stage_s: Annotated[
        dict[str, float], Field(description="Seconds of a micro-batch in all layers, by stage.")
    ]
    price_s_per_token: float
    lower_bound_price_s_per_token: float
    dead_zone: Annotated[bool, Field(description="The links are the slowest stage.")]


AfdRequest.answer_model = AfdAnswer


def _side(form: SideForm, name: str, prices: Iterator[Prediction]) -> tuple[Side, list[Cost]]:
    form.layer.check(f"{name}.layer")
    sizes, costs = form.layer.points(prices)
    most = form.max_tokens if form.max_tokens is not None else int(sizes[-1])
    if most > MAX_TOKENS:
        raise FieldError(
            f"{name}.max_tokens: {most} tokens on an instance",
            path=f"{name}.max_tokens",
            hint=f"at most {MAX_TOKENS}",
        )
    seconds = np.array([cost.latency_s for cost in costs])
    return Side(sizes, seconds, form.instances, form.price, most), costs


def _programs(name: str, costs: Sequence[Cost]) -> list[str]:
    largest = costs[-1].largest()
    return [f"{name} at its largest batch: {largest}"] if largest else []
