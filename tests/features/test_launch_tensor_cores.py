"""Launches of programs with tensor-core intrinsics and software pipelines: hand counts, and what TVM allocates."""

import json
import re
from typing import Any

import pytest

tvm = pytest.importorskip("tvm")

from tvm import s_tir  # noqa: E402

from cdmpp.errors import InvalidProgramError  # noqa: E402
from cdmpp.features import launch_summary  # noqa: E402
from cdmpp.programs.frontends.load import program_from_request  # noqa: E402

#: Two warps multiply tiles of 16 x 16 halves over four steps of k; A goes through shared memory, B does not.
WMMA = """
@T.prim_func(s_tir=True)
def main(A: T.Buffer((32, 64), "float16"), B: T.Buffer((64, 32), "float16"), C: T.Buffer((32, 32), "float32")):
    S = T.sblock_alloc_buffer((32, 64), "float16", scope="shared.dyn")
    FA = T.sblock_alloc_buffer((32, 64), "float16", scope="wmma.matrix_a")
    FB = T.sblock_alloc_buffer((64, 32), "float16", scope="wmma.matrix_b")
    FC = T.sblock_alloc_buffer((32, 32), scope="wmma.accumulator")
    for bx in T.thread_binding(2, thread="blockIdx.x"):
        for ty in T.thread_binding(2, thread="threadIdx.y"):
            with T.sblock("fill"):
                i, j = T.axis.remap("SS", [ty, bx])
                T.reads()
                T.writes(FC[i * 16:i * 16 + 16, j * 16:j * 16 + 16])
                T.tvm_fill_fragment(FC.data, 16, 16, 16, 0, T.float32(0.0))
            for k in range(4):
                for tx in T.thread_binding(32, thread="threadIdx.x"):
                    for v in T.vectorized(8):
                        with T.sblock("copy"):
                            i = T.axis.spatial(32, ty * 16 + tx // 2)
                            j = T.axis.spatial(64, k * 16 + tx % 2 * 8 + v)
                            T.reads(A[i, j])
                            T.writes(S[i, j])
                            T.sblock_attr({"buffer_dim_align": [[0, 0, 32, PADDING]]})
                            S[i, j] = A[i, j]
                with T.sblock("load_a"):
                    i, r = T.axis.remap("SS", [ty, k])
                    T.reads(S[i * 16:i * 16 + 16, r * 16:r * 16 + 16])
                    T.writes(FA[i * 16:i * 16 + 16, r * 16:r * 16 + 16])
                    T.tvm_load_matrix_sync(FA.data, 16, 16, 16, 0, S.data, 16, "row_major")
                with T.sblock("load_b"):
                    r, j = T.axis.remap("SS", [k, bx])
                    T.reads(B[r * 16:r * 16 + 16, j * 16:j * 16 + 16])
                    T.writes(FB[r * 16:r * 16 + 16, j * 16:j * 16 + 16])
                    T.tvm_load_matrix_sync(FB.data, 16, 16, 16, 0, B.data, 16, "row_major")
                with T.sblock("product"):
                    i, j, r = T.axis.remap("SSR", [ty, bx, k])
                    T.reads(FC[i * 16:i * 16 + 16, j * 16:j * 16 + 16], FA[i * 16:i * 16 + 16, r * 16:r * 16 + 16],
                            FB[r * 16:r * 16 + 16, j * 16:j * 16 + 16])
                    T.writes(FC[i * 16:i * 16 + 16, j * 16:j * 16 + 16])
                    T.tvm_mma_sync(FC.data, 0, FA.data, 0, FB.data, 0, FC.data, 0)
            with T.sblock("store"):
                i, j = T.axis.remap("SS", [ty, bx])
                T.reads(FC[i * 16:i * 16 + 16, j * 16:j * 16 + 16])
                T.writes(C[i * 16:i * 16 + 16, j * 16:j * 16 + 16])
                T.tvm_store_matrix_sync(FC.data, 16, 16, 16, 0, C.data, 16, "row_major")
"""

