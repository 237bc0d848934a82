"""Rows of metrics.jsonl."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


def read_rows(file: Path, having: bytes = b"") -> Iterator[dict[str, Any]]:
    """Rows of a metrics.jsonl, in their order; lines that are none are skipped, and so is a file that is not there.

    Numbers that are not finite are the strings that `float` takes.

    Args:
        file: the metrics.jsonl.
        having: skip lines without these bytes, which costs less than reading them.
    """
    if file.exists():
        with file.open("rb") as lines:
            for line in lines:
                if having in line and _row_step(line) is not None:
                    yield json.loads(line)


def json_ready(value: Any) -> Any:
    """Strict JSON's nearest to `value`: tensor and array scalars as numbers, the not finite as strings."""
    if isinstance(value, Mapping):
        return {str(key): json_ready(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_ready(inner) for inner in value]
    if hasattr(value, "tolist"):  # tensors and numpy's arrays and scalars
        return json_ready(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def _row(line: bytes) -> dict[str, Any] | None:
    """A row of metrics.jsonl; None where the line is not a JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _row_step(line: bytes) -> int | None:
    """Step of a row, 0 when it has none; None where the line is not a JSON object."""
    if (row := _row(line)) is None:
        return None
    step = row.get("step")
    return step if isinstance(step, int) else 0
