# ruff: noqa: N803
"""A 256 x 256 x 256 product in TVMScript, as written and as scheduled; tvm_matmul*.json hold each as TVM JSON."""

from tvm.script import tirx as T  # noqa: N812


@T.prim_func(s_tir=True)
def matmul(A: T.Buffer((256, 256), "float32"), B: T.Buffer((256, 256), "float32"), C: T.Buffer((256, 256), "float32")):
    for i, j, k in T.grid(256, 256, 256):
        with T.sblock("C"):
            vi, vj, vk = T.axis.remap("SSR", [i, j, k])
            with T.init():
                C[vi, vj] = T.float32(0)
            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]


@T.prim_func(s_tir=True)
def matmul_tiled(
    A: T.Buffer((256, 256), "float32"), B: T.Buffer((256, 256), "float32"), C: T.Buffer((256, 256), "float32")
):
    for i_0 in T.parallel(64):
        for j_0 in range(16):
            for i_1_init in T.unroll(4):
                for j_1_init in T.vectorized(16):
                    with T.sblock("C_init"):
                        vi = T.axis.spatial(256, i_0 * 4 + i_1_init)
                        vj = T.axis.spatial(256, j_0 * 16 + j_1_init)
                        C[vi, vj] = T.float32(0)
            for k in range(256):
                for i_1 in T.unroll(4):
                    for j_1 in T.vectorized(16):
                        with T.sblock("C_update"):
                            vi = T.axis.spatial(256, i_0 * 4 + i_1)
                            vj = T.axis.spatial(256, j_0 * 16 + j_1)
                            vk = T.axis.reduce(256, k)
                            C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]
