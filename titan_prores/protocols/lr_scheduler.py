"""What a learning rate schedule must have."""

from __future__ import annotations

from typing import Protocol

from titan_prores.config.sections import Section


class LRScheduler(Protocol):
    """Learning rate as a pure function of the number of completed updates."""

    def __init__(self, config: Section, *, total_steps: int) -> None:
        """Raises ConfigError where the settings do not fit the length of the run."""

    def factor(self, step: int) -> float:
        """Share of the peak learning rate for the update after `step` completed ones, 0 <= step < total_steps."""
