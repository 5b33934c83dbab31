"""Losses on log(latency / reference), and distances between two batches of latents.

The distances regularise towards an unlabelled target. Latents are bounded first (:func:`bounded`), so that the distance
does not depend on their scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from cdmpp.model.nn.config import LEVELS


def relative_error_loss(point: Tensor, target: Tensor) -> Tensor:
    """Mean |predicted / measured - 1|, continued linearly where the prediction is over e times too high.

    Users see the mean absolute percentage error. Its gradient explodes for large overestimates, hence the linear
    part. The error of an underestimate is at most 1, so a small multiple of the log error is added to keep a
    gradient.
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


#: Log ratio of latencies at which a pair counts as clearly ordered.
RANKING_SCALE = 0.2


def ranking_loss(predicted: Tensor, measured: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """Pairwise logistic loss on the order of programs, mean over the pairs; 0 without pairs.

    Cross entropy between measured and predicted probability that the first of a pair is slower; the probability is a
    logistic function of the difference of log latencies, ``predicted`` and ``measured``, (rows,). The minimum is
    subtracted: the loss is zero where all differences agree, so it does not act against the error of the latency.
    ``first``, ``second``: (pairs,) int, rows of each pair.
    """
    if not len(first):
        return predicted.sum() * 0
    logits = (predicted[first] - predicted[second]) / RANKING_SCALE
    wanted = torch.sigmoid((measured[first] - measured[second]) / RANKING_SCALE)
    entropy = torch.special.entr(wanted) + torch.special.entr(1 - wanted)
    loss = nn.functional.binary_cross_entropy_with_logits(logits, wanted, reduction="none") - entropy
    mean: Tensor = loss.mean() * RANKING_SCALE
    return mean


Discrepancy = Literal["cmd", "mmd", "coral"]

#: Widths of the kernels of :func:`maximum_mean_discrepancy`, relative to the mean squared distance.
KERNEL_WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)


def bounded(latent: Tensor) -> Tensor:
    """Latents in [-1, 1]."""
    return torch.tanh(latent)


def central_moment_discrepancy(source: Tensor, target: Tensor, moments: int = 5) -> Tensor:
    """CMD_K of two batches of latents in [-1, 1], (programs, width) (CDMPP section 5.2; Zellinger et al.).

    ``moments``: K; the mean and the central moments 2..K are compared, each scaled by the interval's width.
    """
    mean_s, mean_t = source.mean(0), target.mean(0)
    width = 2.0
    total: Tensor = (mean_s - mean_t).norm() / width
    for k in range(2, moments + 1):
        gap = ((source - mean_s) ** k).mean(0) - ((target - mean_t) ** k).mean(0)
        total = total + gap.norm() / width**k
    return total


def maximum_mean_discrepancy(source: Tensor, target: Tensor) -> Tensor:
    """Biased squared MMD of two batches, (programs, width).

    Mean of RBF kernels whose widths follow the batch (Long et al., DAN).
    """
    both = torch.cat((source, target))
    squared = torch.cdist(both, both, compute_mode="donot_use_mm_for_euclid_dist").square()
    # The widths are a scale and have no gradient.
    scale = squared.detach().mean().clamp_min(1e-12)
    kernel = torch.stack([torch.exp(-squared / (scale * w)) for w in KERNEL_WIDTHS]).mean(0)
    n = len(source)
    total: Tensor = kernel[:n, :n].mean() + kernel[n:, n:].mean() - 2 * kernel[:n, n:].mean()
    return total


def correlation_alignment(source: Tensor, target: Tensor) -> Tensor:
    """Deep CORAL: squared distance of the covariances of (programs, width) over 4 * width^2 (Sun and Saenko, 2016)."""
    width = source.shape[1]
    gap = torch.cov(source.T) - torch.cov(target.T)
    total: Tensor = gap.square().sum() / (4 * width * width)
    return total


DISCREPANCIES: dict[Discrepancy, Callable[[Tensor, Tensor], Tensor]] = {
    "cmd": central_moment_discrepancy,
    "mmd": maximum_mean_discrepancy,
    "coral": correlation_alignment,
}
