"""What became of a run: as its folder tells, and as one line of a file from which every table and figure is made."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan_prores.config.engine_sections import SETS, SLOTS
from titan_prores.config.errors import ConfigError, shown
from titan_prores.config.keys import dotted
from titan_prores.config.kinds import KINDS
from titan_prores.config.recipe import Recipe, differences
from titan_prores.config.renamed_keys import with_new_keys
from titan_prores.output.files import write_atomically
from titan_prores.output.rows import json_ready, read_rows
from titan_prores.output.run_folder import RunFolder
from titan_prores.tools.plots import packed

ENDED = ("finished", "diverged", "failed")
# Sections of a recipe that change nothing about what is learned.
FREE_SECTIONS = ("job", "checkpoint", "metrics", "comm", "profiling")
FILE = "result.json"  # in the run folder: what the sweep started there, and once it has ended what became of it
DIGITS = 7  # of a result: more than any difference between seeds needs
SERIES_DIGITS = 5  # of a step's values, of which there are many


@dataclass
class Result:
    """One run of a sweep.

    Attributes:
        name: of the run.
        values: axis -> value.
        state: new, unfinished (interrupted, or running now), or one of ENDED.
        step: completed updates.
        steps: of the whole run.
        final: last training loss, last validation loss and perplexity, the metric compared, tokens trained on.
        error: why it diverged or failed.
        seconds: spent in steps; validation and checkpoints are not in it.
        recipe: the settings that the result depends on, to notice when the sweep has changed.
        surroundings: versions, CPU and commit.
    """

    name: str
    values: dict[str, str]
    state: str = "new"
    step: int = 0
    steps: int = 0
    final: dict[str, float] = field(default_factory=dict)
    error: str = ""
    seconds: float = 0.0
    recipe: dict[str, Any] = field(default_factory=dict)
    surroundings: dict[str, Any] = field(default_factory=dict)

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    def metric(self, key: str) -> float | None:
        """The metric compared; infinite for a run that ended badly, None for one that has not ended."""
        if not self.ended:
            return None
        return self.final.get(key, math.inf) if self.state == "finished" else math.inf

    def to_dict(self) -> dict[str, Any]:
        """As strict JSON takes it."""
        return json_ready(asdict(self))

    @classmethod
    def of(cls, values: Mapping[str, Any], file: Path) -> Result:
        """The result that `to_dict` made `values` of.

        Raises:
            ConfigError: `values`, of `file`, are not a result.
        """
        try:
            result = cls(**{key: value for key, value in values.items() if key != "series"})
            result.recipe = with_new_keys(result.recipe)
            result.final = {key: float(value) for key, value in result.final.items()}
            return result
        except (ValueError, TypeError, AttributeError) as error:
            raise ConfigError("", f"is not the result of a run: {error}", value=str(file)) from error

    def write(self, folder: Path) -> None:
        """Leave it in the run folder."""
        write_atomically(folder / FILE, (json.dumps(self.to_dict(), indent=1) + "\n").encode())


def read(folder: Path) -> Result | None:
    """What the sweep has written into a run folder, if anything.

    Raises:
        ConfigError: it is damaged.
    """
    file = folder / FILE
    try:
        return Result.of(json.loads(file.read_text(encoding="utf-8")), file)
    except FileNotFoundError:
        return None
    except ValueError as error:
        problem = f"is damaged ({error}): nothing tells which settings its run has"
        raise ConfigError("", problem, value=str(file), allowed="remove the run's folder") from error


def series(folder: Path, keys: Sequence[str]) -> packed.Columns:
    """What a run folder's metrics.jsonl has of some keys, rounded."""
    found = packed.columns(read_rows(RunFolder(folder, is_main=False).metrics_file))
    return {key: [steps, _rounded(values, SERIES_DIGITS)] for key, (steps, values) in found.items() if key in keys}


