"""Queries and predictions, with their tables."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import cache
from typing import Annotated, Any, NamedTuple, get_args

from pydantic import Field

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError, InvalidProgramError
from cdmpp.features.encode import EncodedProgram, operator_name
from cdmpp.model.domain.calibration import DEFAULT_INTERVAL, interval_levels
from cdmpp.model.domain.score import Label
from cdmpp.model.nn.config import LEVELS
from cdmpp.predict.rendering import Column, Table, arrow_table, html_table, interval_text
from cdmpp.programs.collectives import Collective
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import (
    ALL_FRAMEWORKS,
    COLLECTIVE_FRAMEWORKS,
    DEFAULT_PROTOCOL,
    FRAMEWORKS,
    IMPLEMENTATIONS,
    PROTOCOLS,
    Backend,
    Framework,
    Implementation,
    Protocol,
    implementation_of,
    launcher_of,
)
from cdmpp.utils.units import format_latency

DEFAULT_QUANTILES = DEFAULT_INTERVAL
#: A specification, its fields, or the name of a known device.
Device = DeviceSpec | Mapping[str, Any] | str


@dataclass(frozen=True)
class ErrorInfo:
    """The error of one query."""

    code: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: CdmppError) -> ErrorInfo:
        """The record of an exception."""
        return cls(error.code, error.message, error.hint)


@dataclass(frozen=True)
class Query:
    """One program on one device, with the options that define its latency.

    Attributes
    ----------
    device : DeviceSpec or str
        A specification, or the name of a known device.
    protocol : {"kernel", "graph", "eager"}
        What the latency includes: device time only, launch inside a captured graph, or a call from the host.
    framework : str or None
        Framework that launches a library kernel ("pytorch", "vllm", ...), where it is known.
    implementation : {"fused", "composed", "compiled", "tuned"} or None
        How the operator is executed; None: as :func:`cdmpp.programs.query_options.implementation_of` says. A program
        that runs as scheduled (backend "tvm") and a collective have none.
    """

    program: TensorProgram | EncodedProgram
    device: DeviceSpec | str
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: str | None = None
    implementation: str | None = None


class Declared(NamedTuple):
    """Declaration of a field of :class:`Prediction`, from which tables, JSON and the service's schema derive."""

    description: str
    #: Of the value in JSON where there is a prediction.
    type: Any
    #: "s", or empty.
    unit: str = ""
    #: Absent from JSON where it is None.
    optional: bool = False


def declared(description: str, type: Any = str, **options: Any) -> Any:
    """A field of :class:`Prediction` that every prediction has; ``options`` are those of :class:`Declared`."""
    return field(metadata={"declared": Declared(description, type, **options)})


def figure(description: str, type: Any, *, default: Any = None, **options: Any) -> Any:
    """A field of :class:`Prediction` that a prediction with an error lacks, otherwise as :func:`declared`."""
    made = {"default_factory": default} if callable(default) else {"default": default}
    return field(metadata={"declared": Declared(description, type, **options)}, **made)


Seconds = Annotated[float, Field(gt=0)]
_BOUND = "of the requested levels (0.1 and 0.9 where those are on one side of the median), at least 1 % from latency_s."

_IMPLEMENTATION = Declared(
    "How the operator is executed. Absent for the backend tvm and for collectives.", Implementation, optional=True
)


