"""alpha(l, t): the residual schedules of the ProRes paper (arXiv 2603.05369, Table 6 and its appendix).

A formula is written in p = t / T, the warmup lengths of the first layer that have passed, with l = 1..L (1 =
shallowest) and t = completed optimizer updates, so the first forward pass has t = 0.
"""

# ruff: noqa: E741 (l and L are the paper's symbols)

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from titan_prores.prores.schedule import ResidualSchedule

# (p, l, L) -> alpha, with l the vector 1..L of float64.
Formula = Callable[[float, np.ndarray, int], np.ndarray]


@dataclass(frozen=True)
class Warmup:
    """A named schedule.

    Attributes:
        formula: alpha of every layer at p.
        summary: one line with the equation.
        stages: warmup lengths T until every layer is at 1, as a function of L; None for a constant schedule, which has
            no T.
    """

    formula: Formula
    summary: str
    stages: Callable[[int], int] | None


def _linear(p: float, l: np.ndarray, L: int) -> np.ndarray:
    return np.minimum(p / l, 1.0)


def _stagewise(floor: Callable[[np.ndarray, int], np.ndarray | float]) -> Formula:
    """Each layer rises from its floor only while it is its turn, the stage (l-1)T..lT."""

    def formula(p: float, l: np.ndarray, L: int) -> np.ndarray:
        s = floor(l, L)
        return s + (1.0 - s) * np.clip(p - (l - 1.0), 0.0, 1.0)

    return formula


def _depth(L: int) -> int:
    return L


SCHEDULES: dict[str, Warmup] = {
    "linear": Warmup(_linear, "min(t/(T*l), 1): deeper layers warm up longer", _depth),
    "linear-sqrt": Warmup(
        lambda p, l, L: np.sqrt(_linear(p, l, L)), "min(t/(T*l), 1)^(1/2): linear, faster at first", _depth
    ),
    "linear-square": Warmup(
        lambda p, l, L: np.square(_linear(p, l, L)), "min(t/(T*l), 1)^2: linear, slower at first", _depth
    ),
    "equal": Warmup(
        lambda p, l, L: np.full(L, min(p, 1.0)), "min(t/T, 1): every layer alike (BranchNorm with Post-LN)", lambda L: 1
    ),
    "reverse": Warmup(
        lambda p, l, L: np.minimum(p / (L - l + 1.0), 1.0), "min(t/(T*(L-l+1)), 1): shallow layers last", _depth
    ),
    "stagewise-0": Warmup(
        _stagewise(lambda l, L: 0.0), "clip(t/T-(l-1), 0, 1): one layer after another, from 0", _depth
    ),
    "stagewise-L": Warmup(_stagewise(lambda l, L: 1.0 / L), "one layer after another, from a floor of 1/L", _depth),
    "stagewise-sqrt-L": Warmup(
        _stagewise(lambda l, L: 1.0 / np.sqrt(L)), "one layer after another, from a floor of 1/sqrt(L)", _depth
    ),
    "stagewise-sqrt-l": Warmup(
        _stagewise(lambda l, L: 1.0 / np.sqrt(l)), "one layer after another, from a floor of 1/sqrt(l)", _depth
    ),
    "fix-L": Warmup(lambda p, l, L: np.full(L, 1.0 / L), "constant 1/L for the whole run", None),
    "fix-sqrt-L": Warmup(lambda p, l, L: np.full(L, 1.0 / np.sqrt(L)), "constant 1/sqrt(L) for the whole run", None),
    "fix-sqrt-l": Warmup(lambda p, l, L: 1.0 / np.sqrt(l), "constant 1/sqrt(l) for the whole run", None),
}


class Schedule(ResidualSchedule):
    """alpha of every layer as a pure function of the step.

    Args:
        name: a key of `SCHEDULES`.
        n_layers: L.
        T: warmup length of the first layer, in optimizer updates.
        total: instead of T, the update at which every layer has reached 1: T = total / L, for `equal` T = total.

    Raises:
        ValueError: an unknown name, both or neither of T and total, or either with a constant schedule.
    """

    def __init__(self, name: str, n_layers: int, *, T: float | None = None, total: float | None = None) -> None:
        if name not in SCHEDULES:
            raise ValueError(f"no schedule is called {name!r}; there are {', '.join(SCHEDULES)}")
        if n_layers < 1:
            raise ValueError(f"n_layers = {n_layers}: must be at least 1")
        self.name, self.n_layers = name, n_layers
        self._warmup = SCHEDULES[name]
        check_length(name, T, total)
        self._stages = self._warmup.stages(n_layers) if self._warmup.stages else 0
        # p is computed as t * stages / total so that the last layer reaches exactly 1 at t = total.
        self._total = total if total is not None else (T * self._stages if T is not None else None)
        self._layers = np.arange(1, n_layers + 1, dtype=np.float64)

    @property
    def total_steps(self) -> float | None:
        """Updates until every layer is at 1; None for a constant schedule."""
        return self._total

    def alpha(self, step: int) -> np.ndarray:
        if step < 0:
            raise ValueError(f"step = {step}: the first forward pass has step 0")
        p = step * self._stages / self._total if self._total is not None else 0.0
        return self._warmup.formula(p, self._layers, self.n_layers)


def check_length(name: str, T: float | None, total: float | None) -> None:
    """Raise ValueError unless exactly one of T and total is given, or neither for a constant schedule."""
    if SCHEDULES[name].stages is None:
        if T is not None or total is not None:
            raise ValueError(f"{name} is constant and takes neither T nor total")
        return
    if (T is None) == (total is None):
        which = "not both of them" if T is not None else "neither was given"
        raise ValueError(f"{name} takes either T or total: {which}")
    for key, value in (("T", T), ("total", total)):
        if value is not None and not value > 0:
            raise ValueError(f"{key} = {value}: must be greater than 0")
