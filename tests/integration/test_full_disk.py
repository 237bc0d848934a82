"""A disk that is really full: a small file system in memory, which only the run's mount namespace has."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.launch import Forks, debug, fork, losses
from titan_prores.checkpoint.folder import CheckpointFolder

pytestmark = [pytest.mark.timeout(400), pytest.mark.slow]

# Room for two checkpoints of the debug recipe, of 3.1 MB each, and for what else a run writes.
SIZE = "8m"
STEPS = "--training.steps=20"


@dataclass
class Disk:
    """A small file system.

    Attributes:
        inside: where a run finds it.
        outside: where this process does.
        holder: process in whose mount namespace it is.
    """

    inside: Path
    outside: Path
    holder: int

    def start(self, *arguments: str) -> Forks:
        return Forks(*arguments, namespaces_of=self.holder)

    def fill(self) -> None:
        with (self.outside / "filler").open("ab", buffering=0) as file, contextlib.suppress(OSError):
            while True:
                file.write(bytes(4096))


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    inside = tmp_path / "disk"
    inside.mkdir()
    holder = subprocess.Popen(
        ["unshare", "-rm", "sh", "-c", f"mount -t tmpfs -o size={SIZE} tmpfs '{inside}' && echo mounted && read line"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        if holder.stdout.readline() != "mounted\n":
            pytest.skip(f"a file system of one's own is not permitted here: {holder.communicate()[1].strip()}")
        yield Disk(inside, Path(f"/proc/{holder.pid}/root{inside}"), holder.pid)
    finally:
        holder.communicate("\n")


def finish(process: Forks, status: int) -> str:
    """Wait for the end; returns what it said on stderr."""
    try:
        out, err = process.communicate(timeout=180)
    finally:
        process.kill()
    assert process.returncode == status, out + err
    return err


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of the run on a disk with room."""
    run = tmp_path_factory.mktemp("room") / "run"
    fork(*debug(run, STEPS))
    return losses(run)


def on(disk: Disk, cache: Path, *overrides: str) -> list[str]:
    return debug(disk.inside / "run", STEPS, f"--dataset.cache_folder={cache}", "--checkpoint.interval=5", *overrides)


@pytest.mark.parametrize("mode", ["disabled", "thread", "process"])
def test_save_that_fills_the_disk(mode: str, disk: Disk, tmp_path: Path, straight: dict[int, float]) -> None:
    own = on(disk, tmp_path / "cache", f"--checkpoint.async_mode={mode}")
    err = finish(disk.start(*own), 1)
    assert "checkpoint of step 15 cannot be written" in err and "No space left on device" in err
    run = disk.outside / "run"
    checkpoints = CheckpointFolder(run / "checkpoint")
    assert sorted(path.name for path in checkpoints.path.iterdir()) == ["step-00000005", "step-00000010"]
    assert checkpoints.problems(5, hashes=True) == checkpoints.problems(10, hashes=True) == []
    status = json.loads((run / "status.json").read_text())
    assert status["state"] == "failed" and "checkpoint of step 15" in status["error"]
    assert "No space left on device" in (run / "train.log").read_text()
    checkpoints.remove(5)
    err = finish(disk.start(*own, "--checkpoint.keep_latest_k=1"), 0)
    assert "resuming at step 10" in err and losses(run) == straight
    assert [path.name for path in checkpoints.path.iterdir()] == ["step-00000020"]


def test_disk_that_something_else_fills(disk: Disk, tmp_path: Path, straight: dict[int, float]) -> None:
    """What the run has said so far stays readable, and nothing of it is lost once there is room."""
    own = on(disk, tmp_path / "cache")
    run = disk.outside / "run"
    process = disk.start(*own)
    try:
        deadline = time.monotonic() + 150
        while process.poll() is None and time.monotonic() < deadline:
            if (run / "checkpoint/step-00000005").is_dir():
                disk.fill()
            time.sleep(0.01)
        assert process.poll() is not None, "hangs on a full disk"
    finally:
        if process.poll() is None:
            process.kill()
        err = finish(process, 1)
    assert "No space left on device" in err
    assert "Logging error" not in err
    assert json.loads((run / "status.json").read_text())["state"] == "failed"
    lines = (run / "metrics.jsonl").read_text().splitlines()
    whole = [json.loads(line) for line in lines[:-1]]
    assert [row["step"] for row in whole if "loss" in row][:5] == [1, 2, 3, 4, 5]
    (disk.outside / "filler").unlink()
    err = finish(disk.start(*own, "--checkpoint.keep_latest_k=1"), 0)
    assert "resuming at step" in err and losses(run) == straight
