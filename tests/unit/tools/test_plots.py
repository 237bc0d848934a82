"""What figures show is what the rows say: the data of every line is held against the metrics."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from titan_prores.config.errors import ConfigError
from titan_prores.prores.fixed import SCHEDULES, Schedule
from titan_prores.tools.plots import command, packed
from titan_prores.tools.plots.runs import difference, ema, fitting_decay, load_run, load_runs

pytest.importorskip("matplotlib")

STEPS = 40


def write_run(folder: Path, n_layers: int = 3, shift: float = 0.0, seed: int = 0, **more: object) -> Path:
    """A run folder with losses, norms a layer in every 10th step, cosines from step 20 on and three validations."""
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
    return write_rows(folder, *rows, n_layers=n_layers, seed=seed)


def write_rows(folder: Path, *rows: dict[str, object], n_layers: int = 3, seed: int = 0) -> Path:
    """A run folder with these rows."""
    folder.mkdir(parents=True)
    (folder / "recipe.toml").write_text(
        f"[training]\nsteps = {STEPS}\nseed = {seed}\n\n[model]\nn_layers = {n_layers}\n"
    )
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


def lines_of(figure) -> list[tuple[str, list[float], list[float]]]:
    """Label, x and y of every line of a figure."""
    return [
        (line.get_label(), list(line.get_xdata()), list(line.get_ydata()))
        for axis in figure.axes
        for line in axis.lines
    ]


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    return write_run(tmp_path / "base"), write_run(tmp_path / "prores", shift=-0.25)


def test_ema_by_hand() -> None:
    assert ema(np.array([2.0, 4.0]), 0.5).tolist() == [2.0, (0.25 * 2 + 0.5 * 4) / 0.75]
    found = ema(np.array([math.nan, 2.0, math.inf, math.nan, 4.0]), 0.5)
    assert np.isnan(found).tolist() == [True, False, True, True, False], "a gap, and no plateau, where a run diverged"
    assert found[[1, 4]].tolist() == ema(np.array([2.0, 4.0]), 0.5).tolist(), "and on from before"
    constant = ema(np.full(500, 7.0), 0.99)
    assert constant == pytest.approx(7.0), "it is not drawn to zero at first"


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.99])
def test_ema_of_a_ramp_has_its_closed_form(decay: float) -> None:
    """Of the ramp v_i = i with weights decay^k / sum: it lags by decay/(1-decay) - n decay^n/(1-decay^n)."""
    n = np.arange(1, 301)
    lag = decay / (1 - decay) - n * decay**n / (1 - decay**n)
    assert ema(n - 1.0, decay) == pytest.approx(n - 1 - lag, rel=1e-9, abs=1e-9)
    assert ema(np.stack([n - 1.0, -3.0 * n], axis=1), decay)[:, 0] == pytest.approx(ema(n - 1.0, decay))


def test_ema_of_a_short_run_does_not_stand_above_its_loss(tmp_path: Path) -> None:
    """80 steps of a falling loss end where the loss does; over all of them it would stand 0.4 nats higher."""
    losses = {step: 3.2 + 2.4 * math.exp(-3 * step / 80) for step in range(1, 81)}
    run = write_rows(tmp_path / "run", *({"step": step, "loss": loss} for step, loss in losses.items()))
    assert ema(np.array([*losses.values()]), 0.99)[-1] - losses[80] > 0.4
    axis = draw("loss", str(run)).axes[0]
    (label,) = [line.get_label() for line in axis.lines if "EMA" in line.get_label()]
    assert label == "EMA(0.75) of training"
    assert 0 < lines(axis)["run"][1][-1] - losses[80] < 0.05
    assert [fitting_decay([n]) for n in (0, 1, 20, 80, 2000, 10**6)] == [0, 0, 0, 0.75, 0.99, 0.99]
    assert fitting_decay([80, 2000, 5]) == 0.99, "one for all lines of a figure, by the longest"


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
    assert found["training, EMA(0.5)"][1] == pytest.approx([-0.25] * STEPS)
    assert found["held out"] == ([20, 30, 40], pytest.approx([-0.5] * 3))
    assert "with minus without" in figure.axes[0].get_ylabel()
    steps, _ = difference(load_run(pair[0]), load_run(pair[1]), "activation_norm")
    assert steps.tolist() == [10, 20, 30, 40]


def test_gap_of_several_pairs(tmp_path: Path) -> None:
    for seed, gap in enumerate((-0.25, -0.05)):
        # The other way round by name, so that the seed has to tell which belong together.
        write_run(tmp_path / f"base-{seed}", shift=10 * seed, seed=seed)
        write_run(tmp_path / f"prores-{1 - seed}", shift=10 * seed + gap, seed=seed)
    axis = draw("gap", f"without={tmp_path}/base-*", f"with={tmp_path}/prores-*", "--ema", "0").axes[0]
    found = lines(axis)
    assert found["training, EMA(0), mean of 2 pairs"][1] == pytest.approx([-0.15] * STEPS)
    assert found["held out, mean of 2 pairs"] == ([20, 30, 40], pytest.approx([-0.3] * 3))
    drawn = [list(line.get_ydata()) for line in axis.lines]
    for gap in (-0.25, -0.05):  # and each pair
        assert pytest.approx([gap] * STEPS) in drawn and pytest.approx([2 * gap] * 3) in drawn
    write_run(tmp_path / "prores-2", seed=7)
    with pytest.raises(ConfigError) as raised:
        draw("gap", f"without={tmp_path}/base-*", f"with={tmp_path}/prores-[12]")
    assert "paired by training.seed, and only one of them has 1 (without), 7 (with)" in str(raised.value)
    with pytest.raises(ConfigError, match=r"base-0 and .*base-0 of without have the same, 0"):
        draw("gap", f"without={tmp_path}/base-0", f"without={tmp_path}/base-0", f"with={tmp_path}/prores-1")


def test_gap_of_a_diverged_run_has_a_gap_and_of_nothing_is_refused(tmp_path: Path) -> None:
    good = write_rows(tmp_path / "good", *({"step": step, "loss": 3.0} for step in (1, 2, 3, 4)))
    losses = (2.0, "NaN", 2.0, "Infinity")
    bad = write_rows(tmp_path / "bad", *({"step": n, "loss": loss} for n, loss in enumerate(losses, 1)), seed=5)
    (_, line) = draw("gap", str(good), str(bad), "--ema", "0").axes[0].lines
    assert line.get_ydata() == pytest.approx([-1, math.nan, -1, math.nan], nan_ok=True)
    assert line.get_marker() == "o" and list(line.get_markevery()) == [True, False, True, False]
    lost = write_rows(tmp_path / "lost", {"step": 1, "loss": "NaN"}, {"step": 2, "loss": "NaN"})
    for arguments in (["gap", str(good), str(lost)], ["loss", str(lost)]):
        with pytest.raises(ConfigError, match="there is nothing to draw: no value of"):
            draw(*arguments)


def test_runs_of_one_row_show(tmp_path: Path) -> None:
    run = write_rows(tmp_path / "run", {"step": 1, "loss": 3.0, "alpha": [0.5, 0.1], "activation_norm": [1.0, 2.0]})
    for name in ("loss", "alpha", "activation"):
        axis = draw(name, str(run)).axes[0]
        drawn = [line for line in axis.lines if len(line.get_xdata()) and len(line.get_ydata())]
        assert len(drawn) == 2, "each step and averaged, or two layers"
        assert all(line.get_marker() == "o" and list(line.get_markevery()) == [True] for line in drawn)
        first, last = axis.get_xlim()
        assert [tick for tick in axis.get_xticks() if first <= tick <= last] == [1]


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
    assert "no spike score of loss: no run has more rows with it than --window 1000" in capsys.readouterr().err
    draw("depth", f"A={tmp_path}/a-*", "--window", "9" * 18)  # more than memory holds


def test_depth_of_one_depth_and_of_many_labels_is_inside_the_axes(tmp_path: Path) -> None:
    for depth in (4, 8):
        for label in range(9):
            write_run(tmp_path / f"{label}-{depth}", n_layers=depth, shift=0.1 * label)
    for depths, gap in (("4", 1), ("[48]", 4)):
        runs = [f"line {label}={tmp_path}/{label}-{depths}" for label in range(9)]
        figure = draw("depth", *runs, "--window", "10")
        looks = set()
        for axis in figure.axes:
            low, high = axis.get_xlim()
            for mean, _, _ in axis.containers:
                x = np.array(mean.get_xdata(), dtype=float)
                assert (x > low + 0.1 * gap).all() and (x < high - 0.1 * gap).all(), "not at the edges"
                assert np.abs(x - 4 * np.round(x / 4)).max() < 0.4 * gap, "nearest to its own depth"
                looks.add((mean.get_color(), mean.get_marker(), mean.get_linestyle()))
        assert len(looks) == 9, "no two labels look alike"
        (legend,) = figure.legends
        figure.draw_without_rendering()
        box, whole = legend.get_window_extent(), figure.bbox
        assert box.x0 >= whole.x0 and box.x1 <= whole.x1


def test_metric_against_steps_tokens_and_hours(tmp_path: Path) -> None:
    seconds = {step: 10.0 + step for step in range(1, 61)}
    rows = []
    for step, length in seconds.items():
        rows.append({"step": step, "loss": 1.0 / step, "tokens": 512 * step, "step_seconds": length})
        if step % 20 == 0:
            rows.append({"step": step, "validation": True, "validation_loss": 5.0 - step / 10})
    rows.insert(0, {"step": 0, "validation": True, "validation_loss": 9.0})
    run = str(write_rows(tmp_path / "run", *rows))
    hours = np.cumsum([*seconds.values()]) / 3600
    for x, label, expected in (
        ("step", "optimizer step", [*seconds]),
        ("tokens", "tokens", [512 * step for step in seconds]),
        ("hours", "hours in training steps", hours),
    ):
        loss, validation = draw("metric", run, "--key", "loss", "--key", "validation_loss", "--x", x).axes
        assert lines(loss)["run"] == (pytest.approx(list(expected)), [1.0 / step for step in seconds])
        at = [0, *(expected[step - 1] for step in (20, 40, 60))]
        assert lines(validation)["run"] == (pytest.approx(at), [9.0, 3.0, 1.0, -1.0])
        assert loss.get_xlabel() == validation.get_xlabel() == label
        assert loss.get_xlim() == validation.get_xlim()
    figure = draw("metric", run, "--key", "loss", "--key", "validation_loss", "--ema", "0.9", "--log-x", "--log-y")
    loss, validation = figure.axes
    assert lines(loss)["run"][1] == pytest.approx(ema(1.0 / np.array([*seconds]), 0.9))
    assert loss.get_legend().get_title().get_text() == "EMA(0.9)" and loss.get_xscale() == loss.get_yscale() == "log"
    shown = lines(validation)["run"]
    assert shown[1] == pytest.approx([9, 3, 1, math.nan], nan_ok=True), "four values are not averaged"
    assert (
        np.isnan(shown[0]).tolist() == [True, False, False, False]
        and not validation.get_legend().get_title().get_text()
    )


def test_metric_of_layers(pair: tuple[Path, Path]) -> None:
    runs = [f"A={pair[0]}", f"A={pair[1]}"]
    panels = [axis for axis in draw("metric", *runs, "--key", "activation_norm").axes if axis.get_title()]
    assert [axis.get_title() for axis in panels] == ["A", "A (2)"]
    for axis in panels:  # the deepest first
        assert [list(line.get_ydata()) for line in axis.lines] == [
            [layer * step for step in (1, 2, 3, 4)] for layer in (3, 2, 1)
        ]
        assert list(axis.lines[0].get_xdata()) == [10, 20, 30, 40]
    given = [f"A={pair[0]}", f"B={pair[1]}", "--key", "activation_norm", "--key", "loss"]
    third, first, loss = draw("metric", *given, "--layer", "3,1").axes
    assert (third.get_title(), first.get_title(), loss.get_title()) == ("layer 3", "layer 1", "")
    assert lines(third) == {label: ([10, 20, 30, 40], [3, 6, 9, 12]) for label in "AB"}
    assert lines(first)["B"][1] == [1, 2, 3, 4] and third.get_ylim() == first.get_ylim()
    assert lines(loss)["B"][1] == load_run(pair[1]).series("loss")[1].tolist()


def test_no_two_commands_write_the_same_file(
    pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    twin = write_run(tmp_path / "elsewhere" / "base")  # of the same name in another folder
    base, prores = map(str, pair)
    commands = [
        ["alpha"],
        ["alpha", "--layers", "24"],
        ["alpha", "--total", "24000"],
        ["alpha", "--schedule", "linear"],
        ["alpha", base],
        ["alpha", "--config", "a.toml"],
        ["alpha", "--config", "b/a.toml"],
        ["alpha", "--config", "a.toml", "--training.steps=3"],
        ["loss", base],
        ["loss", str(twin)],
        ["loss", base, prores],
        ["loss", prores, base],
        ["loss", f"A={base}"],
        ["loss", base, "--ema", "0.5"],
        ["gap", base, prores],
        ["activation", base],
        ["activation", base, "--linear"],
        ["activation", base, "--key", "layer_grad_norm"],
        ["metric", base, "--key", "activation_norm"],
        ["metric", base, "--key", "loss"],
        ["metric", base, "--key", "loss", "--key", "lr"],
        ["metric", base, "--key", "loss", "--x", "hours"],
        ["metric", base, "--key", "loss", "--log-x"],
        ["metric", base, "--key", "alpha", "--layer", "1"],
        ["cosine", base],
        ["cosine", base, "--checkpoints", "1", "2"],
        ["depth", base],
        ["depth", base, "--window", "9"],
    ]

    def place(arguments: list[str]) -> Path:
        options, options.overrides = command.parser().parse_known_args(arguments)
        return command.output(options)

    names = [place(arguments) for arguments in commands]
    assert len(set(names)) == len(commands) and all(name.parent == command.OUT for name in names)
    assert [place(arguments) for arguments in commands] == names, "the same command, the same file"
    assert place(["loss", "base"]) == place(["loss", base]), "however the folder is written"
    assert names[0].name == "alpha"
    assert names[17].name.startswith("activation-layer_grad_norm-base-"), "what is drawn is in the name"
    assert place(["loss", base, "--output", "x/mine"]) == Path("x/mine")
    inside = place(["loss", base, "--output", "new/"])
    assert inside == Path("new") / names[8].name
    assert command.main(["loss", base, "--output", "one.pdf"]) == 0
    assert (tmp_path / "one.pdf").read_bytes().startswith(b"%PDF") and not list(tmp_path.glob("one.pdf.*"))


def test_depth_says_which_runs_it_leaves_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed, loss in enumerate((3.0, "NaN", "Infinity")):
        run = write_run(tmp_path / f"a-{seed}")
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": STEPS, "validation_loss": loss}) + "\n")
    write_run(tmp_path / "b")
    given = [f"A={tmp_path}/a-*", f"B={tmp_path}/b", "--window", "10"]
    figure = draw("depth", *given)
    assert (
        capsys.readouterr().err == "A: 2 of 3 runs have no finite held-out perplexity and are left out of that panel\n"
    )
    assert figure.axes[0].containers[0][0].get_ydata() == pytest.approx([math.exp(3)])
    axes = draw("depth", f"A={tmp_path}/a-[12]", "--window", "10").axes
    assert [axis.get_ylabel().split()[0] for axis in axes] == ["spike", "spike"]
    assert capsys.readouterr().err.startswith("A: 2 of 2 runs have no finite held-out perplexity")


def test_depth_takes_the_perplexity_of_the_last_step_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that ended before its last step, or was never validated, is left out and counted."""
    write_run(tmp_path / "a-whole")
    for name, rows in {
        "failed": [{"step": 1, "loss": 5.0}, {"step": 1, "validation": True, "validation_loss": 5.0}],
        "not-validated": [{"step": STEPS, "loss": 2.0}],
    }.items():
        write_rows(tmp_path / f"a-{name}", *rows)
    figure = draw("depth", f"A={tmp_path}/a-*", "--window", "10")
    assert figure.axes[0].containers[0][0].get_ydata() == pytest.approx([math.exp(3.6)])
    said = capsys.readouterr().err
    assert "A: 2 of 3 runs have no finite held-out perplexity" in said
    assert "A: 2 of 3 runs have no finite spike score of gradient norm" in said


