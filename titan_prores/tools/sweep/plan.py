"""Which runs a sweep consists of: axes of named changes to one recipe, and grids over them.

Knows nothing of how a run is started; what became of earlier runs is handed in where a later one depends on it.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_prores.config import sources
from titan_prores.config.engine_sections import SECTIONS
from titan_prores.config.errors import ConfigError, ConfigErrors, nearest
from titan_prores.config.keys import Key, dotted, inline, split_key
from titan_prores.config.paths import PathRule, ReadPath, WritePath, located
from titan_prores.config.recipe import flatten
from titan_prores.config.resolve import Resolver
from titan_prores.config.sections import Section, setting
from titan_prores.tools.plots.packed import SUFFIX

SEED = "seed"  # the axis that every sweep has; statistics are taken over it
RECIPE = "recipe"  # as a change that a value of an axis makes: the recipe to start from


class Pair(Section):
    """Which runs are compared, seed by seed."""

    axis: str = setting(help="the axis that the two differ in")
    baseline: str = setting(help="its value without the treatment")
    treatment: str = setting(help="its value with it")


class Grid(Section):
    """One block of runs: every combination of the values listed. The axis written last varies fastest."""

    name: str = setting(help="what the block is called", min_length=1)
    axes: dict[str, Any] = setting(
        help='axis -> list of values, "all", or { best_of = "<earlier grid>", per = [axes] }', min_length=1
    )


class Beside(Section):
    """Figures from elsewhere, put beside those of the sweep. Several with one title share a column."""

    column: str = setting(help="title of the column")
    where: dict[str, str] = setting({}, "axis -> value: only for the rows that have it")
    axis: str = setting(help="the axis that tells the rows apart")
    cells: dict[str, str] = setting(help="value of that axis -> what to show")


class Line(Section):
    """Runs that share a label in a figure."""

    label: str = setting(help="what the legend calls them", min_length=1)
    axes: dict[str, Any] = setting(help="as of a grid", min_length=1)


class Plot(Section):
    """One figure, drawn from the results once all of its runs have ended."""

    name: str = setting(help="of its file", min_length=1)
    draw: str = setting(help="a command of titan-prores plot", min_length=1)
    options: tuple[str, ...] = setting((), "what else the command takes")
    lines: tuple[Line, ...] = setting((), "its runs")


class SweepFile(Section):
    """A sweep as its TOML file describes it."""

    recipe: ReadPath = setting(
        help="the recipe that runs start from; a value of an axis may name another: { recipe = PATH }", min_length=1
    )
    folder: WritePath = setting(help="run folders go below it", min_length=1)
    results: ReadPath | None = setting(
        None, f"file of results, from which tables and figures are made; default results{SUFFIX} below `folder`"
    )
    figures: ReadPath | None = setting(None, "folder of the figures; default figures below `folder`")
    keep: tuple[str, ...] = setting(
        ("loss", "grad_norm", "validation_loss"),
        "keys of metrics.jsonl whose values of every step are kept with the results, for figures",
    )
    report: ReadPath | None = setting(None, "a file with marks that tables are written between")
    ranks: int = setting(1, "processes of each run, more than one by titan-prores launch", ge=1)
    metric: str = setting("validation_loss", "key of metrics.jsonl whose last value is compared; lower is better")
    diverged_above: float | None = setting(None, "a run whose metric ends above this counts as diverged")
    settings: dict[str, Any] = setting({}, "part of a recipe that all runs share")
    axes: dict[str, dict[str, Any]] = setting(
        {}, "axis -> value -> part of a recipe; or axis -> { key = <a key>, values = [...] }"
    )
    seeds: tuple[int, ...] = setting((0,), "values of training.seed, where no grid says otherwise", min_length=1)
    pair: Pair | None = setting(None, "what is compared with what")
    grids: tuple[Grid, ...] = setting((), "blocks of runs, in the order they are run; default all axes x seeds")
    exclude: tuple[dict[str, Any], ...] = setting((), "runs to leave out: axis -> value or values, all must fit")
    beside: tuple[Beside, ...] = setting((), "columns of figures from elsewhere")
    plots: tuple[Plot, ...] = setting((), "figures to draw from the results")


@dataclass(frozen=True)
class BestOf:
    """A value of an axis that is known once the runs of an earlier grid have ended: the one with the lowest mean.

    Attributes:
        grid: the earlier grid.
        per: axes in which those runs must agree with the run that takes the value.
    """

    grid: str
    per: tuple[str, ...]

    def __str__(self) -> str:
        return f"best of {self.grid}"


@dataclass(frozen=True)
class Run:
    """One run of a sweep.

    Attributes:
        grid: the first grid that has it.
        values: axis -> value, in the order of the sweep's axes.
    """

    grid: str
    values: Mapping[str, str | BestOf]

    @property
    def name(self) -> str:
        """Also the name of its folder. Two runs of equal values are one run."""
        return ",".join(f"{axis}={value}" for axis, value in self.values.items())

    @property
    def waits(self) -> bool:
        """Whether a value of it is not known yet."""
        return any(isinstance(value, BestOf) for value in self.values.values())


# The metric of a run that has ended, infinite where it diverged or failed; None where it has not.
Metric = Callable[[Run], float | None]


class Sweep:
    """A sweep whose every name is known to mean something.

    Args:
        file: its settings.
        path: where they were read; None for a sweep from the command line.
        tree: where each value came from.

    Raises:
        ConfigErrors: an axis, a value or a grid that is not there, or no run at all.
    """

    def __init__(self, file: SweepFile, path: Path | None, tree: sources.Tree) -> None:
        self.file, self.path, self._tree = file, path, tree
        self._errors: list[ConfigError] = []
        self.folder = Path(file.folder)
        self.results = Path(file.results) if file.results else self.folder / f"results{SUFFIX}"
        if not self.results.name.endswith(SUFFIX):
            self._refuse("results", f"must end in {SUFFIX}", value=file.results)
        self.figures = Path(file.figures) if file.figures else self.folder / "figures"
        self.report = Path(file.report) if file.report else None
        # axis -> value -> changes of the recipe, as dotted key -> value
        self.axes: dict[str, dict[str, dict[str, Any]]] = {
            name: self._axis(name, table) for name, table in file.axes.items()
        }
        self.titles = _titles(self.axes)  # axis -> what a table calls it
        for name in self.axes:
            if not _NAME.fullmatch(name):
                self._refuse(f"axes.{dotted((name,))}", "an axis cannot have this name", value=name, allowed=_ALLOWED)
        if SEED in self.axes:
            self._refuse("axes.seed", "every sweep has this axis", allowed="seeds = [0, 1, 2]")
        self._check_keys()
        self.pair = file.pair
        if self.pair:
            self._known_axis("pair.axis", self.pair.axis)
            for key in ("baseline", "treatment"):
                self._label(f"pair.{key}", self.pair.axis, getattr(self.pair, key))
        self.grids: dict[str, dict[str, list[str] | BestOf]] = {}
        for grid in file.grids or [self._everything()]:
            if grid.name in self.grids:
                self._refuse("grids", "two grids have this name", value=grid.name)
            self.grids[grid.name] = self._choices(f"grids.{grid.name}", grid.axes)
            if self.pair and self.pair.axis not in self.grids[grid.name]:
                self._refuse(
                    f"grids.{grid.name}.axes",
                    f"lacks the axis of the pair, {self.pair.axis}",
                    allowed=list(self.axes.get(self.pair.axis, ())),
                )
        for number, rule in enumerate(file.exclude):
            for axis, values in rule.items():
                for value in values if isinstance(values, tuple) else (values,):
                    self._label(f"exclude.{number}.{axis}", axis, value)
        for beside in file.beside:
            for axis, value in [*beside.where.items(), *((beside.axis, value) for value in beside.cells)]:
                self._label("beside", axis, value)
        # figure -> label -> axes
        self.plots: dict[str, dict[str, dict[str, list[str] | BestOf]]] = {}
        for plot in file.plots:
            if plot.name in self.plots or not _NAME.fullmatch(plot.name):
                self._refuse(
                    "plots", "a figure cannot have this name", value=plot.name, allowed=f"each name once, of {_ALLOWED}"
                )
            for line in plot.lines:
                if "=" in line.label:
                    self._refuse(f"plots.{plot.name}", "a label cannot have a =", value=line.label)
            self.plots[plot.name] = {
                line.label: self._choices(f"plots.{plot.name}.{line.label}", line.axes) for line in plot.lines
            }
        if self._errors:
            raise ConfigErrors(self._errors)
        self.planned = self._plan()
        if not self.planned:
            raise ConfigErrors([ConfigError("exclude", "leaves no run")])
        if (longest := max((run.name for run in self.planned), key=len)) and len(longest) > LONGEST_NAME:
            raise ConfigErrors(
                [
                    ConfigError(
                        "axes",
                        f"make the name of a run's folder longer than {LONGEST_NAME} characters",
                        value=longest,
                        allowed="axes with short names and values, in a sweep file",
                    )
                ]
            )
        for plot, lines in self.plots.items():
            found = self.runs_of_plot(plot, lambda run: None)
            if empty := [label for label in lines if not found[label]]:
                raise ConfigErrors([ConfigError(f"plots.{plot}", "no run of this sweep is in a line", value=empty)])

    # --- Reading it ---------------------------------------------------------------------------------------------

    def _refuse(self, key: str, problem: str, **details: Any) -> None:
        where = self._tree.origin(split_key(key) or (key,))
        self._errors.append(ConfigError(key, problem, where=where, **details))

    def _check_keys(self) -> None:
        """Refuse what another part of the sweep would silently overwrite."""
        taken = {"training.seed": "seeds = [0, 1, 2]", "job.dump_folder": "folder"}
        for key in map(dotted, flatten(self.file.settings)):
            if key in taken:
                self._refuse(f"settings.{key}", "every run has its own", allowed=taken[key])
        setters: dict[str, str] = {}  # key -> the axis that sets it
        for axis, values in self.axes.items():
            for key in dict.fromkeys(key for changes in values.values() for key in changes):
                if key in taken:
                    self._refuse(f"axes.{axis}", f"sets {key}, of which every run has its own", allowed=taken[key])
                elif key in setters:
                    self._refuse(f"axes.{axis}", f"sets {key}, and so does the axis {setters[key]}")
                setters[key] = axis

    def _axis(self, name: str, table: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        if {"key", "values"} == set(table) and not isinstance(table["key"], Mapping):
            key, values = table["key"], table["values"]
            if not isinstance(key, str) or split_key(key) is None:
                self._refuse(f"axes.{name}.key", "not a key of a recipe", value=key, allowed="such as optimizer.lr")
            elif not isinstance(values, (list, tuple)) or not values:
                self._refuse(f"axes.{name}.values", "must be a list of values", value=values)
            else:
                labels = [self._name(f"axes.{name}", label(value)) for value in values]
                if twice := [text for text in dict.fromkeys(labels) if labels.count(text) > 1]:
                    self._refuse(f"axes.{name}.values", "are there twice", value=twice)
                place = ("axes", name, "values")
                return {text: {key: self._placed(value, place)} for text, value in zip(labels, values, strict=True)}
            return {}
        found = {}
        for value, changes in table.items():
            if not isinstance(changes, Mapping):
                self._refuse(
                    f"axes.{dotted((name, value))}",
                    "must be a part of a recipe",
                    value=changes,
                    allowed='a table such as { model.norm = "post" }, or key and values of the whole axis',
                )
                continue
            found[self._name(f"axes.{name}", value)] = {
                dotted(key): self._placed(inner, ("axes", name, value, *key)) for key, inner in flatten(changes).items()
            }
            recipe = found[value].get(RECIPE)
            if RECIPE in changes and not (isinstance(recipe, str) and Path(recipe).is_file()):
                key = f"axes.{dotted((name, value, RECIPE))}"
                allowed = "the path of a recipe; ./ is the folder of this file"
                self._refuse(key, "no such file", value=changes[RECIPE], allowed=allowed)
        if not found:
            self._refuse(f"axes.{name}", "has no values")
        return found

    def _placed(self, value: Any, key: Key) -> Any:
        """A value for a command line, where a path that counts from this file would count from the working directory.

        Which of a recipe's strings are paths is not known here: all that begin with ./ or ../ are taken for one.
        """
        if isinstance(value, str) and value.startswith(("./", "../")):
            return located(value, self._tree.folder_of(key), PathRule(glob=True))
        if isinstance(value, (list, tuple)):
            return tuple(self._placed(entry, key) for entry in value)
        if isinstance(value, Mapping):
            return {name: self._placed(inner, (*key, name)) for name, inner in value.items()}
        return value

    def _name(self, key: str, text: str) -> str:
        """A value's name, which is a part of folder names."""
        if not _NAME.fullmatch(text):
            self._refuse(key, "a value cannot have this name", value=text, allowed=_ALLOWED)
        return text

    def _everything(self) -> Grid:
        """All axes and seeds; what is compared stays together."""
        order = sorted(self.axes, key=lambda axis: bool(self.pair) and axis == self.pair.axis)
        axes: dict[str, Any] = {axis: "all" for axis in order}
        last = {axis: axes.pop(axis) for axis in order[-1:] if self.pair and axis == self.pair.axis}
        return Grid(name="all", axes={**axes, SEED: tuple(self.file.seeds), **last})

    def _known_axis(self, key: str, axis: str) -> bool:
        if axis in self.axes or axis == SEED:
            return True
        known = [*self.axes, SEED]
        self._refuse(key, "unknown axis of this sweep", value=axis, allowed=known, nearest=nearest(axis, known))
        return False

    def _label(self, key: str, axis: str, value: Any) -> str:
        """A value of an axis by its name."""
        text = label(value)
        if axis == SEED:
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                self._refuse(key, "not a valid seed", value=value, allowed="an int from 0")
        elif self._known_axis(key, axis) and text not in self.axes[axis]:
            known = list(self.axes[axis])
            self._refuse(
                key, f"not a value of the axis {axis}", value=value, allowed=known, nearest=nearest(text, known)
            )
        return text

    def _choices(self, place: str, axes: Mapping[str, Any]) -> dict[str, list[str] | BestOf]:
        """Axis -> its values, of the axes of a grid."""
        found: dict[str, list[str] | BestOf] = {}
        for axis, values in axes.items():
            key = f"{place}.{axis}"
            if not self._known_axis(key, axis):
                continue
            if isinstance(values, Mapping):
                found[axis] = self._best_of(key, axis, values, axes)
            elif values == "all":
                found[axis] = [str(seed) for seed in self.file.seeds] if axis == SEED else list(self.axes[axis])
            elif isinstance(values, (list, tuple)) and values:
                found[axis] = [self._label(key, axis, value) for value in values]
            else:
                self._refuse(key, "must be a list of values", value=values, allowed='a list, "all" or best_of')
        found.setdefault(SEED, [str(seed) for seed in self.file.seeds])
        return found

    def _best_of(self, key: str, axis: str, table: Mapping[str, Any], axes: Mapping[str, Any]) -> BestOf:
        source, per = table.get("best_of"), table.get("per", ())
        earlier = self.grids.get(source) if isinstance(source, str) else None
        if set(table) - {"best_of", "per"} or not isinstance(source, str) or not isinstance(per, (list, tuple)):
            self._refuse(
                key, "not a valid choice of the best", value=table, allowed='{ best_of = "<grid>", per = [axes] }'
            )
        elif earlier is None:
            self._refuse(key, "there is no earlier grid of this name", value=source, allowed=list(self.grids) or None)
        elif any(isinstance(values, BestOf) for values in earlier.values()):
            self._refuse(key, "that grid has to wait for another one itself", value=source)
        elif axis not in earlier:
            self._refuse(key, f"that grid does not try values of {axis}", value=source)
        else:
            for other in per:
                if other not in earlier or other not in axes or other in (axis, SEED):
                    self._refuse(key, "per names an axis that the two grids do not share", value=other)
        return BestOf(str(source), tuple(map(str, per)))

    # --- Its runs -----------------------------------------------------------------------------------------------

    def _plan(self) -> list[Run]:
        runs = _once(run for grid, axes in self.grids.items() for run in self._combinations(grid, axes))
        # One that will turn out to be a run of the grid that it waits for is none of its own.
        names = {run.name for run in runs}
        return [run for run in runs if not run.waits or not self._may_become(run) <= names]

    def _may_become(self, run: Run) -> set[str]:
        """The names that a run may have once what it waits for is known."""
        choices = [
            [other.values[axis] for other in self.runs_of(value.grid)] if isinstance(value, BestOf) else [value]
            for axis, value in run.values.items()
        ]
        return {
            self._run(run.grid, dict(zip(run.values, each, strict=True))).name for each in itertools.product(*choices)
        }

    def _combinations(self, grid: str, axes: Mapping[str, list[str] | BestOf]) -> Iterator[Run]:
        choices = [values if isinstance(values, list) else [values] for values in axes.values()]
        for combination in itertools.product(*choices):
            run = self._run(grid, dict(zip(axes, combination, strict=True)))
            if not self._excluded(run):
                yield run

    def _run(self, grid: str, values: Mapping[str, str | BestOf]) -> Run:
        return Run(grid, {axis: values[axis] for axis in (*self.axes, SEED) if axis in values})

    def _excluded(self, run: Run) -> bool:
        def fits(axis: str, wanted: Any) -> bool:
            labels = map(label, wanted if isinstance(wanted, tuple) else (wanted,))
            return run.values.get(axis) in set(labels)

        return any(all(fits(axis, wanted) for axis, wanted in rule.items()) for rule in self.file.exclude)

    def runs(self, metric: Metric) -> list[Run]:
        """All runs in their order, with the values that earlier results decide filled in where they are known.

        Args:
            metric: what became of a run.
        """
        return self._decided(self.planned, metric)

    def runs_of_plot(self, name: str, metric: Metric) -> dict[str, list[Run]]:
        """Label -> runs of a figure, those that the sweep has."""
        known = {run.name for run in self.runs(metric)}
        return {
            label: [
                run
                for run in self._decided(self._combinations(name, axes), metric)
                if run.name in known or (run.waits and self._may_become(run) & known)
            ]
            for label, axes in self.plots[name].items()
        }

    def _decided(self, planned: Iterable[Run], metric: Metric) -> list[Run]:
        found = []
        for run in planned:
            values = {
                axis: self._best(run, axis, value, metric) or value if isinstance(value, BestOf) else value
                for axis, value in run.values.items()
            }
            found.append(Run(run.grid, values))
        return _once(run for run in found if not self._excluded(run))

    def _best(self, run: Run, axis: str, choice: BestOf, metric: Metric) -> str | None:
        """The value of `axis` with the lowest mean metric; None while there is none.

        A value one of whose runs has no finite metric is not chosen.
        """
        tried: dict[str, list[float]] = {}
        for other in self.runs_of(choice.grid):
            if all(other.values[each] == run.values[each] for each in choice.per):
                if (value := metric(other)) is None:
                    return None
                tried.setdefault(other.values[axis], []).append(value)
        means = {value: sum(found) / len(found) for value, found in tried.items() if all(map(math.isfinite, found))}
        return min(means, key=means.__getitem__) if means else None

    def title(self, run: Run) -> str:
        """The run's name with its axes as tables call them."""
        return ",".join(f"{self.titles.get(axis, axis)}={value}" for axis, value in run.values.items())

    def runs_of(self, grid: str) -> Iterator[Run]:
        """The runs of a grid, those included that an earlier grid has too."""
        return self._combinations(grid, self.grids[grid])

    def selection(self, runs: Sequence[Run], names: Sequence[str]) -> Callable[[Run], bool]:
        """Tells which runs are meant: those that any of `names` names.

        Args:
            runs: all of the sweep's.
            names: of a run, or `axis=value,axis=value` for all runs that have these values. Axes go by their own names
                or as tables call them. None at all means every run.

        Raises:
            ConfigError: there unknown axis or value, or no run has all of these values.
        """
        exact = {name: run.name for run in runs for name in (self.title(run), run.name)}
        wanted = [self._values(name) for name in names if name not in exact]

        def meant(run: Run) -> bool:
            fits = (all(run.values.get(axis) == value for axis, value in values.items()) for values in wanted)
            return not names or run.name in chosen or any(fits)

        chosen = {exact[name] for name in names if name in exact}
        if not any(map(meant, runs)):
            raise ConfigError("--only", "no run has all of these values", value=",".join(names), allowed="see --list")
        return meant

    def _values(self, text: str) -> dict[str, str]:
        """Axis -> value of `axis=value,axis=value`."""
        axes = {SEED: SEED} | {each: axis for axis, title in self.titles.items() for each in (axis, title)}
        found = {}
        for part in text.split(","):
            axis, _, value = part.partition("=")
            if axis not in axes:
                known = [*self.axes, SEED]
                raise ConfigError("--only", "unknown axis", value=axis, allowed=known, nearest=nearest(axis, axes))
            known = list(self.axes.get(axes[axis], ()))
            if known and value not in known:
                problem = f"not a value of the axis {axis}"
                raise ConfigError("--only", problem, value=value, allowed=known, nearest=nearest(value, known))
            found[axes[axis]] = value
        return found

    def recipe_of(self, run: Run) -> Path:
        """The recipe that the run starts from."""
        return Path(self._changes(run).get(RECIPE, self.file.recipe))

    def overrides(self, run: Run) -> list[str]:
        """The command-line arguments that make the recipe this run's; values not known yet are left out."""
        changes = {
            dotted(key): self._placed(value, ("settings", *key)) for key, value in flatten(self.file.settings).items()
        }
        changes |= self._changes(run)
        changes.pop(RECIPE, None)
        changes["job.dump_folder"] = str(self.folder / run.name)
        return [f"--{key}={_argument(value)}" for key, value in changes.items()]

    def _changes(self, run: Run) -> dict[str, Any]:
        """What the values of a run's axes set."""
        changes: dict[str, Any] = {}
        for axis, value in run.values.items():
            if axis == SEED:
                changes["training.seed"] = int(value)
            elif not isinstance(value, BestOf):
                changes |= self.axes[axis][value]
        return changes


