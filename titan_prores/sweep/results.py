"""What became of a run: read from its folder, and kept in a small one that is enough for every table and figure."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from titan_prores.config import dotted
from titan_prores.errors import ConfigError, shown
from titan_prores.recipe import SETS, SLOTS, Recipe, differences
from titan_prores.registry import KINDS
from titan_prores.run_folder import RunFolder, read_rows, write_atomically

ENDED = ("finished", "diverged", "failed")
# Sections of a recipe that change nothing about what is learned.
FREE_SECTIONS = ("job", "checkpoint", "metrics", "comm", "profiling")
# What a row of metrics.jsonl has beside what was measured.
ROW_MARKS = ("step", "validation", "skipped")
FILE = "result.json"
DIGITS = 7  # of a result: more than any difference between seeds needs
COURSE_DIGITS = 5  # of a step's values, of which there are many
NOTE = "sweep.json"  # in the run folder: what the sweep started there


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
        kept: keys whose course is kept beside the result.
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
    kept: list[str] = field(default_factory=list)
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

    def write(self, file: Path) -> None:
        """One key a line, so that a change of one is one line of a diff."""
        values = asdict(self) | {key: _rounded(getattr(self, key)) for key in ("final", "seconds")}
        lines = [f" {json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
        write_atomically(file, ("{\n" + ",\n".join(lines) + "\n}\n").encode())


def read(file: Path) -> Result:
    """A result that `Result.write` wrote.

    Raises:
        ConfigError: it is none.
    """
    try:
        result = Result(**json.loads(file.read_text(encoding="utf-8")))
        result.final = {key: float(value) for key, value in result.final.items()}
        return result
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError("", f"is no result of a run: {error}", value=str(file)) from error


def keep_course(run_folder: Path, folder: Path, keys: Sequence[str]) -> None:
    """Put the recipe of a run and its rows, as far as they have one of the keys, where scripts/plot.py finds them.

    Args:
        run_folder: of the run.
        folder: to write them into.
        keys: of metrics.jsonl.
    """
    run = RunFolder(run_folder, is_main=False)
    lines = []
    for row in read_rows(run.metrics_file):
        if any(key in row for key in keys):
            kept = {key: value for key, value in row.items() if key in (*keys, *ROW_MARKS)}
            lines.append(json.dumps(_rounded(kept, COURSE_DIGITS), separators=(",", ":")) + "\n")
    kept = RunFolder(folder, is_main=False)
    write_atomically(kept.metrics_file, "".join(lines).encode())
    if run.recipe_file.exists():
        write_atomically(kept.recipe_file, run.recipe_file.read_bytes())


def changed(before: Mapping[str, Any], now: Recipe) -> list[str]:
    """What differs between the settings of a result and those of a run.

    A key that one of them lacks has its default there, and one that this version has no more is passed over, so that a
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
    result.seconds = sum(row.get("step_seconds", 0.0) for row in steps)
    if state == "failed":
        result.state = "diverged" if status.get("error_type") == "NonFiniteError" else "failed"
        result.error = status.get("error", "")
    elif state != "finished" or result.step < result.steps:
        result.state = "unfinished"
        return result
    else:
        result.state = "finished"
    for key in ("loss", "tokens"):  # the row of a batch that was passed over has no loss
        if found := [row[key] for row in steps if key in row]:
            result.final[key] = float(found[-1])
    last = next((row for row in reversed(rows) if metric in row), {})
    for key in (metric, "validation_loss", "validation_perplexity"):
        if key in last:
            result.final[key] = float(last[key])
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


def read_note(file: Path) -> dict[str, Any]:
    """What the sweep wrote into a run folder when it started the run there.

    Raises:
        ConfigError: it is damaged.
    """
    try:
        return json.loads(file.read_text(encoding="utf-8"))["recipe"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            "",
            f"is damaged ({error}): nothing tells which settings its run has",
            value=str(file),
            allowed="remove the run's folder",
        ) from error


def write_note(file: Path, note: Mapping[str, Any]) -> None:
    write_atomically(file, (json.dumps(note, indent=1) + "\n").encode())


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
    """Floats to so many digits; the not finite as strings."""
    if isinstance(value, Mapping):
        return {key: _rounded(inner, digits) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(inner, digits) for inner in value]
    if isinstance(value, float):
        return float(f"{value:.{digits}g}") if math.isfinite(value) else str(value)
    return value
