"""Plans searched from several seeds by Ray workers: the best of the seeds' own plans, with its seed."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cdmpp.cli.main import app
from cdmpp.errors import FieldError, InfeasibleError
from cdmpp.plan.distributed import BestSoFar, solve_on_ray, solve_seed
from cdmpp.plan.registry import make_plan
from cdmpp.predict.requests.budget import SearchControl

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:::ray.*")]
SEEDS = 4


def fused(**more: Any) -> dict[str, Any]:
    """Two pipelines on the same ranks; after two steps the plan depends on the seed."""
    models = [
        {"stages": 8, "micro_batches": 16, "forward_s": 5, "backward_s": 10, "direction": "down"},
        {"stages": 4, "micro_batches": 8, "forward_s": 4, "backward_s": 8, "direction": "up"},
    ]
    return {"models": models, "ranks": 8, "seed": 5, "budget_s": 600, "max_steps": 2, **more}


@pytest.mark.nightly
def test_answer_is_the_best_of_the_plans_of_single_seeds(ray: Any, tmp_path: Path) -> None:
    path = tmp_path / "request.json"
    path.write_text(json.dumps(fused()))
    arguments = ["plan", "pipeline", str(path), "--ray", "--seeds", str(SEEDS)]
    result = CliRunner().invoke(app, [*arguments, "--json"])
    assert result.exit_code == 0, result.output
    answer = json.loads(result.stdout)
    single = {seed: make_plan("pipeline", fused(seed=seed)) for seed in range(5, 5 + SEEDS)}
    best_s, seed = min((plan["makespan_s"], seed) for seed, plan in single.items())
    assert answer == single[seed] | {"seed": seed}
    assert answer["makespan_s"] == best_s
    assert max(plan["makespan_s"] for plan in single.values()) > best_s, "the seeds do not differ"
    assert f"seed {seed}" in CliRunner().invoke(app, arguments).stdout.splitlines()


@pytest.mark.nightly
def test_stopped_search_returns_the_best_plan_so_far(ray: Any) -> None:
    control = SearchControl()
    control.stop()
    plan = solve_on_ray(ray, "pipeline", fused(max_steps=None, budget_s=600), [], 2, control)
    assert plan.seed in (5, 6) and plan.objective_value >= plan.bound_value


@pytest.mark.nightly
def test_killed_search_is_repeated(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark = tmp_path / "killed"

    def killed_once(kind: str, value: Any, prices: Any, seed: int, shared: Any) -> Any:
        if seed == 6 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return solve_seed(kind, value, prices, seed, shared)

    expected = solve_on_ray(ray, "pipeline", fused(), [], 3)
    monkeypatch.setattr("cdmpp.plan.distributed.solve_seed", killed_once)
    assert solve_on_ray(ray, "pipeline", fused(), [], 3) == expected
    assert mark.exists()


@pytest.mark.nightly
def test_plan_without_a_seed_is_refused(ray: Any) -> None:
    request = json.loads((Path(__file__).parents[3] / "docs/examples/split.json").read_text())
    with pytest.raises(FieldError, match="split do not depend on a seed"):
        solve_on_ray(ray, "split", request, [])


def test_search_ends_when_another_seed_is_optimal() -> None:
    shared = BestSoFar()
    assert not shared.report(0, 0.1, 2.0, 1.0)
    assert not shared.report(1, 0.1, 1.0, 0.5)  # optimal itself, by the bound of seed 0
    assert shared.report(0, 0.2, 2.0, 1.0)
    assert shared.progress() == (pytest.approx(0.15), 1.0, 1.0)
    assert not BestSoFar().report(0, 0.0, None, None)


def test_error_of_the_search_is_returned() -> None:
    error = solve_seed("pipeline", fused(max_activations=0.5), [], 0)
    assert isinstance(error, InfeasibleError) and error.path == "max_activations"
