"""Spike score: the share of values in a series that stand far away from those just before them (arXiv 2501.00656)."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np

WINDOW, THRESHOLD = 1000, 7.0
START_RATIO, END_RATIO = 0.1, 0.9


class SpikeScore:
    """Counts spikes in a series that is fed to it value by value.

    A value is a spike where it is `threshold` standard deviations or more away from the mean of the `window` values
    before it, or is not finite. Values with fewer before them are not scored, nor are those outside of the scored part
    of the run; both are context for later ones. A value that is not finite is context for none.

    Args:
        total_steps: length of the run, in steps.
        window: number of preceding values that a value is compared with.
        threshold: distance from their mean that counts as a spike, in (population) standard deviations.
        start_ratio, end_ratio: the scored part of the run, as shares of its steps.

    Attributes:
        spikes: spikes among the scored values.
        scored: scored values.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        window: int = WINDOW,
        threshold: float = THRESHOLD,
        start_ratio: float = START_RATIO,
        end_ratio: float = END_RATIO,
    ) -> None:
        self.threshold = threshold
        self.first, self.last = start_ratio * total_steps, end_ratio * total_steps
        self._ring = np.empty(window)
        self._seen = self.spikes = self.scored = 0

    def add(self, step: int, value: float) -> None:
        """Take the value of the next step; `step` counts from 1."""
        if self._seen >= len(self._ring) and self.first < step <= self.last:
            self.scored += 1
            self.spikes += self._is_spike(value)
        if math.isfinite(value):
            self._ring[self._seen % len(self._ring)] = value
            self._seen += 1

    def _is_spike(self, value: float) -> bool:
        if not math.isfinite(value):
            return True
        distance = abs(value - self._ring.mean())
        return bool(distance > 0 and distance >= self.threshold * self._ring.std())

    @property
    def score(self) -> float:
        """Spikes per scored value; NaN where none has been scored."""
        return self.spikes / self.scored if self.scored else math.nan


def spike_score(series: Iterable[tuple[int, float]], total_steps: int, **settings: float) -> float:
    """Score of a whole series of (step, value); settings as of `SpikeScore`."""
    found = SpikeScore(total_steps, **settings)
    for step, value in series:
        found.add(step, value)
    return found.score
