"""Costs in requests: given in seconds, without an interval, or predicted from programs.

:func:`collect` walks a request and lists the programs of all its costs;
:func:`cdmpp.plan.base.solve.predict_prices` predicts them; :func:`fill` returns a copy of the request whose costs
are resolved.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

from pydantic import BaseModel, Field, PrivateAttr, model_validator

from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.collective_forms import CollectiveForm
from cdmpp.predict.requests.fields import MAX_SECONDS, Closed, DeviceForm, PriceRequest, Work, exactly_one
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol

M = TypeVar("M", bound=BaseModel)
#: Figures of a cost: the prediction, and its bounds.
Figure = Literal["latency_s", "lower_s", "upper_s"]


@dataclass(frozen=True)
class PricedProgram:
    """One program of a cost: name, number of runs, and the seconds of all runs."""

    name: str
    count: int
    latency_s: float


@dataclass(frozen=True)
class Cost:
    """A cost in seconds, its bounds (sums of the parts' bounds) and its parts.

    ``parts`` is empty for a cost that was given.
    """

    latency_s: float
    lower_s: float
    upper_s: float
    parts: tuple[PricedProgram, ...] = ()

    @classmethod
    def given(cls, seconds: float) -> Cost:
        """A cost that the request gives: its bounds are equal to it."""
        return cls(seconds, seconds, seconds)

    @classmethod
    def of(cls, counts: Sequence[int], prices: Sequence[Prediction]) -> Cost:
        """The sum of predictions, each times its count."""

        def total(figure: str) -> float:
            return float(sum(n * getattr(price, figure) for n, price in zip(counts, prices, strict=True)))

        parts = tuple(
            PricedProgram(price.name, n, n * (price.latency_s or 0.0)) for n, price in zip(counts, prices, strict=True)
        )
        return cls(total("latency_s"), total("lower_s"), total("upper_s"), parts)

    def largest(self, count: int = 2) -> str:
        """The programs with the largest shares, as text: "linear:m=512,... 61 %, softmax:... 20 %"."""
        whole = sum(part.latency_s for part in self.parts) or 1.0
        by_size = sorted(self.parts, key=lambda part: (-part.latency_s, part.name))[:count]
        return ", ".join(f"{part.name} {100 * part.latency_s / whole:.0f} %" for part in by_size)


class Priced(Closed, ABC):
    """Base of request fields whose cost is predicted."""

    @abstractmethod
    def price_requests(self, path: str) -> list[PriceRequest]:
        """Programs to price; ``path`` is the dotted path of this field in the request."""

    @abstractmethod
    def with_prices(self, prices: Iterator[Prediction]) -> Self:
        """A resolved copy; takes as many prices as :meth:`price_requests` lists programs."""


def collect(request: BaseModel) -> list[PriceRequest]:
    """Programs of all costs in a request, in the order of its fields."""
    return [program for path, field in _priced_fields(request, "") for program in field.price_requests(path)]


def fill(request: M, prices: Sequence[Prediction]) -> M:
    """A copy of a request whose costs are resolved.

    ``prices``: one for each program of :func:`collect`, in its order, none with an error.
    """
    remaining = iter(prices)
    filled: M = _filled(request, remaining)
    if next(remaining, None) is not None:
        raise ValueError("more prices than programs")
    return filled


def _priced_fields(value: Any, path: str) -> Iterator[tuple[str, Priced]]:
    if isinstance(value, Priced):
        yield path, value
    else:
        for key, item in _items(value):
            yield from _priced_fields(item, f"{path}.{key}" if path else str(key))


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    """Parts of a value that may hold costs, with their keys."""
    if isinstance(value, BaseModel):
        return ((name, getattr(value, name)) for name in _fields_with_costs(type(value)))
    if isinstance(value, Mapping):
        return value.items()
    if isinstance(value, list | tuple):
        return enumerate(value)
    return ()


@cache
def _fields_with_costs(model: type[BaseModel]) -> tuple[str, ...]:
    """Fields whose type may hold a cost: long lists of numbers are not walked."""
    return tuple(name for name, field in model.model_fields.items() if _may_hold_costs(field.annotation))


def _may_hold_costs(annotation: Any) -> bool:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return issubclass(annotation, Priced) or bool(_fields_with_costs(annotation))
    return any(map(_may_hold_costs, get_args(annotation)))


def _filled(value: Any, prices: Iterator[Prediction]) -> Any:
    if isinstance(value, Priced):
        return value.with_prices(prices)
    items = [(key, item, _filled(item, prices)) for key, item in _items(value)]
    if all(before is after for _, before, after in items):
        return value
    if isinstance(value, BaseModel):
        return value.model_copy(update={key: after for key, before, after in items if after is not before})
    if isinstance(value, Mapping):
        return {key: after for key, _, after in items}
    return type(value)(after for _, _, after in items)


class PredictedCost(Priced):
    """A predicted cost on a device: programs that run one after the other, or a collective.

    Exactly one of ``programs``, whose latencies are summed, and ``collective``.
    """

    programs: list[Work] | None = Field(None, min_length=1)
    collective: CollectiveForm | None = Field(
        None, description="A collective between devices of this kind; framework is its library where it names none."
    )
    device: DeviceForm
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None

    _cost: Cost | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        return exactly_one(self, "programs", "collective")

    def price_requests(self, path: str) -> list[PriceRequest]:
        """One for each program, or one for the collective."""
        if self.collective is not None:
            program = self.collective.program()
            return [
                PriceRequest(
                    f"{path}.collective", program, self.device, protocol=self.protocol, framework=self.framework
                )
            ]
        return [
            PriceRequest(f"{path}.programs.{i}", work.program, self.device, self.backend, self.protocol, self.framework)
            for i, work in enumerate(self.programs or ())
        ]

    def with_prices(self, prices: Iterator[Prediction]) -> Self:
        """A copy with :attr:`cost`."""
        filled = self.model_copy()
        counts = [1] if self.programs is None else [work.count for work in self.programs]
        filled._cost = Cost.of(counts, [next(prices) for _ in counts])
        return filled

    @property
    def cost(self) -> Cost:
        """The sum of the predictions; only after :meth:`with_prices`."""
        assert self._cost is not None, "not priced"
        return self._cost


#: A field that is either given in seconds or left to the predictor.
CostField = Annotated[float, Field(ge=0, le=MAX_SECONDS, description="Seconds.")] | PredictedCost


def cost_of(field: float | PredictedCost | None, seconds: float | None = None) -> Cost:
    """The cost of a :data:`CostField` of a resolved request, or of a pair of fields ``x`` and ``x_s``."""
    if isinstance(field, PredictedCost):
        return field.cost
    given = seconds if field is None else field
    assert given is not None, "exactly one is given"
    return Cost.given(float(given))


#: Names of fields in seconds, seconds per unit, or units per second.
_COST = re.compile(r"(^|_)(s|seconds)(_per_\w+)?$|_per_s$")
#: Fields with such names that are no costs: goals, limits, arrivals and what-ifs.
_OTHER = frozenset({"budget_s", "tpot_s", "tokens_per_s", "iteration_limit_s", "most_step_s", "arrivals_s", "delay_s"})
#: Fields with rows that have an interval of their own, or that were measured.
_WITH_INTERVAL = frozenset({"sizes", "measured"})


def given_costs(request: BaseModel) -> list[str]:
    """Paths of the costs that a request gives, in the order of its fields; ``*`` stands for the indices of a list.

    A cost of 0 and a cost that has its default do not count.
    """
    return list(dict.fromkeys(_given(request, "")))


def _given(value: Any, path: str) -> Iterator[str]:
    if isinstance(value, BaseModel):
        for name, is_cost in _fields(type(value)):
            item = getattr(value, name)
            field = f"{path}.{name}" if path else name
            if is_cost and _is_number(item) and name in value.model_fields_set:
                yield field
            else:
                yield from _given(item, field)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _given(item, f"{path}.{key}")
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _given(item, f"{path}.*")


def _is_number(value: Any) -> bool:
    """Whether a value is a positive number, or has some."""
    if isinstance(value, Mapping):
        return any(map(_is_number, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_is_number, value))
    return isinstance(value, int | float) and value > 0


@cache
def _fields(model: type[BaseModel]) -> tuple[tuple[str, bool], ...]:
    """Fields that are costs or may hold some, and whether they are: long lists of numbers are not walked."""
    fields = []
    for name, field in model.model_fields.items():
        if name in _WITH_INTERVAL:
            continue
        types = set(_types(field.annotation))
        is_cost = name not in _OTHER and (_COST.search(name) is not None or PredictedCost in types)
        if is_cost or any(issubclass(part, BaseModel) and _fields(part) for part in types):
            fields.append((name, is_cost))
    return tuple(fields)


def _types(annotation: Any) -> Iterator[type]:
    """Classes in an annotation."""
    if isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation):
        yield from _types(part)
