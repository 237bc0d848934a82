"""Runs as a plot reads them, from their folders or from one file of many: series by key, depth, scores."""

from __future__ import annotations

import fnmatch
import functools
import glob
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from titan_prores.config.errors import ConfigError, nearest
from titan_prores.output.rows import read_rows
from titan_prores.output.run_folder import RunFolder
from titan_prores.output.spike_score import spike_score
from titan_prores.tools.plots import packed
from titan_prores.tools.plots.packed import Columns

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


@dataclass(frozen=True)
class Run:
    """What a run left behind.

    Attributes:
        label: what a legend calls it.
        path: its folder, or the file that it is in with its name as the last part.
        columns: key of metrics.jsonl -> steps and values.
        recipe: the resolved recipe, nested tables.
    """

    label: str
    path: Path
    columns: Columns
    recipe: dict[str, Any]

    def has(self, key: str) -> bool:
        """Whether any row has `key`."""
        return key in self.columns

    def series(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Steps [N] and values, [N] or for lists a layer [N, L], of the rows that have `key`.

        Raises:
            ConfigError: none has, or its values are not numbers.
        """
        if key not in self.columns:
            known = sorted(self.columns)
            raise ConfigError(
                "",
                f"no row of {self.path} has {key}; was the part of [metrics] or [validation] on that writes it?",
                allowed=known,
                nearest=nearest(key, known),
            )
        steps, values = self.columns[key]
        try:
            return np.array(steps), np.array(values, dtype=np.float64)
        except (ValueError, TypeError):
            problem = f"{key} of {self.path} cannot be drawn: its values are not numbers, or lists of one length"
            raise ConfigError("", problem, value=values[-1]) from None

    def along(self, x: str, steps: np.ndarray) -> np.ndarray:
        """Where steps [N] lie on an axis.

        Args:
            x: step, tokens (trained on until then) or hours (in training steps; validation and checkpoints left out).
            steps: [N].

        Raises:
            ConfigError: the rows do not tell.
        """
        if x == "step":
            return steps
        own, values = self.series("tokens" if x == "tokens" else "step_seconds")
        if x == "hours":
            values = np.cumsum(np.nan_to_num(values)) / 3600
        # A validation comes after its step; one before the first step is at 0.
        return np.concatenate([[0.0], values])[np.searchsorted(own, steps, side="right")]

    def setting(self, section: str, key: str) -> Any:
        """A value of the recipe.

        Raises:
            ConfigError: it has none.
        """
        try:
            return self.recipe[section][key]
        except (KeyError, TypeError):
            raise ConfigError(f"{section}.{key}", f"is not in the recipe of {self.path}") from None

    def perplexity(self) -> float:
        """Held-out perplexity after the last step of the recipe; NaN where there is none, as of a run that failed."""
        last = self.setting("training", "steps")
        course = zip(*self.columns.get("validation_loss", ([], [])), strict=True)
        found = [value for step, value in course if step == last]
        if not found:
            return math.nan
        loss = float(found[-1])
        return math.exp(loss) if loss < 700 else math.inf

    def spike_score(self, key: str, *, window: int, threshold: float) -> float:
        """Spike score of the values of a key over the steps of the run's schedules; NaN where none was scored."""
        if not self.has(key):
            return math.nan
        steps, values = self.series(key)
        if len(steps) <= window:  # which may be more than memory holds
            return math.nan
        series = zip(steps.tolist(), values.tolist(), strict=True)
        return spike_score(series, self.setting("training", "steps"), window=window, threshold=threshold)


def load_run(path: Path, label: str | None = None) -> Run:
    """Read a run folder, or a run in a file of `packed`, whose path is that of the file with the run's name below it.

    Raises:
        ConfigError: there is none, or it has no rows yet.
    """
    if path.parent.is_file():
        line = _packed(path.parent)[path.name]
        return Run(label or path.name, path, line["series"], line["recipe"])
    if path.is_file():
        raise ConfigError("RUN", "is a file", value=str(path), allowed=f"a run folder, or {path}/NAME if it holds runs")
    folder = RunFolder(path, is_main=False)
    for file in (folder.metrics_file, folder.recipe_file):
        if not file.is_file():
            raise ConfigError("RUN", f"not a run folder: it has no {file.name} in it", value=str(path))
    try:
        recipe = tomllib.loads(folder.recipe_file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("", f"{folder.recipe_file} is not valid TOML: {error}") from None
    if not (columns := packed.columns(read_rows(folder.metrics_file))):
        raise ConfigError("", f"{folder.metrics_file} has no rows")
    return Run(label or path.resolve().name, path, columns, recipe)


def load_runs(arguments: Sequence[str]) -> list[Run]:
    """Runs named as `[LABEL=]FOLDER`, where FOLDER may be a pattern and a label may be given to several.

    A folder may have "=" in its name: an argument is split only where the whole of it is no folder and no pattern of
    any.

    Raises:
        ConfigError: one is no run folder, or a pattern matches nothing.
    """
    runs = []
    for argument in arguments:
        label, pattern = split_label(argument)
        if not (paths := _matching(pattern)):
            raise ConfigError("RUN", "there is no such run folder", value=argument)
        runs += [load_run(Path(path), label or None) for path in paths]
    return runs


def split_label(argument: str) -> tuple[str, str]:
    """Label, empty where none is given, and folder or pattern of a run named as in `load_runs`."""
    if _matching(argument):
        return "", argument
    label, _, pattern = argument.partition("=")
    return label, pattern


def _matching(pattern: str) -> list[str]:
    """The path itself, where there is one of that name, or those that the pattern stands for."""
    file, name = os.path.split(pattern)
    if os.path.isfile(file):
        return [os.path.join(file, each) for each in fnmatch.filter(_packed(Path(file)), name)]
    return [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern))


def _packed(file: Path) -> dict[str, dict[str, Any]]:
    return _read_packed(file, file.stat().st_mtime_ns)


@functools.lru_cache(maxsize=2)
def _read_packed(file: Path, stamp: int) -> dict[str, dict[str, Any]]:
    """The lines of a file as of a time stamp; a figure reads several."""
    return packed.read(file)


def ema(values: np.ndarray, decay: float) -> np.ndarray:
    """Exponential moving average with Adam's bias correction, so that its first values are not drawn to zero.

    It is NaN where a value is not finite, and goes on from before with the next one that is.

    Args:
        values: [N] or [N, L], which is averaged over N.
        decay: weight of the past, in [0, 1).
    """
    if values.ndim == 2:
        return np.stack([ema(column, decay) for column in values.T], axis=1)
    average = weight = 0.0
    found = np.full(len(values), math.nan)
    for i, value in enumerate(values):
        if math.isfinite(value):
            average = decay * average + (1 - decay) * value
            weight = decay * weight + (1 - decay)
            found[i] = average / weight
    return found


LARGEST_DECAY = 0.99
SHARE = 0.05  # of a run that an average may look back over


def fitting_decay(lengths: Iterable[int]) -> float:
    """Decay of a moving average for runs of this many values.

    An average over the last 1 / (1 - decay) values stands that far behind a falling loss: 0.99 on a run of 80 steps is
    nearly the mean of the whole run. So it looks back over a twentieth of the longest run, and over 100 values at most.
    """
    longest = max(lengths, default=0)
    return min(LARGEST_DECAY, max(0.0, 1 - 1 / (SHARE * longest))) if longest else 0.0


def difference(first: Run, second: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps that both runs have `key` of, and there the second's value minus the first's.

    Raises:
        ConfigError: there is none.
    """
    (steps, values), (other_steps, other_values) = first.series(key), second.series(key)
    common, mine, theirs = np.intersect1d(steps, other_steps, return_indices=True)
    if not len(common):
        raise ConfigError("", f"{first.path} and {second.path} have {key} of no common step")
    return common, other_values[theirs] - values[mine]
