"""Domain score: distance of a query from the training data.

The score is the sum of two parts. The first is the distance of the program's summary to the nearest of some hundred
centres of the training programs, in units of the 99th percentile of that distance among training programs. The
second is a step for a context that training did not have: a new combination of device, operator, dtype and protocol,
or a new operator.

Programs with a GPU schedule are compared with the training programs that have one, and with no others: operators and
CPU schedules say nothing about threads and shared memory. Beyond those programs' reach they are "out".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from cdmpp.model.nn.inputs import SUMMARY_COLUMNS

Array = np.ndarray[Any, np.dtype[Any]]
Label = Literal["in", "near", "out"]
#: Best first.
LABELS: tuple[Label, ...] = ("in", "near", "out")

#: Columns of the summary that define the distance.
_COLUMNS = tuple(
    SUMMARY_COLUMNS.index(name)
    for name in (
        "flops",
        "bytes",
        "output_elements",
        "batch",
        "m",
        "n",
        "k",
        "spatial_0",
        "spatial_1",
        "spatial_2",
        "reduce_0",
        "leaves",
    )
)
#: Of a program with a GPU schedule; "blocks" is 0 for any other.
_SCHEDULED = (*_COLUMNS, SUMMARY_COLUMNS.index("blocks"))
_TIR, _BLOCKS = SUMMARY_COLUMNS.index("family_tir"), SUMMARY_COLUMNS.index("blocks")
#: Largest distance of a program.
_FAR = 10.0
#: Points of one block of the distance computation.
_BLOCK = 512
#: With fewer points per centre, the reach is that of points that the centres were not fitted to, a share of all.
_ENOUGH, _UNSEEN = 20, 0.2
NEAR_STEP, OUT_STEP, PART_STEP = 1.0, 2.0, 0.5
#: Scores up to the first are "in", up to the second "near".
THRESHOLDS = (1.0, 2.0)
#: What a limited score (:func:`limited_step`) has above the first threshold.
JUST_ABOVE = 1e-3


def worst(labels: Iterable[Label | None]) -> Label | None:
    """The worst label, for a figure made of several predictions; None without any label."""
    return max((label for label in labels if label is not None), key=LABELS.index, default=None)


#: Shares of a total's time: at least so much "in" makes it "in", at most so much "out" makes it "near".
IN_SHARE, OUT_SHARE = 0.9, 0.1


def label_of_total(shares: Mapping[Label, float]) -> Label:
    """Label of a sum of predictions, from the share of its time that each label has."""
    if shares["in"] >= IN_SHARE:
        return "in"
    return "near" if shares["out"] <= OUT_SHARE else "out"


class TotalDomain(NamedTuple):
    """Domain of a sum: its label, the share of the time of each label, and the largest part that is not "in"."""

    label: Label
    shares: dict[Label, float]
    reason: str

    @classmethod
    def of(cls, parts: Iterable[tuple[str, Label, float, str | None]]) -> TotalDomain | None:
        """The domain of a sum of predictions; None without a part. All interfaces use this function.

        ``parts``: name, label, seconds and :attr:`Prediction.domain_reason`; parts of one name and label are one part.
        """
        seconds: dict[Label, float] = dict.fromkeys(LABELS, 0.0)
        named: dict[tuple[str, Label], float] = {}
        reasons: dict[tuple[str, Label], str | None] = {}
        for name, part_label, part_s, reason in parts:
            key = (name, part_label)
            seconds[part_label] += part_s
            named[key] = named.get(key, 0.0) + part_s
            reasons[key] = reasons.get(key) or reason
        if not named:
            return None
        whole = sum(seconds.values()) or 1.0
        shares = {label: part_s / whole for label, part_s in seconds.items()}
        total = label_of_total(shares)
        doubtful = [key for key in named if key[1] == "out" or (total != "out" and key[1] == "near")]
        if not doubtful:
            return cls(total, shares, "")
        key = max(doubtful, key=named.__getitem__)
        share = 100 * named[key] / whole
        text = f"{key[0]} is {key[1]} ({'< 1' if share < 0.5 else f'{share:.0f}'} % of the time)"
        return cls(total, shares, f"{text}: {reasons[key]}" if reasons[key] else text)

    def and_of(self, label: Label, reason: str) -> TotalDomain:
        """With what is known of the whole: the worse label, and both reasons."""
        return TotalDomain(
            max(self.label, label, key=LABELS.index), self.shares, "; ".join(filter(None, (reason, self.reason)))
        )


class Context(NamedTuple):
    """Device, operator and options of a query, which training rows may or may not have."""

    device: str
    operator: str
    dtype: str
    protocol: str
    backend: str
    framework: str = ""

    def keys(self) -> tuple[str, str, str, str, str]:
        """Keys in :attr:`Domain.contexts`: whole context, operator, its dtype, its protocol, device and framework."""
        whole = "|".join((self.device, self.operator, self.dtype, self.protocol, self.backend))
        operator = f"{self.operator}|{self.backend}"
        launched = f"{self.device}&{self.framework}"
        return whole, operator, f"{operator}|{self.dtype}|*", f"{operator}|*|{self.protocol}", launched

    def launch_key(self) -> str:
        """Key in :attr:`Domain.contexts` of the whole context with its framework ("" where it is not known)."""
        return "|".join(self)


def parse_contexts(keys: Iterable[str]) -> tuple[set[Context], set[Context]]:
    """Contexts among the keys of a domain: those without their frameworks, and those with them (or with "")."""
    parts = [tuple(key.split("|")) for key in keys]
    return {Context(*p) for p in parts if len(p) == 5}, {Context(*p) for p in parts if len(p) == 6}


def has_gpu_schedule(summary: Array) -> Array:
    """Whether programs are given with thread bindings, (n,) bool."""
    return np.asarray((summary[:, _TIR] > 0) & (summary[:, _BLOCKS] > 0))


@dataclass(frozen=True)
class Domain:
    """Centres of the training programs and the contexts that training rows had."""

    centres: Array  # float32, (centres, columns)
    # 99th percentile of the distance of training programs to their centre. Where there are few programs, it is that of
    # programs which the centres were not fitted to.
    reach: float
    # The keys (:meth:`Context.keys`, :meth:`Context.launch_key`) of every training row, and ``device&`` for every
    # device.
    contexts: frozenset[str]
    # float32, (centres, columns + 1): centres of the training programs with a GPU schedule; none where training had no
    # such program.
    schedules: Array = field(default_factory=lambda: np.zeros((0, len(_SCHEDULED)), dtype=np.float32))
    schedule_reach: float = 1.0  # as ``reach``, of these
    # Passes over memory whose rows are slower than :mod:`cdmpp.model.inference.limits` allows, as
    # ``device|operator|framework``, and how many times.
    slow_kernels: Mapping[str, float] = field(default_factory=dict)
    # Operators whose rows are faster than the bound allows (reads from a cache, clocks above the data sheet), and the
    # share of the bound that they reach.
    fast_kernels: Mapping[str, float] = field(default_factory=dict)
    # Engines' operators whose rows are host time, as ``operator|types|framework``, with ``|module`` for a layer with
    # its projections. With ``device|`` in front: on this device, where they contradict a sibling
    # (:mod:`cdmpp.data.contradictions`). They count as not measured.
    host_bound: frozenset[str] = frozenset()

    @classmethod
    def fit(cls, summary: Array, contexts: frozenset[str], seed: int, centres: int = 1024) -> Domain:
        """Fit to the summaries of the distinct training programs (k-means on a seeded sample)."""
        bound = has_gpu_schedule(summary)
        all_programs = _centres(summary[:, _COLUMNS], seed, centres)
        if not bound.any():
            return cls(*all_programs, contexts)
        return cls(*all_programs, contexts, *_centres(summary[bound][:, _SCHEDULED], seed, centres))

    def tensors(self) -> dict[str, Array]:
        """Arrays for the safetensors file."""
        scheduled = {"schedules": self.schedules} if len(self.schedules) else {}
        return {"centres": self.centres, **scheduled}

    def manifest(self) -> dict[str, Any]:
        """Fields for the manifest."""
        scheduled = {"schedule_reach": self.schedule_reach} if len(self.schedules) else {}
        slow: dict[str, Any] = {"slow_kernels": dict(self.slow_kernels)} if self.slow_kernels else {}
        if self.fast_kernels:
            slow["fast_kernels"] = dict(self.fast_kernels)
        if self.host_bound:
            slow["host_bound"] = sorted(self.host_bound)
        contexts = sorted(self.contexts)
        return {"reach": self.reach, "thresholds": list(THRESHOLDS), "contexts": contexts, **scheduled, **slow}

    @classmethod
    def load(cls, tensors: dict[str, Array], manifest: dict[str, Any]) -> Domain:
        """Inverse of :meth:`tensors` and :meth:`manifest`."""
        contexts = frozenset(manifest["contexts"])
        read: dict[str, Any] = {
            "slow_kernels": manifest.get("slow_kernels", {}),
            "fast_kernels": manifest.get("fast_kernels", {}),
            "host_bound": frozenset(manifest.get("host_bound", ())),
        }
        if "schedules" in tensors:
            read |= {"schedules": tensors["schedules"], "schedule_reach": float(manifest["schedule_reach"])}
        return cls(tensors["centres"], float(manifest["reach"]), contexts, **read)

    def slow_factor(self, device: str, operator: str, framework: str) -> float:
        """How many times slower than a fused pass over memory the rows are; 1.0 where there are none.

        Without a framework, that of the framework with the slowest rows.
        """
        return max(_factors(self.slow_kernels, device, operator, framework), default=1.0)

    def fast_share(self, device: str, operator: str, framework: str) -> float:
        """Share of the bound that the rows reach; 1.0 where no row is below it, otherwise as :meth:`slow_factor`."""
        return min(_factors(self.fast_kernels, device, operator, framework), default=1.0)

    def distance(self, points: Array) -> Array:
        """Distance of points (n, columns) to the nearest centre, in units of ``reach``."""
        return _distance(points, self.centres, self.reach)

    def score(self, summary: Array, contexts: Sequence[Context]) -> Array:
        """Domain score of n queries; ``summary``: (n, len(SUMMARY_COLUMNS))."""
        steps = np.array([self.step(c) for c in contexts]) if len(contexts) else np.zeros(0)
        scores: Array = self.program_distance(summary) + steps
        return scores

    def program_distance(self, summary: Array) -> Array:
        """First part of the score, which depends only on the program: :meth:`distance`, at most 10."""
        capped: Array = np.minimum(self.distance(summary[:, _COLUMNS]), _FAR)
        bound = np.flatnonzero(has_gpu_schedule(summary))
        if len(bound):
            distance = _distance(summary[bound][:, _SCHEDULED], self.schedules, self.schedule_reach)
            capped[bound] = np.where(distance <= 1.0, distance, _FAR)
        return capped

    def step(self, context: Context) -> float:
        """Second part of the score: 0 for a context of the training set, more for each new part.

        A new combination of known parts costs :data:`NEAR_STEP`, an operator that training never had
        :data:`OUT_STEP`, each further new part (device, type, protocol, framework) :data:`PART_STEP`.
        """
        exact, operator, *_ = context.keys()
        new = sum(self._new_parts(context).values())
        if operator not in self.contexts:
            return OUT_STEP + PART_STEP * new
        if exact in self.contexts and not new:
            return 0.0
        return NEAR_STEP + PART_STEP * max(new - 1, 0)

    def _new_parts(self, context: Context) -> dict[str, bool]:
        """Whether training never had the device, the type, the protocol, the framework; by the text that says so."""
        _, _, dtype, protocol, launched = context.keys()
        device = f"{context.device}&"
        return {
            "no row of the device": device not in self.contexts,
            f"no {context.dtype} of {context.operator}": dtype not in self.contexts,
            f"no {context.operator} with protocol {context.protocol}": protocol not in self.contexts,
            f"no {context.framework} on {context.device}": bool(context.framework)
            and device in self.contexts
            and launched not in self.contexts,
        }

    def lacking(self, context: Context) -> str:
        """What training lacked of a context, in words; "" where it had the context."""
        exact, operator, *_ = context.keys()
        new = [text for text, is_new in self._new_parts(context).items() if is_new]
        if not context.dtype:  # TIR has its types in its leaves
            new = [text for text in new if not text.startswith("no  of")]
        elif operator not in self.contexts:
            new = [f"no {context.operator}"]
        elif not new and exact not in self.contexts:
            new = [f"no {context.dtype} of {context.operator} with protocol {context.protocol} on {context.device}"]
        return f"training had {', '.join(new)}" if new else ""


def _factors(kernels: Mapping[str, float], device: str, operator: str, framework: str) -> list[float]:
    """Factors of a device's operator under a framework, or under any ("")."""
    if framework:
        factor = kernels.get(f"{device}|{operator}|{framework}")
        return [] if factor is None else [factor]
    return [factor for key, factor in kernels.items() if key.startswith(f"{device}|{operator}|")]


