"""Domain of programs with a GPU schedule: near where training had such programs, out for anything unlike them."""

import numpy as np
import pytest

from cdmpp.model.domain.score import Context, Domain, has_gpu_schedule, label, limited_step
from cdmpp.model.nn.inputs import SUMMARY_COLUMNS

TRAINED = Context("rtx-3090", "tir", "float32", "kernel", "tvm")
COLUMN = {name: i for i, name in enumerate(SUMMARY_COLUMNS)}


def summaries(count: int, seed: int, *, flops: float, blocks: float, family: str = "tir") -> np.ndarray:
    """Programs of some size, whose grids differ."""
    rng = np.random.default_rng(seed)
    out = np.zeros((count, len(SUMMARY_COLUMNS)), dtype=np.float32)
    out[:, COLUMN["flops"]] = flops
    out[:, COLUMN["bytes"]] = flops - 10
    out[:, COLUMN["blocks"]] = blocks + rng.normal(0, 0.5, count) * (blocks > 0)
    out[:, COLUMN["spatial_0"]] = rng.integers(0, 5, count)
    out[:, COLUMN[f"family_{family}"]] = 1
    return out


OPERATORS = summaries(200, 0, flops=37, blocks=0, family="gemm")
CPU = summaries(200, 1, flops=30, blocks=0)
GPU = summaries(400, 2, flops=37, blocks=12)


def fitted(*programs: np.ndarray) -> Domain:
    contexts = frozenset({*TRAINED.keys(), TRAINED.launch_key(), "rtx-3090&"})
    return Domain.fit(np.concatenate(programs), contexts, seed=0, centres=64)


def answer(domain: Domain, program: np.ndarray, context: Context = TRAINED) -> str:
    distance = domain.program_distance(program)
    step = np.full(len(program), domain.step(context))
    scores = distance + limited_step(distance, step, has_gpu_schedule(program))
    return label(float(np.median(scores)))


@pytest.fixture(scope="module")
def with_schedules() -> Domain:
    return fitted(OPERATORS, CPU, GPU)


@pytest.mark.parametrize("device", ["rtx-3090", ""])
def test_schedules_like_the_trained_ones_are_near_on_any_gpu(with_schedules, device):
    again = summaries(50, 3, flops=37, blocks=12)
    assert answer(with_schedules, again, TRAINED._replace(device=device)) == "near"


def test_schedules_unlike_the_trained_ones_are_out(with_schedules):
    assert answer(with_schedules, summaries(20, 4, flops=31, blocks=12)) == "out"
    assert answer(with_schedules, summaries(20, 5, flops=37, blocks=3)) == "out"


def test_schedules_are_out_where_training_had_only_operators_and_cpu_programs():
    assert answer(fitted(OPERATORS, CPU), summaries(20, 3, flops=37, blocks=12)) == "out"
    assert answer(fitted(OPERATORS, CPU), summaries(20, 3, flops=30, blocks=12)) == "out"


def test_other_programs_are_not_affected(with_schedules):
    plain = fitted(OPERATORS, CPU)
    for programs in (OPERATORS, CPU):
        assert answer(with_schedules, programs) == answer(plain, programs) == "in"


def test_schedules_are_kept_with_the_model(with_schedules):
    stored = Domain.load(with_schedules.tensors(), with_schedules.manifest())
    programs = np.concatenate([OPERATORS[:5], GPU[:5], summaries(5, 6, flops=20, blocks=2)])
    np.testing.assert_array_equal(stored.program_distance(programs), with_schedules.program_distance(programs))
    plain = fitted(OPERATORS)
    assert set(plain.tensors()) == {"centres"} and "schedule_reach" not in plain.manifest()


def test_few_trained_schedules_reach_unseen_ones_of_the_same_kind():
    def varied(seed: int) -> np.ndarray:
        out = summaries(300, seed, flops=37, blocks=12)
        for name in ("bytes", "m", "n", "k", "leaves"):
            out[:, COLUMN[name]] += np.random.default_rng([seed, COLUMN[name]]).normal(0, 2, len(out))
        return out

    # With 64 centres for 300 programs, the centres' own programs are far closer to them than any others.
    inside = fitted(OPERATORS, varied(0)).program_distance(varied(1)) <= 1.0
    assert inside.mean() > 0.9
