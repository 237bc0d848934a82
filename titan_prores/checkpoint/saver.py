"""When a run saves: every N steps or minutes, and after its last step."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titan_prores.config.errors import ConfigError
from titan_prores.distributed.agreement import Agreement
from titan_prores.protocols.checkpoint import Checkpointer, CheckpointSection

if TYPE_CHECKING:
    import torch
    from torch import nn


class Saver:
    """Saves by a checkpointer when it is time; does nothing where checkpoints are off.

    Args:
        checkpointer: None where they are.
        config: its section.
        agreement: makes rank 0's clock everybody's.
    """

    def __init__(self, checkpointer: Checkpointer | None, config: CheckpointSection, agreement: Agreement) -> None:
        self.checkpointer, self.config, self.agreement = checkpointer, config, agreement
        self._saved_at = time.monotonic()

    def due(self, step: int, *, last: bool) -> bool:
        """Whether to save after `step`; every rank asks after every step, and gets the same answer."""
        if self.checkpointer is None:
            return False
        due = last or step % self.config.interval == 0
        if self.config.interval_minutes is not None:
            passed = time.monotonic() - self._saved_at >= 60 * self.config.interval_minutes
            wanted = "due" if passed and self.agreement.rank == 0 else None
            due |= self.agreement.after_step(step, "save", wanted) is not None
        return due

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, meta: Mapping[str, Any]) -> None:
        """As `Checkpointer.save`, which see."""
        self._saved_at = time.monotonic()
        self.checkpointer.save(step, model, optimizer, meta)

    def initialize(self, model: nn.Module) -> None:
        """As `Checkpointer.initialize`; a fault is the recipe's."""
        try:
            if self.checkpointer is not None:
                self.checkpointer.initialize(model)
        except ConfigError as error:
            raise error.under("checkpoint") from error

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """As `Checkpointer.load`."""
        self.checkpointer.load(step, model, optimizer)

    def last_good(self) -> tuple[int | None, dict[str, Any]]:
        """The newest whole checkpoint with finite numbers, one that is being written included, and its meta."""
        self.finish()
        step = self.checkpointer.last_good() if self.checkpointer is not None else None
        return step, {} if step is None else self.checkpointer.read_meta(step)

    def before_update(self) -> None:
        """As `Checkpointer.before_update`."""
        if self.checkpointer is not None:
            self.checkpointer.before_update()

    def finish(self) -> None:
        """As `Checkpointer.finish`."""
        if self.checkpointer is not None:
            self.checkpointer.finish()
