"""Seconds to transfer new weights from the training units to the generation instances."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


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
