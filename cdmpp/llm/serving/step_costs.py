"""Duration of any step of an engine, interpolated from a few hundred predictions.

A step has prefill chunks and decoding sequences. All its tokens pass projections, norms and feed-forward layers
together; each phase has attention kernels of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.engines.profile import EngineProfile
from cdmpp.llm.layout import Layout, Types
from cdmpp.llm.operators import DECODE_PARTS, OUTPUT_PARTS, PREFILL_PARTS, Decode, Only, Prefill, Step, step_operators
from cdmpp.llm.pricing import PricedStep, StepPricing
from cdmpp.model.domain.score import Label
from cdmpp.predict.prediction import Prediction, Query

Array = np.ndarray[Any, np.dtype[np.float64]]
TokenDomain = tuple[str, str, Label | None, float, str | None]


def _powers(maximum: int, *, half: bool = False) -> list[int]:
    """1, 2, 4, ... up to ``maximum``, which is the last; ``half``: with the values between."""
    grid = {1, maximum}
    size = 2
    while size < maximum:
        grid |= {size, size * 3 // 2} if half and size * 3 // 2 < maximum else {size}
        size *= 2
    return sorted(grid)


@dataclass(frozen=True)
class _Point:
    """A step that is priced, and the parts of it that count: attention, output, or the others."""

    pricing: StepPricing
    kind: str


class StepCosts:
    """Queries for the tables of an engine's steps, and the tables made of their predictions.

    ``sequences``, ``tokens``, ``cached``: most sequences of a step of one replica, new tokens of a step, and cached
    tokens of a sequence. ``drafted``: further tokens of each decoding sequence, which were drafted and are checked.
    ``cuda_graph``: whether decode steps may be captured graphs.
    """

    def __init__(
        self,
        config: LLMConfig,
        layout: Layout,
        types: Types,
        device: DeviceSpec,
        engine: EngineProfile,
        *,
        sequences: int,
        tokens: int,
        cached: int,
        drafted: int = 0,
        cuda_graph: bool = True,
    ) -> None:
        self._engine, self._layout, self._drafted = engine, layout, drafted

        def pricing(step: Step, only: Only | None = None) -> StepPricing:
            parts = step_operators(config, layout, step, **types.stated(), device=device, only=only)
            return StepPricing.of_step(engine, step, layout, parts, cuda_graph)

        dp = layout.dp
        self._batches = np.array(_powers(sequences, half=True), dtype=np.float64)
        self._tokens = np.array(_powers(tokens, half=True), dtype=np.float64)
        self._chunks = np.array([n for n in _powers(tokens) if n == 1 or n >= 16 or n == tokens], dtype=np.float64)
        self._cached = np.array(
            [0, *(n for n in _powers(max(cached, 2)) if n >= 256 or n == max(cached, 2))], dtype=np.float64
        )
        half = int(self._cached[-1]) // 2

        def decode(batch: float, past: float) -> Decode:
            return Decode(int(batch) * dp, int(past), drafted=drafted)

        self._points = [
            *(_Point(pricing(decode(n, half)), "rest") for n in self._batches),
            *(_Point(pricing(decode(n, k)), "attention") for n in self._batches for k in self._cached),
            *(_Point(pricing(Prefill([int(t)] * dp)), "prefill") for t in self._tokens),
            *(_Point(pricing(Prefill([1] * (int(n) * (1 + drafted) * dp))), "output") for n in self._batches),
            *(_Point(pricing(Prefill([int(p)] * dp, int(k))), "chunk") for p in self._chunks for k in self._cached),
            *(_Point(pricing(decode(n, half), "drafts"), "drafts") for n in self._batches if drafted),
        ]
        self._own = [self._kept(point) for point in self._points]
        #: Parts of all steps.
        self.parts = [part for pricing in self._own for part in pricing.parts]
        self.queries: list[Query] = [query for costs in self._own for query in costs.queries(device)]

    def _kept(self, point: _Point) -> StepPricing:
        """The part of a step that a table needs."""
        attention = {*PREFILL_PARTS, *DECODE_PARTS}
        chosen, excluded = {
            "rest": (None, attention),
            "attention": (DECODE_PARTS, ()),
            "prefill": (None, {*attention, *OUTPUT_PARTS}),
            "output": (OUTPUT_PARTS, ()),
            "chunk": (PREFILL_PARTS, ()),
            "drafts": (None, ()),
        }[point.kind]

        def wanted(name: str) -> bool:
            return name not in excluded and (chosen is None or name in chosen)

        return replace(point.pricing, parts=[part for part in point.pricing.parts if wanted(part.name)])

    def tables(self, predictions: Iterable[Prediction]) -> StepTables:
        """The tables made of the predictions of :attr:`queries`."""
        remaining = iter(predictions)
        steps = [pricing.priced([next(remaining) for _ in pricing.programs]) for pricing in self._own]
        steps_of: dict[str, list[PricedStep]] = {}
        for point, step in zip(self._points, steps, strict=True):
            steps_of.setdefault(point.kind, []).append(step)
        grids = {"attention": (len(self._batches), -1), "chunk": (len(self._chunks), -1)}
        # A small step takes no longer than a larger one, to whose size an engine could pad it.
        seconds: dict[str, Any] = {"drafts": np.zeros(len(self._batches))} | {
            kind: _growing(np.array([step.seconds[0].sum() for step in kept]).reshape(grids.get(kind, (-1,))))
            for kind, kept in steps_of.items()
        }
        # Bounds of decode steps stand for those of all durations.
        middle = len(self._batches) // 2
        decode = steps_of["rest"][middle], steps_of["attention"][middle * len(self._cached)]
        prompt = (steps_of[kind][-1] for kind in ("prefill", "output", "chunk"))
        domains = _domains("decode", decode, self._batches[middle])
        return StepTables(
            **seconds,
            engine=self._engine,
            layout=self._layout,
            drafted=self._drafted,
            batches=self._batches,
            tokens=self._tokens,
            chunks=self._chunks,
            cached=self._cached,
            launches=max(step.pricing.launches for step in steps_of["prefill"]),
            decode_launches=sum(steps_of[kind][0].pricing.launches for kind in ("rest", "attention")),
            eager_s=steps_of["prefill"][0].pricing.eager_s,
            kinds=decode[0].kinds() + decode[1].kinds(),
            domains=domains + _domains("prefill", prompt, self._tokens[-1]),
        )


def _domains(phase: str, steps: Iterable[PricedStep], tokens: float) -> list[TokenDomain]:
    return [
        (phase, part.name, p.domain, float(seconds) / tokens, p.domain_reason)
        for step in steps
        for part, p, seconds in zip(step.parts, step.predictions, step.seconds[0], strict=True)
    ]


def _growing(values: Array) -> Array:
    """No value above one that follows on any axis."""
    for axis in range(values.ndim):
        values = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
    return values


@dataclass(frozen=True)
class StepTables:
    """Seconds of steps by their composition; all but the host's time is interpolated linearly."""

    engine: EngineProfile
    layout: Layout
    drafted: int
    batches: Array
    tokens: Array
    chunks: Array
    cached: Array
    rest: Array
    attention: Array
    prefill: Array
    output: Array
    chunk: Array
    drafts: Array
    launches: int
    decode_launches: int
    eager_s: float
    # (4, kinds): seconds by kind of a decode step in the middle of the tables (:func:`cdmpp.llm.pricing.combined`)
    kinds: Array
    # Phase, name, domain, seconds a token and reason of the parts of that step and of a step of prompts.
    domains: list[TokenDomain]
    scale: float = 1.0

    @cached_property
    def launched_s(self) -> float:
        """Seconds in which the host launches the kernels of a step with prompts."""
        return 0.0 if self.engine.graph_prefill else self.launches * self.engine.host.launch_s

    @cached_property
    def decode_launched_s(self) -> float:
        """The same of a decode step."""
        return self.decode_launches * self.engine.host.launch_s

    def scaled(self, factor: float) -> StepTables:
        """The tables of steps that take ``factor`` times as long."""
        return replace(self, scale=factor)

    @cached_property
    def _decode_row(self) -> Callable[[int], tuple[float, Array]]:
        return lru_cache(4096)(self._row)

    def _row(self, sequences: int) -> tuple[float, Array]:
        """Seconds of a decode step beside its attention, host included, and of the attention by cached tokens."""
        at = float(min(max(sequences, self.batches[0]), self.batches[-1]))
        high = int(np.searchsorted(self.batches, at))
        if high == 0:
            attention = self.attention[0]
        else:
            low = high - 1
            share = (at - self.batches[low]) / (self.batches[high] - self.batches[low])
            attention = (1 - share) * self.attention[low] + share * self.attention[high]
        return float(np.interp(at, self.batches, self.rest)), attention

    def decode_kernels_s(self, sequences: int, cached: Array) -> Array:
        """Kernels of decode steps of ``sequences`` behind ``cached`` tokens each, on average; (steps,)."""
        rest, attention = self._decode_row(sequences)
        return np.asarray(rest + np.interp(cached, self.cached, attention))

    def decode_s(self, kernels_s: Array, sequences: int) -> Array:
        """Seconds of decode steps of ``sequences`` with such kernels; (steps,)."""
        return self._with_host(np.maximum(kernels_s, self.decode_launched_s), sequences)

    def mixed_s(self, kernels_s: float, sequences: int) -> float:
        """Seconds of a step with prompts, of ``sequences`` with them, with such kernels."""
        seconds = np.array(max(kernels_s, self.launched_s) + self.eager_s)
        return float(self._with_host(seconds, sequences))

    def mixed_kernels_s(self, chunks: Sequence[tuple[int, int]], sequences: int, cached: float) -> float:
        """Kernels of a step with prompts, in seconds.

        ``chunks``: new and cached tokens of each prompt. ``sequences``: decoding ones, with ``cached`` tokens on
        average.
        """
        tokens_per_sequence = 1 + self.drafted
        tokens = sequences * tokens_per_sequence + sum(new for new, _ in chunks)
        seconds = float(np.interp(tokens, self.tokens, self.prefill))
        seconds += float(
            np.interp(sequences * tokens_per_sequence + len(chunks), self.batches * tokens_per_sequence, self.output)
        )
        # One call takes all chunks: its fixed cost counts once.
        fixed = float(self.chunk[0, 0])
        seconds += fixed + sum(self._chunk_s(new, past) - fixed for new, past in chunks)
        if sequences:
            seconds += float(np.interp(cached, self.cached, self._decode_row(sequences)[1]))
            seconds += float(np.interp(sequences, self.batches, self.drafts))
        return seconds

    def _chunk_s(self, new: int, past: int) -> float:
        at = int(np.searchsorted(self.chunks, new))
        if at == 0 or at == len(self.chunks):
            row = self.chunk[min(at, len(self.chunks) - 1)]
            return float(np.interp(past, self.cached, row))
        low, high = self.chunks[at - 1], self.chunks[at]
        share = (new - low) / (high - low)
        below, above = (float(np.interp(past, self.cached, self.chunk[i])) for i in (at - 1, at))
        return float((1 - share) * below + share * above)

    def _with_host(self, device_s: Array, sequences: int) -> Array:
        host = self.engine.host
        host_s = host.step(sequences, self.layout.tp, self.layout.dp)
        return np.asarray(self.scale * (np.maximum(device_s, host_s) if host.overlapped else device_s + host_s))