@dataclass(frozen=True)
class Prediction:
    """A prediction, or an ``error``; with an error all figures are None.

    ``declarations()`` has description, unit and type of each field. A new field is declared here, computed in
    :mod:`cdmpp.predict.stages`, and then is a column of all tables, in JSON and in the schema of the service.
    """

    name: str = declared("Text of the operator, or name of the function.")
    program_hash: str | None = declared("Structural hash: equal programs share it.")
    device: str = declared("")
    backend: str = declared("", Backend)
    protocol: str = declared("", Protocol)
    framework: str | None = declared("", Framework | None)
    #: Keyword only, because it has a default and stands before fields without one.
    implementation: str | None = field(default=None, kw_only=True, metadata={"declared": _IMPLEMENTATION})
    model_id: str = declared("")
    latency_s: float | None = figure("Predicted run time.", Seconds, unit="s")
    lower_s: float | None = figure(f"The lowest {_BOUND}", Seconds, unit="s")
    upper_s: float | None = figure(f"The highest {_BOUND}", Seconds, unit="s")
    quantiles: dict[str, float] = figure(
        "Requested level (as text) to seconds.", dict[str, Seconds], default=dict, unit="s"
    )
    domain: Label | None = figure("Coverage of the query by the training data.", Label)
    #: Distance from the training data plus width of the interval.
    domain_score: float | None = figure("Ranks predictions by expected error; 0 is best.", float)
    #: max(arithmetic at peak, traffic at full bandwidth). Kernels that read from cache or need less arithmetic
    #: (Winograd) can be faster.
    roofline_s: float | None = figure(
        "Bound by arithmetic and memory traffic, not a prediction.", Annotated[float, Field(ge=0)], unit="s"
    )
    #: For a collective, what of the query its measurements lacked.
    domain_reason: str | None = figure(
        "Why the domain is not `in`; and whether the figures follow or are limited by those of another type, protocol, "
        "engine or device, which training had, or by physics.",
        str,
        optional=True,
    )
    error: ErrorInfo | None = None

    @classmethod
    @cache
    def declarations(cls) -> dict[str, Declared]:
        """The declared fields by name, in order."""
        return {f.name: f.metadata["declared"] for f in fields(cls) if "declared" in f.metadata}

    @classmethod
    @cache
    def figure_names(cls) -> tuple[str, ...]:
        """Fields that a prediction with an error lacks."""
        names = cls.declarations()
        return tuple(f.name for f in fields(cls) if f.name in names and not _is_required(f))

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with either figures or an error."""
        # Not asdict: its deep copies took longer than the prediction.
        out = dict(vars(self))
        out.pop("_coverage", None)
        if self.error is None:
            del out["error"]
            for name, value in self.declarations().items():
                if value.optional and out[name] is None:
                    del out[name]
            out["quantiles"] = dict(self.quantiles)
        else:
            for name in self.figure_names():
                del out[name]
            out["error"] = asdict(self.error)
        return out

    @property
    def coverage(self) -> Label | None:
        """The label by the rows of training alone, also where the device has no units for the type."""
        label: Label | None = vars(self).get("_coverage", self.domain)
        return label

    @property
    def latency_ms(self) -> float | None:
        """``latency_s`` in milliseconds; None with an error."""
        return None if self.latency_s is None else 1e3 * self.latency_s

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table`` with one row: :meth:`Predictions.to_arrow`."""
        return predictions_arrow([self])

    def __str__(self) -> str:
        return predictions_text([self])

    def _repr_html_(self) -> str:
        return predictions_html([self])


class Predictions(list[Prediction]):
    """A list of predictions; it prints as a table, with a column for each device where there are several.

    Examples
    --------
    >>> answers = predictor.predict(programs, ["t4", "l4"])          # doctest: +SKIP
    >>> answers.to_arrow().to_pandas().pivot(index="name", columns="device", values="latency_s")  # doctest: +SKIP
    """

    @property
    def latency_ms(self) -> list[float | None]:
        """Latency of each prediction in milliseconds; None where there is an error."""
        return [prediction.latency_ms for prediction in self]

    def by_device(self) -> dict[str, Predictions]:
        """The predictions of each device, in order, by the name of the device."""
        devices: dict[str, Predictions] = {}
        for prediction in self:
            devices.setdefault(prediction.device, Predictions()).append(prediction)
        return devices

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table`` with one row per prediction; ``.to_pandas()`` makes a data frame of it.

        The columns are the attributes of :class:`Prediction`, with ``error_code``, ``error`` (the message) and
        ``error_hint``. Columns in seconds have ``unit = s`` in the metadata of their field. Figures
        are null where there is an error.

        Raises
        ------
        MissingDependencyError
            pyarrow is not installed.
        """
        return predictions_arrow(self)

    def __str__(self) -> str:
        return predictions_text(self)

    def _repr_html_(self) -> str:
        return predictions_html(self)


def check_quantiles(quantiles: Sequence[float]) -> tuple[float, ...]:
    """The levels as a tuple; raises :class:`DataError` for none, or for one outside the network's range."""
    levels = tuple(float(q) for q in quantiles)
    if not levels or not all(LEVELS[0] <= q <= LEVELS[-1] for q in levels):
        raise DataError(
            f"quantiles {list(quantiles)} must be one or more levels between {LEVELS[0]} and {LEVELS[-1]}",
            hint="for example 0.1 and 0.9 for an 80 % interval",
        )
    return levels


