"""The request of ``POST /adapt``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from cdmpp.predict.requests.request import WholeNumber
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, Backend, Framework, Protocol
from cdmpp.train.adaptation.samplers import Sampler
from cdmpp.train.evaluation.tables import BELIEVABLE_S
from cdmpp_server.fields import Device, RegisteredProgram, with_max_items
from cdmpp_server.schema_base import RequestModel


class Record(RequestModel):
    """A program and its measured latency on the device."""

    program: RegisteredProgram
    latency_s: Annotated[
        float,
        Field(ge=BELIEVABLE_S[0], le=BELIEVABLE_S[1], allow_inf_nan=False, description="Measured latency in seconds."),
    ]
    backend: Backend | None = None
    protocol: Annotated[Protocol, Field(description="As in an item of /predict.")] = DEFAULT_PROTOCOL
    framework: Framework | None = None


class AdaptRequest(RequestModel):
    """Measurements of one device."""

    device: Device
    records: Annotated[list[Record], Field(min_length=1, max_length=10_000)]
    k: Annotated[
        Annotated[int, Field(ge=1, le=100_000), WholeNumber] | None,
        Field(
            description="Number of records to use. They are chosen without their latencies, and the errors are "
            "reported for the remaining records. Default: use all records."
        ),
    ] = None
    sampler: Annotated[Sampler, Field(description="Method that chooses the k records.")] = "variance"
    seed: Annotated[int, Field(ge=0, le=2**31 - 1), WholeNumber] = 0


def adapt_request_model(max_items: int) -> type[AdaptRequest]:
    """:class:`AdaptRequest` with another limit on the number of records."""
    return with_max_items(AdaptRequest, "records", max_items)
