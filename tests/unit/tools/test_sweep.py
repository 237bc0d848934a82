"""Sweeps without training: which runs there are, what depends on what, and the arithmetic of the tables."""

from __future__ import annotations

import gzip
import json
import math
import re
import resource
import shlex
import shutil
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from titan_prores.config import sources
from titan_prores.config.errors import ConfigError, ConfigErrors, duration
from titan_prores.output.tables import replace_between
from titan_prores.tools.plots import command as plots
from titan_prores.tools.plots import packed
from titan_prores.tools.sweep import command, plan, results, runner, statistics
from titan_prores.tools.sweep.plan import Sweep
from titan_prores.tools.sweep.results import Result
from titan_prores.tools.sweep.runner import Book
from titan_prores.tools.sweep.statistics import Spread

ROOT = Path(__file__).parents[3]
DEBUG = ROOT / "train_configs" / "debug.toml"
FILE = """
recipe = "RECIPE"
folder = "FOLDER"
seeds = [0, 1, 2]
pair = { axis = "prores", baseline = "off", treatment = "on" }
[axes]
norm.pre = { model.norm = "pre" }
norm.post = { model.norm = "post", lr_scheduler.warmup_steps = 3 }
lr = { key = "optimizer.lr", values = [5e-4, 1e-3] }
prores.off = { transforms.prores.enabled = false }
prores.on = { transforms.prores.enabled = true }
"""
STAGES = """
[[grids]]
name = "lr"
axes = { norm = "all", lr = "all", prores = ["off"], seed = [0] }
[[grids]]
name = "pairs"
axes = { norm = "all", lr = { best_of = "lr", per = ["norm"] }, seed = [0, 1], prores = "all" }
"""


NO_LR = FILE.replace('lr = { key = "optimizer.lr", values = [5e-4, 1e-3] }\n', "")


@pytest.fixture
def read(tmp_path: Path):
    def read(text: str = "", head: str = FILE) -> Sweep:
        file = tmp_path / "sweep.toml"
        file.write_text(head.replace("RECIPE", str(DEBUG)).replace("FOLDER", str(tmp_path / "runs")) + text)
        return plan.load(file)

    return read


def names(sweep: Sweep, metrics: Mapping[str, float] | None = None) -> list[str]:
    return [run.name for run in sweep.runs(lambda run: (metrics or {}).get(run.name))]


# --- Which runs -------------------------------------------------------------------------------------------------------


def test_without_grids_all_of_them_with_pairs_together(read) -> None:
    found = names(read())
    assert len(found) == len(set(found)) == 2 * 2 * 3 * 2
    assert found[:3] == [
        "norm=pre,lr=0.0005,prores=off,seed=0",
        "norm=pre,lr=0.0005,prores=on,seed=0",
        "norm=pre,lr=0.0005,prores=off,seed=1",
    ]


def test_a_run_s_overrides_make_its_recipe(read, tmp_path: Path) -> None:
    sweep = read("[settings]\ntraining.steps = 7\n")
    run = next(run for run in sweep.planned if run.name == "norm=post,lr=0.001,prores=on,seed=2")
    assert sweep.overrides(run) == [
        "--training.steps=7",
        "--model.norm=post",
        "--lr_scheduler.warmup_steps=3",
        "--optimizer.lr=0.001",
        "--transforms.prores.enabled=true",
        "--training.seed=2",
        f"--job.dump_folder={tmp_path / 'runs' / run.name}",
    ]
    recipe = Book(sweep).recipe(run)
    assert (recipe.training.seed, recipe.training.steps, recipe.slots["model"].config.norm) == (2, 7, "post")
    assert recipe.job.dump_folder == str(tmp_path / "runs" / run.name)


@pytest.mark.parametrize("value", [True, 3, 1e-5, "pre", "a b", "true", "1", ["x", 2], {"name": "linear", "T": 2.0}])
def test_values_survive_the_command_line(value: Any) -> None:
    [line] = shlex.split(shlex.join([f"--model.x={plan._argument(value)}"]))
    assert sources.parse_override(line).values == {"model": {"x": value}}


def test_excluded_runs_are_left_out(read) -> None:
    found = names(read('[[exclude]]\nnorm = "post"\nlr = [5e-4, 1e-3]\n[[exclude]]\nprores = "on"\nseed = 2\n'))
    assert len(found) == 2 * (2 * 3 - 1) and not [name for name in found if "norm=post" in name]
    assert not [name for name in found if name.endswith("prores=on,seed=2")]


def test_the_best_is_chosen_on_the_baseline_and_a_run_of_two_grids_is_one(read) -> None:
    sweep = read(STAGES)
    first = [f"norm={norm},lr={lr},prores=off,seed=0" for norm in ("pre", "post") for lr in ("0.0005", "0.001")]
    assert names(sweep)[:4] == first
    # Without the baselines of seed 0, of which each will be one of the first.
    assert len(names(sweep)) == 4 + 6 and all("lr=best of lr" in name for name in names(sweep)[4:])

    # Pre-LN is known, Post-LN not yet; ProRes takes the value over although it might like the other one better.
    metrics = dict(zip(first, [2.0, 1.5, 3.0], strict=False))
    found = names(sweep, metrics)
    pre = [f"norm=pre,lr=0.001,prores={p},seed={s}" for s in (0, 1) for p in ("off", "on")]
    assert found[:4] == first and found[4:7] == pre[1:]
    assert all("norm=post,lr=best of lr" in name for name in found[7:]) and len(found) == 10

    # One that diverged is no candidate; with none left nothing can be chosen.
    assert "norm=post,lr=0.0005,prores=on,seed=0" in names(sweep, {**metrics, first[3]: math.inf})
    bad = {**metrics, first[2]: math.inf, first[3]: math.inf}
    assert [name for name in names(sweep, bad) if "norm=post,lr=best of lr" in name]


