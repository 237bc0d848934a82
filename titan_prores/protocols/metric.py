"""What a metrics component may override."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from titan_prores.config.sections import Section

if TYPE_CHECKING:
    import torch
    from torch import nn

    from titan_prores.distributed.mesh import Mesh
    from titan_prores.output.run_folder import RunFolder


# Number of the block from 0, its input and its output, fp32 [B, S, D].
LayerObserver = Callable[[int, "torch.Tensor", "torch.Tensor"], None]
# Number of the block from 0, name of the add in it, the stream it adds to and the branch times alpha, fp32 [B, S, D].
AddObserver = Callable[[int, str, "torch.Tensor", "torch.Tensor"], None]


class ActivationReader(Protocol):
    """Runs the model on a fixed batch of held-out text, without gradients, with observers between its parts.

    Shapes: B sequences, S tokens of a sequence (this rank's part of them, where they are split), D dim, L layers. Under
    tensor parallelism a rank may see its part of each sequence, so what observers find has to be summed by `sum` before
    it is divided by a count that was summed likewise.
    """

    model: nn.Module
    mesh: Mesh

    def tokens(self, sequences: int) -> torch.Tensor:
        """Token ids of `sequences` windows evenly spread over the held-out text, or of all where it has fewer: [B, S].

        Raises:
            ConfigError: it does not fill a single window.
        """

    def forward(
        self, tokens_BS: torch.Tensor, *, layer: LayerObserver | None = None, add: AddObserver | None = None
    ) -> None:
        """One pass over the batch, as many sequences at once as training takes. Collective.

        Call it where no backward pass is due. Layers are shown in the order in which they run, once for each part of
        the batch.
        """

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks that share a sequence, in place. Collective."""

    def residual_directions(self, tokens_BS: torch.Tensor) -> torch.Tensor:
        """What each block adds to the stream, its output minus its input, as unit vectors. Collective.

        Returns:
            [L, B, S, D] of whole sequences on every rank, fp16, on the CPU; zeros where a block adds nothing.
        """

    def residual_cosines(self, tokens_BS: torch.Tensor, reference_LBSD: torch.Tensor) -> list[float]:
        """Cosine of what each block adds now and what it added once, as mean over tokens. Collective.

        Args:
            tokens_BS: the batch.
            reference_LBSD: from `residual_directions` of the same batch.

        Returns:
            One value a layer; NaN where one of the two is zero for every token.
        """


class Metric:
    """Base of metrics components, whose hooks do nothing unless overridden. Config: any Section.

    A metric that measures overrides `measure`, or `derive` where the row has all it needs; one that shows rows
    overrides `write`. `measure` runs on all ranks and may be collective, `derive` and `write` run on rank 0.
    """

    def __init__(self, config: Section) -> None:
        self.config = config

    def prepare(self, run: RunFolder, info: Mapping[str, Any], reader: ActivationReader) -> None:
        """All ranks, before `start`, and again where a run goes back to a checkpoint.

        `info`: total_steps (of the schedules), end_step (last of this run), start_step (completed ones), n_layers,
        log_freq, recipe (the resolved one, nested tables) and recipe_toml (its text, each value with where it came
        from). `reader` runs the model on held-out text; `measure` may use it.

        Raises:
            ConfigError: what the metric needs is not there.
        """

    def start(self, run: RunFolder, info: Mapping[str, Any]) -> None:
        """Rank 0, before the first step. `info`: as for `prepare`."""

    def measure(self, step: int, model: nn.Module) -> dict[str, Any]:
        """All ranks, each step, between the backward passes and clipping; what it returns joins the row of `step`.

        Its keys must be its own.
        """
        return {}

    def derive(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Rank 0, each step, once the row is whole; what it returns joins the row. Its keys must be its own."""
        return {}

    def write(self, row: Mapping[str, Any]) -> None:
        """Rank 0, one row a step; a validation row has `validation = true` and what the validator measured."""

    def sync(self) -> None:
        """Rank 0, before a checkpoint: rows so far are to outlast a power failure, as the checkpoint does."""

    def close(self) -> None:
        """Rank 0, at the end of a run however it ends."""