def _titles(axes: Iterable[str]) -> dict[str, str]:
    """Axis -> the shortest end of its name that no other axis ends in, for axes that are named by a dotted key.

    `enabled` and `name` say nothing without what they belong to.
    """
    parts = {axis: axis.split(".") for axis in axes}
    found = {}
    for axis, words in parts.items():
        others = [other for name, other in parts.items() if name != axis]
        least = 2 if words[-1] in ("enabled", "name", SEED) else 1
        lengths = range(min(least, len(words)), len(words) + 1)
        length = next((n for n in lengths if all(other[-n:] != words[-n:] for other in others)), len(words))
        found[axis] = ".".join(words[-length:])
    return found


def _once(runs: Iterable[Run]) -> list[Run]:
    """The first of each name."""
    found: dict[str, Run] = {}
    for run in runs:
        found.setdefault(run.name, run)
    return list(found.values())


# A file system's limit is 255 bytes, and the run writes names of its own beside it.
LONGEST_NAME = 200
_NAME = re.compile(r"[A-Za-z0-9._+-]+")
_ALLOWED = "letters, digits, . _ + and -"
_PLAIN = re.compile(r"[A-Za-z_./][\w./,=+-]*")


def label(value: Any) -> str:
    """What a value of an axis is called."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        short = format(value, "g")
        return short if float(short) == value else repr(value)
    return str(value)


def _argument(value: Any) -> str:
    """A value as an override takes it; a bare word goes without quotes."""
    if isinstance(value, str) and _PLAIN.fullmatch(value) and value not in ("true", "false", "inf", "nan"):
        return value
    return inline(value)


def load(path: Path) -> Sweep:
    """Read a sweep file.

    Raises:
        ConfigErrors: it cannot be read, or something in it does not fit.
    """
    return _typed(sources.load(path), path)


def from_arguments(
    recipe: str,
    folder: str,
    axes: Sequence[str],
    seeds: Sequence[int],
    pair: str | None,
    metric: str | None,
    settings: Sequence[str],
) -> Sweep:
    """A sweep without a file.

    Args:
        recipe: path of the recipe.
        folder: of the run folders.
        axes: each `section.key=value,value`.
        seeds: of every combination.
        pair: a key of `axes` that has two values: without and with.
        metric: see `SweepFile.metric`.
        settings: of every run, each `--section.key=value`.

    Raises:
        ConfigErrors: something does not fit.
    """
    tree = sources.Tree(values={"recipe": recipe, "folder": folder, "seeds": list(seeds), "axes": {}})
    if metric is not None:
        tree.values["metric"] = metric
    shared = sources.Tree()
    for text in settings:
        shared.merge(sources.parse_override(text))
    tree.values["settings"] = shared.values
    for text in axes:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise ConfigErrors(
                [ConfigError("--axis", "not a valid axis", value=text, allowed="section.key=value,value")]
            )
        try:
            parsed = sources.parse_override(f"--values=[{values}]").values["values"]
        except ConfigError:  # words without quotes
            parsed = values.split(",")
        if key in tree.values["axes"]:
            raise ConfigErrors(
                [ConfigError("--axis", "is there twice", value=key, allowed=f"--axis {key}=value,value")]
            )
        tree.values["axes"][key] = {"key": key, "values": parsed}
    if pair is not None:
        values = tree.values["axes"].get(pair, {}).get("values", [])
        if len(values) != 2:
            allowed = "the key of an --axis with two values, without and with"
            raise ConfigErrors([ConfigError("--pair", "unknown axis", value=pair, allowed=allowed)])
        tree.values["pair"] = {"axis": pair, "baseline": label(values[0]), "treatment": label(values[1])}
    return _typed(tree, None)


def _typed(tree: sources.Tree, path: Path | None) -> Sweep:
    if path is not None and "recipe" not in tree.values and tree.values.keys() & set(SECTIONS):
        train, sweep = (
            f"python scripts/train.py --config {path}",
            f"titan-prores sweep --config {path} --folder FOLDER --axis ...",
        )
        problem = "is a recipe, not a sweep"
        raise ConfigErrors(
            [ConfigError("FILE", problem, value=str(path), allowed=f"{train}, or for a sweep of it {sweep}")]
        )
    resolver = Resolver(tree)
    file = resolver.section(SweepFile, tree.values, ())
    resolver.refuse()
    return Sweep(file, path, tree)
