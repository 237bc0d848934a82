"""Checkpoints written beside training, from a thread and from a process: the same bytes, and no failure unheard."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.launch import Forks, debug, finish, fork, losses, processes_of

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

MODES = ["thread", "process"]
# Far more steps than a test waits for.
LONG = ["--training.steps=100000", "--validation.enabled=false", "--checkpoint.async_mode=process"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("async")


@pytest.fixture(scope="module")
def straight(folder: Path) -> dict[int, Path]:
    """Rank count -> run folder of 20 steps that wait for their checkpoints, of steps 10 and 20."""
    runs = {ranks: folder / f"straight-{ranks}" for ranks in (1, 2)}
    for ranks, run in runs.items():
        fork(*debug(run), ranks=ranks)
    return runs


def until(condition: Callable[[], object], what: str, *, of: Forks, seconds: float = 120) -> object:
    """The first true value of `condition`, which the launch `of` is to bring about."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert of.poll() is None, f"no {what}, the run has ended:\n{finish(of).text}"
        assert time.monotonic() < deadline, f"no {what} after {seconds} s"
        time.sleep(0.02)
    return found


def writers(launched: Forks) -> list[psutil.Process]:
    """The writing processes of a launch."""
    found = []
    for process in processes_of(launched):
        try:
            if any("titan_prores.components.checkpoint._process" in word for word in process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue
    return found


def published(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoint").glob("step-*"))


def unfinished(run: Path) -> list[Path]:
    return list((run / "checkpoint").glob(".unfinished-step-*"))


def trained(run: Path) -> int:
    """Step of the newest row, whose line may still be growing."""
    *lines, _ = (run / "metrics.jsonl").read_text().split("\n")
    return json.loads(lines[-1])["step"] if lines else 0


@pytest.fixture
def held(tmp_path: Path, folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Forks, Path]]:
    """A run of as many ranks as the test says, of whose second save one writing process has been stopped."""
    ranks = getattr(request, "param", 1)
    run = tmp_path / "run"
    cache = f"--dataset.cache_folder={folder / 'cache'}"
    launched = Forks(*debug(run, *LONG, "--checkpoint.interval=5", cache), ranks=ranks)
    try:
        until(lambda: "step-00000005" in published(run), "first checkpoint", of=launched)
        *_, writer = until(lambda: writers(launched), "writer", of=launched)
        writer.suspend()
        latest = trained(run)

        def waiting() -> int | None:
            """The save that needs that process: one begun since, or one that the next save is waiting for."""
            steps = [int(path.name.rpartition("-")[2]) for path in unfinished(run)]
            return next((step for step in steps if step > latest or trained(run) >= step + 5), None)

        until(waiting, "save that waits", of=launched)
        time.sleep(0.5)
        launched.writer, launched.step = writer, until(waiting, "save that waits", of=launched)
        yield launched, run
    finally:
        for process in processes_of(launched):
            process.kill()
        launched.communicate()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("ranks", [1, 2])
def test_checkpoints_written_beside_training_are_those_of_a_run_that_waits(
    ranks: int, mode: str, folder: Path, straight: dict[int, Path]
) -> None:
    run = folder / f"beside-{ranks}-{mode}"
    fork(*debug(run, f"--checkpoint.async_mode={mode}", "--checkpoint.interval=2"), ranks=ranks)
    assert losses(run) == losses(straight[ranks])
    for step in (10, 20):
        ours, theirs = (path / f"checkpoint/step-{step:08d}" for path in (run, straight[ranks]))
        for rank in range(ranks):
            name = f"__{rank}_0.distcp"
            assert (ours / name).read_bytes() == (theirs / name).read_bytes()
        assert sorted(path.name for path in ours.iterdir()) == sorted(path.name for path in theirs.iterdir())
    stopped = folder / f"beside-{ranks}-{mode}-stopped"
    shutil.copytree(run, stopped)
    for step in range(12, 21, 2):
        shutil.rmtree(stopped / f"checkpoint/step-{step:08d}")
    fork(*debug(stopped), ranks=ranks)  # from a checkpoint that was copied while the next step was on its way
    assert losses(stopped) == losses(straight[ranks])


@pytest.mark.parametrize("mode", MODES)
def test_failure_of_a_writer_beside_training_ends_the_run(mode: str, tmp_path: Path) -> None:
    """At the next update, not at the end; what was published before stays."""
    (tmp_path / "full.py").write_text(FULL_DISK)
    own = [f"--import={tmp_path / 'full.py'}", f"--checkpoint.async_mode={mode}", "--checkpoint.interval=4"]
    failed = fork(*debug(tmp_path / "run", *own, "--training.steps=100"), status=1)
    assert "checkpoint of step 8 cannot be written" in failed.err and "No space left" in failed.err
    assert published(tmp_path / "run") == ["step-00000004"] and not unfinished(tmp_path / "run")
    assert max(losses(tmp_path / "run")) < 100


FULL_DISK = """
import errno
from titan_prores.checkpoint.folder import CheckpointFolder

publish = CheckpointFolder.publish


def full(self, step, *args):
    if step == 8:
        raise OSError(errno.ENOSPC, "No space left on device")
    return publish(self, step, *args)


CheckpointFolder.publish = full
"""


@pytest.mark.parametrize("held", [1, 2], indirect=True)
def test_writing_process_that_is_killed_ends_the_run(held: tuple[Forks, Path]) -> None:
    """On all ranks, at an update, with the checkpoints there were; the same command goes on from them."""
    launched, run = held
    before = published(run)
    launched.writer.kill()
    failed = finish(launched)
    assert failed.status == 1
    assert f"checkpoint of step {launched.step} cannot be written" in failed.err
    assert "the writing process has ended: killed by SIGKILL" in failed.err
    assert published(run) == before and not unfinished(run)
    assert f"resuming at step {int(before[-1][5:])}" in fork(*debug(run, *LONG[1:], "--training.steps=12")).text


def test_what_the_writing_process_meets_is_what_the_run_says(held: tuple[Forks, Path]) -> None:
    launched, run = held
    shutil.rmtree(run / f"checkpoint/.unfinished-step-{launched.step:08d}")
    launched.writer.resume()
    failed = finish(launched)
    assert failed.status == 1 and f"checkpoint of step {launched.step} cannot be written" in failed.err
    assert "No such file or directory" in failed.err and "status 1" not in failed.err


@pytest.mark.parametrize("held", [1, 2], indirect=True)
def test_no_writing_process_outlives_a_run_that_is_killed(held: tuple[Forks, Path]) -> None:
    """Nor does it publish what nobody has checked."""
    launched, run = held
    before, ours = published(run), writers(launched)
    launched.writer.resume()
    for process in processes_of(launched):
        if process not in ours:
            process.kill()
    finish(launched)  # fails where a process is left
    assert published(run) == before


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_to_everybody_do_not_keep_the_last_save_from_being_published(
    number: int, held: tuple[Forks, Path]
) -> None:
    """A scheduler may signal every process of a job, a terminal those of its foreground group."""
    launched, run = held
    for process in processes_of(launched):
        process.send_signal(number)
    launched.writer.resume()
    stopped = finish(launched)
    assert stopped.status == 75 and "everything saved" in stopped.out
    assert int(published(run)[-1][5:]) == max(losses(run)) and not unfinished(run)


def test_writing_process_that_is_killed_between_saves_is_replaced(tmp_path: Path) -> None:
    run = tmp_path / "run"
    launched = Forks(*debug(run, *LONG, "--checkpoint.interval_minutes=0.05", "--checkpoint.interval=1000000"))
    trainer = psutil.Process(launched.pid)

    def held_between_saves() -> bool:
        """Whether the run is stopped where no save is under way: on a slow machine one follows the other at once."""
        trainer.suspend()
        until(lambda: trainer.status() == psutil.STATUS_STOPPED, "stop", of=launched)
        if published(run) and not unfinished(run):
            return True
        trainer.resume()
        return False

    until(lambda: published(run), "checkpoint", of=launched)
    until(held_between_saves, "time between saves", of=launched)
    before = published(run)
    (first,) = writers(launched)
    first.kill()
    until(lambda: first.status() == psutil.STATUS_ZOMBIE and first.num_threads() == 1, "end of it", of=launched)
    trainer.resume()
    until(lambda: published(run) != before, "second checkpoint", of=launched)
    (second,) = writers(launched)
    os.kill(launched.pid, signal.SIGTERM)
    stopped = finish(launched)
    assert stopped.status == 75 and first.pid != second.pid
    assert "the process that writes checkpoints has ended; starting another" in stopped.err


def test_writing_process_loads_nothing_of_the_run(tmp_path: Path) -> None:
    """Neither the user's main program nor a component, and it starts with the first save alone."""
    (tmp_path / "own.py").write_text("print('a user imports this', flush=True)\n")
    (tmp_path / "main.py").write_text(
        "import sys\nprint('a user starts here', flush=True)\nfrom titan_prores.cli import main\nsys.exit(main())\n"
    )
    arguments = debug(tmp_path / "run", "--checkpoint.async_mode=process", "--checkpoint.interval=5")
    command = [sys.executable, str(tmp_path / "main.py"), *arguments, f"--import={tmp_path / 'own.py'}"]
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, done.stderr
    text = done.stdout + done.stderr
    assert text.count("a user starts here") == 1 and text.count("a user imports this") == 1
    assert published(tmp_path / "run") == [f"step-{step:08d}" for step in (5, 10, 15, 20)]
