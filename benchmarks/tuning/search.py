"""One search of one task with one cost model, through MetaSchedule's own tuner: its trials and its time."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import tvm
from tvm.ir.utils import derived_object
from tvm.s_tir import meta_schedule as ms

from benchmarks.tuning.tasks import TuningTask
from cdmpp.integrations.measuring import Trial, Workbench
from cdmpp.integrations.metaschedule import CdmppCostModel
from cdmpp.integrations.sources import BulkPredictor

#: Standard deviations that the method "exploring" subtracts.
EXPLORE = 1.0


@dataclass(frozen=True)
class SearchSettings:
    """Settings of the evolutionary search, the same for all cost models.

    Attributes
    ----------
    population : int
        Candidates of a generation. By default an eighth of TVM's, for which a round's search takes seconds on one
        core.
    generations : int
    least_unmeasured : int
        Candidates of the first generation that no trial measured, at least.
    round : int
        Measured trials of a round.
    """

    population: int = 64
    generations: int = 3
    least_unmeasured: int = 16
    round: int = 16

    @property
    def label(self) -> str:
        """Settings as part of a file's name."""
        return f"{self.population}x{self.generations}-{self.round}"


#: Settings of TVM's ``EvolutionarySearch``, with rounds as above.
TVM_DEFAULTS = SearchSettings(512, 4, 50)


@dataclass
class Round:
    """Seconds of a round, by part.

    Attributes
    ----------
    trials : list of (str, float or None, float)
        Hash, seconds (None: failed) and cost in seconds of its trials, in order
        (:class:`cdmpp.integrations.measuring.Trial`).
    search_s : float
        Up to the first build: proposing candidates, with the cost model's predictions.
    predict_s, update_s : float
        Of the cost model; ``update_s`` for learning from these trials.
    predicted : int
        Candidates that the cost model scored.
    """

    trials: list[tuple[str, float | None, float]] = field(default_factory=list)
    search_s: float = 0.0
    predict_s: float = 0.0
    update_s: float = 0.0
    predicted: int = 0


class Clock:
    """Rounds of a search, as its parts are called."""

    def __init__(self) -> None:
        self.rounds: list[Round] = []
        self._open = Round()
        self._since = time.perf_counter()
        #: Programs of the round that is being measured.
        self.count = 0

    def predicting(self, count: int, seconds: float) -> None:
        """Record a call of the cost model."""
        self._open.predicted += count
        self._open.predict_s += seconds

    def building(self) -> None:
        """The round's candidates are chosen."""
        self._open.search_s = time.perf_counter() - self._since
        self.rounds.append(self._open)
        self._open = Round()

    def measured(self, trials: Sequence[Trial]) -> None:
        """The round is built and timed."""
        self.rounds[-1].trials = [(t.hash, t.latency_s, t.cost_s) for t in trials]
        self._since = time.perf_counter()

    def updated(self, seconds: float) -> None:
        """The cost model has learned from the last round."""
        self.rounds[-1].update_s = seconds
        self._since = time.perf_counter()


@derived_object
class Timed(ms.cost_model.PyCostModel):  # type: ignore[misc]
    """A cost model whose calls are timed."""

    def __init__(self, inner: Any, clock: Clock) -> None:
        super().__init__()
        self.inner, self.clock = inner, clock

    def predict(self, context: Any, candidates: Sequence[Any]) -> Any:
        """Scores."""
        started = time.perf_counter()
        scores = self.inner.predict(context, candidates)
        self.clock.predicting(len(candidates), time.perf_counter() - started)
        return scores

    def update(self, context: Any, candidates: Sequence[Any], results: Sequence[Any]) -> None:
        """Learn."""
        started = time.perf_counter()
        self.inner.update(context, candidates, results)
        self.clock.updated(time.perf_counter() - started)


@derived_object
class ClockedBuilder(ms.builder.PyBuilder):  # type: ignore[misc]
    """The bench's builder, timed."""

    def __init__(self, bench: Workbench, clock: Clock) -> None:
        super().__init__()
        self.bench, self.clock = bench, clock

    def build(self, build_inputs: list[Any]) -> list[Any]:
        """As the bench's."""
        self.clock.building()
        self.clock.count = len(build_inputs)
        return list(self.bench.builder.build(build_inputs))


@derived_object
class ClockedRunner(ms.runner.PyRunner):  # type: ignore[misc]
    """The bench's runner, timed."""

    def __init__(self, bench: Workbench, clock: Clock) -> None:
        super().__init__()
        self.bench, self.clock = bench, clock

    def run(self, runner_inputs: list[Any]) -> list[Any]:
        """As the bench's."""
        futures = list(self.bench.runner.run(runner_inputs))
        # Programs that failed to build never get here.
        self.clock.measured([self.bench.trial(d) for d in self.bench.asked[-self.clock.count :]])
        return futures


def cost_model(method: str, predictor: BulkPredictor, device: Any, warm_up: int) -> Any:
    """A method's cost model, new."""
    if method == "random":
        return ms.cost_model.RandomModel()
    if method == "xgboost":
        # By default TVM's model guesses for its first 100 trials; here it learns after the first round.
        return ms.cost_model.XGBModel(num_warmup_samples=warm_up, num_tuning_cores=1)
    return CdmppCostModel(
        predictor,
        device=device,
        update="frozen" if method == "frozen" else "fine-tune",
        explore=EXPLORE if method == "exploring" else 0.0,
        report=None,
    )


def run_search(
    task: TuningTask,
    method: str,
    seed: int,
    trials: int,
    bench: Workbench,
    predictor: BulkPredictor,
    settings: SearchSettings,
) -> dict[str, Any]:
    """Search; gives rounds and what the cost model could not encode."""
    np.random.seed(seed)  # XGBModel and RandomModel draw from the global generator
    clock = Clock()
    model = cost_model(method, predictor, bench.configuration.device, settings.round)
    strategy = ms.search_strategy.EvolutionarySearch(
        population_size=settings.population,
        genetic_num_iters=settings.generations,
        init_min_unmeasured=settings.least_unmeasured,
    )
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        ms.tune_tir(
            tvm.IRModule({"main": task.function}),
            tvm.target.Target(dict(bench.configuration.target)),
            folder,
            trials,
            num_trials_per_iter=settings.round,
            builder=ClockedBuilder(bench, clock),
            runner=ClockedRunner(bench, clock),
            database="memory",
            cost_model=Timed(model, clock),
            strategy=strategy,
            num_tuning_cores=1,
            seed=seed + 1,
        )
    return {
        "task": task.name,
        "hash": task.hash,
        "method": method,
        "seed": seed,
        "trials": trials,
        "wall_s": time.perf_counter() - started,
        "unencoded": getattr(model, "unencoded", 0),
        "rounds": [asdict(r) for r in clock.rounds],
    }