@pytest.mark.parametrize(
    ("option", "value"),
    [("--threshold", value) for value in ("nan", "inf", "0", "-1", "x")] + [("--window", "0"), ("--window", "1.5")],
)
def test_settings_of_the_score_out_of_their_range(
    option: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["depth", str(tmp_path), f"{option}={value}"])
    assert f"argument {option}: {value} is not a number" in capsys.readouterr().err


def test_runs_of_a_sweep_are_drawn_from_its_file(tmp_path: Path) -> None:
    """The same lines as from the run folders; what the file lacks is named."""
    file, lines = tmp_path / "results.jsonl.gz", {}
    for seed, name in enumerate(("norm=pre,seed=0", "norm=pre,seed=1", "norm=post,seed=0")):
        run = load_run(write_run(tmp_path / name, shift=seed, seed=seed))
        lines[name] = {"name": name, "recipe": run.recipe, "series": run.columns}
    packed.write(file, lines)
    for command_line in (
        ["loss", "pre={}/norm=pre,*", "{}/norm=post*"],
        ["gap", "{}/norm=pre,*0", "{}/norm=post,seed=0"],
    ):
        one, other = (draw(*(each.format(place) for each in command_line)) for place in (tmp_path, file))
        assert lines_of(one) == lines_of(other) and lines_of(one)
    assert [run.label for run in load_runs([f"{file}/*"])] == list(lines)
    for missing in (f"{file}/norm=prr,*", f"x={file}/norm=pre"):
        with pytest.raises(ConfigError, match="there is no such run folder"):
            load_runs([missing])
    with pytest.raises(ConfigError, match=r"is a file \(allowed: a run folder, or .*results.jsonl.gz/NAME"):
        load_runs([str(file)])


