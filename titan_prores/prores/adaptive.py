"""alpha that follows the model: the next layer's warmup begins once the one before it has settled."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from titan_prores.prores.schedule import ResidualSchedule


class AdaptiveSchedule(ResidualSchedule):
    """One layer after another; how long each waits for the one before is measured.

    Layer 1 begins at step 0, and alpha of a layer that has begun at step b is
    `floor + (1 - floor) * min((t - b) / warmup_steps, 1)`; until then it is `floor`.

    What is measured, in every `every_steps`-th update, is how far the newest layer l that has begun turns the stream:
    m, the mean of |y / |y| - x / |x|| over all tokens of the global batch, x being a token's vector before the layer
    and y after it. e, a running mean of it since b, moves by e <- smoothing * e + (1 - smoothing) * m, and its change
    is c = |e after / e before - 1|. The layer counts as settled by a measurement with c <= tolerance, from `min_steps`
    after b on; layer l + 1 then begins with the next update. Without that it begins at b + `max_steps`. So all layers
    are at 1 at the latest at (L - 1) * max_steps + warmup_steps. A measurement that is not finite is skipped.

    Directions are compared, as sizes say nothing where a layer ends in a norm. While alpha rises m moves with it: about
    as much as alpha where the branch is small beside the stream, hardly where it is large. So `min_steps` below
    `warmup_steps` judges layers by what alpha does to them, and one that is not below it by what they have learned.

    Given what it was told, alpha is a pure function of the step. What it was told is `state`.

    Args:
        n_layers: L.
        warmup_steps: length of a layer's own warmup.
        min_steps: from one layer's beginning to the next one's, at least.
        max_steps: the same, at most.
        tolerance: largest relative change of the running mean, from one measurement to the next, of a settled layer.
        every_steps: steps from one measurement to the next.
        smoothing: share of the running mean that a measurement leaves as it was.
        floor: alpha of a layer whose warmup has not begun.

    Raises:
        ValueError: one of these is out of its range.
    """

    watches_layers = True

    def __init__(
        self,
        n_layers: int,
        *,
        warmup_steps: int,
        min_steps: int,
        max_steps: int,
        tolerance: float = 0.01,
        every_steps: int = 10,
        smoothing: float = 0.8,
        floor: float = 0.0,
    ) -> None:
        for name, value, lowest in (
            ("n_layers", n_layers, 1),
            ("warmup_steps", warmup_steps, 1),
            ("min_steps", min_steps, 1),
            ("max_steps", max_steps, min_steps),
            ("every_steps", every_steps, 1),
            ("tolerance", tolerance, 0),
        ):
            if not lowest <= value < float("inf"):
                raise ValueError(f"{name} = {value}: must be at least {lowest}")
        for name, value in (("smoothing", smoothing), ("floor", floor)):
            if not 0 <= value < 1:
                raise ValueError(f"{name} = {value}: must be at least 0 and less than 1")
        self.n_layers, self.warmup_steps = n_layers, warmup_steps
        self.min_steps, self.max_steps, self.tolerance = min_steps, max_steps, tolerance
        self.every_steps, self.smoothing, self.floor = every_steps, smoothing, floor
        self.load_state({})

    def begins(self, step: int) -> list[int]:
        """Steps at which the layers that have begun by `step` did so, shallowest first."""
        begun = [first for first in self._begun if first <= step]
        while len(begun) < self.n_layers and begun[-1] + self.max_steps <= step:
            begun.append(begun[-1] + self.max_steps)
        return begun

    def alpha(self, step: int) -> np.ndarray:
        if step < 0:
            raise ValueError(f"step = {step}: the first forward pass has step 0")
        progress = np.zeros(self.n_layers)
        begun = np.array(self.begins(step), dtype=np.float64)
        progress[: len(begun)] = np.minimum((step - begun) / self.warmup_steps, 1.0)
        return self.floor + (1.0 - self.floor) * progress

    def measures(self, step: int) -> bool:
        """Whether the update after `step` completed ones is to be observed; never again once every layer has begun."""
        return step % self.every_steps == 0 and len(self.begins(step)) < self.n_layers

    def observe(self, step: int, turned: np.ndarray) -> None:
        """Take what was measured in the update after `step` completed ones.

        Args:
            step: one that `measures` asks for.
            turned: m of each layer, shape [n_layers], the same on all ranks.
        """
        if len(begun := self.begins(step)) > len(self._begun):
            self._begin(begun)
        measured = float(turned[len(begun) - 1])
        # In the update in which a layer begins its alpha is still the floor: what it does then is rounding, or old.
        if step == begun[-1] or not math.isfinite(measured):
            return
        before = self._mean
        self._mean = measured if before is None else self.smoothing * before + (1.0 - self.smoothing) * measured
        self.change = abs(self._mean / before - 1.0) if before else None
        settled = self.change is not None and self.change <= self.tolerance
        if len(begun) < self.n_layers and step + 1 - begun[-1] >= self.min_steps and settled:
            self._begin([*begun, step + 1])

    def _begin(self, begun: list[int]) -> None:
        """Turn to the newest of these layers, of which nothing is known yet."""
        self._begun, self._mean = begun, None

    def state(self) -> dict[str, Any]:
        """All that alpha depends on besides the step, JSON-ready; floats come back from JSON as they were."""
        return {"begun": list(self._begun), "mean": self._mean, "change": self.change}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave; an empty one is that of the beginning.

        Raises:
            ValueError: it is none, or that of a schedule for more layers.
        """
        begun, mean, change = state.get("begun", [0]), state.get("mean"), state.get("change")
        steps = isinstance(begun, list) and all(isinstance(step, int) for step in begun)
        if not steps or not begun or begun[0] != 0 or any(a >= b for a, b in itertools.pairwise(begun)):
            raise ValueError(f"not a valid state of an adaptive schedule: layers begin at {begun}")
        if len(begun) > self.n_layers:
            raise ValueError(f"the state of an adaptive schedule is of {len(begun)} layers, not of {self.n_layers}")
        if not all(value is None or isinstance(value, (int, float)) for value in (mean, change)):
            raise ValueError(f"not a valid state of an adaptive schedule: mean {mean}, change {change}")
        self._begun: list[int] = list(begun)
        self._mean: float | None = mean
        self.change: float | None = change

    def row(self, step: int) -> dict[str, Any]:
        """What to show of it: layers that have begun, and the change last measured of the newest of them."""
        shown: dict[str, Any] = {"adaptive_layers": len(self.begins(step))}
        of_newest = self._begun[-1] > step or (self._mean is not None and len(self.begins(step)) == len(self._begun))
        known = self.change is not None and of_newest
        return {**shown, "adaptive_change": self.change} if known else shown