def device_list(device: Device | Sequence[Device]) -> list[Device]:
    """The devices of a call as a list; raises :class:`InvalidDeviceError` for an empty one."""
    if isinstance(device, str | DeviceSpec | Mapping) or not isinstance(device, Sequence):
        return [device]
    if not device:
        raise InvalidDeviceError("the list of devices is empty", hint="pass a device, or a list of at least one")
    return list(device)


def check_query(query: Query) -> None:
    """Raise the error of a query whose program, device or option is invalid."""
    if not isinstance(query.program, TensorProgram | EncodedProgram):
        raise InvalidProgramError(
            f"{str(query.program)[:80]!r} is not the program of a query", hint="pass TensorProgram.from_operator(text)"
        )
    if not isinstance(query.device, str | DeviceSpec):
        raise InvalidDeviceError(
            f"{str(query.device)[:80]!r} is not the device of a query", hint="pass a name or a DeviceSpec"
        )
    check_settings(query.protocol, query.framework, query.implementation)


def query_implementation(query: Query) -> str | None:
    """How the operator of a query is executed; None for the backend tvm and for a collective."""
    program = query.program
    if program.backend == "tvm" or isinstance(program.operator, Collective):
        return None
    return implementation_of(operator_name(program), query.framework, query.implementation)


def query_launcher(query: Query) -> str | None:
    """The framework whose measured kernels answer a query of a tensor program; None where any may."""
    implementation = query_implementation(query)
    if not implementation:
        return query.framework
    return launcher_of(operator_name(query.program), query.framework, implementation)


def failed_fields(query: Query, error: CdmppError, model_id: str) -> dict[str, Any]:
    """Fields of the :class:`Prediction` of a query with an error; the query may be invalid."""
    program, device = query.program, query.device
    try:
        digest = program.hash if isinstance(program, TensorProgram | EncodedProgram) else None
    except CdmppError:
        digest = None
    return {
        "name": getattr(program, "name", str(program)[:80]),
        "program_hash": digest,
        "device": getattr(device, "name", str(device)[:80]),
        "backend": getattr(program, "backend", "library"),
        "protocol": query.protocol,
        "framework": query.framework,
        "model_id": model_id,
        "error": ErrorInfo.of(error),
    }


def check_settings(protocol: str, framework: str | None, implementation: str | None = None) -> None:
    """Raise :class:`DataError` for an unknown protocol, framework or implementation."""
    for what, value, known in (
        ("protocol", protocol, PROTOCOLS),
        ("framework", framework, ALL_FRAMEWORKS),
        ("implementation", implementation, IMPLEMENTATIONS),
    ):
        if value is not None or what == "protocol":
            check_option(what, value, known)


def check_option(what: str, value: Any, known: Sequence[str]) -> None:
    """Raise :class:`DataError`, with the nearest name, for a value that is not one of ``known``."""
    if value not in known:
        nearest = difflib.get_close_matches(str(value).casefold(), known, n=1)
        suggestion = f"; did you mean {nearest[0]}?" if nearest else ""
        raise DataError(f"{what} {value!r} is not known{suggestion}", hint="one of: " + ", ".join(known))


def framework_error(query: Query) -> DataError | None:
    """The error for a tensor program whose framework runs only collectives; None for any other query."""
    if query.framework not in COLLECTIVE_FRAMEWORKS:
        return None
    return DataError(
        f"framework {query.framework!r} runs collectives; {query.program.name} is none",
        hint="one of: " + ", ".join(FRAMEWORKS),
    )


#: Columns of a table with one row per prediction.
HEADER = ("program", "device", "latency", "interval", "domain")
#: Notes below a table of predictions.
MAX_NOTES = 10


