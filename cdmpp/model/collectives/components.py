"""Components of the learned residual: which contexts share a correction, and along which axis.

The residual log(measured / baseline) is a sum of smooth functions. Each component has one function for every value of
its key, so contexts with equal keys share it, and a context whose key training did not have goes without. A new device
keeps what operators, libraries and kinds of links have in common.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from cdmpp.model.collectives.context import Context

Key = tuple[Any, ...]


@dataclass(frozen=True)
class Component:
    """One set of functions.

    Attributes
    ----------
    name : str
    key : callable
        Contexts with equal keys share a function.
    axis : {"relative", "bytes"}
        ``relative``: log2 of transfer time over latency, on which links of any speed bend at one place.
        ``bytes``: log2 of the bytes.
    over_ranks : bool
        The function also varies smoothly with log2 of the ranks.
    place : bool
        The key holds the device, so a new device or link has no function.
    """

    name: str
    key: Callable[[Context], Key]
    axis: Literal["relative", "bytes"]
    over_ranks: bool = True
    place: bool = False


def _exact(c: Context) -> Key:
    return (*c.place, c.kind, c.operator, c.ranks, c.per_node, c.library, c.mode)


COMPONENTS: tuple[Component, ...] = (
    Component("all", lambda c: (), "relative"),
    Component("operator", lambda c: (c.operator,), "relative"),
    Component("mode", lambda c: (c.mode,), "relative"),
    Component("library", lambda c: (c.library,), "relative"),
    Component("stack", lambda c: (c.library, c.mode), "relative"),
    Component("kind", lambda c: (c.kind,), "relative"),
    Component("kind_operator", lambda c: (c.kind, c.operator), "relative"),
    Component("kind_stack", lambda c: (c.kind, c.library, c.mode), "relative"),
    Component("kind_stack_operator", lambda c: (c.kind, c.library, c.mode, c.operator), "relative"),
    Component("generation", lambda c: (c.generation, c.kind), "relative"),
    Component("generation_stack", lambda c: (c.generation, c.kind, c.library, c.mode), "relative"),
    Component("generation_operator", lambda c: (c.generation, c.kind, c.library, c.mode, c.operator), "relative"),
    Component("wire", lambda c: (c.kind, c.bandwidth), "bytes"),
    Component("device", lambda c: (c.device, c.kind), "bytes", place=True),
    Component("place", lambda c: (*c.place, c.kind), "bytes", place=True),
    Component("place_operator", lambda c: (*c.place, c.kind, c.operator), "bytes", place=True),
    Component("place_stack", lambda c: (*c.place, c.kind, c.library, c.mode), "bytes", place=True),
    Component("exact", _exact, "bytes", over_ranks=False, place=True),
    Component("exact_width", lambda c: (*_exact(c), c.narrow), "bytes", over_ranks=False, place=True),
)
#: Length scale over log2 of the ranks.
RANKS_SCALE = 1.5
