"""The command line of titan-prores plot."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import logging
import math
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_prores.config import registry, sources
from titan_prores.config.errors import ConfigError, nearest
from titan_prores.output import spike_score
from titan_prores.output.shell import run_command
from titan_prores.tools.plots import figures
from titan_prores.tools.plots.runs import LARGEST_DECAY, SHARE, Run, difference, fitting_decay, load_runs, split_label

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from titan_prores.config.recipe import Recipe

OUT = Path("outputs/figures")
POINTS = 400  # of a schedule's curve
NORM = "activation_norm"
PERPLEXITY = "held-out perplexity"
RUNS = "FOLDER or LABEL=FOLDER of a run, or FILE.jsonl.gz/NAME of a run in a sweep's results; patterns match several"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw what a command line asks for; returns the exit status: 0, or 2 for a wrong one."""
    return run_command(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    options, rest = parser().parse_known_args(arguments)
    if rest and not getattr(options, "config", None):
        given = rest[0].partition("=")[0]
        known = [f"--{name}" for name in vars(options) if name not in ("command", "draw", "runs")]
        raise ConfigError(given, "unknown option", allowed="those of --help", nearest=nearest(given, known))
    options.overrides = rest
    figure = options.draw(options)
    print(figures.save(figure, output(options)))
    return 0


def output(options: argparse.Namespace) -> Path:
    """Where the figure of a command goes: --output, or below OUT a name that no other command has.

    The name says what is drawn; a digest of the whole command, its run folders as absolute paths, tells apart what the
    words leave out.
    """
    folder = OUT
    if options.output is not None:
        path = Path(options.output)
        if not options.output.endswith("/") and not path.is_dir():
            return path
        folder = path
    named = {key: value for key, value in vars(options).items() if key not in ("draw", "output") and value}
    runs = [split_label(argument) for argument in named.pop("runs", ())]
    words = [options.command, *named.get("schedule", ())]
    if path := named.get("config"):
        words.append(path.stem)
        named["config"] = str(path.absolute())
    if key := named.get("key"):
        words += key if isinstance(key, list) else [key] if key != NORM else []
    words += dict.fromkeys(label or Path(pattern).name for label, pattern in runs)
    if named.keys() == {"command"} and not runs:
        return folder / options.command
    whole = [sorted(named.items()), [[label, os.path.abspath(pattern)] for label, pattern in runs]]
    digest = hashlib.sha256(json.dumps(whole).encode(errors="surrogateescape")).hexdigest()[:8]
    text = re.sub(r"[^A-Za-z0-9._]+", "-", "-".join(words)).strip("-")[:80]
    return folder / f"{text}-{digest}"


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="titan-prores plot",
        description="Draw figures from run folders.",
        allow_abbrev=False,
        epilog="Exit status: 0 drawn, 2 the command is wrong or a run lacks required metrics. "
        "titan-prores plot COMMAND --help says more. matplotlib comes with the extra titan-prores[plot].",
    )
    commands = made.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def command(draw: Callable[[argparse.Namespace], Figure]) -> argparse.ArgumentParser:
        summary, _, more = draw.__doc__.partition("\n")
        added = commands.add_parser(
            draw.__name__, help=summary, description=f"{summary} {' '.join(more.split())}", allow_abbrev=False
        )
        added.add_argument(
            "--output",
            metavar="PATH",
            help="file to write, as PNG unless its suffix names another format, such as .pdf; below a folder, or "
            f"PATH/, the name says what is drawn ({OUT}/)",
        )
        added.set_defaults(draw=draw)
        return added

    alphas = command(alpha)
    alphas.add_argument("runs", nargs="*", metavar="RUN", help=f"{RUNS}: the alpha that it logged")
    alphas.add_argument(
        "--schedule", action="append", metavar="NAME", help="of the paper's, such as linear; may be repeated (all)"
    )
    alphas.add_argument("--layers", type=_positive, metavar="L", help="layers of the model (12)")
    length = alphas.add_mutually_exclusive_group()
    length.add_argument("--T", type=_positive, help="warmup length of the first layer, in optimizer steps (1000)")
    length.add_argument("--total", type=_positive, help="instead: the step at which every layer is at 1")
    alphas.add_argument("--config", type=Path, metavar="RECIPE", help="the schedule of a recipe; overrides may follow")

    losses = command(loss)
    losses.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    gaps = command(gap)
    gaps.add_argument("runs", nargs="+", metavar="RUN", help=f"the baseline, then the other: {RUNS}")
    for each in (losses, gaps):
        each.add_argument(
            "--ema",
            type=_share,
            metavar="DECAY",
            help=f"of the moving average ({LARGEST_DECAY}; less on a run of fewer than "
            f"{1 / SHARE / (1 - LARGEST_DECAY):.0f} steps)",
        )
    metrics = command(metric)
    metrics.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    metrics.add_argument("--key", action="append", required=True, metavar="KEY", help="of the rows; may be repeated")
    metrics.add_argument("--x", choices=tuple(figures.AXES), default="step", help="against what (step)")
    metrics.add_argument(
        "--ema", type=_share, metavar="DECAY", help=f"moving average of what has more than {figures.FEW} values"
    )
    metrics.add_argument("--log-x", action="store_true", help="logarithmic positions")
    metrics.add_argument("--log-y", action="store_true", help="logarithmic values")
    metrics.add_argument(
        "--layer",
        type=_layers,
        default="all",
        metavar="L[,L]",
        help="of keys with a list for each layer: these layers from 1, each in a panel of all runs; or all, each run "
        "in a panel (all)",
    )
    norms = command(activation)
    norms.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    norms.add_argument("--key", default=NORM, help=f"a list for each layer in the rows ({NORM})")
    norms.add_argument("--linear", action="store_true", help="linear values instead of logarithmic ones")
    angles = command(cosine)
    angles.add_argument("runs", nargs="+", metavar="RUN", help=RUNS)
    angles.add_argument(
        "--checkpoints",
        nargs=2,
        type=_positive,
        metavar=("FIRST", "SECOND"),
        help="compare the checkpoints of these two steps instead of what the probe residual_cosine wrote",
    )
    angles.add_argument("--sequences", type=_positive, default=4, help="with --checkpoints: held-out windows (4)")
    angles.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="with --checkpoints")
    depths = command(depth)
    depths.add_argument("runs", nargs="+", metavar="LABEL=RUN", help=f"{RUNS}; runs of one label are one line")
    depths.add_argument(
        "--window", type=_positive, default=spike_score.WINDOW, help=f"of the score ({spike_score.WINDOW} steps)"
    )
    depths.add_argument(
        "--threshold",
        type=_above_zero,
        default=spike_score.THRESHOLD,
        help=f"of it, in standard deviations ({spike_score.THRESHOLD})",
    )
    return made


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1")
    return int(text)


