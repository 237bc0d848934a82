"""Python's garbage collector on the run's schedule: on its own, it stops one rank and lets the others wait."""

from __future__ import annotations

import gc
from types import TracebackType


class ScheduledCollection:
    """Collects every N steps and never in between, while it is entered.

    Args:
        every_steps: 0 = leave the collector alone.
    """

    def __init__(self, every_steps: int) -> None:
        self.every_steps = every_steps

    def __enter__(self) -> ScheduledCollection:
        if self.every_steps:
            gc.disable()
        return self

    def after_step(self, step: int) -> None:
        """Collect if it is time; `step` counts the completed updates."""
        if self.every_steps and step % self.every_steps == 0:
            gc.collect()

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        if self.every_steps:
            gc.enable()