def test_folders_with_equals_signs_in_their_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("norm=pre,prores=on,seed=0", "norm=pre,prores=on,seed=1", "norm=post"):
        write_run(tmp_path / "results" / name)
    monkeypatch.chdir(tmp_path)
    both = ["norm=pre,prores=on,seed=0", "norm=pre,prores=on,seed=1"]
    assert [run.label for run in load_runs(["results/norm=pre,prores=on*", "results/norm=post"])] == [
        *both,
        "norm=post",
    ]
    named = load_runs(["A=results/norm=pre,prores=on*", "B=results/norm=post"])
    assert [(run.label, run.path.name) for run in named] == [("A", both[0]), ("A", both[1]), ("B", "norm=post")]
    for wrong in ("results/norm=no*", "A=", "A=results/norm=no"):
        with pytest.raises(ConfigError, match="there is no such run folder") as raised:
            load_runs([wrong])
        assert raised.value.value == wrong


def test_alpha_of_schedules() -> None:
    figure = draw("alpha", "--layers", "4", "--total", "100", "--schedule", "linear", "--schedule", "fix-L")
    linear, fixed = (axis for axis in figure.axes if axis.get_title())
    assert (linear.get_title(), fixed.get_title()) == ("linear", "fix-L")
    deepest = linear.lines[0]  # drawn first
    schedule = Schedule("linear", 4, total=100)
    steps = deepest.get_xdata()
    assert steps[0] == 0 and steps[-1] == 110
    assert deepest.get_ydata().tolist() == [schedule.alpha(int(step))[3] for step in steps]
    assert set(fixed.lines[0].get_ydata()) == {0.25} and list(fixed.lines[0].get_xdata()) == list(steps)
    assert len([axis for axis in draw("alpha").axes if axis.get_title()]) == len(SCHEDULES)


