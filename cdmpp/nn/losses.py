"""Losses on log(latency / reference)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cdmpp.nn.config import LEVELS


def relative_error_loss(point: Tensor, target: Tensor) -> Tensor:
    """Mean |predicted / measured - 1|, continued linearly where the prediction is over e times too high.

    The mean absolute percentage error itself is what users see; its gradient explodes for a bad start,
    hence the linear part. An underestimate is bounded by 1, so its log error is added lightly to keep
    a gradient.
    """
    error = point - target
    bounded = error.clamp(max=1.0)
    relative = torch.expm1(bounded).abs() + (error - bounded) * 2.718281828
    return relative.mean() + 0.1 * nn.functional.smooth_l1_loss(point, target, beta=0.2)


def pinball_loss(quantiles: Tensor, target: Tensor) -> Tensor:
    """Mean pinball loss over the network's quantile levels."""
    levels = torch.tensor(LEVELS, device=target.device, dtype=target.dtype)
    error = target[:, None] - quantiles
    return torch.maximum(levels * error, (levels - 1) * error).mean()


#: Ratio of latencies, as a logarithm, from which on a pair counts as clearly ordered.
RANKING_SCALE = 0.2


def ranking_loss(predicted: Tensor, measured: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Pairwise logistic loss on the order of programs.

    The cross entropy between the measured and the predicted probability that one of a pair is slower, a
    logistic function of the difference of their log latencies, less its least value: zero where all
    differences agree, so that it never pulls against the error of the latency itself.

    Parameters
    ----------
    predicted, measured : (rows,), log latencies
    first, second : (pairs,) int, rows that are compared

    Returns
    -------
    Tensor
        Mean over the pairs; 0 without pairs.
    """
    if not len(first):
        return predicted.sum() * 0
    asked = (predicted[first] - predicted[second]) / RANKING_SCALE
    wanted = torch.sigmoid((measured[first] - measured[second]) / RANKING_SCALE)
    entropy = torch.special.entr(wanted) + torch.special.entr(1 - wanted)
    loss = nn.functional.binary_cross_entropy_with_logits(asked, wanted, reduction="none") - entropy
    mean: Tensor = loss.mean() * RANKING_SCALE
    return mean
