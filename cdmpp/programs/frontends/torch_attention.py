"""Fused attention on ``meta``: one kernel forward, and the backward pass as forward kernels.

On ``meta`` PyTorch composes attention of products and a softmax. On a GPU it launches one fused kernel
(FlashAttention or its memory-efficient form). The backward kernel has 2.5 times the arithmetic of the forward kernel at
somewhat lower rates (FlashAttention-2, arXiv:2307.08691, sections 3.1 and 4.1). No operator describes it: it is listed
as three forward kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from cdmpp.programs.frontends.eager_rules import Fields

#: Forward kernels that stand for a backward kernel.
BACKWARD_KERNELS = 3
_NAME = "scaled_dot_product_attention"


class Recorder(Protocol):
    """What takes down kernels: :class:`cdmpp.programs.frontends.torch_eager._Recorder`."""

    def launch(self, call: str, fields: Fields, remark: str = "") -> None:
        """Take down a kernel."""

    def missing(self, call: str, reason: str) -> None:
        """Take down a kernel that has no operator."""

    def quiet(self) -> Any:
        """Context in which nothing is taken down."""


def fused_attention(recorder: Recorder, func: Callable[..., Tensor], args: Any, kwargs: Any) -> Tensor:
    """Call ``scaled_dot_product_attention`` and take down its fused kernels instead of its parts."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    q, k, v, mask = (given.pop(name, None) for name in names[:4])

    def attend(*tensors: Tensor) -> Tensor:
        with recorder.quiet(), torch.no_grad():
            return func(*tensors[:3], attn_mask=mask, **given)

    if len(q.shape) != 4:
        recorder.missing(_NAME, "of other than four axes")
        with recorder.quiet():
            return func(q, k, v, attn_mask=mask, **given)
    fields = _fields(q, k, bool(given.get("is_causal")))
    remark = "attention without its mask, which is not read" if mask is not None else ""
    recorder.launch(_NAME, fields, remark)

    class Attention(torch.autograd.Function):
        """Autograd's node of the fused kernels."""

        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            return attend(*tensors)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            with recorder.quiet():
                results = tuple(
                    torch.empty_like(t) if wanted else None
                    for t, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
                )
            for _ in range(BACKWARD_KERNELS):
                recorder.launch(f"{_NAME}_backward", fields, "the backward kernel as three forward kernels")
            return results

    trained = (q, k, v) if mask is None or not mask.requires_grad else (q, k, v, mask)
    return Attention.apply(*trained)  # type: ignore[no-any-return,no-untyped-call]


def _fields(q: Tensor, k: Tensor, causal: bool) -> Fields:
    return {
        "operator": "attention_prefill" if causal else "attention_encoder",
        "dtype": str(q.dtype).removeprefix("torch."),
        "batch": q.shape[0],
        "q_len": q.shape[2],
        "past_len": k.shape[2] - q.shape[2] if causal else 0,
        "heads": q.shape[1],
        "kv_heads": k.shape[1],
        "head_dim": q.shape[3],
    }
