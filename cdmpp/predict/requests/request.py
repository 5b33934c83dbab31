"""Base classes of planning requests and answers.

Python, the command line and the HTTP service validate a request with the same model, price its programs with a
predictor, and call :meth:`Request.solve`; so they give the same answer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from operator import attrgetter
from types import ModuleType
from typing import Any, ClassVar, Generic, Literal, Self, TypeVar

from pydantic import Field, computed_field, model_validator
from pydantic_core import PydanticCustomError

from cdmpp.predict.prediction import Prediction
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.budget import SearchControl
from cdmpp.predict.requests.fields import (
    MAX_BUDGET_S,
    MAX_BYTES,
    MAX_COUNT,
    MAX_NAME,
    MAX_SECONDS,
    MAX_TEXT,
    Budget,
    Bytes,
    Closed,
    Count,
    DeviceForm,
    MaxSteps,
    Name,
    PositiveBytes,
    PositiveSeconds,
    PriceRequest,
    ProgramForm,
    Row,
    Seconds,
    Seed,
    WholeNumber,
    Work,
    at_most_one,
    exactly_one,
    instead_of,
)
from cdmpp.predict.requests.pricing import collect, fill, given_costs
from cdmpp.predict.requests.reliability import Reliability, field_words
from cdmpp.utils.units import format_latency

#: Fields are defined in :mod:`cdmpp.predict.requests.fields`; schemas import everything from here.
__all__ = [
    "MAX_BUDGET_S",
    "MAX_BYTES",
    "MAX_COUNT",
    "MAX_NAME",
    "MAX_SECONDS",
    "MAX_TEXT",
    "Answer",
    "Budget",
    "Bytes",
    "Closed",
    "Count",
    "DeviceForm",
    "Interval",
    "MaxSteps",
    "Name",
    "Plan",
    "PositiveBytes",
    "PositiveSeconds",
    "PriceRequest",
    "ProgramForm",
    "Request",
    "Row",
    "Seconds",
    "Seed",
    "WholeNumber",
    "Work",
    "at_most_one",
    "exactly_one",
    "instead_of",
]

#: Relative differences up to this are rounding errors of sums.
ROUNDING = 1e-12
#: Relative differences up to this are none for a reader.
CLOSE = 1e-6
#: Ratios from this on are given as a factor, smaller ones in percent.
MANY = 1.1
#: A plan so many times above its bound has no percentage that a reader could use.
_FAR = 100.0

A = TypeVar("A", bound="Answer")


class Request(Closed, Generic[A]):
    """Base of all planning requests: ``class MyRequest(Request[MyPlan])``.

    Fields are the JSON of the request. Fields typed as costs (:mod:`cdmpp.predict.requests.pricing`) are priced before
    :meth:`solve` is called. What no schema can express (a cycle, a memory limit that no plan meets) is raised as
    :class:`cdmpp.errors.FieldError` with the field's dotted path.
    """

    ignore_memory: bool = Field(
        False, description="Plan as if the devices had unlimited memory: neither stated nor published limits hold."
    )

    @classmethod
    def answer_model(cls) -> type[A]:
        """The model of the answer, from the type argument."""
        for base in cls.__mro__:
            arguments = getattr(base, "__pydantic_generic_metadata__", {}).get("args", ())
            if arguments and not isinstance(arguments[0], TypeVar):
                model: type[A] = arguments[0]
                return model
        raise TypeError(f"{cls.__name__} does not say which answer it has: Request[...]")

    @property
    def budget(self) -> float | None:
        """Search budget in seconds; None where the answer is computed directly."""
        return getattr(self, "budget_s", None)

    def sizes(self) -> dict[str, int]:
        """Figures of this request that decide the time and memory of its plan, by name.

        A service limits them. Python and the command line take what fits into memory.
        """
        return {}

    def check(self) -> None:
        """Raise FieldError or InfeasibleError for a request that is wrong whatever its programs cost."""

    def unchecked_memory(self) -> list[str]:
        """Why the plan, or parts of it, were not compared with the memory of the devices; empty where all was."""
        return []

    def price_requests(self) -> list[PriceRequest]:
        """Programs to price, in a fixed order; empty where all costs are given."""
        self.check()
        return collect(self)

    def with_prices(self, prices: Sequence[Prediction]) -> Self:
        """A copy whose costs are resolved; ``prices`` answer :meth:`price_requests`, in its order."""
        return fill(self, prices)

    def used_prices(self, answer: A, prices: Sequence[Prediction]) -> Sequence[Prediction]:
        """The prices on which the answer depends: default all."""
        return prices

    def given_costs(self) -> list[str]:
        """Paths of the costs that this request gives as numbers."""
        return given_costs(self)

    def figure_of(self, plan: A) -> float | None:
        """The figure :attr:`Plan.interval_figure` of a plan with the costs of this request, which are resolved.

        The module ``solver`` computes it by ``figure_of(request, plan)``; None where it has no such function because
        the plan has an interval of its own.
        """
        figure_of = getattr(self.sibling("solver"), "figure_of", None)
        return None if figure_of is None else float(figure_of(self, plan))

    def solve(self, control: SearchControl) -> A:
        """Compute the answer by ``solve(request, control)`` of the module ``solver`` beside the request's schema.

        Costs are resolved: :meth:`with_prices` was called.

        ``control``: budget, progress and cancellation.
        Raises FieldError, InfeasibleError.
        """
        answer: A = self.sibling("solver").solve(self, control)
        return answer

    @classmethod
    def sibling(cls, name: str) -> ModuleType:
        """The module beside the schema: ``solver`` has ``solve(request, control)`` and ``draw(request, plan)``."""
        return import_module(f"{cls.__module__.rpartition('.')[0]}.{name}")


class Answer(Row):
    """Fields that all answers share."""

    model_id: str | None = Field(
        None, description="Model that priced the programs; null where no program was to be priced."
    )
    domain: Literal["in", "near", "out"] | None = Field(
        None, description="The worst of the predictions' domains: how far to trust the plan. null: none."
    )
    reliability: Reliability | None = Field(
        None, description="How far the costs are trusted; null only in parts of a plan."
    )

    @model_validator(mode="before")
    @classmethod
    def _without_computed(cls, values: Any) -> Any:
        """Accept the JSON of an answer: fields that are computed from others are computed again."""
        if not isinstance(values, Mapping):
            return values
        return {name: value for name, value in values.items() if name not in cls.model_computed_fields}

    def to_json(self) -> dict[str, Any]:
        """The answer as JSON values."""
        return self.model_dump()

    def tables(self) -> list[Table]:
        """The answer as tables for the terminal."""
        raise NotImplementedError

    def report(self) -> list[Table]:
        """:meth:`tables`, then how far the costs are trusted."""
        if self.reliability is None:
            return self.tables()
        return [*self.tables(), Table.lines(*self.reliability.lines(self.model_id, self.domain))]


class Interval(Row):
    """The objective with all predictions at their lower bounds, and at their upper bounds."""

    lower_s: float
    upper_s: float

    def __str__(self) -> str:
        return f"{format_latency(self.lower_s)} to {format_latency(self.upper_s)}"


class Plan(Answer):
    """A plan with its baselines, a lower bound of the objective, and the gap to it.

    The JSON names of the objective and of its bound differ by planner: subclasses name them, as dotted paths. A
    subclass whose gap is defined otherwise overrides :attr:`gap` with a property.
    """

    objective_field: ClassVar[str] = "makespan_s"
    bound_field: ClassVar[str] = "lower_bound_s"
    #: What the lower bound holds for, in words.
    bounded: ClassVar[str] = "plans"

    baselines: dict[str, float] = Field(description="The objective of simpler plans on the same costs, by name.")
    explanation: list[str] = Field(description="Why the objective is what it is, down to the programs, in words.")
    seed: int | None = Field(
        None, description="Seed of this plan, where several were searched.", exclude_if=lambda seed: seed is None
    )

    @property
    def interval_figure(self) -> str:
        """Field whose value at the ends of the intervals is reported: the objective, unless a subclass has another."""
        return self.objective_field

    @property
    def ends(self) -> tuple[float, float] | None:
        """:attr:`interval_figure` with all predictions at their lower and upper bounds, where the solver gives it."""
        interval = getattr(self, "interval", None)
        return None if interval is None else (interval.lower_s, interval.upper_s)

    @property
    def choice(self) -> Any:
        """What the planner chose, for comparison with the plan at the ends of the intervals.

        None where the search is too expensive to be repeated, or nothing is chosen.
        """
        return None

    @property
    def objective_value(self) -> float:
        """The figure that the search minimises."""
        return float(attrgetter(self.objective_field)(self))

    @property
    def bound_value(self) -> float:
        """Lower bound of the objective."""
        return float(attrgetter(self.bound_field)(self))

    @computed_field(description="Objective over its lower bound, less one.")  # type: ignore[prop-decorator]
    @property
    def gap(self) -> float:
        """Objective over its lower bound, less one; 0 where the bound is 0 or the difference is a rounding error."""
        gap = self.objective_value / self.bound_value - 1 if self.bound_value > 0 else 0.0
        return gap if abs(gap) > ROUNDING else 0.0

    @model_validator(mode="after")
    def _finite_gap(self) -> Self:
        if not math.isfinite(self.gap):
            raise PydanticCustomError("finite_number", "the lower bound is too small")
        return self

    def headline(self) -> str:
        """What the plan reaches, and how: the first sentence of its summary."""
        return f"{field_words(self.objective_field)} {self.objective_text(self.objective_value)}"

    def objective_text(self, value: float) -> str:
        """A value of the objective, with its unit."""
        return format_latency(value) if self.in_seconds else f"{value:.4g}"

    @property
    def in_seconds(self) -> bool:
        """Whether the objective is a time."""
        return self.objective_field.endswith("_s")

    @property
    def compared(self) -> str:
        """The choice whose objective is compared with the bound, in words."""
        return "this"

    def simple_plans(self) -> Mapping[str, float]:
        """The baselines that are plans: they could be carried out, and know no more than this plan does."""
        return self.baselines

    @computed_field(  # type: ignore[prop-decorator]
        description="The plan in at most five sentences: what it reaches, the best simple plan, the lower bound, why, "
        "and how far the costs are trusted."
    )
    @property
    def summary(self) -> list[str]:
        """The plan in at most five sentences."""
        takes = "takes" if self.in_seconds else "has"
        value, bound, lines = self.objective_value, self.objective_text(self.bound_value), [self.headline()]
        if simple := self.simple_plans():
            name, best = min(simple.items(), key=lambda item: item[1])
            equal = abs(best - value) <= CLOSE * value
            compared = f": {self._compared(best / value)}" if value else ""
            text = "is as good" if equal else f"{takes} {self.objective_text(best)}{compared}"
            lines.append(f"the best baseline, {name.replace('_', ' ')}, {text}")
        above = value / self.bound_value - 1 if self.bound_value > 0 else math.inf
        distance = f"{100 * above:.3g} % above it" if above < _FAR else "far above it"
        distance = "optimal" if value <= self.bound_value * (1 + CLOSE) else distance
        lines.append(f"the lower bound of all {self.bounded} is {bound}: {self.compared} is {distance}")
        lines += [f"why: {text}" for text in self.explanation[:1]]
        if trust := self.trust():
            lines.append(f"trust: {trust}")
        return lines

    def trust(self) -> str:
        """The interval of the plan and the domain of its costs in one sentence; empty in parts of a plan."""
        return "" if self.reliability is None else self.reliability.short(self.domain)

    def _compared(self, ratio: float) -> str:
        if ratio >= MANY:
            return f"{ratio:.3g} times as {'long' if self.in_seconds else 'much'}"
        return f"{100 * abs(ratio - 1):.2g} % {'more' if ratio > 1 else 'less'}"

    def report(self) -> list[Table]:
        """The summary, then :meth:`tables` and how far the costs are trusted."""
        details = [table for table in super().report() if table.header or table.rows]
        apart = [("",)] if details and not details[0].header else []
        return [Table(rows=[*((line,) for line in self.summary), *apart]), *details]

    def baseline_table(self) -> Table:
        """The baselines, smallest first, for plans whose objective is in seconds."""
        rows = [
            (name.replace("_", " "), format_latency(seconds))
            for name, seconds in sorted(self.baselines.items(), key=lambda item: item[1])
        ]
        return Table(("baseline", "time"), rows, right=(1,))
