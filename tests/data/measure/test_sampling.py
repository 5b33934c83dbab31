"""Sampled schedules: distinct, reproducible by seed, and extensible."""

from collections.abc import Iterator

import numpy as np
import pytest

from cdmpp.data.measure.pools import WorkerPool, WorkerSettings
from cdmpp.data.measure.sampling import SampledProgram, irregular_programs, prepare_sampler, sample_programs, task_seed
from cdmpp.data.measure.targets import configurations
from cdmpp.programs.program import TensorProgram

pytestmark = pytest.mark.slow

pytest.importorskip("tvm")
TARGET = {"kind": "llvm", "mcpu": "x86-64-v3", "num-cores": 2}


def matmul() -> tuple[str, str]:
    """TVM JSON and structural hash of a small matrix product."""
    import tvm
    from tvm import te, topi

    a, b = te.placeholder((32, 64), name="a"), te.placeholder((64, 48), name="b")
    text = str(tvm.ir.save_json(te.create_prim_func([a, b, topi.nn.matmul(a, b)])))
    return text, TensorProgram.from_tvm_json(text).hash


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(1, WorkerSettings(time_limit_s=120), prepare_sampler, ("llvm",)) as made:
        yield made


def draw(pool: WorkerPool, count: int, seed: int = 0) -> list[SampledProgram]:
    text, digest = matmul()
    found: list[SampledProgram] = pool.call(sample_programs, text, digest, TARGET, count, seed)
    return found


def test_default_is_first_and_programs_are_distinct(pool: WorkerPool) -> None:
    found = draw(pool, 40)
    assert len(found) == 41 and len({p.hash for p in found}) == 41
    assert found[0].origin == "default" and found[0].hash == matmul()[1]
    assert {p.origin for p in found[1:]} == {"sampled"}
    # The hash is the one by which everybody else knows the program.
    assert all(TensorProgram.from_tvm_json(p.tvm_json).hash == p.hash for p in found[:5])


def test_smaller_count_is_a_prefix(pool: WorkerPool) -> None:
    many = [p.hash for p in draw(pool, 40)]
    assert [p.hash for p in draw(pool, 7)] == many[:8]


def test_other_seed_draws_other_programs(pool: WorkerPool) -> None:
    one, other = ({p.hash for p in draw(pool, 20, seed)} for seed in (0, 1))
    assert len(one & other) < 10


def test_small_space_is_exhausted(pool: WorkerPool) -> None:
    import tvm
    from tvm import te, topi

    a = te.placeholder((4, 8), name="a")
    text = str(tvm.ir.save_json(te.create_prim_func([a, topi.nn.relu(a)])))
    found = pool.call(sample_programs, text, TensorProgram.from_tvm_json(text).hash, TARGET, 64, 0)
    assert 1 <= len(found) < 65


def test_zero_schedules_give_the_default_only(pool: WorkerPool) -> None:
    assert [p.origin for p in draw(pool, 0)] == ["default"]


def test_task_seeds_differ_and_are_valid() -> None:
    seeds = {task_seed(task, seed) for task in ("a", "b") for seed in (0, 1)}
    assert len(seeds) == 4 and all(0 < s < 2**31 for s in seeds)


@pytest.mark.parametrize("operator", ["matmul", "softmax"])
def test_gpu_default_is_bound_to_threads(operator: str) -> None:
    from tvm import ir, te, topi

    text, digest = matmul()
    if operator == "softmax":  # several blocks
        a = te.placeholder((64, 32), name="a")
        text = str(ir.save_json(te.create_prim_func([a, topi.nn.softmax(a)])))
        digest = TensorProgram.from_tvm_json(text).hash
    target = {"kind": "cuda", "arch": "sm_80", "max_threads_per_block": 1024, "thread_warp_size": 32}
    (found,) = sample_programs(text, digest, target, 0, 0)
    assert found.origin == "default" and found.hash != digest and "threadIdx.x" in found.tvm_json
    assert TensorProgram.from_tvm_json(found.tvm_json).hash == found.hash


def test_half_precision_products_use_tensor_cores_on_a_gpu() -> None:
    import tvm
    from tvm import te, topi

    a, b = (te.placeholder((64, 64), name=name, dtype="float16") for name in "ab")
    text = str(tvm.ir.save_json(te.create_prim_func([a, b, topi.nn.matmul(a, b)])))
    (gpu,) = configurations(("cuda:h100-sxm",))
    with WorkerPool(1, WorkerSettings(time_limit_s=120), prepare_sampler, ("cuda",)) as cuda:
        programs = cuda.call(sample_programs, text, TensorProgram.from_tvm_json(text).hash, dict(gpu.target), 4, 0)
    assert any("wmma" in program.tvm_json for program in programs)


def test_irregular_schedules_are_distinct_and_compute_the_same() -> None:
    import tvm

    text, digest = matmul()
    found = irregular_programs(text, digest, 8, 0)
    assert len({p.hash for p in found} - {digest}) == len(found) == 8
    assert [p.hash for p in irregular_programs(text, digest, 3, 0)] == [p.hash for p in found[:3]]
    rng, outputs, written = np.random.default_rng(0), [], ""
    a, b = (rng.random(shape, dtype=np.float32) for shape in ((32, 64), (64, 48)))
    for program in found:
        function = tvm.ir.load_json(program.tvm_json)
        written += str(function)
        arguments = [tvm.runtime.tensor(x) for x in (a, b, np.full((32, 48), np.nan, dtype=np.float32))]
        tvm.tirx.build(function.with_attr("global_symbol", "main"), target="llvm")(*arguments)
        outputs.append(arguments[-1].numpy())
    np.testing.assert_allclose(outputs, [a @ b] * 8, rtol=1e-4)
    # Splits that do not divide, and annotated loops.
    assert all(what in written for what in ("T.where", "T.vectorized", "T.parallel", "T.unroll"))
