"""What figures show is what the rows say: the data of every line is held against the metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from titan_prores.errors import ConfigError
from titan_prores.plots import command
from titan_prores.plots.runs import difference, ema, load_run, load_runs
from titan_prores.prores.schedules import SCHEDULES, Schedule

pytest.importorskip("matplotlib")

STEPS = 40


def write_run(folder: Path, n_layers: int = 3, shift: float = 0.0, **more: object) -> Path:
    """A run folder with losses, norms a layer in every 10th step, cosines from step 20 on and three validations."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(f"[training]\nsteps = {STEPS}\n\n[model]\nn_layers = {n_layers}\n")
    rows = []
    for step in range(1, STEPS + 1):
        row = {
            "step": step,
            "loss": 5 - 0.05 * step + 0.1 * math.sin(step) + shift,
            "grad_norm": 1 + 0.1 * math.cos(step),
        }
        if step == 30:
            row["loss"] += 3
        if step % 10 == 0:
            row["activation_norm"] = [step * layer / 10 for layer in range(1, n_layers + 1)]
            row["alpha"] = [min(step / (10 * layer), 1.0) for layer in range(1, n_layers + 1)]
        if step % 10 == 0 and step >= 20:
            row |= {"residual_cosine": [0.9 - step / 100 - layer / 50 for layer in range(n_layers)]}
            row |= {"residual_cosine_step": 10}
        rows.append({**row, **more})
        if step in (20, 30, 40):
            rows.append({"step": step, "validation": True, "validation_loss": 4 - step / 100 + 2 * shift})
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


def draw(*arguments: str):
    """The figure of a command line, not saved."""
    options, options_rest = command.parser().parse_known_args(arguments)
    options.overrides = options_rest
    return options.draw(options)


def lines(axis) -> dict[str, tuple[list[float], list[float]]]:
    """Label -> x and y of the lines that a legend names."""
    named = [line for line in axis.lines if not line.get_label().startswith("_")]
    return {
        line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in named if len(line.get_xdata())
    }


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_run(tmp_path / "base"), write_run(tmp_path / "prores", shift=-0.25)


def test_ema_by_hand() -> None:
    assert ema(np.array([2.0, 4.0]), 0.5).tolist() == [2.0, (0.25 * 2 + 0.5 * 4) / 0.75]
    assert ema(np.array([math.nan, 3.0, math.inf, 3.0]), 0.9)[1:].tolist() == pytest.approx([3.0] * 3)
    assert math.isnan(ema(np.array([math.nan]), 0.9)[0])
    constant = ema(np.full(500, 7.0), 0.99)
    assert constant == pytest.approx(7.0), "it is not drawn to zero at first"


def test_loss(pair: tuple[Path, Path]) -> None:
    figure = draw("loss", f"A={pair[0]}", str(pair[1]), "--ema", "0.8")
    (axis,) = figure.axes
    run = load_run(pair[0])
    steps, losses = run.series("loss")
    found = lines(axis)
    assert list(found) == ["A", "prores"]
    assert found["A"][0] == steps.tolist() and found["A"][1] == pytest.approx(ema(losses, 0.8))
    drawn = [list(line.get_ydata()) for line in axis.lines]
    assert losses.tolist() in drawn and run.series("validation_loss")[1].tolist() in drawn
    assert axis.get_xlabel() == "optimizer step" and "nats" in axis.get_ylabel()


