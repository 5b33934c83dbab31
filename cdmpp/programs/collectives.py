"""Specifications of collective operations: what a group of ranks exchanges.

They are no tensor programs: they have no lowering and no features. :mod:`cdmpp.model.collectives` predicts them by a
model of latency and bandwidth that is stored beside the network.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BeforeValidator, Field

from cdmpp.devices.links import canonical_link
from cdmpp.devices.paths import Path, known_link, link_of_device, network_of_device, path_of
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import UnsupportedOperatorError
from cdmpp.programs.spec import DType, OperatorSpec, whole_number

#: Software that runs a collective; None where it is not known.
Library = Literal["nccl", "vllm", "sglang", "trtllm", "oneccl", "rccl", "gloo"]
#: What the latency includes, as the protocols of :mod:`cdmpp.programs.query_options`; None: as the query's protocol.
Mode = Literal["kernel", "graph", "eager"]
LIBRARIES: tuple[str, ...] = get_args(Library)

#: 64 TiB and 65,536 ranks: above every buffer and every system in use.
MAX_MESSAGE_BYTES, MAX_RANKS = 2**46, 2**16

Message = Annotated[int, BeforeValidator(whole_number), Field(strict=True, ge=1, le=MAX_MESSAGE_BYTES)]
Ranks = Annotated[int, BeforeValidator(whole_number), Field(strict=True, ge=2, le=MAX_RANKS)]
PerNode = Annotated[int, BeforeValidator(whole_number), Field(strict=True, ge=1, le=MAX_RANKS)]


class Collective(OperatorSpec):
    """One collective operation.

    ``bytes`` is the larger buffer of one rank: the message of an all-reduce, the gathered output of an all-gather, the
    input of a reduce-scatter, the send buffer of an all-to-all. ``link`` is the connection inside a node (None: the
    device's own). ``ranks_per_node`` is None for as many ranks as a node of the device holds; between nodes, the
    network carries the data. ``span`` is the number of consecutive devices over which the ranks are evenly spread
    (None: they are neighbours); a group of data-parallel copies spans the tensor-parallel ranks between them.
    """

    operator: Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]
    dtype: DType = "float16"
    bytes: Message
    ranks: Ranks
    ranks_per_node: PerNode | None = None
    span: PerNode | None = None
    library: Library | None = None
    mode: Mode | None = None
    link: Annotated[str | None, BeforeValidator(canonical_link)] = None

    structural_fields: ClassVar[tuple[str, ...]] = ("ranks_per_node", "span", "library", "mode", "link")
    dtypes: ClassVar[tuple[str, ...]] = ("float16", "bfloat16", "float32", "int8")

    def structural_class(self) -> str:
        """A collective has none. Raises UnsupportedOperatorError."""
        raise UnsupportedOperatorError(
            f"{self.operator} is a collective: it has no lowered structure and no features",
            hint="predict it as a program: LatencyPredictor.predict, cdmpp predict or POST /predict",
        )

    @classmethod
    def elements(cls, sizes: Mapping[str, Any]) -> Any:
        return sizes["bytes"]

    def tensor_bytes(self) -> float:
        """At most a send and a receive buffer of one rank."""
        return 2 * self.bytes


class SendRecv(Collective):
    """A message of ``bytes`` from one rank to another."""

    operator: Literal["send_recv"] = "send_recv"  # type: ignore[assignment]
    #: One rank sends and one receives.
    ranks: Annotated[int, BeforeValidator(whole_number), Field(strict=True, ge=2, le=2)] = 2


COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv")


def is_collective(operator: Any) -> bool:
    """Whether an operator's name is that of a collective."""
    return operator in COLLECTIVES


def traffic_factor(operator: str, ranks: int) -> float:
    """Bytes that one rank sends for each byte of its larger buffer, as the bus bandwidth of nccl-tests counts them."""
    if operator == "all_reduce":
        return 2.0 * (ranks - 1) / ranks
    return 1.0 if operator == "send_recv" else (ranks - 1) / ranks


def link_seconds(
    operator: str,
    bytes_: Any,
    ranks: int,
    per_node: int | None,
    link: str | None,
    device: DeviceSpec,
    span: int | None = None,
) -> Any:
    """Traffic over the nominal bandwidth of the slowest link: the roofline of a collective, in seconds."""
    path = collective_path(operator, ranks, per_node, link, device, span)
    return bytes_ * (traffic_factor(operator, ranks) / path.bandwidth_bytes_per_s)


def collective_path(
    operator: str, ranks: int, per_node: int | None, link: str | None, device: DeviceSpec, span: int | None = None
) -> Path:
    """The path that limits a collective (:func:`cdmpp.devices.links.path_of`)."""
    return path_of(ranks, per_node, link, device, shared=operator not in ("all_to_all", "send_recv"), span=span)


_ASSUMED = "assumed"


def assumed_of(reasons: Iterable[str | None]) -> list[str]:
    """The remarks of :func:`link_remarks` among reasons of predictions, each once."""
    texts = (text for reason in reasons for text in (reason or "").split("; "))
    return list(dict.fromkeys(text for text in texts if f" {_ASSUMED}" in text))


def link_remarks(programs: Iterable[Any], device: DeviceSpec) -> Iterator[str]:
    """What the collectives among some programs assume of the connections of their device."""
    collectives = {program for program in programs if isinstance(program, Collective)}
    if known_link(device) is None and any(program.link is None for program in collectives):
        link = link_of_device(device)
        rate = link.bandwidth_bytes_per_s / 1e9
        yield f"the link of {device.name} is not known: {link.name} of {rate:g} GB/s {_ASSUMED}"
    if device.network_bytes_per_s is None and any(
        collective_path(c.operator, c.ranks, c.ranks_per_node, c.link, device, c.span).crosses for c in collectives
    ):
        rate = network_of_device(device).bandwidth_bytes_per_s * 8 / 1e9
        yield f"network of {rate:.0f} Gbit/s for each {device.name} {_ASSUMED} between nodes"
