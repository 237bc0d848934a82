"""What a loss must have, and what it may return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

from titan_prores.config.sections import Section

if TYPE_CHECKING:
    import torch


# Keys that rows have of the engine's own: a term cannot have one of them.
ROW_KEYS = frozenset(
    (
        "step",
        "loss",
        "perplexity",
        "grad_norm",
        "lr",
        "tokens",
        "skipped",
        "step_seconds",
        "tokens_per_second",
        "validation",
        "validation_loss",
        "validation_perplexity",
        "validation_tokens",
    )
)


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


class Loss(Protocol):
    """What training descends, called as loss(logits_BSV, labels_BS). Validation measures the plain cross-entropy.

    It returns the cross-entropy, a scalar: the fp32 sum over labels that are not -100. One that descends more, such as
    label smoothing or a z-loss, returns `LossTerms`: the cross-entropy, and its other terms by name. The rows show each
    under its name; a scalar that is not the cross-entropy has no perplexity there.

    Under tensor parallelism logits are a DTensor split over the vocabulary, and torch's loss_parallel is on; scalars
    are plain tensors in any case.
    """

    def __init__(self, config: Section) -> None: ...

    def __call__(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor | LossTerms: ...
