"""Chrome traces of ``torch.profiler`` (Kineto), of its older forms too, as records.

They are read one event at a time: a file of any size needs the memory of its longest event.
"""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

from cdmpp.errors import DataError
from cdmpp.simulate.traces.records import (
    Arguments,
    CollectiveCall,
    EventKind,
    RankTrace,
    Sync,
    TraceEvent,
    TraceLane,
    is_host_work,
    recorded_call,
    shaped_call,
)
from cdmpp.utils.files import open_file, open_gzip, parse_number

_CHUNK = 1 << 20
_MOST_LEFT_OUT = 6
_PHASES = {"i": "instants", "C": "counters"}
#: Text of one event, or of one field beside the events, in characters.
_MOST_TEXT = 64 << 20
_GZIP = b"\x1f\x8b"
_BLANKS = re.compile(r"[\s\ufeff]*")
#: Kineto writes numbers and names that are not quite JSON (control characters, inf).
_DECODER = json.JSONDecoder(strict=False)
_NOT_FINITE = re.compile(r"-?(inf|nan)\b", re.IGNORECASE)
#: Strings, of which the last may be cut, and such numbers outside of them.
_VALUES = re.compile(r'"(?:[^"\\]|\\.)*(?:"|$)|-?\b(?:inf|nan)\b', re.IGNORECASE | re.DOTALL)
_HINT = "write it again with prof.export_chrome_trace(), and copy the whole file"


def _finite_or_json(match: re.Match[str]) -> str:
    text = match[0]
    return text if text[0] == '"' else "NaN" if text[-3:].lower() == "nan" else text[:-3] + "Infinity"


def opened(path: Path) -> IO[bytes]:
    """The bytes of a file, decompressed where it is gzip. Raises DataError: the file cannot be read."""
    try:
        with open_file(path) as file:
            head = file.read(2)
        return open_gzip(path) if head == _GZIP else path.open("rb")
    except OSError as error:
        raise DataError(f"{path}: cannot be read: {error.strerror or error}", hint="give the path of a trace") from None


def read_chrome(path: Path, header: Callable[[str, Any], None]) -> Iterator[dict[str, Any]]:
    """Yield the events of a Chrome trace: an object with ``traceEvents``, or a bare list.

    ``header``: called with the name and value of each field beside the events, where it stands in the file.
    Raises DataError: the file ends before its JSON does, is not JSON, or has no list of events.
    """
    with opened(path) as file:
        text = _Text(path, TextIOWrapper(file, encoding="utf-8", errors="replace"))
        first = text.peek()
        if first == "[":
            yield from _elements(text)
        elif first == "{":
            yield from _of_object(text, header)
        else:
            raise DataError(f"{path}: not a trace: it begins with {first!r}", hint="a Chrome trace is JSON")
        # What follows the events is of no interest.


def _of_object(text: _Text, header: Callable[[str, Any], None]) -> Iterator[dict[str, Any]]:
    text.skip("{")
    has_events = False
    while text.peek() != "}":
        name = text.value()
        text.skip(":")
        if name == "traceEvents":
            if text.peek() != "[":
                raise DataError(f"{text.path}: traceEvents is not a list", hint=_HINT)
            has_events = True
            yield from _elements(text)
        else:
            value = text.value()
            head = str(value[:1] if isinstance(value, list) else value)
            if (name, "chakra" in head) == ("schema", True) or (name, "ctrl_deps" in head) == ("nodes", True):
                raise DataError(
                    f"{text.path}: an execution trace of Chakra or PyTorch, not a trace of a profiler: it has no times",
                    hint="record a Kineto trace of the same run: prof.export_chrome_trace(path)",
                )
            header(str(name), value)
        if text.peek() == ",":
            text.skip(",")
    if not has_events:
        raise DataError(
            f"{text.path}: JSON without traceEvents: not a profiler trace",
            hint="give a Chrome trace of torch.profiler, or a replay request (docs/replay.md)",
        )


def _elements(text: _Text) -> Iterator[dict[str, Any]]:
    text.skip("[")
    number = 0
    while (character := text.peek()) != "]":
        if character == ",":
            text.skip(",")
            continue
        value = text.value(f"event {number:,}")
        number += 1
        if not isinstance(value, dict):
            raise DataError(f"{text.path}: event {number - 1:,} is {str(value)[:40]!r}, not an object", hint=_HINT)
        yield value
    text.skip("]")


