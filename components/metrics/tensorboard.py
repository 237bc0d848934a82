"""TensorBoard event files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from titan_prores import Metric, PathInRun, RunFolder, Section, dotted, flatten, register, setting
from titan_prores.components.metrics._scalars import TOGETHER, scalars


@register("metrics", "tensorboard")
class TensorBoard(Metric):
    """Writes every number of every row as a TensorBoard scalar, lists as one curve a layer.

    Tags are grouped, such as loss/train and loss/validation, which Custom Scalars shows in one chart. The resolved
    recipe is there as text, and its settings with the last losses under HParams. A run that resumes hides the curves
    past the step it resumes at.
    """

    class Config(Section):
        folder: PathInRun = setting("tensorboard", "folder of the event files, below the run folder")
        flush_seconds: int = setting(10, "seconds between flushes to disk", unit="seconds", gt=0)

    _writer = None

    def start(self, run: RunFolder, info: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        step = info["start_step"]
        self._writer = SummaryWriter(
            str(run.path / self.config.folder), purge_step=step + 1, flush_secs=self.config.flush_seconds
        )
        # Indented, it is code to Markdown.
        self._writer.add_text("recipe", "".join(f"    {line}\n" for line in info["recipe_toml"].split("\n")), step)
        self._writer.add_custom_scalars(
            {"training and validation": {name: ["Multiline", [f"{name}/(train|validation)"]] for name in TOGETHER}}
        )
        settings = {dotted(key): _plain(value) for key, value in flatten(info["recipe"]).items()}
        # HParams shows the last value of these scalars.
        finals = {f"{name}/{end}": 0.0 for name in TOGETHER for end in ("train", "validation")}
        experiment, begin, self._end = hparams(settings, finals)
        for summary in (experiment, begin):
            self._writer.file_writer.add_summary(summary)
        self._last_step, self._end_step = step, info["end_step"]

    def write(self, row: Mapping[str, Any]) -> None:
        for name, value in scalars(row):
            self._writer.add_scalar(name, value, row["step"])
        self._last_step = row["step"]

    def close(self) -> None:
        if self._writer is not None:
            if self._last_step == self._end_step:  # else it did not succeed, as the summary says
                self._writer.file_writer.add_summary(self._end)
            self._writer.close()
            self._writer = None


def _plain(value: Any) -> int | float | str:
    """A setting as HParams takes it; true and false as words, which it would turn into 1 and 0."""
    if isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, (int, float, str)) else str(value)
