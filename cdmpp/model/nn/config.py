"""Sizes, options and constants of the network, readable without torch and pydantic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from cdmpp.features.schedule import NETWORK_SCHEDULE_WIDTH, SCHEDULE_VERSION
from cdmpp.features.schema import WIDTH
from cdmpp.model.nn.launch_inputs import LAUNCH_WIDTH
from cdmpp.utils.options import Options, number

#: Quantile levels that the network emits; other levels are interpolated between them.
LEVELS = (0.02, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.98)

#: Exponent of the positional encoding: as CDMPP's code computes it, or the standard one.
Positions = Literal["published", "standard"]

#: Options of earlier versions, each with the one value that is still supported. The other values are only in
#: a finished study (`ablations` in docs/benchmarks.md).
RETIRED: dict[str, Any] = {"device_inputs": "ratio", "leaf_times": True, "shared": False, "frequencies": 0}


class UnsupportedOptionError(ValueError):
    """A stored network has an option that this version does not support."""


@dataclass(frozen=True)
class NetworkConfig(Options):
    """Sizes and options of the network."""

    #: Width of a leaf token.
    width: int = number(96, least=16, most=512)
    #: Hidden units of a second path from a leaf to its token, beside the linear one; 0: none.
    leaf_hidden: int = number(0, least=0, most=4096)
    layers: int = number(2, least=1, most=12)
    heads: int = number(4, least=1, most=16)
    feed_forward: int = number(192, least=16, most=4096)
    head_width: int = number(384, least=16, most=2048)
    head_layers: int = number(3, least=1, most=12)
    #: Width of a known device's embedding.
    device_width: int = number(16, least=1, most=128)
    #: "ratio": one number; "structured": two utilisations, their overlap and a floor.
    head: Literal["ratio", "structured"] = "ratio"
    dropout: float = number(0.0, least=0.0, most=0.9)
    #: Positional encoding; see cdmpp.model.nn.positions.
    positions: Positions = "standard"
    #: Read the schedule's columns of programs given as TIR; their time is a sum over leaves.
    schedule: bool = False
    #: Of the schedule's columns.
    schedule_version: int = number(SCHEDULE_VERSION, least=SCHEDULE_VERSION, most=SCHEDULE_VERSION)
    #: Networks, trained together, whose mean is the answer.
    members: int = number(1, least=1, most=8)
    #: How many of them, the first ones, answer a program scheduled for a CPU with the sum of its leaves' times. The
    #: others start from the reference, as for all else. The two kinds err differently, so that their mean errs less.
    timed_members: int = number(8, least=0, most=8)

    @property
    def stored_width(self) -> int:
        """Columns of an encoded leaf."""
        return WIDTH + NETWORK_SCHEDULE_WIDTH if self.schedule else WIDTH

    @property
    def leaf_width(self) -> int:
        """Columns of a leaf as the network reads it: with those of the launch on a device behind the encoded ones."""
        return self.stored_width + LAUNCH_WIDTH if self.schedule else WIDTH

    def member(self, place: int) -> NetworkConfig:
        """Configuration of one of the members."""
        return replace(self, members=1, timed_members=max(0, self.timed_members - place))

    @classmethod
    def of_manifest(cls, fields: dict[str, Any]) -> NetworkConfig:
        """Configuration stored with a model; retired options are accepted with their supported value."""
        for name, supported in (("positions", get_args(Positions)), *((k, (v,)) for k, v in RETIRED.items())):
            if name in fields and fields[name] not in supported:
                only = " or ".join(map(repr, supported))
                raise UnsupportedOptionError(
                    f"the network has the option {name} = {fields[name]!r}; this version supports only {only}"
                )
        version = fields.get("schedule_version")
        if fields.get("schedule") and version != SCHEDULE_VERSION:
            raise UnsupportedOptionError(
                f"the network reads version {version!r} of the schedule's columns; this version computes "
                f"{SCHEDULE_VERSION}"
            )
        kept = {name: value for name, value in fields.items() if name not in RETIRED}
        return cls(**(kept | {"schedule_version": SCHEDULE_VERSION}))


def member_prefixes(config: NetworkConfig) -> list[str]:
    """Prefix of the array names of each member; the first member has none."""
    return ["", *(f"members.{i}." for i in range(config.members - 1))]


#: Counts whose costs overlap, with their initial cost: vectors of 8 in fused multiply-adds at peak, the others in
#: cycles. The initial costs come from a short training on measured CPU programs.
OVERLAP = {"vector_ops": 1.2, "vector_loads": 0.35, "vector_stores": 0.4, "chained_ops": 0.8}
#: Counts whose costs add up, with their initial cost in cycles.
ADD = {
    "lines_32768": 0.4,
    "lines_1048576": 1.5,
    "lines_16777216": 1.2,
    "pages_1024": 6.0,
    "pages_64": 0.4,
    "bodies": 0.06,
    "library_calls": 12.0,
    "split_indices": 3.0,
    "branches": 1.0,
    "regions": 50.0,
    "odd_updates": 8.0,
}
#: How much dearer a parallel region is for each further thread: 1 µs on two threads, nothing on one.
THREAD_START = 100.0
#: Initial cycles of a call and seconds of a cycle.
CALL_CYCLES, CYCLE_S = 40.0, 0.4e-9
#: A multiply-add of 8 lanes, in operations.
VECTOR_FLOPS = 16.0
#: Largest change (natural logarithm) of a cost by a token.
REACH = 4.0
#: Exponent of the power mean that combines overlapping costs.
POWER = 3.0
#: Positions of log2 peak flop/s and log2 units among the device's logarithms, and the centre of the former.
PEAK_LOG, UNITS_LOG, PEAK_CENTRE = 0, 3, 20.0
