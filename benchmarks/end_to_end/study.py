"""Predict every label: by ``predict_module``, and as sums of the network's kernels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from benchmarks.end_to_end import images, transformers
from benchmarks.end_to_end.labels import Label
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.elements import DTYPE_BYTES
from cdmpp.programs.frontends.eager_rules import AtenCall, outcome
from cdmpp.programs.frontends.torch_eager import EagerLaunch, EagerTrace, eager_trace
from cdmpp.programs.operators import OperatorSpec, make_operator
from cdmpp.programs.query_options import Protocol
from cdmpp.simulate.replay import Graph, Node, replay

#: How each kernel is predicted: as one call from the host, whose launch cost is in it; or device time alone.
PROTOCOLS: dict[str, tuple[Protocol, str | None]] = {"called": ("eager", "pytorch"), "queued": ("kernel", None)}
#: Rate at which the images of torchvision's labels are sent to the device, within the time that was measured: a
#: synchronous copy over PCIe 3.0 x16, whose nominal rate is 15.8 GB/s.
UPLOAD_BYTES_PER_S = 12e9
_PRECISIONS = {"float32": torch.float32, "float16": torch.float16}


@dataclass(frozen=True)
class Answer:
    """A label and what was predicted for it, in seconds.

    ``called_s``: calls that are waited for, one by one. ``queued_s``: device times alone, as in a stream
    that never runs dry. ``module_s``: ``predict_module``, with the copy of the input where the source timed that.
    ``roofline_s``: the sum of the same kernels' rooflines. ``parts_s``, ``module_parts_s``: forward and backward, as
    called and by ``predict_module``. ``listed_parts_s``: the same from the source's own measurements of single
    kernels, where it has them. ``in_share``: share of the time that is of domain "in". ``largest``: kernels that make
    most of it, with their share.
    """

    label: Label
    called_s: float
    queued_s: float
    module_s: float
    roofline_s: float
    listed_parts_s: tuple[float, float] | None
    parts_s: tuple[float, float]
    module_parts_s: tuple[float, float]
    kernels: int
    in_share: float
    largest: tuple[tuple[str, float], ...]

    @property
    def listed_s(self) -> float | None:
        """The sum of the source's own measurements of single kernels, where it has them."""
        return None if self.listed_parts_s is None else sum(self.listed_parts_s)

    def error(self, what: str = "called") -> float:
        """Predicted over measured, less one; ``what`` is "called", "queued", "module", "roofline" or "listed"."""
        return float(getattr(self, f"{what}_s")) / self.label.measured_s - 1


@cache
def trace(source: str, model: str, mode: str, precision: str, batch: int, size: int) -> EagerTrace:
    """The kernels of a label's run, forward and, in training, backward."""
    training = mode == "training"
    if source == "neusight":
        network = transformers.make(model, training)
        tokens = _tokens(batch, size)
        if not training:
            return eager_trace(network, [tokens])
        # The source never clears gradients, and times the forward pass without the loss.
        traced = eager_trace(transformers.Training(network), [tokens], backward=True, accumulate=True)
        kept = [
            launch for launch in traced.launches if launch.phase == "backward" or launch.module.startswith("network")
        ]
        return EagerTrace(tuple(kept), unsupported=traced.unsupported)
    network = images.make(model, training, size)
    image = _images(batch, size)
    if precision == "amp":
        return eager_trace(network, [image], autocast=torch.float16)
    network, image = network.to(_PRECISIONS[precision]), image.to(_PRECISIONS[precision])
    if not training:
        return eager_trace(network, [image])
    # The source clears gradients in place before each pass, as torch did before 2.0, and adds to the zeros.
    traced = eager_trace(images.Training(network), [image], backward=True, accumulate=True)
    return EagerTrace((*_cleared(network), *traced.launches), unsupported=traced.unsupported)


def _cleared(network: torch.nn.Module) -> Iterator[EagerLaunch]:
    """Kernels of ``zero_grad(set_to_none=False)``."""
    for name, parameter in network.named_parameters():
        for fields in outcome(AtenCall("zero_", (parameter,), {}, parameter)).launches:
            yield EagerLaunch(make_operator(fields), "zero_", name.rpartition(".")[0], "forward")


def launches_of(label: Label) -> tuple[EagerLaunch, ...]:
    """A label's kernels, in order."""
    traced = trace(label.source, label.model, label.mode, label.precision, label.batch, label.size)
    if traced.unsupported:
        names = ", ".join(one.operator for one in traced.unsupported)
        raise AssertionError(f"{label.model}: kernels without an operator: {names}")
    return traced.launches


Prices = dict[OperatorSpec, Prediction]


