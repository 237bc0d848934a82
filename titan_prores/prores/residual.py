"""The residual add as a module, so that a model's adds can be found, and its scaled form."""

from __future__ import annotations

import torch
from torch import nn


class ResidualAdd(nn.Module):
    """skip_scale * residual + branch. No parameters.

    Args:
        skip_scale: constant factor on the skip path (DeepNorm's c); 1 adds nothing to the computation.
    """

    def __init__(self, skip_scale: float = 1.0) -> None:
        super().__init__()
        self.skip_scale = skip_scale

    def forward(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape, [..., dim], to their sum."""
        if self.skip_scale != 1.0:
            residual = self.skip_scale * residual
        return residual + branch

    def extra_repr(self) -> str:
        return f"skip_scale={self.skip_scale}" if self.skip_scale != 1.0 else ""


class ScaledResidualAdd(nn.Module):
    """skip_scale * residual + alpha * branch, with alpha an fp32 scalar tensor that somebody else owns and moves.

    alpha is a 0-dim view of `AlphaVector`, no parameter and no buffer: it has no state-dict key and a warmup adds no
    graph to a compiled block. In eager bf16 the multiplication rounds alpha to bf16 (exact at 0 and 1).
    """

    alpha: torch.Tensor

    def __init__(self, skip_scale: float = 1.0) -> None:
        super().__init__()
        self.skip_scale = skip_scale

    def forward(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape, [..., dim], to their scaled sum; one fused kernel, nothing more saved."""
        if self.skip_scale != 1.0:
            residual = self.skip_scale * residual
        return torch.addcmul(residual, branch, self.alpha)

    def extra_repr(self) -> str:
        return f"skip_scale={self.skip_scale}" if self.skip_scale != 1.0 else ""
