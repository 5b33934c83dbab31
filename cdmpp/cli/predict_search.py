"""Predictions of a search's schedules: they are alternatives, of which each task runs one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

from cdmpp.cli.output import print_table
from cdmpp.predict.rendering import interval_text
from cdmpp.utils.units import format_latency

if TYPE_CHECKING:
    from cdmpp.predict.prediction import Prediction
    from cdmpp.predict.prediction_total import PredictionTotal

#: Schedules of a task that are printed; ``--json`` has all.
SHOWN = 10


@dataclass(frozen=True)
class Result:
    """A prediction of a program of the command line."""

    #: The argument that the program comes from.
    source: str
    prediction: Prediction
    #: How often the program runs; of a schedule: how many records of the search have it.
    count: int
    #: Task of a search; empty for a program that runs.
    task: str = ""

    @property
    def seconds(self) -> float | None:
        """Latency of all runs; None with an error."""
        return None if self.prediction.latency_s is None else self.count * self.prediction.latency_s

    @property
    def key(self) -> tuple[str, str, str]:
        """Source, task and device: results with the same key are alternatives."""
        return self.source, self.task, self.prediction.device


def ranked(results: Iterable[Result]) -> dict[tuple[str, str, str], list[Result]]:
    """Schedules by :attr:`Result.key`, fastest first; those without a prediction last."""
    tasks: defaultdict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.task:
            tasks[result.key].append(result)
    for alternatives in tasks.values():
        alternatives.sort(key=lambda result: inf if (s := result.prediction.latency_s) is None else s)
    return dict(tasks)


def executed(results: Sequence[Result]) -> list[Result]:
    """Programs that run: all but schedules, and of these the fastest of each task, once."""
    fastest = [replace(alternatives[0], count=1) for alternatives in ranked(results).values()]
    return [result for result in results if not result.task] + fastest


def print_search(source: str, device: str, results: Sequence[Result], total: PredictionTotal, left_out: int) -> None:
    """Print the fastest schedules of each task, then the sum of the fastest ones.

    ``results``: schedules of one source on one device. ``total``: sum of :func:`executed`. ``left_out``: tasks without
    a schedule.
    """
    from cdmpp.predict.prediction_total import total_line

    if total.latency_s is None:
        return
    rows, more, tasks = [], 0, ranked(results).values()
    for alternatives in tasks:
        predicted = [r.prediction for r in alternatives if r.prediction.error is None]
        more += len(predicted[SHOWN:])
        for rank, p in enumerate(predicted[:SHOWN], 1):
            interval = interval_text(p.lower_s, p.upper_s)
            rows.append((str(rank), p.name, format_latency(p.latency_s or 0.0), interval, p.domain or ""))
    print(f"schedules of {source} on {device}, fastest of each task first")
    print_table(("rank", "schedule", "latency", "interval", "domain"), rows, right=(0, 2))
    if more:
        print(f"... and {more:,} slower ones; --json has all")
    print(
        f"total of {source} on {device}, the fastest schedule of each task once: {total_line(total)} (tasks: "
        f"{total.programs} of {total.programs + total.failed + left_out}, schedules: {len(results):,})"
    )
