"""Transfer of new weights from the training units to the generation instances: seconds, and forms of the request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, PrivateAttr, model_validator

from cdmpp.errors import FieldError
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.collective_forms import CollectiveOperator, CollectiveOptions, Ranks
from cdmpp.predict.requests.pricing import Cost, PredictedCost, Priced, collect, cost_of
from cdmpp.predict.requests.request import (
    Closed,
    Count,
    DeviceForm,
    PositiveBytes,
    PriceRequest,
    Seconds,
    exactly_one,
    instead_of,
)
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Protocol

Site = Annotated[str, Field(max_length=200)]
Figure = Literal["latency_s", "lower_s", "upper_s"]
#: Bytes of the message whose predicted time is the latency of a link.
LATENCY_BYTES = 1024.0
WeightCost = Literal["same_site", "cross_site", "shared"]
#: Costs of a transfer, in the order in which the search takes them.
WEIGHT_COSTS: tuple[WeightCost, ...] = get_args(WeightCost)


@dataclass(frozen=True)
class SiteLink:
    """Link within a site or between two sites.

    Attributes
    ----------
    bytes_per_s : float
        Bandwidth of one connection.
    latency_s : float
        Seconds until the first byte arrives.
    total_bytes_per_s : float
        Bandwidth of all connections together; infinite if only the connections are limited.
    """

    bytes_per_s: float
    latency_s: float = 0.0
    total_bytes_per_s: float = float("inf")

    def seconds(self, size_bytes: float, ranks: int, hops: int = 1) -> float:
        """Seconds for ``size_bytes`` over ``ranks`` connections, along a path of ``hops`` links.

        Notes
        -----
        ``hops * latency_s + size_bytes / min(ranks * bytes_per_s, total_bytes_per_s)``: the bytes are divided evenly
        between the connections, and each hop forwards what it has received (pipelined).
        """
        return hops * self.latency_s + size_bytes / min(ranks * self.bytes_per_s, self.total_bytes_per_s)


@dataclass(frozen=True)
class PredictedSiteLink:
    """Link whose copy of the weights is predicted as a collective operation.

    Attributes
    ----------
    copy_s : float
        Seconds of a copy over one hop.
    latency_s : float
        Seconds of a short message, which each further hop adds.
    """

    copy_s: float
    latency_s: float

    def seconds(self, size_bytes: float, ranks: int, hops: int = 1) -> float:
        """Seconds of a copy along a path of ``hops`` links; the prediction has bytes and connections."""
        return self.copy_s + (hops - 1) * self.latency_s


AnySiteLink = SiteLink | PredictedSiteLink


@dataclass(frozen=True)
class WeightTransfer:
    """Transfer of one copy of the weights, from its bytes.

    Attributes
    ----------
    size_bytes : float
        Bytes of one copy.
    ranks : int
        Connections in parallel; each sends an equal part.
    same_site : SiteLink, PredictedSiteLink or None
        Link within a site.
    cross_site : SiteLink, PredictedSiteLink or None
        Link between sites that ``links`` does not have.
    links : mapping of frozenset of str to SiteLink or PredictedSiteLink
        Links between two sites.
    """

    size_bytes: float
    ranks: int = 1
    same_site: AnySiteLink | None = None
    cross_site: AnySiteLink | None = None
    links: Mapping[frozenset[str], AnySiteLink] = field(default_factory=dict)

    def link(self, source: str, target: str) -> AnySiteLink | None:
        """The link between two sites; None if there is none."""
        if source == target:
            return self.same_site
        return self.links.get(frozenset((source, target)), self.cross_site)

    def seconds(self, source: str, target: str, instances: int) -> float:
        """Seconds until ``instances`` instances at the site ``target`` have the weights.

        Notes
        -----
        At one site the copy travels along a chain from instance to instance, pipelined, so that the bytes count
        once. Between two sites one copy travels; after its arrival it is distributed in the same way.
        """
        link = self.link(source, target)
        if link is None:
            raise ValueError(f"no link between {source!r} and {target!r}")
        if source == target:
            return link.seconds(self.size_bytes, self.ranks, instances)
        arrived = link.seconds(self.size_bytes, self.ranks)
        if instances == 1:
            return arrived
        if self.same_site is None:
            raise ValueError(f"no link within {target!r}")
        return arrived + self.same_site.seconds(self.size_bytes, self.ranks, instances - 1)


class CopyForm(CollectiveOptions):
    """The collective that sends one connection's part of a copy."""

    operator: CollectiveOperator = "send_recv"
    bytes: Annotated[
        PositiveBytes | None, Field(description="Default: the bytes of a copy, divided by the connections.")
    ] = None
    ranks: Ranks = 2


