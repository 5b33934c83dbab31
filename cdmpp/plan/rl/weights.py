"""Transfer of new weights from the training units to the generation instances: forms of the request, and seconds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Literal, Self, get_args

from pydantic import Field, PrivateAttr, model_validator

from cdmpp.errors import FieldError
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.requests.collective_forms import CollectiveOperator, CollectiveOptions, Ranks
from cdmpp.predict.requests.pricing import Cost, Figure, PredictedCost, Priced, collect, cost_of
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
#: Bytes of the message whose predicted time is the latency of a link.
LATENCY_BYTES = 1024.0
WeightCost = Literal["same_site", "cross_site", "shared"]
#: Costs of a transfer, in the order in which the search takes them.
WEIGHT_COSTS: tuple[WeightCost, ...] = get_args(WeightCost)


class CopyForm(CollectiveOptions):
    """The collective that sends one connection's part of a copy."""

    operator: CollectiveOperator = "send_recv"
    bytes: PositiveBytes | None = Field(None, description="Default: the bytes of a copy, divided by the connections.")
    ranks: Ranks = 2


class SiteLinkForm(Closed):
    """A link within a site or between sites: its bandwidth, or a collective that predicts a copy."""

    bandwidth_bytes_per_s: PositiveBytes | None = Field(None, description="Of one connection.")
    latency_s: Seconds = 0.0
    total_bytes_per_s: PositiveBytes | None = Field(None, description="Of all connections together; null: not limited.")
    collective: CopyForm | None = Field(
        None, description="Predicted, instead of the bandwidths and latency_s; needs device."
    )
    device: DeviceForm | None = None
    protocol: Protocol = DEFAULT_PROTOCOL

    @model_validator(mode="after")
    def _one_of(self) -> Self:
        instead_of(self, "collective", "latency_s", "total_bytes_per_s")
        exactly_one(self, "bandwidth_bytes_per_s", "collective")
        return exactly_one(self, "bandwidth_bytes_per_s", "device")

    def seconds(self, size_bytes: float, ranks: int, hops: int = 1) -> float:
        """Seconds for ``size_bytes`` over ``ranks`` connections, along a path of ``hops`` links with a bandwidth.

        ``hops * latency_s + size_bytes / min(ranks * bandwidth, total)``: the bytes are divided evenly between the
        connections, and each hop forwards what it has received (pipelined).
        """
        assert self.bandwidth_bytes_per_s is not None, "it is predicted"
        total = float("inf") if self.total_bytes_per_s is None else self.total_bytes_per_s
        return hops * self.latency_s + size_bytes / min(ranks * self.bandwidth_bytes_per_s, total)

    def price_requests(self, path: str, part_bytes: float) -> list[PriceRequest]:
        """A copy of what one connection sends, and a message of :data:`LATENCY_BYTES`; none for a link with figures."""
        form = self.collective
        if form is None or self.device is None:
            return []
        programs = [form.fields(form.operator, size, form.ranks) for size in (form.bytes or part_bytes, LATENCY_BYTES)]
        return [PriceRequest(f"{path}.collective", p, self.device, protocol=self.protocol) for p in programs]


class SitesForm(SiteLinkForm):
    """A link between two sites, in both directions."""

    sites: list[Site] = Field(min_length=2, max_length=2)


