"""The request and the answer of a compression plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.pricing import CostField
from cdmpp.compose.request import Budget, Closed, Explained, MaxSteps, Name, PriceRequest, Seconds, Seed, WholeNumber
from cdmpp.compose.request import OldRequest as Request
from cdmpp.compose.transition import asked_of, cost_of
from cdmpp.errors import FieldError
from cdmpp.planning.compress.search import Found, everywhere, search
from cdmpp.planning.compress.strategy import Option, Tensor, hidden, timeline
from cdmpp.prediction import Prediction
from cdmpp.replay.build import read_link
from cdmpp.replay.forms import LinkForm
from cdmpp.replay.links import Collective, collective_s
from cdmpp.units import format_latency

MAX_TENSORS, MAX_COMPRESSORS, MAX_BYTES = 256, 4, 1e15
Place = Literal["none", "gpu", "cpu"]


class WorkForm(Closed):
    """Seconds of compressing and decompressing one tensor, by its uncompressed bytes."""

    compress_s_per_byte: Annotated[float, Field(ge=0, le=1.0)]
    decompress_s_per_byte: Annotated[float, Field(ge=0, le=1.0)]
    overhead_s: Annotated[Seconds, Field(description="Of each of the two.")] = 0.0


class CompressorForm(Closed):
    """A way to compress: how much is left, how it is exchanged, and what it costs where."""

    name: Name
    ratio: Annotated[float, Field(gt=0, le=1, description="Compressed bytes over bytes.")]
    collective: Annotated[
        Literal["all_reduce", "all_gather"],
        Field(description="all_gather: what cannot be summed; every worker then decompresses all of them."),
    ] = "all_gather"
    gpu: WorkForm | None = None
    cpu: WorkForm | None = None


class TensorForm(Closed):
    """A gradient, and the backward pass that makes it after the one before."""

    name: Name
    bytes: Annotated[float, Field(gt=0, le=MAX_BYTES)]
    backward: CostField


class CompressRequest(Request):
    """Which gradients to compress, with what, and on which processor, so that the iteration is shortest."""

    tensors: Annotated[
        list[TensorForm], Field(min_length=1, max_length=MAX_TENSORS, description="In the order of the backward pass.")
    ]
    compressors: Annotated[list[CompressorForm], Field(min_length=1, max_length=MAX_COMPRESSORS)]
    workers: Annotated[int, Field(ge=2, le=100_000), WholeNumber]
    link: LinkForm
    seed: Seed = 0
    budget_s: Budget = 1.0
    max_steps: MaxSteps = None

    answer_model: ClassVar[type[BaseModel]]

    def price_requests(self) -> list[PriceRequest]:
        """Programs of the backward passes."""
        return [
            one for i, tensor in enumerate(self.tensors) for one in asked_of(tensor.backward, f"tensors.{i}.backward")
        ]

    def solve(self, prices: Sequence[Prediction], watch: SearchControl) -> dict[str, Any]:
        """See :class:`CompressAnswer`."""
        left = iter(prices)
        costs = [cost_of(tensor.backward, left) for tensor in self.tensors]
        tensors = self.read([cost.latency_s for cost in costs])
        # The replay engine's code is loaded, or compiled, once: before the budget counts.
        began = watch.spent_s
        timeline(tensors[:1], (0,))
        loading_s = watch.spent_s - began
        steps = 0

        def go_on() -> bool:
            nonlocal steps
            steps += 1
            if self.max_steps is not None and steps > self.max_steps:
                return False
            if not watch.expired or watch.budget_s is None:
                return not watch.expired
            # Stopped by somebody before its time, or out of time.
            return watch.budget_s <= watch.spent_s < watch.budget_s + loading_s

        def report(found: Found) -> None:
            so_far = replace(found)
            watch.report(best=found.iteration_s, bound=found.bound_s, answer=lambda: _answer(tensors, so_far, said))

        said = [
            f"backward pass of {tensor.name}: {cost.largest()}"
            for tensor, cost in sorted(
                zip(self.tensors, costs, strict=True), key=lambda one: (-one[1].latency_s, one[0].name)
            )[:2]
            if cost.parts
        ]
        return _answer(tensors, search(tensors, go_on, self.seed, report), said)

    def read(self, backward_s: Sequence[float]) -> list[Tensor]:
        """Tensors with their options.

        Parameters
        ----------
        backward_s : sequence of float, length of ``tensors``

        Raises
        ------
        FieldError
            Two compressors of one name, one without a processor, or a link without figures.
        """
        link = read_link(self.link, "link")

        def exchange_s(op: Collective, size: float) -> float:
            try:
                return collective_s(op, self.workers, size, link)
            except FieldError as error:
                message = f"link.table: {error.message}"
                raise FieldError(message, path="link.table", hint=error.hint) from None

        names: set[str] = set()
        for c, compressor in enumerate(self.compressors):
            if compressor.name in names:
                path = f"compressors.{c}.name"
                raise FieldError(f"{path}: {compressor.name!r} twice", path=path)
            names.add(compressor.name)
            if compressor.gpu is None and compressor.cpu is None:
                path = f"compressors.{c}"
                raise FieldError(f"{path}: neither gpu nor cpu", path=path, hint="say what it costs on one")
        out: list[Tensor] = []
        seen: set[str] = set()
        for i, (tensor, seconds) in enumerate(zip(self.tensors, backward_s, strict=True)):
            if tensor.name in seen:
                path = f"tensors.{i}.name"
                raise FieldError(f"{path}: {tensor.name!r} twice", path=path)
            seen.add(tensor.name)

            options = [Option(None, "none", exchange_s("all_reduce", tensor.bytes))]
            for compressor in self.compressors:
                gathers = compressor.collective == "all_gather"
                # An all-gather's buffer is that of all workers, and so is what has to be decompressed.
                size = tensor.bytes * compressor.ratio * (self.workers if gathers else 1)
                network_s = exchange_s(compressor.collective, size)
                for place, work in (("gpu", compressor.gpu), ("cpu", compressor.cpu)):
                    if work is not None:
                        times = self.workers if gathers else 1
                        options.append(
                            Option(
                                compressor.name,
                                place,
                                network_s,
                                work.overhead_s + work.compress_s_per_byte * tensor.bytes,
                                work.overhead_s + work.decompress_s_per_byte * tensor.bytes * times,
                            )
                        )
            out.append(Tensor(tensor.name, seconds, tuple(options)))
        return out


class TensorPlan(BaseModel):
    """What happens to one gradient."""

    model_config = ConfigDict(extra="forbid")

    name: str
    compressor: str | None
    place: Place
    network_s: float
    hidden: Annotated[bool, Field(description="Its exchange costs the iteration nothing.")]


class Span(BaseModel):
    """One thing on the timeline."""

    model_config = ConfigDict(extra="forbid")

    tensor: str
    stage: Literal["backward", "compress", "exchange", "decompress"]
    stream: Literal["gpu", "cpu", "network"]
    start_s: float
    end_s: float


class CompressAnswer(Explained):
    """Baselines, bound and gap are of ``iteration_s``: from the first backward pass to the last gradient."""

    iteration_s: float
    lower_bound_s: float
    proven: Annotated[bool, Field(description="No strategy is shorter.")]
    exposed_comm_s: Annotated[float, Field(description="Exchanges while nothing computes.")]
    tensors: list[TensorPlan]
    busy_s: Annotated[dict[Literal["gpu", "cpu", "network"], float], Field(description="By processor.")]
    timeline: list[Span]


CompressRequest.answer_model = CompressAnswer
_LEAST_BOUND = 1e-12
_STAGES = ("backward", "compress", "exchange", "decompress")


def _gap(seconds: float, lower: float) -> float:
    if seconds <= lower:
        return 0.0
    # A bound of next to nothing makes no quotient.
    return seconds / lower - 1.0 if lower > _LEAST_BOUND * seconds else 1.0 / _LEAST_BOUND


def _answer(tensors: Sequence[Tensor], found: Found, said: Sequence[str]) -> dict[str, Any]:
    choice = found.choice
    whole = timeline(tensors, choice)
    seconds = whole.makespan_s
    lower = min(found.bound_s, seconds)
    plain = timeline(tensors, (0,) * len(tensors))
    baselines = {name: timeline(tensors, at).makespan_s for name, at in everywhere(tensors).items()}
    baselines["bytecomp"] = timeline(tensors, found.heuristic).makespan_s
    covered = set(hidden(tensors, choice))
    picked = [tensor.options[k] for tensor, k in zip(tensors, choice, strict=True)]
    busy = {"gpu": 0.0, "cpu": 0.0, "network": 0.0}
    busy |= {use.stream: use.busy_s for use in whole.streams}
    fullest = max(busy, key=lambda name: busy[name])
    many = sum(option.compressor is not None for option in picked)
    on_cpu = sum(option.place == "cpu" for option in picked)
    return {
        "iteration_s": seconds,
        "lower_bound_s": lower,
        "gap": _gap(seconds, lower),
        "proven": found.proven,
        "exposed_comm_s": whole.exposed_comm_s,
        "tensors": [
            {
                "name": tensor.name,
                "compressor": option.compressor,
                "place": option.place,
                "network_s": option.network_s,
                "hidden": i in covered,
            }
            for i, (tensor, option) in enumerate(zip(tensors, picked, strict=True))
        ],
        "busy_s": busy,
        "timeline": [
            {
                "tensor": tensors[int(node.id[:4])].name,
                "stage": _STAGES[int(node.id[5])],
                "stream": node.stream,
                "start_s": float(whole.start_s[i]),
                "end_s": float(whole.end_s[i]),
            }
            for i, node in enumerate(whole.graph.nodes)
        ],
        "baselines": baselines,
        "explanation": [
            f"{many} of {len(tensors)} tensors are compressed, {on_cpu} of them on the CPU; "
            f"{len(covered)} exchanges are hidden",
            f"exposed exchanges fall from {format_latency(plain.exposed_comm_s)} to "
            f"{format_latency(whole.exposed_comm_s)}",
            f"the {fullest} is busiest: {format_latency(busy[fullest])} of {format_latency(seconds)}",
            *said,
        ],
    }