class SiteLinkForm(Closed):
    """A link within a site or between sites: its bandwidth, or a collective that predicts a copy."""

    bandwidth_bytes_per_s: Annotated[PositiveBytes | None, Field(description="Of one connection.")] = None
    latency_s: Seconds = 0.0
    total_bytes_per_s: Annotated[
        PositiveBytes | None, Field(description="Of all connections together; null: not limited.")
    ] = None
    collective: Annotated[
        CopyForm | None, Field(description="Predicted, instead of the bandwidths and latency_s; needs device.")
    ] = None
    device: DeviceForm | None = None
    protocol: Protocol = DEFAULT_PROTOCOL

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        instead_of(self, "collective", "latency_s", "total_bytes_per_s")
        exactly_one(self, "bandwidth_bytes_per_s", "collective")
        return exactly_one(self, "bandwidth_bytes_per_s", "device")

    def link(self) -> SiteLink:
        """The link of the search, from its figures."""
        assert self.bandwidth_bytes_per_s is not None, "it is predicted"
        total = float("inf") if self.total_bytes_per_s is None else self.total_bytes_per_s
        return SiteLink(self.bandwidth_bytes_per_s, self.latency_s, total)

    def price_requests(self, path: str, part_bytes: float) -> list[PriceRequest]:
        """The copy and a message of :data:`LATENCY_BYTES`; none for a link with figures.

        Parameters
        ----------
        part_bytes : float
            Bytes that one connection sends.
        """
        form = self.collective
        if form is None or self.device is None:
            return []
        return [
            PriceRequest(
                f"{path}.collective", form.fields(form.operator, size, form.ranks), self.device, protocol=self.protocol
            )
            for size in (form.bytes or part_bytes, LATENCY_BYTES)
        ]


class SitesForm(SiteLinkForm):
    """A link between two sites, in both directions."""

    sites: Annotated[list[Site], Field(min_length=2, max_length=2)]


class TransferForm(Priced):
    """Bytes of the weights, and the links of the transfer."""

    bytes: Annotated[PositiveBytes, Field(description="One copy of the weights, as generation needs them.")]
    ranks: Annotated[Count, Field(description="Connections in parallel; each sends an equal part.")] = 1
    same_site: Annotated[
        SiteLinkForm | None, Field(description="Within a site; also distributes a copy that came from another site.")
    ] = None
    cross_site: Annotated[SiteLinkForm | None, Field(description="Between sites without a link in `links`.")] = None
    links: Annotated[list[SitesForm], Field(description="Links between two sites.")] = Field(default_factory=list)

    #: Predicted copy and latency of each link that has a collective, by path.
    _predicted: dict[str, tuple[Cost, Cost]] | None = PrivateAttr(None)

    def price_requests(self, path: str) -> list[PriceRequest]:
        """A copy and a short message over each predicted link."""
        return [
            request
            for name, form in self._links()
            for request in form.price_requests(f"{path}.{name}", self.bytes / self.ranks)
        ]

    def with_prices(self, prices: Iterator[Prediction]) -> Self:
        """A copy with the predicted times."""
        filled = self.model_copy()
        filled._predicted = {
            name: (Cost.of([1], [next(prices)]), Cost.of([1], [next(prices)]))
            for name, form in self._links()
            if form.collective is not None
        }
        return filled

    def copies(self) -> dict[str, Cost]:
        """Predicted cost of a copy over each link that has a collective, by path; after :meth:`with_prices`."""
        return {name: copy for name, (copy, _) in (self._predicted or {}).items()}

    def predicted_s(self, name: str, figure: Figure) -> tuple[float, float]:
        """Seconds of a copy and of a short message over a predicted link; after :meth:`with_prices`."""
        assert self._predicted is not None, "not priced"
        copy_s, latency_s = (float(getattr(cost, figure)) for cost in self._predicted[name])
        return copy_s, min(latency_s, copy_s)

    def transfer(self, figure: Figure = "latency_s") -> WeightTransfer:
        """The transfer of the search; after :meth:`with_prices` where a link is predicted.

        Parameters
        ----------
        figure : {"latency_s", "lower_s", "upper_s"}
            Which value of predictions to use.
        """
        links = {name: self._link(name, form, figure) for name, form in self._links()}
        between = {frozenset(form.sites): links[f"links.{i}"] for i, form in enumerate(self.links)}
        return WeightTransfer(self.bytes, self.ranks, links.get("same_site"), links.get("cross_site"), between)

    def sites_linked(self, source: str, target: str) -> bool:
        """Whether weights can go from one site to another, or within a site."""
        return (self.same_site if source == target else self.link_between(source, target)) is not None

    def link_between(self, source: str, target: str) -> SiteLinkForm | None:
        """The link between two sites; None if there is none."""
        return next((form for form in self.links if {source, target} == set(form.sites)), self.cross_site)

    def _links(self) -> list[tuple[str, SiteLinkForm]]:
        """Path and form of each link."""
        named = [("same_site", self.same_site), ("cross_site", self.cross_site)]
        between = [(f"links.{i}", form) for i, form in enumerate(self.links)]
        return [(name, form) for name, form in named if form is not None] + between

    def _link(self, name: str, form: SiteLinkForm, figure: Figure) -> AnySiteLink:
        if form.collective is None:
            return form.link()
        return PredictedSiteLink(*self.predicted_s(name, figure))


