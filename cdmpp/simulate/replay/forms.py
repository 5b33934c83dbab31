"""Nodes, devices, links and overrides of a replay request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Self

from pydantic import Discriminator, Field, PrivateAttr, Tag

from cdmpp.errors import FieldError
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.collective_forms import (
    LINK_BYTES,
    LINK_OPERATORS,
    CollectiveLinkForm,
    CollectiveOperator,
    CollectiveOptions,
    Ranks,
)
from cdmpp.predict.requests.pricing import Priced
from cdmpp.predict.requests.request import (
    MAX_BYTES,
    MAX_COUNT,
    MAX_SECONDS,
    MAX_TEXT,
    Bytes,
    Closed,
    DeviceForm,
    Name,
    PriceRequest,
    ProgramForm,
    Seconds,
    WholeNumber,
    Work,
)
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Protocol
from cdmpp.simulate.replay.links import Algorithm, Collective

#: A number names the stream of the same digits: 0 is "0".
StreamName = Name | Annotated[int, Field(ge=0, le=MAX_COUNT), WholeNumber]


class CollectiveNodeForm(Closed):
    """A transfer between ranks that starts when all of them are ready, and holds a stream on each."""

    op: Collective
    ranks: list[Name] = Field(min_length=1, description="Devices.")
    bytes: Bytes = Field(description="Size of the whole buffer.")
    link: Name = Field(description="A name in links: the link between neighbours.")
    algorithm: Algorithm = Field(
        "ring", description='"measured": the link gives times of whole operations, not of messages.'
    )


class PredictedCollectiveForm(CollectiveOptions):
    """A collective whose time is predicted, on the device of its node or on several devices of the graph."""

    operator: CollectiveOperator
    bytes: float = Field(gt=0, le=MAX_BYTES, description="The larger buffer of one rank.")
    ranks: Ranks | Annotated[list[Name], Field(min_length=2)] = Field(
        description="How many; the node has a device then. Or the devices, one for each rank."
    )

    @property
    def devices(self) -> list[str] | None:
        """Devices of the ranks, where they are named."""
        return self.ranks if isinstance(self.ranks, list) else None

    def program(self) -> dict[str, Any]:
        """The program to price."""
        ranks = self.ranks if isinstance(self.ranks, int) else len(self.ranks)
        return self.fields(self.operator, self.bytes, ranks)


def _collective_kind(value: Any) -> str:
    """A predicted collective has an operator, one over a link of the request an op."""
    if isinstance(value, dict):
        return "predicted" if "operator" in value else "over_link"
    return "predicted" if isinstance(value, PredictedCollectiveForm) else "over_link"


AnyCollective = Annotated[
    Annotated[CollectiveNodeForm, Tag("over_link")] | Annotated[PredictedCollectiveForm, Tag("predicted")],
    Discriminator(_collective_kind),
]


class NodeForm(Closed):
    """A node: exactly one of duration_s, program, programs, bytes and collective gives its cost."""

    id: Name
    device: Name | None = Field(None, description="Device of the node; a collective has ranks instead.")
    stream: StreamName | None = Field(None, description='Default: "0"; for a collective "comm", on each rank.')
    duration_s: Seconds | None = None
    program: ProgramForm | None = None
    count: Annotated[int, Field(ge=1, le=MAX_COUNT), WholeNumber] | None = Field(
        None, description="Number of runs of program; default: 1."
    )
    programs: list[Work] | None = Field(None, min_length=1, description="Several programs, one after the other.")
    bytes: Bytes | None = None
    link: Name | None = Field(None, description="A name in links; needs bytes.")
    collective: AnyCollective | None = None
    deps: list[Name] = Field(description="Ids of nodes that must end before.", default_factory=list)
    records: list[Name] = Field(description="Events that are recorded when it ends.", default_factory=list)
    waits: list[Name] = Field(description="Events that it waits for.", default_factory=list)
    gap_s: Seconds | None = Field(
        None, description="Idle time after it, for its stream and its dependents; default: gap_s of its device."
    )
    class_: Name | None = Field(
        None,
        alias="class",
        description='Selected by overrides. "comm", bytes and collectives count as communication, "gap" as idle '
        'time, everything else as computation. Default: "compute" or "comm".',
    )


class DeviceEntry(Closed):
    """A device of the graph."""

    device: DeviceForm | None = Field(None, description="Device for predictions; default: the device of this name.")
    parallel: bool = Field(False, description="Runs all ready nodes at the same time.")
    gap_s: Seconds = Field(0.0, description="Idle time after each of its nodes.")


Row = Annotated[
    list[Annotated[float, Field(gt=0, le=MAX_BYTES)]], Field(min_length=2, max_length=2, description="[bytes, seconds]")
]


class LinkForm(Priced):
    """Figures of a link, or predictions of its collectives.

    Either a table, or alpha_s with at most one of beta_s_per_byte and bandwidth_bytes_per_s, or collective with
    device.
    """

    alpha_s: Seconds | None = Field(None, description="Latency: seconds of an empty message; default 0.")
    beta_s_per_byte: Annotated[float, Field(ge=0, le=MAX_SECONDS)] | None = None
    bandwidth_bytes_per_s: Annotated[float, Field(ge=1, le=MAX_BYTES)] | None = None
    table: list[Row] | None = Field(
        None,
        min_length=2,
        description="Measured [bytes, seconds], bytes growing; linear in logarithms between the rows.",
    )
    exclusive: bool = Field(False, description="Carries one transfer at a time.")
    collective: CollectiveLinkForm | None = Field(
        None, description="Times of whole collectives are predicted; needs device."
    )
    device: DeviceForm | None = None
    protocol: Protocol = DEFAULT_PROTOCOL

    _prices: dict[str, list[Prediction]] | None = PrivateAttr(None)

    def price_requests(self, path: str) -> list[PriceRequest]:
        """The collectives at :data:`LINK_BYTES`; none for a link with figures.

        Raises FieldError: one of collective and device is missing.
        """
        if (self.collective is None) != (self.device is None):
            missing = "collective" if self.collective is None else "device"
            raise FieldError.at(f"{path}.{missing}", "a predicted link has collective and device")
        if self.collective is None or self.device is None:
            return []
        return [
            PriceRequest(
                f"{path}.collective",
                self.collective.fields(operator, size, self.collective.ranks),
                self.device,
                protocol=self.protocol,
            )
            for operator in self._operators()
            for size in LINK_BYTES
        ]

    def with_prices(self, prices: Iterator[Prediction]) -> Self:
        """A copy with the predicted times."""
        if self.collective is None:
            return self
        filled = self.model_copy()
        filled._prices = {operator: [next(prices) for _ in LINK_BYTES] for operator in self._operators()}
        return filled

    def rows(self, operator: str, path: str, figure: str = "latency_s") -> tuple[tuple[float, float], ...]:
        """Bytes and seconds of a predicted collective; only after :meth:`with_prices`.

        ``figure``: {"latency_s", "lower_s", "upper_s"}.
        Raises FieldError: the link predicts another operation.
        """
        assert self._prices is not None, "not priced"
        if operator not in self._prices:
            raise FieldError.at(
                f"{path}.collective.operator",
                f"this request needs {operator}",
                hint="leave operator out: all operations are predicted",
            )
        seconds = [float(getattr(price, figure)) for price in self._prices[operator]]
        return tuple(zip(LINK_BYTES, seconds, strict=True))

    def _operators(self) -> tuple[str, ...]:
        assert self.collective is not None
        return LINK_OPERATORS if self.collective.operator is None else (self.collective.operator,)


class OverrideForm(Closed):
    """A what-if: nodes that match all given selectors take ratio x max(duration + delay_s, 0)."""

    node: Name | None = Field(None, description="Id of a node.")
    device: Name | None = Field(None, description="Device of the graph, also as a rank of a collective.")
    stream: StreamName | None = None
    class_: Name | None = Field(None, alias="class")
    ratio: float = Field(1.0, ge=0, le=1e6)
    delay_s: float = Field(0.0, ge=-MAX_SECONDS, le=MAX_SECONDS)

    def selectors(self) -> dict[str, str]:
        """The given selectors by their JSON names."""
        named = {"node": self.node, "device": self.device, "stream": self.stream, "class": self.class_}
        return {name: str(value) for name, value in named.items() if value is not None}


class MissingForm(Closed):
    """An operator of the model that is not in the graph because it has no program."""

    operator: str = Field(max_length=MAX_TEXT)
    count: Annotated[int, Field(ge=1, le=10**9), WholeNumber]
    reason: str = Field(max_length=MAX_TEXT)
