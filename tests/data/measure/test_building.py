"""Arguments of built programs."""

from __future__ import annotations

import pytest

from cdmpp.data.measure.building import argument_list

ALIAS = """
@T.prim_func
def main(A: T.Buffer((8, 8), "float32"), B: T.Buffer((8, 8), "float32")):
    T.func_attr({"tirx.noalias": True})
    flat = T.decl_buffer((64,), "float32", data=B.data)
    for i in range(64):
        flat[i] = A[i // 8, i % 8] + T.float32(1)
"""


@pytest.mark.tvm
def test_last_argument_is_the_result_even_through_an_alias() -> None:
    tvm = pytest.importorskip("tvm")
    from tvm.script import tirx

    function = tvm.script.from_source(ALIAS, extra_vars={"T": tirx})
    assert argument_list(function) == (((8, 8), "float32", False), ((8, 8), "float32", True))
