"""titan-prores plot as a user runs it, on a run of the debug recipe with every probe on."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import subprocess
import sys
from pathlib import Path

import pytest

from tests.integration.launch import REPOSITORY, debug, fork, rows
from tests.integration.test_trained_schedules import SCHEDULES
from titan_prores.checkpoint.folder import record
from titan_prores.config.errors import ConfigError
from titan_prores.tools.plots.command import main
from titan_prores.tools.plots.cosines import checkpoint_cosines

PLOT = REPOSITORY / "scripts" / "plot.py"


def plot(*arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, str(PLOT), *arguments], capture_output=True, text=True, timeout=120)


def test_command_line(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = tmp_path / "run"
    run.mkdir()
    (run / "recipe.toml").write_text("[training]\nsteps = 2\n")
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 3.0}\n{"step": 2, "loss": 2.0}\n')
    finished = plot("loss", f"mine={run}", "--output", str(tmp_path / "out" / "loss"))
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == f"{tmp_path / 'out' / 'loss.png'}\n"
    wrong = plot("cosine", str(run))
    assert wrong.returncode == 2 and wrong.stdout == "" and wrong.stderr.count("\n") == 1
    assert "has residual_cosine" in wrong.stderr and "Traceback" not in wrong.stderr


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_every_figure_of_a_real_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = tmp_path / "run"
    fork(
        *debug(run),
        "--training.steps=8",
        "--checkpoint.interval=1",
        "--parallelism.tensor_parallel_degree=2",
        "--metrics.activation_norm.every_steps=2",
        "--metrics.residual_cosine.every_steps=1",
        "--metrics.residual_cosine.reference_ratio=0.3",
        "--metrics.residual_cosine.sequences=4",
        "--metrics.branch_ratio.every_steps=2",
        "--metrics.spike_score.window=2",
        "--metrics.spike_score.every_steps=4",
        ranks=2,
    )
    row = rows(run)[-2]
    assert row["step"] == 8 and row["residual_cosine_step"] == 3
    assert {"loss_spike_score", "grad_norm_spike_score", "branch_ratio_attention"} <= row.keys()
    # Row k shows the weights that k - 1 updates have made.
    logging.disable(logging.INFO)
    found = checkpoint_cosines(run, 2, 7, sequences=4, device="cpu")
    logging.disable(logging.NOTSET)
    assert found == pytest.approx(row["residual_cosine"], abs=1e-5)
    pytest.importorskip("matplotlib")
    (tmp_path / "out").mkdir()
    out = ["--output", str(tmp_path / "out")]
    commands = (
        ["loss"],
        ["gap", str(run)],
        ["activation"],
        ["cosine"],
        ["depth", "--window", "2"],
        ["alpha"],
        ["activation", "--key", "branch_ratio_ffn"],
        ["cosine", "--checkpoints", "2", "8"],
        ["metric", "--key", "grad_norm", "--key", "alpha", "--x", "hours"],
    )
    for command in commands:
        assert main([command[0], str(run), *command[1:], *out]) == 0
    written = [path.suffix for path in (tmp_path / "out").iterdir()]
    assert written == [".png"] * len(commands)
    assert main(["cosine", str(run), "--checkpoints", "2", "99", *out]) == 2
    assert "--checkpoints = 99: there is none in" in capsys.readouterr().err
    assert not list((run / "checkpoint").glob("*aside*")), "nothing of the run is touched"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", SCHEDULES)
def test_cosine_of_checkpoints_has_the_alpha_of_a_schedule_with_a_state(name: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    fork(
        *debug(run, *SCHEDULES[name]),
        "--training.steps=16",
        "--training.local_batch_size=2",
        "--checkpoint.interval=1",
        "--checkpoint.keep_latest_k=0",
        "--metrics.residual_cosine.every_steps=1",
        "--metrics.residual_cosine.reference_ratio=0.5",
        "--metrics.residual_cosine.sequences=4",
    )
    row = rows(run)[-2]
    assert (row["step"], row["residual_cosine_step"]) == (16, 8)
    found = checkpoint_cosines(run, 7, 15, sequences=4, device="cpu")
    # Layers that have not begun add nothing. That the second has by step 7 is what only the state tells.
    shown = [float(value) for value in row["residual_cosine"]]
    assert found == pytest.approx(shown, abs=1e-5, nan_ok=True) and all(map(math.isfinite, shown[:2]))
    # What somebody else may have written is refused.
    checkpoint = run / "checkpoint" / "step-00000007"
    meta, manifest = (json.loads((checkpoint / file).read_text()) for file in ("meta.json", "manifest.json"))
    meta["transforms"] = {"adaptive": {"prores": {"begun": "x"}}, "learned": [1]}[name]
    (checkpoint / "meta.json").write_text(json.dumps(meta))
    manifest["files"]["meta.json"] = dataclasses.asdict(record(checkpoint / "meta.json"))
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match="the state of the transforms in"):
        checkpoint_cosines(run, 7, 15, sequences=4, device="cpu")
