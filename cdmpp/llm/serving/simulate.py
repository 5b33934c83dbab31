"""Requests to a language model that is served.

The loop is in :mod:`cdmpp.llm.serving.loop`, a step's duration comes from :mod:`cdmpp.llm.serving.step_costs`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import islice
from math import inf
from typing import Any, Unpack

import numpy as np

from cdmpp.devices.paths import with_network
from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.llm.config import ConfigLike, LLMConfig
from cdmpp.llm.engines.profile import Engine, EngineProfile, load_engine
from cdmpp.llm.estimate_plan import resolved, resolved_device, tokens_per_step
from cdmpp.llm.layout import Layout, Types
from cdmpp.llm.memory import check_cache, part_memory
from cdmpp.llm.options import (
    MAX_BATCH,
    MAX_RATE,
    MAX_REQUESTS,
    MAX_TOKENS,
    MIN_RATE,
    ServingOptions,
    check_whole,
    with_options,
)
from cdmpp.llm.pricing import combined, place_of, stand_ins, widened
from cdmpp.llm.serving.loop import (
    SECONDS_PER_WORK,
    STEP_WORK,
    Replica,
    ServedRequest,
    WorkLimit,
    closed_loop,
    open_loop,
    two_pools,
)
from cdmpp.llm.serving.step_costs import StepCosts, StepTables
from cdmpp.model.domain.score import TotalDomain
from cdmpp.predict.interface import Predictor
from cdmpp.predict.prediction import Device, Prediction
from cdmpp.predict.rendering import Rendered, Table, interval_text, percent
from cdmpp.programs.collectives import link_remarks
from cdmpp.utils.units import format_latency

Array = np.ndarray[Any, np.dtype[np.float64]]
#: Runs of the loop: with steps of the predicted, the lower and the upper duration.
RUNS = 3
#: Spread of lengths that parts requests which begin together.
SPREAD = 0.05
LOCKSTEP = (
    "all prompts and answers have the same length and prompts run alone: requests stay together, in waves; a spread of "
    "lengths parts them, with first tokens several times as early"
)
#: Bytes per second and device between two pools, where nothing is stated: 400 Gbit/s.
NETWORK_BYTES_PER_S = 50e9


@dataclass(frozen=True)
class ServingResult(Rendered):
    """Requests that were served, in their order."""

    ttft_s: Array  # (requests,): from arrival to the first token
    tpot_s: Array  # (requests with two or more tokens,): mean time between tokens; requests of one token are left out
    latency_s: Array  # (requests,): from arrival to the last token
    queue_s: Array  # (requests,): from the front end to the first step of the prompt
    output: Array  # (requests,): tokens of each answer
    warmup: int  # requests at the beginning that means and percentiles leave out
    single_token: int  # number of requests of one token
    duration_s: float  # from the first arrival to the last token
    output_tokens: int
    steps: int
    preemptions: int
    cache_share: float  # largest share of the cache in use
    gpus: int
    # 80 % interval of a step's duration, as factors of it.
    relative_lower: float
    relative_upper: float
    # 80 % intervals of the means of ``ttft_s``, ``tpot_s`` and ``latency_s``, and of ``throughput_tokens_per_s``:
    # those of the same requests with steps of the lower and of the upper duration. Empty without such runs.
    bounds: dict[str, tuple[float, float]]
    total_domain: TotalDomain  # by share of the time of all tokens
    engine: str
    device: str
    model_id: str
    remarks: tuple[str, ...] = ()  # what was assumed

    def tables(self) -> list[Table]:
        """Percentiles and rates as a row."""
        return serving_tables([self])

    def measured(self, name: str) -> Array:
        """``ttft_s``, ``tpot_s``, ``latency_s`` or ``queue_s`` in seconds, of the requests after the warm-up."""
        if name not in SEQUENCES:
            raise FieldError.at("name", f"{str(name)[:40]!r} is not known", hint="one of " + ", ".join(SEQUENCES))
        values: Array = getattr(self, name)
        several = self.output[: self.warmup] > 1
        return values[int(several.sum()) if name == "tpot_s" else self.warmup :]

    def percentile(self, name: str, q: float) -> float:
        """Percentile ``q``, from 0 to 100, of :meth:`measured`; an error where all requests have one token."""
        values = self.measured(name)
        if not 0 <= q <= 100:
            raise FieldError.at("q", f"{q} is not a percentage", hint="from 0 to 100")
        if not len(values):
            raise FieldError("tpot_s: all requests have one token", path="name", hint="ask for another sequence")
        return float(np.percentile(values, q))

    @property
    def throughput_tokens_per_s(self) -> float:
        """Output tokens of all requests over :attr:`duration_s`."""
        return self.output_tokens / self.duration_s

    def to_dict(self) -> dict[str, Any]:
        """Means and percentiles as JSON values."""
        lower, upper = self.bounds.get("throughput_tokens_per_s", (None, None))
        return {
            "model_id": self.model_id,
            "device": self.device,
            "engine": self.engine,
            "gpus": self.gpus,
            "requests": len(self.ttft_s),
            "warmup_requests": self.warmup,
            "warmup_ttft_s": _spread(self.ttft_s[: self.warmup]),
            **{name: _spread(self.measured(name), self.bounds.get(name)) for name in SEQUENCES},
            "single_token": self.single_token,
            "duration_s": self.duration_s,
            "requests_per_s": len(self.ttft_s) / self.duration_s,
            "throughput_tokens_per_s": self.throughput_tokens_per_s,
            "throughput_lower_tokens_per_s": lower,
            "throughput_upper_tokens_per_s": upper,
            "throughput_tokens_per_s_per_gpu": self.throughput_tokens_per_s / self.gpus,
            "steps": self.steps,
            "preemptions": self.preemptions,
            "cache_share": self.cache_share,
            "relative_lower": self.relative_lower,
            "relative_upper": self.relative_upper,
            "domain": self.total_domain.label,
            "domain_reason": f"engine {self.engine}; {self.total_domain.reason or 'all kernels in'}",
            "domain_shares": self.total_domain.shares,
            "remarks": list(self.remarks),
        }


def _spread(values: Array, bounds: tuple[float, float] | None = None) -> dict[str, float] | None:
    """Mean, its bounds and percentiles; None of nothing."""
    if not len(values):
        return None
    known = {} if bounds is None else {"mean_lower": bounds[0], "mean_upper": bounds[1]}
    return {"mean": float(values.mean())} | known | {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}


SEQUENCES = ("ttft_s", "tpot_s", "latency_s", "queue_s")
#: Of them, those with intervals.
BOUNDED = SEQUENCES[:3]


def serving_tables(results: Sequence[ServingResult]) -> list[Table]:
    """Requests that were served on devices, a row each."""
    first = results[0]
    rows = [
        (
            r.device,
            str(r.gpus),
            *(format_latency(r.percentile("ttft_s", q)) for q in (50, 99)),
            *((format_latency(r.percentile("tpot_s", q)) if len(r.measured("tpot_s")) else "-") for q in (50, 99)),
            format_latency(float(r.measured("queue_s").mean())),
            f"{r.throughput_tokens_per_s:,.0f}",
            f"{len(r.ttft_s) / r.duration_s:.3g}",
            percent(r.cache_share),
            str(r.preemptions),
        )
        for r in results
    ]
    header = ("device", "gpus", "ttft p50", "p99", "tpot p50", "p99", "queue", "tokens/s", "requests/s", "cache")
    title = f"{len(first.ttft_s):,} requests; engine {first.engine}; model {first.model_id}"
    bounds = "; ".join(f"{r.device}: {_bounds_text(r)}" for r in results)
    first_s = ", ".join(f"{r.device} {format_latency(float(r.ttft_s[: r.warmup].max()))}" for r in results if r.warmup)
    notes = [f"warm-up: the first {first.warmup:,} requests, left out; largest ttft: {first_s}"] if first_s else []
    notes += dict.fromkeys(remark for r in results for remark in r.remarks)
    return [
        Table((*header, "preempted"), rows, range(1, len(header) + 1), title),
        Table.lines(f"80 % interval of means, and domain: {bounds}", *notes),
    ]


def _bounds_text(result: ServingResult) -> str:
    names = {"ttft_s": "ttft", "tpot_s": "tpot", "latency_s": "latency"}
    texts = [f"{text} {interval_text(*result.bounds[name])}" for name, text in names.items() if name in result.bounds]
    if rates := result.bounds.get("throughput_tokens_per_s"):
        texts.append("tokens/s {:,.0f} – {:,.0f}".format(*rates))
    return ", ".join([*texts, result.total_domain.label])


@dataclass(frozen=True)
class PrefillPool:
    """Devices that compute the prompts, beside those that decode (disaggregated serving)."""

    layout: Layout
    device: DeviceSpec | None = None  # None: the device that decodes
    bytes_per_s: float = NETWORK_BYTES_PER_S  # rate at which a device sends its part of a cache

    @classmethod
    def of(cls, value: PrefillPool | Mapping[str, Any]) -> PrefillPool:
        """From the fields ``tp``, ``pp``, ``ep``, ``dp``, ``device`` (a specification) and ``bytes_per_s``."""
        if isinstance(value, PrefillPool):
            return value
        known = ("tp", "pp", "ep", "dp", "device", "bytes_per_s")
        unknown = sorted(set(value) - set(known)) if isinstance(value, Mapping) else [str(value)[:40]]
        if unknown:
            raise FieldError.at("prefill_pool", f"{unknown[0]!r} is not known", hint="fields: " + ", ".join(known))
        speed = value.get("bytes_per_s", NETWORK_BYTES_PER_S)
        if isinstance(speed, bool) or not isinstance(speed, int | float) or not 1e6 <= speed <= 1e14:
            raise FieldError.not_allowed(
                "prefill_pool.bytes_per_s", speed, hint="bytes per second of each device, such as 50e9"
            )
        degrees = {name: value.get(name, 1) for name in ("tp", "pp", "ep")}
        return cls(Layout(**degrees, dp=value.get("dp")), value.get("device"), float(speed))


@dataclass(frozen=True)
class _Pool:
    """Replicas of one layout that share the requests."""

    layout: Layout
    profile: EngineProfile
    costs: StepCosts
    max_sequences: int  # sequences of a step of a replica
    budget: int  # new tokens of a step of a replica
    capacity: float  # tokens of the cache of a replica
    cache_bytes: float  # of a token, on the fullest device

    @classmethod
    def of(
        cls,
        config: LLMConfig,
        layout: Layout,
        types: Types,
        device: DeviceSpec,
        profile: EngineProfile,
        in_flight: int,
        prompts: int,
        tokens: int,
        mtp: int,
        cuda_graph: bool,
    ) -> _Pool:
        """A pool for requests with prompts of up to ``prompts`` tokens, and up to ``tokens`` in all."""
        layout.check(config)
        capacity = check_cache(config, layout, types, device, profile.cache_share, tokens)
        most_sequences = max(1, min(profile.max_sequences, -(-in_flight // (layout.dp * layout.pp))))
        budget = profile.token_budget or prompts
        widest = max(budget, most_sequences * (1 + mtp) + 1)
        costs = StepCosts(
            config,
            layout,
            types,
            device,
            profile,
            sequences=most_sequences,
            tokens=widest,
            cached=tokens,
            drafted=mtp,
            cuda_graph=cuda_graph,
        )
        cache_bytes = part_memory(config, layout, types, None, tokens)[1] / tokens
        return cls(layout, profile, costs, most_sequences, budget, capacity, cache_bytes)

    def slots(self, tokens: int) -> int:
        """Requests of ``tokens`` that run at once."""
        most_sequences = min(float(self.profile.max_sequences), self.capacity // tokens)
        return int(most_sequences) * self.layout.dp * self.layout.pp

    def replicas(
        self, tables: StepTables, hit: float, made: float, mtp: int, count: int, effort: WorkLimit
    ) -> list[Replica]:
        """A lane for each replica, and for each batch that passes its stages; no more than there are requests."""
        first, ahead = self.profile.prefill_first, self.profile.schedules_ahead
        return [
            Replica(tables, self.budget, self.max_sequences, self.capacity, first, hit, made, 1 + mtp, effort, ahead)
            for _ in range(min(count, self.layout.dp * self.layout.pp))
        ]


class ServingPlan:
    """Queries of a simulation, and the simulation made of their predictions.

    Options and errors are those of :func:`simulate`; ``config`` and ``device`` are read already. ``most_work`` bounds
    the work of each run of the loop (:class:`cdmpp.llm.serving.loop.WorkLimit`).
    """

    @with_options(ServingOptions)
    def __init__(
        self,
        config: LLMConfig,
        device: DeviceSpec,
        *,
        engine: Engine | None = None,
        network: float | str | None = None,
        requests: Iterable[Sequence[float]] | None = None,
        prefill_pool: PrefillPool | Mapping[str, Any] | None = None,
        most_work: float = inf,
        **options: Unpack[ServingOptions],
    ) -> None:
        concurrency, prefix_hit, spread = options["concurrency"], options["prefix_hit"], options["spread"]
        self._most_work = most_work
        self._mtp, self._made = options["mtp"], tokens_per_step(options["mtp"], options["acceptance"])
        profile, device = load_engine(engine, options["framework"]), with_network(device, network)
        self._profile, self._device = profile, device
        self._remarks: list[str] = []
        in_step = profile.prefill_first and not spread and (concurrency or 0) > 1
        # Whether the lengths are equal is assumed, not stated: bounds contain requests that part.
        parted = in_step and spread is None and config.prompt_only is None
        if spread is None:
            spread = 0.0 if concurrency is None or profile.prefill_first else SPREAD
        if in_step:
            self._remarks.append(LOCKSTEP)
        for name, value in (("prefix_hit", prefix_hit), ("spread", spread)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise FieldError.not_allowed(name, value, hint="from 0 to below 1")
        self._hit, self._clients, self._rate = prefix_hit, concurrency, options["rate"]
        self._requests = _requests(requests, options, spread)
        self._parted = _requests(requests, options, SPREAD) if parted else None
        if config.prompt_only is not None:  # as in an estimate: no output tokens
            self._requests = [(arrival, prompt, 1) for arrival, prompt, _ in self._requests]
        #: Requests at the beginning that means and percentiles leave out.
        self.warmup = self._checked_warmup(options["warmup"])
        #: Tokens of all prompts and answers.
        self.tokens = sum(prompt + answer for _, prompt, answer in self._requests)
        prompts = max(prompt for _, prompt, _ in self._requests)
        longest = max(prompt + answer for _, prompt, answer in self._requests)
        self.longest_output = max(answer for *_, answer in self._requests)
        in_flight = len(self._requests) if concurrency is None else concurrency
        layout = Layout.of(options)
        # Steps of prompts; each request ends in a step of its own, beside the others of its replica.
        prefill = STEP_WORK * (1 - prefix_hit) * sum(r[1] for r in self._requests) / (profile.token_budget or prompts)
        WorkLimit(most_work).spend(prefill)
        layout.check(config)
        beside = min(profile.max_sequences, in_flight / (layout.dp * layout.pp))
        #: Predicted seconds of :meth:`run`.
        self.seconds = (RUNS + parted) * SECONDS_PER_WORK * (prefill + len(self._requests) * (STEP_WORK + beside))

        def pool(layout: Layout, device: DeviceSpec, tokens: int, mtp: int) -> _Pool:
            types = Types.of_options(config, options, device, profile.kv_dtype)
            graph = options["cuda_graph"]
            made = _Pool.of(config, layout, types, device, profile, in_flight, prompts, tokens, mtp, graph)
            self._remarks += link_remarks((query.program.operator for query in made.costs.queries), device)
            return made

        self.layout = layout
        self._pools = [pool(layout, device, longest, self._mtp)]
        self._token_s = 0.0
        if prefill_pool is not None:
            other = PrefillPool.of(prefill_pool)
            try:
                self._pools.insert(0, pool(other.layout, with_network(other.device or device, network), prompts + 1, 0))
            except InfeasibleError as error:
                raise InfeasibleError(f"prefill_pool: {error.message}", hint=error.hint) from None
            # Each rank of the fuller side sends or receives its part.
            self._token_s = max(member.cache_bytes for member in self._pools) / other.bytes_per_s
        #: Requests that decode at once, at most.
        self.slots = self._pools[-1].slots(longest)
        self.gpus = sum(member.layout.gpus for member in self._pools)
        self.queries = [query for member in self._pools for query in member.costs.queries]
        types = Types.of_options(config, options, device, profile.kv_dtype)
        known = {"tokens": longest} | ({} if concurrency is None else {"batch": concurrency})
        #: By what profiles know a measured request.
        self.place = place_of(config, device, layout, types, **known)
        self._profile, label, reason = profile.at(self.place, *stand_ins(self._pools[-1].costs.parts))
        self._domain = label, reason

    def _checked_warmup(self, warmup: int | None) -> int:
        """The number of requests at the beginning that are left out."""
        count = len(self._requests)
        if warmup is not None:
            if type(warmup) is not int or not 0 <= warmup < count:
                raise FieldError.not_allowed(
                    "warmup", warmup, hint=f"a whole number below the {count:,} requests, such as 0"
                )
            return warmup
        if self._clients is None or self._clients < count:
            return self._clients or 0
        self._remarks.append(f"no warm-up is left out: {count:,} requests, {self._clients:,} in flight")
        return 0

    def run(self, model_id: str, predictions: Iterable[Prediction]) -> ServingResult:
        """Simulate with the predictions of :attr:`queries`, with intervals."""
        return self.bounded(model_id, self.tables(predictions))

    def bounded(self, model_id: str, tables: Sequence[StepTables], rate: float | None = None) -> ServingResult:
        """:meth:`serve`, and again with steps of the lower and of the upper duration."""
        result = self.serve(model_id, tables, rate)
        factors = (1.0, result.relative_lower, result.relative_upper)
        runs = [result, *(self.serve(model_id, [table.scaled(f) for table in tables], rate) for f in factors[1:])]
        parted = []
        if self._parted is not None:
            other = copy(self)
            other._requests = self._parted
            parted = [other.serve(model_id, tables, rate)]
        bounds: dict[str, tuple[float, float]] = {}
        for name in BOUNDED:
            if not len(result.measured(name)):
                continue
            means = np.array([float(run.measured(name).mean()) for run in (*runs, *parted)])
            first_residual = self._profile.first_residual if name == "ttft_s" else 0.0
            _, lower, upper = widened(np.array([means[0], means.min(), means.max()]), first_residual)
            bounds[name] = float(lower), float(upper)
        rates = [run.throughput_tokens_per_s for run in runs]
        return replace(result, bounds={**bounds, "throughput_tokens_per_s": (min(rates), max(rates))})

    def tables(self, predictions: Iterable[Prediction]) -> list[StepTables]:
        """Step costs of the pools, made of the predictions of :attr:`queries`."""
        remaining = iter(predictions)
        return [pool.costs.tables(islice(remaining, len(pool.costs.queries))) for pool in self._pools]

    def serve_requests(
        self, tables: Sequence[StepTables], rate: float | None = None, *, log: bool = False
    ) -> tuple[list[ServedRequest], list[list[Replica]]]:
        """Requests with their times, and the replicas of each pool, which log their steps with ``log``."""
        loop = self._hit, self._made, self._mtp, len(self._requests), WorkLimit(self._most_work)
        pools = [pool.replicas(table, *loop) for pool, table in zip(self._pools, tables, strict=True)]
        for lane in (lane for replicas in pools for lane in replicas if log):
            lane.log = []
        scale = 1.0 if rate is None or self._rate is None else self._rate / rate
        frontend_s = self._profile.host.frontend_s
        requests = [
            ServedRequest(i, scale * at, prompt, answer, ready_s=scale * at + frontend_s)
            for i, (at, prompt, answer) in enumerate(self._requests)
        ]
        if len(pools) == 2:
            two_pools(pools[0], pools[1], requests, self._clients, self._token_s, frontend_s)
        elif self._clients is None:
            open_loop(pools[0], requests)
        else:
            closed_loop(pools[0], requests, self._clients, frontend_s)
        return requests, pools

    def serve(self, model_id: str, tables: Sequence[StepTables], rate: float | None = None) -> ServingResult:
        """Simulate with step costs; ``rate`` replaces the plan's, and infinite means that all arrive together."""
        requests, pools = self.serve_requests(tables, rate)
        first = np.array([r.first_s - r.arrival_s for r in requests])
        latency = np.array([r.done_s - r.arrival_s for r in requests])
        several = np.array([r.output > 1 for r in requests])
        after = np.array([r.output - 1 for r in requests])[several]
        point, lower, upper = combined(tables[-1].kinds, self._profile.residual)
        # Prompts are computed by the first pool, the other tokens by the last one.
        tokens = {"prefill": sum(r[1] for r in self._requests), "decode": sum(r[2] for r in self._requests)}
        domains = [
            (f"{name} of {phase}", label, tokens[phase] * token_s, reason)
            for pool, wanted in ((tables[0], "prefill"), (tables[-1], "decode"))
            for phase, name, label, token_s, reason in pool.domains
            if phase == wanted and label
        ]
        kernels_domain = TotalDomain.of(domains)
        assert kernels_domain is not None
        lanes = [lane for replicas in pools for lane in replicas]
        frontend_s = self._profile.host.frontend_s
        return ServingResult(
            ttft_s=first,
            tpot_s=(latency - first)[several] / after,
            latency_s=latency,
            queue_s=np.array([r.scheduled_s - r.arrival_s - frontend_s for r in requests]),
            output=np.array([r.output for r in requests], dtype=np.float64),
            warmup=self.warmup,
            single_token=int((~several).sum()),
            duration_s=max(r.done_s for r in requests) - min(r.arrival_s for r in requests),
            output_tokens=sum(r.output for r in requests),
            steps=sum(lane.steps for lane in lanes),
            preemptions=sum(lane.preemptions for lane in lanes),
            cache_share=max(lane.peak for lane in pools[-1]),
            gpus=self.gpus,
            relative_lower=float(lower / point),
            relative_upper=float(upper / point),
            bounds={},
            total_domain=kernels_domain.and_of(*self._domain),
            engine=self._profile.name,
            device=self._device.name,
            model_id=model_id,
            remarks=tuple(dict.fromkeys(self._remarks)),
        )


