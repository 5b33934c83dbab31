"""Dedispersion and point in polygon as scheduled programs: the configured work, and correct results on a CPU."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cdmpp.data.importers.kernel_tuner import loops
from cdmpp.features.ast import CompactAST
from cdmpp.features.walk import build_ast
from cdmpp.programs.tvm_json import load

tvm = pytest.importorskip("tvm")
pytestmark = pytest.mark.tvm

TILED = {
    "block_size_x": 8,
    "block_size_y": 96,
    "block_size_z": 1,
    "tile_size_x": 3,
    "tile_size_y": 2,
    "tile_stride_x": 1,
    "tile_stride_y": 0,
    "loop_unroll_factor_channel": 0,
}
POLYGON = {"between_method": 0, "block_size_x": 64, "tile_size": 4, "use_method": 2}


def lowered(program) -> CompactAST:
    return build_ast(*load(tvm.ir.save_json(tvm.IRModule({"main": program}))))


def extents(ast: CompactAST, prefix: str) -> dict[str, int]:
    return {loop.kind: loop.extent for loop in ast.loops if loop.kind.startswith(prefix)}


def local_elements(ast: CompactAST) -> list[int]:
    return sorted(math.prod(b.shape) for b in ast.buffers if b.scope == "local")


def run(program, *arrays: np.ndarray) -> np.ndarray:
    tensors = [tvm.runtime.tensor(array) for array in arrays]
    tvm.compile(program, target="llvm")["main"](*tensors)
    return tensors[-1].numpy()


@pytest.mark.parametrize("strides", [(0, 1), (1, 0)])
def test_dedispersion_launches_the_configured_threads(strides):
    parameters = TILED | {"tile_stride_x": strides[0], "tile_stride_y": strides[1]}
    ast, launch = lowered(loops.dedispersion_program(parameters)), loops.dedispersion_launch(parameters)
    assert extents(ast, "blockIdx") == {"blockIdx.x": launch.grid[0], "blockIdx.y": launch.grid[1]}
    assert launch.grid == (math.ceil(25_000 / 24), math.ceil(2_048 / 192), 1)
    assert extents(ast, "threadIdx") == {"threadIdx.x": 8, "threadIdx.y": 96}
    assert launch.block == (8, 96, 1) and launch.shared_bytes == 0
    # A delay, and one sum at a time.
    assert local_elements(ast) == [1, loops.DEDISPERSION.accumulators(parameters)]


def test_stride_decides_which_samples_a_thread_computes():
    for stride, (thread, item) in ((0, (3, 1)), (1, (1, 8))):
        ast = lowered(loops.dedispersion_program(TILED | {"tile_stride_x": stride}))
        steps = ast.leaves[-1].store.indices[1].steps
        by_kind = {ast.loops[p].kind: step for p, step in steps.items()}
        assert by_kind == {"blockIdx.x": 24, "threadIdx.x": thread, "serial": item}


def test_dedispersion_sums_the_delayed_channels():
    sizes = loops.DedispersionSizes(samples=50, measures=20, channels=6, longest_delay=40)
    rng = np.random.default_rng(0)
    samples = rng.integers(0, 255, (6, 90)).astype("uint8")
    factors = rng.uniform(0, 80, 6).astype("float32")
    expected = np.zeros((20, 50), "float32")
    for measure in range(20):
        for channel in range(6):
            delay = int(np.float32(measure) * np.float32(loops.STEP) * factors[channel])
            expected[measure] += samples[channel, delay : delay + 50]
    small = {"block_size_x": 4, "block_size_y": 3, "tile_size_x": 3}
    for changes in ({}, {"tile_stride_x": 0, "tile_stride_y": 1, "loop_unroll_factor_channel": 3}):
        program = loops.dedispersion_program(TILED | small | changes, sizes, bound=False)
        np.testing.assert_array_equal(run(program, samples, factors, np.full((20, 50), -1, "float32")), expected)


def test_pnpoly_launches_the_configured_threads_and_keeps_a_tile_in_registers():
    ast, launch = lowered(loops.pnpoly_program(POLYGON)), loops.pnpoly_launch(POLYGON)
    assert extents(ast, "blockIdx") == {"blockIdx.x": launch.grid[0]} == {"blockIdx.x": 78_125}
    assert extents(ast, "threadIdx") == {"threadIdx.x": 64} and launch.block == (64, 1, 1)
    # A slope and a comparison; counters and coordinates of four points.
    assert local_elements(ast) == [1, 1, loops.PNPOLY.accumulators(POLYGON), 8]


@pytest.mark.parametrize("method", range(3))
def test_pnpoly_finds_the_points_inside(method):
    sizes = loops.PolygonSizes(points=1_000, vertices=12)
    angle = np.linspace(0, 2 * np.pi, 12, endpoint=False)
    polygon = np.stack([np.cos(angle), np.sin(angle)], axis=1).astype("float32")
    points = np.random.default_rng(0).normal(size=(1_000, 2)).astype("float32")
    expected = np.zeros(1_000, "int32")
    x, y = points.T
    for one, other in zip(polygon, np.roll(polygon, 1, axis=0), strict=True):
        left = x < (other[0] - one[0]) / (other[1] - one[1]) * (y - one[1]) + one[0]
        expected ^= ((one[1] > y) != (other[1] > y)) & left
    for between in (method, 3):
        parameters = POLYGON | {"between_method": between, "block_size_x": 32, "use_method": method}
        program = loops.pnpoly_program(parameters, sizes, bound=False)
        np.testing.assert_array_equal(run(program, points, polygon, np.full(1_000, -1, "int32")), expected)


def test_configurations_that_cannot_be_expressed_give_a_reason():
    assert loops.DEDISPERSION.inexpressible(TILED) == "" and loops.PNPOLY.inexpressible(POLYGON) == ""
    assert "block_size_z" in loops.DEDISPERSION.inexpressible(TILED | {"block_size_z": 2})
    assert "unroll" in loops.DEDISPERSION.inexpressible(TILED | {"loop_unroll_factor_channel": 7})
    assert "between_method" in loops.PNPOLY.inexpressible(POLYGON | {"between_method": 4})
