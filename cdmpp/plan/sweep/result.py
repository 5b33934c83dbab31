"""Results of a sweep: figures of each point, and the Pareto front."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal

from cdmpp.model.domain.score import Label


@dataclass(frozen=True)
class SweepResult:
    """A point with its figures, or the reason why it has none.

    Attributes
    ----------
    status : {"met", "missed", "infeasible"}
        Whether it meets the goals; an infeasible point has no figures.
    reason : str or None
        The missed goals, or why the point is infeasible.
    pareto : bool
        No other point that meets the goals is better in one objective and as good in the others.
    ttft_s, ttft_upper_s, tpot_s, tpot_upper_s, total_s : float or None
        Seconds; ``tpot_s`` is None for a single output token.
    price_per_hour, price_per_million_tokens : float or None
        Of all GPUs; of output tokens, while the GPUs serve one batch after the other.
    memory_bytes : float or None
        Of the fullest GPU.
    """

    device: str
    tp: int
    pp: int
    ep: int
    batch: int
    dtype: str
    weights: str | None
    status: Literal["met", "missed", "infeasible"]
    reason: str | None = None
    pareto: bool = False
    gpus: int | None = None
    ttft_s: float | None = None
    ttft_upper_s: float | None = None
    tpot_s: float | None = None
    tpot_upper_s: float | None = None
    total_s: float | None = None
    throughput_tokens_per_s: float | None = None
    price_per_hour: float | None = None
    price_per_million_tokens: float | None = None
    memory_bytes: float | None = None
    domain: Label | None = None
    model_id: str | None = None

    @property
    def layout(self) -> str:
        """Degrees of parallelism as text."""
        return f"tp {self.tp}" + (f", pp {self.pp}" if self.pp > 1 else "") + (f", ep {self.ep}" if self.ep > 1 else "")

    @property
    def precision(self) -> str:
        """Element types as text."""
        return self.dtype if self.weights is None else f"{self.dtype}/{self.weights}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)


COLUMNS = tuple(field.name for field in fields(SweepResult))


def with_front(results: Sequence[SweepResult], objectives: Sequence[str]) -> list[SweepResult]:
    """The results in their order, with :attr:`SweepResult.pareto`."""
    front = set(pareto_front([_figures(result, objectives) for result in results]))
    return [replace(result, pareto=position in front) for position, result in enumerate(results)]


def _figures(result: SweepResult, objectives: Sequence[str]) -> tuple[float, ...] | None:
    if result.status != "met":
        return None
    values = [getattr(result, name) for name in objectives]
    return tuple(0.0 if value is None else float(value) for value in values)


def pareto_front(points: Sequence[tuple[float, ...] | None]) -> list[int]:
    """Positions of the points that no other dominates; all objectives are minimised, None is no point.

    A point dominates another if it is nowhere larger and somewhere smaller; equal points are all on the front.

    Examples
    --------
    >>> pareto_front([(1, 3), (2, 2), (3, 3), None, (2, 2)])
    [0, 1, 4]
    """
    # Sorted, a point can only be dominated by an earlier one, and then also by one of the front.
    order = sorted((point, position) for position, point in enumerate(points) if point is not None)
    front: list[tuple[tuple[float, ...], int]] = []
    for point, position in order:
        dominated = (other != point and all(a <= b for a, b in zip(other, point, strict=True)) for other, _ in front)
        if not any(dominated):
            front.append((point, position))
    return sorted(position for _, position in front)
