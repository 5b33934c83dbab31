"""Schedules of ``torch.distributed.pipelining`` as ``simulate`` requests."""

from __future__ import annotations

import csv
import io
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

from cdmpp.errors import FieldError
from cdmpp.plan.formats.formats import Imported, Importer

#: An action as ``_Action.from_str`` of torch reads it: stage, type, micro-batch.
_ACTION = re.compile(r"(\d+)(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B|F|I|B|W)(\d*)")
_OVERLAP = re.compile(r"\((.*)\)OVERLAP_F_B")
#: Costs of the stages.
MISSING = ("stages.0.forward_s", "stages.0.backward_s")
_PASSES = {"F": "F", "B": "B", "I": "B", "W": "W"}


class TorchCsvImporter(Importer):
    """Reads the compute-only format and the format with communication."""

    kinds = ("simulate",)

    def read(self, text: str, kind: str) -> Imported:
        """Order, number of stages and of micro-batches; the costs of the stages are missing."""
        left_out: Counter[str] = Counter()
        order, overlaps = [], 0
        for row, cells in enumerate(csv.reader(io.StringIO(text))):
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
        found = {step["stage"] for row in order for step in row}
        stages = 1 + max(found)
        if len(found) < stages:
            raise FieldError(
                f"stage {next(s for s in range(stages) if s not in found)} has no passes, and stage {stages - 1} has",
                hint="number the stages from 0",
            )
        micro_batches = 1 + max(step["micro_batch"] for row in order for step in row)
        notes = [f"{overlaps} overlapping pairs (OVERLAP_F_B) run one after the other"] if overlaps else []
        request = {"stages": [{} for _ in range(stages)], "micro_batches": micro_batches, "schedule": {"order": order}}
        return Imported(request, tuple(f"{name} ({count})" for name, count in left_out.items()), tuple(notes), MISSING)


def _actions(cell: str, place: str) -> tuple[list[tuple[int, str, int]], bool]:
    """Actions of a cell, and whether they overlap; none for an empty cell."""
    overlap = _OVERLAP.fullmatch(cell.strip())
    parts = overlap.group(1).split(";") if overlap else [cell]
    return list(_parse(parts, place)), overlap is not None


def _parse(parts: list[str], place: str) -> Iterator[tuple[int, str, int]]:
    for part in filter(None, map(str.strip, parts)):
        found = _ACTION.fullmatch(part)
        if found is None or (found.group(2) in _PASSES and not found.group(3)):
            raise FieldError(
                f"{place}: {part[:40]!r} is no action", hint="an action is stage, type and micro-batch, such as 2F0"
            )
        yield int(found.group(1)), found.group(2), int(found.group(3) or 0)
