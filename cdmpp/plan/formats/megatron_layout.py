"""Pipeline layouts of Megatron-LM: ``--pipeline-model-parallel-layout`` and the sizes that go with it."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.formats.formats import Exported, Exporter
from cdmpp.plan.formats.layer_symbols import Symbol, layout_text, symbol
from cdmpp.plan.formats.shell import line
from cdmpp.plan.formats.sizes import tensor_parallel
from cdmpp.plan.multimodal.schema import MultimodalPlan
from cdmpp.plan.split.schema import SplitPlan, SplitRequest
from cdmpp.predict.requests.request import Answer, Count, Request


class MegatronLayoutExporter(Exporter):
    """Writes arguments, one on each line."""

    kinds = ("split", "pipeline")

    tp: Annotated[
        Count | None, Field(description="Tensor-parallel ranks of a stage; default: ranks of the request's programs.")
    ] = None
    symbols: Annotated[
        dict[str, Symbol],
        Field(default_factory=dict, description="Symbol of a layer by its name: E, t, m, L, or empty to leave it out."),
    ]

    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """Sizes and layout; the number of stages divided by the ranks is the virtual size."""
        if isinstance(plan, MultimodalPlan):
            stages, ranks, notes = _segments(plan)
        elif isinstance(plan, SplitPlan) and isinstance(request, SplitRequest):
            stages, ranks, notes = self._stages(request, plan)
        else:
            raise FieldError(
                "models: a fused pipeline has equal stages without layers",
                path="models",
                hint="a split plan, or a pipeline plan of one module, has layers",
            )
        tp, more = (self.tp, []) if self.tp is not None else tensor_parallel(request)
        flat = "".join(stages)
        text = line(
            [
                ("tensor-model-parallel-size", tp),
                ("pipeline-model-parallel-size", ranks),
                ("num-layers", flat.count("t")),
                ("mtp-num-layers", flat.count("m") or None),
                ("pipeline-model-parallel-layout", layout_text(stages)),
            ]
        )
        virtual = len(stages) // ranks
        sizes = f"tp {tp}, pp {ranks}, vp {virtual}: Megatron derives vp from the {len(stages)} stages of the layout"
        return Exported(text, (sizes, *more, *notes))

    def _stages(self, request: SplitRequest, plan: SplitPlan) -> tuple[list[str], int, list[str]]:
        names = [layer.name for layer in request.layers for _ in range(layer.count)]
        symbols = [symbol(name, self.symbols) for name in names]
        while symbols[:2] == ["E", "E"] and plan.stages[0].last_layer >= 1:  # token and position embedding
            symbols[:2] = ["", "E"]
        stages = ["".join(symbols[stage.first_layer : stage.last_layer + 1]) for stage in plan.stages]
        flat, notes = "".join(stages), []
        left_out = sorted({name for name, letter in zip(names, symbols, strict=True) if not letter and name})
        if left_out:
            notes.append(f"not in the layout: {', '.join(left_out)}; Megatron places them with E or with the last t")
        if "E" not in flat:
            stages[0] = "E" + stages[0]
            notes.append("no layer is called an embedding: E is added to the first stage")
        if "L" not in flat:
            stages[-1] += "L"
            notes.append("no layer is called a head: L is added to the last stage")
        _check_order("".join(stages), names)
        if [stage.rank for stage in plan.stages] != list(range(len(stages))):
            order = ", ".join(f"{stage.stage} on {stage.rank}" for stage in plan.stages)
            notes.append(f"Megatron runs stage i on rank i; the plan has stages on other ranks of the request: {order}")
        return stages, len(stages), notes


def _check_order(flat: str, names: list[str]) -> None:
    """Raise FieldError unless a layout is E, decoder layers, m, L."""
    if flat.strip("E").rstrip("L").strip("m").strip("t") or flat.count("E") != 1 or flat.count("L") != 1:
        raise FieldError(
            f"layers: Megatron's layout is E, decoder layers, L; these layers give {layout_text([flat])}",
            path="layers",
            hint='give the symbol of each name, such as symbols={"' + next(iter(names), "") + '": "t"}',
        )


def _segments(plan: MultimodalPlan) -> tuple[list[str], int, list[str]]:
    modules = {entry.module for entry in plan.layout}
    if len(modules) > 1:
        raise FieldError(
            f"modules: a layout has the layers of one decoder, the plan has {', '.join(sorted(modules))}",
            path="modules",
            hint="plan one module",
        )
    ranks = 1 + max(entry.rank for entry in plan.layout)
    if [entry.rank for entry in plan.layout] != [i % ranks for i in range(len(plan.layout))]:
        order = " ".join(str(entry.rank) for entry in plan.layout)
        raise FieldError(
            f"layout: Megatron places stage i on rank i modulo {ranks}; the plan has ranks {order}",
            path="layout",
            hint="plan with fewer segments",
        )
    stages = ["t" * entry.layers for entry in plan.layout]
    stages[0], stages[-1] = "E" + stages[0], stages[-1] + "L"
    return stages, ranks, ["the plan has no embedding and no head: E is in the first stage, L in the last one"]
