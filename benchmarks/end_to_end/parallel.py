"""Labels of four GPUs: what a replay makes of them, with a link that is stated and not measured.

The source publishes the total time of one iteration on four A100 SXM4 with NVLink, and no schedule. Data
parallel: each GPU has a quarter of the batch, gradients are summed in PyTorch's buckets. Pipeline: a quarter
of the layers on each GPU and one micro-batch, so nothing overlaps and activations travel three times each
way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.end_to_end import transformers
from benchmarks.end_to_end.labels import rows
from benchmarks.end_to_end.study import PROTOCOLS
from cdmpp.devices.registry import lookup
from cdmpp.predict.interface import Predictor
from cdmpp.programs.frontends.torch_eager import eager_trace
from cdmpp.programs.operators import OperatorSpec
from cdmpp.simulate.replay import Graph, Link, Node, replay
from cdmpp.simulate.replay.data_parallel import PYTORCH_BUCKET_BYTES, PYTORCH_FIRST_BUCKET_BYTES, Layer, Setup, simulate
from cdmpp.simulate.replay.torch_model import layers_of

GPUS = 4
#: NVLink 3 of an A100: twelve links of 25 GB/s each way; 10 µs to start a message.
LINK = Link(alpha_s=1e-5, beta_s_per_byte=1 / 300e9)
LINK_WORDS = "300 GB/s, 10 µs"


@dataclass(frozen=True)
class Parallel:
    """A label of several GPUs and its replay, in seconds; ``compute_s``: of it without communication."""

    model: str
    device: str
    variant: str
    batch: int
    measured_s: float
    replayed_s: float
    compute_s: float

    @property
    def error(self) -> float:
        """Replayed over measured, less one."""
        return self.replayed_s / self.measured_s - 1


def answer_parallel(folder: Path, predictor: Predictor) -> Iterator[Parallel]:
    """The labels of data parallel and pipeline training."""
    for row in rows(folder / "e2e_neusight.csv.gz"):
        if row["variant"] not in ("dp4", "pp4_1"):
            continue
        model, batch, tokens = row["model"], int(row["batch"]), int(row["seqlen"])
        device = lookup(row["device"]).name
        split = row["variant"] == "dp4"
        layers = _layers(model, batch // GPUS if split else batch, tokens, device, predictor)
        compute_s = sum(layer.forward_s + layer.backward_s for layer in layers)
        if split:
            iteration = simulate(layers, Setup(GPUS, LINK), PYTORCH_BUCKET_BYTES, PYTORCH_FIRST_BUCKET_BYTES)
            replayed_s = iteration.iteration_s
        else:
            size = 4.0 * batch * tokens * transformers.SIZES[model].width
            replayed_s = _one_after_another(compute_s, size)
        measured_s = float(row["e2e_ms"]) / 1e3
        yield Parallel(model, device, row["variant"], batch, measured_s, replayed_s, compute_s)


def _one_after_another(compute_s: float, size: float) -> float:
    nodes: list[Node] = []
    for index in range(2 * GPUS):
        after = (nodes[-1].id,) if nodes else ()
        if index not in (0, GPUS):  # the last stage turns round where it is
            nodes.append(Node(f"send {index}", "link", LINK.seconds(size), after, kind="comm"))
            after = (nodes[-1].id,)
        stage = index if index < GPUS else 2 * GPUS - 1 - index
        nodes.append(Node(f"run {index}", f"gpu{stage}", compute_s / (2 * GPUS), after))
    return replay(Graph(nodes)).makespan_s


def _layers(model: str, batch: int, tokens: int, device: str, predictor: Predictor) -> list[Layer]:
    network = transformers.Training(transformers.make(model, training=True))
    inputs = [torch.empty(batch, tokens, dtype=torch.int64, device="meta")]
    trace = eager_trace(network, inputs, backward=True, accumulate=True)
    own = layers_of(network, trace)
    wanted = list(dict.fromkeys(spec for layer in own for spec in (*layer.forward, *layer.backward)))
    protocol, framework = PROTOCOLS["called"]
    predictions = predictor.predict(wanted, device, protocol=protocol, framework=framework)
    price = {spec: layer.latency_s or 0.0 for spec, layer in zip(wanted, predictions, strict=True)}

    def seconds(specs: Mapping[OperatorSpec, int]) -> float:
        return sum(n * price[spec] for spec, n in specs.items())

    return [Layer(layer.name, seconds(layer.forward), seconds(layer.backward), layer.gradient_bytes) for layer in own]
