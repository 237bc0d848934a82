"""Runs scripts/train.py as a user does, and sees to it that no process of it is left.

`launch` and `start` run it from nothing, under torchrun for several ranks. `fork` and `Forks` save the seconds that
imports take.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.distributed.spawn import turn, wait
from tests.forkserver import REPOSITORY, forkserver, settle

MARK = "TITAN_PRORES_TEST_LAUNCH"
TRAIN = REPOSITORY / "scripts" / "train.py"
CORPUS = REPOSITORY / "tests" / "data" / "corpus.txt"
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass
class Finished:
    """How a launch ended."""

    status: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


def command(
    *arguments: str, ranks: int = 1, torchrun_options: Sequence[str] = (), own_launcher: bool = False
) -> list[str]:
    """plain python for one rank, torchrun for more or where it is given options, our launcher where that is asked."""
    if own_launcher:
        return [sys.executable, str(TRAIN), "launch", "--nproc", str(ranks), *arguments]
    if ranks == 1 and not torchrun_options:
        return [sys.executable, str(TRAIN), *arguments]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return [*launcher, *torchrun_options, str(TRAIN), *arguments]


def start(
    *arguments: str,
    ranks: int = 1,
    cwd: Path | None = None,
    torchrun_options: Sequence[str] = (),
    wrapper: Sequence[str] = (),
    own_launcher: bool = False,
) -> subprocess.Popen:
    """Start a launch whose processes can all be told by a mark in their environment; `finish` ends it.

    Args:
        arguments: of scripts/train.py.
        ranks: how many.
        cwd: where to run it; the repository where it is not given.
        torchrun_options: more options for torchrun.
        wrapper: a command line that runs the one it is followed by.
        own_launcher: start the ranks by titan-prores launch, not by torchrun.
    """
    environment = {k: v for k, v in os.environ.items() if k not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", MARK: uuid.uuid4().hex}
    process = subprocess.Popen(
        [*wrapper, *command(*arguments, ranks=ranks, torchrun_options=torchrun_options, own_launcher=own_launcher)],
        cwd=cwd or REPOSITORY,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    process.mark = environment[MARK]
    return process


class Forks:
    """A launch whose ranks are forked from a process that has loaded torch, with the environment of ranks of srun.

    It has what a subprocess.Popen has, as far as tests use it. Each rank leads a session of its own.

    Args:
        arguments: of scripts/train.py.
        ranks: how many.
        cwd: where to run it; the repository where it is not given.
        namespaces_of: process whose user and mount namespaces the ranks enter.
    """

    def __init__(
        self, *arguments: str, ranks: int = 1, cwd: Path | None = None, namespaces_of: int | None = None
    ) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="fork-")
        self._streams = [Path(self._folder.name) / name for name in ("out", "err")]
        self.processes = forked(arguments, [self._streams] * ranks, cwd, namespaces_of)
        for process in self.processes:
            process.start()
        self.pid = self.processes[0].pid

    @property
    def returncode(self) -> int:
        """That of the first rank, by number, that has another than 0."""
        return next((process.exitcode for process in self.processes if process.exitcode), 0)

    def poll(self) -> int | None:
        return None if any(process.is_alive() for process in self.processes) else self.returncode

    def send_signal(self, number: int) -> None:
        """To every rank, as a scheduler does."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def kill(self) -> None:
        for process in self.processes:
            process.kill()

    def communicate(self, timeout: float = 600) -> list[str]:
        wait(self.processes, timeout, grace_seconds=timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("scripts/train.py", timeout)
        for process in self.processes:
            process.join()
        return [stream.read_text() if stream.exists() else "" for stream in self._streams]


def processes_of(launched: subprocess.Popen | Forks) -> list[psutil.Process]:
    """Live processes of a launch; torchrun puts its ranks into sessions of their own."""
    sessions = {process.pid for process in launched.processes} if isinstance(launched, Forks) else None
    found = []
    for process in psutil.process_iter():
        try:
            ours = os.getsid(process.pid) in sessions if sessions else process.environ().get(MARK) == launched.mark
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (OSError, psutil.Error):
            continue
    return found


def finish(process: subprocess.Popen | Forks, timeout: float = 120) -> Finished:
    """Wait for the end; fails when it takes too long or leaves a process behind."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        _kill(process)
        out, err = process.communicate()
        raise AssertionError(f"not done after {timeout} s:\n{out}\n{err}") from None
    deadline = time.monotonic() + 5
    while (left := processes_of(process)) and time.monotonic() < deadline:
        time.sleep(0.05)
    _kill(process)
    assert not left, f"left behind: {left}"
    return Finished(process.returncode, out, err)


def _kill(launched: subprocess.Popen | Forks) -> None:
    for process in processes_of(launched):
        with contextlib.suppress(psutil.Error):
            process.kill()


def launch(
    *arguments: str, ranks: int = 1, cwd: Path | None = None, status: int | None = 0, own_launcher: bool = False
) -> Finished:
    """Run to the end; fails unless the exit status is `status` (None = any)."""
    with turn(ranks):
        finished = finish(start(*arguments, ranks=ranks, cwd=cwd, own_launcher=own_launcher))
    assert status is None or finished.status == status, f"status {finished.status}:\n{finished.text}"
    return finished


def fork(
    *arguments: str, ranks: int = 1, cwd: Path | None = None, status: int | None = 0, timeout: float = 120
) -> Finished:
    """As `launch`, by `Forks`."""
    with turn(ranks):
        launched = Forks(*arguments, ranks=ranks, cwd=cwd)
        try:
            wait(launched.processes, timeout, grace_seconds=30)
            left = launched.poll() is None
        finally:
            launched.kill()
        finished = Finished(launched.returncode, *launched.communicate())
    assert not left, f"not done after {timeout} s, or after another rank:\n{finished.text}"
    assert status is None or finished.status == status, f"status {finished.status}:\n{finished.text}"
    return finished


def forked(
    arguments: Sequence[str],
    streams: Sequence[Sequence[Path]],
    cwd: Path | None = None,
    namespaces_of: int | None = None,
) -> list[multiprocessing.process.BaseProcess]:
    """Processes of a launch, one a rank, to be started; each leads a session of its own and ends with this process.

    Args:
        arguments: of scripts/train.py.
        streams: rank -> the files that its output and its errors are added to.
        cwd: where to run it; the repository where it is not given.
        namespaces_of: process whose user and mount namespaces they enter.
    """
    ranks = len(streams)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        of_all = {"WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": unused.getsockname()[1]}
    of_each = [of_all | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)] if ranks > 1 else [{}]
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    inherited["OMP_NUM_THREADS"] = "1"
    return [
        forkserver().Process(
            target=_train,
            args=(
                list(arguments),
                inherited | {name: str(value) for name, value in variables.items()},
                cwd or REPOSITORY,
                list(own),
                namespaces_of,
            ),
        )
        for variables, own in zip(of_each, streams, strict=True)
    ]


def _train(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    cwd: Path,
    streams: Sequence[Path],
    namespaces_of: int | None,
) -> None:
    """scripts/train.py in this process, which ends with its exit status."""
    settle(environment)
    os.setsid()
    for name in ("user", "mnt") if namespaces_of else ():
        with open(f"/proc/{namespaces_of}/ns/{name}") as namespace:
            if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), 0):
                raise OSError(ctypes.get_errno(), f"cannot enter the {name} namespace of process {namespaces_of}")
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, path in enumerate(streams, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    os.chdir(cwd)
    sys.argv = [str(TRAIN), *arguments]
    try:
        runpy.run_path(str(TRAIN), run_name="__main__")
    finally:
        atexit._run_exitfuncs()  # which an interpreter that ends would run


def rows(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    """Step -> training loss; fails when a step occurs twice."""
    found = [(row["step"], row["loss"]) for row in rows(folder) if "loss" in row]
    assert len(dict(found)) == len(found), "a step occurs twice"
    return dict(found)


def debug(folder: Path, *overrides: str) -> list[str]:
    """Arguments for the debug recipe on the fixed corpus, with nothing outside `folder`."""
    return [
        "--config",
        str(REPOSITORY / "train_configs" / "debug.toml"),
        f"--job.dump_folder={folder}",
        "--dataset.name=text",
        f"--dataset.files=[{str(CORPUS)!r}]",
        "--dataset.txt_document=paragraph",
        "--dataset.validation_fraction=0.1",
        f"--dataset.cache_folder={folder.parent / 'cache'}",
        "--training.local_batch_size=8",  # fewer microbatches than the recipe has
        *overrides,
    ]