def test_alpha_of_a_recipe_and_of_a_run(pair: tuple[Path, Path]) -> None:
    debug = Path(__file__).parents[3] / "train_configs" / "debug.toml"
    figure = draw("alpha", "--config", str(debug), "--transforms.prores.residual_schedule.T=3", "--training.steps=15")
    axis = figure.axes[0]
    assert axis.get_title() == "linear" and len(axis.lines) == 4
    assert axis.lines[0].get_ydata().tolist() == [min(step / 12, 1.0) for step in range(16)]
    logged = draw("alpha", str(pair[0])).axes[0]
    titles = [axis.get_title() for axis in draw("alpha", f"A={pair[0]}", f"A={pair[1]}").axes]
    assert titles[:2] == ["A", "A (2)"], "none is dropped for its label"
    assert list(logged.lines[-1].get_ydata()) == [1.0] * 4 and logged.lines[0].get_ydata()[0] == pytest.approx(1 / 3)


def test_saved_as_png_unless_the_name_says_otherwise(
    pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "figures" / "here"
    assert command.main(["loss", str(pair[0]), "--output", str(out / "mine")]) == 0
    assert capsys.readouterr().out == f"{out / 'mine.png'}\n" and list(out.iterdir()) == [out / "mine.png"]
    first = (out / "mine.png").read_bytes()
    assert first.startswith(b"\x89PNG")
    assert command.main(["loss", str(pair[0]), "--output", str(out / "mine.svg")]) == 0
    assert b"</svg>" in (out / "mine.svg").read_bytes()
    command.main(["loss", str(pair[0]), "--output", str(out / "mine")])
    assert (out / "mine.png").read_bytes() == first, "the same rows make the same file"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["loss", "{tmp}/nowhere"], "RUN = '{tmp}/nowhere': there is no such run folder"),
        (["loss", "{tmp}"], "not a run folder: it has no metrics.jsonl in it"),
        (["loss", "{base}", "--colour=1"], "--colour: unknown option"),
        (["loss", "{base}", "--out=x"], "--out: unknown option (allowed: those of --help); did you mean --output?"),
        (["metric", "{base}", "--key", "los"], "(allowed: activation_norm, alpha, grad_norm, loss, residual_cosine"),
        (["metric", "{base}", "--key", "los"], "did you mean loss?"),
        (["metric", "{base}", "--key", "validation"], "did you mean validation_loss?"),
        (["metric", "{base}", "--key", "loss", "--layer", "1"], "--layer = [1]: no key of --key has a list"),
        (["metric", "{base}", "--key", "alpha", "--layer", "4"], "alpha has fewer layers (allowed: 1 to 3, or all)"),
        (["metric", "{base}", "--key", "loss", "--x", "tokens"], "no row of {base} has tokens"),
        (["metric", "{texts}", "--key", "word"], "word of {texts} cannot be drawn: its values are not numbers"),
        (["metric", "{texts}", "--key", "ragged"], "ragged of {texts} cannot be drawn"),
        (["metric", "{texts}", "{base}", "--key", "alpha"], "is a list for each layer in some of the runs"),
        (["metric", "{texts}", "--key", "alpha", "--log-y"], "no value of alpha is above 0"),
        (["activation", "{base}", "--key", "branch_ratio_ffn"], "has branch_ratio_ffn"),
        (["activation", "{base}", "--key", "loss"], "loss is not a list of values per layer"),
        (["gap", "{base}", "X={base}", "Y={base}"], "a gap is between two runs, or"),
        (["gap", "{base}", "X={tmp}/ba[sr]e"], "training.seed: is not in the recipe of {bare}"),
        (["alpha", "--schedule", "lineer"], "did you mean linear?"),
        (["alpha", "--config", "{tmp}/none.toml"], "none.toml"),
        (["alpha", "--config", "x.toml", "--layers", "9"], "--layers: is for schedules by name, and --config has"),
        (["alpha", "{tmp}/base", "--schedule", "linear"], "--schedule: is for schedules by name, and RUN has"),
        (["alpha", "{tmp}/base", "--config", "x.toml"], "--config: alpha is either a recipe's or what runs"),
        (["cosine", "{base}", "--checkpoints", "1", "2"], "--checkpoints = 1: there is none in"),
        (["depth", "{broken}"], "recipe.toml is not valid TOML"),
        (["depth", "{bare}"], "model.n_layers: is not in the recipe"),
        (["loss", "{empty}"], "metrics.jsonl has no rows"),
        (["loss", "{base}", "--output", "{base}/metrics.jsonl/x"], "--output = '{base}/metrics.jsonl/x': cannot be"),
    ],
)
def test_wrong_command_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = {"tmp": tmp_path, **{name: write_run(tmp_path / name) for name in ("base", "broken", "bare", "empty")}}
    (names["broken"] / "recipe.toml").write_text("[training\n")
    (names["bare"] / "recipe.toml").write_text("[training]\nsteps = 3\n")
    (names["empty"] / "metrics.jsonl").write_text("{ torn\n")
    rows = [{"step": step, "word": "hello", "ragged": [1.0] * step, "alpha": -1.0} for step in (1, 2)]
    names["texts"] = write_rows(tmp_path / "texts", *rows)
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


def test_names_are_taken_literally(tmp_path: Path) -> None:
    names = ("a$b$c", "p$q_{$", "_under", "x%s{y}")
    folders = [write_run(tmp_path / name) for name in names]
    figure = draw("loss", *map(str, folders))
    assert {text.get_text().strip() for text in figure.axes[0].get_legend().get_texts()} >= set(names)
    assert command.main(["loss", *map(str, folders), "--output", str(tmp_path / "z$.{$" / "loss.svg")]) == 0
    assert command.main(["loss", str(folders[0]), "--output=s3://bucket/loss"]) == 2
    assert "p$q_{$" in (tmp_path / "z$.{$" / "loss.svg").read_text()
