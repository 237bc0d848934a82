"""What becomes of a run whose loss or gradients are not finite."""

from __future__ import annotations

from titan_prores.log import logger
from titan_prores.recipe import Training


class NonFiniteError(RuntimeError):
    """Loss or gradient norm was not finite, and the recipe says to stop."""


class NonFinitePolicy:
    """Ends the run, or passes over so many batches in a row, as `training.on_nonfinite` says.

    Attributes:
        skipped_in_a_row: batches passed over since the last update.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.skipped_in_a_row = 0

    def judge(self, step: int, *, finite: bool, loss: float, grad_norm: float) -> None:
        """Called after every update with numbers that are the same on all ranks, so all of them decide alike.

        Raises:
            NonFiniteError: the run is not to go on.
        """
        if finite:
            self.skipped_in_a_row = 0
            return
        what = f"step {step}: loss {loss}, grad norm {grad_norm}"
        self.skipped_in_a_row += 1
        if self.training.on_nonfinite == "stop":
            raise NonFiniteError(f"{what}; the weights are as before it (training.on_nonfinite = skip passes over it)")
        if self.skipped_in_a_row > self.training.max_nonfinite_skips:
            raise NonFiniteError(f"{what}, after {self.training.max_nonfinite_skips} batches passed over in a row")
        logger.warning("%s: batch passed over, %d in a row", what, self.skipped_in_a_row)
