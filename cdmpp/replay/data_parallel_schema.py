"""The request for data-parallel training: layers, a link, and bucket sizes to choose from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.pricing import Cost, CostField
from cdmpp.compose.request import Closed, Explained, Name, PriceRequest, WholeNumber
from cdmpp.compose.request import OldRequest as Request
from cdmpp.compose.transition import asked_of, cost_of
from cdmpp.errors import FieldError
from cdmpp.prediction import Prediction
from cdmpp.replay.build import read_link
from cdmpp.replay.data_parallel import (
    COMM,
    PYTORCH_BUCKET_BYTES,
    PYTORCH_FIRST_BUCKET_BYTES,
    Iteration,
    Layer,
    Setup,
    simulate,
)
from cdmpp.replay.forms import MAX_BYTES, LinkForm
from cdmpp.replay.links import Algorithm
from cdmpp.units import format_latency, format_si

MAX_LAYERS, MAX_PARAMETERS, MAX_CHOICES = 2048, 256, 16
#: Gradients times bucket sizes: each may be an all-reduce of its own.
MAX_WORK = 100_000
Slowdown = Annotated[float, Field(ge=1, le=1000)]


class LayerForm(Closed):
    """A part of the network whose gradients are made together."""

    name: Name
    forward: CostField
    backward: Annotated[
        CostField, Field(description="With what the backward pass does between the next layer and this one.")
    ]
    gradient_bytes: Annotated[
        list[Annotated[float, Field(gt=0, le=MAX_BYTES)]],
        Field(max_length=MAX_PARAMETERS, description="Of each parameter.", default_factory=list),
    ]


class DataParallelRequest(Request):
    """One iteration of data-parallel training, at several bucket sizes (PyTorch DDP's buckets)."""

    layers: Annotated[
        list[LayerForm], Field(min_length=1, max_length=MAX_LAYERS, description="In the order of the forward pass.")
    ]
    ranks: Annotated[int, Field(ge=1, le=1_000_000, description="Equal ones."), WholeNumber]
    link: Annotated[LinkForm, Field(description="Between neighbours.")]
    algorithm: Annotated[
        Algorithm, Field(description='"measured": the link\'s figures are of a whole all-reduce, not of a message.')
    ] = "ring"
    bucket_bytes: Annotated[
        list[Annotated[float, Field(ge=0, le=MAX_BYTES)]],
        Field(
            min_length=1,
            max_length=MAX_CHOICES,
            description="Sizes to choose from, beside PyTorch's own default; a bucket closes when it "
            "holds so many bytes or more.",
        ),
    ] = [2.0**20, 4.0 * 2**20, 25.0 * 2**20, 100.0 * 2**20]  # noqa: RUF012
    first_bucket_bytes: Annotated[
        Annotated[float, Field(ge=0, le=MAX_BYTES)] | None,
        Field(description="Of the first bucket; default: like the others."),
    ] = None
    update: Annotated[CostField, Field(description="The optimizer, after all gradients.")] = 0.0
    compute_slowdown: Annotated[
        Slowdown, Field(description="How many times as long computation takes while gradients travel.")
    ] = 1.0
    comm_slowdown: Annotated[
        Slowdown, Field(description="How many times as long gradients travel while something computes.")
    ] = 1.0

    answer_model: ClassVar[type[BaseModel]]

    def price_requests(self) -> list[PriceRequest]:
        """The programs of the layers, forward and backward, and of the update."""
        work = sum(len(layer.gradient_bytes) for layer in self.layers) * len(self.bucket_bytes)
        if work > MAX_WORK:
            raise FieldError(
                f"{work:,} gradients at all bucket sizes together are too much work",
                path="bucket_bytes",
                hint=f"gradients times bucket sizes: at most {MAX_WORK:,}",
            )
        found: list[PriceRequest] = []
        for index, layer in enumerate(self.layers):
            found += asked_of(layer.forward, f"layers.{index}.forward")
            found += asked_of(layer.backward, f"layers.{index}.backward")
        return found + asked_of(self.update, "update")

    def solve(self, prices: Sequence[Prediction], watch: SearchControl) -> dict[str, Any]:
        """Replay the iteration at each bucket size."""
        try:
            return self._solve(prices)
        except FieldError as error:
            # A link does not know which field of a request it is.
            raise FieldError(error.message, path=error.path or "link", hint=error.hint) from None

    def _solve(self, prices: Sequence[Prediction]) -> dict[str, Any]:
        left = iter(prices)
        costs = [(cost_of(one.forward, left), cost_of(one.backward, left)) for one in self.layers]
        update = cost_of(self.update, left)
        layers, update_s = self._layers(costs, "latency_s"), update.latency_s
        setup = Setup(
            self.ranks, read_link(self.link, "link"), self.algorithm, self.compute_slowdown, self.comm_slowdown
        )
        first = self.first_bucket_bytes
        asked = [(size, first) for size in self.bucket_bytes]
        # PyTorch's own sizes are always among them.
        sizes = list(dict.fromkeys([*asked, (PYTORCH_BUCKET_BYTES, PYTORCH_FIRST_BUCKET_BYTES)]))
        tried = [simulate(layers, setup, *size, update_s) for size in sizes]
        best = min(range(len(sizes)), key=lambda i: (tried[i].iteration_s, i))
        compute_s = sum(layer.forward_s + layer.backward_s for layer in layers) + update_s
        bound = _lower_bound_s(layers, setup, update_s)
        found = tried[best]
        baselines = {
            "no_overlap": compute_s + _alone_s(setup, found),
            "one_bucket": simulate(layers, setup, MAX_BYTES * MAX_LAYERS, None, update_s).iteration_s,
            "bucket_per_gradient": simulate(layers, setup, 0.0, None, update_s).iteration_s,
            "pytorch_default": tried[-1].iteration_s,
        }
        words = _explained(found, compute_s, [layer.name for layer in layers], costs)
        better = min(baselines, key=lambda name: baselines[name])
        if baselines[better] < found.iteration_s:
            words.append(
                f"{better.replace('_', ' ')} would take {format_latency(baselines[better])}: "
                f"ask for {'bucket_bytes 0' if better == 'bucket_per_gradient' else 'larger bucket_bytes'}"
            )
        interval = None
        if prices:
            lower_s, upper_s = (
                simulate(self._layers(costs, end), setup, *sizes[best], getattr(update, end)).iteration_s
                for end in ("lower_s", "upper_s")
            )
            interval = {"lower_s": lower_s, "upper_s": upper_s}
        return {
            "interval": interval,
            "iteration_s": found.iteration_s,
            "bucket_bytes": sizes[best][0],
            "first_bucket_bytes": sizes[best][1],
            "compute_s": compute_s,
            "exposed_comm_s": found.exposed_comm_s,
            "choices": [_choice(*size, one) for size, one in zip(sizes, tried, strict=True)],
            "transfers": _transfers(layers, found),
            "lower_bound_s": bound,
            "gap": found.iteration_s / bound - 1 if bound else 0.0,
            "baselines": baselines,
            "explanation": words,
        }

    def _layers(self, costs: Sequence[tuple[Cost, Cost]], figure: str) -> list[Layer]:
        """The layers with one of the figures of their costs: "latency_s", "lower_s", "upper_s"."""
        return [
            Layer(form.name, getattr(forward, figure), getattr(backward, figure), tuple(form.gradient_bytes))
            for form, (forward, backward) in zip(self.layers, costs, strict=True)
        ]


class BoundsAnswer(Closed):
    """The iteration if all predictions were at their own bounds at once."""

    lower_s: float
    upper_s: float


class ChoiceAnswer(Closed):
    """One bucket size."""

    bucket_bytes: float
    first_bucket_bytes: Annotated[float | None, Field(description="null: like the others.")]
    buckets: int
    iteration_s: float
    comm_s: Annotated[float, Field(description="Time in which gradients travel.")]
    exposed_comm_s: Annotated[float, Field(description="Of it, while nothing computes.")]


class TransferAnswer(Closed):
    """One all-reduce of the best choice."""

    bytes: float
    gradients: int
    first_layer: Annotated[str, Field(description="Whose gradients are the first in it.")]
    last_layer: Annotated[str, Field(description="Whose backward pass it waits for.")]
    ready_s: float
    start_s: float
    end_s: float


class DataParallelAnswer(Explained):
    """The best bucket size, and all others beside it."""

    iteration_s: Annotated[float, Field(description="At the best bucket size.")]
    interval: Annotated[BoundsAnswer | None, Field(description="null: all costs were given.")]
    bucket_bytes: Annotated[float, Field(description="The best bucket size.")]
    first_bucket_bytes: Annotated[float | None, Field(description="null: like the others.")]
    compute_s: Annotated[float, Field(description="Forward, backward and update of a rank alone.")]
    exposed_comm_s: float
    choices: list[ChoiceAnswer]
    transfers: list[TransferAnswer]
    lower_bound_s: Annotated[
        float, Field(description="No bucket size gives less: computation, or gradients sent as they come.")
    ]


DataParallelRequest.answer_model = DataParallelAnswer


def _alone_s(setup: Setup, found: Iteration) -> float:
    return sum(setup.transfer_s(bucket.bytes) for bucket in found.buckets)


def _lower_bound_s(layers: Sequence[Layer], setup: Setup, update_s: float) -> float:
    """Computation; or, from each gradient on, the fastest way of sending what is made then and later."""
    ready_s = sum(layer.forward_s for layer in layers)
    left = sum(sum(layer.gradient_bytes) for layer in layers)
    bound = 0.0
    for layer in reversed(layers):
        ready_s += layer.backward_s
        if layer.gradient_bytes:
            bound = max(bound, ready_s + _least_s(setup, left))
            left -= sum(layer.gradient_bytes)
    return update_s + max(bound, ready_s)


def _least_s(setup: Setup, size: float) -> float:
    """Least time of any messages that have ``size`` bytes together: at the size of most bytes a second.

    Between two rows of a table the rate rises or falls throughout, so the best size is a row's or the whole.
    """
    if size <= 0:
        return 0.0
    parts = 1 if setup.algorithm != "ring" else setup.ranks  # a ring's messages are shares of the buffer
    rows = [row[0] * parts for row in setup.link.table]
    return min(size / own * setup.transfer_s(own) for own in (*(r for r in rows if r < size), size))


def _choice(size: float, first: float | None, one: Iteration) -> dict[str, Any]:
    return {
        "bucket_bytes": size,
        "first_bucket_bytes": first,
        "buckets": len(one.buckets),
        "iteration_s": one.iteration_s,
        "comm_s": one.comm_s,
        "exposed_comm_s": one.exposed_comm_s,
    }


def _transfers(layers: Sequence[Layer], one: Iteration) -> list[dict[str, Any]]:
    line = one.timeline
    ends = line.end_s.tolist()
    sent = [i for i, node in enumerate(line.graph.nodes) if node.stream == COMM]
    return [
        {
            "bytes": bucket.bytes,
            "gradients": len(bucket.parameters),
            "first_layer": layers[bucket.parameters[0][0]].name,
            "last_layer": layers[bucket.ready].name,
            "ready_s": ends[2 * len(layers) - 1 - bucket.ready],
            "start_s": float(line.start_s[i]),
            "end_s": ends[i],
        }
        for bucket, i in zip(one.buckets, sent, strict=True)
    ]


def _explained(
    found: Iteration, compute_s: float, names: Sequence[str], costs: Sequence[tuple[Cost, Cost]]
) -> list[str]:
    whole = found.iteration_s or 1.0
    words = [
        f"{100 * compute_s / whole:.0f} % of the iteration is computation ({format_latency(compute_s)}); "
        f"gradients travel for {format_latency(found.comm_s)}, of which nothing hides "
        f"{format_latency(found.exposed_comm_s)}"
    ]
    if found.buckets and found.exposed_comm_s > 0:
        last = found.buckets[-1]
        words.append(
            f"the last of {len(found.buckets)} all-reduces has {format_si(last.bytes, 'B')} and waits for "
            f"the gradients of {names[last.ready]}"
        )
    order = sorted(range(len(names)), key=lambda i: -(costs[i][0].latency_s + costs[i][1].latency_s))
    for i in order[:3]:
        forward, backward = costs[i]
        own = forward.latency_s + backward.latency_s
        if own <= 0:
            break
        longest = max((forward, backward), key=lambda cost: cost.latency_s)
        because = f": {longest.largest()}" if longest.parts else ""
        words.append(f"layer {names[i]} takes {format_latency(own)}, {100 * own / whole:.0f} %{because}")
    return words
