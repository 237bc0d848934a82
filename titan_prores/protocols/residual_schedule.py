"""What a residual schedule must have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from titan_prores.config.contracts import optional
from titan_prores.config.sections import Section

if TYPE_CHECKING:
    import numpy as np


class ResidualSchedule(Protocol):
    """alpha(l, t) of Progressive Residual Warmup, a pure function of the number of completed updates.

    One that does more derives from a class of `titan_prores.prores` as well, with `alpha` as its `__call__`:
    `LearnedSchedule`, whose alpha is trained, and which has the peak learning rate of its logits as `lr`; or
    `AdaptiveSchedule`, which watches the layers, and whose alpha depends on what it was told, its `state()`, too.
    """

    def __init__(self, config: Section, *, n_layers: int) -> None: ...

    def alpha(self, step: int) -> np.ndarray:
        """Shape [n_layers], float64; entry l-1 belongs to layer l (1 = shallowest). `step` >= 0."""

    @optional
    def describe(self) -> str:
        """One line that --check and the log show instead of the settings."""
