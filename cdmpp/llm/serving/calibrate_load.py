"""Measurements of a server under load as sums of steps: those of a simulation in which its requests run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import inf
from typing import Any

import numpy as np

from cdmpp.devices.spec import DeviceSpec
from cdmpp.errors import DataError
from cdmpp.llm.config import LLMConfig
from cdmpp.llm.engines.profile import EngineProfile
from cdmpp.llm.layout import Layout, Types
from cdmpp.llm.memory import cache_tokens
from cdmpp.llm.options import MAX_REQUESTS
from cdmpp.llm.serving.loop import ServedRequest
from cdmpp.llm.serving.simulate import ServingPlan
from cdmpp.predict.prediction import Prediction

Array = np.ndarray[Any, np.dtype[np.float64]]
#: Requests of a closed loop after the first ones of all clients, at least and at most; requests at a rate.
FEW, MOST, OPEN = 64, 1000, 400
#: Steps with prompts of one row, and rows that are simulated: more are refused.
MAX_STEPS, MAX_LOAD_ROWS = 100_000, 50


class LoadRow:
    """A measurement of requests with Poisson arrivals, of a closed loop, or of prompts that are partly cached.

    Its ``queries`` are those of :meth:`steps`, whatever the profile's host times and factor. Raises CdmppError where
    the load is impossible, or takes too many steps.
    """

    def __init__(
        self,
        config: LLMConfig,
        device: DeviceSpec,
        profile: EngineProfile,
        batch: int,
        rate: float | None,
        closed_loop: bool,
        request: dict[str, Any],
        most_work: float = inf,
    ) -> None:
        count = OPEN if rate is not None else batch
        if closed_loop:
            count += min(MOST, max(FEW, 3 * batch))
        steps = count * (1 + request["input"] // (profile.token_budget or request["input"]))
        if not 0 < count <= MAX_REQUESTS or steps > MAX_STEPS:
            raise DataError(
                f"batch {batch:,}, input {request['input']:,}: {steps:,} steps with prompts",
                hint=f"at most {MAX_STEPS:,} of a row under load",
            )
        self._together = rate is None and not closed_loop
        load: dict[str, Any] = {"rate": rate, "concurrency": batch if closed_loop else None, "count": count}
        if self._together:
            load = {"requests": [(0.0, request["input"], request["output"])] * count}
        self._options = (config, device, {**request, **load, "most_work": most_work})
        plan = ServingPlan(config, device, engine=profile, **self._options[2])
        self.queries, self.place = plan.queries, plan.place

    def steps(
        self, names: Sequence[str], predictions: Iterable[Prediction], profile: EngineProfile
    ) -> Iterator[list[tuple[float, ...]]]:
        """Steps that make each duration, as :meth:`cdmpp.llm.calibrate.MeasuredBuilder.add_steps` takes them.

        ``names``: of total_s, ttft_s, tpot_s, which are means over the requests after the warm-up; of a batch the time
        until all its requests are so far. ``profile``: engine of the simulation, which decides which steps there are.
        """
        config, device, request = self._options
        plan = ServingPlan(config, device, engine=profile, **request)
        requests, [lanes] = plan.serve_requests(plan.tables(predictions), log=True)
        logs = [(lane, np.array(lane.log)) for lane in lanes if lane.log]
        log = np.concatenate([entries for _, entries in logs])
        _, _, count, prompts, sequences, kernels_s, launched_s, eager_s = log.T
        per_step = (np.ones(len(log)), sequences, kernels_s / count / profile.kernel_factor, launched_s, eager_s)
        # Steps of about as many sequences, an eighth of a doubling, count as their mean.
        _, groups = np.unique(2 * np.round(8 * np.log2(sequences)) + (prompts > 0), return_inverse=True)
        ranks, fixed_s = float(plan.layout.tp > 1), profile.host.replicas_s * (plan.layout.dp > 1)
        for name in names:
            kept = [r for r in requests[plan.warmup :] if name != "tpot_s" or r.output > 1]
            if not kept:
                raise DataError(
                    f"{name}: no request has a second token", hint="give ttft_s or total_s, or a longer output"
                )
            if self._together:
                kept = [max(kept, key=lambda r: r.first_s if name == "ttft_s" else r.done_s)]
            shares = [_shares(entries, [_window(r, name) for r in kept if r.lane is lane]) for lane, entries in logs]
            runs = count * np.concatenate(shares) / len(kept)
            sums = np.stack([np.bincount(groups, runs * column) for column in per_step])
            sums = sums[:, sums[0] > 0]
            yield [
                (kernels, launched, often, several, ranks, fixed_s + eager, often)
                for often, several, kernels, launched, eager in np.vstack([sums[:1], sums[1:] / sums[0]]).T.tolist()
            ]


def queues(
    config: LLMConfig, device: DeviceSpec, profile: EngineProfile, layout: Layout, types: Types, batch: int, tokens: int
) -> bool:
    """Whether so many requests do not run at once."""
    held = cache_tokens(config, layout, types, device.memory_bytes, profile.cache_share, tokens) / layout.pp
    return batch > min(profile.max_sequences, held // tokens) * layout.dp * layout.pp


def _window(request: ServedRequest, name: str) -> tuple[float, float, float]:
    """Beginning and end of a duration, and how often it counts."""
    if name == "tpot_s":
        return request.first_s, request.done_s, 1 / (request.output - 1)
    return request.arrival_s, request.first_s if name == "ttft_s" else request.done_s, 1.0


def _shares(log: Array, windows: list[tuple[float, float, float]]) -> Array:
    """The sum of the shares of each entry of a log that are inside of the windows, ``(entries,)``."""
    starts, ends = log[:, 0], log[:, 1]
    begin_s, end_s, weights = np.array(windows).reshape(-1, 3).T
    whole, parts = np.zeros(len(log)), np.zeros(len(log))
    for times, sign in ((begin_s, 1.0), (end_s, -1.0)):
        step = np.maximum(np.searchsorted(starts, times, "right") - 1, 0)
        passed = np.clip((times - starts[step]) / np.maximum(ends[step] - starts[step], 1e-12), 0.0, 1.0)
        # From the first step on, without what has passed of it; no more from the last step on, but for that.
        np.add.at(whole, step, sign * weights)
        np.add.at(parts, step, -sign * weights * passed)
    return np.asarray(np.cumsum(whole) + parts)
