"""Templates of Kernel Tuner's kernels: launch of the lowered program, and correct results of small versions."""

import math

import numpy as np
import pytest

from cdmpp.data.importers.kernel_tuner import convolution, gemm, loops
from cdmpp.data.importers.kernel_tuner.template import Builder
from cdmpp.features.ast import OPERATIONS, CompactAST, Leaf
from cdmpp.features.walk import build_ast
from cdmpp.programs.frontends.tir import programs_from_tir
from cdmpp.programs.tvm_json import load
from tests.data import simt
from tests.data.lowered import lowered_work

tvm = pytest.importorskip("tvm")
pytestmark = pytest.mark.tvm

GEMM = {
    **{"MWG": 64, "NWG": 32, "KWG": 32, "MDIMC": 16, "NDIMC": 8, "MDIMA": 32, "NDIMB": 8, "KWI": 2},
    **{"VWM": 2, "VWN": 4, "STRM": 0, "STRN": 0, "SA": 1, "SB": 0, "PRECISION": 32},
}
CONVOLUTION = {
    **{"block_size_x": 48, "block_size_y": 2, "tile_size_x": 2, "tile_size_y": 3, "filter_height": 15},
    **{"filter_width": 15, "use_shmem": 1, "use_padding": 1, "read_only": 0, "use_cmem": 1},
}


@pytest.mark.parametrize("width", [16, 48, 80, 96])
def test_padding_follows_the_kernel(width: int) -> None:
    """Padding columns: (32 - (border + tile - block)) & 31 where the block is no multiple of 32."""
    for tile in range(1, 9):
        parameters = {**CONVOLUTION, "block_size_x": width, "tile_size_x": tile}
        expected = (32 - (14 + width * tile - width)) & 31 if width % 32 else 0
        assert convolution.padding_columns(parameters) == expected


GEMM_CASES = [
    {},
    {"SA": 0, "SB": 1, "NDIMB": 16, "VWN": 2},
    {"SB": 1, "MDIMA": 8, "VWM": 1, "VWN": 1},
    {"SA": 0, "STRM": 1, "STRN": 1},
    {"SB": 1, "STRM": 1, "STRN": 1, "MDIMC": 8, "NDIMC": 16, "NDIMB": 16, "VWN": 1, "VWM": 8, "MDIMA": 8},
    {"KWG": 16, "MWG": 128, "NWG": 128, "MDIMC": 32, "NDIMC": 32, "MDIMA": 64, "NDIMB": 64, "SB": 1, "VWN": 2},
]
CONVOLUTION_CASES = [
    {},
    {"use_shmem": 0, "use_padding": 0, "read_only": 1},
    {"block_size_x": 64, "tile_size_y": 2, "read_only": 1},
    {"block_size_x": 2, "block_size_y": 32, "tile_size_x": 8, "tile_size_y": 1},
    {"block_size_x": 112, "block_size_y": 8, "tile_size_x": 3, "tile_size_y": 4, "use_padding": 0},
]


@pytest.mark.parametrize("changes", GEMM_CASES)
def test_lowered_gemm_does_the_configured_work(changes: dict[str, int]) -> None:
    parameters = {**GEMM, **changes}
    assert gemm.inexpressible(parameters) == ""
    m, n = gemm.sides(parameters)
    assert lowered_work(gemm.build(parameters)) == (gemm.launch(parameters), m.each * n.each)


@pytest.mark.parametrize("changes", CONVOLUTION_CASES)
def test_lowered_convolution_does_the_configured_work(changes: dict[str, int]) -> None:
    parameters = {**CONVOLUTION, **changes}
    assert convolution.inexpressible(parameters) == ""
    sums = parameters["tile_size_x"] * parameters["tile_size_y"]
    assert lowered_work(convolution.build(parameters)) == (convolution.launch(parameters), sums)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"SA": 0, "SB": 1, "NDIMB": 8, "VWN": 2},
        {"SB": 1, "MDIMA": 2, "VWM": 1, "VWN": 1},
        {"SA": 0, "STRM": 1, "STRN": 1},
        {"SB": 1, "STRM": 1, "STRN": 1, "MDIMC": 2, "MDIMA": 4, "NDIMB": 8, "VWM": 4, "VWN": 2},
    ],
)
def test_small_gemm_is_a_matrix_product(changes: dict[str, int]) -> None:
    small = {"MWG": 16, "NWG": 32, "KWG": 8, "MDIMC": 4, "NDIMC": 4, "MDIMA": 8, "NDIMB": 4}
    parameters = {**GEMM, **small, **changes}
    assert gemm.inexpressible(parameters, 32) == ""
    generator = np.random.default_rng(1)
    a, b, c = (generator.standard_normal((32, 32), dtype=np.float32) for _ in range(3))
    result = c.copy()
    simt.run(gemm.build(parameters, 32), {"alpha": 1.5, "beta": 0.5, "A": a, "B": b, "C": result})
    np.testing.assert_allclose(result, 1.5 * (b.T @ a) + 0.5 * c, atol=1e-4)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("changes", [{}, {"use_padding": 1}, {"use_shmem": 0}, {"read_only": 1}])
