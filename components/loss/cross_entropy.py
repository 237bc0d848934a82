"""Token cross-entropy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from titan_prores import Section, register

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
        from titan_prores import cross_entropy

        return cross_entropy(logits_BSV, labels_BS)
