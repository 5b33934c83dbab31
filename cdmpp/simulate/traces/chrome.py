"""Chrome traces of ``torch.profiler`` (Kineto), of its older forms too, as records."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

from cdmpp.errors import DataError
from cdmpp.simulate.traces.collectives import is_host_work, recorded_call, shaped_call
from cdmpp.simulate.traces.json_stream import read_chrome
from cdmpp.simulate.traces.records import Arguments, CollectiveCall, EventKind, Lane, RankTrace, Sync, TraceEvent

#: Category, in lower case, -> kind. Up to torch 1.12 the categories were "Operator", "Kernel", "Runtime", ...
_KINDS: dict[str, EventKind] = {
    "cpu_op": "op",
    "operator": "op",
    "user_annotation": "annotation",
    "kernel": "kernel",
    "gpu_memcpy": "copy",
    "gpu_memset": "copy",
    "memcpy": "copy",
    "memset": "copy",
    "cuda_sync": "sync",
}
_SYNCS = {
    "stream sync": "stream",
    "stream synchronize": "stream",
    "context sync": "device",
    "context synchronize": "device",
    "device sync": "device",
    "event sync": "event",
    "event synchronize": "event",
    "stream wait event": "stream_wait",
}
_SHAPES = "Input Dims", "Input dims"


def read_torch(path: str | Path) -> RankTrace:
    """Read a Chrome trace of ``torch.profiler``; gzip is recognised by its content.

    Parameters
    ----------
    path : str or Path

    Returns
    -------
    RankTrace

    Raises
    ------
    DataError
        The file is cut, not JSON, or has no events of torch.
    """
    reader = _Reader(Path(path))
    for event in read_chrome(reader.path, reader.header):
        reader.add(event)
    return reader.finish()


class _Reader:
    """Events of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trace = RankTrace(str(path), "torch")
        self._origin_us: float | None = None
        self._base_s = 0.0
        self._lanes: dict[tuple[str, str, str], Lane] = {}
        self._kept: dict[Any, Any] = {}
        self._categories: Counter[str] = Counter()
        self._open: dict[Lane, list[TraceEvent]] = {}
        self._flows: dict[tuple[str, str, int], tuple[int, str]] = {}
        self._instants: Counter[str] = Counter()
        self._correlated = False

    def header(self, name: str, value: Any) -> None:
        """Take a field beside the events."""
        trace = self.trace
        if name == "distributedInfo" and isinstance(value, dict):
            rank, size = value.get("rank"), value.get("world_size")
            trace.rank = rank if isinstance(rank, int) else None
            trace.world_size = size if isinstance(size, int) else None
        elif name == "baseTimeNanoseconds":
            self._base_s = (_number(value) or 0.0) / 1e9
        elif name == "host_name":
            trace.host = str(value)
        elif name in ("deviceProperties", "computeProperties") and isinstance(value, list):
            for entry in value:
                if isinstance(entry, dict) and "name" in entry:
                    trace.devices[str(entry.get("id", len(trace.devices)))] = str(entry["name"])

    def add(self, event: dict[str, Any]) -> None:
        """Take an event."""
        phase = event.get("ph")
        if phase in ("s", "f"):
            self._flow(event)
            return
        if phase == "M":
            self._thread(event)
            return
        if phase not in ("X", "B", "E"):
            return
        at = event.get("ts")
        at = _number(at)
        if at is None:
            self._instants["time"] += 1
            return
        kind, values = self._kind(event), event.get("args")
        values = values if isinstance(values, dict) else {}
        if kind is None and phase != "E":
            return
        if self._origin_us is None:
            self._origin_us = at
        start_s = (at - self._origin_us) * 1e-6
        if phase == "E":
            self._close(event, start_s)
            return
        assert kind is not None
        length = _number(event.get("dur"))
        if phase == "X" and length is None:
            self._instants[kind] += 1
            length = 0.0
        name = self._once(str(event.get("name", "")))
        lane = self._lane(kind, event, values)
        duration_s = max(length or 0.0, 0.0) * 1e-6
        made = TraceEvent(kind, name, lane, start_s, duration_s)
        made.correlation = _whole(values.get("correlation", values.get("Correlation ID")))
        made.external = _whole(values.get("External id", values.get("external id")))
        made.detail = self._detail(kind, name, lane, values)
        self._correlated |= kind == "kernel" and made.correlation >= 0
        if phase == "B":
            self._open.setdefault(lane, []).append(made)
        self.trace.events.append(made)

    def finish(self) -> RankTrace:
        """The records.

        Raises
        ------
        DataError
            No event is one of torch.
        """
        trace = self.trace
        if not trace.events:
            seen = ", ".join(repr(name) for name, _ in self._categories.most_common(5))
            raise DataError(
                f"{self.path}: no event is an operator, a kernel or an annotation of torch.profiler"
                + (f"; its categories are {seen}" if seen else ": the trace is empty"),
                hint="record with torch.profiler.profile(activities=[...]) and prof.export_chrome_trace(path)",
            )
        trace.origin_s = self._base_s + (self._origin_us or 0.0) * 1e-6
        self._connect_flows()
        for kind, count in sorted(self._instants.items()):
            if kind == "time":
                trace.remarks.append(f"events without a time, which are left out: {count:,}")
            else:
                trace.remarks.append(f"events ({kind}) without a duration, which count as 0 s: {count:,}")
        left_open = sum(len(events) for events in self._open.values())
        if left_open:
            trace.remarks.append(f"events that begin and never end, which count as 0 s: {left_open:,}")
        return trace

    def _kind(self, event: dict[str, Any]) -> EventKind | None:
        category = str(event.get("cat", "")).casefold()
        self._categories[category] += 1
        if category in _KINDS:
            # Up to torch 1.12, ranges such as ProfilerStep#3 and Optimizer.step#SGD.step had the category of operators.
            named = _KINDS[category] == "op" and "#" in str(event.get("name", ""))
            return "annotation" if named else _KINDS[category]
        if category.endswith(("_runtime", "_driver")) or category == "runtime":
            return "runtime"
        if category:
            return None
        # Before Kineto (torch 1.8) events had no category, and named processes.
        process = str(event.get("pid", ""))
        if process == "CUDA functions":
            return "copy" if str(event.get("name", "")).startswith(("Memcpy", "Memset")) else "kernel"
        return "op" if process == "CPU functions" or str(event.get("name", "")).startswith("aten::") else None

    def _lane(self, kind: EventKind, event: dict[str, Any], values: dict[str, Any]) -> Lane:
        on_device = kind in ("kernel", "copy", "sync")
        owner, name = event.get("pid", 0), event.get("tid", 0)
        if on_device:
            owner, name = values.get("device", owner), values.get("stream", name)
        key = ("device" if on_device else "host", str(owner), str(name))
        if key not in self._lanes:
            self._lanes[key] = Lane(key[0], key[1], key[2])  # type: ignore[arg-type]
        return self._lanes[key]

    def _detail(
        self, kind: EventKind, name: str, lane: Lane, values: dict[str, Any]
    ) -> Arguments | CollectiveCall | Sync | None:
        if kind == "sync":
            how = _SYNCS.get(str(values.get("cuda_sync_kind", name)).casefold())
            waited = values.get("wait_on_stream", -1)
            record = _whole(values.get("wait_on_cuda_event_record_corr_id"))
            stream = "" if lane.name == "-1" else lane.name
            waited_text = "" if waited in (-1, None, "-1") else str(waited)
            return None if how is None else Sync(how, stream, waited_text, record)  # type: ignore[arg-type]
        call = recorded_call(name, values)
        if call is not None:
            return self._kept.setdefault(call, call)  # type: ignore[no-any-return]
        dims = next((values[key] for key in _SHAPES if key in values), None)
        if isinstance(dims, list) and kind in ("op", "annotation"):
            types = values.get("Input type", values.get("Input types", []))
            concrete = values.get("Concrete Inputs", [])
            key = (_tuple(dims), _tuple(types), tuple(map(str, concrete)))
            shapes = self._kept.setdefault(key, Arguments(*key))
            if is_host_work(name):
                return shaped_call(name, shapes, self.trace.world_size)
            return shapes  # type: ignore[no-any-return]
        return shaped_call(name, None, self.trace.world_size) if is_host_work(name) else None

    def _once(self, text: str) -> str:
        return self._kept.setdefault(text, text)  # type: ignore[no-any-return]

    def _thread(self, event: dict[str, Any]) -> None:
        values = event.get("args")
        if event.get("name") == "thread_name" and isinstance(values, dict):
            lane = Lane("host", str(event.get("pid", "")), str(event.get("tid", "")))
            self.trace.threads[lane] = str(values.get("name", ""))

    def _close(self, event: dict[str, Any], at_s: float) -> None:
        lane = Lane("host", str(event.get("pid", 0)), str(event.get("tid", 0)))
        if self._open.get(lane):
            begun = self._open[lane].pop()
            begun.duration_s = max(at_s - begun.start_s, 0.0)

    def _flow(self, event: dict[str, Any]) -> None:
        """Arrows from launches to kernels, for traces whose events have no correlation id."""
        if self._correlated or str(event.get("cat", "")).casefold() in ("fwdbwd", "forward_backward"):
            return
        at, number = event.get("ts"), event.get("id")
        if isinstance(at, int | float) and isinstance(number, int):
            key = (str(event.get("pid")), str(event.get("tid")), round(at * 1000))
            self._flows[key] = (number, str(event.get("ph")))

    def _connect_flows(self) -> None:
        if self._correlated or not self._flows:
            self._flows.clear()
            return
        origin = self._origin_us or 0.0
        for event in self.trace.events:
            if event.kind in ("kernel", "copy", "runtime", "op"):
                at = round((event.start_s * 1e6 + origin) * 1000)
                # Streams are threads of the device's process in the flows; both numbers agree with those of lanes.
                flow = self._flows.get((event.lane.owner, event.lane.name, at))
                if flow is not None and (flow[1] == "f") == (event.lane.where == "device"):
                    event.correlation = flow[0]
        self._flows.clear()


def _whole(value: Any) -> int:
    try:
        return int(value)
    except (TypeError, ValueError, OverflowError):
        return -1


def _number(value: Any) -> float | None:
    """A finite number; some exporters quote them."""
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
