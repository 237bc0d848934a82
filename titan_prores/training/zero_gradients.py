"""Says when training goes on without learning anything: the gradient norm is exactly 0, update after update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_prores.output.log import logger

# One update can have a zero gradient by chance of rounding; several in a row cannot.
UPDATES = 3


class ZeroGradients:
    """Warns once about `UPDATES` zero gradient norms in a row. Reads rows alone, so it costs no wait for the device."""

    def __init__(self) -> None:
        self._in_a_row = 0
        self._warned = False

    def look(self, row: Mapping[str, Any]) -> None:
        """Called with the metrics row of every update, which has `step`, `loss` and `grad_norm`."""
        self._in_a_row = self._in_a_row + 1 if row["grad_norm"] == 0 else 0
        if self._in_a_row < UPDATES or self._warned:
            return
        self._warned = True
        logger.warning(
            "the gradient norm is exactly 0 in steps %d to %d, loss %.4f: nothing is being learned. Weights may be so "
            "large that a norm overflows (model.init, model.init_std) or so small that gradients underflow "
            "(training.dtype), or the loss may not depend on any trained parameter.",
            row["step"] - UPDATES + 1,
            row["step"],
            row["loss"],
        )
