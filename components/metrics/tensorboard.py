"""TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from components.metrics._scalars import scalars
from titan_prores.config import Section, setting
from titan_prores.protocols import Metric
from titan_prores.registry import register
from titan_prores.run_folder import RunFolder


@register("metrics", "tensorboard")
class TensorBoard(Metric):
    """Writes every number of every row as a TensorBoard scalar, lists as one curve a layer.

    A run that resumes hides the curves past the step it resumes at.
    """

    class Config(Section):
        folder: str = setting("tensorboard", "below the run folder")
        flush_seconds: int = setting(10, "how soon TensorBoard sees new points", unit="seconds", gt=0)

    _writer = None

    def start(self, run: RunFolder, info: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        step = info["start_step"]
        self._writer = SummaryWriter(
            str(run.path / self.config.folder),
            purge_step=step + 1,
            flush_secs=self.config.flush_seconds,
        )

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
