"""Result type of every front end: the distinct programs of a model and the data flow between them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from cdmpp.programs.program import TensorProgram


class NoRuleError(Exception):
    """A node or call launches a kernel that no operator describes; the message gives the reason."""


@dataclass(frozen=True)
class GraphNode:
    """One node of the source graph."""

    id: str  # unique within the graph; the node's own name where it has one
    operator: str  # the source's operator type, e.g. ``"MatMul"`` (``"MatMul+Add"`` for nodes launched as one)
    program: int | None  # index into :attr:`ProgramGraph.programs`; None for a node that launches nothing of its own
    # Why there is no program (``"free: ..."``, ``"constant: ..."``, ``"fused into ..."``, ``"unsupported: ..."``), or a
    # remark on the program; empty otherwise.
    reason: str = ""


@dataclass(frozen=True)
class Unsupported:
    """An operator type that has no program, with the number of nodes it stands for."""

    operator: str
    count: int
    reason: str


@dataclass(frozen=True)
class ProgramGraph:
    """The programs of a model, with multiplicity and dataflow."""

    programs: tuple[TensorProgram, ...]  # distinct by hash, in the order of their first occurrence
    counts: tuple[int, ...]  # how often each program runs; same length as ``programs``
    # Every node of the source graph in topological order, whether it launches a program or not.
    nodes: tuple[GraphNode, ...] = ()
    # Node ids ``(source, destination)``: the destination's program reads what the source's wrote. Nodes without a
    # program are passed through, so edges join nodes with programs only.
    edges: tuple[tuple[str, str], ...] = ()
    # What could not be turned into a program. Nothing is left out of both this and ``nodes``.
    unsupported: tuple[Unsupported, ...] = ()
    source: str = ""  # what the graph was read from, for messages
    # For a search: the programs of each task, of which one runs. Empty for a model, whose programs all run.
    alternatives: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    @property
    def launches(self) -> int:
        """Number of program runs in one pass of the model; of a search: number of its records."""
        return sum(self.counts)

    @classmethod
    def of(cls, programs: Iterable[TensorProgram], source: str = "") -> ProgramGraph:
        """A graph without edges: a list of independent programs, equal ones counted together."""
        builder = GraphBuilder(source)
        used: dict[str, int] = {}
        for program in programs:
            occurrence = used[program.name] = used.get(program.name, 0) + 1
            name = program.name if occurrence == 1 else f"{program.name}_{occurrence}"
            builder.launch(name, program.name, program, reads=(), writes=())
        return builder.build()


@dataclass
class GraphBuilder:
    """Collects nodes in topological order and derives programs, counts and edges.

    Values are named by strings. A node that launches a program becomes the origin of the values it
    writes; any other node hands the origins of what it reads on to what it writes.
    """

    source: str = ""
    _programs: list[TensorProgram] = field(default_factory=list)
    _counts: list[int] = field(default_factory=list)
    _index: dict[str, int] = field(default_factory=dict)
    _nodes: list[GraphNode] = field(default_factory=list)
    _edges: dict[tuple[str, str], None] = field(default_factory=dict)
    _origins: dict[str, tuple[str, ...]] = field(default_factory=dict)
    _unsupported: dict[tuple[str, str], int] = field(default_factory=dict)

    def launch(
        self,
        node: str,
        operator: str,
        program: TensorProgram,
        *,
        reads: Sequence[str],
        writes: Sequence[str],
        remark: str = "",
    ) -> int:
        """Add a node that runs ``program``; return the index of the program."""
        key = f"{program.backend}:{program.hash}"
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self._programs)
            self._programs.append(program)
            self._counts.append(0)
        self._counts[index] += 1
        self._nodes.append(GraphNode(node, operator, index, remark))
        for origin in self._sources(reads):
            self._edges[(origin, node)] = None
        for value in writes:
            self._origins[value] = (node,)
        return index

    def skip(self, node: str, operator: str, reason: str, *, reads: Sequence[str], writes: Sequence[str]) -> None:
        """Add a node that launches nothing."""
        self._nodes.append(GraphNode(node, operator, None, reason))
        origins = self._sources(reads)
        for value in writes:
            self._origins[value] = origins

    def unsupported(
        self, node: str, operator: str, reason: str, *, reads: Sequence[str], writes: Sequence[str]
    ) -> None:
        """Add a node that ought to launch something, but has no program here."""
        self._unsupported[(operator, reason)] = self._unsupported.get((operator, reason), 0) + 1
        self.skip(node, operator, f"unsupported: {reason}", reads=reads, writes=writes)

    def fused(self, node: str, operator: str, into: str) -> None:
        """Add a node whose work is part of another node's program."""
        self._nodes.append(GraphNode(node, operator, None, f"fused into {into}"))

    def build(self, alternatives: Mapping[str, Iterable[int]] | None = None) -> ProgramGraph:
        """The finished graph, with the program indices of each task if it is a search."""
        return ProgramGraph(
            programs=tuple(self._programs),
            counts=tuple(self._counts),
            nodes=tuple(self._nodes),
            edges=tuple(self._edges),
            unsupported=tuple(Unsupported(op, n, why) for (op, why), n in self._unsupported.items()),
            source=self.source,
            alternatives={task: tuple(dict.fromkeys(programs)) for task, programs in (alternatives or {}).items()},
        )

    def _sources(self, reads: Sequence[str]) -> tuple[str, ...]:
        if len(reads) == 1:
            return self._origins.get(reads[0], ())
        return tuple(dict.fromkeys(o for value in reads for o in self._origins.get(value, ())))
