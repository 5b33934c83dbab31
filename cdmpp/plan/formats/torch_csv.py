"""Schedules of ``torch.distributed.pipelining``, written from plans and read as ``simulate`` requests.

They are written in the compute-only format of ``_PipelineScheduleRuntime._load_csv``. The file has one row for each
rank. An action is ``<stage><type><micro-batch>``, such as ``2F0``. Its types are F (forward), B (backward), I (backward
for the inputs alone) and W (backward for the weights). torch derives the ranks of the stages from the rows, and adds
the communication.
"""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import Field

from cdmpp.errors import FieldError
from cdmpp.plan.formats.registry import Exported, Imported, PlanExporter, RequestImporter
from cdmpp.plan.fused.schema import FusedPlan, FusedRequest
from cdmpp.plan.multimodal.modules import order_modules
from cdmpp.plan.multimodal.schema import LayoutEntry, MultimodalPlan, MultimodalRequest
from cdmpp.plan.split.schema import SplitPlan, SplitRequest
from cdmpp.predict.requests.request import Answer, Request
from cdmpp.simulate.emulator.orders import one_f_one_b
from cdmpp.simulate.emulator.schema import SimulatePlan, SimulateRequest

#: An action as ``_Action.from_str`` of torch reads it: stage, type, micro-batch.
_ACTION = re.compile(r"(\d+)(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B|F|I|B|W)(\d*)")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
#: Costs of the stages.
MISSING = ("stages.0.forward_s", "stages.0.backward_s")
_PASSES = {"F": "F", "B": "B", "I": "B", "W": "W"}


class Action(NamedTuple):
    """One computation of a stage; ``str()`` is torch's text of it."""

    stage: int
    kind: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Rows = list[list[Action]]


class TorchCsvExporter(PlanExporter):
    """Writes the order of the passes of each rank."""

    kinds = ("pipeline", "simulate", "split")

    model: int = Field(0, ge=0, description="Of several models, the one whose schedule is written.")
    copy_number: int | None = Field(None, ge=0, description="The model's copy; default: the one that ends first.")

    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """One row for each rank."""
        if isinstance(plan, FusedPlan) and isinstance(request, FusedRequest):
            rows, notes = self._fused(request, plan)
        elif isinstance(plan, MultimodalPlan) and isinstance(request, MultimodalRequest):
            rows, notes = _multimodal(request, plan)
        elif isinstance(plan, SplitPlan) and isinstance(request, SplitRequest):
            rows, notes = _split(request, plan)
        else:
            assert isinstance(plan, SimulatePlan) and isinstance(request, SimulateRequest)
            rows, notes = _simulated(request, plan)
        _check_ranks(rows)
        return Exported(to_csv(rows), tuple(notes))

    def _fused(self, request: FusedRequest, plan: FusedPlan) -> tuple[Rows, list[str]]:
        sequence = plan.sequence()
        if sequence is None:
            raise FieldError.at(
                "models",
                f"{len(request.models)} models share the ranks and their passes are mixed: a schedule has one model",
                hint='give "executable": true (--executable): a plan that runs one schedule after the other',
            )
        if self.model >= len(request.models):
            raise FieldError.at("model", f"{self.model}, the request has {len(request.models)} models")
        model = request.models[self.model]
        copies: dict[int, dict[int, Any]] = {}
        for rank, row in enumerate(plan.order):
            for step in row:
                if step.model == self.model:
                    copies.setdefault(step.copy_, {}).setdefault(rank, []).append(step)
        first = min(copies, key=lambda copy: max(row[-1].end_s for row in copies[copy].values()))
        chosen = first if self.copy_number is None else self.copy_number
        if chosen not in copies:
            raise FieldError.at("copy_number", f"{chosen}, the plan has {len(copies)} copies of model {self.model}")
        ranks = sorted(copies[chosen])
        rows = []
        for position, rank in enumerate(ranks):
            stage = position if model.direction == "down" else len(ranks) - 1 - position
            rows.append([Action(stage, step.pass_, step.micro_batch) for step in copies[chosen][rank]])
        notes = [f"{model.micro_batches} micro-batches (n_microbatches) on {model.stages} ranks, one stage on each"]
        if len(sequence) > 1:
            notes.append(
                f"this is model {self.model} (--set model=N writes another): each rank runs the schedules of models "
                f"{', '.join(map(str, sequence))} in this order, without a barrier between them"
            )
        if len(copies) > 1:
            notes.append(
                f"the plan has {len(copies)} copies of the model, the file the order of copy {chosen}, on ranks "
                f"{ranks[0]} to {ranks[-1]} (--set copy_number=N writes another); each copy is a data-parallel replica "
                "with its own pipeline group"
            )
        if request.max_activations is not None:
            notes.append("max_activations is not in the file: the order of the passes keeps it")
        return rows, notes