class WeightsForm(Closed):
    """Transfer of the new weights from training to generation: given in seconds, predicted, or from ``transfer``."""

    same_site_s: Seconds = 0.0
    same_site: Annotated[PredictedCost | None, Field(description="Predicted, instead of same_site_s.")] = None
    cross_site_s: Seconds = 0.0
    cross_site: Annotated[PredictedCost | None, Field(description="Predicted, instead of cross_site_s.")] = None
    shared_s: Annotated[Seconds, Field(description="If the same units generate and train.")] = 0.0
    shared: Annotated[PredictedCost | None, Field(description="Predicted, instead of shared_s.")] = None
    transfer: Annotated[TransferForm | None, Field(description="Replaces same_site_s and cross_site_s.")] = None

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        for name in WEIGHT_COSTS:
            instead_of(self, name, f"{name}_s")
        predicted = self.same_site is not None or self.cross_site is not None
        if self.transfer is not None and (self.same_site_s or self.cross_site_s or predicted):
            raise ValueError("give either transfer, or same_site_s and cross_site_s")
        return self

    def cost(self, name: WeightCost) -> Cost:
        """A transfer within a site, between sites or on shared units; the request must be resolved."""
        return cost_of(getattr(self, name), getattr(self, f"{name}_s"))

    def predicted(self) -> dict[str, Cost]:
        """All predicted costs by field; the request must be resolved."""
        out = {str(name): self.cost(name) for name in WEIGHT_COSTS if self.cost(name).parts}
        if self.transfer is not None:
            out |= {f"transfer.{name}": cost for name, cost in self.transfer.copies().items()}
        return out

    def programs(self) -> int:
        """Number of programs to price."""
        return len(collect(self))

    def check(self, training: dict[str, str], generation: dict[str, str]) -> None:
        """Raise FieldError if two sites that exchange weights have no link.

        Parameters
        ----------
        training, generation : dict of str to str
            Site of each pool that trains, and of each that generates, by name.
        """
        if self.transfer is None:
            return
        transfer = self.transfer
        for index, form in enumerate(self.transfer.links):
            if form.sites[0] == form.sites[1]:
                raise FieldError.at(
                    f"weights.transfer.links.{index}.sites",
                    f"both are {form.sites[0]!r}",
                    hint="a link within a site is same_site",
                )
        for trainer, source in training.items():
            for generator, target in generation.items():
                if not transfer.sites_linked(source, target) or transfer.same_site is None:
                    inside = source == target or transfer.sites_linked(source, target)
                    raise FieldError.at(
                        "weights.transfer",
                        f"no link {'within' if inside else 'from ' + repr(source) + ' to'} site {target!r}, for "
                        f"weights from pool {trainer!r} to pool {generator!r}",
                        hint='give "same_site"' if inside else 'give "cross_site", or both sites in "links"',
                    )
