"""What the runs of a sweep show together: means, spreads, and differences between runs of the same seed."""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from titan_prores.config.errors import duration
from titan_prores.output.tables import markdown
from titan_prores.tools.sweep.plan import SEED, Pair, Sweep
from titan_prores.tools.sweep.results import Result

# 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom.
_T_QUANTILES = (12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281)


def t_quantile(freedom: int) -> float:
    """The 97.5 % quantile of Student's t; above 10 degrees of freedom by the first terms of its expansion."""
    if freedom <= len(_T_QUANTILES):
        return _T_QUANTILES[freedom - 1]
    z = statistics.NormalDist().inv_cdf(0.975)
    return z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (n - 1); of one value no deviation is known, of none neither."""

    n: int
    mean: float | None
    sd: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        n = len(values)
        return cls(n, statistics.fmean(values) if n else None, statistics.stdev(values) if n > 1 else None)

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % interval of the mean by Student's t; None of fewer than two values."""
        if self.sd is None:
            return None
        half = t_quantile(self.n - 1) * self.sd / math.sqrt(self.n)
        return self.mean - half, self.mean + half

    def show(self, digits: int = 4, sign: str = "") -> str:
        if self.mean is None:
            return ""
        return f"{self.mean:{sign}.{digits}f}" + (f" ± {self.sd:.{digits}f}" if self.sd is not None else "")


@dataclass
class Cell:
    """Runs that differ in nothing but the seed and the axis of the pair.

    Attributes:
        values: axis -> value of the other axes.
        baseline: seed -> result; without a pair, all of them.
        treatment: seed -> result.
    """

    values: dict[str, str]
    baseline: dict[str, Result] = field(default_factory=dict)
    treatment: dict[str, Result] = field(default_factory=dict)

    def metrics(self, side: dict[str, Result], key: str) -> dict[str, float]:
        """Seed -> metric of the runs that finished."""
        return {seed: result.final[key] for seed, result in side.items() if result.state == "finished"}

    def differences(self, key: str) -> dict[str, float]:
        """Seed -> treatment minus baseline, of the seeds where both finished."""
        first, second = self.metrics(self.baseline, key), self.metrics(self.treatment, key)
        return {seed: second[seed] - first[seed] for seed in first if seed in second}

    @property
    def bad(self) -> list[Result]:
        """The runs that diverged or failed."""
        return [
            result
            for side in (self.baseline, self.treatment)
            for result in side.values()
            if result.state in ("diverged", "failed")
        ]


def cells(results: Sequence[Result], pair: Pair | None) -> list[Cell]:
    """The ended runs by cell, in the order of the runs; with a pair, those that are on either side of it."""
    found: dict[tuple[tuple[str, str], ...], Cell] = {}
    for result in results:
        if not result.ended or (pair and result.values[pair.axis] not in (pair.baseline, pair.treatment)):
            continue
        apart = {SEED, pair.axis} if pair else {SEED}
        values = {axis: value for axis, value in result.values.items() if axis not in apart}
        cell = found.setdefault(tuple(values.items()), Cell(values))
        side = cell.treatment if pair and result.values[pair.axis] == pair.treatment else cell.baseline
        side[result.values[SEED]] = result
    return list(found.values())


def header(sweep: Sweep, pair: Pair | None) -> list[str]:
    axes = [sweep.titles[axis] for axis in sweep.axes if not pair or axis != pair.axis]
    beside = list(dict.fromkeys(beside.column for beside in sweep.file.beside))
    if not pair:
        return [*axes, "seeds", sweep.file.metric, "lowest", "highest", "not finished", *beside]
    axis = sweep.titles[pair.axis]
    relative = ["perplexity"] if sweep.file.metric == "validation_loss" else []
    return [
        *axes,
        "seeds",
        f"{axis} {pair.baseline}",
        f"{axis} {pair.treatment}",
        "difference",
        "95 %",
        *relative,
        "lower in",
        "not finished",
        *beside,
    ]


def row(sweep: Sweep, pair: Pair | None, cell: Cell) -> list[str]:
    """A line of the table; its columns are `header`'s."""
    key = sweep.file.metric
    axes = [cell.values.get(axis, "") for axis in sweep.axes if not pair or axis != pair.axis]
    columns: dict[str, str] = {}
    for each in sweep.file.beside:
        columns.setdefault(each.column, "")
        if all(cell.values.get(axis) == value for axis, value in each.where.items()):
            columns[each.column] = each.cells.get(cell.values.get(each.axis, ""), columns[each.column])
    beside = list(columns.values())
    bad = "; ".join(f"{result.state}: {_side(sweep, pair, result)}seed {result.values[SEED]}" for result in cell.bad)
    baseline = list(cell.metrics(cell.baseline, key).values())
    if not pair:
        ends = [f"{end(baseline):.4f}" if baseline else "" for end in (min, max)]
        return [*axes, str(len(cell.baseline)), Spread.of(baseline).show(), *ends, bad, *beside]
    treatment = list(cell.metrics(cell.treatment, key).values())
    differences = list(cell.differences(key).values())
    spread = Spread.of(differences)
    relative = [f"{100 * math.expm1(spread.mean):+.2f} %" if spread.n else ""] if key == "validation_loss" else []
    lower = f"{sum(value < 0 for value in differences)} of {spread.n}" if spread.n else ""
    seeds = f"{len(cell.baseline)} + {len(cell.treatment)}"
    interval = "" if spread.interval is None else f"[{spread.interval[0]:+.4f}, {spread.interval[1]:+.4f}]"
    return [
        *axes,
        seeds,
        Spread.of(baseline).show(),
        Spread.of(treatment).show(),
        spread.show(sign="+"),
        interval,
        *relative,
        lower,
        bad,
        *beside,
    ]


