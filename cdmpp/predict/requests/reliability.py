"""How far the costs of a plan are trusted: its model, its domain, and the plan at the ends of the interval."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from cdmpp.model.domain.score import worst as worst_domain
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.fields import Row
from cdmpp.programs.collectives import assumed_of
from cdmpp.utils.units import format_latency

_MOST_NAMED = 4
Choice = Literal["same plan", "another plan", "no plan"]


class Ends(Row):
    """A figure of the plan with all predictions at the ends of their 80 % intervals."""

    figure: str = Field(description="Field of the plan, as a dotted path.")
    lower: float = Field(description="The figure of this plan with all predictions at their lower ends.")
    upper: float
    best_at_lower: Choice | None = Field(
        None, description="Plan that is best at the lower ends; null: not searched again."
    )
    best_at_upper: Choice | None = None


class Reliability(Row):
    """How far the costs of a plan are trusted. ``model_id`` and ``domain`` are fields of the plan."""

    programs: int = Field(description="Programs that the model priced; 0: all costs are given.")
    domain_share: float | None = Field(
        None, description="Part of the time of these programs whose domain is that of the plan."
    )
    domain_program: str | None = Field(None, description="Longest program with that domain, and its device.")
    ends: Ends | None = Field(
        None, description="null: nothing was predicted, or the planner was asked for no interval."
    )
    given: list[str] = Field(
        description="Costs that the request gives as numbers, without interval; * stands for all indices."
    )
    assumed: list[str] = Field(default_factory=list, description="What was assumed of links and networks of devices.")

    def short(self, domain: str | None) -> str:
        """The interval of the plan and the domain of its costs in one sentence; :meth:`lines` has the rest."""
        if not self.programs:
            return "that of the costs, which the request gives as numbers"
        ends = (
            "" if self.ends is None else f"{' '.join(_ends_figures(self.ends))} with all predictions at their bounds; "
        )
        share = self.domain_share or 0.0
        if domain == "in":
            return f"{ends}all are in the training domain"
        percent = "less than 1" if share < 0.01 else f"{100 * share:.0f}"
        where = "only near" if domain == "near" else "outside of"
        guess = ": a guess" if domain == "out" and share > 0.1 else ""
        return f"{ends}{percent} % of their time is {where} the training domain{guess}"

    def lines(self, model_id: str | None, domain: str | None) -> list[str]:
        """The same as sentences."""
        given = ", ".join(self.given[:_MOST_NAMED])
        if len(self.given) > _MOST_NAMED:
            given += f" and {len(self.given) - _MOST_NAMED} more"
        if not self.programs:
            return ["costs: all are given as numbers, so they have no interval" + (f" ({given})" if given else "")]
        share = 100 * (self.domain_share or 0.0)
        percent = "less than 1" if share < 1 else f"{share:.0f}"
        worst = f"{percent} % of their time, above all {self.domain_program}"
        lines = [
            f"costs: {self.programs} programs predicted by {model_id}, "
            + ("all in its training domain" if domain == "in" else f"worst domain {domain}: {worst}")
        ]
        if self.ends is None:
            lines.append("interval: none was computed")
        else:
            lines.append(f"with all predictions at their bounds: {_ends_text(self.ends)}")
        lines += [f"given as numbers, without interval: {given}"] if given else []
        return lines + self.assumed


def summarise(prices: Sequence[Prediction], given: Sequence[str]) -> Reliability:
    """The summary of the prices of a request, without ends."""
    domain = worst_domain(price.domain for price in prices)
    if domain is None:
        return Reliability(programs=len(prices), given=list(given))
    seconds = [price.latency_s or 0.0 for price in prices]
    in_domain = [s if price.domain == domain else 0.0 for s, price in zip(seconds, prices, strict=True)]
    longest = prices[max(range(len(prices)), key=in_domain.__getitem__)]
    return Reliability(
        programs=len(prices),
        domain_share=sum(in_domain) / (sum(seconds) or 1.0),
        domain_program=f"{longest.name} on {longest.device}",
        given=list(given),
        assumed=assumed_of(price.domain_reason for price in prices),
    )


def field_words(field: str) -> str:
    """The name of a figure in words, without its unit: "step" for "objective.step_s"."""
    return field.rpartition(".")[2].removesuffix("_s").replace("_", " ")


def _ends_figures(ends: Ends) -> tuple[str, str]:
    in_seconds = ends.figure.endswith("_s")
    low, high = (format_latency(value) if in_seconds else f"{value:.4g}" for value in (ends.lower, ends.upper))
    return field_words(ends.figure), f"{low} to {high}"


def _ends_text(ends: Ends) -> str:
    name, interval = _ends_figures(ends)
    text = f"{interval} ({name} of this plan)"
    best = {"lower": ends.best_at_lower, "upper": ends.best_at_upper}
    if ends.best_at_lower == ends.best_at_upper == "same plan":
        return f"{text}; it is the best plan at both"
    meaning = {"same plan": "it is the best plan", "another plan": "another plan is better", "no plan": "no plan fits"}
    return "; ".join([text, *(f"{meaning[value]} at the {end} ones" for end, value in best.items() if value)])
