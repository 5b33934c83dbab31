"""What is learned online: near what was measured it holds, far from it little, failures count as slow."""

from pathlib import Path

import numpy as np
import pytest

from cdmpp.errors import ArtifactError
from cdmpp.features.class_features import PROGRAM_COLUMNS
from cdmpp.features.encode import EncodedPrograms
from cdmpp.integrations.online import FAILED_FACTOR, OnlineResiduals, read_state, summary, write_state

pytestmark = pytest.mark.slow


def programs(count: int, seed: int = 0, at: float = 0.0) -> np.ndarray:
    """Summaries of programs of one to three leaves with random columns around a point."""
    rng = np.random.default_rng(seed)
    encoded = [
        EncodedPrograms(
            (at + 10 * rng.random((1, 1 + i % 3, 6))).astype(np.float32),
            np.zeros(1 + i % 3, dtype=np.int32),
            np.ones((1, len(PROGRAM_COLUMNS))),
            "float32",
            "tir",
        )
        for i in range(count)
    ]
    return summary(encoded)


def truth(rows: np.ndarray) -> np.ndarray:
    """A smooth residual."""
    return 0.3 * np.sin(rows[:, :3].sum(axis=1))


def test_residuals_are_followed_between_the_measured_ones() -> None:
    known, asked = programs(100), programs(60, seed=1)
    base = np.full(100, -9.0)
    online = OnlineResiduals()
    online.learn(known, base, np.exp(base + truth(known)).tolist())
    assert len(online) == 100
    at_measured = online.correction(known, base)
    assert np.abs(at_measured - truth(known)).mean() < 0.5 * np.abs(truth(known)).mean()
    found = online.correction(asked, np.full(60, -9.0))
    assert np.corrcoef(found, truth(asked))[0, 1] > 0.5


def test_an_offset_is_learned_from_one_program_and_a_slope_from_several() -> None:
    one = OnlineResiduals()
    one.learn(programs(1), np.array([-9.0]), [float(np.exp(-8.0))])
    assert one.correction(programs(5, seed=3), np.full(5, -9.0)) == pytest.approx(1.0, abs=1e-6)
    # The network's answers spread twice as far as the measured ones.
    base = np.linspace(-11, -7, 60)
    many = OnlineResiduals()
    many.learn(programs(60), base, np.exp(-9 + (base + 9) / 2).tolist())
    low, high = many.correction(programs(2, seed=4), np.array([-11.0, -7.0]))
    assert low > 0.4 and high < -0.4


def test_failures_are_slower_than_all_that_ran() -> None:
    rows, base = programs(20), np.full(20, -9.0)
    seconds: list[float | None] = [None if i % 4 == 0 else 1e-4 for i in range(20)]
    online = OnlineResiduals()
    online.learn(rows, base, seconds)
    failed = [i for i, s in enumerate(seconds) if s is None]
    assert np.exp(online.learned.log_s[failed]) == pytest.approx(FAILED_FACTOR * 1e-4)
    found = online.correction(rows, base)
    ran = [i for i, s in enumerate(seconds) if s is not None]
    assert found[failed].min() > found[ran].max()


def test_order_of_rounds_does_not_matter() -> None:
    rows, base = programs(24), np.linspace(-10, -8, 24)
    seconds = np.exp(base + truth(rows)).tolist()
    whole, parts = OnlineResiduals(), OnlineResiduals()
    whole.learn(rows, base, seconds)
    for start in (0, 8, 16):
        part = slice(start, start + 8)
        parts.learn(rows[part], base[part], seconds[part])
    asked, at = programs(10, seed=5), np.full(10, -9.0)
    np.testing.assert_allclose(parts.correction(asked, at), whole.correction(asked, at), rtol=1e-9)


def test_nothing_learned_nothing_corrected() -> None:
    assert (OnlineResiduals().correction(programs(3), np.zeros(3)) == 0).all()


def test_written_and_read_back(tmp_path: Path) -> None:
    online = OnlineResiduals()
    base = np.linspace(-10, -8, 12)
    online.learn(programs(12), base, np.exp(base + 0.2).tolist())
    path = tmp_path / "state.safetensors"
    write_state(path, {"task": online}, {"task": -9.5}, "model")
    found, reference, model_id = read_state(path)
    assert reference == {"task": -9.5} and model_id == "model"
    asked, at = programs(6, seed=2), np.full(6, -9.0)
    np.testing.assert_array_equal(found["task"].correction(asked, at), online.correction(asked, at))


@pytest.mark.parametrize("content", [b"", b"{}", b"\x02\0\0\0\0\0\0\0{}", b"no such thing" * 10])
def test_other_files_are_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "state"
    path.write_bytes(content)
    with pytest.raises(ArtifactError, match="state"):
        read_state(path)
