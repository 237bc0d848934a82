"""The plain cross-entropy that validation measures, and what a training loss may consist of besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from titan_prores.data.loader import IGNORED_LABEL


class LossTerms(NamedTuple):
    """A training loss that is more than the cross-entropy.

    What is differentiated is the sum of all. The metrics rows show the cross-entropy as `loss` and every other term
    under its own name.

    Attributes:
        cross_entropy: 0-dim, fp32: the sum over labels that are not -100, without label smoothing or anything else.
        others: name -> a term, 0-dim, fp32: the sum over the same labels.
    """

    cross_entropy: torch.Tensor
    others: Mapping[str, torch.Tensor]

    @property
    def total(self) -> torch.Tensor:
        """What training descends."""
        return sum(self.others.values(), self.cross_entropy)


def as_terms(found: torch.Tensor | LossTerms) -> LossTerms:
    """What a loss has returned as terms; a tensor is the cross-entropy."""
    return found if isinstance(found, LossTerms) else LossTerms(found, {})


def cross_entropy(logits_BSV: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
    """fp32 sum of the cross-entropy over the labels that are not -100, 0-dim; 0 where there are none.

    Logits may be a DTensor split over the vocabulary, under torch's loss_parallel.
    """
    logits = logits_BSV.flatten(0, 1).float()
    loss = F.cross_entropy(logits, labels_BS.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")
    # Logits split over the vocabulary give a DTensor: each rank has the whole sum. Not hasattr, which is False of a
    # DTensor inside compiled code.
    return loss.to_local() if isinstance(loss, DTensor) else loss


def gives_cross_entropy(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | LossTerms]) -> bool:
    """Whether what a loss gives as the cross-entropy is it, by a small example; True where it cannot be tried."""
    logits = torch.linspace(-3, 3, 4 * 7).sin().mul(3).view(1, 4, 7)
    labels = torch.tensor([[1, 6, IGNORED_LABEL, 3]])
    expected = cross_entropy(logits, labels)
    try:
        with torch.no_grad():
            found = as_terms(loss(logits, labels)).cross_entropy
            return bool(torch.isclose(found.float().cpu(), expected, rtol=1e-3))
    except Exception:  # it may need other shapes, or a device: that shows in the run
        return True