def _layers(text: str) -> str | list[int]:
    return text if text == "all" else [_positive(part) for part in text.split(",")]


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 0 to below 1")
    return value


def _above_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value


# --- The figures --------------------------------------------------------------------------------------------------


def alpha(options: argparse.Namespace) -> Figure:
    """alpha of every layer over the run (paper, Fig. 6).

    Of schedules by name, of a recipe's schedule, or as runs have logged it.
    """
    named = {key: getattr(options, key) for key in ("schedule", "layers", "T", "total")}
    of = "RUN" if options.runs else "--config" if options.config else None
    if wrong := [f"--{key}" for key, value in named.items() if of and value is not None]:
        raise ConfigError(wrong[0], f"is for schedules by name, and {of} has a schedule of its own")
    if options.runs:
        if options.config:
            raise ConfigError("--config", "alpha is either a recipe's or what runs have logged")
        panels = _layer_panels(load_runs(options.runs), "alpha")
    elif options.config:
        panels = _recipe_alpha(options.config, options.overrides)
    else:
        panels = _named_alpha(options.schedule, options.layers or 12, options.T, options.total)
    return figures.layer_curves(panels, "alpha")


def _named_alpha(
    names: Sequence[str] | None, n_layers: int, T: float | None, total: float | None
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Name -> steps and alpha; all over the steps that the longest of them warms up."""
    from titan_prores.prores.fixed import SCHEDULES, Schedule

    T = 1000 if T is None and total is None else T
    built = {}
    for name in names or SCHEDULES:
        if name not in SCHEDULES:
            raise ConfigError(
                "--schedule",
                "not a schedule of the paper",
                value=name,
                allowed=list(SCHEDULES),
                nearest=nearest(name, SCHEDULES),
            )
        length = {} if SCHEDULES[name].stages is None else {"T": T, "total": total}
        built[name] = Schedule(name, n_layers, **length)
    longest = max([schedule.total_steps or 0 for schedule in built.values()]) or n_layers * (T or total)
    return {name: _sampled(schedule.alpha, 1.1 * longest) for name, schedule in built.items()}


def _recipe_alpha(path: Path, overrides: Sequence[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    from titan_prores.config.resolve import resolve

    recipe = resolve(sources.load(path, overrides, registry.DEFAULTS))
    found, first_step = _schedule_part(recipe)
    built = found.build(n_layers=_n_layers(recipe))
    return {found.name: _sampled(lambda step: built.alpha(step + first_step), recipe.training.steps)}


def _schedule_part(recipe: Recipe) -> tuple[Any, int]:
    """The residual schedule among the settings of the recipe's transforms, and its step at the start of the run."""
    for transform in recipe.sets["transforms"]:
        for name in type(transform.config).model_fields:
            if getattr(value := getattr(transform.config, name), "kind", None) == "residual_schedule":
                return value, getattr(transform.config, "first_step", 0)
    raise ConfigError("transforms", "none that is on has a residual schedule")


def _n_layers(recipe: Recipe) -> int:
    import torch

    slot = recipe.slots["model"]
    with torch.device("meta"):
        return len(slot.build(vocab_size=1, seq_len=recipe.training.seq_len).layers)


def _sampled(alpha: Callable[[int], np.ndarray], last: float) -> tuple[np.ndarray, np.ndarray]:
    steps = np.unique(np.linspace(0, last, POINTS).round().astype(int))
    return steps, np.stack([alpha(int(step)) for step in steps])


def loss(options: argparse.Namespace) -> Figure:
    """Training and held-out loss of runs."""
    curves = [(run.label, _curve(run)) for run in load_runs(options.runs)]
    _require_finite([values for _, curve in curves for values in (curve.training, curve.validation)], "loss")
    return figures.loss_curves(curves, _decay(options, [curve.steps for _, curve in curves]))


def _decay(options: argparse.Namespace, steps: Iterable[np.ndarray]) -> float:
    """Decay of the moving average of lines with these steps, [N] each."""
    return fitting_decay(map(len, steps)) if options.ema is None else options.ema


def metric(options: argparse.Namespace) -> Figure:
    """Any keys of metrics.jsonl against steps, tokens or hours.

    A panel for each key. Hours are those in training steps, without validation and checkpoints.
    """
    runs = load_runs(options.runs)
    panels = []
    for key in dict.fromkeys(options.key):
        unit = figures.UNITS.get(key, key)
        lines = []
        for run in runs:
            steps, values = run.series(key)
            lines.append((run, run.along(options.x, steps), values))
        _require_finite([values for _, _, values in lines], key)
        for log, what, series in (
            (options.log_x, options.x, [x for _, x, _ in lines]),
            (options.log_y, key, [values for _, _, values in lines]),
        ):
            if log and not any((values > 0).any() for values in series):
                raise ConfigError("RUN", f"no value of {what} is above 0, as a logarithmic axis needs")
        listed = [values.ndim == 2 for _, _, values in lines]
        if all(listed) and options.layer == "all":
            taken: dict[str, None] = {}
            for run, x, values in lines:
                label = _unused(run.label, taken)
                taken[label] = None
                panels.append(figures.Panel(unit, label, [(label, x, values)]))
        elif all(listed):
            fewest = min(values.shape[1] for _, _, values in lines)
            for layer in options.layer:
                if layer > fewest:
                    raise ConfigError(
                        "--layer", f"{key} has fewer layers", value=layer, allowed=f"1 to {fewest}, or all"
                    )
                layers = [(run.label, x, values[:, layer - 1]) for run, x, values in lines]
                panels.append(figures.Panel(unit, f"layer {layer}", layers))
        elif any(listed):
            raise ConfigError(
                "--key", "is a list for each layer in some of the runs, and a number in others", value=key
            )
        else:
            panels.append(figures.Panel(unit, "", [(run.label, x, values) for run, x, values in lines]))
    if options.layer != "all" and not any(panel.title for panel in panels):
        raise ConfigError("--layer", "no key of --key has a list for each layer", value=options.layer)
    return figures.measurements(panels, options.x, options.ema, log_x=options.log_x, log_y=options.log_y)


def _curve(run: Run) -> figures.Curve:
    validated = run.has("validation_loss")
    return figures.Curve(*run.series("loss"), *(run.series("validation_loss") if validated else (np.empty(0),) * 2))


def gap(options: argparse.Namespace) -> Figure:
    """Loss of one run minus that of another, in training and on held-out text (paper, Fig. 5).

    Several runs of either label, one a seed, make pairs of equal training.seed; their mean is drawn too.
    """
    labels, pairs = pair_up(load_runs(options.runs))
    training = [difference(*pair, "loss") for pair in pairs]
    validated = all(run.has("validation_loss") for pair in pairs for run in pair)
    validation = [difference(*pair, "validation_loss") for pair in pairs] if validated else []
    _require_finite([values for _, values in training + validation], f"{labels[1]} minus {labels[0]}")
    return figures.loss_gap(training, validation, labels, _decay(options, [steps for steps, _ in training]))


def pair_up(runs: Sequence[Run]) -> tuple[tuple[str, str], list[tuple[Run, Run]]]:
    """Both labels, and the runs of the first with those of the second of the same seed; any two runs are a pair.

    Raises:
        ConfigError: there are not two labels, or they have not the same seeds, each once.
    """
    if len(runs) == 2:
        return (runs[0].label, runs[1].label), [(runs[0], runs[1])]
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.label, []).append(run)
    if len(groups) != 2:
        raise ConfigError(
            "RUN",
            "a gap is between two runs, or between runs of two labels with the same seeds",
            value={label: len(group) for label, group in groups.items()},
        )
    first, second = (_by_seed(group) for group in groups.values())
    alone = {
        label: sorted(mine.keys() - theirs.keys())
        for label, mine, theirs in zip(groups, (first, second), (second, first), strict=True)
    }
    if any(alone.values()):
        raise ConfigError(
            "RUN",
            "runs of two labels are paired by training.seed, and only one of them has "
            + ", ".join(f"{seed} ({label})" for label, seeds in alone.items() for seed in seeds),
        )
    return tuple(groups), [(first[seed], second[seed]) for seed in sorted(first)]