#: A product by two calls of a block, and a store through a view of a region: row tx // 2, columns of 8 floats.
MMA = """
@T.prim_func(s_tir=True)
def main(A: T.Buffer((32, 8), "float16"), C: T.Buffer((64, 64), "float32")):
    F = T.sblock_alloc_buffer((32, 8), "float16", scope="warp")
    G = T.sblock_alloc_buffer((4, 32, 8), scope="warp")
    for bx in T.thread_binding(4, thread="blockIdx.x"):
        for tx in T.thread_binding(32, thread="threadIdx.x"):
            for l in range(8):
                with T.sblock("load"):
                    i, j = T.axis.remap("SS", [tx, l])
                    T.reads(A[i, j])
                    T.writes(F[i, j])
                    F[i, j] = A[i, j]
        with T.sblock("product"):
            b = T.axis.spatial(4, bx)
            T.reads(G[b, 0:32, 0:8], F[0:32, 0:8], F[0:32, 0:8])
            T.writes(G[b, 0:32, 0:8])
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                T.ptx_legacy.mma("m16n8k16", "row", "col", "fp16", "fp16", "fp32", F.data, 0, F.data, 0, G.data, 0, 0)
                T.ptx_legacy.mma("m16n8k16", "row", "col", "fp16", "fp16", "fp32", F.data, 0, F.data, 4, G.data, 4, 0)
        with T.sblock("store"):
            b = T.axis.spatial(4, bx)
            T.reads(G[b, 0:32, 0:8])
            T.writes(C[b * 16:b * 16 + 16, 16:32])
            W = T.match_buffer(G[b, 0:32, 0:8], (32, 8), scope="warp", offset_factor=1)
            D = T.match_buffer(C[b * 16:b * 16 + 16, 16:32], (16, 16), strides=("s", 1), offset_factor=1)
            for tx in T.thread_binding(32, thread="threadIdx.x"):
                for l in range(8):
                    D[tx // 2, tx % 2 * 8 + l] = W[tx, l]
"""

PIPELINE = """
@T.prim_func(s_tir=True)
def main(A: T.Buffer((16, 256), "float16"), B: T.Buffer((16, 256), "float16")):
    T.func_attr({"tirx.noalias": True})
    S = T.sblock_alloc_buffer((16, 256), "float16", scope="shared")
    for tx in T.thread_binding(32, thread="threadIdx.x"):
        for k in T.serial(16, annotations={ANNOTATIONS}):
            for v in T.vectorized(8):
                with T.sblock("copy"):
                    i = T.axis.spatial(16, k)
                    j = T.axis.spatial(256, tx * 8 + v)
                    T.reads(A[i, j])
                    T.writes(S[i, j])
                    T.sblock_attr({BLOCK})
                    S[i, j] = A[i, j]
            for v in range(8):
                with T.sblock("use"):
                    i = T.axis.spatial(16, k)
                    j = T.axis.spatial(256, tx * 8 + v)
                    T.reads(S[i, j])
                    T.writes(B[i, j])
                    B[i, j] = S[i, j]
"""
PASSES = (
    *("PlanAndUpdateBufferAllocationLocation", "ConvertBlocksToOpaque", "ManifestSharedMemoryLocalStage"),
    *("CompactBufferAllocation", "UnifyThreadBinding", "InjectSoftwarePipeline", "LowerOpaqueBlock", "FlattenBuffer"),
)


def launch(text: str) -> tuple[dict[str, Any], Any]:
    program = program_from_request({"tvmscript": text})
    (summary,) = launch_summary(program)
    return summary, tvm.IRModule({"main": tvm.ir.load_json(program.tvm_json)})


