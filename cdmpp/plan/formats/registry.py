"""All file formats by name: an exporter writes a plan, an importer reads a request.

The fields of an exporter or importer are its options.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from typing import Any, ClassVar, TypeVar

from cdmpp.errors import FieldError
from cdmpp.plan.base.solve import read_request
from cdmpp.plan.registry import PLANNERS, load
from cdmpp.predict.requests.fields import Closed
from cdmpp.predict.requests.request import Answer, Request
from cdmpp.utils.files import MAX_CONFIG_BYTES
from cdmpp.utils.writing import replacing


@dataclass(frozen=True)
class Exported:
    """A plan in the format of another framework."""

    text: str  # content of the file
    notes: tuple[str, ...] = ()  # parts of the plan that the format cannot express, and assumptions; one sentence each


@dataclass(frozen=True)
class Imported:
    """A plan request from the file of another framework."""

    request: dict[str, Any]  # the request as JSON values; fields that the file does not determine are missing
    ignored: tuple[str, ...] = ()  # fields of the file that have no counterpart in the request
    notes: tuple[str, ...] = ()  # assumptions; one sentence each
    missing: tuple[str, ...] = ()  # dotted paths of fields that the planner needs and the file does not have


class PlanExporter(Closed, ABC):
    """Writes plans of some planners; its fields are the options of the format."""

    #: Planners (:data:`cdmpp.plan.registry.PLANNERS`) whose plans it writes.
    kinds: ClassVar[tuple[str, ...]]

    @abstractmethod
    def export(self, request: Request[Any], plan: Answer) -> Exported:
        """The plan in this format.

        Raises FieldError: the format cannot express the plan; ``path`` names the field of the plan or of the request.
        """


class RequestImporter(Closed, ABC):
    """Reads requests of some planners; its fields are the options of the format."""

    #: Planners whose requests it reads.
    kinds: ClassVar[tuple[str, ...]]

    @abstractmethod
    def read(self, text: str, kind: str) -> Imported:
        """The request that a file describes.

        Raises FieldError: the text is not of this format, or has a value that no request can express.
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


def write_export(exported: Exported, path: str | PathLike[str]) -> None:
    """Write an exported plan; the file is replaced atomically.

    Raises DataError: the file cannot be written; a previous file is kept.
    """
    with replacing(path) as aside:
        aside.write_text(exported.text, encoding="utf-8", newline="")


def merge(request: Any, fields: Any, path: str = "") -> Any:
    """A copy of a request with further fields.

    Objects are merged field by field. An object for a list is merged into each of its items. A list of objects for a
    list of the same length is merged item by item. Any other value replaces the value of the request.

    ``path``: dotted path of both, for errors.
    Raises FieldError: two lists of objects have different lengths.
    """
    if isinstance(request, Mapping) and isinstance(fields, Mapping):
        merged = dict(request)
        for name, value in fields.items():
            merged[name] = merge(request[name], value, f"{path}{name}.") if name in request else value
        return merged
    if isinstance(request, list) and isinstance(fields, Mapping):
        return [merge(item, fields, f"{path}{index}.") for index, item in enumerate(request)]
    if _objects(request) and _objects(fields):
        if len(request) != len(fields):
            place = path.removesuffix(".")
            raise FieldError.at(
                place,
                f"{len(fields)} items for the {len(request)} of the file",
                hint="give as many items, or one object for all of them",
            )
        return [merge(item, more, f"{path}{i}.") for i, (item, more) in enumerate(zip(request, fields, strict=True))]
    return fields


def _objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


Model = TypeVar("Model", PlanExporter, RequestImporter)


@dataclass(frozen=True)
class Format:
    """A file format; its module is imported on first use."""

    summary: str  # what the file is for, in one line
    module: str  # module of this package
    # Its exporter and its importer.
    writes: str | None
    reads: str | None

    def exporter(self) -> type[PlanExporter] | None:
        """Class that writes it."""
        return None if self.writes is None else load(f"cdmpp.plan.formats.{self.module}:{self.writes}")

    def importer(self) -> type[RequestImporter] | None:
        """Class that reads it."""
        return None if self.reads is None else load(f"cdmpp.plan.formats.{self.module}:{self.reads}")


