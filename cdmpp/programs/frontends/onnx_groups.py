"""Groups of ONNX nodes that are launched as one program."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from cdmpp.errors import CdmppError
from cdmpp.programs.frontends.onnx_graph import OnnxGraph, OnnxNode
from cdmpp.programs.frontends.onnx_rules import MALFORMED, Fields, Unsupported, malformed

M = TypeVar("M")


@dataclass(frozen=True)
class Group:
    """Nodes launched as one program, in topological order; the last one writes the result.

    ``absorbed`` nodes run inside the program too, but several programs may read them: the quantisation of a tensor
    that three products read is part of each.
    """

    members: tuple[OnnxNode, ...]
    fields: Fields
    remark: str = ""
    absorbed: tuple[OnnxNode, ...] = ()

    @property
    def label(self) -> str:
        """The operator types of the members, joined."""
        return "+".join(dict.fromkeys(node.label for node in self.members))


def match_at(graph: OnnxGraph, node: OnnxNode, matcher: Callable[[OnnxGraph, OnnxNode], M | None]) -> M | None:
    """The group that a matcher finds at a node; None where there is none, and its nodes are taken one by one.

    Raises
    ------
    InvalidProgramError
        The node is malformed.
    """
    if not node.outputs or graph.is_constant(node.outputs[0]):
        return None
    try:
        return matcher(graph, node)
    except Unsupported:
        return None
    except CdmppError:
        raise
    except MALFORMED as error:
        raise malformed(graph, node, error) from None


def is_closed(graph: OnnxGraph, members: Iterable[OnnxNode]) -> bool:
    """Whether only the last member's result is read outside the group."""
    members = list(members)
    inside = {n.index for n in members}
    for node in members[:-1]:
        for value in node.outputs:
            if value in graph.outputs or any(c.index not in inside for c in graph.consumers(value)):
                return False
    return True
