"""Replay of whole models from the latencies of their programs (dPRO): timeline and critical path.

:class:`Graph` and :func:`replay` are the engine. :mod:`cdmpp.simulate.replay.schema` has the request and the plan, with
programs to predict, links, collectives, what-ifs and intervals (docs/replay.md).
"""

from cdmpp.simulate.replay.engine import Replayer, StreamUse, Timeline, replay
from cdmpp.simulate.replay.graph import Graph, Node
from cdmpp.simulate.replay.links import COLLECTIVES, Link, collective_s

__all__ = ["COLLECTIVES", "Graph", "Link", "Node", "Replayer", "StreamUse", "Timeline", "collective_s", "replay"]
