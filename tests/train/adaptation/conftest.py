"""A small model with random weights and made-up measurements of a device that it never saw."""

from pathlib import Path

import numpy as np
import pytest

from cdmpp.predict.predictor import LatencyPredictor
from cdmpp.programs.program import TensorProgram
from tests.model.nn.synthetic import write_artifact
from tests.threads import one_thread

__all__ = ["one_thread"]

DEVICE = "h100-sxm5-80gb"


@pytest.fixture(scope="module")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "base"
    write_artifact(path)
    return path


@pytest.fixture
def base(base_folder: Path) -> LatencyPredictor:
    return LatencyPredictor.load(base_folder)


def programs(count: int, seed: int = 0) -> list[TensorProgram]:
    """Matrix products and softmaxes of many sizes, every one another."""
    rng = np.random.default_rng(seed)
    by_text: dict[str, TensorProgram] = {}
    while len(by_text) < count:
        m, n, k = (int(2 ** rng.uniform(5, 12)) for _ in range(3))
        text = f"linear:m={m},n={n},k={k}" if rng.random() < 0.6 else f"softmax:rows={m},cols={n}"
        program = TensorProgram.from_operator(text)
        by_text[program.hash] = program
    return list(by_text.values())


def pairs(base: LatencyPredictor, count: int, seed: int = 0) -> list[tuple[TensorProgram, float]]:
    """What a device would take that is slower than the model says: GEMMs by half, the others by a fifth."""
    rng, queries = np.random.default_rng(seed + 100), programs(count, seed)
    output = base.predict(queries, DEVICE)
    slower = [1.5 if p.name.startswith("linear") else 1.2 for p in queries]
    noise = np.exp(rng.normal(0, 0.03, count))
    return [
        (p, (answer.latency_s or 0) * by * float(e))
        for p, answer, by, e in zip(queries, output, slower, noise, strict=True)
    ]
