"""What is asked of a predictor and what it answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any
from typing import Protocol as Interface

from cdmpp.devices.spec import DeviceSpec
from cdmpp.domain.score import Label
from cdmpp.errors import CdmppError, DataError
from cdmpp.features.encoded import EncodedProgram
from cdmpp.nn.config import LEVELS
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.program import TensorProgram
from cdmpp.programs.query_options import DEFAULT_PROTOCOL, FRAMEWORKS, PROTOCOLS, Protocol

DEFAULT_QUANTILES = (0.1, 0.9)


@dataclass(frozen=True)
class ErrorInfo:
    """Why one query has no answer."""

    code: str
    message: str
    hint: str = ""

    @classmethod
    def of(cls, error: CdmppError) -> ErrorInfo:
        """From an exception."""
        return cls(error.code, error.message, error.hint)


@dataclass(frozen=True)
class Query:
    """One row to predict.

    Attributes
    ----------
    program : TensorProgram or EncodedProgram
    device : DeviceSpec or str
        A specification, or the name of a known device.
    protocol : {"kernel", "graph", "eager"}
        What the latency includes: device time alone, launch inside a captured graph, a call from the host.
    framework : str or None
        Who launches a library kernel ("pytorch", "vllm", ...), where that is known.
    """

    program: TensorProgram | EncodedProgram
    device: DeviceSpec | str
    protocol: Protocol = DEFAULT_PROTOCOL
    framework: str | None = None


@dataclass(frozen=True)
class Prediction:
    """An answer; ``error`` is set when there is none, and then every figure is None.

    Attributes
    ----------
    latency_s : float
        Predicted run time in seconds, > 0.
    lower_s, upper_s : float
        The outermost of the requested quantiles, or ``latency_s`` where that lies outside.
    quantiles : dict of str to float
        Requested level (as text, "0.1") to seconds.
    domain : {"in", "near", "out"}
        Whether training covered the query. ``domain_score`` ranks queries by the error to expect: the
        distance from what was trained on, and the width of the interval (0 is best).
    roofline_s : float
        max(arithmetic at peak, traffic at full bandwidth): a bound, not a prediction. Kernels that read
        from cache or save arithmetic (winograd) can be faster.
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
    error: ErrorInfo | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON; an error instead of figures, never both."""
        # Not asdict: it copies each value deeply, which took longer than the prediction.
        out = dict(vars(self))
        if self.error is None:
            del out["error"]
            out["quantiles"] = dict(self.quantiles)
        else:
            for key in _FIGURES:
                del out[key]
            out["error"] = asdict(self.error)
        return out


class Predictor(Interface):
    """What predicts latencies: a model in this process, or a service at the other end of a connection.

    Whoever asks through this interface can be given either; both give the same answers to the last digit.
    """

    @property
    def model_id(self) -> str:
        """Identity of the model that answers."""

    def predict(
        self,
        programs: Sequence[TensorProgram | OperatorSpec | str | Mapping[str, Any]],
        device: DeviceSpec | Mapping[str, Any] | str,
        *,
        protocol: Protocol = DEFAULT_PROTOCOL,
        framework: str | None = None,
        quantiles: Sequence[float] = DEFAULT_QUANTILES,
    ) -> list[Prediction]:
        """Programs on one device, in order; a program that cannot be read is an answer with an error."""

    def predict_queries(
        self, queries: Sequence[Query], quantiles: Sequence[float] = DEFAULT_QUANTILES
    ) -> list[Prediction]:
        """Rows of different programs, devices and settings, in order; each may have an error of its own."""


_FIGURES = ("latency_s", "lower_s", "upper_s", "quantiles", "domain", "domain_score", "roofline_s")


def check_quantiles(quantiles: Sequence[float]) -> tuple[float, ...]:
    """At least one level, each within the network's range."""
    levels = tuple(float(q) for q in quantiles)
    if not levels or not all(LEVELS[0] <= q <= LEVELS[-1] for q in levels):
        raise DataError(
            f"quantiles {list(quantiles)} are not levels between {LEVELS[0]} and {LEVELS[-1]}",
            hint="for example 0.1 and 0.9 for an 80 % interval",
        )
    return levels


def check_settings(protocol: str, framework: str | None) -> None:
    """Raise for a protocol or framework that no model knows."""
    for what, value, known in (("protocol", protocol, PROTOCOLS), ("framework", framework, FRAMEWORKS)):
        if value is not None and value not in known:
            raise DataError(f"{what} {value!r} is not known", hint="one of: " + ", ".join(known))
