"""What a run tells: the rows of metrics.jsonl, handed to the metrics components."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from titan_prores.config.errors import counted
from titan_prores.config.recipe import Recipe
from titan_prores.distributed.mesh import Mesh
from titan_prores.model.held_out_reader import HeldOutReader
from titan_prores.model.transforms import Transforms
from titan_prores.output.log import logger
from titan_prores.output.recipe_file import annotated_toml
from titan_prores.output.run_folder import RunFolder
from titan_prores.protocols.metric import Metric
from titan_prores.training.zero_gradients import ZeroGradients


class MetricsHub:
    """The metrics of a run, as one.

    Args:
        metrics: all of them; they measure on every rank, and show rows on rank 0.
        recipe: of the run.
        mesh: of the run.
    """

    def __init__(self, metrics: Sequence[Metric], recipe: Recipe, mesh: Mesh) -> None:
        self.metrics, self.recipe, self.mesh, self.is_main = metrics, recipe, mesh, mesh.is_main
        self.zero_gradients = ZeroGradients()

    def start(self, run: RunFolder, start_step: int, end_step: int, reader: HeldOutReader) -> None:
        """All ranks: start the metrics; rows past `start_step`, which will be trained again, are moved aside.

        Args:
            run: the run's folder.
            start_step: completed updates.
            end_step: the last one of this run.
            reader: runs the model on held-out text.

        Raises:
            ConfigError: a metric cannot have what it needs.
        """
        info = self.prepare(run, start_step, end_step, reader)

        def begin() -> None:
            if moved := run.set_aside_metrics(start_step):
                logger.info("%s of metrics.jsonl past step %d moved aside", counted(moved, "row"), start_step)
            for metric in self.metrics:
                metric.start(run, info)

        self.mesh.on_main(begin)

    def prepare(self, run: RunFolder, start_step: int, end_step: int, reader: HeldOutReader) -> dict[str, Any]:
        """All ranks: prepare the metrics, without starting them. Arguments as of `start`; returns `info`."""
        info = {
            "total_steps": self.recipe.training.steps,
            "end_step": end_step,
            "start_step": start_step,
            "n_layers": len(reader.model.layers),
            "log_freq": self.recipe.metrics.log_freq,
            "recipe": self.recipe.to_dict(),
            "recipe_toml": annotated_toml(self.recipe),
        }
        for metric in self.metrics:
            metric.prepare(run, info, reader)
        return info

    def measure(self, step: int, model: nn.Module) -> dict[str, Any]:
        """All ranks: what the metrics measure, between the backward passes of update `step` and clipping."""
        found: dict[str, Any] = {}
        for metric in self.metrics:
            add(found, metric.measure(step, model), type(metric).__name__)
        return found

    def write(self, row: Mapping[str, Any]) -> None:
        """Show a row; nothing on ranks other than 0."""
        for metric in self.metrics if self.is_main else ():
            metric.write(row)

    def write_step(self, row: dict[str, Any], transforms: Transforms, measured: Mapping[str, Any]) -> None:
        """Show the row of a step with what transforms and metrics add to it; nothing on ranks other than 0."""
        if not self.is_main:
            return
        self.zero_gradients.look(row)
        step = row["step"]
        for transform in transforms:
            detailed = step % self.recipe.metrics.log_freq == 0
            add(row, transform.row(step, detailed=detailed), type(transform).__name__)
        add(row, measured, "a metric")
        for metric in self.metrics:
            add(row, metric.derive(row), type(metric).__name__)
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