def resolved_pool(
    value: PrefillPool | Mapping[str, Any] | None, resolve: Callable[[Any], DeviceSpec]
) -> PrefillPool | Mapping[str, Any] | None:
    """The fields of a pool with the specification of its device."""
    if isinstance(value, Mapping) and value.get("device") is not None:
        return {**value, "device": resolve(value["device"])}
    return value


def _requests(
    requests: Iterable[Sequence[float]] | None, options: ServingOptions, spread: float
) -> list[tuple[float, int, int]]:
    """Arrival, prompt and answer of each request."""
    concurrency, rate, count = options["concurrency"], options["rate"], options["count"]
    given = [
        name
        for name, value in (("requests", requests), ("concurrency", concurrency), ("rate", rate))
        if value is not None
    ]
    if len(given) != 1:
        raise FieldError(
            f"{' and '.join(given) or 'none'} of requests, concurrency and rate",
            path=given[0] if given else "requests",
            hint="give exactly one of the three",
        )
    if requests is not None:
        listed = [_request(row, i) for i, row in enumerate(requests)]
        if not 1 <= len(listed) <= MAX_REQUESTS:
            raise FieldError.at("requests", f"{len(listed):,}", hint=f"1 to {MAX_REQUESTS:,} requests")
        return listed
    if concurrency is not None:
        check_whole("concurrency", concurrency, MAX_BATCH)
        count = max(8 * concurrency, 32) if count is None else count
    else:
        assert rate is not None
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not MIN_RATE <= rate <= MAX_RATE:
            raise FieldError.not_allowed(
                "rate", rate, hint=f"requests per second, from {MIN_RATE:g} to {MAX_RATE:,.0f}"
            )
        count = 1000 if count is None else count
    input, output, seed = options["input"], options["output"], options["seed"]
    check_whole("input", input, MAX_TOKENS)
    check_whole("output", output, MAX_TOKENS)
    check_whole("count", count, MAX_REQUESTS)
    arrivals = np.zeros(count)
    if rate is not None:
        arrivals = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    rng = np.random.default_rng([seed, 1])
    sizes = (
        np.maximum(1, np.rint(n * rng.uniform(1 - spread, 1 + spread, count))).astype(int) for n in (input, output)
    )
    return list(zip(arrivals.tolist(), *(size.tolist() for size in sizes), strict=True))