class TransferForm(Priced):
    """Bytes of the weights, and the links of the transfer."""

    bytes: PositiveBytes = Field(description="One copy of the weights, as generation needs them.")
    ranks: Count = Field(1, description="Connections in parallel; each sends an equal part.")
    same_site: SiteLinkForm | None = Field(
        None, description="Within a site; also distributes a copy that came from another site."
    )
    cross_site: SiteLinkForm | None = Field(None, description="Between sites without a link in `links`.")
    links: list[SitesForm] = Field(default_factory=list, description="Links between two sites.")

    #: Predicted copy and latency of each link that has a collective, by path.
    _predicted: dict[str, tuple[Cost, Cost]] | None = PrivateAttr(None)

    def price_requests(self, path: str) -> list[PriceRequest]:
        """A copy and a short message over each predicted link."""
        part_bytes = self.bytes / self.ranks
        return [r for name, form in self._links() for r in form.price_requests(f"{path}.{name}", part_bytes)]

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

    def seconds(self, source: str, target: str, instances: int, figure: Figure = "latency_s") -> float:
        """Seconds until ``instances`` instances at the site ``target`` have the weights; after :meth:`with_prices`.

        At one site the copy travels along a chain from instance to instance, pipelined, so that the bytes count
        once. Between two sites one copy travels; after its arrival it is distributed in the same way.
        """
        arrived_s, hops = 0.0, instances
        if source != target:
            arrived_s, hops = self._hops_s(*self._link_between(source, target), 1, figure), instances - 1
        return arrived_s + (self._hops_s("same_site", self.same_site, hops, figure) if hops else 0.0)

    def sites_linked(self, source: str, target: str) -> bool:
        """Whether weights can go from one site to another, or within a site."""
        return (self.same_site if source == target else self._link_between(source, target)[1]) is not None

    def _link_between(self, source: str, target: str) -> tuple[str, SiteLinkForm | None]:
        """Path and form of the link between two sites."""
        named = {frozenset(form.sites): (f"links.{i}", form) for i, form in enumerate(self.links)}
        return named.get(frozenset((source, target)), ("cross_site", self.cross_site))

    def _links(self) -> list[tuple[str, SiteLinkForm]]:
        """Path and form of each link."""
        named = [("same_site", self.same_site), ("cross_site", self.cross_site)]
        between = [(f"links.{i}", form) for i, form in enumerate(self.links)]
        return [(name, form) for name, form in named if form is not None] + between

    def _hops_s(self, name: str, form: SiteLinkForm | None, hops: int, figure: Figure) -> float:
        """Seconds of a copy along a path of ``hops`` links; a prediction has bytes and connections."""
        assert form is not None, "the request was checked"
        if form.collective is None:
            return form.seconds(self.bytes, self.ranks, hops)
        copy_s, latency_s = self.predicted_s(name, figure)
        return copy_s + (hops - 1) * latency_s


class WeightsForm(Closed):
    """Transfer of the new weights from training to generation: given in seconds, predicted, or from ``transfer``."""

    same_site_s: Seconds = 0.0
    same_site: PredictedCost | None = Field(None, description="Predicted, instead of same_site_s.")
    cross_site_s: Seconds = 0.0
    cross_site: PredictedCost | None = Field(None, description="Predicted, instead of cross_site_s.")
    shared_s: Seconds = Field(0.0, description="If the same units generate and train.")
    shared: PredictedCost | None = Field(None, description="Predicted, instead of shared_s.")
    transfer: TransferForm | None = Field(None, description="Replaces same_site_s and cross_site_s.")

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        for name in WEIGHT_COSTS:
            instead_of(self, name, f"{name}_s")
        given = (self.same_site_s, self.cross_site_s, self.same_site, self.cross_site)
        if self.transfer is not None and any(given):
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

        ``training``, ``generation``: site of each pool that trains, and of each that generates, by name.
        """
        transfer = self.transfer
        if transfer is None:
            return
        for index, form in enumerate(transfer.links):
            if form.sites[0] == form.sites[1]:
                raise FieldError.at(
                    f"weights.transfer.links.{index}.sites",
                    f"both are {form.sites[0]!r}",
                    hint="a link within a site is same_site",
                )
        for (trainer, source), (generator, target) in product(training.items(), generation.items()):
            linked = transfer.sites_linked(source, target)
            if not linked or transfer.same_site is None:
                inside = source == target or linked
                raise FieldError.at(
                    "weights.transfer",
                    f"no link {'within' if inside else 'from ' + repr(source) + ' to'} site {target!r}, for weights "
                    f"from pool {trainer!r} to pool {generator!r}",
                    hint='give "same_site"' if inside else 'give "cross_site", or both sites in "links"',
                )
