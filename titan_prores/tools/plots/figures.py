"""The figures, from plain numbers. One style for all: `STYLE`, and colours that colour-blind readers can tell apart."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_prores.config.errors import ConfigError
from titan_prores.config.paths import refuse_impossible
from titan_prores.tools.plots.runs import ema

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours, without their yellow, which is too light for lines.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#882255")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", "--", ":", "-.")  # for labels beyond the colours
DEPTHS = ("viridis", 0.0, 0.92)  # colour map of layers, shallow to deep, and the part of it that shows on white
STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.labelsize": 10,
    "xtick.labelsize": 9,
    "ytick.labelsize": 9,
    "legend.fontsize": 9,
    "legend.title_fontsize": 9,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "lines.markersize": 5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "figure.dpi": 100,
    "savefig.dpi": 140,
}
Series = tuple[np.ndarray, np.ndarray]  # steps and values, [N] each
PANEL_INCHES = (4.2, 3.0)
FEW = 40  # values of a line that are marked one by one
HOLLOW = {"markerfacecolor": "none", "markeredgewidth": 1.4, "markersize": 6}  # what lies below shows through
STEP, LOSS = "optimizer step", "loss (nats per token)"
AXES = {"step": STEP, "tokens": "tokens", "hours": "hours in training steps"}
UNITS = {
    "loss": LOSS,
    "validation_loss": "held-out loss (nats per token)",
    "grad_norm": "gradient norm\n(L2, before clipping)",
    "lr": "learning rate",
    "activation_norm": "activation norm\n(L2, mean over tokens)",
    "activation_rms": "root mean square of activations",
    "layer_grad_norm": "gradient norm\n(L2, before clipping)",
    "branch_ratio_attention": "|alpha · attention| / |x|",
    "branch_ratio_ffn": "|alpha · feed-forward| / |x|",
    "residual_cosine": "cosine of residual outputs",
}


def styled() -> AbstractContextManager[Any]:
    """Held while a figure is made and saved.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        problem = "needs the package matplotlib, which is not installed"
        raise ConfigError("", problem, allowed="pip install 'titan-prores[plot]'") from None
    return matplotlib.rc_context(STYLE)


def save(figure: Figure, path: Path) -> Path:
    """Write a figure in the format that the path ends in, or as PNG where it ends in none; returns the file.

    Raises:
        ConfigError: it cannot be written.
    """
    refuse_impossible(str(path), "--output")
    _take_literally(figure)
    named = path.suffix[1:].lower() in figure.canvas.get_supported_filetypes()
    file = path if named else path.with_name(f"{path.name}.png")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with styled():
            figure.savefig(file)
    except OSError as error:
        raise ConfigError("--output", f"cannot be written: {error.strerror}", value=str(path)) from error
    return file


def _take_literally(figure: Figure) -> None:
    """Names of runs and keys are in titles, labels and legends: a $ in one does not begin a formula there."""
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    for axis in figure.axes:
        texts += [axis.title, axis.xaxis.label, axis.yaxis.label, *axis.texts]
        if legend := axis.get_legend():
            texts += legend.get_texts()
    for text in texts:
        text.set_parse_math(False)


