"""Rules of further calls: experts, indexing, group norms, losses; beside ``eager_rules``."""

from __future__ import annotations

from collections.abc import Callable

from cdmpp.programs.frontends.eager_foreach import foreach
from cdmpp.programs.frontends.eager_rules import (
    FREE,
    RULES,
    Call,
    NoRuleError,
    Outcome,
    number_type,
    one,
    outcome,
    size_bytes,
    streamed,
    traffic,
)


def grouped_mm(call: Call) -> Outcome:
    """Rows of groups with a weight each, or the gradient of these weights."""
    a, b, result = call.tensors[0], call.tensors[1], call.results[0]
    if len(a.shape) == 2 and len(b.shape) == 3:
        groups, rows, k, n = b.shape[0], a.shape[0], a.shape[1], b.shape[2]
    elif len(a.shape) == 2 and len(b.shape) == 2:
        groups, rows, k, n = result.shape[0], a.shape[1], a.shape[0], b.shape[1]
    else:
        raise NoRuleError(f"grouped products of {len(a.shape)} and {len(b.shape)} axes")
    fields = {"operator": "grouped_gemm", "dtype": number_type(a), "groups": groups, "rows": rows, "n": n, "k": k}
    return one(fields, "rows are spread evenly over the groups")


def picked(call: Call) -> Outcome:
    """Elements at indices: only those that are picked move."""
    result = call.results[0]
    return one(traffic(2 * size_bytes(result), result), f"aten.{call.name} as relu: the same bytes moved")


def put(call: Call) -> Outcome:
    """Elements written at indices: only those that are written move; a result of its own is a copy first."""
    result = call.results[0]
    values = call.arg(2)
    moved = 2 * size_bytes(values) + (0 if call.name.endswith("_") else 2 * size_bytes(result))
    return one(traffic(moved, result), f"aten.{call.name} as relu: the same bytes moved")


def group_norm(call: Call) -> Outcome:
    """One kernel reads for the statistics, one reads and writes."""
    size = size_bytes(call.tensors[0])
    return Outcome((traffic(size, call.tensors[0]), traffic(2 * size, call.tensors[0])), "two passes by their bytes")


def group_norm_backward(call: Call) -> Outcome:
    """The sums of the gradient and its product with the input, then the gradient of the input."""
    size = size_bytes(call.tensors[0])
    like = call.tensors[0]
    return Outcome((traffic(2 * size, like), traffic(3 * size, like)), "two passes by their bytes")


#: Calls that stream their tensors once, and have no tag in PyTorch that says so.
_STREAMED = (
    "_prelu_kernel",
    "_prelu_kernel_backward",
    "_weight_norm_interface",
    "_weight_norm_interface_backward",
    "adaptive_max_pool2d",
    "adaptive_max_pool2d_backward",
    "binary_cross_entropy",
    "binary_cross_entropy_backward",
    "binary_cross_entropy_with_logits",
    "cumsum",
    "elu_backward",
    "floor_divide",
    "glu",
    "glu_backward",
    "huber_loss",
    "huber_loss_backward",
    "log_sigmoid_backward",
    "log_sigmoid_forward",
    "mish_backward",
    "mse_loss",
    "mse_loss_backward",
    "pixel_shuffle",
    "pixel_unshuffle",
    "scatter",
    "scatter_add",
    "smooth_l1_loss",
    "smooth_l1_loss_backward",
    "softplus_backward",
    "polar",
    "topk",
    "vdot",
)
#: Calls that rename memory.
_VIEWS = ("view_as_complex", "view_as_real")
#: ATen name -> rule.
FURTHER_RULES: dict[str, Callable[[Call], Outcome]] = {
    "_grouped_mm": grouped_mm,
    "index": picked,
    "index_put": put,
    "index_put_": put,
    "native_group_norm": group_norm,
    "native_group_norm_backward": group_norm_backward,
    **dict.fromkeys(_STREAMED, streamed),
    **dict.fromkeys(_VIEWS, lambda call: Outcome()),
}


def further_outcome(call: Call, *, one_pass: bool) -> Outcome:
    """Operators that a call launches, by the rules of this module, then by :func:`outcome`.

    Parameters
    ----------
    one_pass : bool
        Whether PyTorch tags the call as element-wise or as a reduction: without a rule, it streams its tensors once.

    Raises
    ------
    NoRuleError
        No rule exists for the call.
    """
    rule = foreach if call.name.startswith("_foreach_") else FURTHER_RULES.get(call.name)
    if rule is not None:
        return rule(call)
    known = {call.name, call.name.removesuffix("_")} & (RULES.keys() | FREE)
    return streamed(call) if one_pass and not known and call.results else outcome(call)