def _request(row: Sequence[float], index: int) -> tuple[float, int, int]:
    try:
        arrival, prompt, answer = row
        arrival = float(arrival)
        whole = [int(prompt), int(answer)]
        if not (0 <= arrival < 1e9 and whole == [prompt, answer] and all(1 <= n <= MAX_TOKENS for n in whole)):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise FieldError.at(
            f"requests.{index}",
            f"{str(row)[:80]} is no request",
            hint="(arrival in seconds, tokens of the prompt, tokens of the answer)",
        ) from None
    return arrival, whole[0], whole[1]


@with_options(ServingOptions)
def simulate(
    config: ConfigLike,
    device: Device,
    *,
    engine: Engine | None = None,
    network: float | str | None = None,
    requests: Iterable[Sequence[float]] | None = None,
    prefill_pool: PrefillPool | Mapping[str, Any] | None = None,
    predictor: Predictor | None = None,
    **options: Unpack[ServingOptions],
) -> ServingResult:
    """Serve requests in a simulation of an engine, over predicted steps.

    Give one of ``requests``, ``concurrency`` and ``rate``. Options that :func:`cdmpp.llm.estimate` has, too, are as
    there. ``requests``: arrival in seconds, tokens of the prompt and of the answer of each. ``concurrency``: requests
    in flight; a client sends the next one when one ends. ``rate``: requests per second, with Poisson arrivals.
    ``input``, ``output``, ``count``: tokens of each prompt and answer, and number of requests; by default eight for
    each client, at least 32; 1,000 for a rate. ``warmup``: requests at the beginning that means, percentiles and goals
    leave out; by default ``concurrency``, whose requests begin together as no later ones do (none where there are no
    more requests than that), else 0. ``seed``: of arrivals and lengths. ``spread``: lengths are evenly distributed
    within this share around ``input`` and ``output``; by default 0.05 for ``concurrency`` where prompts and decoding
    share steps, else 0. Requests of equal length that begin together would stay together there; small differences part
    them on real servers. Where prompts run alone they stay. ``prefix_hit``: share of each prompt that is in the cache
    already. ``prefill_pool``: devices that compute the prompts, while those of the layout decode: ``tp``, ``pp``,
    ``ep``, ``dp``, ``device`` (default: the same) and ``bytes_per_s`` (default: 50e9, assumed), at which each device
    sends its part of the cache. ``predictor`` None: the shipped model, loaded once.

    Sequences that decode come first in a step; prompts fill the rest of the token budget in order of arrival (SGLang:
    prompts run alone, before the others decode). A request is admitted where its prompt fits into the cache beside a
    tenth of what the others will still make; where the cache is full, the sequence that came last is computed again
    later. Each replica (``dp``) has its own requests, a new one goes to the replica with fewest. With ``pp`` stages, as
    many batches are in flight. With ``prefill_pool`` the first token comes from there, and the cache is sent whole
    behind it, before the second token.

    Raises DataError, UnknownDeviceError: a file cannot be read, or the device is not known; FieldError: a value is
    wrong, or not exactly one of the three kinds of arrivals is given; InfeasibleError: the weights, or the longest
    request, do not fit.

    >>> simulate("examples/llm/llama-3.1-8b.json", "h100-sxm", concurrency=64).percentile("tpot_s", 50)
    ... # doctest: +SKIP
    0.0149
    """
    predictor, model, spec = resolved(predictor, config, device)
    pool = resolved_pool(prefill_pool, lambda name: resolved_device(name, predictor))
    plan = ServingPlan(model, spec, engine=engine, network=network, requests=requests, prefill_pool=pool, **options)
    return plan.run(predictor.model_id, predictor.predict_queries(plan.queries))