def layer_curves(
    panels: Mapping[str, tuple[np.ndarray, np.ndarray]], unit: str, *, log: bool = False, columns: int = 4
) -> Figure:
    """A panel for each name with a line for each layer, coloured by depth; axes and colours are shared.

    Args:
        panels: title -> steps [N] and values [N, L].
        unit: what the values are.
        log: logarithmic values.
        columns: panels side by side, at most.
    """
    with styled():
        columns = min(columns, len(panels))
        n_rows = -(-len(panels) // columns)
        figure, axes = _panels(n_rows, columns, wide=3.0 if columns > 2 else PANEL_INCHES[0])
        depths = _Depths(max(values.shape[1] for _, values in panels.values()))
        for i, (axis, (title, (steps, values))) in enumerate(zip(axes, panels.items(), strict=False)):
            if log:
                values = _positive(values)
            depths.draw(axis, steps, values)
            axis.set_title(title)
            if log:
                _logarithmic(axis, values)
            _steps(axis, label=i + columns >= len(panels))
            if i % columns == 0:
                axis.set_ylabel(unit)
        for axis in axes[len(panels) :]:
            axis.remove()
        depths.legend(figure, axes[: len(panels)])
    return figure


class _Depths:
    """Lines of layers, coloured by depth. Used inside `styled`.

    Args:
        deepest: the number of layers.
    """

    def __init__(self, deepest: int) -> None:
        from matplotlib import colormaps
        from matplotlib.colors import LinearSegmentedColormap, Normalize

        name, low, high = DEPTHS
        self.deepest = deepest
        self.colours = LinearSegmentedColormap.from_list("depth", colormaps[name](np.linspace(low, high, 256)))
        self.norm = Normalize(1, max(deepest, 2))

    def draw(self, axis: Axes, steps: np.ndarray, values: np.ndarray) -> None:
        """A line for each column of values [N, L], deep layers first, so that the few shallow ones are not hidden."""
        for layer in reversed(range(values.shape[1])):
            _line(axis, steps, values[:, layer], color=self.colours(self.norm(layer + 1)), linewidth=1.2)

    def legend(self, figure: Figure, axes: Sequence[Axes]) -> None:
        from matplotlib.cm import ScalarMappable
        from matplotlib.ticker import MaxNLocator

        if self.deepest > 1:
            bar = figure.colorbar(ScalarMappable(self.norm, self.colours), ax=list(axes), label="layer", aspect=30)
            bar.ax.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
            bar.outline.set_visible(False)


@dataclass(frozen=True)
class Panel:
    """Values of one key.

    Attributes:
        unit: what the values are.
        title: empty for none.
        lines: label, positions [N] and values, [N], or [N, L] for a line a layer.
    """

    unit: str
    title: str
    lines: Sequence[tuple[str, np.ndarray, np.ndarray]]


def measurements(panels: Sequence[Panel], x: str, decay: float | None, *, log_x: bool, log_y: bool) -> Figure:
    """A panel for each entry: runs by label, or one run's layers coloured by depth.

    All share their positions, and panels of one unit their values.

    Args:
        panels: what is drawn.
        x: a key of AXES.
        decay: of a moving average, drawn over the pale values, where there are more than FEW; None draws the values.
        log_x: logarithmic positions; those that are not above 0 are left out.
        log_y: logarithmic values, likewise.
    """
    with styled():
        columns = min(2, len(panels))
        size = {"wide": PANEL_INCHES[0], "high": PANEL_INCHES[1]} if len(panels) > 1 else {"wide": 6.4, "high": 4.0}
        figure, axes = _panels(-(-len(panels) // columns), columns, **size, share=False)
        looks = _looks(label for panel in panels for label, _, values in panel.lines if values.ndim == 1)
        by_layer = [values.shape[1] for panel in panels for _, _, values in panel.lines if values.ndim == 2]
        depths = _Depths(max(by_layer, default=1))
        first: dict[str, Axes] = {}  # unit -> its first axis
        coloured = []
        for axis, panel in zip(axes, panels, strict=False):
            if axis is not axes[0]:
                axis.sharex(axes[0])
            if axis is not first.setdefault(panel.unit, axis):
                axis.sharey(first[panel.unit])
            seen: set[str] = set()
            averaged = False
            for label, positions, values in panel.lines:
                positions = _positive(positions) if log_x else positions
                values = _positive(values) if log_y else values
                if values.ndim == 2:
                    averaged = decay is not None and len(values) > FEW
                    depths.draw(axis, positions, ema(values, decay) if averaged else values)
                    coloured.append(axis)
                    continue
                look = {key: looks[label][key] for key in ("color", "linestyle")}
                if len(values) <= FEW:
                    look |= {"marker": looks[label]["marker"], "markersize": 4, "markevery": None}
                elif decay is not None:
                    _line(axis, positions, values, color=look["color"], alpha=0.25, linewidth=0.8)
                    values, averaged = ema(values, decay), True
                _line(axis, positions, values, **look, label=_once(seen, label))
            average = f"EMA({decay:.3g})" if averaged else ""
            axis.set_title(panel.title if seen else ", ".join(filter(None, (panel.title, average))))
            axis.set_ylabel(panel.unit)
            _steps(axis, x=x)
            for log, which, place in ((log_x, "x", 1), (log_y, "y", 2)):
                if log:
                    _logarithmic(axis, np.concatenate([line[place].ravel() for line in panel.lines]), which)
            if seen:
                axis.legend(title=average)
        for axis in axes[len(panels) :]:
            axis.remove()
        if coloured:
            depths.legend(figure, axes[: len(panels)])
    return figure


@dataclass(frozen=True)
class Curve:
    """Losses of one run; steps and values, [N] each."""

    steps: np.ndarray
    training: np.ndarray
    validation_steps: np.ndarray
    validation: np.ndarray


def loss_curves(runs: Sequence[tuple[str, Curve]], decay: float) -> Figure:
    """Training loss, as it is and averaged, with held-out loss as points; runs of one label share a colour."""
    with styled():
        figure, (axis,) = _panels(1, 1, wide=6.4, high=4.0)
        looks = _looks(label for label, _ in runs)
        labelled = set()
        for label, curve in runs:
            look = {key: looks[label][key] for key in ("color", "linestyle")}
            _line(axis, curve.steps, curve.training, color=look["color"], alpha=0.25, linewidth=0.8)
            _line(axis, curve.steps, ema(curve.training, decay), **look, label=_once(labelled, label))
            marks = {"color": look["color"], "marker": looks[label]["marker"], "linestyle": "none"}
            axis.plot(curve.validation_steps, curve.validation, **marks, **HOLLOW)
        axis.plot([], [], "-", color="#777777", alpha=0.4, linewidth=0.8, label="each step")
        axis.plot([], [], "-", color="#777777", label=f"EMA({decay:.3g}) of training")
        axis.plot([], [], "o", color="#777777", label="held out", **HOLLOW)
        _steps(axis)
        axis.set_ylabel(LOSS)
        axis.legend()
    return figure


def loss_gap(training: Sequence[Series], validation: Sequence[Series], labels: tuple[str, str], decay: float) -> Figure:
    """The second run's loss minus the first's: averaged over training, and on held-out text.

    Args:
        training: gaps of each pair of runs.
        validation: the same of held-out loss, if there is any.
        labels: of both runs.
        decay: of the moving average.
    """
    averaged = [(steps, ema(gaps, decay)) for steps, gaps in training]
    with styled():
        figure, (axis,) = _panels(1, 1, wide=6.4, high=4.0)
        axis.axhline(0, color="#444444", linewidth=0.8)
        for pairs, colour, marks, label in (
            (averaged, COLOURS[0], {}, f"training, EMA({decay:.3g})"),
            (validation, COLOURS[1], {"marker": "o", "markevery": None, "markeredgecolor": "white"}, "held out"),
        ):
            if len(pairs) > 1:
                for pair in pairs:
                    _line(axis, *pair, color=colour, alpha=0.35, linewidth=0.8)
                label += f", mean of {len(pairs)} pairs"
            if pairs:
                _line(axis, *_mean(pairs), color=colour, label=label, **marks)
        if len(training) > 1:
            axis.plot([], [], color="#777777", alpha=0.6, linewidth=0.8, label="each pair")
        _steps(axis)
        axis.set_ylabel(f"loss difference (nats per token)\n{labels[1]} minus {labels[0]}")
        axis.legend()
    return figure


def _mean(series: Sequence[Series]) -> Series:
    """Mean of several at the steps that all of them have."""
    common = functools.reduce(np.intersect1d, (steps for steps, _ in series))
    return common, np.mean([values[np.isin(steps, common)] for steps, values in series], axis=0)


def cosines(lines: Sequence[tuple[str, Sequence[float]]], note: str) -> Figure:
    """Cosine of residual outputs by layer.

    Args:
        lines: label and a value a layer.
        note: which steps are compared.
    """
    with styled():
        from matplotlib.ticker import MaxNLocator

        figure, (axis,) = _panels(1, 1, wide=6.4, high=4.0)
        looks = _looks(label for label, _ in lines)
        labelled = set()
        for label, values in lines:
            layers = np.arange(1, len(values) + 1)
            axis.plot(layers, values, markersize=4, **looks[label], label=_once(labelled, label))
        axis.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axis.set_xlabel("layer")
        axis.set_ylabel(f"{UNITS['residual_cosine']}\n({note})")
        axis.legend()
    return figure


def by_depth(panels: Mapping[str, Mapping[str, Mapping[int, Sequence[float]]]]) -> Figure:
    """A panel for each measure with a line for each label over the number of layers: mean and spread over runs.

    Args:
        panels: unit -> label -> number of layers -> a value a run.
    """
    with styled():
        from matplotlib.ticker import MaxNLocator

        figure, axes = _panels(1, len(panels), wide=3.6, share=False)
        figure.get_layout_engine().set(w_pad=0.1)
        looks = _looks(label for groups in panels.values() for label in groups)
        ticks = sorted({depth for groups in panels.values() for each in groups.values() for depth in each})
        # Side by side, so that bars of one depth do not hide each other.
        gap = min((b - a for a, b in itertools.pairwise(ticks)), default=1)
        shift = {label: min(0.08, 0.6 / len(looks)) * gap * (n - (len(looks) - 1) / 2) for n, label in enumerate(looks)}
        beyond = max(gap / 2, 0.05 * (ticks[-1] - ticks[0]))
        for axis, (unit, groups) in zip(axes, panels.items(), strict=True):
            for label, depths in groups.items():
                found = {depth: np.array(values)[np.isfinite(values)] for depth, values in sorted(depths.items())}
                found = {depth + shift[label]: values for depth, values in found.items() if len(values)}
                means = [values.mean() for values in found.values()]
                spreads = [values.std(ddof=1) if len(values) > 1 else 0.0 for values in found.values()]
                axis.errorbar(list(found), means, spreads, **looks[label], capsize=3, label=_in_legend(label))
                ring = {"color": looks[label]["color"], "markerfacecolor": "white", "markersize": 4}
                for x, values in found.items():
                    axis.plot([x] * len(values), values, "o", **ring)
            axis.set_xlabel("layers")
            axis.set_xticks(ticks)
            axis.set_xlim(ticks[0] - beyond, ticks[-1] + beyond)
            axis.set_ylabel(unit)
            axis.yaxis.set_major_locator(MaxNLocator(nbins=6))
            if not any(value > 0 for depths in groups.values() for values in depths.values() for value in values):
                axis.set_ylim(0, 1)  # shares that are all 0 have no scale of their own, and none is below it
        figure.legend(
            *axes[0].get_legend_handles_labels(),
            loc="outside upper center",
            ncols=min(len(looks), 2 * len(panels)),
            title="mean and standard deviation of runs; a ring is a run",
        )
    return figure


def _panels(
    n_rows: int, columns: int, *, wide: float = PANEL_INCHES[0], high: float = PANEL_INCHES[1], share: bool = True
) -> tuple[Figure, np.ndarray]:
    """A figure and its axes, row by row. It belongs to no window system and to no list of open figures."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(wide * columns, high * n_rows), layout="constrained")
    return figure, figure.subplots(n_rows, columns, sharex=share, sharey=share, squeeze=False).ravel()


def _line(axis: Axes, steps: np.ndarray, values: np.ndarray, **style: Any) -> None:
    """A line with gaps where values [N] are not finite, and a point where one stands alone, which no line shows."""
    drawn = np.concatenate([[False], np.isfinite(values), [False]])
    alone = drawn[1:-1] & ~drawn[:-2] & ~drawn[2:]
    points = {"marker": "o", "markevery": alone, "markersize": 4} if alone.any() else {}
    axis.plot(steps, values, **{**points, **style})


def _steps(axis: Axes, label: bool = True, *, x: str = "step") -> None:
    """The horizontal axis, `x` of AXES."""
    from matplotlib.ticker import EngFormatter, MaxNLocator

    # With two ticks at least, a single step has some that are no whole numbers.
    whole = {"integer": True, "min_n_ticks": 1} if x != "hours" else {}
    axis.xaxis.set_major_locator(MaxNLocator(nbins=5, **whole))
    if x != "hours":
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    if label:
        axis.set_xlabel(AXES[x])
        axis.tick_params(labelbottom=True)


def _logarithmic(axis: Axes, values: np.ndarray, which: str = "y") -> None:
    """Values on a logarithmic scale, x or y; its ticks as plain numbers, or as they were formatted."""
    from matplotlib.ticker import EngFormatter, FuncFormatter, LogLocator, NullFormatter

    scale = getattr(axis, f"{which}axis")
    plain = scale.get_major_formatter()
    axis.set(**{f"{which}scale": "log"})
    shown = values[np.isfinite(values) & (values > 0)]
    few = not len(shown) or shown.max() < 1e3 * shown.min()
    scale.set_major_locator(LogLocator(subs=(1, 2, 5) if few else (1,)))
    kept = isinstance(plain, EngFormatter)
    scale.set_major_formatter(plain if kept else FuncFormatter(lambda value, _: f"{value:g}"))
    scale.set_minor_formatter(NullFormatter())


def _positive(values: np.ndarray) -> np.ndarray:
    """NaN for what a logarithmic axis cannot show."""
    return np.where(values > 0, values, np.nan)


def _looks(labels: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Label -> color, marker and linestyle, in order of first sight; no two the same up to 32 labels."""
    looks = itertools.cycle(
        {"color": colour, "marker": marker, "linestyle": dashes}
        for dashes in DASHES
        for colour, marker in zip(COLOURS, MARKERS, strict=True)
    )
    return dict(zip(dict.fromkeys(labels), looks, strict=False))


def _once(seen: set[str], label: str) -> str:
    """The label the first time, later one that a legend leaves out."""
    if label in seen:
        return "_nolegend_"
    seen.add(label)
    return _in_legend(label)


def _in_legend(label: str) -> str:
    """The label so that a legend shows it, which leaves out those that begin with an underscore."""
    return f" {label}" if label.startswith("_") else label
