"""A predictor with round numbers: collectives take 1 ms plus a second for each gigabyte, other programs 10 ms."""

from collections.abc import Mapping, Sequence
from typing import Any

from cdmpp.predict.prediction import DEFAULT_QUANTILES, ErrorInfo, Prediction, Query
from cdmpp.programs.collectives import Collective
from cdmpp.programs.program import TensorProgram

ALPHA_S, BYTES_PER_S, PROGRAM_S = 1e-3, 1e9, 1e-2


def seconds(size: float) -> float:
    """Seconds of a collective of ``size`` bytes."""
    return ALPHA_S + size / BYTES_PER_S


class RoundPredictor:
    """Bounds are half and twice the latency. ``queries`` has every query."""

    model_id = "round-numbers"

    def __init__(self) -> None:
        self.queries: list[Query] = []

    def predict(self, programs: Any, device: Any, **options: Any) -> list[Prediction]:
        raise NotImplementedError("planners use predict_queries")

    def predict_queries(
        self, queries: Sequence[Query], quantiles: Sequence[float] = DEFAULT_QUANTILES
    ) -> list[Prediction]:
        self.queries += queries
        return [self._predict(query) for query in queries]

    def collectives(self) -> list[Collective]:
        """The collectives of all queries."""
        operators = [query.program.operator for query in self.queries]
        return [operator for operator in operators if isinstance(operator, Collective)]

    def _predict(self, query: Query) -> Prediction:
        program = query.program
        assert isinstance(program, TensorProgram)
        operator = program.operator
        name = str(operator.operator) if operator is not None else "tir"
        device = query.device if isinstance(query.device, str) else query.device.name
        given = (name, None, device, "library", query.protocol, query.framework, self.model_id)
        if device == "no-such-gpu":
            return Prediction(*given, error=ErrorInfo("unknown_device", f"device {device!r} is not known"))
        latency = seconds(operator.bytes) if isinstance(operator, Collective) else PROGRAM_S
        return Prediction(
            *given, latency, latency / 2, 2 * latency, {"0.1": latency / 2, "0.9": 2 * latency}, "in", 0.0
        )


def collective(operator: str, size: float, ranks: int = 8, **options: Any) -> dict[str, Any]:
    """A predicted cost as requests have it."""
    form: Mapping[str, Any] = {"operator": operator, "bytes": size, "ranks": ranks, **options}
    return {"collective": dict(form), "device": "h100-sxm"}