def to_csv(rows: Sequence[Sequence[Action]]) -> str:
    """Text of the file."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([str(action) for action in row] for row in rows)
    return text.getvalue()


def _multimodal(request: MultimodalRequest, plan: MultimodalPlan) -> tuple[Rows, list[str]]:
    if plan.order is None or plan.sub_batches is None:
        raise FieldError.at(
            "batches", "the plan has several steps, and a schedule of torch has one", hint='give "batch"'
        )
    names = [module.name for module in request.modules]
    order = order_modules(names, [[names.index(name) for name in module.after] for module in request.modules])
    in_turn = [names[i] for i in order if plan.batch is None or plan.batch[names[i]]]
    chain = in_turn if request.executable else _chain(request)
    sizes = {name: set(plan.sub_batches[name].items) for name in chain}
    counts = {name: plan.sub_batches[name].count for name in chain}
    if len(set(counts.values())) > 1 or any(len(items) > 1 for items in sizes.values()):
        listed = ", ".join(f"{name} {plan.sub_batches[name].items}" for name in chain)
        raise FieldError.at(
            "sub_batches",
            f"torch divides a batch into equal micro-batches, and the plan does not (items: {listed})",
            hint='give "executable": true (--executable): a plan with equal micro-batches',
        )
    entries = [entry for name in chain for entry in plan.layout if entry.module == name]
    stages = {(entry.module, entry.segment, entry.rank): number for number, entry in enumerate(entries)}
    rows = [
        [Action(stages[step.module, step.segment, rank], step.pass_, step.micro_batch) for step in row]
        for rank, row in enumerate(plan.order)
    ]
    parts = ", ".join(f"{stages[e.module, e.segment, e.rank]}: {layers_text(e)}" for e in plan.layout)
    notes = [f"{next(iter(counts.values()))} micro-batches (n_microbatches)", f"layers of the stages: {parts}"]
    if request.executable and len(chain) > 1:
        notes.append(f"the modules are a chain, {', '.join(chain)}: each passes on what a later one takes")
    changed = [str(rank.rank) for rank in plan.memory or [] if any({*k} - {"keep"} for k in rank.knobs.values())]
    if changed:
        notes.append(f"recomputing and offloading on ranks {', '.join(changed)} are not in the file")
    return rows, notes


def _chain(request: MultimodalRequest) -> list[str]:
    """Modules in the order of the forward pass, each after at most one and before at most one other."""
    names = [module.name for module in request.modules]
    before = {module.name: list(module.after) for module in request.modules}
    first = [name for name in names if not before[name]]
    branches = len(first) > 1 or any(len(after) > 1 for after in before.values())
    if branches or any(sum(name in after for after in before.values()) > 1 for name in names):
        raise FieldError.at(
            "modules",
            "torch sends the output of a stage to the next stage only, and these modules are no chain",
            hint='give "executable": true (--executable): a plan with the modules one behind the other',
        )
    chain = first
    while following := [name for name in names if before[name] == [chain[-1]]]:
        chain = chain + following
    return chain


def layers_text(entry: LayoutEntry) -> str:
    """Layers of a layout entry, such as "language 0-3"."""
    return f"{entry.module} {entry.first_layer}-{entry.first_layer + entry.layers - 1}"


def _split(request: SplitRequest, plan: SplitPlan) -> tuple[Rows, list[str]]:
    stages = len(plan.stages)
    rows: Rows = [[] for _ in plan.stages]
    for stage, passes in zip(plan.stages, one_f_one_b(stages, stages, request.micro_batches), strict=True):
        rows[stage.rank] = [Action(stage.stage, item.kind, item.micro_batch) for item in passes]
    parts = ", ".join(f"{stage.stage}: {stage.first_layer}-{stage.last_layer}" for stage in plan.stages)
    return rows, [
        f"1F1B with {request.micro_batches} micro-batches (n_microbatches)",
        f"layers of the stages are not in the file: {parts}",
    ]


def _simulated(request: SimulateRequest, plan: SimulatePlan) -> tuple[Rows, list[str]]:
    if plan.timeline is None:
        raise FieldError.at("timeline", "the plan has no passes", hint='omit "timeline": false in the request')
    delayed = {(item.stage, item.micro_batch) for item in plan.timeline if item.kind == "W"}
    rows: Rows = [[] for _ in range(request.ranks_used)]
    for item in plan.timeline:
        kind = "I" if item.kind == "B" and (item.stage, item.micro_batch) in delayed else item.kind
        rows[item.rank].append(Action(item.stage, kind, item.micro_batch))
    notes = [f"{len(request.class_of_each[0])} micro-batches (n_microbatches)"]
    for mode in ("recompute", "offload"):
        stages = [str(s) for s, stage in enumerate(request.stages) if stage.memory == mode]
        if stages:
            notes.append(f"{mode} of stages {', '.join(stages)} is not in the file")
    if len(set(request.class_of_each[0])) > 1:
        notes.append("classes of micro-batches are not in the file: torch divides a batch into equal micro-batches")
    if request.replicas:
        notes.append("further data-parallel copies are not in the file: each uses the same schedule")
    return rows, notes


def _check_ranks(rows: Rows) -> None:
    idle = [str(rank) for rank, row in enumerate(rows) if not row]
    if idle:
        raise FieldError.at(
            "ranks",
            f"{', '.join(idle)} of {len(rows)} run no stage, and torch needs one on each",
            hint=f"plan for {len(rows) - len(idle)} ranks",
        )


class TorchCsvImporter(RequestImporter):
    """Reads the compute-only format and the format with communication."""

    kinds = ("simulate",)

    def read(self, text: str, kind: str) -> Imported:
        """Order, number of stages and of micro-batches; the costs of the stages are missing."""
        left_out: Counter[str] = Counter()
        order, overlaps = [], 0
        try:
            rows = list(csv.reader(io.StringIO(text)))
        except csv.Error as error:
            raise FieldError(f"the file is not CSV: {error}", hint="give a schedule of torch in CSV") from None
        for row, cells in enumerate(rows):
            passes: list[dict[str, Any]] = []
            for column, cell in enumerate(cells):
                actions, overlapping = _actions(cell, f"row {row + 1}, column {column + 1}")
                overlaps += overlapping
                for stage, name, micro_batch in actions:
                    if name in _PASSES:
                        passes.append({"stage": stage, "pass": _PASSES[name], "micro_batch": micro_batch})
                    else:
                        left_out[name] += 1
            order.append(passes)
        if not any(order):
            raise FieldError("no pass in the file", hint="a schedule has rows of actions such as 0F0,0F1,0B0,0B1")
        numbers = {step["stage"] for row in order for step in row}
        stages = 1 + max(numbers)
        if len(numbers) < stages:
            raise FieldError(
                f"stage {next(s for s in range(stages) if s not in numbers)} has no passes, and stage {stages - 1} has",
                hint="number the stages from 0",
            )
        micro_batches = 1 + max(step["micro_batch"] for row in order for step in row)
        notes = [f"{overlaps} overlapping pairs (OVERLAP_F_B) run one after the other"] if overlaps else []
        request = {"stages": [{} for _ in range(stages)], "micro_batches": micro_batches, "schedule": {"order": order}}
        return Imported(request, tuple(f"{name} ({count})" for name, count in left_out.items()), tuple(notes), MISSING)


def _actions(cell: str, place: str) -> tuple[list[tuple[int, str, int]], bool]:
    """Actions of a cell, and whether they overlap; none for an empty cell."""
    overlap = _OVERLAP.fullmatch(cell.strip())
    actions = []
    for part in filter(None, map(str.strip, overlap.group(1).split(";") if overlap else [cell])):
        match = _ACTION.fullmatch(part)
        if match is None or (match.group(2) in _PASSES and not match.group(3)):
            raise FieldError(
                f"{place}: {part[:40]!r} is no action", hint="an action is stage, type and micro-batch, such as 2F0"
            )
        actions.append((int(match.group(1)), match.group(2), int(match.group(3) or 0)))
    return actions, overlap is not None
