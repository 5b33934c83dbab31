"""Split plans as a part of a torchtitan job: parallelism, and the modules of each stage."""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.formats.formats import Exported, Exporter
from cdmpp.plan.formats.layer_symbols import Symbol, symbol
from cdmpp.plan.formats.sizes import tensor_parallel
from cdmpp.plan.split.schema import SplitPlan, SplitRequest
from cdmpp.predict.requests.request import Answer, Count, Request

#: Modules of torchtitan's decoders.
EMBEDDING, NORM, OUTPUT = "tok_embeddings", "norm", "output"


class TorchtitanExporter(Exporter):
    """Writes TOML for ``[parallelism]``: degrees, schedule and ``module_fqns_per_model_part``."""

    kinds = ("split",)

    tp: Annotated[
        Count | None, Field(description="Tensor-parallel ranks of a stage; default: ranks of the request's programs.")
    ] = None
    symbols: Annotated[
        dict[str, Symbol],
        Field(default_factory=dict, description="Symbol of a layer by its name, as in megatron-layout."),
    ]

    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """1F1B with one stage on each rank, as the plan's step is emulated."""
        assert isinstance(request, SplitRequest) and isinstance(plan, SplitPlan)
        names = [layer.name for layer in request.layers for _ in range(layer.count)]
        modules = self._modules(names)
        parts = [
            [name for layer in modules[stage.first_layer : stage.last_layer + 1] for name in layer]
            for stage in plan.stages
        ]
        tp, notes = (self.tp, []) if self.tp is not None else tensor_parallel(request)
        text = "\n".join(
            [
                "[parallelism]",
                f"tensor_parallel_degree = {tp}",
                f"pipeline_parallel_degree = {len(parts)}",
                'pipeline_parallel_schedule = "1F1B"',
                "module_fqns_per_model_part = [",
                *(f"  {json.dumps(part)}," for part in parts),
                "]",
                "",
            ]
        )
        micro = f"set local_batch_size to {request.micro_batches} times pipeline_parallel_microbatch_size"
        return Exported(text, (micro, *notes))

    def _modules(self, names: list[str]) -> list[list[str]]:
        """Modules of each layer; the embedding, the norm and the output are added where no layer has their name."""
        symbols = [symbol(name, self.symbols) for name in names]
        if "m" in symbols:
            raise FieldError("layers: torchtitan has no multi-token prediction", path="layers")
        blocks = iter(range(len(names)))
        modules = [[f"layers.{next(blocks)}"] if letter == "t" else [] for letter in symbols]
        first = symbols.index("E") if "E" in symbols else 0
        last = len(names) - 1 - symbols[::-1].index("L") if "L" in symbols else len(names) - 1
        modules[first].insert(0, EMBEDDING)
        modules[last] += [NORM, OUTPUT]
        return modules
