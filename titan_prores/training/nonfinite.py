"""What becomes of a run whose loss or gradients are not finite, and of the batch that made them so."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_prores.config.engine_sections import Training
from titan_prores.config.errors import counted
from titan_prores.output.log import logger
from titan_prores.output.rows import json_ready

if TYPE_CHECKING:
    from torch import nn

    from titan_prores.distributed.mesh import Mesh
    from titan_prores.protocols.batch import Batch

# Number of steps whose batches are kept; more would not explain a run that goes wrong more often.
MOST_KEPT = 20


class NonFiniteError(RuntimeError):
    """Loss or gradient norm was not finite, and the run is not to go on."""


class NonFinitePolicy:
    """Ends the run, skips the batch, or has the run go back and skip it, as `training.on_nonfinite` says.

    What it is told is the same on all ranks, so all of them decide alike. Batches are known by their first sample,
    which no change of layout moves.

    Args:
        training: the section of the recipe.

    Attributes:
        skipped_in_a_row: batches skipped by "skip" since the last update.
        to_skip: first samples of the batches that a run which has gone back will not train on.
        offending: first sample of the batch for which the run is to go back now.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.skipped_in_a_row = 0
        self.to_skip: set[int] = set()
        self.offending: int | None = None
        self._rewinds: Counter[int] = Counter()  # by step of the checkpoint that was gone back to
        self._problem = ""

    def judge(self, step: int, sample: int, *, finite: bool, loss: float, grad_norm: float) -> None:
        """Called after every update.

        Args:
            step: its number.
            sample: the first of its batch.
            finite: whether both numbers are.
            loss: of the update.
            grad_norm: of the update.

        Raises:
            NonFiniteError: the run is not to go on.
        """
        if finite:
            self.skipped_in_a_row = 0
            return
        policy, self._problem = self.training.on_nonfinite, f"step {step}: loss {loss}, grad norm {grad_norm}"
        if policy == "stop":
            raise NonFiniteError(
                f"{self._problem}; the weights are as before it (training.on_nonfinite = skip or rewind skips it)"
            )
        if policy == "rewind":
            self.offending = sample
            return
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.training.max_nonfinite_skips:
            raise NonFiniteError(
                f"{self._problem}, after {counted(self.training.max_nonfinite_skips, 'batch')} skipped in a row"
            )
        logger.warning("%s: batch skipped, %d in a row", self._problem, self.skipped_in_a_row)

    def rewind(self, checkpoint_step: int | None, batch_size: int, samples: int) -> None:
        """The run goes back to a checkpoint: decide which batches to skip from there.

        Args:
            checkpoint_step: of the last good one; None where there is none.
            batch_size: sequences of a global batch.
            samples: that the checkpoint has seen.

        Raises:
            NonFiniteError: there is none, or the run has been there too often.
        """
        if checkpoint_step is None:
            raise NonFiniteError(f"{self._problem}, and there is no good checkpoint yet to go back to")
        self._rewinds[checkpoint_step] += 1
        if self._rewinds[checkpoint_step] > (most := self.training.max_nonfinite_rewinds):
            raise NonFiniteError(f"{self._problem}, after going back to step {checkpoint_step} {counted(most, 'time')}")
        batches = [self.offending - back * batch_size for back in range(self.training.rewind_batches)]
        self.to_skip.update(first for first in batches if first >= samples)
        self.offending = None
        logger.warning(
            "%s: going back to the checkpoint of step %d; %s will be skipped",
            self._problem,
            checkpoint_step,
            counted(sum(first >= samples for first in self.to_skip), "batch"),
        )

    def state(self, sample: int) -> dict[str, Any]:
        """What a checkpoint remembers, JSON-ready; `sample` is the first that has not been seen."""
        return {
            "skipped_in_a_row": self.skipped_in_a_row,
            "pass_over": sorted(first for first in self.to_skip if first >= sample),
        }

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Take what `state` gave; batches that this run has found itself stay skipped."""
        self.skipped_in_a_row = state["skipped_in_a_row"]
        self.to_skip.update(state.get("pass_over", ()))


def keep_batch(
    folder: Path, batches: Sequence[Batch], facts: Mapping[str, Any], local_loss: float, model: nn.Module, mesh: Mesh
) -> None:
    """Keep what one update was computed from for inspection, in `step-<k>` below. Collective.

    Writes `data-rank-<k>.npz` with int32 arrays `tokens` and `labels` of shape [microbatches, B, S] for every data
    rank, and `report.json` with the facts, the loss by data rank (nats, the rank's share of the mean over the global
    batch) and the names of the parameters whose gradients are not finite. A disk that cannot take it is a warning.

    Args:
        folder: of all such updates.
        batches: this rank's microbatches as the loader gave them.
        facts: for the report; `step`, the number of the update, among them.
        local_loss: this rank's share of the loss.
        model: with the update's gradients, not clipped.
        mesh: the ranks.
    """
    import torch

    found = mesh.gather((mesh.data_rank, local_loss, _nonfinite_gradients(model)))
    # Whoever takes part in a sum over ranks sees the fault of one: names are the same wherever they are whole.
    names = sorted({name for _, _, names in found for name in names})
    report = {
        **facts,
        "loss_by_data_rank": dict(sorted((rank, loss) for rank, loss, _ in found)),
        "parameters_with_nonfinite_gradients": names,
    }
    try:
        earlier, folder = folder.glob("step-*"), folder / f"step-{facts['step']:08d}"
        if sum(path != folder for path in earlier) >= MOST_KEPT:
            logger.warning("%s holds %s already: this one is not kept", folder.parent, counted(MOST_KEPT, "batch"))
            return
        folder.mkdir(parents=True, exist_ok=True)
        if mesh.is_first_with_data:
            both = {"tokens": [each.tokens_BS for each in batches], "labels": [each.labels_BS for each in batches]}
            arrays = {name: torch.stack(parts).cpu().numpy().astype(np.int32) for name, parts in both.items()}
            np.savez_compressed(folder / f"data-rank-{mesh.data_rank}.npz", **arrays)
        if mesh.is_main:
            text = json.dumps(json_ready(report), indent=1, allow_nan=False)
            (folder / "report.json").write_text(text + "\n", encoding="utf-8")
            logger.info("the batch is kept in %s", folder)
    except OSError as error:
        logger.warning("the batch of step %s cannot be kept: %s", facts["step"], error)


def _nonfinite_gradients(model: nn.Module) -> list[str]:
    """Names of parameters whose gradients, in the part that this rank holds, are not finite."""
    import torch
    from torch.distributed.tensor import DTensor

    names = []
    for name, parameter in model.named_parameters():
        if (gradient := parameter.grad) is None:
            continue
        part = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        if not torch.isfinite(part).all():
            names.append(name)
    return names