def _side(sweep: Sweep, pair: Pair | None, result: Result) -> str:
    return f"{sweep.titles[pair.axis]} {result.values[pair.axis]}, " if pair else ""


def report(sweep: Sweep, results: Sequence[Result]) -> str:
    """The tables as Markdown: cells that can be compared first, those with one side only, then other runs."""
    pair = sweep.pair
    ended = [result for result in results if result.ended]
    spent = duration(sum(result.seconds for result in ended))
    counts = {state: sum(result.state == state for result in ended) for state in ("finished", "diverged", "failed")}
    parts = [
        f"{len(ended)} of {len(results)} runs have ended: "
        + ", ".join(f"{count} {state}" for state, count in counts.items() if count or state == "finished")
        + f"; {spent} in training steps. Lower is better; ± is the standard deviation over seeds.\n"
    ]

    def table(some: Sequence[Cell], pair: Pair | None, without: Collection[str] = ()) -> str:
        columns = header(sweep, pair)
        lines = [row(sweep, pair, cell) for cell in some]
        filled = [index for index in range(len(columns)) if any(line[index] for line in lines)]
        shown = [index for index in filled if columns[index] not in without]
        return markdown([columns[index] for index in shown], [[line[index] for index in shown] for line in lines])

    found = cells(results, pair)
    if not pair:
        return "\n".join([*parts, table(found, None)]) if found else parts[0]
    compared = [cell for cell in found if cell.baseline and cell.treatment]
    alone = [cell for cell in found if cell not in compared]
    if compared:
        parts += [
            f"Differences are {sweep.titles[pair.axis]} {pair.treatment} minus {pair.baseline} of the same seed, "
            "over the seeds where both finished; 95 % is the interval of their mean by Student's t.\n",
            table(compared, pair),
        ]
    if alone:
        # Figures from elsewhere stand beside what they can be compared with.
        parts += ["Runs without a counterpart:\n", table(alone, pair, {each.column for each in sweep.file.beside})]
    if others := cells(
        [each for each in results if each.values[pair.axis] not in (pair.baseline, pair.treatment)], None
    ):
        parts += [f"Runs with another {sweep.titles[pair.axis]}:\n", table(others, None)]
    return "\n".join(parts)


def table_csv(sweep: Sweep, results: Sequence[Result]) -> str:
    """A line for each cell, with unrounded numbers. Runs on neither side of a pair are in `runs_csv` alone."""
    key = sweep.file.metric
    axes = [axis for axis in sweep.axes if not sweep.pair or axis != sweep.pair.axis]
    sides = ["baseline", "treatment"] if sweep.pair else ["runs"]
    columns = [f"{side}_{what}" for side in sides for what in ("n", "mean", "sd", "not_finished")]
    columns += [f"difference_{what}" for what in ("n", "mean", "sd", "low95", "high95", "lower")] if sweep.pair else []
    lines: list[list[object]] = [[*(sweep.titles[axis] for axis in axes), *columns]]
    for cell in cells(results, sweep.pair):
        line: list[object] = [cell.values.get(axis, "") for axis in axes]
        for side in [cell.baseline, cell.treatment][: len(sides)]:
            spread = Spread.of(list(cell.metrics(side, key).values()))
            line += [spread.n, spread.mean, spread.sd, len(side) - spread.n]
        if sweep.pair:
            differences = list(cell.differences(key).values())
            spread = Spread.of(differences)
            ends = spread.interval or (None, None)
            line += [spread.n, spread.mean, spread.sd, *ends, sum(value < 0 for value in differences)]
        lines.append(line)
    return _csv(lines)


def runs_csv(sweep: Sweep, results: Sequence[Result]) -> str:
    """A line for each run that has ended."""
    final = list(dict.fromkeys(["tokens", "loss", "validation_loss", "validation_perplexity", sweep.file.metric]))
    lines: list[list[object]] = [[*sweep.titles.values(), SEED, "state", "step", *final, "seconds", "error"]]
    for result in results:
        if result.ended:
            values = [result.values.get(axis, "") for axis in (*sweep.axes, SEED)]
            numbers = [result.final.get(key, "") for key in final]
            lines.append([*values, result.state, result.step, *numbers, result.seconds, result.error])
    return _csv(lines)


def _csv(lines: Sequence[Sequence[object]]) -> str:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(lines)
    return out.getvalue()
