"""Requests to a language model that is served: a loop over the predicted steps of an engine.

Each replica runs one step after another. Sequences that decode add a token; what is left of the token budget goes to
prompts, in the order of their arrival. A step's duration comes from :mod:`cdmpp.predict.llm.step_costs`.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.predict.engines.profile import Engine, load_engine
from cdmpp.predict.interface import Predictor
from cdmpp.predict.llm.config import LLMConfig
from cdmpp.predict.llm.estimate import MAX_BATCH, MAX_TOKENS, resolved_device, shipped_predictor
from cdmpp.predict.llm.layout import Layout, Types
from cdmpp.predict.llm.memory import cache_tokens
from cdmpp.predict.llm.pricing import combined
from cdmpp.predict.llm.read import read_config
from cdmpp.predict.llm.step_costs import StepCosts, StepTables
from cdmpp.predict.prediction import Prediction

Array = np.ndarray[Any, np.dtype[np.float64]]
MAX_REQUESTS = 100_000
#: Spread of lengths that parts requests which begin together.
SPREAD = 0.02
#: A request is admitted where this share of the tokens that the others will still make fits into the cache, too.
ADMIT_AHEAD = 0.1


@dataclass
class _Request:
    """A request and its times.

    ``computed`` tokens of ``prompt`` are in the cache; ``made`` tokens of the answer exist, ``first_made`` of them when
    the prompt was finished. A request that gave up its cache has its answer so far in ``prompt``.
    """

    number: int
    arrival_s: float
    prompt: int
    output: int
    computed: int = 0
    made: int = 0
    first_made: int = 0
    scheduled_s: float = -1.0
    first_s: float = -1.0
    done_s: float = -1.0

    @property
    def cached(self) -> int:
        """Tokens in the cache while it decodes."""
        return self.prompt + self.made - self.first_made


@dataclass(frozen=True)
class ServingResult:
    """Requests that were served, in their order.

    Attributes
    ----------
    ttft_s, latency_s, queue_s : (requests,)
        From arrival to the first token, to the last one, and to the first step that works on the prompt.
    tpot_s : (requests with two or more tokens,)
        Mean time between tokens; requests of one token are left out.
    single_token : int
        Number of those left out.
    duration_s : float
        From the first arrival to the last token.
    output_tokens, steps, preemptions : int
    cache_share : float
        Largest share of the cache in use.
    gpus : int
    relative_lower, relative_upper : float
        80 % interval of a step's duration, as factors of it.
    engine, device, model_id : str
    """

    ttft_s: Array
    tpot_s: Array
    latency_s: Array
    queue_s: Array
    single_token: int
    duration_s: float
    output_tokens: int
    steps: int
    preemptions: int
    cache_share: float
    gpus: int
    relative_lower: float
    relative_upper: float
    engine: str
    device: str
    model_id: str

    def percentile(self, name: str, q: float) -> float:
        """Percentile ``q``, from 0 to 100, of ``ttft_s``, ``tpot_s``, ``latency_s`` or ``queue_s``, in seconds.

        Raises
        ------
        FieldError
            The name is not known, ``q`` is not allowed, or all requests have one token.
        """
        if name not in SEQUENCES:
            raise FieldError(
                f"name: {str(name)[:40]!r} is not known", path="name", hint="one of " + ", ".join(SEQUENCES)
            )
        if not 0 <= q <= 100:
            raise FieldError(f"q: {q} is not a percentage", path="q", hint="from 0 to 100")
        values = getattr(self, name)
        if not len(values):
            raise FieldError("tpot_s: all requests have one token", path="name", hint="ask for another sequence")
        return float(np.percentile(values, q))

    @property
    def throughput_tokens_per_s(self) -> float:
        """Output tokens of all requests over :attr:`duration_s`."""
        return self.output_tokens / self.duration_s

    def to_dict(self) -> dict[str, Any]:
        """Means and percentiles as JSON values."""
        figures: dict[str, Any] = {}
        for name in SEQUENCES:
            values = getattr(self, name)
            found = None
            if len(values):
                found = {"mean": float(values.mean())} | {f"p{q}": self.percentile(name, q) for q in (50, 90, 99)}
            figures[name] = found
        return {
            "model_id": self.model_id,
            "device": self.device,
            "engine": self.engine,
            "gpus": self.gpus,
            "requests": len(self.ttft_s),
            **figures,
            "single_token": self.single_token,
            "duration_s": self.duration_s,
            "requests_per_s": len(self.ttft_s) / self.duration_s,
            "throughput_tokens_per_s": self.throughput_tokens_per_s,
            "throughput_tokens_per_s_per_gpu": self.throughput_tokens_per_s / self.gpus,
            "steps": self.steps,
            "preemptions": self.preemptions,
            "cache_share": self.cache_share,
            "relative_lower": self.relative_lower,
            "relative_upper": self.relative_upper,
        }


SEQUENCES = ("ttft_s", "tpot_s", "latency_s", "queue_s")


@dataclass
class _Lane:
    """One replica (or one of the batches that pass pipeline stages in turn)."""

    tables: StepTables
    budget: int
    most: int
    capacity: float
    prefill_first: bool
    hit: float
    now_s: float = 0.0
    waiting: deque[_Request] = field(default_factory=deque)
    filling: list[_Request] = field(default_factory=list)
    running: list[_Request] = field(default_factory=list)
    cached: int = 0
    steps: int = 0
    preemptions: int = 0
    peak: float = 0.0

    @property
    def load(self) -> int:
        """Requests at this replica."""
        return len(self.waiting) + len(self.filling) + len(self.running)

    def add(self, request: _Request) -> None:
        """A request arrives."""
        if not self.load:
            self.now_s = max(self.now_s, request.arrival_s)
        self.waiting.append(request)

    def advance(self, until_s: float) -> list[_Request]:
        """Run steps until the clock passes ``until_s``, a request ends, or none is left; the requests that ended."""
        while self.load and self.now_s < until_s:
            if ended := self._step(until_s):
                return ended
        return []

    def _step(self, until_s: float) -> list[_Request]:
        chunks = self._chunks()
        if not chunks:
            return self._decode(until_s)
        decoding = [] if self.prefill_first else self.running
        count = len(decoding)
        sizes = [(new, request.computed) for request, new in chunks]
        mean = self.cached / count if count else 0.0
        self.now_s += self.tables.mixed_s(sizes, count, mean)
        self.steps += 1
        for request in decoding:
            request.made += 1
        if count:
            self.cached += count
        ended = self._end(decoding)
        for request, new in chunks:
            request.computed += new
            if request.computed < request.prompt:
                continue
            self.filling.remove(request)
            if request.first_s < 0:
                request.first_s = self.now_s
            request.made += 1
            request.first_made = request.made
            self.cached += request.prompt
            self.running.append(request)
            ended += self._end([request])
        self._evict()
        return ended

    def _decode(self, until_s: float) -> list[_Request]:
        """Decode steps of the same sequences: until one ends, another request arrives, or the cache is full."""
        count = len(self.running)
        steps = min(request.output - request.made for request in self.running)
        if (room := int((self.capacity - self.cached) // count)) < steps and count > 1:
            steps = max(1, room)
        ends = np.cumsum(self.tables.decode_s(count, self.cached / count + np.arange(steps, dtype=np.float64)))
        if (late := int(np.searchsorted(ends, until_s - self.now_s))) < steps - 1:
            steps = late + 1
        self.now_s += float(ends[steps - 1])
        self.steps += steps
        self.cached += count * steps
        for request in self.running:
            request.made += steps
        ended = self._end(self.running)
        self._evict()
        return ended

    def _chunks(self) -> list[tuple[_Request, int]]:
        """Prompts of the next step with the tokens that it computes; admits requests."""
        left = self.budget - (0 if self.prefill_first else len(self.running))
        chunks: list[tuple[_Request, int]] = []
        for request in self.filling:
            if left <= 0:
                return chunks
            new = min(left, request.prompt - request.computed)
            chunks.append((request, new))
            left -= new
        reserved = self.cached + sum(request.prompt for request in self.filling)
        ahead = ADMIT_AHEAD * sum(request.output - request.made for request in (*self.running, *self.filling))
        while self.waiting and left > 0 and len(self.running) + len(self.filling) < self.most:
            request = self.waiting[0]
            busy = self.running or self.filling
            if request.arrival_s > self.now_s or (busy and reserved + ahead + request.prompt + 1 > self.capacity):
                break
            self.waiting.popleft()
            if request.scheduled_s < 0:
                request.scheduled_s = self.now_s
                request.computed = min(request.prompt - 1, int(self.hit * request.prompt))
            self.filling.append(request)
            reserved += request.prompt
            new = min(left, request.prompt - request.computed)
            chunks.append((request, new))
            left -= new
        return chunks

    def _end(self, requests: Sequence[_Request]) -> list[_Request]:
        ended = [request for request in requests if request.made >= request.output]
        for request in ended:
            request.done_s = self.now_s
            self.cached -= request.cached
            self.running.remove(request)
        return ended

    def _evict(self) -> None:
        """Give up the sequences that came last, where the cache is full; they are computed again."""
        self.peak = max(self.peak, self.cached / self.capacity)
        while self.cached + len(self.running) > self.capacity and len(self.running) > 1:
            request = self.running.pop()
            self.cached -= request.cached
            self.preemptions += 1
            request.prompt, request.computed = request.cached + 1, 0
            self.waiting.appendleft(request)


class ServingPlan:
    """Queries of a simulation, and the simulation made of their predictions.

    Parameters and errors are those of :func:`simulate`; ``config`` and ``device`` are read already.

    Attributes
    ----------
    queries : list of Query
    """

    def __init__(
        self,
        config: LLMConfig,
        device: DeviceSpec,
        *,
        engine: Engine | None = "vllm",
        tp: int = 1,
        pp: int = 1,
        ep: int = 1,
        dp: int | None = None,
        dtype: str = "bfloat16",
        weights: str | None = None,
        kv_dtype: str | None = None,
        requests: Iterable[Sequence[float]] | None = None,
        concurrency: int | None = None,
        rate: float | None = None,
        input: int = 1024,
        output: int = 1024,
        count: int | None = None,
        seed: int = 0,
        spread: float | None = None,
        prefix_hit: float = 0.0,
    ) -> None:
        profile = load_engine(engine)
        self._profile, self._device = profile, device
        layout = Layout(tp, pp, ep, dp)
        types = Types.of(config, dtype, weights, kv_dtype, device, profile.kv_dtype)
        layout.check(config)
        if spread is None:
            spread = 0.0 if concurrency is None or profile.prefill_first else SPREAD
        for name, value in (("prefix_hit", prefix_hit), ("spread", spread)):
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
                raise FieldError(f"{name}: {str(value)[:40]!r} is not allowed", path=name, hint="from 0 to below 1")
        self._hit, self.gpus = prefix_hit, layout.gpus
        self._lanes = layout.dp * layout.pp
        self._clients = concurrency
        self._requests = _requests(requests, concurrency, rate, input, output, count, seed, spread)
        #: Tokens of all prompts and answers.
        self.tokens = sum(prompt + answer for _, prompt, answer in self._requests)
        longest = max(prompt + answer for _, prompt, answer in self._requests)
        self._capacity = (
            cache_tokens(config, layout, types, device.memory_bytes, profile.cache_share, longest) / layout.pp
        )
        if self._capacity < longest:
            raise InfeasibleError(
                f"the cache of a replica holds {max(0, int(self._capacity)):,} tokens, a request has {longest:,}",
                path="tp",
                hint="more ranks, or shorter requests",
            )
        in_flight = len(self._requests) if concurrency is None else concurrency
        self._most = max(1, min(profile.max_sequences, -(-in_flight // self._lanes)))
        self._budget = profile.token_budget or max(prompt for _, prompt, _ in self._requests)
        self._costs = StepCosts(
            config,
            layout,
            types,
            device,
            profile,
            sequences=self._most,
            tokens=max(self._budget, self._most + 1),
            cached=longest,
        )
        self.queries = self._costs.queries

    def run(self, model_id: str, predictions: Iterable[Prediction]) -> ServingResult:
        """Simulate with the predictions of :attr:`queries`."""
        tables = self._costs.tables(predictions)
        lanes = [
            _Lane(tables, self._budget, self._most, self._capacity, self._profile.prefill_first, self._hit)
            for _ in range(self._lanes)
        ]
        requests = [_Request(i, *request) for i, request in enumerate(self._requests)]
        if self._clients is None:
            _open_loop(lanes, requests)
        else:
            _closed_loop(lanes, requests, self._clients)
        first = np.array([r.first_s - r.arrival_s for r in requests])
        latency = np.array([r.done_s - r.arrival_s for r in requests])
        several = np.array([r.output > 1 for r in requests])
        after = np.array([r.output - 1 for r in requests])[several]
        point, lower, upper = combined(tables.kinds, self._profile.residual)
        return ServingResult(
            ttft_s=first,
            tpot_s=(latency - first)[several] / after,
            latency_s=latency,
            queue_s=np.array([r.scheduled_s - r.arrival_s for r in requests]),
            single_token=int((~several).sum()),
            duration_s=max(r.done_s for r in requests) - min(r.arrival_s for r in requests),
            output_tokens=sum(r.output for r in requests),
            steps=sum(lane.steps for lane in lanes),
            preemptions=sum(lane.preemptions for lane in lanes),
            cache_share=max(lane.peak for lane in lanes),
            gpus=self.gpus,
            relative_lower=float(lower / point),
            relative_upper=float(upper / point),
            engine=self._profile.name,
            device=self._device.name,
            model_id=model_id,
        )


def _open_loop(lanes: list[_Lane], requests: list[_Request]) -> None:
    """Requests arrive at their times; each goes to the replica with fewest."""
    for request in sorted(requests, key=lambda r: (r.arrival_s, r.number)):
        for lane in lanes:
            while lane.load and lane.now_s < request.arrival_s:
                lane.advance(request.arrival_s)
        min(lanes, key=lambda lane: lane.load).add(request)
    for lane in lanes:
        while lane.load:
            lane.advance(np.inf)


def _closed_loop(lanes: list[_Lane], requests: list[_Request], clients: int) -> None:
    """Each client sends its next request when one ends; clients are spread over the replicas."""
    pending = deque(requests)
    for i in range(min(clients, len(requests))):
        lanes[i % len(lanes)].add(pending.popleft())
    # The replica that is furthest behind goes on, so that requests are sent in order of time.
    clocks = [(0.0, i) for i, lane in enumerate(lanes) if lane.load]
    while clocks:
        _, i = heapq.heappop(clocks)
        lane = lanes[i]
        for ended in lane.advance(np.inf):
            if pending:
                request = pending.popleft()
                request.arrival_s = ended.done_s
                lane.add(request)
        if lane.load:
            heapq.heappush(clocks, (lane.now_s, i))


def _requests(
    requests: Iterable[Sequence[float]] | None,
    concurrency: int | None,
    rate: float | None,
    input: int,
    output: int,
    count: int | None,
    seed: int,
    spread: float,
) -> list[tuple[float, int, int]]:
    """Arrival, prompt and answer of each request."""
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
            raise FieldError(f"requests: {len(listed):,}", path="requests", hint=f"1 to {MAX_REQUESTS:,} requests")
        return listed
    if concurrency is not None:
        _check_whole("concurrency", concurrency, MAX_BATCH)
        count = max(8 * concurrency, 32) if count is None else count
    else:
        assert rate is not None
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 < rate < 1e6:
            raise FieldError(
                f"rate: {str(rate)[:40]!r} is not allowed", path="rate", hint="requests per second, above 0"
            )
        count = 1000 if count is None else count
    for name, value, most in (
        ("input", input, MAX_TOKENS),
        ("output", output, MAX_TOKENS),
        ("count", count, MAX_REQUESTS),
    ):
        _check_whole(name, value, most)
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
        raise FieldError(
            f"requests.{index}: {str(row)[:80]} is no request",
            path=f"requests.{index}",
            hint="(arrival in seconds, tokens of the prompt, tokens of the answer)",
        ) from None
    return arrival, whole[0], whole[1]


def _check_whole(name: str, value: Any, most: int) -> None:
    if type(value) is not int or not 1 <= value <= most:
        raise FieldError(
            f"{name}: {str(value)[:80]!r} is not allowed", path=name, hint=f"a whole number from 1 to {most:,}"
        )


def simulate(
    config: LLMConfig | Mapping[str, Any] | str | PathLike[str],
    device: DeviceSpec | Mapping[str, Any] | str,
    *,
    engine: Engine = "vllm",
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    dp: int | None = None,
    dtype: str = "bfloat16",
    weights: str | None = None,
    kv_dtype: str | None = None,
    requests: Iterable[Sequence[float]] | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    input: int = 1024,
    output: int = 1024,
    count: int | None = None,
    seed: int = 0,
    spread: float | None = None,
    prefix_hit: float = 0.0,
    predictor: Predictor | None = None,
) -> ServingResult:
    """Serve requests in a simulation of an engine, over predicted steps.

    Give one of ``requests``, ``concurrency`` and ``rate``.

    Parameters
    ----------
    config, device, engine, tp, pp, ep, dp, dtype, weights, kv_dtype :
        As of :func:`cdmpp.llm.estimate`.
    requests : sequence of (arrival_s, input, output), optional
        Arrival in seconds, tokens of the prompt and of the answer.
    concurrency : int, optional
        Requests in flight: a client sends the next one when one ends.
    rate : float, optional
        Requests per second, with Poisson arrivals.
    input, output, count : int
        Tokens of each prompt and answer, and number of requests. Default of ``count``: eight for each client, at least
        32; 1,000 for a rate.
    seed : int
        Of arrivals and lengths.
    spread : float, optional
        Lengths are evenly distributed within this share around ``input`` and ``output``. Default: 0.02 for
        ``concurrency`` where prompts and decoding share steps, else 0. Requests of equal length that begin together
        would stay together there; small differences part them on real servers. Where prompts run alone they stay.
    prefix_hit : float
        Share of each prompt that is in the cache already.
    predictor : Predictor, optional
        Default: the shipped model, loaded once.

    Returns
    -------
    ServingResult

    Raises
    ------
    DataError, UnknownDeviceError
        A file cannot be read, or the device is not known.
    FieldError
        A value is wrong, or not exactly one of the three kinds of arrivals is given.
    InfeasibleError
        The weights, or the longest request, do not fit.

    Notes
    -----
    Sequences that decode come first in a step; prompts fill the rest of the token budget in order of arrival (SGLang:
    prompts run alone, before the others decode). A request is admitted where its prompt fits into the cache beside a
    tenth of what the others will still make; where the cache is full, the sequence that came last is computed again
    later. Each replica (``dp``) has its own requests, a new one goes to the replica with fewest. With ``pp`` stages, as
    many batches are in flight.

    Examples
    --------
    >>> simulate("examples/llm/llama-3.1-8b.json", "h100-sxm", concurrency=64).percentile("tpot_s", 50)
    ... # doctest: +SKIP
    0.0149
    """
    predictor = shipped_predictor() if predictor is None else predictor
    plan = ServingPlan(
        read_config(config),
        resolved_device(device, predictor),
        engine=engine,
        tp=tp,
        pp=pp,
        ep=ep,
        dp=dp,
        dtype=dtype,
        weights=weights,
        kv_dtype=kv_dtype,
        requests=requests,
        concurrency=concurrency,
        rate=rate,
        input=input,
        output=output,
        count=count,
        seed=seed,
        spread=spread,
        prefix_hit=prefix_hit,
    )
    return plan.run(predictor.model_id, predictor.predict_queries(plan.queries))
