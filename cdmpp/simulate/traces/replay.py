"""Replay of profiler traces: one call from files to an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from cdmpp.devices.spec import DeviceSpec
from cdmpp.predict.interface import Predictor
from cdmpp.predict.requests.render import Table
from cdmpp.simulate.replay.collector import paused_collector
from cdmpp.simulate.replay.engine import Replayer
from cdmpp.simulate.replay.timeline import Timeline
from cdmpp.simulate.traces.analysis import KernelRow, PathShare, RankIdle, idle, kernel_table, path_shares, short_name
from cdmpp.simulate.traces.build import build_graph
from cdmpp.simulate.traces.load import read_ranks
from cdmpp.simulate.traces.nodes import TraceGraph
from cdmpp.simulate.traces.what_if import Changes, WhatIfAnswer, answer_changes
from cdmpp.utils.units import format_latency

_MOST_ROWS = 15
_MOST_NAME = 60


@dataclass(frozen=True)
class TraceReplay:
    """A replayed trace. Times are of one iteration, in seconds, unless a name says ``total``.

    Attributes
    ----------
    graph : TraceGraph
    timeline : Timeline
        Replay of all iterations.
    what_if : list of WhatIfAnswer
    model_id : str or None
        Model behind the what-ifs.
    """

    graph: TraceGraph
    timeline: Timeline
    what_if: list[WhatIfAnswer]
    model_id: str | None = None

    @property
    def measured_s(self) -> float:
        """Measured time of an iteration: mean of those in the trace, of the rank that needs longest."""
        return self.graph.measured_s / self.graph.count

    @property
    def replayed_s(self) -> float:
        """Replayed time of an iteration."""
        return self.graph.longest_s(self.timeline.end_s) / self.graph.count

    @cached_property
    def critical_path(self) -> list[PathShare]:
        """The critical path by operator, largest first."""
        return path_shares(self.graph, self.timeline)

    @cached_property
    def idle(self) -> list[RankIdle]:
        """Busy and idle time of each rank."""
        return idle(self.graph, self.timeline)

    @cached_property
    def kernels(self) -> list[KernelRow]:
        """Kernels, or operators of a host, by total time."""
        return kernel_table(self.graph)

    def to_request(self) -> dict[str, Any]:
        """The graph as a replay request (docs/replay.md)."""
        return self.graph.to_request()

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        graph = self.graph
        return {
            "measured_s": self.measured_s,
            "replayed_s": self.replayed_s,
            "error": self.replayed_s / self.measured_s - 1 if self.measured_s else 0.0,
            "iterations": list(graph.iterations),
            "ranks": list(graph.ranks),
            "devices": list(graph.device_names),
            "nodes": len(graph.nodes),
            "critical_path": [asdict(share) for share in self.critical_path],
            "idle": [asdict(row) for row in self.idle],
            "alignment_residual_s": graph.alignment_residual_s,
            "kernels": [row.to_dict() for row in self.kernels],
            "what_if": [answer.to_dict() for answer in self.what_if],
            "model_id": self.model_id,
            "remarks": graph.remarks,
        }

    def tables(self) -> list[Table]:
        """The answer for a terminal."""
        graph = self.graph
        ranks = f"{len(graph.ranks)} ranks" if len(graph.ranks) > 1 else "1 rank"
        what = f"{graph.count} iterations" if graph.count > 1 else "1 iteration"
        error = 100 * (self.replayed_s / self.measured_s - 1) if self.measured_s else 0.0
        title = Table.lines(
            f"measured iteration {format_latency(self.measured_s)}, replayed {format_latency(self.replayed_s)} "
            f"({error:+.2f} %)  [{what}, {ranks}, {len(graph.nodes):,} nodes]"
        )
        path = [
            (_cut(s.label), f"{s.nodes} x", format_latency(s.seconds), f"{100 * s.share:.1f} %")
            for s in self.critical_path
        ]
        causes = list(dict.fromkeys(cause for row in self.idle for cause in row.idle_s))
        used = [
            (
                f"rank {row.rank}",
                format_latency(row.busy_s),
                *(format_latency(row.idle_s.get(cause, 0.0)) for cause in causes),
                format_latency(row.exposed_comm_s),
            )
            for row in self.idle
        ]
        kernels = [
            (
                _cut(short_name(row.name)),
                row.operator,
                f"{row.calls} x",
                format_latency(row.seconds),
                format_latency(row.mean_s),
                f"{100 * row.share:.1f} %",
            )
            for row in self.kernels
        ]
        name = "kernel" if graph.on_device else "operator"
        header = (name, "operator" if graph.on_device else "", "calls", "total", "mean", "share")
        return [
            title,
            *_shortened(("critical path", "nodes", "time", "share"), path, (1, 2, 3)),
            Table(("", "busy", *(f"idle: {c}" for c in causes), "exposed communication"), used, range(1, 9)),
            *_shortened(header, kernels, (2, 3, 4, 5)),
            *self._what_if_tables(),
            Table.lines(*graph.remarks, f"model {self.model_id}" if self.model_id is not None else ""),
        ]

    def _what_if_tables(self) -> list[Table]:
        if not self.what_if:
            return []
        rows = [
            (
                answer.name,
                str(answer.nodes),
                format_latency(answer.seconds),
                f"{'-' if answer.saving_s < 0 else ''}{format_latency(abs(answer.saving_s))}",
                ", ".join(f"{how} {100 * share:.0f} %" for how, share in answer.shares.items()),
                answer.domain or "",
            )
            for answer in self.what_if
        ]
        reasons: dict[str, int] = {}
        for answer in self.what_if:
            for reason, count in answer.reasons.items():
                reasons[reason] = max(reasons.get(reason, 0), count)
        return [
            Table(("what if", "nodes", "iteration", "saving", "new times", "domain"), rows, (1, 2, 3)),
            Table.lines(*(f"not predicted: {reason} ({count:,} x)" for reason, count in reasons.items())),
        ]


def replay_trace(
    *paths: str | Path,
    iteration: int | None = None,
    mark: str | None = None,
    device: DeviceSpec | str | None = None,
    from_device: DeviceSpec | str | None = None,
    ranks: int | None = None,
    link: str | None = None,
    speed_up: Sequence[tuple[str, float]] = (),
    remove: Sequence[str] = (),
    predictor: Predictor | None = None,
) -> TraceReplay:
    """Replay profiler traces, and what-ifs on them.

    Parameters
    ----------
    *paths : str or Path
        Chrome traces of ``torch.profiler`` or SQLite exports of Nsight Systems, one for each rank.
    iteration : int, optional
        Number of one iteration; default: all marked ones.
    mark : str, optional
        Regular expression of the annotations that mark iterations; default ``ProfilerStep#N``.
    device, from_device, ranks, link, speed_up, remove
        What-ifs, as in :class:`cdmpp.simulate.traces.Changes`.
    predictor : Predictor, optional
        Default: the model that ships with the package, loaded where a what-if needs it.

    Returns
    -------
    TraceReplay

    Raises
    ------
    DataError
        A file is no trace, or the ranks have no iteration in common.
    FieldError
        A what-if matches nothing, or needs a device that the trace does not name.
    UnknownDeviceError
        A device is not known.

    Examples
    --------
    >>> replay_trace("trace.json.gz", device="h100-sxm").what_if[0].seconds  # doctest: +SKIP
    0.0123
    """
    changes = Changes(device, from_device, ranks, link, tuple(speed_up), tuple(remove))
    with paused_collector():
        graph = build_graph(read_ranks(paths), iteration=iteration, mark=mark)
        replayer = Replayer(graph.to_graph())
        timeline = replayer.run()
        if changes.predicts and predictor is None:
            from cdmpp.predict.predictor import LatencyPredictor

            predictor = LatencyPredictor.load()
        answers = answer_changes(graph, replayer, changes, predictor)
    predicted = any(answer.domain for answer in answers)
    return TraceReplay(graph, timeline, answers, predictor.model_id if predicted and predictor is not None else None)


def _cut(name: str) -> str:
    return name if len(name) <= _MOST_NAME else name[: _MOST_NAME - 3] + "..."


def _shortened(header: tuple[str, ...], rows: Sequence[tuple[str, ...]], right: Sequence[int]) -> list[Table]:
    more = f"... and {len(rows) - _MOST_ROWS} more (--json has all)" if len(rows) > _MOST_ROWS else ""
    return [Table(header, rows[:_MOST_ROWS], right=right), Table.lines(more)]
