"""Requests of the planners ``split`` and ``simulate`` from the sizes of a training job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cdmpp.errors import FieldError
from cdmpp.plan.formats import transformer
from cdmpp.plan.formats.formats import Imported
from cdmpp.plan.formats.transformer import Training
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.requests.memory import devices_on_node


@dataclass(frozen=True)
class Job:
    """A training job with pipeline parallelism.

    Attributes
    ----------
    model : LLMConfig
    run : Training
    pp : int
        Ranks of the pipeline.
    virtual : int
        Stages on each rank.
    micro_batches : int
        Of a step of one data-parallel copy.
    device : str or dict
    dp : int
        Data-parallel copies.
    schedule : str or dict
        Of a ``simulate`` request.
    stages : sequence of mappings, optional
        Numbers of "embedding", "block" and "head" in each stage; default: equal numbers of blocks.
    recompute : bool
        Whether activations are recomputed.
    """

    model: LLMConfig
    run: Training
    pp: int
    micro_batches: int
    device: Any
    virtual: int = 1
    dp: int = 1
    schedule: Any = "1f1b"
    stages: Sequence[Mapping[str, int]] | None = None
    recompute: bool = False

    @property
    def ranks(self) -> int:
        """Devices of the job."""
        return self.run.tp * self.dp * self.pp

    def imported(self, kind: str, ignored: tuple[str, ...], notes: Sequence[str]) -> Imported:
        """The request of a planner, "split" or "simulate".

        Raises
        ------
        FieldError
            The tensor-parallel ranks do not divide the model, or the stages its layers.
        """
        transformer.check_dense(self.model)
        if self.pp * self.virtual > self.model.layers + 2:
            raise FieldError(
                f"pipeline: {self.pp} ranks of {self.virtual} stages are too many for {self.model.layers} layers",
                path="pipeline",
                hint="use fewer stages",
            )
        transformer.check_tensor_parallel(self.model, self.run.tp, "tensor-parallel size")
        request = self._split() if kind == "split" else self._simulate()
        more = list(notes) + list(transformer.NOTES)
        if kind == "split" and self.virtual > 1:
            more.append(f"a split has one stage on each rank: the {self.virtual} stages on each rank are not imported")
        if kind == "split" and self.ranks > devices_on_node(self.device):
            more.append("a split decides which layers are on neighbouring nodes: all transfers cross nodes")
        return Imported(request, ignored, tuple(more))

    def _split(self) -> dict[str, Any]:
        send = transformer.transfer_form(self.model, self.run, self.device, self.ranks) if self.pp > 1 else None
        memory = {"memory": "recompute"} if self.recompute else {}
        return memory | {
            "layers": transformer.layer_forms(self.model, self.run, send),
            "ranks": [{"device": self.device} for _ in range(self.pp)],
            "micro_batches": self.micro_batches,
            "goal": "step",
        }

    def _simulate(self) -> dict[str, Any]:
        stages = self.stages or transformer.even_stages(self.model.layers, self.pp * self.virtual)
        memory = {"memory": "recompute"} if self.recompute else {}
        forms = [transformer.stage_form(self.model, self.run, stage, self.device, **memory) for stage in stages]
        request: dict[str, Any] = {
            "stages": forms,
            "micro_batches": self.micro_batches,
            "schedule": self.schedule,
            "ranks": self.pp,
        }
        if self.pp > 1:
            spans = [self._span(s % self.pp, (s + 1) % self.pp) for s in range(len(forms) - 1)]
            sends = [transformer.transfer_form(self.model, self.run, self.device, span) for span in spans]
            request["transfer"] = sends if len(set(spans)) > 1 else sends[0]
        if self.dp > 1:
            most = max(form["weight_bytes"] for form in forms) * self.virtual
            gradients = {"operator": "all_reduce", "bytes": most / transformer.WEIGHT_BYTES * 4, "ranks": self.dp}
            # Tensor-parallel ranks are neighbours, then come the data-parallel copies, then the stages.
            gradients["span"] = self.dp * self.run.tp
            request["replicas"] = [self.micro_batches] * (self.dp - 1)
            request["gradient_sync"] = {"collective": gradients, "device": self.device}
        return request

    def _span(self, first: int, second: int) -> int:
        """Devices over which a transfer between two pipeline ranks is spread: the whole job where it crosses nodes."""
        low, high = sorted((first, second))
        width, node = self.run.tp * self.dp, devices_on_node(self.device)
        crosses = any((low * width + r) // node != (high * width + r) // node for r in range(width))
        return self.ranks if crosses else (high - low + 1) * width


def micro_batch_count(sequences: int, micro_batch: int, dp: int, option: str) -> int:
    """Micro-batches of a data-parallel copy.

    Raises
    ------
    FieldError
        The sequences of a step cannot be divided into them.
    """
    if sequences % (micro_batch * dp):
        raise FieldError(
            f"{option}: {sequences} sequences are no multiple of {micro_batch} in a micro-batch times {dp} copies",
            path=option,
            hint="correct the file, or give the option dp",
        )
    return sequences // (micro_batch * dp)
