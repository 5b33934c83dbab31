"""Search a network for two devices with Optuna; trials that are predicted to miss a goal are pruned before training.

The network classifies scikit-learn's handwritten digits. A trial chooses its depth, its width and the batch in which
it will serve. The goals hold on every device: the latency of a batch, and the images per second. Nothing runs on the
devices: the latencies are predictions of eager PyTorch calls.

    python examples/optuna_search.py [--trials 40] [--devices t4 l4] [--latency-ms 1.0] [--images-per-s 1e7]

Needs optuna, torch and scikit-learn: pip install '.[dev]'
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import optuna
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn

from cdmpp import LatencyPredictor


@dataclass(frozen=True)
class Goals:
    """What the network must reach on every device."""

    devices: Sequence[str]
    latency_s: float
    images_per_s: float


def network(depth: int, width: int) -> nn.Sequential:
    """A perceptron from 64 pixels to 10 digits with ``depth`` hidden layers."""
    sizes = [64, *[width] * depth]
    hidden = [layer for n, m in pairwise(sizes) for layer in (nn.Linear(n, m), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def digits() -> list[Tensor]:
    """Training images, validation images, training labels, validation labels."""
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.astype(np.float32) / 16, labels, test_size=0.3, random_state=0, stratify=labels)
    return [torch.from_numpy(part) for part in parts]


def accuracy(module: nn.Module, data: Sequence[Tensor], epochs: int) -> float:
    """Train on the processor; returns the share of validation images that are classified correctly."""
    images, held_images, labels, held_labels = data
    optimiser = torch.optim.AdamW(module.parameters(), lr=3e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(epochs):
        for rows in torch.randperm(len(images), generator=generator).split(128):
            loss = nn.functional.cross_entropy(module(images[rows]), labels[rows])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    with torch.no_grad():
        return float((module(held_images).argmax(1) == held_labels).float().mean())


def search(goals: Goals, trials: int, epochs: int, predictor: LatencyPredictor) -> optuna.Study:
    """Maximise the accuracy among networks that are predicted to reach the goals."""
    data = digits()

    def objective(trial: optuna.Trial) -> float:
        depth = trial.suggest_int("depth", 1, 4)
        width = trial.suggest_int("width", 32, 1024, step=32)
        batch = 2 ** trial.suggest_int("log2_batch", 8, 15)
        with torch.device("meta"):
            shapes = network(depth, width)
            images = torch.empty(batch, 64)
        predictions = predictor.predict_module(shapes, images, list(goals.devices))
        latencies_s = {p.device: p.latency_s for p in predictions}
        trial.set_user_attr("latency_ms", {name: round(1e3 * s, 3) for name, s in latencies_s.items()})
        slowest_s = max(latencies_s.values())
        if slowest_s > goals.latency_s or batch / slowest_s < goals.images_per_s:
            raise optuna.TrialPruned
        torch.manual_seed(0)
        return accuracy(network(depth, width), data, epochs)

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=trials)
    return study


def main(arguments: Sequence[str] | None = None, predictor: LatencyPredictor | None = None) -> optuna.Study:
    """Command line; returns the study."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--devices", nargs="+", default=["t4", "l4"])
    parser.add_argument("--latency-ms", type=float, default=1.0)
    parser.add_argument("--images-per-s", type=float, default=1e7)
    options = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    goals = Goals(options.devices, options.latency_ms / 1e3, options.images_per_s)
    study = search(goals, options.trials, options.epochs, predictor or LatencyPredictor.load())
    states = [trial.state for trial in study.trials]
    print(f"{len(states)} trials, {states.count(optuna.trial.TrialState.PRUNED)} pruned by their predicted latency")
    if not any(state == optuna.trial.TrialState.COMPLETE for state in states):
        print("no network reaches the goals: raise --latency-ms, or lower --images-per-s")
        return study
    best = study.best_trial
    print(f"best: depth {best.params['depth']}, width {best.params['width']}, batch {2 ** best.params['log2_batch']}")
    print(f"accuracy {best.value:.1%}")
    for device, latency_ms in best.user_attrs["latency_ms"].items():
        rate = 2 ** best.params["log2_batch"] / latency_ms * 1e3
        print(f"{device}: {latency_ms:.3f} ms, {rate:.3g} images per second")
    return study


if __name__ == "__main__":
    main()