def _centres(points: Array, seed: int, count: int) -> tuple[Array, float]:
    """Centres of points, and the 99th percentile of the distance to them (k-means on a seeded sample)."""
    from sklearn.cluster import MiniBatchKMeans

    points = points.astype(np.float32)
    rng = np.random.default_rng(seed)
    sample = points[rng.choice(len(points), min(len(points), 40_000), replace=False)]
    unseen = int(_UNSEEN * len(sample)) if len(sample) < _ENOUGH * count else 0
    fitted, judged = sample[unseen:], sample[:unseen] if unseen else sample
    means = MiniBatchKMeans(min(count, len(fitted)), random_state=seed, n_init=1, batch_size=4096)
    centres = means.fit(fitted).cluster_centers_.astype(np.float32)
    return centres, float(np.quantile(_distance(judged, centres, 1.0), 0.99))


def _distance(points: Array, centres: Array, reach: float) -> Array:
    """Distance of points to the nearest centre, in units of ``reach``; infinite without centres."""
    out = np.full(len(points), np.inf)
    if not len(centres):
        return out
    centres = centres.astype(np.float64)
    squares = (centres**2).sum(axis=1)
    for start in range(0, len(points), _BLOCK):
        part = points[start : start + _BLOCK].astype(np.float64)
        norms = (part**2).sum(axis=1)[:, None]
        # A matrix product finds candidates for the nearest centre. Its last digits depend on the number of
        # rows, so the candidates are compared again, row by row.
        rough = norms + squares - 2.0 * (part @ centres.T)
        near = rough.min(axis=1, keepdims=True) + 1e-9 * (norms + squares.max(initial=0.0))
        rows, columns = np.nonzero(rough <= near)
        gaps = np.zeros(len(rows))
        for point, centre in zip(part.T, centres.T, strict=True):
            gaps += (point[rows] - centre[columns]) ** 2
        np.minimum.at(out, start + rows, gaps)
    return np.asarray(np.sqrt(out) / max(reach, 1e-9))


def limited_step(distance: Array, step: Array, limited: Array) -> Array:
    """Steps, (n,), which keep the ``limited`` rows (bool) out of "in"; their score is then just above it."""
    min_step = THRESHOLDS[0] + JUST_ABOVE - distance
    return np.where(limited, np.maximum(step, min_step), step)


def label(score: float) -> Label:
    """Label of a score."""
    if score <= THRESHOLDS[0]:
        return "in"
    return "near" if score <= THRESHOLDS[1] else "out"
