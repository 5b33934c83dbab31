"""Distances between two batches of latents, for regularisation towards an unlabelled target.

Latents are bounded first (:func:`bounded`), so that the distance does not depend on their scale.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Discrepancy = Literal["cmd", "mmd", "coral"]

#: Widths of the kernels of :func:`maximum_mean_discrepancy`, relative to the mean squared distance.
KERNEL_WIDTHS = (0.25, 0.5, 1.0, 2.0, 4.0)


def bounded(latent: Tensor) -> Tensor:
    """Latents in [-1, 1]."""
    return torch.tanh(latent)


def central_moment_discrepancy(source: Tensor, target: Tensor, moments: int = 5) -> Tensor:
    """CMD_K of two batches of bounded latents (CDMPP section 5.2; Zellinger et al.).

    Parameters
    ----------
    source, target : (programs, width), values in [-1, 1]
    moments : int
        K; the mean and the central moments 2..K are compared, each scaled by the interval's width.
    """
    mean_s, mean_t = source.mean(0), target.mean(0)
    width = 2.0
    total: Tensor = (mean_s - mean_t).norm() / width
    for k in range(2, moments + 1):
        gap = ((source - mean_s) ** k).mean(0) - ((target - mean_t) ** k).mean(0)
        total = total + gap.norm() / width**k
    return total


def maximum_mean_discrepancy(source: Tensor, target: Tensor) -> Tensor:
    """Biased squared MMD with a mean of RBF kernels whose widths follow the batch (Long et al., DAN).

    Parameters
    ----------
    source, target : (programs, width)
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
    """Deep CORAL: squared distance of the covariances over 4 * width^2 (Sun and Saenko, 2016).

    Parameters
    ----------
    source, target : (programs, width)
    """
    width = source.shape[1]
    gap = torch.cov(source.T) - torch.cov(target.T)
    total: Tensor = gap.square().sum() / (4 * width * width)
    return total


DISCREPANCIES: dict[Discrepancy, Callable[[Tensor, Tensor], Tensor]] = {
    "cmd": central_moment_discrepancy,
    "mmd": maximum_mean_discrepancy,
    "coral": correlation_alignment,
}
