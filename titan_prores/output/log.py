"""Where messages go: rank 0 to the console and to train.log, other ranks only warnings to the console."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

logger = logging.getLogger("titan_prores")


@functools.cache
def console() -> Console:
    """The terminal on stderr; log lines and the progress bar share it, so that neither draws over the other."""
    from rich.console import Console

    return Console(stderr=True)


def setup(log_file: Path | None, rank: int, world_size: int) -> None:
    """Send what `logger` is told where this rank's messages belong; a second call replaces the first.

    Args:
        log_file: rank 0 appends to it; None = console only. Its folder must exist.
        rank: of this process. Rank 0 shows INFO and above, the others WARNING and above, marked "[rank r]".
        world_size: number of ranks; with one there is nothing to mark.
    """
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = False
    logger.setLevel(logging.INFO if rank == 0 else logging.WARNING)

    mark = f"[rank {rank}] " if rank and world_size > 1 else ""
    if sys.stderr.isatty() and rank == 0:
        from rich.highlighter import NullHighlighter
        from rich.logging import RichHandler

        shown: logging.Handler = RichHandler(
            console=console(),
            show_path=False,
            show_level=False,
            log_time_format="%H:%M:%S",
            omit_repeated_times=False,
            highlighter=NullHighlighter(),
        )
        shown.setFormatter(PlainFormatter("%(message)s"))
    else:
        shown = logging.StreamHandler(sys.stderr)
        shown.setFormatter(PlainFormatter(f"%(asctime)s {mark}%(message)s", datefmt="%H:%M:%S"))
    logger.addHandler(shown)
    if rank == 0 and log_file is not None:
        kept = _LogFile(log_file, mode="a", encoding="utf-8", errors="backslashreplace")
        kept.setFormatter(PlainFormatter("%(asctime)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"))
        logger.addHandler(kept)


class _LogFile(logging.FileHandler):
    """Keeps lines that a full disk does not take, and tries again with the next one; the console has them anyhow."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not isinstance(sys.exc_info()[1], OSError):
            super().handleError(record)


class PlainFormatter(logging.Formatter):
    """Names the level only where it says something: for warnings and errors."""

    def format(self, record: logging.LogRecord) -> str:
        text = super().format(record)
        if record.levelno < logging.WARNING:
            return text
        return text.replace(record.message, f"{record.levelname.lower()}: {record.message}", 1)


def validation_text(row: Mapping[str, Any]) -> str:
    """The figures of a validation in one line, whatever a validator measures: loss, perplexity, over N tokens."""
    words = []
    for key, value in row.items():
        if key != "validation_tokens":
            name = key.removeprefix("validation_").replace("_", " ")
            digits = 4 if isinstance(value, float) and abs(value) < 10 else 2
            words.append(f"{name} {value:.{digits}f}" if isinstance(value, float) else f"{name} {value}")
    tokens = row.get("validation_tokens")
    return ", ".join(words) + (f" over {tokens:,} tokens" if tokens is not None else "")


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Loggers of other packages say nothing below a critical error meanwhile."""
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