def _by_seed(runs: Sequence[Run]) -> dict[int, Run]:
    found: dict[int, Run] = {}
    for run in runs:
        seed = run.setting("training", "seed")
        if not isinstance(seed, int):
            raise ConfigError("training.seed", f"is not a whole number in the recipe of {run.path}", value=seed)
        if seed in found:
            raise ConfigError(
                "RUN",
                f"runs of two labels are paired by training.seed, and {found[seed].path} and {run.path} "
                f"of {run.label} have the same, {seed}",
            )
        found[seed] = run
    return found


def activation(options: argparse.Namespace) -> Figure:
    """Activation norm of every layer over the run (paper, Fig. 3).

    Takes the probe activation_norm; --key draws another list for each layer, such as layer_grad_norm.
    """
    panels = _layer_panels(load_runs(options.runs), options.key)
    unit = figures.UNITS.get(options.key, options.key)
    return figures.layer_curves(panels, unit, log=not options.linear, columns=2)


def _layer_panels(runs: Sequence[Run], key: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Label -> steps [N] and values [N, L] of a key; labels that come again are numbered."""
    panels: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for run in runs:
        steps, values = run.series(key)
        if values.ndim != 2:
            raise ConfigError("RUN", f"{key} is not a list of values per layer", value=str(run.path))
        panels[_unused(run.label, panels)] = steps, values
    _require_finite([values for _, values in panels.values()], key)
    return panels


def _require_finite(series: Sequence[np.ndarray], what: str) -> None:
    """Raise ConfigError where a figure would be empty."""
    if not any(np.isfinite(values).any() for values in series):
        raise ConfigError("RUN", f"there is nothing to draw: no value of {what} is finite")


def _unused(label: str, taken: Mapping[str, Any]) -> str:
    """The label, with a number where there is one like it."""
    numbered = (label if n == 1 else f"{label} ({n})" for n in range(1, len(taken) + 2))
    return next(each for each in numbered if each not in taken)


def cosine(options: argparse.Namespace) -> Figure:
    """Cosine of residual outputs by layer, early in a run against its end (paper, Fig. 4).

    Takes the probe residual_cosine, or the checkpoints of two steps.
    """
    runs = load_runs(options.runs)
    if options.checkpoints:
        from titan_prores.tools.plots.cosines import checkpoint_cosines

        logging.disable(logging.INFO)
        try:
            first, second = options.checkpoints
            lines = [
                (run.label, checkpoint_cosines(run.path, first, second, options.sequences, options.device))
                for run in runs
            ]
        finally:
            logging.disable(logging.NOTSET)
        _require_finite([np.array(values) for _, values in lines], "the cosines")
        return figures.cosines(lines, f"checkpoints of steps {first:,} and {second:,}")
    lines, compared = [], set()
    for run in runs:
        steps, values = run.series("residual_cosine")
        lines.append((run.label, values[-1]))
        compared.add((int(run.series("residual_cosine_step")[1][-1]), int(steps[-1])))
    _require_finite([values for _, values in lines], "residual_cosine")
    note = ", ".join(f"steps {first:,} and {last:,}" for first, last in sorted(compared))
    return figures.cosines(lines, note)


def depth(options: argparse.Namespace) -> Figure:
    """Perplexity and spike scores over the number of layers (paper, Figs. 1 and 2).

    The perplexity is that after the recipe's last step. A score is the share of steps between 10 % and 90 % of the run
    that are --threshold standard deviations or more from the --window steps before them; a run that is no longer than
    that has none.
    """
    settings = {"window": options.window, "threshold": options.threshold}
    measures: dict[str, Callable[[Run], float]] = {
        PERPLEXITY: Run.perplexity,
        "spike score of loss (%)": lambda run: 100 * run.spike_score("loss", **settings),
        "spike score of\ngradient norm (%)": lambda run: 100 * run.spike_score("grad_norm", **settings),
    }
    runs = load_runs(options.runs)
    panels: dict[str, dict[str, dict[int, list[float]]]] = {unit: {} for unit in measures}
    for run in runs:
        layers = run.setting("model", "n_layers")
        for unit, measure in measures.items():
            panels[unit].setdefault(run.label, {}).setdefault(layers, []).append(measure(run))
    for unit in measures:
        name = " ".join(unit.split()).removesuffix(" (%)")
        values = {label: list(itertools.chain(*depths.values())) for label, depths in panels[unit].items()}
        missing = {label: sum(not math.isfinite(value) for value in found) for label, found in values.items()}
        if all(missing[label] == len(found) for label, found in values.items()):
            del panels[unit]
            if unit != PERPLEXITY:
                print(f"no {name}: no run has more rows with it than --window {options.window}", file=sys.stderr)
                continue
        for label, count in missing.items():
            if count:
                left_out = f"{count} of {len(values[label])} runs have no finite {name} and are left out of that panel"
                print(f"{label}: {left_out}", file=sys.stderr)
    if not panels:
        raise ConfigError("", "no run has anything to draw")
    return figures.by_depth(panels)
