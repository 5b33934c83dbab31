"""examples/optuna_search.py prunes by predicted latency, as docs/integrations.md shows."""

import runpy

import optuna
import pytest
from optuna.trial import TrialState

from cdmpp.predict.predictor import LatencyPredictor
from tests.threads import one_thread
from tests.waiting import ROOT

__all__ = ["one_thread"]

EXAMPLE = ROOT / "examples" / "optuna_search.py"


def reaches(trial: optuna.trial.FrozenTrial, latency_ms: float, images_per_s: float) -> bool:
    slowest_ms = max(trial.user_attrs["latency_ms"].values())
    return slowest_ms <= latency_ms and 2 ** trial.params["log2_batch"] / slowest_ms * 1e3 >= images_per_s


def test_only_networks_that_are_predicted_to_reach_the_goals_are_trained(
    predictor: LatencyPredictor, capsys: pytest.CaptureFixture[str]
) -> None:
    main = runpy.run_path(str(EXAMPLE))["main"]
    study = main(["--trials", "12", "--epochs", "1"], predictor)
    states = {trial.number: trial.state for trial in study.trials}
    assert set(states.values()) == {TrialState.PRUNED, TrialState.COMPLETE}
    for trial in study.trials:
        assert set(trial.user_attrs["latency_ms"]) == {"t4", "l4"}
        assert reaches(trial, 1.0, 1e7) == (trial.state == TrialState.COMPLETE)
    assert study.best_value > 0.5  # of ten classes
    out = capsys.readouterr().out
    assert out.startswith(f"12 trials, {list(states.values()).count(TrialState.PRUNED)} pruned")
    assert f"accuracy {study.best_value:.1%}" in out


def test_goals_that_no_network_reaches_are_reported(
    predictor: LatencyPredictor, capsys: pytest.CaptureFixture[str]
) -> None:
    study = runpy.run_path(str(EXAMPLE))["main"](["--trials", "2", "--latency-ms", "0.001"], predictor)
    assert [trial.state for trial in study.trials] == [TrialState.PRUNED] * 2
    assert "no network reaches the goals" in capsys.readouterr().out
