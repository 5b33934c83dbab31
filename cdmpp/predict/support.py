"""Coverage of a model: operators, devices, protocols, accuracy, and a matrix of domain and error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from cdmpp.devices import find_known
from cdmpp.errors import ArtifactError, UnknownDeviceError, UnsupportedOperatorError
from cdmpp.model.artifact.folder import ERROR_TABLE
from cdmpp.model.artifact.model import Artifact
from cdmpp.model.domain.evidence import Evidence, QueryKind, has_no_units
from cdmpp.model.domain.score import LABELS, Context, Label, label, parse_contexts
from cdmpp.model.inference.collectives import collectives_of
from cdmpp.model.nn.config import LEVELS
from cdmpp.programs.collectives import COLLECTIVES, Collective
from cdmpp.programs.elements import combinations, types_label
from cdmpp.programs.operators import PRODUCT_ALIASES, lowered_operators, operator_types, unknown_operator
from cdmpp.programs.products import GroupedGemm, Moe
from cdmpp.programs.query_options import ALL_FRAMEWORKS, BACKENDS, DEFAULT_PROTOCOL, IMPLEMENTATIONS, PROTOCOLS
from cdmpp.utils.files import MAX_REQUEST_BYTES, read_json

#: The least distance of a program to those of training: a label is the best that a query of a cell can have.
_LEAST_DISTANCE = 1e-6
#: A device that training did not have.
ELSEWHERE = ""


class SupportRow(NamedTuple):
    """A row of the matrix: operator, element types and scaling."""

    operator: str
    dtype: str
    weight_dtype: str | None = None
    scaling: str | None = None


def support_matrix(artifact: Artifact) -> dict[str, Any]:
    """Domain, number of training rows and held-out error by operator, types and device, for JSON.

    ``devices``: names of the training devices. ``errors_by``: ``"types"``, or ``"operator"`` where the model's error
    table has no element types; ``mape`` is then that of the operator in all types. ``rows``: one entry per operator,
    ``dtype``, ``weight_dtype`` and ``scaling``, with ``elsewhere`` (the best label that a query on a device without
    training rows can have, under any protocol), ``domain`` (the same by training device, where it is not
    ``elsewhere``), ``rows`` (number of training rows by device, without zeros; None where the model does not say) and
    ``mape`` (mean absolute percentage error on held-out rows by device, a fraction).
    """
    devices = [name for name in artifact.devices if name]
    limited = _limited(artifact, devices)
    table = _error_table(artifact)
    types, operators = table.get("types"), _by_operator(table.get("groups", ()))
    trained, errors = _by_types(types or ())
    labels = _Labels(artifact)
    rows = []
    for row in sorted(_rows({*trained, *errors}), key=lambda r: tuple(part or "" for part in r)):
        counts = trained.get(row, {})
        elsewhere = _at_best("near", labels.best(row, ELSEWHERE))
        domain = {}
        for device in devices:
            label = labels.best(row, device)
            label = _at_best("near", label) if device in limited else label
            if label != elsewhere:
                domain[device] = label
        if types is None:
            mape = {d: e for d, e in operators.get(row.operator, {}).items() if domain.get(d) == "in"}
        else:
            mape = errors.get(row, {})
        rows.append(
            {
                **row._asdict(),
                "elsewhere": elsewhere,
                "domain": domain,
                "rows": counts if types is not None else None,
                "mape": mape,
            }
        )
    places, collectives = _collectives(artifact)
    return {
        "devices": devices + [name for name in places if name not in devices],
        "errors_by": "operator" if types is None else "types",
        "rows": rows + collectives,
    }


def _collectives(artifact: Artifact) -> tuple[list[str], list[dict[str, Any]]]:
    """Devices and rows of the collectives, which have a model of their own; their errors are for all types.

    A cell is that of the measured numbers of ranks, links and libraries.
    """
    try:
        model = collectives_of(artifact)
    except UnsupportedOperatorError:
        return [], []
    errors: dict[str, dict[str, float]] = {}
    for key, figures in model.metrics.get("by_operator_and_device", {}).items():
        operator, _, device = key.partition("|")
        errors.setdefault(operator, {})[device] = round(figures["error"], 5)
    measured = {(c.operator, c.device, c.narrow) for c in model.known if c.device}
    devices = sorted({device for _, device, _ in measured})
    limited = _limited(artifact, devices)
    rows = []
    for operator, dtype in ((name, dtype) for name in sorted(COLLECTIVES) for dtype in Collective.dtypes):
        inside = [d for d in devices if (operator, d, dtype == "int8") in measured and d not in limited]
        mape = {d: e for d, e in errors.get(operator, {}).items() if d in inside}
        figures = {"elsewhere": "near", "domain": dict.fromkeys(inside, "in"), "rows": None, "mape": mape}
        rows.append({**SupportRow(operator, dtype)._asdict(), **figures})
    return devices, rows


def domain_on(row: dict[str, Any], device: str) -> Label:
    """Domain of a row of the matrix on a device, known or not."""
    known: Label | None = row["domain"].get(device)
    spec = None if known or device in (row["rows"] or ()) else find_known(device)
    if spec is not None and has_no_units(row["operator"], types_label(row["dtype"], row), spec):
        return "out"
    return known or row["elsewhere"]


def known_operator(name: str) -> str:
    """An operator by its name or alias; raises :class:`UnsupportedOperatorError` for another one."""
    if name in PRODUCT_ALIASES:
        return "linear"
    if name not in operator_types():
        raise unknown_operator(name)
    return name


def selected(matrix: dict[str, Any], operator: str | None = None, device: str | None = None) -> dict[str, Any]:
    """The part of a matrix that belongs to one operator, one device, or both."""

    def on(figures: dict[str, Any] | None) -> dict[str, Any] | None:
        return figures if figures is None or device is None else {d: v for d, v in figures.items() if d == device}

    rows = [
        {**row, "domain": on(row["domain"]), "rows": on(row["rows"]), "mape": on(row["mape"])}
        for row in matrix["rows"]
        if operator in (None, row["operator"])
    ]
    devices = [name for name in matrix["devices"] if device in (None, name)]
    return {**matrix, "devices": devices, "rows": rows}


def _at_best(limit: Label, label: Label) -> Label:
    return LABELS[max(LABELS.index(label), LABELS.index(limit))]


class _Labels:
    """Labels of contexts, the best over all protocols."""

    def __init__(self, artifact: Artifact) -> None:
        self._artifact, self._domain = artifact, artifact.domain
        self._evidence = Evidence(artifact.domain.contexts)
        self._known: dict[tuple[str, str, str], Label] = {}

    def best(self, row: SupportRow, device: str) -> Label:
        """Label of a program like those of training, in these types on this device."""
        types = types_label(row.dtype, row._asdict())
        key = (row.operator, types, device)
        if key not in self._known:
            contexts = [Context(device, row.operator, types, protocol, "library") for protocol in PROTOCOLS]
            trained = [context for context in contexts if context.keys()[0] in self._domain.contexts]
            step = min(map(self._domain.step, trained or contexts))
            kind = QueryKind(device, row.operator, types, "library")
            lacks = device != ELSEWHERE and self._evidence.lacks_units(kind, self._artifact.device(device))
            self._known[key] = "out" if lacks else label(_LEAST_DISTANCE + step)
        return self._known[key]


def _rows(known: Iterable[SupportRow]) -> set[SupportRow]:
    """All types that operators exist for, and those of training."""
    rows = {row for row in known if row.operator in lowered_operators()}
    for operator, spec in lowered_operators().items():
        for dtype in spec.dtypes:
            rows.update(SupportRow(operator, dtype, *pair) for pair in _pairs(operator, dtype))
    return rows


def _pairs(operator: str, dtype: str) -> Iterator[tuple[str | None, str | None]]:
    spec = lowered_operators()[operator]
    if "scaling" not in spec.model_fields or operator.startswith("mla_"):
        yield None, None
    else:
        yield from combinations(dtype, experts=issubclass(spec, Moe | GroupedGemm))


def _limited(artifact: Artifact, devices: Iterable[str]) -> set[str]:
    """Stand-ins and unreleased devices, which are never "in"."""
    limited = set()
    for name in devices:
        try:
            if artifact.device(name).status:
                limited.add(name)
        except UnknownDeviceError:
            continue
    return limited


def _error_table(artifact: Artifact) -> dict[str, Any]:
    """The error table of the model's folder; empty without one."""
    path = artifact.folder / ERROR_TABLE if artifact.folder is not None else None
    if path is None or not path.is_file():
        return {}
    return dict(read_json(path, "copy the model folder again", max_bytes=MAX_REQUEST_BYTES, error=ArtifactError))


