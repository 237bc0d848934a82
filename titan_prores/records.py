"""What a run tells: the rows of metrics.jsonl, handed to the metrics components."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from titan_prores.log import logger
from titan_prores.protocols import Metric
from titan_prores.recipe import Recipe
from titan_prores.run_folder import RunFolder
from titan_prores.transform import Transform


class Records:
    """The metrics components of a run.

    Args:
        metrics: all of them; probes measure on every rank, sinks write on rank 0.
        recipe: of the run.
        is_main: whether this is rank 0.
    """

    def __init__(self, metrics: Sequence[Metric], recipe: Recipe, *, is_main: bool) -> None:
        self.metrics, self.recipe, self.is_main = metrics, recipe, is_main

    def start(self, run: RunFolder, start_step: int, end_step: int, n_layers: int) -> None:
        """Rank 0: start the components; rows past `start_step`, which will be trained again, are moved aside.

        Args:
            run: the run's folder.
            start_step: completed updates.
            end_step: the last one of this run.
            n_layers: of the model.
        """
        if moved := run.set_aside_metrics(start_step):
            logger.info("%d rows of metrics.jsonl past step %d moved aside", moved, start_step)
        info = {
            "total_steps": self.recipe.training.steps, "end_step": end_step, "start_step": start_step,
            "n_layers": n_layers, "log_freq": self.recipe.metrics.log_freq, "recipe": self.recipe.to_dict(),
        }  # fmt: skip
        for metric in self.metrics:
            metric.start(run, info)

    def measure(self, step: int, model: nn.Module) -> dict[str, Any]:
        """All ranks: what the probes find, between the backward passes of update `step` and clipping."""
        found: dict[str, Any] = {}
        for metric in self.metrics:
            add(found, metric.measure(step, model), type(metric).__name__)
        return found

    def write(self, row: Mapping[str, Any]) -> None:
        """Show a row; nothing on ranks other than 0."""
        for metric in self.metrics if self.is_main else ():
            metric.write(row)

    def write_step(self, row: dict[str, Any], transforms: Iterable[Transform], probed: Mapping[str, Any]) -> None:
        """Show the row of a step with what transforms and probes add to it; nothing on ranks other than 0."""
        if not self.is_main:
            return
        step = row["step"]
        for transform in transforms:
            detailed = step % self.recipe.metrics.log_freq == 0
            add(row, transform.row(step, detailed=detailed), type(transform).__name__)
        add(row, probed, "a probe")
        self.write(row)

    def sync(self) -> None:
        """Rank 0: see `Metric.sync`."""
        for metric in self.metrics:
            metric.sync()

    def close(self) -> None:
        """Rank 0: end the components; `start` may follow."""
        for metric in self.metrics if self.is_main else ():
            metric.close()

    @contextmanager
    def closing(self) -> Iterator[None]:
        """Close the components however the run ends; what goes wrong in that must not hide why it ended."""
        try:
            yield
        except BaseException:
            for metric in self.metrics if self.is_main else ():
                with suppress(Exception):
                    metric.close()
            raise
        self.close()


def add(row: dict[str, Any], more: Mapping[str, Any], source: str) -> None:
    """Put keys into a row.

    Raises:
        RuntimeError: the row has one of them already.
    """
    if taken := row.keys() & more.keys():
        raise RuntimeError(f"{source} gives {', '.join(sorted(taken))}, which the metrics row has already")
    row.update(more)


def perplexity(loss: float) -> float:
    """exp(loss), infinite where a float cannot hold it."""
    return math.exp(loss) if loss < 700 else math.inf
