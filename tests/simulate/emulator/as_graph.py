"""Steps simulated without a cache, and as graphs for the replay engine."""

from cdmpp.simulate.emulator import Emulator
from cdmpp.simulate.emulator.stages import Floats
from cdmpp.simulate.emulator.structure import Structure
from cdmpp.simulate.replay.graph import Graph, Node

simulate = Emulator(reuse=False).simulate
#: The device that all transfers are on: they do not wait for each other.
LINKS = "links"


def to_graph(structure: Structure, duration_s: Floats, lag_s: Floats) -> Graph:
    """The passes of a step as nodes.

    ``duration_s``, ``lag_s``: as :func:`cdmpp.simulate.emulator.emulate.durations` gives them.
    Returns ranks are devices ("rank0", with the stream "host" for copies) that run what they have in its order. A pass
    is called "F3.5": forward, stage 3, micro-batch 5. Transfers are nodes of their own.
    """
    nodes, transfers = [], []
    for row in range(len(structure.begin) - 1):
        rank, stream = row % structure.ranks, "0" if row < structure.ranks else "host"
        for task in structure.order[structure.begin[row] : structure.begin[row + 1]].tolist():
            deps = []
            for before, lag in zip(structure.deps[task].tolist(), lag_s[task].tolist(), strict=True):
                if before < 0:
                    continue
                if lag == 0.0:
                    deps.append(_id(structure, before))
                    continue
                deps.append(f"{_id(structure, before)}>{_id(structure, task)}")
                transfers.append(Node(deps[-1], LINKS, lag, (_id(structure, before),), kind="comm"))
            nodes.append(Node(_id(structure, task), f"rank{rank}", float(duration_s[task]), tuple(deps), stream))
    return Graph(nodes + transfers, frozenset({LINKS}), "listed")


def _id(structure: Structure, task: int) -> str:
    kind, stage, micro_batch = structure.name(task)
    return f"{kind}{stage}.{micro_batch}"
