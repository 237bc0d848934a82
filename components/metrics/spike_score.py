"""Spike score of loss and gradient norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from titan_prores import Metric, RunFolder, Section, SpikeScore, read_rows, register, setting

if TYPE_CHECKING:
    from titan_prores import ActivationReader

KEYS = ("loss", "grad_norm")


@register("metrics", "spike_score")
class SpikeScores(Metric):
    """Adds `loss_spike_score` and `grad_norm_spike_score` so far to a row (OLMo 2, arXiv 2501.00656).

    A score is the share of values that are `threshold` standard deviations or more from the mean of the `window` values
    before them, or not finite; the first `window` values are not scored. A row has none until there is one. A run that
    resumes counts on from the rows in its metrics.jsonl.
    """

    class Config(Section):
        every_steps: int = setting(100, "write the scores every N steps, and at the end", unit="optimizer steps", gt=0)
        window: int = setting(
            1000, "number of preceding values that a value is compared with", unit="optimizer steps", ge=2
        )
        threshold: float = setting(
            7.0, "distance from their mean that counts as a spike", unit="standard deviations", gt=0
        )
        start_ratio: float = setting(
            0.1, "start of the scored part of the run", unit="share of training.steps", ge=0, lt=1
        )
        end_ratio: float = setting(0.9, "end of the scored part of the run", unit="share of training.steps", gt=0, le=1)

    scores: Mapping[str, SpikeScore] | None = None

    def prepare(self, run: RunFolder, info: Mapping[str, Any], reader: ActivationReader) -> None:
        config = self.config
        self.end_step = info["end_step"]
        self.scores = {
            key: SpikeScore(
                info["total_steps"],
                window=config.window,
                threshold=config.threshold,
                start_ratio=config.start_ratio,
                end_ratio=config.end_ratio,
            )
            for key in KEYS
        }

    def start(self, run: RunFolder, info: Mapping[str, Any]) -> None:
        for row in read_rows(run.metrics_file) if info["start_step"] else ():
            self._take(row)

    def derive(self, row: Mapping[str, Any]) -> dict[str, Any]:
        if self.scores is None:
            return {}
        self._take(row)
        step = row["step"]
        if step % self.config.every_steps and step != self.end_step:
            return {}
        return {f"{key}_spike_score": found.score for key, found in self.scores.items() if found.scored}

    def _take(self, row: Mapping[str, Any]) -> None:
        for key in KEYS:
            if key in row:
                self.scores[key].add(row["step"], float(row[key]))
