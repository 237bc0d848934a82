"""Token cross-entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_prores.config import Section
from titan_prores.registry import register

if TYPE_CHECKING:
    import torch


@register("loss", "cross_entropy")
class CrossEntropy:
    """Cross-entropy of the next token, computed in fp32."""

    class Config(Section):
        pass

    def __init__(self, config: Section) -> None:
        pass

    def __call__(self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """fp32 sum over the labels that are not -100; 0 where there are none."""
        from titan_prores.losses import cross_entropy  # takes long to load, for a recipe that has a fault

        return cross_entropy(logits_BSV, labels_BS)