class _Text:
    """A window on the text of a file, from which JSON values are taken."""

    def __init__(self, path: Path, file: TextIOWrapper) -> None:
        self.path, self._file = path, file
        self._buffer, self._at, self._done = "", 0, 0
        self._ended = False

    def peek(self, wanted: str = "the next value") -> str:
        """The next character that is no space."""
        blanks = 0
        while True:
            end = _BLANKS.match(self._buffer, self._at).end()  # type: ignore[union-attr]  # it matches ""
            blanks += end - self._at
            self._at = end
            if end < len(self._buffer):
                return self._buffer[end]
            if blanks > _MOST_TEXT:
                raise DataError(f"{self.path}: not a trace: {blanks:,} blanks in a row", hint=_HINT)
            if not self._more():
                raise self._truncated(wanted)

    def skip(self, character: str) -> None:
        """Pass a character. Raises DataError: another one stands there."""
        if (there := self.peek(f"a {character!r}")) != character:
            raise DataError(
                f"{self.path}: not JSON: {there!r} at character {self._done + self._at:,}, expected {character!r}",
                hint=_HINT,
            )
        self._at += 1

    def value(self, wanted: str = "a value") -> Any:
        """The next JSON value."""
        self.peek(wanted)
        while True:
            try:
                value, end = _DECODER.raw_decode(self._buffer, self._at)
                if end < len(self._buffer) or self._ended:
                    self._at = end
                    return value
            except json.JSONDecodeError as error:
                if _NOT_FINITE.match(self._buffer, error.pos):
                    self._buffer = _VALUES.sub(_finite_or_json, self._buffer[self._at :])
                    self._done, self._at = self._done + self._at, 0
                    continue
                cut = error.msg.startswith("Unterminated string") or error.pos >= len(self._buffer) - 12
                if not cut or len(self._buffer) - self._at > _MOST_TEXT:
                    raise DataError(
                        f"{self.path}: not JSON: {error.msg} at character {self._done + error.pos:,}", hint=_HINT
                    ) from None
                if self._ended:
                    raise self._truncated(wanted) from None
            except (ValueError, RecursionError) as error:  # a number with too many digits, or too many levels
                raise DataError(f"{self.path}: not a trace: {error}", hint=_HINT) from None
            self._more()

    def _more(self) -> bool:
        """Read on; False at the end of the file."""
        if self._ended:
            return False
        try:
            # At least as much again as is left, so that a long event is not decoded many times.
            read = self._file.read(max(_CHUNK, len(self._buffer) - self._at))
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{self.path}: the gzip file is cut or damaged: {error}", hint=_HINT) from None
        except OSError as error:
            raise DataError(f"{self.path}: cannot be read: {error.strerror or error}", hint=_HINT) from None
        self._ended = not read
        self._done += self._at
        self._buffer = self._buffer[self._at :] + read
        self._at = 0
        return bool(read)

    def _truncated(self, wanted: str) -> DataError:
        size = self._done + len(self._buffer)
        if not size:
            return DataError(f"{self.path}: the file is empty", hint=_HINT)
        return DataError(
            f"{self.path}: the file is cut: it ends after {size:,} characters, where {wanted} is not complete",
            hint=_HINT,
        )


#: Category, in lower case, -> kind. Up to torch 1.12 the categories were "Operator", "Kernel", "Runtime", ...
_KINDS: dict[str, EventKind] = {
    **dict.fromkeys(("cpu_op", "operator"), "op"),
    "user_annotation": "annotation",
    "kernel": "kernel",
    **dict.fromkeys(("gpu_memcpy", "gpu_memset", "memcpy", "memset"), "copy"),
    "cuda_sync": "sync",
}
_SYNCS = {
    **dict.fromkeys(("stream sync", "stream synchronize"), "stream"),
    **dict.fromkeys(("context sync", "context synchronize", "device sync"), "device"),
    **dict.fromkeys(("event sync", "event synchronize"), "event"),
    "stream wait event": "stream_wait",
}
_SHAPES = "Input Dims", "Input dims"


def read_torch(path: str | Path) -> RankTrace:
    """Read a Chrome trace of ``torch.profiler``; gzip is recognised by its content.

    Raises DataError: the file is cut, not JSON, or has no events of torch.
    """
    reader = _EventReader(Path(path))
    for event in read_chrome(reader.path, reader.header):
        reader.add(event)
    return reader.finish()