def predictions_html(predictions: Sequence[Prediction]) -> str:
    """One row per prediction: program, device, latency, interval and domain, or the error."""
    rows = list(map(_cells, predictions))
    return html_table(HEADER, rows, right=(2,), caption=_settings(predictions), notes=_notes(predictions))


def predictions_text(predictions: Sequence[Prediction]) -> str:
    """One row per prediction; or one per program and a column per device, of several."""
    devices: dict[str, list[Prediction]] = {}
    for p in predictions:
        devices.setdefault(p.device, []).append(p)
    names = [[p.name for p in of_device] for of_device in devices.values()]
    if len(devices) > 1 and len(names[0]) > 1 and all(of_device == names[0] for of_device in names):
        rows = [
            (row[0].name, *(latency_text(p.latency_s, p.domain) for p in row))
            for row in zip(*devices.values(), strict=True)
        ]
        table = Table(("program", *devices), rows, range(1, 1 + len(devices)))
    else:
        table = Table(HEADER, list(map(_cells, predictions)), (2,))
    return "\n".join([str(table), *_notes(predictions), _settings(predictions)]).rstrip()


def latency_text(latency_s: float | None, domain: Label | None) -> str:
    """Latency and domain: "12.3 µs near"; "error" without a latency."""
    return "error" if latency_s is None else f"{format_latency(latency_s)} {domain or '':>4}"


def _cells(p: Prediction) -> tuple[str, ...]:
    """Cells of :data:`HEADER`."""
    if p.latency_s is None:
        return p.name, p.device, "error", "" if p.error is None else p.error.message, ""
    return p.name, p.device, format_latency(p.latency_s), interval_text(p.lower_s, p.upper_s), p.domain or ""


def _notes(predictions: Sequence[Prediction]) -> list[str]:
    notes = [f"{p.name} on {p.device}: {p.domain_reason}" for p in predictions if p.domain_reason]
    return list(dict.fromkeys(notes))[:MAX_NOTES]


def _settings(predictions: Sequence[Prediction]) -> str:
    """The options that all predictions share."""

    def shared(values: set[Any], text: str) -> list[str]:
        [value] = values if len(values) == 1 else [None]
        return [text.format(value)] if value else []

    levels = {tuple(p.quantiles) for p in predictions if p.quantiles}
    ends = interval_levels(tuple(map(float, min(levels)))) if len(levels) == 1 else DEFAULT_INTERVAL
    parts = shared({p.protocol for p in predictions}, "protocol {}")
    parts += shared({p.framework for p in predictions}, "framework {}")
    parts += shared({p.implementation for p in predictions}, "implementation {}")
    parts += [f"interval {100 * min(ends):g} % – {100 * max(ends):g} %"] if levels else []
    parts += shared({p.model_id for p in predictions}, "model {}")
    return ", ".join(parts)


def predictions_arrow(predictions: Sequence[Prediction]) -> Any:
    """A ``pyarrow.Table`` with one row per prediction; figures are null where there is an error."""
    columns = {}
    for name, declaration in _class_of(predictions).declarations().items():
        values = [getattr(p, name) for p in predictions]
        if name == "quantiles":
            columns[name] = Column("levels", [list(levels.items()) for levels in values], declaration.unit)
        else:
            columns[name] = Column("float64" if is_number(declaration) else "string", values, declaration.unit)
    for name, attribute in ERROR_COLUMNS.items():
        columns[name] = Column("string", [p.error and getattr(p.error, attribute) for p in predictions])
    return arrow_table(columns)


#: Columns of an error in tables, and the attributes of :class:`ErrorInfo`.
ERROR_COLUMNS = {"error_code": "code", "error": "message", "error_hint": "hint"}


def is_number(declaration: Declared) -> bool:
    """Whether a field is a number."""
    return declaration.type is float or get_args(declaration.type)[:1] == (float,)


def _class_of(predictions: Sequence[Prediction]) -> type[Prediction]:
    return type(predictions[0]) if predictions else Prediction


def _is_required(item: Any) -> bool:
    return item.default is MISSING and item.default_factory is MISSING
