"""What a validator must have."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from titan_prores.config.sections import Section, setting
from titan_prores.protocols.loss import Loss

if TYPE_CHECKING:
    from torch import nn

    from titan_prores.distributed.mesh import Mesh


class ValidatorSection(Section):
    """Base of every validator's Config."""

    enabled: bool = setting(True, "run validation")
    freq: int = setting(100, "validate every N steps, and after the last step", unit="optimizer steps", gt=0)


class Validator(Protocol):
    """Measures the model on held-out text. Its Config is a ValidatorSection."""

    def __init__(self, config: ValidatorSection) -> None: ...

    def validate(
        self, model: nn.Module, loss: Loss, data: Any, mesh: Mesh, batch_size: int, stopping: Callable[[], bool]
    ) -> dict[str, float] | None:
        """Collective. `data` is the held-out `titan_prores.data.TokenWindows`. Returns the keys of a metrics row.

        All ranks may ask `stopping()` before each batch: where it is true, for all of them, the run is to end, and None
        is the answer. A validator that does not ask is waited for.
        """
