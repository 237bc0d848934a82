"""What a checkpoint component must have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from titan_prores.config.contracts import optional
from titan_prores.config.sections import Section, setting

if TYPE_CHECKING:
    import torch
    from torch import nn

    from titan_prores.distributed.mesh import Mesh
    from titan_prores.output.run_folder import RunFolder


class CheckpointSection(Section):
    """Base of every checkpoint component's Config."""

    enabled: bool = setting(True, "save and resume; false disables both")
    interval: int = setting(500, "save every N steps, and after the last step", unit="optimizer steps", gt=0)
    interval_minutes: float | None = setting(
        None, "also save when this much time has passed since the last save; not set disables", unit="minutes", gt=0
    )

    def weights_from(self) -> str | None:
        """Where a fresh start takes its weights from, if not drawn."""
        return None

    def needs_validation(self) -> str | None:
        """The key that ranks checkpoints by validation loss, if set; refused where no checkpoint has one."""
        return None


class Checkpointer(Protocol):
    """Saves and loads runs. Its Config is a CheckpointSection. All methods are collective over the mesh."""

    def __init__(self, config: CheckpointSection, *, run: RunFolder, mesh: Mesh) -> None: ...

    def choose(self) -> tuple[int | None, str]:
        """Step to resume at, or None for a fresh start, and one line that says why; the same on all ranks.

        Raises:
            ConfigError: what the recipe asks for cannot be had, or would start over existing checkpoints.
        """

    def last_good(self) -> int | None:
        """Step of this run's newest whole checkpoint with finite numbers, or None; the same on all ranks."""

    def read_meta(self, step: int) -> dict[str, Any]:
        """What `save` was given as meta."""

    @optional
    def initial_meta(self) -> dict[str, Any]:
        """At a fresh start: the meta of the checkpoint that `initialize` will take weights from; empty without one.

        Raises:
            ConfigError: that checkpoint is not there or damaged.
        """

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Fill model and optimizer in place, whatever they held."""

    def initialize(self, model: nn.Module) -> None:
        """At a fresh start, with the weights drawn: take others where the recipe says so. Raises ConfigError."""

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, meta: Mapping[str, Any]) -> None:
        """Publish a checkpoint whole, at once or while training goes on, and note it in the run folder.

        `meta` is JSON-ready; the step and whether the numbers are `finite` are in it, and the `validation_loss` where
        that very step was validated.
        """

    def before_update(self) -> None:
        """Called before every optimizer step, which changes weights: wait for what still reads them.

        Raises:
            RuntimeError: a save that went on beside training has failed.
        """

    def finish(self) -> None:
        """Wait for a save that goes on beside training. Raises RuntimeError where it failed."""
