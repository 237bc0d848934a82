"""What a person watching the run sees."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from titan_prores import Metric, RunFolder, Section, console, logger, register, setting, validation_text

# Key of a row, title, width. Of these the row's own are shown.
COLUMNS = (
    ("loss", "loss", 8),
    ("perplexity", "ppl", 8),
    ("grad_norm", "grad", 7),
    ("lr", "lr", 9),
    ("alpha_min", "alpha", 10),
    ("tokens_per_second", "tok/s", 7),
    ("mfu", "mfu", 6),
    ("memory_gib", "GiB", 6),
)
TITLE_EVERY = 20  # lines


@register("metrics", "console")
class Console(Metric):
    """Shows a line every metrics.log_freq steps, and a progress bar where the console is a terminal.

    Speed is that since the line before; the time left is reckoned from all that has passed, validation and
    checkpoints included.
    """

    class Config(Section):
        progress_bar: bool = setting(
            True, "show a progress bar where the console is a terminal; false writes lines only"
        )

    _bar = None
    _pending: Mapping[str, Any] | None = None  # the newest row, until it is shown

    def start(self, run: RunFolder, info: Mapping[str, Any]) -> None:
        self._total, self._start, self._log_freq = info["end_step"], info["start_step"], info["log_freq"]
        self._lines = 0
        self._first: tuple[int, float] | None = None  # step and time that the time left is reckoned from
        self._tokens, self._seconds = 0, 0.0
        self._last_tokens: int | None = None
        if self.config.progress_bar and console().is_terminal:
            self._bar, self._task = _progress_bar(self._total, self._start)
            self._bar.start()

    def write(self, row: Mapping[str, Any]) -> None:
        if row.get("validation"):
            self._show_pending()
            figures = {key: value for key, value in row.items() if key not in ("step", "validation")}
            logger.info(f"validation after step {row['step']}: {validation_text(figures)}")
            return
        step = row["step"]
        self._first = self._first or (step, time.monotonic())
        if self._last_tokens is not None:
            self._tokens += row.get("tokens", 0) - self._last_tokens
            self._seconds += row.get("step_seconds", 0.0)
        self._last_tokens = row.get("tokens", 0)
        if self._bar is not None:
            shown = [(key, title) for key, title, _ in COLUMNS if key in row]
            figures = " ".join(f"{title} {self._cell(key, row)}" for key, title in shown)
            self._bar.update(self._task, completed=step, figures=figures, left=self._time_left(step))
        self._pending = row
        due = step % self._log_freq == 0 or step in (self._start + 1, self._total)
        if due or row.get("skipped"):
            self._show_pending()

    def close(self) -> None:
        self._show_pending()  # where the run ends early, its last step is of interest
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _show_pending(self) -> None:
        """Log the newest row unless it has been."""
        row, self._pending = self._pending, None
        if row is None:
            return
        columns = [column for column in COLUMNS if column[0] in row]
        width = 2 * len(str(self._total)) + 1
        if self._lines % TITLE_EVERY == 0:
            titles = "".join(f" {title:>{w - 1}}" for _, title, w in columns)
            logger.info(f"{'step':>{width}}{titles}{'left':>8}")
        self._lines += 1
        cells = "".join(f" {self._cell(key, row):>{w - 1}}" for key, _, w in columns)
        step = f"{row['step']}/{self._total}"
        end = "  skipped" if row.get("skipped") else ""
        logger.info(f"{step:>{width}}{cells}{self._time_left(row['step']):>8}{end}")
        self._tokens, self._seconds = 0, 0.0

    def _cell(self, key: str, row: Mapping[str, Any]) -> str:
        value = row[key]
        match key:
            case "loss":
                return f"{value:.4f}" if value < 1e4 else f"{value:.1e}"
            case "perplexity":
                return f"{value:.2f}" if value < 1e5 else f"{value:.1e}"
            case "grad_norm":
                return f"{value:.3f}" if value < 1e3 else f"{value:.1e}"
            case "lr":
                return f"{value:.2e}"
            case "alpha_min":
                return f"{value:.2f}-{row['alpha_max']:.2f}"
            case "mfu":
                return f"{100 * value:.1f}%"
            case "tokens_per_second":
                return _short(self._tokens / self._seconds if self._seconds else value)
        return f"{value:.2f}"

    def _time_left(self, step: int) -> str:
        first, since = self._first
        if step == first:
            return "-"
        return _clock((time.monotonic() - since) / (step - first) * (self._total - step))


def _progress_bar(total: int, completed: int) -> tuple[Any, Any]:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
    from rich.table import Column

    columns = (
        BarColumn(bar_width=10),
        MofNCompleteColumn(table_column=Column(no_wrap=True, min_width=2 * len(str(total)) + 1)),
        TextColumn("left {task.fields[left]}", table_column=Column(no_wrap=True, min_width=12)),
        TextColumn("{task.fields[figures]}", table_column=Column(no_wrap=True, overflow="ellipsis")),
    )
    bar = Progress(*columns, console=console())
    return bar, bar.add_task("training", total=total, completed=completed, figures="", left="-")


def _short(number: float) -> str:
    """Three or four digits of a number: 950, 12.3k, 1.24M."""
    for limit, scale, suffix in ((1e3, 1, ""), (1e6, 1e3, "k"), (1e9, 1e6, "M")):
        if number < limit:
            return f"{number / scale:.3g}{suffix}" if suffix else f"{number:.0f}"
    return f"{number:.3g}"


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 100:
        return f"{hours // 24}d {hours % 24}h"
    return f"{hours}:{minutes:02d}:{rest:02d}"
