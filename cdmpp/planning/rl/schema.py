"""The RL plan's request, as JSON gives it: ``POST /rl/plan``, ``cdmpp plan rl``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import Field

from cdmpp.compose.budget import SearchControl
from cdmpp.compose.pricing import CostField
from cdmpp.compose.request import Budget, MaxSteps, PositiveSeconds, PriceRequest, Seed, WholeNumber
from cdmpp.compose.request import OldRequest as Request
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.planning.rl.answer import RlAnswer
from cdmpp.planning.rl.forms import (
    MAX_SAMPLES,
    MAX_SIMULATED,
    MAX_TOKENS,
    Bytes,
    DecodeForm,
    KvForm,
    ObservedLengths,
    PoolForm,
    QuantileLengths,
    RankerForm,
    TrainingForm,
    Units,
    WeightsForm,
)
from cdmpp.planning.rl.lengths import Lengths, Ranker
from cdmpp.planning.rl.migration import Link
from cdmpp.planning.rl.pricing import PricedPool, Stages, memory_tokens, stages_of
from cdmpp.planning.rl.report import write
from cdmpp.planning.rl.search import Plan, Problem, search
from cdmpp.planning.rl.sizes import Layout, Objective, Terms
from cdmpp.planning.rl.streaming import Mode
from cdmpp.prediction import Prediction

#: Programs that a request may have priced.
MAX_ASKED = 10_000
MOST_DRAWS, LEAST_DRAWS = 16, 2


class RlRequest(Request):
    """Plan one step of reinforcement learning: generation, inference, training.

    A unit of a pool is one generation instance or one data-parallel unit of training. Costs that stand in the
    request hold for every pool that has none of its own. Without ``training``, generation alone is planned.
    """

    lengths: ObservedLengths | QuantileLengths
    samples_per_step: Annotated[int, Field(ge=1, le=MAX_SAMPLES), WholeNumber]
    ranker: RankerForm = RankerForm()
    prompt_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS), WholeNumber] = 0
    pools: Annotated[list[PoolForm], Field(min_length=1, max_length=8)]
    decode: Annotated[
        DecodeForm | None, Field(description="Seconds for one token of every sample of a batch: PTL(batch).")
    ] = None
    prefill: Annotated[CostField, Field(description="Of one prompt; it stalls its instance.")] = 0.0
    inference: Annotated[
        CostField,
        Field(
            description="Reward, reference and critic of one sample, on one unit: of generation, after it or "
            "on instances that are free before its end, or of training; whichever is better."
        ),
    ] = 0.0
    kv: KvForm = KvForm()
    training: TrainingForm | None = None
    weights: WeightsForm = WeightsForm()
    link_bytes_per_s: Annotated[Bytes, Field(description="Into one instance, for samples that migrate.")] = 25e9
    mode: Annotated[
        Mode, Field(description="sync: training takes this step's samples, streamed; async: those of the step before.")
    ] = "sync"
    layout: Annotated[
        Layout,
        Field(
            description="separate: units of their own for generation and training (StreamRL); shared: the "
            "same generate, then train; any: whichever is better."
        ),
    ] = "any"
    objective: Annotated[Objective, Field(description="Seconds of a step, or its price.")] = "time"
    slack: Annotated[
        float, Field(ge=0, le=1, description="A step may be longer by this share than the shortest if it is cheaper.")
    ] = 0.0
    most_step_s: Annotated[PositiveSeconds | None, Field(description="A step must not be longer.")] = None
    generation_units: Annotated[Units | None, Field(description="Given, not searched.")] = None
    training_units: Annotated[Units | None, Field(description="Given, not searched.")] = None
    draws: Annotated[
        Annotated[int, Field(ge=2, le=64), WholeNumber] | None,
        Field(
            description=f"Steps to simulate. Default: {MOST_DRAWS}, fewer for large steps; at most "
            f"{MAX_SIMULATED} samples together."
        ),
    ] = None
    budget_s: Budget = 1.0
    max_steps: MaxSteps = None
    seed: Seed = 0

    answer_model: ClassVar[type[RlAnswer]] = RlAnswer

    def price_requests(self) -> list[PriceRequest]:
        """Programs of the pools, one pool after the other."""
        found = [one for stages in self._stages() for one in stages.price_requests()]
        if len(found) > MAX_ASKED:
            raise FieldError(
                f"{len(found):,} programs are to be priced",
                path="pools",
                hint=f"at most {MAX_ASKED:,}: give fewer batch sizes",
            )
        return found

    def solve(self, prices: Sequence[Prediction], watch: SearchControl) -> dict[str, Any]:
        """The plan, :class:`RlAnswer` as JSON values."""
        left = iter(prices)
        priced = [stages.priced(left) for stages in self._stages()]
        problem = self.problem(priced)

        def written(plan: Plan) -> dict[str, Any]:
            return write(self, problem, plan, priced)

        return written(search(problem, watch, self.max_steps, written))

    def problem(self, priced: Sequence[PricedPool], figure: str = "latency_s") -> Problem:
        """What is searched, with every predicted cost's ``latency_s``, ``lower_s`` or ``upper_s``."""
        lengths = self._lengths()
        # Kept free for a sample that enters.
        reserve = lengths.median()
        pools = tuple(one.pool(self.kv, self.prompt_tokens, reserve, self.samples_per_step, figure) for one in priced)
        return Problem(
            lengths,
            self._ranker(),
            self.samples_per_step,
            Terms(
                pools,
                self.mode,
                self.weights.same_site_s,
                self.weights.cross_site_s,
                self.weights.shared_s,
                self.layout,
                self.generation_units,
                self.training_units,
            ),
            Link(self.kv.bytes_per_token or 0.0, self.link_bytes_per_s),
            self.objective,
            self.slack,
            self.most_step_s,
            self._draws(),
            self.seed,
            self.ranker.doubt,
        )

    def _stages(self) -> list[Stages]:
        if self.objective == "cost" and not any(pool.price_per_hour for pool in self.pools):
            raise FieldError(
                "no pool has a price", path="pools.0.price_per_hour", hint='give prices, or ask for "objective": "time"'
            )
        stages = stages_of(self.pools, self.decode, self.prefill, self.inference, self.training, self.kv)
        self._check_memory(stages)
        return stages

    def _check_memory(self, stages: Sequence[Stages]) -> None:
        """Some memory must hold the longest sample."""
        generating = [each for each in stages if each.decode is not None]
        need = self._lengths().longest + self.prompt_tokens
        each = self.kv.bytes_per_token
        if each is None or any(memory_tokens(one.memory_bytes, self.kv) >= need for one in generating):
            return
        raise InfeasibleError(
            f"no memory holds the longest sample, {need - self.prompt_tokens} tokens and "
            f"{self.prompt_tokens} of its prompt; the smallest that would is {need * each:.0f} bytes",
            path="kv.memory_bytes" if self.kv.memory_bytes is not None else "pools.0.memory_bytes",
            hint="give that much for keys and values, or set lengths.max_tokens",
        )

    def _lengths(self) -> Lengths:
        given = self.lengths
        if isinstance(given, ObservedLengths):
            return Lengths.of_samples(given.samples, given.max_tokens)
        levels = {float(level): tokens for level, tokens in given.quantiles.items()}
        return Lengths.of_quantiles(levels, self.samples_per_step, given.max_tokens)

    def _ranker(self) -> Ranker:
        if self.ranker.recall < self.ranker.share:
            raise FieldError(
                f"ranker.recall: {self.ranker.recall:g} is below ranker.share, which chance reaches",
                path="ranker.recall",
                hint="give a recall of at least the share; equal means that the ranker knows nothing",
            )
        return Ranker(self.ranker.recall, self.ranker.share, self.ranker.misses)

    def _draws(self) -> int:
        if self.draws is None:
            return min(max(MAX_SIMULATED // self.samples_per_step, LEAST_DRAWS), MOST_DRAWS)
        if self.draws * self.samples_per_step > MAX_SIMULATED:
            raise FieldError(
                f"draws: {self.draws} steps of {self.samples_per_step} samples are too many to simulate",
                path="draws",
                hint=f"at most {max(MAX_SIMULATED // self.samples_per_step, 2)}, or leave it out",
            )
        return self.draws
