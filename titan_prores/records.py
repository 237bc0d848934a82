"""What a run tells: the rows of metrics.jsonl, handed to the metrics components."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from torch import nn

from titan_prores.protocols import Metric
from titan_prores.run_folder import RunFolder


class Records:
    """The metrics components of a run.

    Args:
        metrics: all of them; probes measure on every rank, sinks write on rank 0.
        is_main: whether this is rank 0.
    """

    def __init__(self, metrics: Sequence[Metric], *, is_main: bool) -> None:
        self.metrics, self.is_main = metrics, is_main

    def start(self, run: RunFolder, info: Mapping[str, Any]) -> None:
        """Rank 0: see `Metric.start`."""
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
        for metric in self.metrics if self.is_main else ():
            metric.close()


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
