"""Queries and predictions, with their tables."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import CdmppError, DataError, InvalidDeviceError, InvalidProgramError
from cdmpp.features.encode import EncodedProgram
from cdmpp.model.domain.calibration import DEFAULT_INTERVAL, interval_levels
from cdmpp.model.domain.score import Label
from cdmpp.model.nn.config import LEVELS
from cdmpp.predict.rendering import Column, arrow_table, html_table, interval_text
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import (
    ALL_FRAMEWORKS,
    COLLECTIVE_FRAMEWORKS,
    DEFAULT_PROTOCOL,
    FRAMEWORKS,
    PROTOCOLS,
    Protocol,
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
    program : TensorProgram or EncodedProgram
    device : DeviceSpec or str
        A specification, or the name of a known device.
    protocol : {"kernel", "graph", "eager"}
        What the latency includes: device time only, launch inside a captured graph, or a call from the host.
    framework : str or None
        Framework that launches a library kernel ("pytorch", "vllm", ...), where it is known.
    """

    program: TensorProgram | EncodedProgram
    device: DeviceSpec | str
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: str | None = None


@dataclass(frozen=True)
class Prediction:
    """A prediction, or an ``error``; with an error all figures are None.

    Attributes
    ----------
    latency_s : float
        Predicted run time in seconds, > 0.
    lower_s, upper_s : float
        The outermost of the requested quantiles where they lie on both sides of the median, else the quantiles 0.1
        and 0.9; each at least 1 % from ``latency_s``.
    quantiles : dict of str to float
        Requested level (as text, "0.1") to seconds.
    domain : {"in", "near", "out"}
        Coverage of the query by the training data. ``domain_score`` ranks queries by expected error: distance
        from the training data plus width of the interval (0 is best).
    roofline_s : float
        max(arithmetic at peak, traffic at full bandwidth): a bound, not a prediction. Kernels that read
        from cache or need less arithmetic (winograd) can be faster.
    domain_reason : str or None
        Why the figures are not the network's own: they follow or are limited by those of another type or protocol,
        which training had. Also why the device's status keeps a prediction out of "in". For a collective, what of
        the query its measurements lacked.
    """

    name: str
    program_hash: str | None
    device: str
    backend: str
    protocol: str
    framework: str | None
    model_id: str
    latency_s: float | None = None
    lower_s: float | None = None
    upper_s: float | None = None
    quantiles: dict[str, float] = field(default_factory=dict)
    domain: Label | None = None
    domain_score: float | None = None
    roofline_s: float | None = None
    domain_reason: str | None = None
    error: ErrorInfo | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON, with either figures or an error."""
        # Not asdict: its deep copies took longer than the prediction.
        out = dict(vars(self))
        if self.error is None:
            del out["error"]
            if self.domain_reason is None:
                del out["domain_reason"]
            out["quantiles"] = dict(self.quantiles)
        else:
            for key in _FIGURES:
                del out[key]
            out["error"] = asdict(self.error)
        return out

    @property
    def latency_ms(self) -> float | None:
        """``latency_s`` in milliseconds; None with an error."""
        return None if self.latency_s is None else 1e3 * self.latency_s

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table`` with one row: :meth:`Predictions.to_arrow`."""
        return predictions_arrow([self])

    def _repr_html_(self) -> str:
        return predictions_html([self])


