"""The loop of an engine over requests: batches of steps, prompts in chunks, a full cache, replicas, two pools."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf

import numpy as np

from cdmpp.errors import FieldError
from cdmpp.llm.serving.step_costs import StepTables

#: A request is admitted where this share of the tokens that the others will still make fits into the cache, too.
ADMIT_AHEAD = 0.1
#: Work of a step of the loop besides that of its sequences; one sequence of one step is the unit.
STEP_WORK = 64
#: Measured on one core, with 0.2 to 0.4.
SECONDS_PER_WORK = 0.3e-6


@dataclass
class WorkLimit:
    """Work of a simulation, and its bound, in sequences of steps."""

    limit: float = inf
    spent: float = 0.0

    def spend(self, sequences: float) -> None:
        """Count a step of the loop; FieldError where the simulation exceeds its bound."""
        self.spent += STEP_WORK + sequences
        if self.spent > self.limit:
            raise FieldError.at(
                "requests",
                f"their steps are more work than {self.limit:,.0f} sequences of steps",
                hint="fewer or shorter requests, a larger token_budget, or more replicas",
            )


@dataclass
class ServedRequest:
    """A request and its times.

    It may run from ``ready_s`` on: its arrival, or the arrival of its cache. ``computed`` tokens of ``prompt`` are in
    the cache; ``made`` tokens of the answer exist, ``first_made`` of them when the prompt was finished. A request that
    gave up its cache has its answer so far in ``prompt``.
    """

    number: int
    arrival_s: float
    prompt: int
    output: int
    computed: int = 0
    made: float = 0
    first_made: float = 0
    ready_s: float = -1.0
    scheduled_s: float = -1.0
    first_s: float = -1.0
    done_s: float = -1.0
    lane: Replica | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.ready_s = max(self.ready_s, self.arrival_s)

    @property
    def cached(self) -> float:
        """Tokens in the cache while it decodes."""
        return self.prompt + self.made - self.first_made


@dataclass
class Replica:
    """One replica (or one of the batches that pass pipeline stages in turn).

    A decode step makes ``made`` tokens of each sequence on average, of ``tried`` ones. The next step has the requests
    that were ready at ``decided_s``: its beginning, or with ``ahead`` that of the step before. A ``log`` has begin and
    end in seconds of equal steps, their number, prompts and sequences, the seconds of all their kernels, and those of
    one's launches and eager layers.
    """

    tables: StepTables
    budget: int
    max_sequences: int
    capacity: float
    prefill_first: bool
    hit: float
    made: float = 1
    tried: int = 1
    effort: WorkLimit = field(default_factory=WorkLimit)
    ahead: bool = False
    now_s: float = 0.0
    decided_s: float = 0.0
    waiting: deque[ServedRequest] = field(default_factory=deque)
    filling: list[ServedRequest] = field(default_factory=list)
    running: list[ServedRequest] = field(default_factory=list)
    cached: float = 0
    steps: int = 0
    preemptions: int = 0
    peak: float = 0.0
    log: list[tuple[float, ...]] | None = None

    @property
    def load(self) -> int:
        """Requests at this replica."""
        return len(self.waiting) + len(self.filling) + len(self.running)

    def add(self, request: ServedRequest) -> None:
        """A request arrives."""
        if not self.load:
            self.now_s = self.decided_s = max(self.now_s, request.ready_s)
        request.lane = self
        self.waiting.append(request)

    def _write(self, end_s: float, steps: int, prompts: int, sequences: int, kernels_s: float) -> None:
        tables = self.tables
        launched_s, eager_s = (tables.launched_s, tables.eager_s) if prompts else (tables.decode_launched_s, 0.0)
        if self.log is not None:
            self.log.append((self.now_s, end_s, steps, prompts, sequences, kernels_s, launched_s, eager_s))

    def advance(self, until_s: float) -> list[ServedRequest]:
        """Run steps until the clock passes ``until_s``, a request ends, or none is left; the requests that ended."""
        while self.load and self.now_s < until_s:
            if ended := self._step(until_s):
                return ended
        return []

    def _step(self, until_s: float) -> list[ServedRequest]:
        self.effort.spend(len(self.running) + len(self.filling))
        chunks = self._chunks()
        if not chunks and not self.running:  # all that wait are not ready
            self.now_s = self.decided_s = max(self.now_s, self.waiting[0].ready_s)
            return []
        if not chunks:
            return self._decode(until_s)
        decoding = [] if self.prefill_first else self.running
        count = len(decoding)
        sizes = [(new, request.computed) for request, new in chunks]
        mean = self.cached / count if count else 0.0
        kernels_s = self.tables.mixed_kernels_s(sizes, count, mean)
        end_s = self.now_s + self.tables.mixed_s(kernels_s, count + len(chunks))
        self._write(end_s, 1, len(chunks), count + len(chunks), kernels_s)
        self._pass(end_s, end_s - self.now_s)
        self.steps += 1
        for request in decoding:
            request.made += self.made
        self.cached += count * self.made
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

    def _decode(self, until_s: float) -> list[ServedRequest]:
        """Decode steps of the same sequences: until one ends, another request arrives, or the cache is full."""
        count, (steps, room) = len(self.running), self._steps_left()
        if room < steps and count > 1:
            steps = max(1, room)
        if self.waiting and self.waiting[0].ready_s > self.decided_s:
            until_s = min(until_s, max(self.waiting[0].ready_s, float(np.nextafter(self.now_s, inf))))
        if until_s < inf:
            # Steps do not become faster: after so many the clock has passed ``until_s``.
            steps = min(steps, int((until_s - self.now_s) / self._decode_step_s()) + 3)
        cached = self.cached / count + self.made * np.arange(steps, dtype=np.float64)
        kernels_s = self.tables.decode_kernels_s(count, cached)
        ends = np.cumsum(self.tables.decode_s(kernels_s, count))
        if (late := int(np.searchsorted(ends, until_s - self.now_s))) < steps - 1:
            steps = late + 1
        end_s = self.now_s + float(ends[steps - 1])
        self._write(end_s, steps, 0, count, float(kernels_s[:steps].sum()))
        self._pass(end_s, float(ends[steps - 1] - (ends[steps - 2] if steps > 1 else 0.0)))
        self.steps += steps
        self.cached += count * steps * self.made
        for request in self.running:
            request.made += steps * self.made
        if until_s < inf:
            self.peak = max(self.peak, self.cached / self.capacity)
        ended = self._end(self.running)
        self._evict()
        return ended

    def _pass(self, end_s: float, last_s: float) -> None:
        """Set the clock to the end of a step, the last one of ``last_s`` seconds."""
        self.now_s = end_s
        self.decided_s = end_s - last_s if self.ahead else end_s

    def _steps_left(self) -> tuple[int, int]:
        """Decode steps until a sequence ends, and until one ends or the cache is full."""
        steps = ceil(min(request.output - request.made for request in self.running) / self.made)
        return steps, int(min(steps, (self.capacity - self.cached) // (len(self.running) * self.made)))

    def _decode_step_s(self) -> float:
        count = len(self.running)
        kernels_s = self.tables.decode_kernels_s(count, np.array(self.cached / count))
        return max(float(self.tables.decode_s(kernels_s, count)), 1e-9)

    @property
    def next_s(self) -> float:
        """No request ends in a step that begins before this time."""
        if self.waiting or self.filling or not self.running:
            return self.now_s
        steps, room = self._steps_left()
        return self.now_s if room < steps else self.now_s + (1 - 1e-9) * (steps - 1) * self._decode_step_s()

    def catch_up(self, until_s: float) -> None:
        """Run steps until the clock passes ``until_s`` or no request is left."""
        while self.load and self.now_s < until_s:
            self._step(until_s)

    def _chunks(self) -> list[tuple[ServedRequest, int]]:
        """Prompts of the next step with the tokens that it computes; admits requests."""
        left = self.budget - (0 if self.prefill_first else len(self.running) * self.tried)
        chunks: list[tuple[ServedRequest, int]] = []
        for request in self.filling:
            if left <= 0:
                return chunks
            new = min(left, request.prompt - request.computed)
            chunks.append((request, new))
            left -= new
        reserved = self.cached + sum(request.prompt for request in self.filling)
        ahead = ADMIT_AHEAD * sum(request.output - request.made for request in (*self.running, *self.filling))
        while self.waiting and left > 0 and len(self.running) + len(self.filling) < self.max_sequences:
            request = self.waiting[0]
            busy = self.running or self.filling
            if request.ready_s > self.decided_s or (busy and reserved + ahead + request.prompt + 1 > self.capacity):
                break
            self.waiting.popleft()
            if request.computed == request.prompt:  # its cache has come from another pool
                self.cached += request.prompt
                self.running.append(request)
                reserved += request.prompt
                continue
            if request.scheduled_s < 0:
                request.scheduled_s = self.now_s
                request.computed = min(request.prompt - 1, int(self.hit * request.prompt))
            self.filling.append(request)
            reserved += request.prompt
            new = min(left, request.prompt - request.computed)
            chunks.append((request, new))
            left -= new
        return chunks

    def _end(self, requests: Sequence[ServedRequest]) -> list[ServedRequest]:
        ended = [request for request in requests if request.made >= request.output]
        for request in ended:
            request.done_s = self.now_s
            self.cached -= request.cached
            self.running.remove(request)
        return ended

    def _evict(self) -> None:
        """Give up the sequences that came last, where the cache is full; they are computed again."""
        self.peak = max(self.peak, self.cached / self.capacity)
        while self.cached + len(self.running) * self.made > self.capacity and len(self.running) > 1:
            request = self.running.pop()
            self.cached -= request.cached
            self.preemptions += 1
            request.prompt, request.computed = ceil(request.cached) + 1, 0
            self.waiting.appendleft(request)


class LeastLoaded:
    """The lane with fewest requests, the first of several. Call :meth:`changed` for each lane that has others."""

    def __init__(self, lanes: list[Replica]) -> None:
        self._lanes = lanes
        self._loads = [(lane.load, i) for i, lane in enumerate(lanes)]
        heapq.heapify(self._loads)

    def changed(self, i: int) -> None:
        """Lane ``i`` has got or ended requests."""
        heapq.heappush(self._loads, (self._lanes[i].load, i))

    def get(self) -> int:
        """Index of the lane."""
        while self._loads[0][0] != self._lanes[self._loads[0][1]].load:
            heapq.heappop(self._loads)
        return self._loads[0][1]


def open_loop(lanes: list[Replica], requests: list[ServedRequest]) -> None:
    """Requests arrive at their times; each goes to the replica with fewest."""
    least_loaded = LeastLoaded(lanes)
    # Replicas run on only where a request may end: their number of requests is the same until then.
    due: list[tuple[float, int]] = []
    next_s = [inf] * len(lanes)

    def run(i: int, until_s: float, request: ServedRequest | None = None) -> None:
        lane = lanes[i]
        lane.catch_up(until_s)
        if request is not None:
            lane.add(request)
        least_loaded.changed(i)
        next_s[i] = lane.next_s if lane.load else inf
        heapq.heappush(due, (next_s[i], i))

    for request in sorted(requests, key=lambda r: (r.arrival_s, r.number)):
        while due and due[0][0] < request.arrival_s:
            time_s, i = heapq.heappop(due)
            if time_s == next_s[i]:
                run(i, request.arrival_s)
        run(least_loaded.get(), request.arrival_s, request)
    for lane in lanes:
        lane.catch_up(inf)


def closed_loop(lanes: list[Replica], requests: list[ServedRequest], clients: int, frontend_s: float = 0.0) -> None:
    """Each client sends its next request when one ends; clients are spread over the replicas."""
    pending = deque(requests)
    for i in range(min(clients, len(requests))):
        lanes[i % len(lanes)].add(pending.popleft())
    # The replica that is furthest behind goes on, so that requests are sent in order of time.
    clocks = [(0.0, i) for i, lane in enumerate(lanes) if lane.load]
    while clocks:
        _, i = heapq.heappop(clocks)
        lane = lanes[i]
        for ended in lane.advance(inf):
            if pending:
                request = pending.popleft()
                request.arrival_s = ended.done_s
                request.ready_s = ended.done_s + frontend_s
                lane.add(request)
        if lane.load:
            heapq.heappush(clocks, (lane.now_s, i))


def two_pools(
    first: list[Replica],
    second: list[Replica],
    requests: list[ServedRequest],
    clients: int | None,
    token_s: float,
    frontend_s: float = 0.0,
) -> None:
    """Prompts are computed by the first pool; their caches go to the second one, which makes all further tokens.

    ``clients``: requests in flight; None: they arrive at their times. ``token_s``: seconds in which the cache of one
    token is sent. ``frontend_s``: seconds from the arrival of a request until the first pool may run it.
    """
    pending = deque(sorted(requests, key=lambda r: (r.arrival_s, r.number)))
    arrivals = [pending.popleft() for _ in range(len(pending) if clients is None else min(clients, len(pending)))]
    # Events in order of time: requests that arrive, then prompts whose cache does.
    events = [(r.arrival_s, 0, r.number) for r in arrivals]
    heapq.heapify(events)
    lanes = [*first, *second]
    pools = (0, LeastLoaded(first)), (len(first), LeastLoaded(second))
    clocks: list[tuple[float, int]] = []
    while True:
        if events and (not clocks or events[0][0] <= clocks[0][0]):
            now_s, pool, number = heapq.heappop(events)
            request = requests[number]
            request.ready_s = now_s
            if pool == 0:
                request.arrival_s = now_s
                request = ServedRequest(number, now_s, request.prompt, 1, ready_s=now_s + frontend_s)
            offset, least_loaded = pools[pool]
            lane = lanes[i := offset + least_loaded.get()]
            idle = not lane.load
            lane.add(request)
            least_loaded.changed(i - offset)
            if idle:
                heapq.heappush(clocks, (lane.now_s, i))
            continue
        if not clocks:
            return
        # No other replica can send anything before this time.
        now_s, i = heapq.heappop(clocks)
        limits = [clock[0] for clock in clocks[:1]] + [event[0] for event in events[:1]]
        until_s = max(min(limits, default=inf), float(np.nextafter(now_s, inf)))
        all_ended = lanes[i].advance(until_s)
        offset, least_loaded = pools[i >= len(first)]
        least_loaded.changed(i - offset)
        if lanes[i].load:
            heapq.heappush(clocks, (lanes[i].now_s, i))
        for ended in all_ended:
            request = requests[ended.number]
            if i < len(first):
                request.scheduled_s, request.first_s = ended.scheduled_s, ended.done_s
                request.computed = request.prompt
                request.made = request.first_made = 1
                request.done_s = ended.done_s
                if request.output > 1:
                    heapq.heappush(events, (ended.done_s + token_s * request.prompt, 1, request.number))
                    continue
            if clients is not None and pending:
                heapq.heappush(events, (ended.done_s, 0, pending.popleft().number))
