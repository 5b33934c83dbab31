"""Curves in requests: seconds by batch size, given, predicted, or those of a language model's steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

import numpy as np
from pydantic import Field, PrivateAttr, model_validator

from cdmpp.errors import CdmppError, FieldError
from cdmpp.llm.forms import LanguageModelForm
from cdmpp.predict.curves.template import Grid, Template
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.collective_forms import CollectiveTemplate
from cdmpp.predict.requests.fields import (
    MAX_COUNT,
    MAX_SECONDS,
    Closed,
    DeviceForm,
    PriceRequest,
    ProgramForm,
    WholeNumber,
    exactly_one,
)
from cdmpp.predict.requests.pricing import Cost, Priced
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol

#: Batch sizes of a curve that names none.
DEFAULT_BATCHES = tuple(2**i for i in range(9))


class TemplateWork(Closed):
    """An operator with expressions over ``batch`` ("m": "batch*128"), and how often it runs."""

    program: ProgramForm
    count: Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber] = 1


class BatchCurve(Priced):
    """Seconds by batch size: given, or predicted from programs whose sizes depend on ``batch``, or a language model.

    Exactly one of ``seconds``, ``programs``, ``collective`` and ``llm``; ``device`` comes with all but ``seconds``.
    """

    batch: list[Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber]] = Field(
        min_length=1, description="Batch sizes, growing. With `llm`, the default is 1, 2, 4, ..., 256."
    )
    seconds: list[Annotated[float, Field(gt=0, le=MAX_SECONDS)]] | None = Field(
        None, description="Seconds at each batch size."
    )
    programs: list[TemplateWork] | None = Field(
        None, description='Instead of seconds: operators with expressions over "batch", predicted and summed.'
    )
    collective: CollectiveTemplate | None = Field(
        None, description='Instead of programs; its bytes may be an expression over "batch".'
    )
    llm: LanguageModelForm | None = Field(None, description="Instead of programs: a language model (docs/llm.md).")
    device: DeviceForm | None = None
    backend: Backend | None = None
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: Framework | None = None

    _costs: list[Cost] | None = PrivateAttr(None)

    @model_validator(mode="before")
    @classmethod
    def _of_language_model(cls, fields: Any) -> Any:
        """Device and framework of ``llm`` are those of the curve."""
        if not isinstance(fields, dict) or not isinstance(llm := fields.get("llm"), dict):
            return fields
        stated = {name: llm[name] for name in ("device", "framework") if llm.get(name) is not None}
        given = {name: value for name, value in fields.items() if value is not None}
        return {"batch": list(DEFAULT_BATCHES), **stated, **given}

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        return exactly_one(self, "seconds", "programs", "collective", "llm")

    @property
    def is_predicted(self) -> bool:
        """Whether a predictor gives the seconds."""
        return self.seconds is None

    def program_count(self) -> int:
        """Number of programs to price, at all batch sizes; raises FieldError for a wrong configuration."""
        if self.llm is not None:
            return len(self.llm.price_requests(self.batch, "llm", self.device or "", self.framework))
        return len(self.batch) * len(self.works or ())

    @property
    def works(self) -> list[TemplateWork] | None:
        """Programs by template; None where seconds or a language model are given."""
        return self.programs if self.collective is None else [TemplateWork(program=self.collective.program())]

    def check(self, path: str) -> None:
        """Raise :class:`FieldError` where the parts contradict each other."""
        if any(b <= a for a, b in zip(self.batch, self.batch[1:], strict=False)):
            raise FieldError.at(f"{path}.batch", "sizes must grow")
        if self.seconds is not None and len(self.seconds) != len(self.batch):
            raise FieldError.at(f"{path}.seconds", f"{len(self.seconds)} values for {len(self.batch)} batch sizes")
        if self.is_predicted and self.device is None:
            raise FieldError.at(f"{path}.device", "programs need a device")

    def price_requests(self, path: str) -> list[PriceRequest]:
        """Programs at each batch size, sizes outermost; none where seconds are given."""
        self.check(path)
        if not self.is_predicted:
            return []
        assert self.device is not None
        if self.llm is not None:
            return self.llm.price_requests(self.batch, f"{path}.llm", self.device, self.framework)
        assert self.works is not None
        field = f"{path}.{'programs' if self.collective is None else 'collective'}"
        templates = [Template(work.program, work.count) for work in self.works]
        try:
            grid = Grid(templates, {"batch": self.batch})
            made = [grid.programs(at, self.backend or "library") for at in grid.points()]
        except CdmppError as error:
            raise FieldError.at(field, error.message, hint=error.hint) from None
        out: list[PriceRequest] = []
        for point in made:
            if isinstance(point, CdmppError):
                raise FieldError.at(field, point.message, hint=point.hint)
            for i, (program, _) in enumerate(point):
                assert program.operator is not None
                form: dict[str, Any] = program.operator.canonical()
                place = field if self.collective is not None else f"{field}.{i}"
                out.append(PriceRequest(place, form, self.device, self.backend, self.protocol, self.framework))
        return out

    def with_prices(self, prices: Iterator[Prediction]) -> Self:
        """A copy with its costs."""
        filled = self.model_copy()
        if self.llm is not None:
            filled._costs = self.llm.priced(self.batch, prices, self.framework, self.device)
        elif self.works is not None:
            counts = [work.count for work in self.works]
            filled._costs = [Cost.of(counts, [next(prices) for _ in counts]) for _ in self.batch]
        return filled

    def points(self) -> tuple[np.ndarray, list[Cost]]:
        """Batch sizes (float64, growing) and the cost at each; only after :meth:`with_prices`."""
        costs = self._costs if self.seconds is None else [Cost.given(s) for s in self.seconds]
        assert costs is not None, "not priced"
        return np.array(self.batch, dtype=np.float64), costs


def interpolate(sizes: np.ndarray, seconds: np.ndarray, at: np.ndarray | float) -> Any:
    """Seconds at any batch size: linear between the points, proportional beyond the last.

    Below the first point the seconds of the first point hold: a smaller batch is not assumed to be faster.
    """
    inside = np.interp(at, sizes, seconds)
    return np.where(np.asarray(at) > sizes[-1], seconds[-1] * np.asarray(at) / sizes[-1], inside)
