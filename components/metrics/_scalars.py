"""Rows as named scalars, for services that plot one curve a name and group names by what stands before the slash."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

# What says which row it is; it has no course.
MARKS = ("step", "validation")
# Pattern of a key -> its tag; the first that fits the whole key counts. What no pattern fits is in the group OTHER.
RULES = (
    (r"(loss|perplexity)", r"\1/train"),
    (r"validation_(loss|perplexity)", r"\1/validation"),
    (r"validation_(.+)", r"validation/\1"),
    (r"(.+)_(loss|perplexity|spike_score)", r"\2/\1"),
    (r"(.+)_(min|mean|max)", r"\1/\2"),
    (r"lr|lr_.+|.*grad_norm", r"optimizer/\g<0>"),
    (r"tokens|mfu|.+_(per_second|seconds|gib)", r"throughput/\g<0>"),
)
OTHER = "training"
# Shown in one chart: training and validation of the same thing.
TOGETHER = ("loss", "perplexity")


def tag(key: str) -> str:
    """`group/name` of a key of a row that is a number."""
    for pattern, template in RULES:
        if match := re.fullmatch(pattern, key):
            return match.expand(template)
    return f"{OTHER}/{key}"


def scalars(row: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """(tag, number) for everything in a row but MARKS; a list per layer as `alpha/layer_01` and on."""
    for key, value in row.items():
        if key in MARKS:
            continue
        if isinstance(value, Real):
            yield tag(key), float(value)
        elif isinstance(value, (list, tuple)):
            width = max(2, len(str(len(value))))
            yield from ((f"{key}/layer_{i:0{width}d}", float(v)) for i, v in enumerate(value, 1))
