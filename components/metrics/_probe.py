"""What the probes that run the model on held-out text have in common."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titan_prores import Metric, RunFolder, Section, setting

if TYPE_CHECKING:
    import torch
    from torch import nn

    from titan_prores import ActivationReader


class ProbeSection(Section):
    """Base of their Configs."""

    every_steps: int = setting(
        100,
        "measure every N steps, and at the end; each measurement costs one forward pass",
        unit="optimizer steps",
        gt=0,
    )
    sequences: int = setting(4, "number of held-out sequences in the fixed batch", gt=0)


class Probe(Metric):
    """Measures when it is due, with the weights and the alpha that the update of the row used."""

    end_step: int | None = None
    reader: ActivationReader
    tokens_BS: torch.Tensor

    def prepare(self, run: RunFolder, info: Mapping[str, Any], reader: ActivationReader) -> None:
        self.end_step, self.reader = info["end_step"], reader
        self.tokens_BS = reader.tokens(self.config.sequences)

    def measure(self, step: int, model: nn.Module) -> dict[str, Any]:
        due = step % self.config.every_steps == 0 or step == self.end_step
        return self.look(step) if due else {}

    def look(self, step: int) -> dict[str, Any]:
        """Keys of the row of update `step`. Collective."""
        raise NotImplementedError
