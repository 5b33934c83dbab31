"""Collective operations in requests: as costs, and as links whose times are predicted."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import Field

from cdmpp.predict.requests.fields import MAX_BYTES, MAX_COUNT, MAX_NAME, Closed, Name, PositiveBytes, WholeNumber

CollectiveOperator = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv"]
Ranks = Annotated[int, Field(ge=2, le=MAX_COUNT), WholeNumber]


class CollectiveOptions(Closed):
    """How a collective runs; defaults are those of ``POST /predict``."""

    ranks_per_node: Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber] | None = Field(
        None, description="Default: as many as a node of the device holds."
    )
    span: Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber] | None = Field(
        None, description="Consecutive devices over which the ranks are evenly spread; default: they are neighbours."
    )
    dtype: Name | None = None
    link: Name | PositiveBytes | None = Field(
        None, description="A name, or bytes per second of one direction; default: the link of the device."
    )
    library: Name | None = None
    mode: Name | None = None

    def fields(self, operator: str, size: float, ranks: int) -> dict[str, Any]:
        """The program to price; bytes are rounded up to a whole number."""
        options = {name: getattr(self, name) for name in CollectiveOptions.model_fields}
        given = {name: value for name, value in options.items() if value is not None}
        return {"operator": operator, "bytes": math.ceil(size), "ranks": ranks, **given}


class CollectiveForm(CollectiveOptions):
    """A collective between ranks, as an item of ``POST /predict`` has it."""

    operator: CollectiveOperator
    bytes: float = Field(gt=0, le=MAX_BYTES, description="The larger buffer of one rank.")
    ranks: Ranks

    def program(self) -> dict[str, Any]:
        """The program to price."""
        return self.fields(self.operator, self.bytes, self.ranks)


class CollectiveTemplate(CollectiveOptions):
    """A collective whose bytes may depend on ``batch``: a number, or an expression such as "batch*7168"."""

    operator: CollectiveOperator
    bytes: Annotated[float, Field(gt=0, le=MAX_BYTES)] | Annotated[str, Field(min_length=1, max_length=MAX_NAME)]
    ranks: Ranks

    def program(self) -> dict[str, Any]:
        """The template to price; its bytes are an expression over ``batch``, also where they do not depend on it."""
        size = self.bytes if isinstance(self.bytes, str) else f"{math.ceil(self.bytes)} + 0*batch"
        return self.fields(self.operator, 1, self.ranks) | {"bytes": size}


class CollectiveLinkForm(CollectiveOptions):
    """Collectives of any size between ranks, predicted at :data:`LINK_BYTES` and interpolated."""

    operator: CollectiveOperator | None = Field(None, description="Default: all_reduce and all_gather.")
    ranks: Ranks


#: Sizes at which the collectives of a link are predicted.
LINK_BYTES = tuple(float(2**exponent) for exponent in range(10, 33, 2))
#: Operations that are predicted for a link that names none: those that plans with a link need.
LINK_OPERATORS: tuple[CollectiveOperator, ...] = ("all_reduce", "all_gather")
