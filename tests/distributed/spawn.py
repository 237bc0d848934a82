"""Run a function on several ranks, each a process of its own with a gloo process group.

They are forked from a process that has loaded torch; making a process group and a model takes a second all the same.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

from filelock import FileLock

from tests.forkserver import forkserver, settle

# How long the ranks beside a failed one get to fail by themselves, so that their tracebacks are seen too.
GRACE_SECONDS = 5.0


class RanksFailed(AssertionError):
    """At least one rank raised, died or did not end in time. The message holds what each had to say."""


def run_ranks(function: Callable[..., Any], world_size: int, *args: Any, timeout: float = 120) -> list[Any]:
    """Call `function(rank, world_size, *args)` on every rank and return what the ranks returned, in their order.

    Args:
        function: a function at the top level of a module; results and arguments are pickled. The default process
            group is up when it is called (gloo, file:// rendezvous), with one thread a rank.
        world_size: number of processes.
        timeout: seconds until every process that is left is killed.

    Raises:
        RanksFailed: with the traceback of each failed rank, the earliest failure first; of a rank that hung, where.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as name:
        folder = Path(name)
        processes = [
            forkserver().Process(
                target=_rank_main,
                args=(function, rank, world_size, args, folder, timeout, dict(os.environ)),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        try:
            with turn(world_size):
                for process in processes:
                    process.start()
                wait(processes, timeout)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()
        problems = [_problem(rank, process, folder) for rank, process in enumerate(processes)]
        found = sorted(problem for problem in problems if problem is not None)
        if found:
            raise RanksFailed("\n".join(text for _, text in found))
        return [pickle.loads((folder / f"result_{rank}").read_bytes()) for rank in range(world_size)]


def turn(world_size: int) -> AbstractContextManager[Any]:
    """Holds back more than two ranks while another worker of pytest-xdist has as many."""
    session = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if session is None or world_size <= 2:
        return nullcontext()
    return FileLock(Path(tempfile.gettempdir()) / f"ranks-{session}.lock")


def wait(
    processes: list[multiprocessing.process.BaseProcess], timeout: float, grace_seconds: float = GRACE_SECONDS
) -> None:
    """Wait until all have ended, but not longer than `timeout` seconds, or `grace_seconds` once one has failed."""
    deadline = time.monotonic() + timeout
    shortened = False
    while any(process.is_alive() for process in processes) and time.monotonic() < deadline:
        if not shortened and any(process.exitcode not in (None, 0) for process in processes):
            deadline = min(deadline, time.monotonic() + grace_seconds)
            shortened = True
        time.sleep(0.02)


def _problem(rank: int, process: multiprocessing.process.BaseProcess, folder: Path) -> tuple[float, str] | None:
    """Time and description of a rank's failure; None when it returned."""
    error, stack = folder / f"error_{rank}", folder / f"stack_{rank}"
    if error.exists():
        return error.stat().st_mtime, f"--- rank {rank} raised:\n{error.read_text()}"
    if process.exitcode == 0 and (folder / f"result_{rank}").exists():
        return None
    where = stack.read_text() if stack.exists() else ""
    return time.time(), f"--- rank {rank} did not return (exit code {process.exitcode})\n{where}"


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple,
    folder: Path,
    timeout: float,
    environment: dict[str, str],
) -> None:
    settle({**environment, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)})
    stack = (folder / f"stack_{rank}").open("w")
    faulthandler.dump_traceback_later(max(timeout - 5, timeout / 2), file=stack)
    try:
        import torch.distributed as dist

        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout),
        )
        result = function(rank, world_size, *args)
        (folder / f"result_{rank}").write_bytes(pickle.dumps(result))
        if dist.is_initialized():
            # Without the barrier a rank that leaves early can abort one that is still talking to it.
            dist.barrier()
            dist.destroy_process_group()
    except BaseException:
        (folder / f"error_{rank}").write_text(traceback.format_exc())
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)  # the process group of a failed rank may not let it go
    finally:
        faulthandler.cancel_dump_traceback_later()
