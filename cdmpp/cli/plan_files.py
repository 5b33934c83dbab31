"""Files of other frameworks in ``cdmpp plan``: ``--export`` writes a plan, ``--from`` reads a request."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cdmpp.cli.options import RayOption, option
from cdmpp.cli.output import JsonOption, ModelOption
from cdmpp.cli.reading import read_json, read_text
from cdmpp.errors import DataError, FieldError
from cdmpp.utils.files import parse_json
from cdmpp.utils.writing import check_output

if TYPE_CHECKING:
    from cdmpp.plan.formats import Exported

FigureOption = Annotated[Path | None, typer.Option("--figure", metavar="PNG", help="Draw the plan (extra `plan`).")]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="Predict with the service at this address, not with a local model.")
]


@dataclass(frozen=True)
class PlanOptions:
    """Options of every planner's command."""

    json: JsonOption = False
    figure: FigureOption = None
    model: ModelOption = None
    url: UrlOption = None
    remote: bool = option(False, "With --url: the service also searches, as a job; Ctrl-C cancels it.", "--remote")
    ray: RayOption = None
    seeds: int | None = option(None, "With --ray: seeds to search from; default: one per core.", min=1)
    export: str | None = option(None, "Write the plan for a framework (docs/exports.md).", metavar="FORMAT")
    out: Path | None = option(None, "With --export: the file to write.", metavar="FILE")
    read: str | None = option(
        None, "FILE is the configuration of a framework (docs/exports.md).", "--from", metavar="FORMAT"
    )
    fields: Path | None = option(None, "With --from: further fields of the request.", "--with", metavar="FIELDS.json")
    settings: list[str] | None = option(None, "Option of the format; repeatable.", "--set", metavar="NAME=VALUE")
    print_request: bool = option(False, "Print the request as JSON, and end.", "--print-request")
    ignore_memory: bool = option(
        False, "Plan as if the devices had unlimited memory.", "--ignore-memory", show_default=False
    )
    executable: bool = option(
        False, "pipeline: only plans that torch.distributed.pipelining runs.", "--executable", show_default=False
    )


class PlanFiles:
    """The file formats of a command, checked before the search starts; ``kind`` is the planner.

    Raises DataError or FieldError: options contradict each other, or a format or its option is wrong.
    """

    def __init__(self, kind: str, options: PlanOptions) -> None:
        self.kind, self.export, self.out = kind, options.export, options.out
        self.read, self.fields, self.settings = options.read, options.fields, _settings(options.settings or ())
        if (self.export is None) != (self.out is None):
            raise DataError("--export and --out belong together", hint="give both, or none")
        if self.fields is not None and self.read is None:
            raise DataError("--with needs --from", hint="a request in JSON has all its fields")
        if self.settings and self.export is None and self.read is None:
            raise DataError("--set needs --export or --from", hint="options of a format are listed in docs/exports.md")
        if self.out is not None:
            check_output(self.out)
        self._check()

    def _check(self) -> None:
        """Raise FieldError where a format does not have the planner, or no format has an option."""
        if self.export is None and self.read is None:
            return
        from cdmpp.plan.formats.registry import exporter_of, importer_of, options_of

        known: set[str] = set()
        if self.read is not None:
            known |= set(importer_of(self.read, self.kind).model_fields)
        if self.export is not None:
            exporter = exporter_of(self.export, self.kind)
            known |= set(exporter.model_fields)
            options_of(exporter, self.export, self._settings_of(exporter.model_fields))
        unknown = [name for name in self.settings if name not in known]
        if unknown:
            formats = " and ".join(name for name in (self.read, self.export) if name is not None)
            options = ", ".join(sorted(known)) or "none"
            raise FieldError(f"--set: unknown option {unknown[0]!r}", hint=f"options of {formats}: {options}")

    def _settings_of(self, names: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in self.settings.items() if name in names}

    def request(self, file: Path) -> Any:
        """The request of a file as JSON values; what the import ignores and assumes goes to stderr."""
        if self.read is None:
            return read_json(file)
        from cdmpp.plan.formats import import_request
        from cdmpp.plan.formats.registry import importer_of

        options = self._settings_of(importer_of(self.read, self.kind).model_fields)
        fields = None if self.fields is None else read_json(self.fields)
        if fields is not None and not isinstance(fields, dict):
            raise DataError(f"{self.fields}: not a JSON object", hint="give fields of the request by name")
        imported = import_request(self.read, read_text(file), self.kind, fields=fields, **options)
        notes = list(imported.notes)
        if imported.missing:
            notes.append("not in the file: " + ", ".join(imported.missing) + "; --with gives further fields")
        if imported.ignored:
            notes.append("ignored: " + ", ".join(imported.ignored))
        _print_notes(notes)
        return imported.request

    def write(self, request: Any, plan: Any) -> None:
        """Write the plan where that is wanted; what the format cannot express goes to stderr."""
        if self.export is None or self.out is None:
            return
        from cdmpp.plan.formats import export_plan, write_export
        from cdmpp.plan.formats.registry import exporter_of

        options = self._settings_of(exporter_of(self.export, self.kind).model_fields)
        exported: Exported = export_plan(self.export, self.kind, request, plan, **options)
        write_export(exported, self.out)
        _print_notes([f"{self.out}: {self.export}", *exported.notes])


def _settings(texts: Sequence[str]) -> dict[str, Any]:
    """Options by name; whole numbers, lists and objects are JSON, other values are text."""
    values: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name:
            raise DataError(f"--set {text}: not NAME=VALUE", hint="such as --set tp=4")
        if not re.fullmatch(r"-?\d+|[\[{].*", value, re.DOTALL):
            values[name] = value
            continue
        try:
            values[name] = parse_json(value)
        except ValueError as error:
            raise DataError(f"--set {text}: not JSON: {error}", hint="quote the value for the shell") from None
    return values


def _print_notes(notes: Sequence[str]) -> None:
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
