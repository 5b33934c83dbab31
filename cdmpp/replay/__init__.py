"""Replay of whole models from the latencies of their programs (dPRO): timeline and critical path.

:class:`Graph` and :func:`replay` are the engine. :mod:`cdmpp.replay.schema` has the request and the plan, with
programs to predict, links, collectives, what-ifs and intervals (docs/replay.md).
"""

from cdmpp.replay.engine import Replayer, replay
from cdmpp.replay.graph import Graph, Node
from cdmpp.replay.links import COLLECTIVES, Link, collective_s
from cdmpp.replay.timeline import StreamUse, Timeline

__all__ = ["COLLECTIVES", "Graph", "Link", "Node", "Replayer", "StreamUse", "Timeline", "collective_s", "replay"]
