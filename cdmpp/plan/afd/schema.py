"""Request and plan of AFD sizing."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from cdmpp.plan.base.batch_curve import BatchCurve
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.request import (
    Bytes,
    Closed,
    Count,
    Plan,
    PositiveBytes,
    PositiveSeconds,
    Request,
    Row,
    Seconds,
    WholeNumber,
    exactly_one,
    instead_of,
)
from cdmpp.utils.units import format_latency


class SideForm(Closed):
    """Instances of one kind: seconds of **one layer** by tokens on an instance, how many there are, price."""

    layer: BatchCurve
    instances: Count = Field(description="As many may be used.")
    price: float = Field(1.0, gt=0, le=1e9, description="Of one instance, in any unit.")
    max_tokens: Count | None = Field(
        None, description="Tokens (sequences) one instance may hold; null: the curve's last batch size."
    )
    memory_bytes: PositiveBytes | None = Field(
        None, description="Memory of one device of an instance; null: that of `layer`'s device."
    )
    weight_bytes: Bytes | None = Field(
        None, description="Weights of all layers on one device; null: those of the operators or `llm`."
    )
    bytes_per_token: Bytes | None = Field(
        None, description="Cache of one sequence in all layers on one device; null: that of the operators or `llm`."
    )

    @property
    def most_tokens(self) -> int:
        """Tokens that one instance may hold."""
        return self.max_tokens if self.max_tokens is not None else int(self.layer.batch[-1])


class AfdLinkForm(Closed):
    """The link of one instance; activations go there and back in each layer.

    Either ``bytes_per_token`` with ``bandwidth_bytes_per_s``, or ``layer``.
    """

    bytes_per_token: float | None = Field(None, gt=0, le=1e12)
    bandwidth_bytes_per_s: float | None = Field(None, gt=0, le=1e15)
    alpha_s: Seconds = 0.0
    layer: BatchCurve | None = Field(
        None,
        description="Instead: seconds of one layer, there and back, by tokens on the instance with most tokens. "
        "Its programs may be collectives.",
    )

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        instead_of(self, "layer", "alpha_s")
        exactly_one(self, "bytes_per_token", "layer")
        return exactly_one(self, "bandwidth_bytes_per_s", "layer")


class ColocatedPlan(Row):
    """Instances that each compute whole layers, without links between them."""

    instances: int = Field(description="As many as the goal needs.")
    batch: int = Field(description="Sequences on each instance.")
    tpot_s: float
    price_s_per_token: float


class AfdPlan(Plan):
    """The best disaggregated choice, and whether instances that compute whole layers are cheaper.

    Baselines, bound and gap are of ``price_s_per_token``: price x seconds for one token.
    """

    objective_field = "price_s_per_token"
    bounded = "disaggregated choices"
    bound_field = "lower_bound_price_s_per_token"

    attention_instances: int
    ffn_instances: int
    micro_batch: int = Field(description="Tokens in one of the three micro-batches in flight.")
    tpot_s: float
    tokens_per_s: float
    stage_s: dict[str, float] = Field(description="Seconds of a micro-batch in all layers, by stage.")
    price_s_per_token: float
    lower_bound_price_s_per_token: float
    recommended: Literal["disaggregated", "colocated"] = Field(
        description="colocated: the baseline of this name is cheaper than the best disaggregated choice."
    )
    colocated: ColocatedPlan | None = Field(description="null: its cost is not known, or it does not keep the goal.")
    dead_zone: bool = Field(description="The links are the slowest stage.")

    @property
    def choice(self) -> Any:
        """Instances, micro-batch and recommendation."""
        return self.attention_instances, self.ffn_instances, self.micro_batch, self.recommended

    def headline(self) -> str:
        """The recommended instances, and the cost of a token."""
        together = self.colocated
        if self.recommended == "disaggregated" or together is None:
            return self._disaggregated()
        plural = "s" if together.instances > 1 else ""
        saved = 1 - together.price_s_per_token / self.price_s_per_token
        return (
            f"recommended: colocated. {together.instances} instance{plural} of attention and FFN together, "
            f"{together.batch} sequences on each: {format_latency(together.tpot_s)} between tokens, "
            f"{together.price_s_per_token:.4g} price-seconds per token, "
            f"{100 * saved:.1f} % less than the best disaggregated choice"
        )

    def _disaggregated(self) -> str:
        return (
            f"{self.attention_instances} attention and {self.ffn_instances} FFN instances, "
            f"micro-batches of {self.micro_batch}: {self.tokens_per_s:,.0f} tokens/s, "
            f"{format_latency(self.tpot_s)} between tokens, {self.price_s_per_token:.4g} price-seconds per token"
        )

    @property
    def compared(self) -> str:
        """Bound and gap are of the disaggregated choice, whatever is recommended."""
        return "this" if self.recommended == "disaggregated" else "the best disaggregated choice"

    def simple_plans(self) -> dict[str, float]:
        """None where whole layers on one instance are recommended: the headline compares them."""
        return self.baselines if self.recommended == "disaggregated" else {}

    def tables(self) -> list[Table]:
        """The disaggregated choice, its stages and the baselines."""
        prices = [(name, f"{price:.4g}") for name, price in self.baselines.items()]
        return [
            Table.lines("" if self.recommended == "disaggregated" else self._disaggregated()),
            Table(("stage", "time"), [(name, format_latency(s)) for name, s in self.stage_s.items()], right=(1,)),
            Table(("baseline", "price-seconds per token (price of all instances x seconds)"), prices, right=(1,)),
            Table.lines(*self.explanation[1:]),
        ]


class AfdRequest(Request[AfdPlan]):
    """How many attention and feed-forward instances, and which micro-batch, keep a goal at least cost."""

    layers: Annotated[int, Field(ge=1, le=10_000), WholeNumber]
    attention: SideForm
    ffn: SideForm
    link: AfdLinkForm
    tpot_s: PositiveSeconds = Field(description="Most seconds between two tokens of a sequence.")
    tokens_per_s: float = Field(0.0, ge=0, le=1e12, description="Fewest tokens a second of the whole service.")
    colocated: SideForm | None = Field(
        None,
        description="The baseline: seconds of both layers in turn on one instance. null: the sum of the "
        "two curves where both are of one device.",
    )

    def sizes(self) -> dict[str, int]:
        """Instances of a side, tokens of an instance, and choices (counts times batches) to try."""
        sides = (self.attention, self.ffn)
        held = [side.instances * side.most_tokens for side in sides]
        together = [] if self.colocated is None else [self.colocated]
        return {
            "instances": max(side.instances for side in sides),
            "tokens": max(side.most_tokens for side in (*sides, *together)),
            "choices": self.attention.instances * self.ffn.instances * min(held),
        }
