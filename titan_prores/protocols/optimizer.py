"""What an optimizer component must have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Protocol

from titan_prores.config.sections import Section

if TYPE_CHECKING:
    import torch
    from torch import nn


class Optimizer(Protocol):
    """Makes a torch optimizer whose groups' `lr` is the peak; the engine multiplies it by the schedule's factor."""

    def __init__(self, config: Section) -> None: ...

    def build(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> torch.optim.Optimizer:
        """An optimizer with one group or more; frozen parameters are not given to it.

        Raises:
            ConfigError: a pattern matches no parameter name.
        """