def test_the_best_is_the_lowest_mean_over_seeds(read) -> None:
    sweep = read(STAGES.replace("seed = [0] }", "seed = [0, 1] }"))
    value = {"0.0005": {"0": 1.0, "1": 3.0}, "0.001": {"0": 1.8, "1": 1.9}}
    [run] = [run for run in sweep.planned if run.waits and run.values["norm"] == "pre"][:1]
    metric = lambda run: value[run.values["lr"]][run.values["seed"]]  # noqa: E731
    assert sweep._best(run, "lr", run.values["lr"], metric) == "0.001"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ('metrik = "loss"', "metrik = 'loss': unknown key; did you mean metric?"),
        ('results = "results"', "results = 'results': must end in .jsonl.gz"),
        ("seeds = []", "seeds = []: must have at least 1 entry"),
        ('[axes."../x"]\na = { model.dim = 32 }', "axes.\"../x\" = '../x': an axis cannot have this name"),
        ('[[grids]]\nname = "a"\naxes = { nrm = ["pre"] }', "'nrm': unknown axis of this sweep"),
        (
            '[[grids]]\nname = "a"\naxes = { norm = ["prr"] }',
            "not a value of the axis norm (allowed: pre, post); did you",
        ),
        ('[[grids]]\nname = "a"\naxes = { seed = ["x"] }', "not a valid seed"),
        ('[[grids]]\nname = "a"\naxes = { norm = "pre" }', "must be a list of values"),
        ('[[grids]]\nname = "a"\naxes = { lr = { best_of = "b" } }', "there is no earlier grid of this name"),
        ('[[grids]]\nname = "a"\naxes = { norm = ["pre"] }', "lacks the axis of the pair, prores (allowed: off, on)"),
        ("[settings]\ntraining.seed = 5", "settings.training.seed: every run has its own (allowed: seeds = [0, 1, 2])"),
        ("[axes.x]\nkey = 'training.seed'\nvalues = [1, 2]", "axes.x: sets training.seed, of which every run has its"),
        ("[axes.x]\na = { optimizer.lr = 1.0 }", "axes.x: sets optimizer.lr, and so does the axis lr"),
        ("[axes.x]\nkey = 'model.dim'\nvalues = [32, 32]", "axes.x.values = ['32']: are there twice"),
        ('[axes.x]\na = { recipe = "./no.toml" }', "axes.x.a.recipe = './no.toml': no such file (allowed: the path of"),
        ("[axes.x]\na = { recipe = 3 }", "axes.x.a.recipe = 3: no such file"),
        (f"[axes.x]\n{'x' * 200} = {{ model.dim = 32 }}", "longer than 200 characters"),
        (STAGES.replace('per = ["norm"]', 'per = ["prores", "seed"]'), "per names an axis that the two grids do not"),
        (STAGES + STAGES, "two grids have this name"),
        ('[[exclude]]\nnorm = ["pre", "post"]', "leaves no run"),
        ('[[beside]]\ncolumn = "x"\naxis = "norm"\ncells = { pree = "1" }', "not a value of the axis norm"),
    ],
)
def test_faults_of_a_file_name_key_and_value(read, change: str, message: str) -> None:
    head = FILE.replace("seeds = [0, 1, 2]\n", "") if change.startswith("seeds") else FILE
    before, after = (change + "\n", "") if not change.lstrip().startswith("[") else ("", change)
    with pytest.raises(ConfigErrors) as caught:
        read(after, before + head)
    assert message in str(caught.value)


def test_a_sweep_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    arguments = [
        "--config",
        str(DEBUG),
        "--folder",
        str(tmp_path),
        "--axis",
        "optimizer.lr=1e-3,2e-3",
        "--axis",
        "model.norm=pre,post",
        "--seeds",
        "0,3",
        "--pair",
        "model.norm",
        "--training.steps=5",
        "--dry-run",
    ]
    assert command.main(arguments) == 0
    out = capsys.readouterr().out
    assert "# 0 have ended, 8 are left" in out and out.count("--training.steps=5 ") == 8
    assert (
        "# lr=0.001,norm=pre,seed=0\n" in out and f"--job.dump_folder={tmp_path}/optimizer.lr=0.001,model.norm=" in out
    )

    assert command.main([*arguments, "--pair", "model.nrm"]) == 2
    assert command.main([*arguments, "--axis", "model.norm=pre,prr"]) == 2
    assert "--axis = 'model.norm': is there twice" in capsys.readouterr().err
    assert command.main([each.replace("pre,post", "pre,prr") for each in arguments]) == 2
    assert "did you mean pre?" in capsys.readouterr().err
    assert command.main([*arguments, "--only", "norm=post,seed=3", "--only", "lr=0.002,model.norm=post"]) == 0
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if line.startswith("#")] == [
        "# lr=0.001,norm=post,seed=3",
        "# lr=0.002,norm=post,seed=0",
        "# lr=0.002,norm=post,seed=3",
        "# 0 have ended, 3 are left",
    ]
    for wrong, message in (
        ("nrm=post", "--only = 'nrm': unknown axis"),
        ("norm=pst", "--only = 'pst': not a value of the axis norm (allowed: pre, post); did you mean post?"),
        ("norm=post,seed=1", "--only = 'norm=post,seed=1': no run has all of these values"),
    ):
        assert command.main([*arguments, "--only", wrong]) == 2
        assert message in capsys.readouterr().err
    assert command.main([*arguments[:-1], "--collect", "--only", "norm=post"]) == 2
    assert "--only: not valid with --collect" in capsys.readouterr().err
    assert command.main([str(tmp_path / "none.toml"), "--list"]) == 2
    assert command.main(["--dry-run"]) == 2
    assert capsys.readouterr().err.count("error: ") == 2
    with pytest.raises(SystemExit) as caught:
        command.main([*arguments, "--jbos=3"])
    assert caught.value.code == 2


