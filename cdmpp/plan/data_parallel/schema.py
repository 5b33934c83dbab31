"""Request and plan of data-parallel training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.compress.schema import CompressorForm
from cdmpp.predict.rendering import Table
from cdmpp.predict.requests.memory import UNLIMITED_BYTES, check_fits, memory_limit
from cdmpp.predict.requests.pricing import CostField, PredictedCost
from cdmpp.predict.requests.request import Bytes, Closed, Interval, Name, Plan, PositiveBytes, Request, Row, WholeNumber
from cdmpp.simulate.replay.data_parallel import Place
from cdmpp.simulate.replay.forms import LinkForm
from cdmpp.simulate.replay.links import Algorithm
from cdmpp.utils.units import format_latency, format_si

#: Weights, gradients and two moments of Adam, all of the type of the gradients.
STATES_PER_GRADIENT = 4
Slowdown = Annotated[float, Field(ge=1, le=1000)]


class LayerForm(Closed):
    """A part of the network whose gradients are computed together."""

    name: Name
    forward: CostField
    backward: CostField = Field(description="Includes everything between the next layer and this one.")
    gradient_bytes: list[PositiveBytes] = Field(description="One for each parameter.", default_factory=list)


class BucketSize(Row):
    """A bucket size, or a partition of the gradients that has none."""

    bucket_bytes: int | float | None = Field(description="null: buckets of any sizes, as in `transfers`.")
    first_bucket_bytes: int | float | None = Field(description="null: like the others.")

    def __str__(self) -> str:
        first = self.first_bucket_bytes
        if self.bucket_bytes is None:
            return "free partition"
        return format_si(self.bucket_bytes, "B") + ("" if first is None else f", the first {format_si(first, 'B')}")


class Choice(BucketSize):
    """The iteration with one bucket size."""

    buckets: int
    iteration_s: float
    comm_s: float = Field(description="Time of all-reduces.")
    exposed_comm_s: float = Field(description="Time of all-reduces while nothing computes.")


class Transfer(Row):
    """One exchange of the best choice."""

    bytes: float
    gradients: int
    first_layer: str = Field(description="Layer of its first gradients.")
    last_layer: str = Field(description="Layer whose backward pass it waits for.")
    ready_s: float
    start_s: float
    end_s: float
    compressor: str | None = Field(None, description="null: not compressed.")
    place: Place = Field("none", description="Processor that compresses.")


class DataParallelPlan(Plan):
    """The best buckets, and the iteration with all others."""

    objective_field = "iteration_s"

    iteration_s: float = Field(description="With the best bucket size.")
    interval: Interval | None = Field(description="null: all costs were given.")
    bucket_bytes: int | float | None = Field(
        description="The best bucket size; null: a partition without one is better."
    )
    first_bucket_bytes: int | float | None = Field(description="null: like the others.")
    compute_s: float = Field(description="Forward, backward and update of a rank, without transfers.")
    exposed_comm_s: float
    choices: list[Choice]
    transfers: list[Transfer]
    lower_bound_s: float = Field(
        description="Lower bound of all bucket sizes: computation, or gradients sent one by one."
    )

    @property
    def choice(self) -> Any:
        """The best buckets."""
        free = [(transfer.bytes, transfer.compressor, transfer.place) for transfer in self.transfers]
        return (self.bucket_bytes, self.first_bucket_bytes) if self.bucket_bytes is not None else free

    def headline(self) -> str:
        """The iteration and its buckets."""
        best = BucketSize(bucket_bytes=self.bucket_bytes, first_bucket_bytes=self.first_bucket_bytes)
        return f"{format_latency(self.iteration_s)} per iteration with " + (
            f"buckets of {best}" if self.bucket_bytes is not None else f"a {best} (buckets: {len(self.transfers)})"
        )

    def tables(self) -> list[Table]:
        """All bucket sizes, the baselines."""
        columns: dict[str, Callable[[Choice], str]] = {
            "bucket": str,
            "all-reduces": lambda choice: str(choice.buckets),
            "iteration": lambda choice: format_latency(choice.iteration_s),
            "exposed": lambda choice: format_latency(choice.exposed_comm_s),
        }
        return [
            Table.of(self.choices, columns, right=(1, 2, 3)),
            self.baseline_table(),
            Table.lines(*self.explanation[1:]),
        ]


class DataParallelRequest(Request[DataParallelPlan]):
    """One iteration of data-parallel training at several bucket sizes (buckets of PyTorch DDP)."""

    layers: list[LayerForm] = Field(min_length=1, description="In the order of the forward pass.")
    ranks: Annotated[int, Field(ge=1, le=1_000_000, description="Number of equal ranks."), WholeNumber]
    link: LinkForm = Field(description="Between neighbours.")
    algorithm: Algorithm = Field(
        "ring", description='"measured": the link gives times of whole all-reduces, not of messages.'
    )
    bucket_bytes: list[Bytes] | None = Field(
        None,
        min_length=1,
        description="Bucket sizes to choose from; one for all gradients, one for each, and the default of PyTorch "
        "are added. A bucket closes when it has at least so many bytes. null: 1, 4, 25 and 100 MiB, and doubled "
        "until all gradients fit.",
    )
    first_bucket_bytes: Bytes | None = Field(None, description="Size of the first bucket; default: like the others.")
    update: CostField = Field(0.0, description="The optimizer, after all gradients.")
    state_bytes: PositiveBytes | None = Field(
        None,
        description="Weights, gradients and optimizer states of a rank. Default: 4 times the gradients: Adam "
        "in the type of the gradients.",
    )
    memory_bytes: PositiveBytes | None = Field(
        None, description="Memory limit of a rank; null: that of the device of its costs."
    )
    compressors: list[CompressorForm] = Field(
        max_length=16,
        default_factory=list,
        description="Ways to compress a bucket, chosen with the partition. Without slowdowns.",
    )
    compute_slowdown: Slowdown = Field(1.0, description="Factor of the time of computation while an all-reduce runs.")
    comm_slowdown: Slowdown = Field(1.0, description="Factor of the time of an all-reduce while something computes.")

    @property
    def tried_bytes(self) -> list[float]:
        """Bucket sizes to choose from."""
        if self.bucket_bytes is not None:
            return self.bucket_bytes
        sizes = [n * 2.0**20 for n in (1, 4, 25, 100)]
        gradients = sum(sum(layer.gradient_bytes) for layer in self.layers)
        while sizes[-1] < gradients:
            sizes.append(2 * sizes[-1])
        return sizes

    @property
    def _needed_bytes(self) -> float:
        """Weights, gradients and optimizer states of a rank; activations are not known."""
        if self.state_bytes is not None:
            return self.state_bytes
        return STATES_PER_GRADIENT * sum(sum(layer.gradient_bytes) for layer in self.layers)

    @property
    def _limit_bytes(self) -> float:
        costs = [cost for layer in self.layers for cost in (layer.forward, layer.backward)] + [self.update]
        devices = [cost.device for cost in costs if isinstance(cost, PredictedCost)]
        return memory_limit(self.memory_bytes, devices, self.ignore_memory)

    @property
    def free_bytes(self) -> float:
        """Memory of a rank for the buffer of a compressed bucket."""
        return self._limit_bytes - self._needed_bytes

    def check(self) -> None:
        """Raise InfeasibleError where a rank does not hold weights, gradients and optimizer states."""
        if self.compressors and self.compute_slowdown * self.comm_slowdown > 1:
            raise FieldError.at("compressors", "compression is not timed under slowdowns", hint="leave one of them out")
        check_fits(
            "a rank (weights, gradients and optimizer states)",
            self._needed_bytes,
            self._limit_bytes,
            path="layers" if self.state_bytes is None else "state_bytes",
            fits="use devices with more memory, or shard the states over the ranks and give state_bytes of one rank",
        )

    def unchecked_memory(self) -> list[str]:
        """What is missing to compare a rank with its device."""
        if self._limit_bytes == UNLIMITED_BYTES:
            return ["no cost names a device of known capacity (memory_bytes)"]
        if not self._needed_bytes:
            return ["the layers have no gradients (state_bytes)"]
        return ["activations, whose bytes are not in the request"]

    def sizes(self) -> dict[str, int]:
        """Layers, bucket sizes, and gradients times bucket sizes and compressors: each gradient may be an exchange."""
        gradients = sum(len(layer.gradient_bytes) for layer in self.layers)
        choices = len(self.tried_bytes)
        return {
            "layers": len(self.layers),
            "bucket_sizes": choices,
            "all_reduces": gradients * (choices + len(self.compressors)),
        }