def changed(before: Mapping[str, Any], now: Recipe) -> list[str]:
    """What differs between the settings of a result and those of a run.

    A key that one of them lacks has its default there, and one that this version no longer has is skipped, so that a
    result outlives a new version. Settings of what is off in both are free. So are those that a resumed run may change
    in a section that must stay the same, such as loader workers: they change nothing about what is learned.
    """
    rules = now.resume_rules()
    on, after = _switched_on(before), _switched_on(now.to_dict())
    found = [f"{dotted(key)}: {'on -> off' if key in on else 'off -> on'}" for key in sorted(on ^ after)]
    for key, ruled, old, new in differences(now, before):
        in_set = key[0] in SETS and len(key) > 2
        kind = KINDS.get(SLOTS.get(key[0], ""))
        if ruled in rules and rules[ruled].rule == "free" and kind is not None and kind.on_resume == "same":
            continue
        if key[0] not in FREE_SECTIONS and ruled is not None and (not in_set or key[:2] in on & after):
            found.append(f"{dotted(key)}: {shown(old)} -> {shown(new)}")
    return found


def _switched_on(recipe: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The parts that are on, in the sections of which a recipe may have several."""
    return {
        (section, name)
        for section in SETS
        if section not in FREE_SECTIONS
        for name, table in recipe.get(section, {}).items()
        if isinstance(table, Mapping) and table.get("enabled", True)
    }


def relevant(recipe: Recipe) -> dict[str, Any]:
    """The settings of a run that its result depends on."""
    return {name: table for name, table in recipe.to_dict().items() if name not in FREE_SECTIONS}


def look(
    name: str, values: Mapping[str, str], folder: Path, recipe: Recipe, metric: str, diverged_above: float | None
) -> Result:
    """What a run folder tells.

    Args:
        name: of the run.
        values: axis -> value.
        folder: the run folder; need not exist.
        recipe: the run's.
        metric: key of metrics.jsonl whose last value counts.
        diverged_above: a finished run whose metric is larger diverged; None asks only whether it is finite.
    """
    result = Result(name, dict(values), steps=recipe.training.steps, recipe=relevant(recipe))
    status = _json(folder / "status.json")
    if status is None:
        return result
    result.step, state = status.get("step", 0), status.get("state")
    rows = list(read_rows(folder / "metrics.jsonl"))
    steps = [row for row in rows if not row.get("validation")]
    result.seconds = _rounded(sum(row.get("step_seconds", 0.0) for row in steps))
    if state == "failed":
        result.state = "diverged" if status.get("error_type") == "NonFiniteError" else "failed"
        result.error = status.get("error", "")
    elif state != "finished" or result.step < result.steps:
        result.state = "unfinished"
        return result
    else:
        result.state = "finished"
    for key in ("loss", "tokens"):  # the row of a skipped batch has no loss
        if found := [row[key] for row in steps if key in row]:
            result.final[key] = _rounded(float(found[-1]))
    last = next((row for row in reversed(rows) if metric in row), {})
    for key in (metric, "validation_loss", "validation_perplexity"):
        if key in last:
            result.final[key] = _rounded(float(last[key]))
    result.surroundings = _surroundings(_json(folder / "env.json") or {})
    if result.state == "finished" and last.get("step") != result.step:
        result.state, result.error = "failed", f"there is no {metric} of its last step"
    judge(result, metric, diverged_above)
    return result


def judge(result: Result, metric: str, diverged_above: float | None) -> None:
    """Tell by its metric whether a run that came to its end diverged; of others nothing changes."""
    if result.state not in ("finished", "diverged") or result.step < result.steps or metric not in result.final:
        return
    value = result.final[metric]
    result.state, result.error = "finished", ""
    if not value <= (math.inf if diverged_above is None else diverged_above):
        result.state, result.error = "diverged", f"{metric} ended at {value:.4g}"
    elif not math.isfinite(value):
        result.state, result.error = "diverged", f"{metric} is not finite"


def _json(file: Path) -> dict[str, Any] | None:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


def _surroundings(environment: Mapping[str, Any]) -> dict[str, Any]:
    kept = {key: environment[key] for key in ("cpu", "cuda_devices", "mesh") if environment.get(key)}
    versions = environment.get("versions") or {}
    commit = (environment.get("git") or {}).get("commit")
    return {**kept, "torch": versions.get("torch"), "python": versions.get("python"), "commit": commit}


def _rounded(value: Any, digits: int = DIGITS) -> Any:
    """Floats, also those in lists, to a number of significant digits."""
    if isinstance(value, list):
        return [_rounded(inner, digits) for inner in value]
    return float(f"{value:.{digits}g}") if isinstance(value, float) else value