def test_runs_of_one_label_share_a_colour(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_run(tmp_path / f"run-{seed}", shift=seed)
    figure = draw("loss", f"same={tmp_path}/run-*")
    colours = {line.get_color() for line in figure.axes[0].lines} - {"#777777"}
    assert len(colours) == 1 and list(lines(figure.axes[0])) == ["same"]


def test_gap(pair: tuple[Path, Path]) -> None:
    figure = draw("gap", f"without={pair[0]}", f"with={pair[1]}")
    found = lines(figure.axes[0])
    assert found["training, EMA(0.99)"][1] == pytest.approx([-0.25] * STEPS)
    assert found["held out"] == ([20, 30, 40], pytest.approx([-0.5] * 3))
    assert "with minus without" in figure.axes[0].get_ylabel()
    steps, _ = difference(load_run(pair[0]), load_run(pair[1]), "activation_norm")
    assert steps.tolist() == [10, 20, 30, 40]


def test_gap_of_several_pairs(tmp_path: Path) -> None:
    for seed, gap in enumerate((-0.25, -0.05)):
        write_run(tmp_path / f"base-{seed}", shift=seed)
        write_run(tmp_path / f"prores-{seed}", shift=seed + gap)
    axis = draw("gap", f"without={tmp_path}/base-*", f"with={tmp_path}/prores-*", "--ema", "0").axes[0]
    found = lines(axis)
    assert found["training, EMA(0), mean of 2 pairs"][1] == pytest.approx([-0.15] * STEPS)
    assert found["held out, mean of 2 pairs"] == ([20, 30, 40], pytest.approx([-0.3] * 3))
    drawn = [list(line.get_ydata()) for line in axis.lines]
    for gap in (-0.25, -0.05):  # and each pair
        assert pytest.approx([gap] * STEPS) in drawn and pytest.approx([2 * gap] * 3) in drawn
    with pytest.raises(ConfigError, match="a gap is between two runs, or"):
        draw("gap", f"without={tmp_path}/base-*", f"with={tmp_path}/prores-0")


def test_activation(pair: tuple[Path, Path]) -> None:
    figure = draw("activation", f"A={pair[0]}", f"A={pair[1]}")
    panels = [axis for axis in figure.axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == ["A", "A (2)"]
    drawn = sorted(list(line.get_ydata()) for line in panels[0].lines)
    assert drawn == [[step * layer / 10 for step in (10, 20, 30, 40)] for layer in (1, 2, 3)]
    assert panels[0].get_yscale() == "log" and len({line.get_color() for line in panels[0].lines}) == 3
    assert draw("activation", str(pair[0]), "--linear").axes[0].get_yscale() == "linear"


def test_cosine(pair: tuple[Path, Path]) -> None:
    figure = draw("cosine", str(pair[0]), str(pair[1]))
    found = lines(figure.axes[0])
    assert found["base"] == ([1, 2, 3], pytest.approx([0.5, 0.48, 0.46]))
    assert "steps 10 and 40" in figure.axes[0].get_ylabel()


def test_depth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for n_layers in (4, 8):
        for seed in (0, 1):
            write_run(tmp_path / f"a-{n_layers}-{seed}", n_layers=n_layers, shift=0.1 * seed - 0.02 * n_layers)
        write_run(tmp_path / f"b-{n_layers}", n_layers=n_layers)
    figure = draw("depth", f"A={tmp_path}/a-*", f"B={tmp_path}/b-*", "--window", "10", "--threshold", "5")
    losses, perplexity = {}, figure.axes[0]
    for n_layers in (4, 8):
        losses[n_layers] = [3.6 + 2 * (0.1 * seed - 0.02 * n_layers) for seed in (0, 1)]
    (mean, _, (bars,)), *_ = perplexity.containers
    expected = [np.exp(losses[n_layers]) for n_layers in (4, 8)]
    assert mean.get_xdata() == pytest.approx([4, 8], abs=0.2), "A stands beside B"
    assert mean.get_ydata() == pytest.approx([e.mean() for e in expected])
    spread = [(high - low) / 2 for (_, low), (_, high) in bars.get_segments()]
    assert spread == pytest.approx([e.std(ddof=1) for e in expected])
    assert perplexity.get_ylabel() == "held-out perplexity" and list(perplexity.get_xticks()) == [4, 8]
    scores = [axis.containers[0][0].get_ydata().tolist() for axis in figure.axes[1:]]
    # Steps 11 to 36 are scored, and one of them is off.
    assert scores == [pytest.approx([100 / 26] * 2), [0, 0]]
    draw("depth", f"A={tmp_path}/a-*")
    assert "no spike score of loss: no run is long enough for --window 1000" in capsys.readouterr().err


def test_alpha_of_schedules() -> None:
    figure = draw("alpha", "--layers", "4", "--total", "100", "--schedule", "linear", "--schedule", "fix-L")
    linear, fixed = (axis for axis in figure.axes if axis.get_title())
    assert (linear.get_title(), fixed.get_title()) == ("linear", "fix-L")
    deepest = linear.lines[0]  # drawn first
    schedule = Schedule("linear", 4, total=100)
    steps = deepest.get_xdata()
    assert steps[0] == 0 and steps[-1] == 110
    assert deepest.get_ydata().tolist() == [schedule(int(step))[3] for step in steps]
    assert set(fixed.lines[0].get_ydata()) == {0.25} and list(fixed.lines[0].get_xdata()) == list(steps)
    assert len([axis for axis in draw("alpha").axes if axis.get_title()]) == len(SCHEDULES)


def test_alpha_of_a_recipe_and_of_a_run(pair: tuple[Path, Path]) -> None:
    debug = Path(__file__).parents[2] / "train_configs" / "debug.toml"
    figure = draw("alpha", "--config", str(debug), "--transforms.prores.residual_schedule.T=3", "--training.steps=15")
    axis = figure.axes[0]
    assert axis.get_title() == "linear" and len(axis.lines) == 4
    assert axis.lines[0].get_ydata().tolist() == [min(step / 12, 1.0) for step in range(16)]
    logged = draw("alpha", str(pair[0])).axes[0]
    assert list(logged.lines[-1].get_ydata()) == [1.0] * 4 and logged.lines[0].get_ydata()[0] == pytest.approx(1 / 3)


def test_saved_as_png_and_svg(pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "figures" / "here"
    assert command.main(["loss", str(pair[0]), "--out", str(out), "--name", "mine"]) == 0
    assert capsys.readouterr().out.split() == [str(out / "mine.png"), str(out / "mine.svg")]
    assert (out / "mine.png").read_bytes().startswith(b"\x89PNG") and b"</svg>" in (out / "mine.svg").read_bytes()
    first = (out / "mine.svg").read_bytes()
    command.main(["loss", str(pair[0]), "--out", str(out), "--name", "mine"])
    assert (out / "mine.svg").read_bytes() == first, "the same rows make the same file"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["loss", "{tmp}/nowhere"], "RUN = '{tmp}/nowhere': there is no such run folder"),
        (["loss", "{tmp}"], "is no run folder: there is no metrics.jsonl in it"),
        (["loss", "{base}", "--colour=1"], "--colour: is no option of this command"),
        (["activation", "{base}", "--key", "branch_ratio_ffn"], "has branch_ratio_ffn"),
        (["activation", "{base}", "--key", "loss"], "--key = 'loss': is no list for each layer"),
        (["gap", "{base}", "X={tmp}/ba[sr]e"], "a gap is between two runs, or"),
        (["alpha", "--schedule", "lineer"], "did you mean linear?"),
        (["alpha", "--config", "{tmp}/none.toml"], "none.toml"),
        (["cosine", "{base}", "--checkpoints", "1", "2"], "--checkpoints = 1: there is none in"),
        (["depth", "{broken}"], "recipe.toml is no TOML"),
        (["depth", "{bare}"], "model.n_layers: is not in the recipe"),
        (["loss", "{empty}"], "metrics.jsonl has no rows"),
        (["loss", "{base}", "--out", "{base}/metrics.jsonl"], "--out = '{base}/metrics.jsonl': cannot be written"),
    ],
)  # fmt: skip
def test_wrong_command_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"tmp": tmp_path, **{name: write_run(tmp_path / name) for name in ("base", "broken", "bare", "empty")}}
    (names["broken"] / "recipe.toml").write_text("[training\n")
    (names["bare"] / "recipe.toml").write_text("[training]\nsteps = 3\n")
    (names["empty"] / "metrics.jsonl").write_text("{ torn\n")
    assert command.main([argument.format(**names) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith("error: ") and captured.err.count("\n") == 1
    assert said.format(**names) in captured.err


def test_rows_that_are_none_are_passed_over_and_strings_are_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "lo\n{"step": 42, "loss": "NaN"}\n[1]\n')
    steps, losses = load_runs([str(run)])[0].series("loss")
    assert steps[-1] == 42 and math.isnan(losses[-1]) and len(steps) == STEPS + 1


def test_without_matplotlib_it_says_what_to_install(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert command.main(["loss", str(pair[0])]) == 2
    assert "pip install 'titan-prores[plot]'" in capsys.readouterr().err
