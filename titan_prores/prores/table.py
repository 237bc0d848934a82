"""alpha from a table of breakpoints, straight lines between them.

The table is CSV in UTF-8. Its header is `step,alpha_1,...,alpha_L`, alpha_1 being the shallowest layer's. Each further
line is a breakpoint: a number of completed updates, larger than that of the line before, and an alpha from 0 to 1 for
every layer. Empty lines count for nothing. Before the first breakpoint and after the last one alpha is as there::

    step,alpha_1,alpha_2
    0,0,0
    1000,1,0.25
    2000,1,1
"""

from __future__ import annotations

import csv
import hashlib
import io
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from titan_prores.prores.schedule import ResidualSchedule

# Larger ones could not be told apart as float64.
LAST_STEP = 2**53


class TableSchedule(ResidualSchedule):
    """alpha of every layer, piecewise linear in the step, constant outside of the table.

    Args:
        steps: of the breakpoints, ascending.
        alphas: shape [breakpoints, n_layers].

    Raises:
        ValueError: steps that do not ascend, or shapes that do not fit.
    """

    def __init__(self, steps: Sequence[int], alphas: np.ndarray) -> None:
        self.steps = np.asarray(steps, dtype=np.float64)
        self.alphas = np.array(alphas, dtype=np.float64)
        if self.alphas.ndim != 2 or self.steps.shape != self.alphas.shape[:1] or not self.alphas.size:
            raise ValueError(f"{len(self.steps)} steps for alphas of shape {self.alphas.shape}")
        if (np.diff(self.steps) <= 0).any():
            raise ValueError("the steps of a table must ascend")

    @staticmethod
    def parse(content: bytes) -> TableSchedule:
        """A schedule from the bytes of a CSV file.

        Raises:
            ValueError: what is wrong, with the line, the value and what is allowed.
        """
        try:
            text = content.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            raise ValueError(f"byte {error.start} is not UTF-8") from None
        reader = csv.reader(io.StringIO(text, newline=""), strict=True)
        header: list[str] | None = None
        steps: list[int] = []
        alphas: list[list[float]] = []
        try:
            for row in reader:
                fields = [field.strip() for field in row]
                if not any(fields):
                    continue
                if header is None:
                    header = _header(fields, reader.line_num)
                    continue
                if len(fields) != len(header):
                    raise ValueError(f"line {reader.line_num}: {len(fields)} fields (allowed: {len(header)}, as above)")
                steps.append(_step(fields[0], steps, reader.line_num))
                alphas.append(
                    [_alpha(field, name, reader.line_num) for name, field in zip(header[1:], fields[1:], strict=True)]
                )
        except csv.Error as error:
            raise ValueError(f"line {reader.line_num}: {error}") from None
        if not steps:
            raise ValueError("there is no breakpoint (allowed: a header step,alpha_1,... and a line for each of them)")
        return TableSchedule(steps, np.array(alphas))

    @property
    def n_layers(self) -> int:
        """Layers that the table is for."""
        return self.alphas.shape[1]

    def alpha(self, step: int) -> np.ndarray:
        if step < 0:
            raise ValueError(f"step = {step}: the first forward pass has step 0")
        return np.array([np.interp(step, self.steps, column) for column in self.alphas.T])


def digest(content: bytes) -> str:
    """What a table's content is known by, wherever its file lies."""
    return hashlib.sha256(content).hexdigest()


def read(path: str | Path) -> bytes:
    """The bytes of a table. The path is taken literally.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        return Path(path).read_bytes()
    except FileNotFoundError:
        raise ValueError("no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a zero byte in a path
        raise ValueError(f"cannot be read: {getattr(error, 'strerror', None) or error}") from None


def _header(fields: list[str], line: int) -> list[str]:
    expected = ["step", *(f"alpha_{layer}" for layer in range(1, max(len(fields), 2)))]
    for found, wanted in zip([*fields, *[""] * (len(expected) - len(fields))], expected, strict=True):
        if found != wanted:
            raise ValueError(
                f"line {line}: the header has {found!r} in the place of {wanted} (allowed: step,alpha_1,...,alpha_L)"
            )
    return expected


def _step(field: str, before: Sequence[int], line: int) -> int:
    lowest = before[-1] + 1 if before else 0
    value = int(field) if field.isascii() and field.isdecimal() and len(field) < 20 else -1
    if not lowest <= value <= LAST_STEP:
        raise ValueError(f"line {line}: step = {field!r} (allowed: an int from {lowest} to {LAST_STEP})")
    return value


def _alpha(field: str, name: str, line: int) -> float:
    try:
        value = float(field) if field.isascii() and "_" not in field else math.nan
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"line {line}: {name} = {field!r} (allowed: a number from 0 to 1)")
    return value
