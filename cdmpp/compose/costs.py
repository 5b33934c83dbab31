"""Costs that a request leaves to the predictor: programs that run one after the other, and curves of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from pydantic import Field, model_validator

from cdmpp.compose.request import (
    MAX_COUNT,
    MAX_SECONDS,
    Asked,
    Closed,
    DeviceForm,
    ProgramForm,
    WholeNumber,
    Work,
)
from cdmpp.curves.template import Grid, Template
from cdmpp.errors import CdmppError, FieldError
from cdmpp.prediction import Prediction
from cdmpp.programs.question import DEFAULT_PROTOCOL, Backend, Framework, Protocol

MAX_PARTS, MAX_POINTS = 256, 64


@dataclass(frozen=True)
class Part:
    """One program of a cost: what it is called, how often it runs, and its seconds altogether."""

    name: str
    count: int
    latency_s: float


@dataclass(frozen=True)
class Cost:
    """A cost in seconds with bounds (sums of the parts' bounds) and what it is made of.

    ``parts`` is empty for a cost that was given.
    """

    latency_s: float
    lower_s: float
    upper_s: float
    parts: tuple[Part, ...] = ()

    @classmethod
    def given(cls, seconds: float) -> Cost:
        """A cost that a request states: known exactly."""
        return cls(seconds, seconds, seconds)

    @classmethod
    def of(cls, counts: Sequence[int], prices: Sequence[Prediction]) -> Cost:
        """The sum of predictions, each times its count."""

        def total(figure: str) -> float:
            return float(sum(n * getattr(price, figure) for n, price in zip(counts, prices, strict=True)))

        parts = tuple(
            Part(price.name, n, n * (price.latency_s or 0.0)) for n, price in zip(counts, prices, strict=True)
        )
        return cls(total("latency_s"), total("lower_s"), total("upper_s"), parts)

    def largest(self, most: int = 2) -> str:
        """The programs that make most of it, in words: "linear:m=512,... 61 %, softmax:... 20 %"."""
        whole = sum(part.latency_s for part in self.parts) or 1.0
        by_size = sorted(self.parts, key=lambda part: (-part.latency_s, part.name))[:most]
        return ", ".join(f"{part.name} {100 * part.latency_s / whole:.0f} %" for part in by_size)


class PredictedCost(Closed):
    """Programs that run one after the other on a device; their predicted latencies are summed."""

    programs: Annotated[list[Work], Field(min_length=1, max_length=MAX_PARTS)]
    device: DeviceForm
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None

    def asked(self, path: str) -> list[Asked]:
        """Its programs; ``path`` is the field that holds this."""
        return [
            Asked(
                f"{path}.programs.{i}", work.program, self.device, self.backend, self.protocol, self.framework
            )
            for i, work in enumerate(self.programs)
        ]

    def cost(self, prices: Iterator[Prediction]) -> Cost:
        """The cost; takes as many prices as :meth:`asked` has programs."""
        counts = [work.count for work in self.programs]
        return Cost.of(counts, [next(prices) for _ in counts])


#: A field that is either given in seconds or left to the predictor.
CostField = Annotated[float, Field(ge=0, le=MAX_SECONDS, description="Seconds.")] | PredictedCost


def asked_of(field: float | PredictedCost, path: str) -> list[Asked]:
    """The programs of a :data:`CostField`: none where it is given."""
    return field.asked(path) if isinstance(field, PredictedCost) else []


def cost_of(field: float | PredictedCost, prices: Iterator[Prediction]) -> Cost:
    """The cost of a :data:`CostField`; ``prices`` runs over the answers in the order of ``asked()``."""
    return field.cost(prices) if isinstance(field, PredictedCost) else Cost.given(float(field))


class TemplateWork(Closed):
    """An operator with expressions over ``batch`` ("m": "batch*128"), and how often it runs."""

    program: ProgramForm
    count: Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber] = 1


class BatchCurve(Closed):
    """Seconds by batch size: given, or predicted from programs whose sizes depend on ``batch``.

    Exactly one of ``seconds`` and ``programs``; ``device`` comes with ``programs``.
    """

    batch: Annotated[
        list[Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber]],
        Field(min_length=1, max_length=MAX_POINTS, description="Batch sizes, growing."),
    ]
    seconds: Annotated[
        list[Annotated[float, Field(gt=0, le=MAX_SECONDS)]] | None,
        Field(description="Seconds at each batch size."),
    ] = None
    programs: Annotated[
        list[TemplateWork] | None,
        Field(description='Predicted instead: operators with expressions over "batch", summed.'),
    ] = None
    device: DeviceForm | None = None
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None

    @model_validator(mode="after")
    def _one_of(self) -> BatchCurve:
        if (self.seconds is None) == (self.programs is None):
            raise ValueError("give either seconds or programs")
        return self

    def check(self, path: str) -> None:
        """Raise :class:`FieldError` where the parts contradict each other."""
        if any(b <= a for a, b in zip(self.batch, self.batch[1:], strict=False)):
            raise FieldError(f"{path}.batch: sizes must grow", path=f"{path}.batch")
        if self.seconds is not None and len(self.seconds) != len(self.batch):
            raise FieldError(
                f"{path}.seconds: {len(self.seconds)} values for {len(self.batch)} batch sizes",
                path=f"{path}.seconds",
            )
        if self.programs is not None and self.device is None:
            raise FieldError(f"{path}.device: programs need a device", path=f"{path}.device")

    def asked(self, path: str) -> list[Asked]:
        """Its programs at each batch size, sizes outermost; none where seconds are given.

        Raises
        ------
        FieldError
        """
        self.check(path)
        if self.programs is None:
            return []
        assert self.device is not None
        templates = [Template(work.program, work.count) for work in self.programs]
        try:
            grid = Grid(templates, {"batch": self.batch})
            made = [grid.programs(at, self.backend or "library") for at in grid.points()]
        except CdmppError as error:
            raise FieldError(
                f"{path}.programs: {error.message}", path=f"{path}.programs", hint=error.hint
            ) from None
        out: list[Asked] = []
        for point in made:
            if isinstance(point, CdmppError):
                raise FieldError(
                    f"{path}.programs: {point.message}", path=f"{path}.programs", hint=point.hint
                )
            for i, (program, _) in enumerate(point):
                assert program.operator is not None
                form: dict[str, Any] = program.operator.canonical()
                out.append(
                    Asked(
                        f"{path}.programs.{i}", form, self.device, self.backend, self.protocol, self.framework
                    )
                )
        return out

    def points(self, prices: Iterator[Prediction]) -> tuple[np.ndarray, list[Cost]]:
        """Batch sizes (float64, growing) and the cost at each; takes the prices of :meth:`asked`."""
        sizes = np.array(self.batch, dtype=np.float64)
        if self.seconds is not None:
            return sizes, [Cost.given(s) for s in self.seconds]
        assert self.programs is not None
        counts = [work.count for work in self.programs]
        return sizes, [Cost.of(counts, [next(prices) for _ in counts]) for _ in self.batch]


def interpolate(sizes: np.ndarray, seconds: np.ndarray, at: np.ndarray | float) -> Any:
    """Seconds at any batch size: linear between the points, proportional beyond the last.

    Below the first point the first point's seconds hold: a smaller batch is not faster than what was seen.
    """
    inside = np.interp(at, sizes, seconds)
    return np.where(np.asarray(at) > sizes[-1], seconds[-1] * np.asarray(at) / sizes[-1], inside)
