"""The base class of residual schedules: alpha(l, t), and what a schedule may do besides."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    import torch


class ResidualSchedule:
    """alpha of every layer. A subclass defines `alpha`; all other methods have defaults.

    Most schedules are a pure function of the step. A trained one (see `LearnedSchedule`) overrides `initial_logits`,
    and one that measures the layers (see `AdaptiveSchedule`) sets `watches_layers` and overrides `measures`, `observe`,
    `state` and `load_state`.

    Attributes:
        watches_layers: whether `measures` may return True.
        lr: peak learning rate of the logits of a trained schedule.
    """

    watches_layers: ClassVar[bool] = False
    lr: float = 0.01

    @abstractmethod
    def alpha(self, step: int) -> np.ndarray:
        """alpha after `step` completed updates, shape [n_layers], float64; entry l-1 is of layer l (1 = shallowest).

        For a trained schedule this is alpha before any training, whatever the step.
        """

    def describe(self) -> str:
        """One line that `--check` and the log show; empty to have the settings shown."""
        return ""

    def row(self, step: int) -> dict[str, Any]:
        """Keys for the detailed metrics row of the update after `step` completed ones."""
        return {}

    # --- Trained schedules: alpha is a function of one trained logit per layer ------------------------------------

    @property
    def trained(self) -> bool:
        """Whether alpha is trained."""
        return self.initial_logits() is not None

    def initial_logits(self) -> np.ndarray | None:
        """The logits before any training, shape [n_layers], float64; None where nothing is trained."""
        return None

    def alpha_of(self, logits: torch.Tensor) -> torch.Tensor:
        """alpha, shape [n_layers], as a differentiable function of the logits."""
        return logits.sigmoid()

    def penalty(self, alpha: torch.Tensor) -> torch.Tensor:
        """A scalar added to the loss whose gradient the logits get."""
        return alpha.new_zeros(())

    # --- Schedules that measure the layers ------------------------------------------------------------------------

    def measures(self, step: int) -> bool:
        """Whether the layers are to be measured in the update after `step` completed ones."""
        return False

    def observe(self, step: int, turned: np.ndarray) -> None:
        """Receive the measurement of the update after `step` completed ones.

        Args:
            step: one for which `measures` returned True.
            turned: shape [n_layers], float64, the same on all ranks: mean over all tokens of the global batch of
                |y / |y| - x / |x||, where x is a token's vector before the layer and y the one after it.
        """

    def state(self) -> dict[str, Any]:
        """Everything that alpha depends on besides the step, JSON-ready; the same on all ranks."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; an empty one is the state before the first update."""


def as_schedule(schedule: ResidualSchedule | Callable[[int], np.ndarray] | Any) -> ResidualSchedule:
    """`schedule` as a ResidualSchedule.

    Args:
        schedule: a ResidualSchedule, which is returned; an object of another class that has `alpha(step)` and possibly
            other methods of the base class; or a function step -> alpha.
    """
    return schedule if isinstance(schedule, ResidualSchedule) else _Adapted(schedule)


class _Adapted(ResidualSchedule):
    """An object of another class, or a function, with the defaults for what it lacks."""

    def __init__(self, own: Any) -> None:
        self._alpha: Callable[[int], np.ndarray] = getattr(own, "alpha", own)
        names = {name for name in vars(ResidualSchedule) if not name.startswith("_")} - {"alpha", "trained"}
        vars(self).update({name: getattr(own, name) for name in names if hasattr(own, name)})

    def alpha(self, step: int) -> np.ndarray:
        return self._alpha(step)
