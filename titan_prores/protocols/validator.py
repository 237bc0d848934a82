"""What a validator must have, and what it is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from titan_prores.config.sections import Section, setting
from titan_prores.protocols.batch import IGNORED_LABEL, Batch
from titan_prores.protocols.loss import Loss
from titan_prores.protocols.tokenizer import Tokenizer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from titan_prores.distributed.mesh import Mesh


class ValidatorSection(Section):
    """Base of every validator's Config."""

    enabled: bool = setting(True, "run validation")
    freq: int = setting(100, "validate every N steps, and after the last step", unit="optimizer steps", gt=0)


@dataclass(frozen=True)
class ValidationContext:
    """What a validator measures, and with what.

    Attributes:
        model: transformed and trained so far, in training mode.
        loss: the plain cross-entropy, as the run's transforms compute it.
        prepare_batch: the run's transforms on a batch; what it returns goes into the model.
        held_out: the `titan_prores.TokenWindows` of the held-out text, the last and short one included.
        tokenizer: of the run.
        mesh: of the run.
        batch_size: training.local_batch_size.
        stopping: whether the run is to end; collective, the same on all ranks.
    """

    model: nn.Module
    loss: Loss
    prepare_batch: Callable[[Batch], Batch]
    held_out: Any
    tokenizer: Tokenizer
    mesh: Mesh
    batch_size: int
    stopping: Callable[[], bool]

    def score(self, batch: Batch) -> torch.Tensor:
        """Run the model on a batch on any device. Collective.

        Returns:
            [2], float64: the sum of the cross-entropy over the labels that count, in nats, and the number of these; of
            this rank's part of them, so that `mesh.sum_over_data` gives the whole.
        """
        import torch

        batch = self.prepare_batch(batch.to(self.mesh.device))
        loss = self.loss(self.model(batch.tokens_BS, **batch.extras), batch.labels_BS)
        return torch.stack([loss.double(), (batch.labels_BS != IGNORED_LABEL).sum().double()])


class Validator(Protocol):
    """Measures the model. Its Config is a ValidatorSection."""

    def __init__(self, config: ValidatorSection) -> None: ...

    def validate(self, context: ValidationContext) -> dict[str, float] | None:
        """Returns the keys of a metrics row. Collective.

        A validator may ask `context.stopping()` before each batch, on all ranks, and return None where it is true: the
        run is to end. A validator that does not ask is waited for.
        """
