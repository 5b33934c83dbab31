"""Operators as PyTorch calls: shapes and values of the results."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from cdmpp.data.measure.kit.runtime import call_problems, library_calls
from cdmpp.data.measure.kit.runtime.library_calls import CallError, Tensors, make_call, precision
from cdmpp.data.physics import needed_bytes
from cdmpp.programs.operators import OperatorSpec, lowered_operators, parse_operator

CPU = torch.device("cpu")
#: Operators that only serving libraries have as one kernel.
WITHOUT_CALL = {
    "attention_mixed",
    "grouped_gemm",
    "kv_cache_save",
    "mla_decode",
    "mla_prefill",
    "moe",
    "moe_gating",
    "moe_shuffle",
    "moe_w13",
    "rotary_embedding",
}
#: A small program of every other operator, and the shape of what it gives.
SMALL = {
    "linear:m=3,n=5,k=7,bias=true": (3, 5),
    "linear:m=32,n=16,k=32,dtype=int8": (32, 16),
    "linear:m=32,n=16,k=32,dtype=tfloat32": (32, 16),
    "linear:m=32,n=16,k=32,dtype=fp8": (32, 16),
    "linear:m=32,n=16,k=32,dtype=fp8,scaling=tensor": (32, 16),
    "bmm:batch=2,m=3,n=4,k=5,dtype=bfloat16": (2, 3, 4),
    "conv2d:n=2,c_in=4,h=9,w=7,c_out=6,kh=3,kw=2,stride_h=2,pad_h=1,dil_w=2,groups=2,bias=true": (2, 6, 5, 5),
    "conv2d:n=1,c_in=3,h=8,w=8,c_out=4,kh=3,kw=3,direction=bwd_data": (1, 3, 8, 8),
    "conv2d:n=1,c_in=3,h=8,w=8,c_out=4,kh=3,kw=3,direction=bwd_weight": (4, 3, 3, 3),
    "silu_and_mul:rows=4,cols=6": (4, 6),
    "copy:rows=4,cols=6": (4, 6),
    "copy:rows=4,cols=6,transposed=true": (6, 4),
    "embedding:rows=5,cols=3,table_rows=11": (5, 3),
    "max_pool2d:n=1,c=2,h=6,w=6,kh=3,kw=3,stride_h=2,stride_w=2,pad_h=1,pad_w=1": (1, 2, 3, 3),
    "avg_pool2d:n=1,c=2,h=6,w=6,kh=2,kw=2,stride_h=2,stride_w=2": (1, 2, 3, 3),
    "batch_norm:n=1,c=2,h=6,w=6": (1, 2, 6, 6),
    "reduce_mean:rows=4,cols=6": (4,),
    "argmax:rows=4,cols=6": (4,),
    "attention_prefill:batch=1,q_len=4,heads=2,kv_heads=2,head_dim=8": (1, 2, 4, 8),
    "attention_prefill:batch=1,q_len=4,past_len=3,heads=4,kv_heads=2,head_dim=8": (1, 4, 4, 8),
    "attention_decode:batch=3,past_len=9,heads=4,kv_heads=1,head_dim=8": (3, 4, 1, 8),
    "attention_encoder:batch=1,q_len=4,heads=2,kv_heads=2,head_dim=8": (1, 2, 4, 8),
    **{
        f"{name}:rows=4,cols=6": (4, 6)
        for name, kind in lowered_operators().items()
        if {"rows", "cols"} == {n for n, i in kind.model_fields.items() if i.is_required()} - {"operator"}
        and name not in ("reduce_mean", "silu_and_mul", "copy", "argmax", *WITHOUT_CALL)
    },
}


def test_all_operators_are_covered() -> None:
    assert {text.partition(":")[0] for text in SMALL} | WITHOUT_CALL == set(lowered_operators())
    assert set(get_args(lowered_operators()["relu"].model_fields["operator"].annotation)) <= {
        text.partition(":")[0] for text in SMALL
    }


@pytest.mark.parametrize("text", SMALL)
def test_results_have_the_right_shape_and_are_finite(text: str) -> None:
    spec = parse_operator(text)
    result = make_call(spec.canonical(), Tensors(CPU))()
    if isinstance(result, tuple):  # a backward convolution gives the three gradients, but for the unwanted
        (result,) = (part for part in result if part is not None)
    assert tuple(result.shape) == SMALL[text]
    assert torch.isfinite(result.float()).all()
    assert result.float().abs().max() > 0
    assert needed_bytes(spec) >= result.numel() * result.element_size()


def test_last_query_of_prefill_attends_to_all_keys() -> None:
    spec = parse_operator("attention_prefill:batch=1,q_len=2,past_len=2,heads=1,kv_heads=1,head_dim=8")
    both = parse_operator("attention_encoder:batch=1,q_len=2,heads=1,kv_heads=1,head_dim=8")
    tensors = Tensors(CPU)
    q, k, v = (tensors.floats((1, 1, 2, 8), "float32"), *(tensors.floats((1, 1, 4, 8), "float32") for _ in range(2)))
    scores = (q @ k.transpose(-1, -2)) / 8**0.5
    scores[0, 0, 0, 3] = float("-inf")  # the first of two queries does not see the last of four keys
    expected = torch.softmax(scores, -1) @ v
    torch.testing.assert_close(make_call(spec.canonical(), Tensors(CPU))(), expected)
    assert make_call(both.canonical(), Tensors(CPU))().shape == (1, 1, 2, 8)


def test_only_tfloat32_allows_tf32() -> None:
    allowed = {}
    for dtype in ("tfloat32", "float32"):
        with precision({"dtype": dtype}):
            allowed[dtype] = torch.get_float32_matmul_precision()
    assert allowed == {"tfloat32": "high", "float32": "highest"}
    assert torch.get_float32_matmul_precision() == "highest"


def test_three_inputs_give_a_chain() -> None:
    result = make_call(parse_operator("add:rows=4,cols=6,inputs=3").canonical(), Tensors(CPU, seed=1))()
    tensors = Tensors(CPU, seed=1)
    torch.testing.assert_close(result, sum(tensors.floats((4, 6), "float32") for _ in range(3)))


@pytest.mark.parametrize(
    "text",
    [
        "softmax:rows=4,cols=6,dtype=int8",
        "linear:m=32,n=32,k=32,dtype=int8,bias=true",
        "attention_encoder:batch=1,q_len=4,heads=3,kv_heads=2,head_dim=8",
        "attention_encoder:batch=1,q_len=4,heads=2,kv_heads=2,head_dim=8,dtype=float16,kv_dtype=int8",
        "linear:m=32,n=32,k=32,dtype=bfloat16,weight_dtype=int8",
        "linear:m=32,n=32,k=32,dtype=int8,scaling=channel",
        "linear:m=32,n=32,k=32,dtype=float64",
        "linear:m=32,n=30,k=32,dtype=fp8",
        "bmm:batch=2,m=32,n=32,k=32,dtype=float16,layout=tt",
        "kv_cache_save:rows=4,cols=6",
        "moe:tokens=4,hidden=8,intermediate=8,experts=2,topk=1",
    ],
)
def test_missing_kernels_are_reported(text: str) -> None:
    with pytest.raises(CallError, match="PyTorch"):
        make_call(parse_operator(text).canonical(), Tensors(CPU))


def test_every_operator_states_its_tensors() -> None:
    class Nameless(OperatorSpec):
        """An operator without a rule."""

    with pytest.raises(TypeError, match="tensor_bytes"):
        Nameless.model_validate({"operator": "nameless"})


def test_operators_and_types_with_a_call_are_those_that_are_stated_without_torch() -> None:
    assert set(library_calls._MAKERS) == call_problems.OPERATORS
    assert set(library_calls._TORCH) == set(call_problems.TYPES)
