"""Profiler traces: read, replayed, and changed by what-ifs (docs/traces.md)."""

from cdmpp.simulate.traces.analysis import KernelRow, PathPart, RankIdle
from cdmpp.simulate.traces.load import is_trace, read_ranks, read_trace
from cdmpp.simulate.traces.nodes import TraceGraph, WorkNode
from cdmpp.simulate.traces.records import RankTrace, TraceEvent
from cdmpp.simulate.traces.replay import TraceReplay, replay_trace
from cdmpp.simulate.traces.search import SearchTrial, TraceSearch
from cdmpp.simulate.traces.what_if import Changes, WhatIfAnswer

__all__ = [
    "Changes",
    "KernelRow",
    "PathPart",
    "RankIdle",
    "RankTrace",
    "SearchTrial",
    "TraceEvent",
    "TraceGraph",
    "TraceReplay",
    "TraceSearch",
    "WhatIfAnswer",
    "WorkNode",
    "is_trace",
    "read_ranks",
    "read_trace",
    "replay_trace",
]