def answer_labels(
    labels: Iterable[Label], predictor: LatencyPredictor, listed: Mapping[Label, tuple[float, float]] | None = None
) -> list[Answer]:
    """Predict labels, device by device.

    Parameters
    ----------
    labels : iterable of Label
    predictor : LatencyPredictor
    listed : mapping of Label to (float, float), optional
        Sums of the source's own measurements of single kernels, forward and backward.
    """
    labels = list(labels)
    modules_s = _modules_s(labels, predictor)
    by_device: dict[str, list[Label]] = {}
    for label in labels:
        by_device.setdefault(label.device, []).append(label)
    answers = []
    for device, own in by_device.items():
        wanted = list(dict.fromkeys(launch.spec for label in own for launch in launches_of(label)))
        prices = {name: _priced(wanted, device, *how, predictor=predictor) for name, how in PROTOCOLS.items()}
        answers += [_answer(label, prices, modules_s[label], (listed or {}).get(label)) for label in own]
    return answers


def _modules_s(labels: Sequence[Label], predictor: LatencyPredictor) -> dict[Label, tuple[float, float]]:
    """Seconds of the forward and the backward pass of labels by ``predict_module``; what comes once is forward."""
    by_run: dict[tuple[Any, ...], list[Label]] = {}
    for label in labels:
        run = (label.source, label.model, label.mode, label.precision, label.batch, label.size)
        by_run.setdefault(run, []).append(label)
    parts_s = {}
    for (source, model, mode, precision, batch, size), own in by_run.items():
        training = mode == "training"
        if source == "neusight":
            network = transformers.make(model, training)
            module, inputs = transformers.Training(network) if training else network, _tokens(batch, size)
        else:
            network = images.make(model, training, size)
            module, inputs = images.Training(network) if training else network, _images(batch, size)
        types: dict[str, Any] = {"autocast": "float16"} if precision == "amp" else {"dtype": precision}
        devices = [label.device for label in own]
        answers = predictor.predict_module(module, inputs, devices, mode=mode, **types)
        for label, answer in zip(own, answers, strict=True):
            assert answer.timeline is not None and not answer.lower_bound
            ends_s, once_s = answer.timeline.phase_ends_s, answer.timeline.first_call_s
            parts_s[label] = (ends_s["forward"] + once_s, answer.timeline.latency_s - ends_s["forward"] - once_s)
    return parts_s


def _tokens(batch: int, size: int) -> torch.Tensor:
    return torch.empty(batch, size, dtype=torch.int64, device="meta")


def _images(batch: int, size: int) -> torch.Tensor:
    return torch.empty(batch, 3, size, size, device="meta")


def _priced(
    wanted: Sequence[OperatorSpec], device: str, protocol: Protocol, framework: str | None, predictor: Predictor
) -> Prices:
    predictions = predictor.predict(wanted, device, protocol=protocol, framework=framework)
    failed = [prediction for prediction in predictions if prediction.error is not None]
    if failed:
        raise AssertionError(f"{failed[0].name} on {device}: {failed[0].error}")
    return dict(zip(wanted, predictions, strict=True))


def _answer(
    label: Label, prices: Mapping[str, Prices], module_parts_s: tuple[float, float], listed: tuple[float, float] | None
) -> Answer:
    launches, called = launches_of(label), prices["called"]
    latencies = {name: [_latency_s(own[launch.spec]) for launch in launches] for name, own in prices.items()}
    called_s, queued_s = (_one_stream(own) for own in latencies.values())
    pairs = list(zip(launches, latencies["called"], strict=True))
    forward_s = sum(seconds for launch, seconds in pairs if launch.phase == "forward")
    inside_s = sum(seconds for launch, seconds in pairs if called[launch.spec].domain == "in")
    by_spec: Counter[OperatorSpec] = Counter()
    for launch, seconds in pairs:
        by_spec[launch.spec] += seconds  # type: ignore[assignment]
    return Answer(
        label,
        called_s,
        queued_s,
        upload_s(label) + sum(module_parts_s),
        sum(called[launch.spec].roofline_s or 0.0 for launch in launches),
        listed,
        (forward_s, called_s - forward_s),
        module_parts_s,
        len(launches),
        inside_s / called_s,
        tuple((spec.text(), seconds / called_s) for spec, seconds in by_spec.most_common(3)),
    )


def upload_s(label: Label) -> float:
    """Predicted time in which the input is sent to the device, where the measured time has it in it."""
    if label.source != "torchvision":
        return 0.0
    return label.batch * 3 * label.size**2 * DTYPE_BYTES[label.precision] / UPLOAD_BYTES_PER_S


def _one_stream(latencies_s: Sequence[float]) -> float:
    nodes: list[Node] = []
    for index, seconds in enumerate(latencies_s):
        nodes.append(Node(f"{index:06d}", "gpu", seconds, (nodes[-1].id,) if nodes else ()))
    return replay(Graph(nodes)).makespan_s


def _latency_s(price: Prediction) -> float:
    assert price.latency_s is not None
    return price.latency_s
