"""Token cross-entropy."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from titan_prores.config import Section
from titan_prores.registry import register


@register("loss", "cross_entropy")
class CrossEntropy:
    """Cross-entropy of the next token, computed in fp32."""

    class Config(Section):
        pass

    def __init__(self, config: Section) -> None:
        pass

    def __call__(self, logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        """fp32 sum over the labels that are not -100; 0 where there are none."""
        from torch.distributed.tensor import DTensor  # takes long to load, for a recipe that has a fault

        logits = logits_BSV.flatten(0, 1).float()
        loss = F.cross_entropy(logits, labels_BS.flatten(), ignore_index=-100, reduction="sum")
        # Logits split over the vocabulary give a DTensor: each rank has the whole sum. Not hasattr, which is False of a
        # DTensor inside compiled code.
        return loss.to_local() if isinstance(loss, DTensor) else loss