class Predictions(list[Prediction]):
    """A list of predictions; notebooks show it as a table.

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

    def _repr_html_(self) -> str:
        return predictions_html(self)


_FIGURES = ("latency_s", "lower_s", "upper_s", "quantiles", "domain", "domain_score", "roofline_s", "domain_reason")


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
    """Raise the error of a query whose program, device, protocol or framework is invalid."""
    if not isinstance(query.program, TensorProgram | EncodedProgram):
        raise InvalidProgramError(
            f"{str(query.program)[:80]!r} is not the program of a query", hint="pass TensorProgram.from_operator(text)"
        )
    if not isinstance(query.device, str | DeviceSpec):
        raise InvalidDeviceError(
            f"{str(query.device)[:80]!r} is not the device of a query", hint="pass a name or a DeviceSpec"
        )
    check_settings(query.protocol, query.framework)


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


def check_settings(protocol: str, framework: str | None) -> None:
    """Raise :class:`DataError` for an unknown protocol or framework."""
    for what, value, known in (("protocol", protocol, PROTOCOLS), ("framework", framework, ALL_FRAMEWORKS)):
        if value not in known and (value is not None or what == "protocol"):
            nearest = difflib.get_close_matches(str(value).casefold(), known, n=1)
            meant = f"; did you mean {nearest[0]}?" if nearest else ""
            raise DataError(f"{what} {value!r} is not known{meant}", hint="one of: " + ", ".join(known))


def framework_error(query: Query) -> DataError | None:
    """The error for a tensor program whose framework runs only collectives; None for any other query."""
    if query.framework not in COLLECTIVE_FRAMEWORKS:
        return None
    return DataError(
        f"framework {query.framework!r} runs collectives; {query.program.name} is none",
        hint="one of: " + ", ".join(FRAMEWORKS),
    )


def predictions_html(predictions: Sequence[Prediction]) -> str:
    """One row per prediction: program, device, latency, interval and domain, or the error."""
    rows, notes = [], []
    for p in predictions:
        if p.latency_s is None:
            message = "" if p.error is None else p.error.message
            rows.append((p.name, p.device, "error", message, ""))
            continue
        rows.append(
            (p.name, p.device, format_latency(p.latency_s), interval_text(p.lower_s, p.upper_s), p.domain or "")
        )
        notes += [f"{p.name} on {p.device}: {p.domain_reason}"] if p.domain_reason else []
    header = ("program", "device", "latency", "interval", "domain")
    return html_table(header, rows, right=(2,), caption=_settings(predictions), notes=list(dict.fromkeys(notes))[:10])


def _settings(predictions: Sequence[Prediction]) -> str:
    """The options that all predictions share."""

    def shared(values: set[Any], text: str) -> list[str]:
        [value] = values if len(values) == 1 else [None]
        return [text.format(value)] if value else []

    levels = {tuple(p.quantiles) for p in predictions if p.quantiles}
    ends = interval_levels(tuple(map(float, min(levels)))) if len(levels) == 1 else DEFAULT_INTERVAL
    parts = shared({p.protocol for p in predictions}, "protocol {}")
    parts += shared({p.framework for p in predictions}, "framework {}")
    parts += [f"interval {100 * min(ends):g} % – {100 * max(ends):g} %"] if levels else []
    parts += shared({p.model_id for p in predictions}, "model {}")
    return ", ".join(parts)


def predictions_arrow(predictions: Sequence[Prediction]) -> Any:
    """A ``pyarrow.Table`` with one row per prediction; figures are null where there is an error."""

    def of(name: str) -> list[Any]:
        return [getattr(p, name) for p in predictions]

    def of_error(name: str) -> list[Any]:
        return [None if p.error is None else getattr(p.error, name) for p in predictions]

    columns = {name: Column("string", of(name)) for name in _TEXTS}
    columns |= {name: Column("float64", of(name), "s") for name in ("latency_s", "lower_s", "upper_s")}
    columns["quantiles"] = Column("levels", [list(p.quantiles.items()) for p in predictions], "s")
    columns["domain"] = Column("string", of("domain"))
    columns["domain_score"] = Column("float64", of("domain_score"))
    columns["roofline_s"] = Column("float64", of("roofline_s"), "s")
    columns["domain_reason"] = Column("string", of("domain_reason"))
    columns["error_code"] = Column("string", of_error("code"))
    columns["error"] = Column("string", of_error("message"))
    columns["error_hint"] = Column("string", of_error("hint"))
    return arrow_table(columns)


_TEXTS = ("name", "program_hash", "device", "backend", "protocol", "framework", "model_id")