@pytest.mark.parametrize(("padding", "row_bytes", "load_cycles"), [(8, 80, 4), (16, 32, 8)])
def test_tensor_core_program_by_hand(padding: int, row_bytes: int, load_cycles: int) -> None:
    summary, _ = launch(WMMA.replace("PADDING", str(padding)))
    assert (summary["blocks"], summary["threads"], summary["main_store_trips"]) == (2, 64, 4)
    assert summary["tensor_ops"] == 2 * 4 * 2 * 16**3  # warps, steps of k, operations of a tile
    assert summary["shared_bytes"] == 32 * row_bytes
    assert summary["local_words"] == 8 + 4 + 4  # 16 x 16 floats, halves and halves over 32 lanes
    assert summary["global_load_sectors"] == 4 * (16 + 16)  # rows of 32 bytes of A and of B
    assert summary["global_store_sectors"] == 16 * 2
    # Four requests of 8 rows of 16 bytes: rows of 80 bytes are in different banks, every fourth row of 32 is not.
    assert summary["shared_load_cycles"] == 4 * load_cycles
    assert summary["shared_store_cycles"] == 4 * 4
    assert (summary["active_lanes"], summary["async_stages"]) == (1.0, 0)


def test_calls_of_a_block_count_once_and_views_have_the_place_of_their_region() -> None:
    summary, _ = launch(MMA)
    assert (summary["blocks"], summary["threads"], summary["main_store_trips"]) == (4, 32, 1)
    assert summary["tensor_ops"] == 2 * 16**3
    assert summary["local_words"] == 4 + 8
    assert summary["global_store_sectors"] == 8 * 16 * 2
    assert summary["global_load_sectors"] == 8 * 16


@pytest.mark.parametrize(
    ("stages", "order", "copies", "block", "tiles", "asynchronous"),
    [
        ([0, 3], [0, 1], ', "software_pipeline_async_stages": [0]', "", 4, 4),
        ([0, 1], [0, 1], "", "", 2, 0),
        ([0, 1], [1, 0], "", "", 1, 0),
        ([0, 1], [1, 0], "", '"double_buffer_scope": 0', 2, 0),
        ([0, 0, 1], [0, 2, 1], "", '"tirx.manifest_shared_memory_local_stage": 1', 1, 0),
    ],
)
def test_software_pipeline_keeps_as_many_tiles_as_tvm(
    stages: list[int], order: list[int], copies: str, block: str, tiles: int, asynchronous: int
) -> None:
    annotations = f'"software_pipeline_stage": {stages}, "software_pipeline_order": {order}{copies}'
    text = PIPELINE.replace("{ANNOTATIONS}", "{" + annotations + "}").replace("{BLOCK}", "{" + block + "}")
    summary, module = launch(text)
    assert (summary["shared_bytes"], summary["async_stages"]) == (tiles * 256 * 2, asynchronous)
    assert summary["local_words"] == (4 if "manifest" in block else 0)  # 8 halves wait in registers
    assert summary["global_load_sectors"] == 16 * 16  # 32 lanes of 16 bytes
    for name in PASSES:
        module = getattr(s_tir.transform if hasattr(s_tir.transform, name) else tvm.tirx.transform, name)()(module)
    assert re.search(rf"\bS = T\.alloc_shared\(\({tiles * 256},\)", module.script())
    (lowered,) = launch_summary(program_from_request({"tvm_json": tvm.ir.save_json(module)}))
    assert lowered["async_stages"] == asynchronous


def test_pipeline_with_a_stage_for_another_number_of_statements_is_refused() -> None:
    text = PIPELINE.replace("{BLOCK}", "{}").replace("{ANNOTATIONS}", '{"software_pipeline_stage": [0, 1, 1]}')
    with pytest.raises(InvalidProgramError, match="3 stages for 2 statements"):
        launch(text)


def test_nodes_that_do_not_fit_together_are_refused() -> None:
    module = tvm.ir.save_json(launch(WMMA.replace("PADDING", "8"))[1])
    document = json.loads(module)
    buffers = [n for n in document["nodes"] if n["type"].endswith("BufferType")]
    for buffer in buffers:
        buffer["data"]["shape"] = document["nodes"].index({"type": "None"})
    with pytest.raises(InvalidProgramError, match="nodes are broken"):
        launch_summary(program_from_request({"tvm_json": json.dumps(document)}))