def test_small_convolution_is_a_convolution(changes: dict[str, int], whole: bool) -> None:
    blocks = {"block_size_x": 4, "block_size_y": 2, "tile_size_x": 2, "tile_size_y": 2 if whole else 3}
    filters = {"filter_height": 3, "filter_width": 5, "use_padding": 0}
    parameters = {**CONVOLUTION, **blocks, **filters, **changes}
    size = 16
    generator = np.random.default_rng(2)
    image = generator.standard_normal((size + 2, size + 4), dtype=np.float32)
    weights = generator.standard_normal((3, 5), dtype=np.float32)
    output = np.full((size, size), np.nan, dtype=np.float32)
    simt.run(convolution.build(parameters, size), {"output": output, "input": image, "filter": weights})
    windows = np.lib.stride_tricks.sliding_window_view(image, (3, 5))
    np.testing.assert_allclose(output, np.einsum("yxij,ij->yx", windows, weights), atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"PRECISION": 16}, "precision other than float32"),
        ({"STRM": 2}, "switch other than 0 and 1"),
        ({"VWM": 0}, "size below 1"),
        ({"MWG": 48}, "sizes that do not divide each other"),
        ({"VWN": 8}, "sizes that do not divide each other"),
        ({"MDIMA": 64, "NDIMC": 16}, "sizes that do not divide each other"),
    ],
)
def test_inexpressible_gemm(changes: dict[str, int], reason: str) -> None:
    assert gemm.inexpressible({**GEMM, **changes}) == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"use_cmem": 0}, "filter outside of constant memory"),
        ({"filter_width": 16}, "filter of even size"),
        ({"use_shmem": 2}, "switch other than 0 and 1"),
        ({"tile_size_x": 0}, "size below 1"),
    ],
)
def test_inexpressible_convolution(changes: dict[str, int], reason: str) -> None:
    assert convolution.inexpressible({**CONVOLUTION, **changes}) == reason


def test_builder_reports_an_error_and_ends() -> None:
    """A builder that failed leaves no frame open for the next one."""
    with pytest.raises(RuntimeError, match="stop"), Builder("broken") as ir, ir.loops(("i", "serial", 4)):
        raise RuntimeError("stop")
    assert lowered_work(gemm.build(GEMM))[0] == gemm.launch(GEMM)


def test_parameters_without_effect_give_the_same_program() -> None:
    def digest(parameters: dict[str, int]) -> str:
        return programs_from_tir(gemm.build(parameters))[0].hash

    unstaged = {**GEMM, "SA": 0}
    assert digest({**unstaged, "MDIMA": 8}) == digest(unstaged)
    assert digest({**GEMM, "MDIMA": 8}) != digest(GEMM)


def test_load_through_the_read_only_cache_is_a_marked_load() -> None:
    def update(read_only: int) -> Leaf:
        parameters = {**CONVOLUTION, "use_shmem": 0, "use_padding": 0, "read_only": read_only}
        (program,) = programs_from_tir(convolution.build(parameters))
        leaves = build_ast(*load(program.tvm_json or "")).leaves
        return next(leaf for leaf in leaves if leaf.name == "sums_update")

    plain, cached = update(0), update(1)
    marked = [count + (name == "other_call") for name, count in zip(OPERATIONS, plain.counts, strict=True)]
    assert cached.counts == marked
    assert cached.library_calls == 0
    assert [read.buffer.name for read in cached.reads] == [read.buffer.name for read in plain.reads]
    assert [read.indices for read in cached.reads] == [read.indices for read in plain.reads]


TILED = {"block_size_x": 8, "block_size_y": 96, "block_size_z": 1, "tile_size_x": 3, "tile_size_y": 2}
TILED |= {"tile_stride_x": 1, "tile_stride_y": 0, "loop_unroll_factor_channel": 0}
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
    assert local_elements(ast) == [1, 1]


def test_stride_decides_which_samples_a_thread_computes():
    for stride, (thread, item) in ((0, (3, 1)), (1, (1, 8))):
        ast = lowered(loops.dedispersion_program(TILED | {"tile_stride_x": stride}))
        steps = ast.leaves[-1].store.indices[1].steps
        by_kind = {ast.loops[p].kind: step for p, step in steps.items()}
        assert by_kind == {"blockIdx.x": 24, "threadIdx.x": thread, "serial": item}


@pytest.fixture
def serial_threads(monkeypatch):
    """Loops over threads become serial, so that a CPU can run the program."""
    from tvm.script.ir_builder import tirx

    monkeypatch.setattr(tirx, "thread_binding", lambda extent, thread: tirx.serial(extent))


def test_dedispersion_sums_the_delayed_channels(serial_threads):
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
        program = loops.dedispersion_program(TILED | small | changes, sizes)
        np.testing.assert_array_equal(run(program, samples, factors, np.full((20, 50), -1, "float32")), expected)


def test_pnpoly_launches_the_configured_threads_and_keeps_a_tile_in_registers():
    ast, launch = lowered(loops.pnpoly_program(POLYGON)), loops.pnpoly_launch(POLYGON)
    assert extents(ast, "blockIdx") == {"blockIdx.x": launch.grid[0]} == {"blockIdx.x": 78_125}
    assert extents(ast, "threadIdx") == {"threadIdx.x": 64} and launch.block == (64, 1, 1)
    # A slope and a comparison; counters and coordinates of four points.
    assert local_elements(ast) == [1, 1, 4, 8]


@pytest.mark.parametrize("method", range(3))
def test_pnpoly_finds_the_points_inside(method, serial_threads):
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
        program = loops.pnpoly_program(parameters, sizes)
        np.testing.assert_array_equal(run(program, points, polygon, np.full(1_000, -1, "int32")), expected)


def test_configurations_that_cannot_be_expressed_give_a_reason():
    assert loops.DEDISPERSION.inexpressible(TILED) == "" and loops.PNPOLY.inexpressible(POLYGON) == ""
    assert "block_size_z" in loops.DEDISPERSION.inexpressible(TILED | {"block_size_z": 2})
    assert "unroll" in loops.DEDISPERSION.inexpressible(TILED | {"loop_unroll_factor_channel": 7})
    assert "between_method" in loops.PNPOLY.inexpressible(POLYGON | {"between_method": 4})
