"""The plain cross-entropy that validation measures, and what a training loss may consist of besides."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from titan_prores.protocols.batch import IGNORED_LABEL
from titan_prores.protocols.loss import ROW_KEYS, LossTerms


def as_terms(found: torch.Tensor | LossTerms) -> LossTerms:
    """What a loss has returned as terms; a tensor is the cross-entropy.

    Raises:
        TypeError: it is something else, or a term is not a scalar.
    """
    terms = found if isinstance(found, LossTerms) else LossTerms(found, {})
    for term in (terms.cross_entropy, *terms.others.values()):
        if not isinstance(term, torch.Tensor) or term.ndim != 0:
            what = f"a tensor of shape {list(term.shape)}" if isinstance(term, torch.Tensor) else type(term).__name__
            raise TypeError(f"a loss returns a scalar tensor, or LossTerms of scalar tensors, not {what}")
    return terms


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
    """Whether what a loss gives as the cross-entropy is it, by a small example; True where it cannot be tried.

    Raises:
        TypeError: as `as_terms`.
        ValueError: a term has the name of a key that every row has.
    """
    logits = torch.linspace(-3, 3, 4 * 7).sin().mul(3).view(1, 4, 7)
    labels = torch.tensor([[1, 6, IGNORED_LABEL, 3]])
    expected = cross_entropy(logits, labels)
    try:
        with torch.no_grad():
            found = loss(logits, labels)
    except Exception:  # it may need other shapes, or a device: that shows in the run
        return True
    terms = as_terms(found)
    if taken := ROW_KEYS & terms.others.keys():
        raise ValueError(f"a term of the loss is called {min(taken)}, a key that the metrics rows have already")
    return bool(torch.isclose(terms.cross_entropy.float().cpu(), expected, rtol=1e-3))
