"""titan-prores sweep as a user runs it: interrupted, gone on, and put into a table."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.launch import CORPUS, REPOSITORY, losses

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

SWEEP = REPOSITORY / "scripts" / "sweep.py"
NAMES = ("prores=off,seed=0", "prores=on,seed=0")


def start(file: Path, *arguments: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, str(SWEEP), str(file), *arguments],
        cwd=REPOSITORY,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)},
    )


def finish(process: subprocess.Popen, status: int) -> str:
    try:
        out, _ = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends the runs that it has started
        out, _ = process.communicate(timeout=60)
        raise AssertionError(f"not done in time:\n{out}") from None
    assert process.returncode == status, out
    return out


def write(folder: Path, runs: str, steps: int = 30) -> Path:
    file = folder / f"{runs}.toml"
    file.write_text(f"""
recipe = "{REPOSITORY}/train_configs/debug.toml"
folder = "{folder}/{runs}"
pair = {{ axis = "prores", baseline = "off", treatment = "on" }}
[settings]
training = {{ steps = {steps}, seq_len = 32, global_batch_size = 4 }}
validation.max_tokens = 1024
[settings.dataset]
name = "text"
files = ["{CORPUS}"]
txt_document = "paragraph"
validation_fraction = 0.1
cache_folder = "{folder}/cache"
[axes]
prores.off = {{ transforms.prores.enabled = false }}
prores.on = {{ transforms.prores.enabled = true }}
""")
    return file


def state(run: Path) -> str | None:
    try:
        return json.loads((run / "status.json").read_text())["state"]
    except (FileNotFoundError, ValueError):
        return None


def begun(run: Path) -> bool:
    """Whether its first step is done."""
    file = run / "metrics.jsonl"
    return file.exists() and file.stat().st_size > 0


def test_interrupted_and_resumed_it_is_the_straight_sweep(tmp_path: Path) -> None:
    file = write(tmp_path, "runs")
    runs = tmp_path / "runs"
    # The second run is stopped in mid-run: Ctrl-C ends both of them, whatever the first is at.
    process = start(file)
    while not begun(runs / NAMES[1]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out = finish(process, 75)
    assert "stopped by SIGINT" in out and f"{NAMES[0]}: finished" in out
    assert state(runs / NAMES[1]) == "stopped"
    first = (runs / NAMES[0] / "metrics.jsonl").read_bytes()

    listed = finish(start(file, "--list"), 0)
    assert "unfinished" in listed and listed.count("finished") == 2

    out = finish(start(file, "--jobs", "2"), 0)
    assert f"{NAMES[1]}: goes on" in out and f"{NAMES[0]}: " not in out
    assert "resuming at step" in (runs / NAMES[1] / "train.log").read_text()
    assert (runs / NAMES[0] / "metrics.jsonl").read_bytes() == first, "a run that has ended is not run again"
    table = (runs / "table.md").read_text()
    assert "2 of 2 runs have ended: 2 finished" in table and "| 1 + 1 |" in table

    # Straight through, two at a time.
    straight = write(tmp_path, "straight")
    finish(start(straight, "--jobs", "2"), 0)
    for name in NAMES:
        assert losses(tmp_path / "straight" / name) == losses(runs / name)
        ends = [json.loads((tmp_path / each / name / "result.json").read_text()) for each in ("runs", "straight")]
        assert ends[0]["final"] == ends[1]["final"] and ends[0]["step"] == 30
    again = finish(start(straight), 0)
    assert "2 of 2 runs have ended" in again and "starts" not in again and "straight/table.md" in again

    # The file of results is enough: without the run folders nothing is run again.
    table = (tmp_path / "straight" / "table.md").read_text()
    for name in NAMES:
        shutil.rmtree(tmp_path / "straight" / name)
    again = finish(start(straight), 0)
    assert "starts" not in again and (tmp_path / "straight" / "table.md").read_text() == table


def test_a_run_that_outlives_its_sweep_is_waited_for(tmp_path: Path) -> None:
    file = write(tmp_path, "runs", steps=300)
    first, runs = start(file), tmp_path / "runs"
    while not begun(runs / NAMES[0]):
        assert first.poll() is None, first.communicate()
        time.sleep(0.05)
    first.kill()
    first.communicate()
    assert state(runs / NAMES[0]) == "running"
    process = start(file)
    while not begun(runs / NAMES[1]):
        assert process.poll() is None, process.communicate()
        time.sleep(0.05)
    said = ""
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as it is under nohup
        process.send_signal(signal.SIGHUP)  # the terminal was closed
        said = finish(process, 75)
        assert "stopped by SIGHUP" in said
        process = start(file)
    said += finish(process, 0)
    assert f"{NAMES[0]}: another process is at it; waiting for that" in said and f"{NAMES[1]}: finished" in said
    assert "2 finished" in (runs / "table.md").read_text()
    for name in NAMES:
        assert len(losses(runs / name)) == 300, "every step once"


def test_runs_that_fail_or_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path, "runs", steps=6)
    # What only the run itself can tell is refused by it, and ends the sweep; each time it is said once.
    file.write_text(file.read_text().replace("[axes]", '[settings.checkpoint]\nresume = "must"\n[axes]'))
    for _ in range(2):
        out = finish(start(file), 2)
        assert "the run was refused" in out and out.count("error: checkpoint.resume") == 1, out

    # Diverging is a result; the sweep goes on.
    file = write(tmp_path, "diverging", steps=4)
    settings = "[settings.lr_scheduler]\nwarmup_steps = 0\n[settings.optimizer]\nlr = 1e30\n[axes]"
    file.write_text(file.read_text().replace("[axes]", settings))
    out = finish(start(file), 0)
    assert out.count(": diverged after") == 2, out
    assert (tmp_path / "diverging" / "table.md").read_text().count("diverged: prores") == 2
