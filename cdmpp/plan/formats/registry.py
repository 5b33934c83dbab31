"""All file formats by name, as the command line offers them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from cdmpp.errors import FieldError
from cdmpp.plan.base.solve import read_request
from cdmpp.plan.formats.formats import Exported, Exporter, Imported, Importer, at
from cdmpp.plan.formats.merging import merge
from cdmpp.plan.registry import PLANNERS, load
from cdmpp.predict.requests.request import Answer, Request

Model = TypeVar("Model", Exporter, Importer)


@dataclass(frozen=True)
class Format:
    """A file format; its modules are imported on first use.

    Attributes
    ----------
    name : str
    summary : str
        What the file is for, in one line.
    writes, reads : str or None
        Exporter and importer as ``module:Class`` of this package.
    """

    name: str
    summary: str
    writes: str | None
    reads: str | None

    def exporter(self) -> type[Exporter] | None:
        """Class that writes it."""
        return None if self.writes is None else load(f"cdmpp.plan.formats.{self.writes}")

    def importer(self) -> type[Importer] | None:
        """Class that reads it."""
        return None if self.reads is None else load(f"cdmpp.plan.formats.{self.reads}")


#: In the order of docs/exports.md.
_ALL: tuple[Format, ...] = (
    Format(
        "torch-csv",
        "Schedule of torch.distributed.pipelining.",
        "torch_csv:TorchCsvExporter",
        "torch_csv_import:TorchCsvImporter",
    ),
    Format(
        "torchtitan",
        "Parallelism and model parts of a torchtitan job (TOML).",
        "torchtitan:TorchtitanExporter",
        "torchtitan_import:TorchtitanImporter",
    ),
    Format("megatron-layout", "Pipeline layout of Megatron-LM.", "megatron_layout:MegatronLayoutExporter", None),
    Format("megatron", "Arguments of Megatron-LM.", None, "megatron_import:MegatronImporter"),
    Format("verl", "Pools of a veRL job (YAML).", "verl:VerlExporter", "verl:VerlImporter"),
    Format(
        "openrlhf", "Pools of an OpenRLHF job (arguments).", "openrlhf:OpenRlhfExporter", "openrlhf:OpenRlhfImporter"
    ),
    Format(
        "torch-amp", "Type of each module of a torch model.", "torch_amp:TorchAmpExporter", "torch_amp:TorchAmpImporter"
    ),
    Format("ray", "Placement groups of Ray.", "ray_groups:RayExporter", "ray_groups:RayImporter"),
)

FORMATS: dict[str, Format] = {item.name: item for item in _ALL}


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
    found = importer.read(text, kind)
    request = merge(found.request, fields or {})
    missing = tuple(path for path in found.missing if at(request, path, found) is found)
    return replace(found, request=request, missing=missing)


def exporter_of(format: str, kind: str) -> type[Exporter]:
    """The exporter of a format, for a planner.

    Raises
    ------
    FieldError
        The format is not known, or it does not have this planner; the hint lists the formats that do.
    """
    known = {name: cls for name, item in FORMATS.items() if (cls := item.exporter()) is not None}
    return _choose(known, format, kind, "export")


def importer_of(format: str, kind: str) -> type[Importer]:
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
    """An exporter or importer with its options.

    Raises
    ------
    FieldError
        An option is unknown or wrong.
    """
    known = ", ".join(model.model_fields) or "none"
    unknown = [name for name in values if name not in model.model_fields]
    if unknown:
        raise FieldError(f"{format}: unknown option {unknown[0]!r}", hint=f"options of {format}: {known}")
    try:
        return read_request(model, dict(values))
    except FieldError as error:
        raise FieldError(f"{format}: option {error.message}", hint=f"options of {format}: {known}") from None