class _EventReader:
    """Events of one file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.trace = RankTrace(str(path), "torch")
        self._origin_us: float | None = None
        self._base_s = 0.0
        self._lanes: dict[tuple[str, str, str], TraceLane] = {}
        self._kept: dict[Any, Any] = {}
        self._categories: Counter[str] = Counter()
        self._open: dict[TraceLane, list[TraceEvent]] = {}
        self._flows: dict[tuple[str, str, int], tuple[int, str]] = {}
        self._instants: Counter[str] = Counter()
        self._left_out: Counter[str] = Counter()
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
            self._left_out[str(event.get("cat") or _PHASES.get(str(phase), f"phase {phase}"))] += 1
            return
        at = _number(event.get("ts"))
        if at is None:
            self._instants["time"] += 1
            return
        kind, values = self._kind(event), event.get("args")
        values = values if isinstance(values, dict) else {}
        if kind is None and phase != "E":
            named = str(event.get("name", ""))[:40]
            self._left_out[str(event.get("cat") or f"without a category: {named}")] += 1
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
            self._instants[f"({kind}) without a duration"] += 1
        elif length is not None and length < 0:
            self._instants[f"({kind}) with a negative duration"] += 1
        name = self._once(str(event.get("name", "")))
        lane = self._lane(kind, event, values)
        duration_s = max(length or 0.0, 0.0) * 1e-6
        made = TraceEvent(kind, name, lane, start_s, duration_s)
        made.correlation = _whole(values.get("correlation", values.get("Correlation ID")))
        made.detail = self._detail(kind, name, lane, values)
        self._correlated |= kind == "kernel" and made.correlation >= 0
        if phase == "B":
            self._open.setdefault(lane, []).append(made)
        self.trace.events.append(made)

    def finish(self) -> RankTrace:
        """The records. Raises DataError: no event is one of torch."""
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
        for kind, count in sorted((+self._instants).items()):
            if kind == "time":
                trace.remarks.append(f"events without a time, which are left out: {count:,}")
            else:
                trace.remarks.append(f"events {kind}, which count as 0 s: {count:,}")
        if self._left_out:
            listed = [f"{name} ({count:,} x)" for name, count in self._left_out.most_common(_MOST_LEFT_OUT)]
            more = ["others"] if len(self._left_out) > _MOST_LEFT_OUT else []
            total = self._left_out.total()
            trace.remarks.append(f"events left out, of kinds that are not read: {total:,}: {', '.join(listed + more)}")
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
        if "Task Type" in (event.get("args") or {}):  # Ascend's profiler
            return "kernel"
        # Before Kineto (torch 1.8) events had no category, and named processes.
        process = str(event.get("pid", ""))
        if process == "CUDA functions":
            return "copy" if str(event.get("name", "")).startswith(("Memcpy", "Memset")) else "kernel"
        return "op" if process == "CPU functions" or str(event.get("name", "")).startswith("aten::") else None

    def _lane(self, kind: EventKind, event: dict[str, Any], values: dict[str, Any]) -> TraceLane:
        on_device = kind in ("kernel", "copy", "sync")
        owner, name = event.get("pid", 0), event.get("tid", 0)
        if on_device:
            owner, name = values.get("device", owner), values.get("stream", values.get("Stream Id", name))
        key = ("device" if on_device else "host", str(owner), str(name))
        if key not in self._lanes:
            self._lanes[key] = TraceLane(key[0], key[1], key[2])  # type: ignore[arg-type]
        return self._lanes[key]

    def _detail(
        self, kind: EventKind, name: str, lane: TraceLane, values: dict[str, Any]
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
            lane = TraceLane("host", str(event.get("pid", "")), str(event.get("tid", "")))
            self.trace.threads[lane] = str(values.get("name", ""))

    def _close(self, event: dict[str, Any], at_s: float) -> None:
        lane = TraceLane("host", str(event.get("pid", 0)), str(event.get("tid", 0)))
        if self._open.get(lane):
            begun = self._open[lane].pop()
            self._instants[f"({begun.kind}) with a negative duration"] += at_s < begun.start_s
            begun.duration_s = max(at_s - begun.start_s, 0.0)

    def _flow(self, event: dict[str, Any]) -> None:
        """Arrows from launches to kernels, for traces whose events have no correlation id."""
        if self._correlated or str(event.get("cat", "")).casefold() in ("fwdbwd", "forward_backward"):
            return
        at, number = _number(event.get("ts")), _whole(event.get("id"))
        if at is not None and number >= 0:
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
    """A number below 10^18, which are 30,000 years in microseconds; some exporters quote numbers."""
    try:
        number = parse_number(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1e18 else None


def _tuple(value: Any) -> Any:
    return tuple(map(_tuple, value)) if isinstance(value, list) else value
