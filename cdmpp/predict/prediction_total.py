"""Sums of predictions: latency, interval, and the domain by the share of the time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from cdmpp.model.domain.score import Label, TotalDomain
from cdmpp.predict.prediction import Prediction
from cdmpp.predict.rendering import Column, arrow_table, html_table, interval_text
from cdmpp.utils.units import format_latency


@dataclass(frozen=True)
class PredictionTotal:
    """Sum of count x latency of programs on one device.

    Attributes
    ----------
    latency_s, lower_s, upper_s : float or None
        Sums, None where no program is predicted. The bounds are those of errors that all have the same sign.
    domain : {"in", "near", "out"} or None
        By :class:`cdmpp.model.domain.score.TotalDomain`.
    domain_shares : dict of label to float, or None
        Share of ``latency_s`` that the programs of each domain have; the sum is 1.
    programs, launches : int
        Programs in the sum, and their launches.
    failed : int
        Launches of programs that are not predicted.
    lower_bound : bool
        Whether something is not in the sum: a launch that is not predicted, or a node without a program.
    domain_reason : str or None
        The largest part that is not ``in``, with its reason; None where all parts are.
    """

    latency_s: float | None
    lower_s: float | None
    upper_s: float | None
    domain: Label | None
    domain_shares: dict[Label, float] | None
    programs: int
    launches: int
    failed: int
    lower_bound: bool
    domain_reason: str | None = None

    @classmethod
    def of(cls, counted: Iterable[tuple[Prediction | None, int]], *, left_out: bool = False) -> PredictionTotal:
        """Sum predictions.

        Parameters
        ----------
        counted : iterable of (Prediction or None, int)
            Prediction and number of launches of each program; None where there is no prediction.
        left_out : bool
            Whether the model has nodes without a program.
        """
        latency_s = lower_s = upper_s = 0.0
        parts: list[tuple[str, Label, float, str | None]] = []
        programs = launches = failed = 0
        for prediction, count in counted:
            if prediction is None or prediction.latency_s is None or prediction.domain is None:
                failed += count
                continue
            latency_s += count * prediction.latency_s
            lower_s += count * (prediction.lower_s or 0.0)
            upper_s += count * (prediction.upper_s or 0.0)
            parts.append((prediction.name, prediction.domain, count * prediction.latency_s, prediction.domain_reason))
            programs, launches = programs + 1, launches + count
        incomplete = bool(failed) or left_out
        domain = TotalDomain.of(parts)
        if domain is None:
            return cls(None, None, None, None, None, 0, 0, failed, incomplete)
        label, shares, reason = domain
        figures = (latency_s, lower_s, upper_s, label, shares, programs, launches, failed, incomplete)
        return cls(*figures, domain_reason=reason or None)

    @property
    def latency_ms(self) -> float | None:
        """``latency_s`` in milliseconds; None where no program is predicted."""
        return None if self.latency_s is None else 1e3 * self.latency_s

    def to_arrow(self) -> Any:
        """A ``pyarrow.Table`` with one row; ``domain_shares`` become ``share_in``, ``share_near`` and ``share_out``.

        Raises
        ------
        MissingDependencyError
            pyarrow is not installed.
        """
        return arrow_table(total_columns([self]))

    def _repr_html_(self) -> str:
        return total_html(self)

    def domain_text(self) -> str:
        """The shares as text, such as "93 % of the time in, 5 % near, 2 % out"."""
        parts = [(label, share) for label, share in (self.domain_shares or {}).items() if share > 0]
        texts = [f"{_percent(share)}{'' if i else ' of the time'} {label}" for i, (label, share) in enumerate(parts)]
        return ", ".join(texts)


def _percent(share: float) -> str:
    if share < 0.005:
        return "< 1 %"
    return "> 99 %" if 0.995 <= share < 1 else f"{100 * share:.0f} %"


def total_html(total: PredictionTotal) -> str:
    """One row: latency, interval, domain and launches."""
    return html_table(
        ("total", "interval", "domain", "time by domain", "launches", "programs", "not predicted"),
        [total_cells(total)],
        right=(0, 4, 5, 6),
    )


def total_cells(total: PredictionTotal) -> tuple[str, ...]:
    """Latency ("at least" for a lower bound), interval, domain, shares, launches, programs, launches not predicted."""
    bound = "at least " if total.lower_bound else ""
    latency = "" if total.latency_s is None else bound + format_latency(total.latency_s)
    counts = (f"{total.launches:,}", f"{total.programs:,}", f"{total.failed:,}")
    return (latency, interval_text(total.lower_s, total.upper_s), total.domain or "", total.domain_text(), *counts)


def total_columns(totals: Sequence[PredictionTotal]) -> dict[str, Column]:
    """Columns of an Arrow table with one row per total."""

    def of(name: str) -> list[Any]:
        return [getattr(total, name) for total in totals]

    columns = {name: Column("float64", of(name), "s") for name in ("latency_s", "lower_s", "upper_s")}
    columns["domain"] = Column("string", of("domain"))
    for label in ("in", "near", "out"):
        shares = [None if t.domain_shares is None else dict(t.domain_shares)[label] for t in totals]
        columns[f"share_{label}"] = Column("float64", shares)
    columns |= {name: Column("int64", of(name)) for name in ("programs", "launches", "failed")}
    return columns | {"lower_bound": Column("bool", of("lower_bound"))}


def total_line(total: PredictionTotal) -> str:
    """A total as text: "12.3 ms [10.0 ms – 15.0 ms], domain in: 100 % of the time in"."""
    latency, interval, domain, shares, *_ = total_cells(total)
    reason = f"; {total.domain_reason}" if domain == "out" else ""
    return (
        f"{latency} [{interval}], domain {domain}: {shares}{reason}" if total.latency_s is not None else "not predicted"
    )
