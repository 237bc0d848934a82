"""A process of its own that writes: training keeps its interpreter to itself, and no signal to the run ends a save."""

from __future__ import annotations

import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

# Sent to whole process groups and jobs in order to end a run, whose last save must be written all the same.
SIGNALS = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP}
NICENESS = 10
_PARENT_POLL_SECONDS = 1.0
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from titan_prores.components.checkpoint._process import serve; serve(int(sys.argv[1]))"
)


class WriterProcess:
    """Calls functions in another process, one at a time. It imports what they need and nothing of the run.

    It ends with this object and with this process, however that ends.

    Args:
        files: descriptors that the process shall have too, under the same numbers.
    """

    def __init__(self, files: Sequence[int] = ()) -> None:
        ours, theirs = socket.socketpair()
        # Blocked signals stay so in the process, from its first instruction on.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _START, str(theirs.fileno()), *sys.path],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), *files],
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._connection = Connection(ours.detach())
        self.close = weakref.finalize(self, _end, self._process, self._connection)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What `function` returns there; it must be importable, and everything else picklable.

        Raises:
            RuntimeError: what it raised, in one line, or that the process has ended.
        """
        try:
            self._connection.send((function, arguments))
            failed, result = self._connection.recv()
        except (EOFError, OSError):
            raise RuntimeError(f"the writing process has ended: {self._how_it_ended()}") from None
        if failed:
            raise RuntimeError(result)
        return result

    def _how_it_ended(self) -> str:
        try:
            status = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            return "it no longer answers"
        return f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


def _end(process: subprocess.Popen, connection: Connection) -> None:
    connection.close()  # which ends it
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def serve(descriptor: int) -> None:
    """What the process does: answer calls until the other end is closed."""
    parent, connection = os.getppid(), Connection(descriptor)
    os.setpgid(0, 0)  # what is meant for the run's group is not meant for us
    os.nice(NICENESS)
    calls: queue.SimpleQueue = queue.SimpleQueue()

    def listen() -> None:
        """Ends the process in the middle of a call too; a forked child of the run may hold the other end open."""
        while os.getppid() == parent:
            try:
                if connection.poll(_PARENT_POLL_SECONDS):
                    calls.put(connection.recv_bytes())
            except (EOFError, OSError):
                break
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            function, arguments = pickle.loads(calls.get())
            answer = (False, function(*arguments))
        except Exception as error:
            answer = (True, f"{type(error).__name__}: {' '.join(str(error).split())}")
        try:
            connection.send(answer)
        except OSError:
            os._exit(0)
