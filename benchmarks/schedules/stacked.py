"""Ensembles of networks and boosters on top of a network: error, order, and cost of a prediction."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.schedules.methods import Contest, Predict, cost_ratio, figures, mean_of
from benchmarks.schedules.runs import Run
from cdmpp.train.baselines import TreeBaseline
from cdmpp.train.dataset import MeasuredRows

#: Rows of the comparison of costs.
COST_ROWS = 2048


class ResidualTrees(TreeBaseline):
    """XGBoost on log(latency) minus a network's log latency, added to it."""

    def __init__(self, contest: Contest, network: Predict) -> None:
        super().__init__(contest.dataset, contest.inputs, contest.config)
        self._network = network

    def base(self, rows: MeasuredRows) -> Any:
        """Log latency by the network."""
        return self._network(rows)


def stacked(runs: list[Run]) -> dict[str, dict[str, Any]]:
    """Figures of each method by variant: ``cost`` relative to one network, and ``figures`` by test.

    Parameters
    ----------
    runs : list of Run
        The default run with several seeds, this one first; each was trained before.
    """
    contest = runs[0].contest
    networks = [run.contest.network(run.folder) for run in runs]
    one = contest.predicts(networks[:1])
    trees = TreeBaseline(contest.dataset, contest.inputs, contest.config).fit(contest.train).predict_log
    residual = ResidualTrees(contest, one).fit(contest.train).predict_log
    methods = {"one network": one}
    for count in range(2, len(networks) + 1):
        methods[f"mean of {count} networks"] = contest.predicts(networks[:count])
    methods |= {
        "XGBoost alone": trees,
        "mean of network and XGBoost": mean_of(one, trees),
        "network, XGBoost on its residual": residual,
    }
    tests = {name: contest.dataset.rows.take(index) for name, index in contest.split.tests.items()}
    sample = next(iter(tests.values()))
    sample = sample.take(np.arange(min(len(sample), COST_ROWS)))
    return {
        name: {
            "cost": 1.0 if predict is one else cost_ratio(one, predict, sample),
            "figures": {test: figures(contest.dataset, rows, predict(rows)) for test, rows in tests.items()},
        }
        for name, predict in methods.items()
    }


def file_of(runs: list[Run], folder: Path) -> Path:
    """Result file of an ensemble."""
    return folder / f"stacked-{'-'.join(run.key[:6] for run in runs)}.json"
