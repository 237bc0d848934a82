"""Rows as named scalars, for services that plot one curve a name."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(name, number) for everything in a row but its step; a list per layer as `alpha/layer_01` and on."""
    for key, value in row.items():
        if key == "step":
            continue
        if isinstance(value, Real):
            yield key, float(value)
        elif isinstance(value, (list, tuple)):
            width = max(2, len(str(len(value))))
            yield from ((f"{key}/layer_{i:0{width}d}", float(v)) for i, v in enumerate(value, 1))
