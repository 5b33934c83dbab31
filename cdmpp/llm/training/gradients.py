"""Gradients of a training step, layer by layer: when they are ready, and how long they are exchanged."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from cdmpp.llm.training.step import TrainingPlan
from cdmpp.predict.prediction import Prediction
from cdmpp.programs.operators import OperatorSpec

#: Bytes of exchanges that are priced: 256 kB to 16 GB; others are interpolated.
EXCHANGED = tuple(4.0**power for power in range(9, 18))


class GradientPlan(TrainingPlan):
    """A training plan that also prices exchanges of gradients of any size.

    ``compressed``: collectives of compressed gradients, "all_reduce" and "all_gather"; other parameters are those of
    :class:`TrainingPlan`.
    """

    def __init__(self, *args: Any, compressed: Collection[str] = (), **options: Any) -> None:
        self._compressed = compressed
        super().__init__(*args, **options)

    @property
    def has_buckets(self) -> bool:
        """Whether gradients of the last backward pass are exchanged while it runs; ``fsdp`` exchanges each layer."""
        layout = self.layout
        return layout.dp * layout.cp > 1 and layout.sharding != "fsdp" and layout.overlap != "none"

    @property
    def reduction(self) -> str:
        """Collective of gradients that are not compressed."""
        return "all_reduce" if self.layout.sharding == "none" else "reduce_scatter"

    def _groups(self) -> list[tuple[float, int]]:
        """Share of the gradients of the fullest stage, and ranks, of dense parameters and of experts."""
        p, layout = self._stage(self._fullest()), self.layout
        groups = ((p.dense / p.total, layout.dp * layout.cp), (p.experts / p.total, layout.expert_copies))
        return [(share, ranks) for share, ranks in groups if share and ranks > 1]

    def _programs(self) -> Iterator[OperatorSpec]:
        yield from super()._programs()
        self._step_queries = len(self.queries)
        if self.has_buckets:
            for operator in sorted({self.reduction, *self._compressed}):
                for _, ranks in self._groups():
                    for size in EXCHANGED:
                        if program := self._collective(operator, size, ranks, self.layout.stage_ranks):
                            yield program

    def of_step(self, predictions: Sequence[Prediction]) -> list[Prediction]:
        """The predictions that the step is made of.

        Those of buckets are left out, and messages inside a node that stand for messages over the network, whose rate
        is stated.
        """
        over = {self._collective(*message) for message in self._step_messages() if self.links.crosses(message[3])}
        pairs = list(zip(self.queries, predictions, strict=True))[: self._step_queries]
        return [prediction for query, prediction in pairs if query.program.operator not in over]

    def exchange_table(self, operator: str) -> tuple[tuple[float, float], ...]:
        """Bytes and seconds of a collective of gradients; after :meth:`result`.

        Each bucket has the shares of dense parameters and experts that the stage has.
        """
        groups, span = self._groups(), self.layout.stage_ranks
        # The share of a group takes as long as its share of the whole size: between two priced sizes times are a line.
        return tuple(
            (size, sum(share * float(self._message_s(operator, size, ranks, span)[0][0]) for share, ranks in groups))
            for size in EXCHANGED
        )

    def backward_layers(self) -> list[tuple[str, float, float]]:
        """Name, seconds of the backward pass and bytes of gradients of each layer of the fullest stage.

        In the order of the forward pass, of one micro-batch, with what is computed again and exposed messages; after
        :meth:`result`.
        """
        stage, wide, p = self._fullest(), self.loop.gradient_bytes, self.parameters
        layer_s = float(self.layer_pass(self._predictions, backward=True)[0][0])
        first_s, last_s = (self._unit(items).compute(True) for items in self._units[1:])
        start = sum(self._layers[:stage])
        names = [f"layer {i}" for i in range(start, start + self._layers[stage])]
        layers = [(name, layer_s, wide * p.layer.total) for name in names]
        if stage == 0:
            layers.insert(0, ("embedding", first_s, wide * p.first.total))
        if stage == self.layout.pp - 1:
            layers.append(("output", last_s, wide * p.last.total))
        return layers
