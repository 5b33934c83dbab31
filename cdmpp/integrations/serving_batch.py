"""Seconds of the parts of one engine step, for simulators whose batches mix prefill chunks and decoding sequences."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError
from cdmpp.llm import Decode, Layout, LLMConfig, Prefill, StepPart, step_operators
from cdmpp.llm.engines.profile import KERNELS_ONLY, Engine, load_engine
from cdmpp.llm.estimate_plan import resolved_device, shipped_predictor
from cdmpp.llm.operators import DECODE_PARTS, PREFILL_PARTS, padded_sizes, with_padding
from cdmpp.llm.pricing import PricedStep, StepPricing
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import check_settings
from cdmpp.programs.operators import OperatorSpec
from cdmpp.programs.query_options import DEFAULT_PROTOCOL

#: Batches whose seconds are kept.
_KEPT = 4096


@dataclass(frozen=True)
class EngineBatch:
    """One batch of an engine."""

    # New and cached tokens of each sequence that processes a prompt or a chunk of one.
    prefills: tuple[tuple[int, int], ...] = ()
    decodes: tuple[int, ...] = ()  # cached tokens of each sequence that adds one token

    def __post_init__(self) -> None:
        if not self.prefills and not self.decodes:
            raise FieldError("batch: it has no sequences", path="batch", hint="give at least one request")
        if any(new < 1 or past < 0 for new, past in self.prefills) or any(past < 0 for past in self.decodes):
            raise FieldError(
                "batch: a sequence has no new token, or fewer than 0 cached tokens",
                path="batch",
                hint="each sequence has at least one new token",
            )


class StepPricer:
    """Seconds of the parts of batches.

    ``dtype``, ``weights`` and ``kv_dtype`` are those of :func:`cdmpp.llm.step_operators`. ``engine``: what the engine
    adds to its kernels; by default nothing but launches, for simulators that model the host. ``framework`` has the
    kernels of a profile that names none; default: vllm. ``cuda_graph``: whether batches without a prefill are captured
    graphs. ``predictor`` is by default the shipped model, loaded once.

    ``price`` makes of an :class:`EngineBatch` its :class:`cdmpp.llm.pricing.PricedStep`; the last results are kept.
    Parts of the attention have names that end in ``_prefill`` or ``_decode``.
    """

    def __init__(
        self,
        config: LLMConfig,
        layout: Layout,
        device: DeviceSpec | str,
        *,
        dtype: str = "bfloat16",
        weights: str | None = None,
        kv_dtype: str | None = None,
        engine: Engine = KERNELS_ONLY,
        framework: str | None = None,
        cuda_graph: bool = True,
        predictor: Predictor | None = None,
    ) -> None:
        layout.check(config)
        self._engine = load_engine(engine, framework)
        assert self._engine.framework is not None
        check_settings(DEFAULT_PROTOCOL, self._engine.framework)
        self._predictor = shipped_predictor() if predictor is None else predictor
        self.device = resolved_device(device, self._predictor)
        self.config, self.layout, self._cuda_graph = config, layout, cuda_graph
        self._types = {"dtype": dtype, "weights": weights, "kv_dtype": kv_dtype, "device": self.device}
        self.price = lru_cache(_KEPT)(self._price)

    def _price(self, batch: EngineBatch) -> PricedStep:
        parts = self.parts(batch)
        if not batch.prefills:
            mean = round(sum(batch.decodes) / len(batch.decodes))
            more = [n - len(batch.decodes) for n in padded_sizes(len(batch.decodes))]
            parts = with_padding(parts, [self.parts(EngineBatch((), (*batch.decodes, *[mean] * n))) for n in more])
        step = StepPricing.of(
            self._engine,
            parts,
            decode=not batch.prefills,
            sequences=len(batch.prefills) + len(batch.decodes),
            ranks=self.layout.tp,
            cuda_graph=self._cuda_graph,
        )
        return step.priced(self._predictor.predict_queries(step.queries(self.device)))

    def parts(self, batch: EngineBatch) -> list[StepPart]:
        """Operators and collectives of a batch, as one rank runs them.

        All tokens pass projections, norms and feed-forward layers together. Prefill and decode have separate
        attention kernels. With several replicas of the attention, the batch is that of one of them.
        """
        replicas = self.layout.dp
        new = [tokens for tokens, _ in batch.prefills for _ in range(replicas)]
        decodes = len(batch.decodes) * replicas
        every = self._step(Prefill([*new, *[1] * decodes]))
        parts = {*PREFILL_PARTS, *DECODE_PARTS}
        place = next(i for i, part in enumerate(every) if part.name in parts)
        attention = []
        if new:
            attention += [self._chunk(part, batch) for part in self._step(Prefill(new)) if part.name in PREFILL_PARTS]
        if decodes:
            step = Decode(decodes, past_total=sum(batch.decodes) * replicas)
            attention += [replace(p, name=f"{p.name}_decode") for p in self._step(step) if p.name in DECODE_PARTS]
        return [*every[:place], *attention, *(part for part in every[place:] if part.name not in parts)]

    def _step(self, step: Prefill | Decode) -> list[StepPart]:
        return step_operators(self.config, self.layout, step, **self._types)  # type: ignore[arg-type]

    def _chunk(self, part: StepPart, batch: EngineBatch) -> StepPart:
        """A part of the prefill attention, with the cached tokens in front of the chunks."""
        new, past = np.array(batch.prefills, dtype=np.float64).T
        part = replace(part, name=f"{part.name}_prefill")
        if not past.any():
            return part
        if part.name == "kv_b_proj_prefill":  # cached latents are expanded, too
            return replace(part, program=with_fields(part.program, m=int((new + past).sum())))
        fields = part.program.model_dump()
        if fields["past_len"]:  # blocks of a window, which already has its keys
            return part
        # As many query-key pairs as the chunks have.
        rows, length = fields["batch"], fields["q_len"]
        pairs = float((new * (past + (new + 1) / 2)).sum())
        cached = max(0, round(pairs / (rows * length) - (length + 1) / 2))
        if part.name.startswith("window") and self.config.window is not None:
            cached = min(cached, max(0, self.config.window - length // 2))
        return replace(part, program=with_fields(part.program, past_len=cached))


def with_fields(program: OperatorSpec, **fields: object) -> OperatorSpec:
    """An operator with other fields."""
    return type(program).model_validate({**program.model_dump(), **fields})


def attribute(value: object, name: str, owner: str) -> object:
    """Attribute of an object of a simulator. Raises FieldError: the object lacks it."""
    try:
        return getattr(value, name)
    except AttributeError:
        raise FieldError(
            f"{owner}: a {type(value).__name__} has no attribute {name}",
            path=owner,
            hint="docs/integrations.md lists the attributes that are read",
        ) from None


def whole(value: object, name: str, owner: str) -> int:
    """A whole-number attribute of an object of a simulator; raises :class:`FieldError` for any other value."""
    number = attribute(value, name, owner)
    if isinstance(number, bool) or not isinstance(number, int | np.integer):
        raise FieldError(f"{owner}.{name}: {number!r} is not a whole number", path=owner, hint="pass an int")
    return int(number)


def per_request(values: Sequence[int], requests: Sequence[object]) -> list[tuple[int, object]]:
    """Tokens and request pairs of a batch; raises :class:`FieldError` where their numbers differ."""
    if len(values) != len(requests):
        raise FieldError(
            f"batch.num_tokens: {len(values)} entries for {len(requests)} requests",
            path="batch.num_tokens",
            hint="one number per request",
        )
    return list(zip(values, requests, strict=True))
