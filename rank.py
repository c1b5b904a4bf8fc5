"""The theory's numbers: effective rank, cumulative decay, correlation.

Residual shortcuts push a network towards features of high rank; decaying them (x_{l+1} = α_l·x_l + f_l(x_l), Eq. 3)
lowers it. This file measures both sides of that claim, in float64:

    ρ(A)  = −Σ_i σ̄_i log σ̄_i,   σ̄_i = σ_i / Σ_j σ_j          (Eq. 6)    effective_rank(features)
    α_eff = Π_l α_l                                             (Eq. 4)    alpha_eff(alphas)

    >>> import torch, rank
    >>> rank.effective_rank(torch.randn(10_000, 768))           # entropy of the spectrum, at most log 768 = 6.64
    >>> rank.alpha_min_for(depth=12)                            # 0.600…: the α_min whose α_eff is the best ViT-B's
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

BEST_ALPHA_EFF = 3.6e-3  # ViT-B's best, α_min = 0.6 over its 24 shortcuts (paper Table 1, counted per shortcut)


# ---- Effective rank -------------------------------------------------------------------------------------------------


def spectral_entropy(singular_values: Tensor | Sequence[float]) -> float:
    """Eq. 6: ρ = −Σ_i σ̄_i log σ̄_i with σ̄_i = σ_i / Σ_j σ_j, in nats; exp(ρ) is Roy & Vetterli's effective rank.

    `singular_values` has any shape and order. Zeros contribute 0; a spectrum of zeros has entropy 0.
    Raises ValueError where a value is negative, infinite or NaN.
    """
    sigma = torch.as_tensor(singular_values, dtype=torch.float64).flatten()
    if not (torch.isfinite(sigma).all() and (sigma >= 0).all()):
        raise ValueError("singular values must be finite and not negative")
    largest = sigma.max().item() if len(sigma) else 0.0
    if largest == 0:
        return 0.0
    sigma = sigma / largest  # so that neither huge nor tiny values overflow in the sum
    return torch.special.entr(sigma / sigma.sum()).sum().item()


def effective_rank(features: Tensor) -> float:
    """Eq. 6 of the covariance between samples, A(i, j) = ⟨z_i − z̄_i, z_j − z̄_j⟩; features (n, d), one row a sample.

    As in the authors' code, every sample is centred across its own d channels. A is n×n and is never built: with Z the
    centred features, A = Z Zᵀ has the same nonzero singular values as the d×d product Zᵀ Z.
    A zero matrix, and one whose rows are each constant, has rank 0. Raises ValueError where a feature is not finite.
    """
    if features.ndim != 2 or 0 in features.shape:
        raise ValueError(f"features must be (samples, channels), not {tuple(features.shape)}")
    z = features.detach().cpu().double()
    largest = z.abs().max().item()
    if not math.isfinite(largest):
        raise ValueError("features must be finite")
    if largest == 0:
        return 0.0
    z = z / largest
    z = z - z.mean(dim=1, keepdim=True)
    rounding = 4 * torch.finfo(torch.float64).eps
    z = torch.where(z.abs().amax(dim=1, keepdim=True) > rounding, z, 0.0)  # a constant row is zero, not its rounding
    return spectral_entropy(torch.linalg.eigvalsh(z.T @ z).clamp(min=0))


# ---- Cumulative decay -----------------------------------------------------------------------------------------------


def alpha_eff(alphas: Sequence[float]) -> float:
    """Cumulative decay Π_l α_l over all shortcuts: the weight of the network's input in its output (Eq. 4)."""
    return math.prod(float(alpha) for alpha in alphas)


def alpha_min_for(depth: int, target: float = BEST_ALPHA_EFF, shortcuts_per_block: int = 2) -> float:
    """The α_min whose linear schedule over `depth` blocks has alpha_eff = `target`, by bisection.

    The schedule is Eq. 5 as the authors' code has it: every shortcut its own α, equal steps from 1 to α_min, both ends
    included. The product grows with α_min, from 0 to 1. Raises ValueError for a target outside (0, 1] or fewer than
    two shortcuts.
    """
    count = depth * shortcuts_per_block
    if not 0 < target <= 1:
        raise ValueError(f"the cumulative decay must lie in (0, 1], not {target}")
    if count < 2:
        raise ValueError(f"a schedule from 1 to α_min needs two shortcuts or more, not {count}")
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        product = alpha_eff([1 - (1 - middle) * i / (count - 1) for i in range(count)])
        low, high = (middle, high) if product < target else (low, middle)
    return high


# ---- Correlation ----------------------------------------------------------------------------------------------------


def pearson(x: Tensor | Sequence[float], y: Tensor | Sequence[float]) -> float:
    """Pearson's correlation of two equally long series, in [−1, 1] (the paper's Figure 6: rank against accuracy).

    Raises ValueError where it is not defined: lengths that differ, fewer than two values, a value that is not finite,
    or a constant series.
    """
    x, y = (torch.as_tensor(series, dtype=torch.float64).flatten() for series in (x, y))
    if len(x) != len(y) or len(x) < 2:
        raise ValueError(f"Pearson's r is not defined for series of {len(x)} and {len(y)} values")
    if not (torch.isfinite(x).all() and torch.isfinite(y).all()):
        raise ValueError("Pearson's r is not defined for values that are not finite")
    if x.min() == x.max() or y.min() == y.max():
        raise ValueError("Pearson's r is not defined for a constant series")
    x, y = (series / series.abs().max() for series in (x, y))  # no overflow, no underflow in the squares
    x, y = (series - series.mean() for series in (x, y))
    return (x @ y / (x.norm() * y.norm())).clamp(-1, 1).item()
