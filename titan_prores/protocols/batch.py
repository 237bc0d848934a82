"""What goes from the data loader to model and loss.

Shape suffixes: B = sequences of a micro-batch, S = tokens of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

# Label of a position that no loss counts, as torch.nn.functional.cross_entropy has it.
IGNORED_LABEL = -100


@dataclass(frozen=True)
class Batch:
    """A micro-batch: what one data-parallel rank takes through the model in one forward pass.

    Attributes:
        tokens_BS: token ids, int64 [B, S].
        labels_BS: the token after each of them, int64 [B, S]; IGNORED_LABEL where no loss counts.
        samples_B: position of each sample in the data order, over all epochs and ranks, int64 [B]. No two samples of
            training share one. Outside of training, the number of the window.
        extras: further inputs of the model by the name of the parameter that takes them, such as document ids or
            positions. Transforms add them.
    """

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    samples_B: torch.Tensor
    extras: Mapping[str, torch.Tensor] = field(default_factory=dict)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        """A batch of what `change` makes of each tensor."""
        extras = {name: change(extra) for name, extra in self.extras.items()}
        return Batch(change(self.tokens_BS), change(self.labels_BS), change(self.samples_B), extras)

    def to(self, device: torch.device) -> Batch:
        """The batch on a device; the copy from pinned memory does not wait."""
        return self.map(lambda tensor: tensor.to(device, non_blocking=True))
