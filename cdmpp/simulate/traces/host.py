"""Threads of a trace as segments: nested events flattened into consecutive pieces."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from cdmpp.simulate.traces.collectives import is_host_work, issues_work
from cdmpp.simulate.traces.records import TraceEvent
from cdmpp.simulate.traces.shapes import computes, is_free

#: "op": an operator that computes on the host; "host": other work of the host; "launch": a call that starts work on a
#: device; "sync": a call that waits for a device; "work": a collective on a thread of its library.
SegmentRole = Literal["op", "host", "launch", "sync", "work"]
_RUNTIME = r"(cuda|cu|hip)"
_LAUNCH = re.compile(rf"{_RUNTIME}(Launch|ModuleLaunch|ExtModuleLaunch|ExtLaunch|GraphLaunch|Memcpy|Memset)")
_SYNC = re.compile(rf"{_RUNTIME}(Stream|Device|Event|Ctx)Synchronize")
_WAITS = re.compile(r"wait_tensor|::wait\b|barrier", re.IGNORECASE)


@dataclass(slots=True)
class Segment:
    """A piece of a thread's time.

    Attributes
    ----------
    start_s, end_s : float
        From the origin of the trace.
    role : SegmentRole
    names : tuple of str
        Names of the events that enclose it and of its own, outermost first.
    ranges : int
        How many of the names, from the first on, are annotations.
    event : TraceEvent or None
        Its own event; of an operator the one that computes.
    operation : TraceEvent or None
        The innermost operator with a known computation around a launch.
    waits : bool
        Its operator's purpose is to wait.
    """

    start_s: float
    end_s: float
    role: SegmentRole
    names: tuple[str, ...]
    ranges: int
    event: TraceEvent | None = None
    operation: TraceEvent | None = None
    waits: bool = False


@dataclass(slots=True)
class _Tree:
    event: TraceEvent
    end_s: float
    children: list[_Tree] = field(default_factory=list)
    anchored: bool = False  # launches, synchronises, or hands work to a library, itself or inside
    computing: list[TraceEvent] = field(default_factory=list)


def is_sync(name: str) -> bool:
    """Whether a runtime call waits for a device."""
    return bool(_SYNC.match(name))


def is_launch(name: str) -> bool:
    """Whether a runtime call starts work on a device."""
    return bool(_LAUNCH.match(name))


def segments(events: Iterable[TraceEvent], on_device: bool) -> list[Segment]:
    """Segments of one thread, in time order; time between them is in no event but annotations.

    An operator is one segment where nothing inside it matters alone: at most one operator that computes, and no launch,
    synchronisation or collective. Others are divided at their children.

    Parameters
    ----------
    events : iterable of TraceEvent
        Of one thread, in any order.
    on_device : bool
        The process works on a device: operators of the host only prepare its work.
    """
    roots: list[_Tree] = []
    stack: list[_Tree] = []
    for event in sorted(events, key=lambda event: (event.start_s, -event.duration_s)):
        while stack and event.start_s >= stack[-1].end_s:
            _close(stack)
        # Clocks are rounded: a child may seem to end after its parent.
        end_s = min(event.end_s, stack[-1].end_s) if stack else event.end_s
        tree = _Tree(event, max(end_s, event.start_s))
        tree.anchored = event.kind == "runtime" or is_host_work(event.name) or issues_work(event.name)
        (stack[-1].children if stack else roots).append(tree)
        stack.append(tree)
    while stack:
        _close(stack)
    found: list[Segment] = []
    for root in roots:
        _emit(root, (), 0, None, on_device, found)
    return found


def _close(stack: list[_Tree]) -> None:
    tree = stack.pop()
    if tree.event.kind == "op" and computes(tree.event):
        tree.computing = [tree.event]
    if stack:
        stack[-1].anchored |= tree.anchored
        stack[-1].computing += tree.computing


def _emit(
    tree: _Tree, names: tuple[str, ...], ranges: int, operation: TraceEvent | None, on_device: bool, out: list[Segment]
) -> None:
    event = tree.event
    outer, names = names, (*names, event.name)
    if is_host_work(event.name):
        out.append(Segment(event.start_s, tree.end_s, "work", names, ranges, event))
        return
    if event.kind == "annotation":
        for child in tree.children:
            _emit(child, names, ranges + (ranges == len(outer)), operation, on_device, out)
        return
    if event.kind == "runtime":
        role: SegmentRole = "sync" if is_sync(event.name) else "launch" if event.correlation >= 0 else "host"
        out.append(Segment(event.start_s, tree.end_s, role, names, ranges, event, operation))
        return
    waits = bool(_WAITS.search(event.name))
    plain = not tree.anchored or (issues_work(event.name) and not any(child.anchored for child in tree.children))
    if plain and len(tree.computing) < 2:
        inner = tree.computing[0] if tree.computing else event
        if inner is not event:
            names = (*names, inner.name)
        prepares = waits or issues_work(event.name) or (not tree.computing and is_free(event))
        role = "host" if on_device or prepares else "op"
        out.append(Segment(event.start_s, tree.end_s, role, names, ranges, inner, waits=waits))
        return
    if computes(event):
        operation = event
    at_s = event.start_s
    for child in tree.children:
        if child.event.start_s > at_s:
            out.append(Segment(at_s, child.event.start_s, "host", names, ranges, waits=waits))
        _emit(child, names, ranges, operation, on_device, out)
        at_s = max(at_s, child.end_s)
    if tree.end_s > at_s:
        out.append(Segment(at_s, tree.end_s, "host", names, ranges, waits=waits))
