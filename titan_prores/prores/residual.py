"""The residual add as a module, so that a model's adds can be found, and its scaled form."""

from __future__ import annotations

import torch
from torch import nn


class _Add(nn.Module):
    """What both forms share: the skip path with its constant factor."""

    def __init__(self, skip_scale: float = 1.0) -> None:
        super().__init__()
        self.skip_scale = skip_scale

    def skip(self, residual: torch.Tensor) -> torch.Tensor:
        """The residual times skip_scale; untouched where that is 1."""
        return residual if self.skip_scale == 1.0 else self.skip_scale * residual

    def extra_repr(self) -> str:
        return f"skip_scale={self.skip_scale}" if self.skip_scale != 1.0 else ""


class ResidualAdd(_Add):
    """skip_scale * residual + branch. No parameters.

    Args:
        skip_scale: constant factor on the skip path (DeepNorm's c); 1 adds nothing to the computation.
    """

    def forward(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape, [..., dim], to their sum."""
        return self.skip(residual) + branch


class ScaledResidualAdd(_Add):
    """skip_scale * residual + alpha * branch, with alpha an fp32 scalar tensor that somebody else owns and moves.

    alpha is a 0-dim view of `AlphaVector`, no parameter and no buffer: it has no state-dict key and a warmup adds no
    graph to a compiled block. In eager bf16 the multiplication rounds alpha to bf16 (exact at 0 and 1).
    """

    alpha: torch.Tensor

    def forward(self, residual: torch.Tensor, branch: torch.Tensor) -> torch.Tensor:
        """Two tensors of one shape, [..., dim], to their scaled sum; one fused kernel, nothing more saved."""
        return torch.addcmul(self.skip(residual), branch, self.alpha)
