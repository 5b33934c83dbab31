"""Base classes of file formats: an exporter writes a plan, an importer reads a request.

The fields of an exporter or importer are its options.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from cdmpp.predict.requests.fields import Closed
from cdmpp.predict.requests.request import Answer, Request


@dataclass(frozen=True)
class Exported:
    """A plan in the format of another framework.

    Attributes
    ----------
    text : str
        Content of the file.
    notes : tuple of str
        Parts of the plan that the format cannot express, and assumptions; one sentence each.
    """

    text: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Imported:
    """A plan request from the file of another framework.

    Attributes
    ----------
    request : dict
        The request as JSON values. Fields that the file does not determine are missing.
    ignored : tuple of str
        Fields of the file that have no counterpart in the request.
    notes : tuple of str
        Assumptions; one sentence each.
    missing : tuple of str
        Dotted paths of fields that the planner needs and the file does not have.
    """

    request: dict[str, Any]
    ignored: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()


class Exporter(Closed, ABC):
    """Writes plans of some planners; its fields are the options of the format."""

    #: Planners (:data:`cdmpp.plan.registry.PLANNERS`) whose plans it writes.
    kinds: ClassVar[tuple[str, ...]]

    @abstractmethod
    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """The plan in this format.

        Raises
        ------
        FieldError
            The format cannot express the plan; ``path`` names the field of the plan or of the request.
        """


class Importer(Closed, ABC):
    """Reads requests of some planners; its fields are the options of the format."""

    #: Planners whose requests it reads.
    kinds: ClassVar[tuple[str, ...]]

    @abstractmethod
    def read(self, text: str, kind: str) -> Imported:
        """The request that a file describes.

        Raises
        ------
        FieldError
            The text is not of this format, or has a value that no request can express.
        """


def at(tree: Any, path: str, default: Any = None) -> Any:
    """The value at a dotted path of nested mappings, or the default; a number is an index of a list."""
    for name in path.split("."):
        if isinstance(tree, list) and name.isdecimal() and int(name) < len(tree):
            tree = tree[int(name)]
        elif isinstance(tree, Mapping) and name in tree:
            tree = tree[name]
        else:
            return default
    return tree


def leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Values of nested mappings by their dotted path; an empty mapping is a value."""
    values: dict[str, Any] = {}
    for name, value in tree.items():
        path = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            values |= leaves(value, f"{path}.")
        else:
            values[path] = value
    return values


def put(tree: dict[str, Any], path: str, value: Any) -> None:
    """Set the value at a dotted path of nested dictionaries."""
    *parents, last = path.split(".")
    for name in parents:
        tree = tree.setdefault(name, {})
    tree[last] = value
