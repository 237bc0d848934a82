"""The residual add as a module, so that a model's adds can be found, and its scaled form."""

from __future__ import annotations

import torch
from torch import nn


class _Add(nn.Module):
    """What both forms share: each path with its constant factor.

    Args:
        skip_scale: constant factor on the skip path (DeepNorm's c, DeepScaleLM's lambda).
        branch_scale: constant factor on the branch (DeepScaleLM's beta). A factor of 1 adds nothing to the computation.
    """

    def __init__(self, skip_scale: float = 1.0, branch_scale: float = 1.0) -> None:
        super().__init__()
        self.skip_scale, self.branch_scale = skip_scale, branch_scale

    def scaled(self, residual: torch.Tensor, branch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Each of the two times its factor; untouched where that is 1."""
        return (
            residual if self.skip_scale == 1.0 else self.skip_scale * residual,
            branch if self.branch_scale == 1.0 else self.branch_scale * branch,
        )

    def extra_repr(self) -> str:
        factors = {"skip_scale": self.skip_scale, "branch_scale": self.branch_scale}
        return ", ".join(f"{name}={factor}" for name, factor in factors.items() if factor != 1.0)


class ResidualAdd(_Add):
    """skip_scale * residual + branch_scale * branch. No parameters."""

    def forward(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape, [..., dim], to their sum."""
        residual, branch = self.scaled(residual, branch)
        return residual + branch


class ScaledResidualAdd(_Add):
    """skip_scale * residual + alpha * branch_scale * branch, where alpha is a tensor set from outside.

    In a model with `ProRes` alpha is a 0-dim fp32 view of `AlphaVector`, neither a parameter nor a buffer: it has no
    state-dict key, and a warmup adds no graph to a compiled block. It may be any tensor that broadcasts against the
    branch, such as one value per sequence, shape [B, 1, 1]. In bf16 alpha is rounded to bf16 (exact at 0 and 1); for a
    0-dim alpha only in eager code.
    """

    alpha: torch.Tensor

    def forward(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape, [..., dim], to their scaled sum in their dtype; one fused kernel."""
        residual, branch = self.scaled(residual, branch)
        # A tensor of one or more dimensions would promote bf16 to its own fp32; a 0-dim one does not.
        alpha = self.alpha if self.alpha.ndim == 0 else self.alpha.to(branch.dtype)
        return torch.addcmul(residual, branch, alpha)