def test_columns_have_the_shortest_names_that_tell_axes_apart(tmp_path: Path) -> None:
    def titles(*axes: str) -> list[str]:
        found = plan.from_arguments(str(DEBUG), "runs", [f"{axis}=1,2" for axis in axes], [0], None, None, [])
        return list(found.titles.values())

    assert titles("optimizer.lr", "model.n_layers") == ["lr", "n_layers"]
    assert titles("optimizer.lr") == ["lr"] and titles("dataset.seed") == ["dataset.seed"], "seed is a column already"
    assert titles("transforms.prores.enabled", "model.name") == ["prores.enabled", "model.name"]
    assert titles("metrics.a.every_steps", "metrics.b.every_steps", "optimizer.lr") == [
        "a.every_steps",
        "b.every_steps",
        "lr",
    ]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0, "0.0 seconds"), (2.3, "2.3 seconds"), (42.4, "42 seconds"), (90, "1.5 minutes"), (36_000, "10.0 hours")],
)
def test_a_duration_is_shown_in_the_unit_that_fits_it(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_collect_and_list_of_a_sweep_without_a_file(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Short columns, a length in seconds, and where the tables are; a long table is left to its file."""
    arguments = [
        "--config",
        str(DEBUG),
        "--folder",
        str(tmp_path),
        "--axis",
        "optimizer.lr=1e-3,2e-3",
        "--seeds",
        "0,1",
        "--axis",
        "model.norm=pre,post",
        "--pair",
        "model.norm",
        "--training.steps=20",
    ]
    for lr in ("0.001", "0.002"):
        for seed in (0, 1):
            for norm in ("pre", "post"):
                fake_run(tmp_path / f"optimizer.lr={lr},model.norm={norm},seed={seed}")
    assert command.main([*arguments, "--collect"]) == 0
    out = capsys.readouterr().out
    assert "| lr | seeds | norm pre | norm post | difference |" in out and "Differences are norm post minus pre" in out
    seconds = sum(line["seconds"] for line in packed.read(tmp_path / "results.jsonl.gz").values())
    assert 0 < seconds < 3600 and f"8 of 8 runs have ended: 8 finished; {duration(seconds)} in training steps." in out
    assert out.endswith(f"tables: {tmp_path}/table.md, table.csv, runs.csv\n")
    table = (tmp_path / "table.md").read_text()
    assert table in out
    runs = (tmp_path / "runs.csv").read_text().splitlines()
    assert runs[0].startswith("lr,norm,seed,state,") and runs[1].startswith("0.001,pre,0,finished,")
    assert (tmp_path / "table.csv").read_text().startswith("lr,baseline_n,")

    assert command.main([*arguments, "--list"]) == 0
    listed = capsys.readouterr().out
    assert "lr=0.002,norm=post,seed=1 " in listed and "optimizer" not in listed
    for name in ("lr=0.001,norm=pre,seed=0", "optimizer.lr=0.001,model.norm=pre,seed=0"):  # both ended
        assert command.main([*arguments, "--only", name]) == 0
        assert "with --collect makes the tables" in capsys.readouterr().out
    assert command.main([*arguments, "--only", "lr=0.001,norm=pree,seed=0"]) == 2
    assert "did you mean pre?" in capsys.readouterr().err
    assert "in steps" in listed and listed.count("seconds") == 8 and f"tables: {tmp_path}/table.md" in listed

    assert command.main([*arguments]) == 0, "with nothing left to run it ends with its table, too"
    assert capsys.readouterr().out == out
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(command, "LONGEST_TABLE", 3)
        assert command.main([*arguments, "--collect"]) == 0
    short = capsys.readouterr().out
    assert short.splitlines() == [table.splitlines()[0], "", out.splitlines()[-1]]


def test_the_slurm_script_has_what_can_start_now(read, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    read(STAGES)
    assert command.main([str(tmp_path / "sweep.toml"), "--slurm"]) == 0
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-3\n" in script and script.count("norm=") == 4
    assert "# 6 more runs wait for the results of these" in script
    assert "#SBATCH --gpus-per-node=1\n" in script
    task = f'exec srun python -m titan_prores sweep {tmp_path}/sweep.toml --only "${{names[$SLURM_ARRAY_TASK_ID]}}"\n'
    assert script.endswith(task)

    assert (
        command.main(
            [str(tmp_path / "sweep.toml"), "--only", "norm=post,lr=0.001", "--slurm", "--only=norm=post,lr=0.001"]
        )
        == 0
    )
    script = capsys.readouterr().out
    assert "#SBATCH --array=0-0\n" in script and script.count("norm=") == 1, "what a task runs is its own run alone"
    assert script.endswith(task)


def test_the_name_of_a_run_means_that_run_alone(read) -> None:
    """Although all of its values are those of another run too, which has one more."""
    grids = [
        f'[[grids]]\nname = "{name}"\naxes = {{ norm = ["pre"], {lr}prores = ["on"] }}\n'
        for name, lr in (("a", ""), ("b", "lr = [1e-3], "))
    ]
    sweep = read("".join(grids))
    runs = sweep.runs(lambda run: None)

    def chosen(*names: str) -> list[str]:
        meant = sweep.selection(runs, names)
        return [run.name for run in runs if meant(run)]

    assert chosen("norm=pre,prores=on,seed=1") == ["norm=pre,prores=on,seed=1"]
    assert chosen("prores=on,norm=pre,seed=1") == ["norm=pre,prores=on,seed=1", "norm=pre,lr=0.001,prores=on,seed=1"]
    assert chosen() == names(sweep)


def test_a_run_that_waits_stays_selected_once_its_value_is_known(read) -> None:
    sweep = read(STAGES)
    meant = sweep.selection(sweep.runs(lambda run: None), ["norm=pre"])
    values = {"norm=pre,lr=0.0005,prores=off,seed=0": 2.0, "norm=pre,lr=0.001,prores=off,seed=0": 1.0}
    decided = [run.name for run in sweep.runs(lambda run: values.get(run.name)) if meant(run)]
    assert "norm=pre,lr=0.001,prores=on,seed=1" in decided and not [name for name in decided if "post" in name]


def test_a_value_of_an_axis_may_name_the_recipe(read, tmp_path: Path) -> None:
    (tmp_path / "wide.toml").write_text(f'base = ["{DEBUG}"]\n[model]\nflavor = "14M"\n')
    sweep = read(
        '[axes.size]\nsmall = { optimizer.lr = 2e-3 }\nwide = { recipe = "./wide.toml", optimizer.lr = 1e-3 }\n', NO_LR
    )
    small, wide = (next(run for run in sweep.planned if f"size={size}" in run.name) for size in ("small", "wide"))
    assert (sweep.recipe_of(small), sweep.recipe_of(wide)) == (DEBUG, tmp_path / "wide.toml")
    assert not [each for each in sweep.overrides(wide) if "recipe" in each]
    book = Book(sweep)
    assert [book.recipe(run).slots["model"].config.dim for run in (small, wide)] == [64, 256]
    assert runner.command(sweep, wide)[3:5] == ["--config", str(tmp_path / "wide.toml")]


# --- What became of them ----------------------------------------------------------------------------------------------


def fake_run(folder: Path, steps: int = 20, *, state: str = "finished", loss: float = 2.0, **status: Any) -> None:
    """A run folder as a run of the debug recipe leaves it."""
    folder.mkdir(parents=True)
    at = status.pop("step", steps)
    (folder / "status.json").write_text(json.dumps({"state": state, "step": at, **status}))
    (folder / "recipe.toml").write_text(f"[training]\nsteps = {steps}\n")
    rows = [{"step": k, "loss": 5.0 - k / 10, "tokens": 1024 * k, "step_seconds": 0.5} for k in range(1, at + 1)]
    rows.append(
        {"step": at, "validation": True, "validation_loss": loss, "validation_perplexity": math.exp(min(loss, 99.0))}
    )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 21, "lo')


def test_a_slurm_array_of_runs_on_cpus_asks_for_no_gpus(read, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    read('[settings]\njob.device = "cpu"\n')
    assert command.main([str(tmp_path / "sweep.toml"), "--slurm"]) == 0
    assert "gpus" not in capsys.readouterr().out


def test_a_run_may_end_with_a_batch_that_was_passed_over(read) -> None:
    sweep = read()
    folder = sweep.folder / sweep.planned[0].name
    fake_run(folder)
    with (folder / "metrics.jsonl").open("a") as rows:
        rows.write('\n{"step": 20, "skipped": true, "tokens": 20480}\n')
    assert Book(sweep).result(sweep.planned[0]).final["loss"] == 3.0


def test_a_full_disk_leaves_the_report_as_it_was(read, tmp_path: Path) -> None:
    report = tmp_path / "README.md"
    report.write_text(text := "Words.\n<!-- sweep:begin -->\n<!-- sweep:end -->\nMore words.\n")
    sweep = read(head=FILE.replace("seeds =", 'report = "./README.md"\nseeds ='))
    command.write_tables(Book(sweep))
    assert (
        (written := report.read_text()).startswith("Words.") and written.endswith("More words.\n") and written != text
    )
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
        with pytest.raises(OSError, match="too large"):
            command.write_tables(Book(sweep))
        with pytest.raises(OSError, match="too large"):
            replace_between(report, "sweep", "other\n")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert report.read_text() == written and not list(tmp_path.rglob("*.tmp"))


def test_a_recipe_is_no_sweep(capsys) -> None:
    assert command.main(["train_configs/debug.toml", "--list"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "'train_configs/debug.toml': is a recipe, not a sweep" in line and "scripts/train.py --config" in line


def test_what_only_building_shows_is_refused_before_the_first_run(read, tmp_path: Path, capsys) -> None:
    read("[settings]\nlr_scheduler.warmup_steps = 99\n")
    assert command.main([str(tmp_path / "sweep.toml")]) == 2
    assert "longer than the run" in capsys.readouterr().err and not list(tmp_path.rglob("console.log"))


def test_a_finished_run_is_read_and_kept(read, tmp_path: Path) -> None:
    sweep = read()
    run = sweep.planned[0]
    fake_run(sweep.folder / run.name, loss=2.25)
    book = Book(sweep)
    found = book.result(run)
    assert (found.state, found.step, found.seconds) == ("finished", 20, 10.0)
    assert found.final == {"loss": 3.0, "tokens": 20480, "validation_loss": 2.25, "validation_perplexity": 9.487736}
    assert book.metric(run) == 2.25
    book.pack()
    assert sweep.results.stat().st_size < 3000
    [line] = packed.read(sweep.results).values()
    assert line["series"] == {
        "loss": [[*range(1, 21)], [round(5 - k / 10, 1) for k in range(1, 21)]],
        "validation_loss": [[20], [2.25]],
    }

    # From that file alone: the run folder is gone.
    (sweep.folder / run.name).rename(tmp_path / "elsewhere")
    again = Book(sweep)
    assert again.result(run) == found
    before = sweep.results.stat().st_mtime_ns
    again.pack()
    assert sweep.results.stat().st_mtime_ns == before, "nothing new, nothing written"


def test_a_sweep_goes_on_from_its_file_of_results_and_from_its_run_folders(read, tmp_path: Path) -> None:
    sweep = read()
    first, second, third = sweep.planned[:3]
    fake_run(sweep.folder / first.name, loss=2.0)
    fake_run(sweep.folder / second.name, state="failed", step=9, error="no space left", error_type="OSError")
    Book(sweep).pack()
    assert packed.read(sweep.results).keys() == {first.name, second.name}
    # Somewhere else, as in a fresh checkout, with a run that has ended there and one that has not.
    shutil.copy(sweep.results, tmp_path / "shared.jsonl.gz")
    there = read(head=f'results = "{tmp_path}/shared.jsonl.gz"\n' + FILE.replace("FOLDER", str(tmp_path / "there")))
    fake_run(there.folder / first.name, state="stopped", step=5, loss=9.0)
    fake_run(there.folder / third.name, loss=3.0)
    book = Book(there)
    assert [book.result(run).state for run in (first, second, third)] == ["finished", "failed", "finished"]
    assert [book.metric(run) for run in (first, second, third)] == [2.0, math.inf, 3.0]
    assert Book(there, retry_failed=True).result(second).state == "unfinished"
    book.pack()
    lines = packed.read(there.results)
    assert list(lines) == [first.name, second.name, third.name], "in the order of the runs"
    assert lines[first.name] == packed.read(sweep.results)[first.name]

    # What ends here replaces what the file has, and what this sweep no longer has stays in the file.
    fake_run(there.folder / second.name, loss=1.0)
    head = f'results = "{there.results}"\n' + FILE.replace("FOLDER", str(there.folder))
    fewer = read('[[exclude]]\nseed = 0\nprores = "off"\n', head)
    assert first.name not in names(fewer)
    (again := Book(fewer)).pack()
    assert again.metric(second) == 1.0 and packed.read(fewer.results)[second.name]["state"] == "finished"
    assert packed.read(fewer.results)[first.name] == lines[first.name]


def test_what_the_sweep_leaves_in_a_run_folder(read) -> None:
    sweep = read()
    run = sweep.planned[0]
    book = Book(sweep)
    book.begin(run)
    assert book.result(run).state == "new", "a run that was begun has not ended, whatever became of it"
    with pytest.raises(ConfigError, match=r"result.json': has norm=pre.* with other settings: model\.dim: 64 -> 32"):
        Book(read("[settings]\nmodel.dim = 32\n")).result(run)
    failed = Result(run.name, dict(run.values), "failed", error="killed", recipe=results.relevant(book.recipe(run)))
    book.keep(run, failed)
    assert Book(sweep).result(run) == failed, "although the run itself has said nothing"


@pytest.mark.parametrize(
    ("left", "state", "error"),
    [
        ({"state": "running", "step": 10}, "unfinished", ""),
        ({"state": "stopped", "step": 10}, "unfinished", ""),
        (
            {"state": "failed", "step": 9, "error": "step 9: loss nan", "error_type": "NonFiniteError"},
            "diverged",
            "nan",
        ),
        ({"state": "failed", "step": 9, "error": "no space left", "error_type": "OSError"}, "failed", "no space"),
        ({"loss": math.inf}, "diverged", "ended at inf"),
        ({"loss": 4.5}, "diverged", "validation_loss ended at 4.5"),
    ],
)
def test_bad_runs_are_told_apart(read, left: dict[str, Any], state: str, error: str) -> None:
    sweep = read("", "diverged_above = 4.0\n" + FILE)
    run = sweep.planned[0]
    fake_run(sweep.folder / run.name, **left)
    found = Book(sweep).result(run)
    assert found.state == state and error in found.error
    assert Book(sweep).metric(run) == (None if state == "unfinished" else math.inf)
    retried = Book(sweep, retry_failed=True).result(run).state
    assert retried == ("unfinished" if state == "failed" else state)


def test_a_run_without_its_last_validation_does_not_count_as_finished(read) -> None:
    sweep = read()
    run = sweep.planned[0]
    fake_run(sweep.folder / run.name)
    file = sweep.folder / run.name / "metrics.jsonl"
    file.write_text(file.read_text().replace('{"step": 20, "validation"', '{"step": 10, "validation"'))
    found = Book(sweep).result(run)
    assert found.state == "failed" and "no validation_loss of its last step" in found.error


def test_kept_results_are_judged_as_the_sweep_asks_now(read, tmp_path: Path) -> None:
    sweep = read()
    run = sweep.planned[0]
    fake_run(sweep.folder / run.name, loss=2.25)
    Book(sweep).pack()
    series = lambda: packed.read(sweep.results)[run.name]["series"]  # noqa: E731

    strict = Book(read("", "diverged_above = 2.0\n" + FILE)).result(run)
    assert strict.state == "diverged" and "ended at 2.25" in strict.error
    assert Book(read("", "diverged_above = 3.0\n" + FILE)).result(run).state == "finished"

    assert "tokens" not in series()
    Book(read("", 'keep = ["loss", "tokens"]\n' + FILE)).pack()
    assert series().keys() == {"loss", "tokens"}
    assert [values[:2] for values in series()["tokens"]] == [[1, 2], [1024, 2048]]

    other = 'metric = "validation_perplexity"\n' + FILE
    assert Book(read("", other)).metric(run) == pytest.approx(math.exp(2.25))
    other = 'metric = "tokens_per_second"\n' + FILE
    with pytest.raises(ConfigError, match=r"metric = 'tokens_per_second': is neither in the result of norm=pre"):
        Book(read("", other)).metric(run)


def test_damaged_files_of_a_sweep_are_named(read) -> None:
    sweep = read()
    run = sweep.planned[0]
    folder = sweep.folder / run.name
    folder.mkdir(parents=True)
    (folder / "result.json").write_text('{"recipe": {')
    with pytest.raises(ConfigError, match="is damaged") as caught:
        Book(sweep).result(run)
    assert str(caught.value).startswith(f"'{folder / 'result.json'}': is damaged")
    (folder / "result.json").write_text('{"name": "x", "values": {}, "final": null}')
    with pytest.raises(ConfigError, match="is not the result of a run"):
        Book(sweep).result(run)
    whole = gzip.compress(b'{"name": "x", "recipe": {}, "series": {}}\n')
    for damaged, problem in (
        (b"{}", "Not a gzipped file"),
        (whole[:-3], "end-of-stream"),
        (whole[:12] + b"??" + whole[14:], "is damaged"),
        (gzip.compress(b'{"name"'), "is damaged"),
        (gzip.compress(b'{"name": "x"}\n'), "line 1 lacks one of name, recipe, series"),
        (gzip.compress(b"[1]\n"), "line 1 lacks"),
    ):
        sweep.results.write_bytes(damaged)
        with pytest.raises(ConfigError, match=problem):
            Book(sweep)


def test_numbers_keep_the_digits_that_tell_them_apart() -> None:
    assert [plan.label(value) for value in (5e-4, 1e-5, 1.0, 0.12345671, 0.12345674)] == [
        "0.0005",
        "1e-05",
        "1",
        "0.12345671",
        "0.12345674",
    ]


def test_results_of_other_settings_are_refused(read, tmp_path: Path) -> None:
    sweep = read()
    run = sweep.planned[0]
    fake_run(sweep.folder / run.name)
    Book(sweep).pack()
    for free in ("metrics.log_freq = 7", "checkpoint.interval = 3"):
        assert Book(read(f"[settings]\n{free}\n")).result(run).state == "finished"
    with pytest.raises(ConfigError, match=r"other settings: model\.dim: 64 -> 32"):
        Book(read("[settings]\nmodel.dim = 32\n")).result(run)
    # Keys that the resolved recipe lacks while they are not set, and a part that was not there.
    for changes, message in (
        ("model.n_kv_heads = 1", r"model\.n_kv_heads: not set -> 1"),
        ("training.stop_after = 3", r"training\.stop_after: not set -> 3"),
        ("transforms.activation_checkpoint = {}", r"transforms\.activation_checkpoint: off -> on"),
    ):
        with pytest.raises(ConfigError, match=f"other settings: {message}"):
            Book(read(f"[settings]\n{changes}\n")).result(run)


def test_settings_of_a_schedule_tell_results_apart(read) -> None:
    text = "[settings]\ntransforms.prores.residual_schedule = {{ name = 'linear', {} }}\n"
    sweep = read(text.format("T = 1000"))
    without, with_prores = (
        next(run for run in sweep.planned if run.values["prores"] == side) for side in ("off", "on")
    )
    for run in (without, with_prores):
        fake_run(sweep.folder / run.name)
    Book(sweep).pack()
    later = Book(read(text.format("total = 3000")))
    assert later.result(without).state == "finished", "of what is off nothing counts"
    with pytest.raises(ConfigError, match=r"residual_schedule\.T: 1000.* -> not set"):
        later.result(with_prores)


def test_figures_are_drawn_from_the_results_once_all_of_their_runs_have_ended(
    read, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    pytest.importorskip("matplotlib")
    plots = """
[[plots]]
name = "norms"
draw = "loss"
options = ["--ema=0.5"]
lines = [
    { label = "pre", axes = { norm = ["pre"], lr = { best_of = "lr", per = ["norm"] }, prores = ["off"] } },
    { label = "post", axes = { norm = ["post"], lr = { best_of = "lr", per = ["norm"] }, prores = ["off"] } },
]
[[plots]]
name = "schedules"
draw = "alpha"
options = ["--schedule=linear", "--layers=3"]
"""
    sweep = read(STAGES + plots)
    for run in sweep.runs_of("lr"):
        fake_run(sweep.folder / run.name, loss=2.0 + float(run.values["lr"]))
    command.finish(book := Book(sweep))
    out = capsys.readouterr().out
    drawn = sweep.figures
    assert "figure norms: waits for" in out and [path.name for path in drawn.iterdir()] == ["schedules.png"]
    for lines in sweep.runs_of_plot("norms", book.metric).values():
        assert [(run.values["lr"], run.values["seed"]) for run in lines] == [("0.0005", "0"), ("0.0005", "1")]
        fake_run(sweep.folder / lines[1].name)
    command.finish(Book(sweep))
    assert "waits" not in capsys.readouterr().out and (drawn / "norms.png").stat().st_size > 1000


@pytest.mark.parametrize(
    ("plot", "problem"),
    [
        ('name = "a/b"\ndraw = "alpha"', "a figure cannot have this name"),
        ('name = "a"\ndraw = "alpa"', "titan-prores plot does not take this"),
        ('name = "a"\ndraw = "loss"\nlines = [{ label = "x=1", axes = { norm = ["pre"] } }]', "cannot have a ="),
        ('name = "a"\ndraw = "loss"\nlines = [{ label = "x", axes = { norm = ["prr"] } }]', "did you mean pre?"),
        (
            'name = "a"\ndraw = "loss"\nlines = [{ label = "x", axes = { norm = ["pre"], seed = [7] } }]',
            "plots.a = ['x']: no run of this sweep is in a line",
        ),
    ],
)
def test_figures_that_cannot_be_are_refused_before_any_run(
    tmp_path: Path, plot: str, problem: str, capsys: pytest.CaptureFixture
) -> None:
    (tmp_path / "sweep.toml").write_text(FILE.replace("RECIPE", str(DEBUG)) + f"[[plots]]\n{plot}\n")
    assert command.main([str(tmp_path / "sweep.toml"), "--dry-run"]) == 2
    assert problem in capsys.readouterr().err


# --- What they show ---------------------------------------------------------------------------------------------------


def test_spread_by_hand() -> None:
    assert Spread.of([1.0, 2.0, 4.0]) == Spread(3, 7 / 3, math.sqrt(7 / 3))
    assert Spread.of([1.5]) == Spread(1, 1.5, None) and Spread.of([]) == Spread(0, None, None)
    assert Spread(2, -0.01234, 0.1).show(sign="+") == "-0.0123 ± 0.1000"
    # t of 2 degrees of freedom is 4.3027.
    assert Spread(3, 1.0, 0.3).interval == pytest.approx((1 - 4.3027 * 0.3 / math.sqrt(3), 1 + 0.74526), abs=1e-4)
    assert Spread.of([1.5]).interval is None


def test_quantiles_of_student_s_t() -> None:
    """The tabulated ones, and the expansion against published values."""
    assert statistics.t_quantile(2) == pytest.approx(0.95 * math.sqrt(2 / (1 - 0.95**2)), abs=1e-4)  # in closed form
    for freedom, published in ((11, 2.20099), (20, 2.08596), (60, 2.00030)):
        assert statistics.t_quantile(freedom) == pytest.approx(published, abs=3e-3)


def ended(sweep: Sweep, values: Mapping[str, float | None]) -> list[Result]:
    """Results by the name of the run: a loss, or None for one that diverged."""
    found = []
    for run in sweep.planned:
        if run.name in values:
            loss = values[run.name]
            state = {"state": "diverged", "error": "nan"} if loss is None else {"state": "finished"}
            final = {} if loss is None else {"validation_loss": loss}
            found.append(Result(run.name, dict(run.values), step=20, steps=20, final=final, **state))
        else:
            found.append(Result(run.name, dict(run.values)))
    return found


def test_pairs_are_of_the_same_seed(read) -> None:
    sweep = read('[[beside]]\ncolumn = "paper"\naxis = "norm"\nwhere = { lr = "0.001" }\ncells = { pre = "1 -> 2" }\n')
    pre, post = "norm=pre,lr=0.001,prores={},seed={}", "norm=post,lr=0.001,prores={},seed={}"
    found = ended(
        sweep,
        {
            pre.format("off", 0): 2.0,
            pre.format("on", 0): 1.9,
            pre.format("off", 1): 3.0,
            pre.format("on", 1): 3.3,
            pre.format("off", 2): 9.0,  # without its counterpart
            post.format("off", 0): 2.0,
            post.format("on", 0): None,
            post.format("off", 1): 2.0,
            post.format("on", 1): 1.0,
            "norm=pre,lr=0.0005,prores=off,seed=0": 2.5,
        },
    )
    cells = {cell.values["norm"] + cell.values["lr"]: cell for cell in statistics.cells(found, sweep.pair)}
    assert cells["pre0.001"].differences("validation_loss") == pytest.approx({"0": -0.1, "1": 0.3})
    assert cells["post0.001"].differences("validation_loss") == {"1": -1.0}

    text = statistics.report(sweep, found)
    rows = {line.split(" | ")[0] + line.split(" | ")[1]: line for line in text.splitlines() if line.startswith("| p")}
    # (2 + 3 + 9) / 3; the pairs' mean is 0.1 and their deviation 0.4 / sqrt(2).
    assert rows["| pre0.001"] == (
        "| pre | 0.001 | 3 + 2 | 4.6667 ± 3.7859 | 2.6000 ± 0.9899 | +0.1000 ± 0.2828 | "
        "[-2.4412, +2.6412] | +10.52 % | 1 of 2 |  | 1 -> 2 |"
    )
    assert "diverged: prores on, seed 0" in rows["| post0.001"] and "1 of 1" in rows["| post0.001"]
    assert text.index("Runs without a counterpart") < text.index(rows["| pre0.0005"])
    assert text.startswith("10 of 24 runs have ended: 9 finished, 1 diverged;")

    lines = statistics.table_csv(sweep, found).splitlines()
    assert lines[0].startswith("norm,lr,baseline_n,baseline_mean,baseline_sd,baseline_not_finished,treatment_n")
    post_line = next(line for line in lines if line.startswith("post,"))
    assert post_line == "post,0.001,2,2.0,0.0,0,1,1.0,,1,1,-1.0,,,,1"
    assert len(statistics.runs_csv(sweep, found).splitlines()) == 1 + 10


def test_runs_on_neither_side_of_the_pair_have_a_table_of_their_own(read) -> None:
    sweep = read(head=FILE + 'prores.equal = { transforms.prores.residual_schedule.name = "equal" }\n')
    name = "norm=pre,lr=0.001,prores={},seed=0"
    text = statistics.report(sweep, ended(sweep, {name.format("equal"): 2.0}))
    assert "0 + 0" not in text and "without a counterpart" not in text
    text = statistics.report(sweep, ended(sweep, {name.format("off"): 3.0, name.format("equal"): 2.0}))
    table = text.split("Runs with another prores:\n")[1]
    assert "| norm | lr | prores | seeds | validation_loss |" in table
    assert "| pre | 0.001 | equal | 1 | 2.0000 |" in table and "3.0000" not in table


def test_without_a_pair_each_cell_has_its_range(read) -> None:
    sweep = read(head=FILE.replace("pair = ", "#"))
    name = "norm=pre,lr=0.001,prores=off,seed={}"
    text = statistics.report(sweep, ended(sweep, {name.format(0): 2.0, name.format(1): 3.0}))
    assert "| pre | 0.001 | off | 2 | 2.5000 ± 0.7071 | 2.0000 | 3.0000 |" in text


REPRODUCTION = ROOT / "train_configs" / "repro_cpu" / "sweep.toml"
PAGE = ROOT / "docs" / "reproduction.md"


@pytest.fixture
def reproduction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The sweep and its page without tables, with the results but no run folder beside them."""
    shutil.copytree(REPRODUCTION.parent, tmp_path / "train_configs" / "repro_cpu")
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "docs" / "reproduction.jsonl.gz", tmp_path / "docs")
    before, begin, tables = PAGE.read_text().partition("<!-- sweep:begin -->\n")
    tables, end, after = tables.partition("<!-- sweep:end -->")
    assert len(tables) > 2000
    (tmp_path / "docs" / PAGE.name).write_text(before + begin + end + after)
    monkeypatch.chdir(tmp_path)
    return tmp_path / REPRODUCTION.relative_to(ROOT)


def test_the_page_of_the_cpu_reproduction_is_made_from_the_file_of_its_results(
    reproduction: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = Path("docs", "reproduction.jsonl.gz")
    assert file.stat().st_size <= 1_000_000
    monkeypatch.setattr(command, "draw", lambda book: None)
    assert Path("docs", PAGE.name).read_text() != PAGE.read_text()
    assert command.main([str(reproduction), "--collect"]) == 0
    assert Path("docs", PAGE.name).read_text() == PAGE.read_text()
    assert file.read_bytes() == (ROOT / file).read_bytes(), "nothing new, nothing written"


def test_the_cpu_reproduction_in_words_and_figures() -> None:
    """Its runs are what they are said to be, README and page show what the results say, and every figure is there."""
    sweep = plan.load(REPRODUCTION)
    assert len(sweep.planned) == 63
    assert (sweep.results, sweep.report) == (ROOT / "docs" / "reproduction.jsonl.gz", PAGE)
    book = Book(sweep)
    said = re.findall(r"[+-]0\.\d{4}\s\[[^]]+\]", (ROOT / "README.md").read_text())
    found = [book.result(run) for run in book.runs()]
    assert len(found) == 63 and all(result.state == "finished" for result in found), "so that nothing is left to run"
    differences = (cell.differences("validation_loss").values() for cell in statistics.cells(found, sweep.pair))
    spreads = [spread for each in differences if (spread := Spread.of(list(each))).interval]
    results = {f"{s.mean:+.4f} [{s.interval[0]:+.4f}, {s.interval[1]:+.4f}]" for s in spreads}
    assert len(said) == 2 and {text.replace("\n", " ") for text in said} <= results
    assert {run.values["norm"] for run in sweep.planned} == {"pre", "post", "sandwich", "lns", "deepnorm"}
    for run in sweep.planned:
        if not run.waits and "prores=on" not in run.name:
            recipe = book.recipe(run)
            assert recipe.training.steps == 1600 and not [p for p in recipe.sets["transforms"] if p.name == "prores"]
    figures = {f"images/{plot.name}.png" for plot in sweep.file.plots}
    assert set(re.findall(r"!\[[^]]+\]\(([^)]+)\)", PAGE.read_text())) == figures
    assert all((PAGE.parent / figure).read_bytes().startswith(b"\x89PNG") for figure in figures)


@pytest.mark.slow
def test_figures_of_the_cpu_reproduction_are_drawn_from_its_results(reproduction: Path) -> None:
    pytest.importorskip("matplotlib")
    assert command.main([str(reproduction), "--collect"]) == 0
    drawn = {path.name for path in Path("docs", "images").iterdir()}
    assert drawn == {f"{plot.name}.png" for plot in plan.load(REPRODUCTION).file.plots}
    [of_one] = [line for line in PAGE.read_text().splitlines() if line.startswith("titan-prores plot")]
    arguments = shlex.split(of_one, comments=True)[2:]
    assert plots.main([*arguments, "--output", "one.png"]) == 0 and Path("one.png").is_file()


def test_with_nothing_left_nothing_is_run(read) -> None:
    before = signal.getsignal(signal.SIGTERM)
    sweep = read()
    for run in sweep.planned:
        fake_run(sweep.folder / run.name)
    said: list[str] = []
    assert runner.Runner(Book(sweep), say=said.append).run() == 0
    assert signal.getsignal(signal.SIGTERM) is before and said == []
    with pytest.raises(ConfigError, match="no run has all of these values"):
        sweep.selection(sweep.planned, ["norm=pre,seed=7"])
