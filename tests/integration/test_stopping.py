"""A signal while a run validates: the validation is cut short, and nothing is lost."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.integration.launch import Forks, debug, finish, fork, losses, processes_of, rows, start

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PARTS = '''
import pathlib, time
from titan_prores import Phase, register, Section, Transform


@register("transform", "slow_validation")
class SlowValidation(Transform):
    """Makes validation take its time, while a file says so."""

    class Config(Section):
        pass

    phase = Phase.PRECISION

    def apply(self, model, context):
        pass

    def wrap_validation_loss(self, loss):
        here = pathlib.Path(__file__)

        def slow(logits, labels):
            here.with_name("validating").touch()
            if here.with_name("slow").exists():
                time.sleep(0.5)
            return loss(logits, labels)

        return slow
'''


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_signal_cuts_a_validation_short(ranks: int, tmp_path: Path) -> None:
    (tmp_path / "parts.py").write_text(PARTS)
    (tmp_path / "slow").touch()
    run = tmp_path / "run"
    own = debug(
        run,
        f"--import={tmp_path / 'parts.py'}",
        "--transforms.slow_validation.enabled=true",
        "--training.stop_after=12",
        "--validation.freq=6",
        "--validation.batch_size=1",
        "--validation.max_tokens=8192",
        "--checkpoint.interval=4",
        "--checkpoint.keep_best_k=2",
        "--checkpoint.keep_latest_k=2",
    )
    process = Forks(*own) if ranks == 1 else start(*own, ranks=ranks)
    while not (tmp_path / "validating").exists():
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    finished = finish(process)
    # A whole validation takes some 128 sequences / ranks at half a second each.
    assert time.monotonic() - sent < 25
    assert finished.status == (75 if ranks == 1 else 1)
    assert "validation after step 6 is cut short by SIGTERM" in finished.text
    status = json.loads((run / "status.json").read_text())
    assert (status["state"], status["step"], status["signal"]) == ("stopped", 6, "SIGTERM")
    assert not [row for row in rows(run) if row.get("validation")]

    (tmp_path / "slow").unlink()
    assert "resuming at step 6" in fork(*own, ranks=ranks).text
    straight = [part.replace(str(run), str(tmp_path / "straight")) for part in own]
    fork(*straight, ranks=ranks)
    assert losses(run) == losses(tmp_path / "straight")
    validations = [row for row in rows(run) if row.get("validation")]
    assert [row["step"] for row in validations] == [6, 12], "what was cut short is made up for"
    assert validations == [row for row in rows(tmp_path / "straight") if row.get("validation")]

    def saved(run: Path) -> dict[int, float | None]:
        """Step -> validation loss, of the checkpoints that are kept."""
        metas = [json.loads(path.read_text()) for path in sorted(run.glob("checkpoint/step-*/meta.json"))]
        return {meta["step"]: meta.get("validation_loss") for meta in metas}

    loss = validations[1]["validation_loss"]
    assert saved(run) == {6: None, 8: None, 12: loss}, "step 6 is one of the best two by its row"
    assert saved(tmp_path / "straight") == {8: None, 12: loss}


LAST_STEP = '''
import os, signal
from titan_prores import Metric, register, Section


@register("metrics", "late_signal")
class LateSignal(Metric):
    """Signals its own process in a step after which nothing but the validation is left."""

    class Config(Section):
        pass

    def measure(self, step, model):
        if step == 6 and "LATE_SIGNAL" in os.environ:
            os.kill(os.getpid(), signal.SIGTERM)
        return {}
'''


def test_a_signal_in_the_last_step_costs_no_validation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "parts.py").write_text(LAST_STEP)
    own = [f"--import={tmp_path / 'parts.py'}", "--metrics.late_signal.enabled=true", "--training.stop_after=6"]
    fork(*debug(tmp_path / "straight", *own))
    monkeypatch.setenv("LATE_SIGNAL", "1")
    run = tmp_path / "run"
    process = Forks(*debug(run, *own))
    assert finish(process).status == 75
    assert not [row for row in rows(run) if row.get("validation")]
    monkeypatch.delenv("LATE_SIGNAL")
    for _ in range(2):  # once made up for, it is not done again
        assert "nothing left to train: step 6" in fork(*debug(run, *own)).text
        validations = [row for row in rows(run) if row.get("validation")]
        assert validations == [row for row in rows(tmp_path / "straight") if row.get("validation")]


def test_a_run_whose_data_do_not_come_can_be_stopped(tmp_path: Path) -> None:
    """Its worker hangs: one signal ends the run, with all steps saved that were done. What it says needs no Unicode."""
    run = tmp_path / "é"
    own = debug(run, "--training.steps=5000", "--dataset.num_workers=1", "--validation.enabled=false")
    process = start(*own, wrapper=["env", "PYTHONIOENCODING=ascii"])
    while not (run / "metrics.jsonl").exists() or len((run / "metrics.jsonl").read_text().splitlines()) < 3:
        assert process.poll() is None
        time.sleep(0.1)
    (worker,) = psutil.Process(process.pid).children()
    worker.suspend()
    time.sleep(3)  # what it had read ahead is used up
    process.send_signal(signal.SIGTERM)
    finished = finish(process, timeout=30)
    assert finished.status == 75, finished.text
    status = json.loads((run / "status.json").read_text())
    done = max(losses(run))
    assert (status["state"], status["step"], status["signal"]) == ("stopped", done, "SIGTERM")
    assert (run / f"checkpoint/step-{done:08d}").is_dir()
    assert f"everything saved: the same command goes on after step {done}" in finished.out
    assert r"\xe9" in finished.out and "Traceback" not in finished.text


def test_ranks_whose_torchrun_is_killed_end(tmp_path: Path) -> None:
    """One that waits for the other, and one that has not yet looked for it; not after init_timeout_seconds."""
    waiting = tmp_path / "waiting.py"
    waiting.write_text("import os, time\nif os.environ.get('RANK') == '1':\n    time.sleep(3600)\n")
    run = tmp_path / "run"
    process = start(*debug(run, f"--import={waiting}", "--comm.init_timeout_seconds=3000"), ranks=2)
    time.sleep(5)
    while not any("scripts/train.py" in " ".join(p.cmdline()) and p.num_threads() > 2 for p in ranks_of(process)):
        assert process.poll() is None
        time.sleep(0.2)
    ranks = ranks_of(process)
    assert len(ranks) == 2
    process.kill()
    gone, alive = psutil.wait_procs(ranks, timeout=60)
    for rank in alive:
        rank.kill()
    assert len(gone) == 2
    assert "the launcher has ended, and this rank with it" in process.communicate()[1]


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    return [p for p in processes_of(process) if "RANK" in p.environ() and p.pid != process.pid]