def _by_operator(groups: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Mean error by operator and device over all sources."""
    sums: dict[tuple[str, str], tuple[float, int]] = {}
    for group in groups:
        key = (group["op"], group["device"])
        total, count = sums.get(key, (0.0, 0))
        sums[key] = (total + group["mape"] * group["n"], count + group["n"])
    errors: dict[str, dict[str, float]] = {}
    for (operator, device), (total, count) in sums.items():
        errors.setdefault(operator, {})[device] = round(total / count, 5)
    return errors


def _by_types(
    entries: Iterable[dict[str, Any]],
) -> tuple[dict[SupportRow, dict[str, int]], dict[SupportRow, dict[str, float]]]:
    """Training rows and mean error by types and device."""
    rows: dict[SupportRow, dict[str, int]] = {}
    errors: dict[SupportRow, dict[str, float]] = {}
    for entry in entries:
        key = SupportRow(entry["operator"], entry["dtype"], entry["weight_dtype"], entry["scaling"])
        if entry.get("rows"):
            rows.setdefault(key, {})[entry["device"]] = entry["rows"]
        if entry.get("n"):
            errors.setdefault(key, {})[entry["device"]] = round(entry["mape"], 5)
    return rows, errors


def support(artifact: Artifact) -> dict[str, Any]:
    """Operators with their fields, training devices, query options, accuracy by source, and coverage, for JSON.

    ``matrix`` is :func:`cdmpp.predict.support.support_matrix`: domain and error by operator, types and device.
    """
    trained: dict[str, set[str]] = {}
    for context in parse_contexts(artifact.contexts)[0]:
        trained.setdefault(context.operator, set()).add(f"{context.backend}/{context.protocol}/{context.dtype}")
    return {
        "model_id": artifact.model_id,
        "operators": {
            name: {
                "trained": sorted(trained.get(name, ())),
                "fields": {
                    field_name: ("required" if info.is_required() else info.default)
                    for field_name, info in kind.model_fields.items()
                    if field_name != "operator"
                },
            }
            for name, kind in sorted(operator_types().items())
        },
        "trained_devices": list(artifact.device_names),
        "backends": list(BACKENDS),
        "protocols": list(PROTOCOLS),
        "frameworks": list(ALL_FRAMEWORKS),
        "implementations": list(IMPLEMENTATIONS),
        "default_protocol": DEFAULT_PROTOCOL,
        "quantile_range": [LEVELS[0], LEVELS[-1]],
        "accuracy": artifact.manifest.get("metrics", {}),
        "matrix": support_matrix(artifact),
    }
