"""Templates of Kernel Tuner's kernels: launch of the lowered program, results of small versions."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("tvm")

from cdmpp.data.importers.kernel_tuner import convolution, gemm
from cdmpp.data.importers.kernel_tuner.template import Builder, LaunchShape, check_program, lowered_work
from cdmpp.errors import DataError
from cdmpp.features.ast import OPERATIONS, Leaf
from cdmpp.features.walk import build_ast
from cdmpp.programs.frontends.tir import programs_from_tir
from cdmpp.programs.tvm_json import load
from tests.data import simt

pytestmark = pytest.mark.tvm

GEMM = {
    **{"MWG": 64, "NWG": 32, "KWG": 32, "MDIMC": 16, "NDIMC": 8, "MDIMA": 32, "NDIMB": 8, "KWI": 2},
    **{"VWM": 2, "VWN": 4, "STRM": 0, "STRN": 0, "SA": 1, "SB": 0, "PRECISION": 32},
}
CONVOLUTION = {
    **{"block_size_x": 48, "block_size_y": 2, "tile_size_x": 2, "tile_size_y": 3, "filter_height": 15},
    **{"filter_width": 15, "use_shmem": 1, "use_padding": 1, "read_only": 0, "use_cmem": 1},
}


def test_launch_of_gemm() -> None:
    assert gemm.launch(GEMM) == LaunchShape((64, 128, 1), (16, 8, 1), 32 * 64 * 4)
    assert gemm.launch({**GEMM, "SB": 1}).shared_bytes == 32 * (64 + 32) * 4
    assert gemm.accumulators(GEMM) == 4 * 4


def test_launch_of_convolution() -> None:
    # 20 x 110 inputs; rows of 48 threads would conflict, and 2 columns of padding bring the next row to bank 16.
    assert convolution.padding_columns(CONVOLUTION) == 2
    assert convolution.launch(CONVOLUTION) == LaunchShape((43, 683, 1), (48, 2, 1), 20 * 112 * 4)
    assert convolution.launch({**CONVOLUTION, "use_padding": 0}).shared_bytes == 20 * 110 * 4
    assert convolution.launch({**CONVOLUTION, "use_shmem": 0}).shared_bytes == 0
    assert convolution.accumulators(CONVOLUTION) == 6


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
    check_program(gemm.KERNEL, parameters)


@pytest.mark.parametrize("changes", CONVOLUTION_CASES)
def test_lowered_convolution_does_the_configured_work(changes: dict[str, int]) -> None:
    parameters = {**CONVOLUTION, **changes}
    assert convolution.inexpressible(parameters) == ""
    check_program(convolution.KERNEL, parameters)


def test_check_refuses_a_wrong_launch() -> None:
    wrong = replace(convolution.KERNEL, launch=lambda p: replace(convolution.launch(p), shared_bytes=4))
    with pytest.raises(DataError, match=re.escape("block_size_x=48") + ".*shared bytes 8960, not 4"):
        check_program(wrong, CONVOLUTION)


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
    assert lowered_work(gemm.build(GEMM)).launch == gemm.launch(GEMM)


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
