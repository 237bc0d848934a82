"""Many runs in one small file, which plots take for a folder of run folders: gzipped JSON, a line for each run.

A line holds at least what LINE names: the run's name, its recipe (nested tables) and the columns of its metrics.jsonl.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from titan_prores.config.errors import ConfigError
from titan_prores.output.files import write_atomically

LINE = ("name", "recipe", "series")
SUFFIX = ".jsonl.gz"
ROW_MARKS = ("step", "validation", "skipped")  # what a row of metrics.jsonl has beside what was measured
Columns = dict[str, list[list[Any]]]


def columns(rows: Iterable[Mapping[str, Any]]) -> Columns:
    """Key -> steps and values, two lists of one length, of the rows of a metrics.jsonl that have the key."""
    found: Columns = {}
    for row in rows:
        for key, value in row.items() if "step" in row else ():
            if key not in ROW_MARKS:
                steps, values = found.setdefault(key, [[], []])
                steps.append(row["step"])
                values.append(value)
    return found


def read(file: Path) -> dict[str, dict[str, Any]]:
    """Name of the run -> its line; nothing where there is no file.

    Raises:
        ConfigError: the file is damaged, or of another kind.
    """
    if not file.exists():
        return {}
    try:
        with gzip.open(file, "rt", encoding="utf-8") as text:
            lines = [json.loads(line) for line in text]
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise ConfigError("", f"is damaged, or not a file of results: {error}", value=str(file)) from error
    if wrong := [n for n, line in enumerate(lines, 1) if not (isinstance(line, dict) and set(LINE) <= line.keys())]:
        raise ConfigError(
            "", f"is not a file of results: line {wrong[0]} lacks one of {', '.join(LINE)}", value=str(file)
        )
    return {line["name"]: line for line in lines}


def write(file: Path, lines: Mapping[str, Mapping[str, Any]]) -> None:
    """Write what `read` reads. Equal lines make equal bytes, but for versions of zlib."""
    text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines.values())
    write_atomically(file, gzip.compress(text.encode(), 9, mtime=0))