#: In the order of docs/exports.md.
FORMATS: dict[str, Format] = {
    "torch-csv": Format(
        "Schedule of torch.distributed.pipelining.", "torch_csv", "TorchCsvExporter", "TorchCsvImporter"
    ),
    "torchtitan": Format(
        "Parallelism and model parts of a torchtitan job (TOML).",
        "torchtitan",
        "TorchtitanExporter",
        "TorchtitanImporter",
    ),
    "megatron-layout": Format("Pipeline layout of Megatron-LM.", "megatron", "MegatronLayoutExporter", None),
    "megatron": Format("Arguments of Megatron-LM.", "megatron", "MegatronExporter", "MegatronImporter"),
    "verl": Format("Pools of a veRL job (YAML).", "rl_jobs", "VerlExporter", "VerlImporter"),
    "openrlhf": Format("Pools of an OpenRLHF job (arguments).", "rl_jobs", "OpenRlhfExporter", "OpenRlhfImporter"),
    "torch-amp": Format("Type of each module of a torch model.", "torch_amp", "TorchAmpExporter", "TorchAmpImporter"),
    "ray": Format("Placement groups of Ray.", "ray_groups", "RayExporter", "RayImporter"),
}


def export_plan(
    format: str, kind: str, request: Mapping[str, Any] | Request[Any], plan: Mapping[str, Any] | Answer, **options: Any
) -> Exported:
    """A plan in the format of another framework.

    Parameters
    ----------
    format : str
        A name of :data:`FORMATS`.
    kind : str
        Planner of the plan: "split", "pipeline", "rl", ...
    request : mapping or Request
        The request of the plan.
    plan : mapping or Answer
        The answer of :func:`cdmpp.make_plan` or of the service.
    **options
        Options of the format (docs/exports.md).

    Raises
    ------
    FieldError
        The format does not have this planner, an option is wrong, or the format cannot express the plan.
    """
    exporter = options_of(exporter_of(format, kind), format, options)
    if isinstance(request, Mapping):
        request = PLANNERS[kind].read(request)
    answer = read_request(request.answer_model(), plan) if isinstance(plan, Mapping) else plan
    return exporter.export(request, answer)


def import_request(
    format: str, text: str, kind: str, *, fields: Mapping[str, Any] | None = None, **options: Any
) -> Imported:
    """A plan request from the file of another framework.

    Parameters
    ----------
    format : str
        A name of :data:`FORMATS`.
    text : str
        Content of the file.
    kind : str
        Planner of the request.
    fields : mapping, optional
        Fields of the request that replace those of the file, or that the file does not have.
    **options
        Options of the format (docs/exports.md).

    Raises
    ------
    FieldError
        The format does not have this planner, an option is wrong, or the file is not of this format.
    """
    importer = options_of(importer_of(format, kind), format, options)
    if len(text) > MAX_CONFIG_BYTES:
        raise FieldError(
            f"the file has {len(text):,} characters, not up to {MAX_CONFIG_BYTES:,}", hint="check the path"
        )
    imported = importer.read(text, kind)
    request = merge(imported.request, fields or {})
    missing = tuple(path for path in imported.missing if at(request, path, imported) is imported)
    return replace(imported, request=request, missing=missing)


def exporter_of(format: str, kind: str) -> type[PlanExporter]:
    """The exporter of a format, for a planner.

    Raises FieldError: the format is not known, or it does not have this planner; the hint lists the formats that do.
    """
    known = {name: cls for name, item in FORMATS.items() if (cls := item.exporter()) is not None}
    return _choose(known, format, kind, "export")


def importer_of(format: str, kind: str) -> type[RequestImporter]:
    """The importer of a format, for a planner; errors as :func:`exporter_of`."""
    known = {name: cls for name, item in FORMATS.items() if (cls := item.importer()) is not None}
    return _choose(known, format, kind, "import")


def _choose(known: Mapping[str, type[Model]], format: str, kind: str, way: str) -> type[Model]:
    if kind not in PLANNERS:
        raise FieldError(f"no plan is called {kind!r}", hint="one of: " + ", ".join(PLANNERS))
    fitting = [name for name, cls in known.items() if kind in cls.kinds]
    hint = f"{kind!r} has: " + (", ".join(fitting) or "no format")
    if format not in known:
        other = "read, not written" if way == "export" else "written, not read"
        what = f"the format {format!r} is {other}" if format in FORMATS else f"no format is called {format!r}"
        raise FieldError(f"{way}: {what}", hint=hint)
    if kind not in known[format].kinds:
        raise FieldError(
            f"{way}: the format {format!r} has no {kind!r} plans, only: " + ", ".join(known[format].kinds), hint=hint
        )
    return known[format]


def options_of(model: type[Model], format: str, values: Mapping[str, Any]) -> Model:
    """An exporter or importer with its options. Raises FieldError: an option is unknown or wrong."""
    known = ", ".join(model.model_fields) or "none"
    unknown = [name for name in values if name not in model.model_fields]
    if unknown:
        raise FieldError(f"{format}: unknown option {unknown[0]!r}", hint=f"options of {format}: {known}")
    try:
        return read_request(model, dict(values))
    except FieldError as error:
        raise FieldError(f"{format}: option {error.message}", hint=f"options of {format}: {known}") from None
