"""Being asked from outside to end: signals, answered by all ranks after the same step, with everything saved."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import suppress
from types import FrameType

# What schedulers, people and a terminal that closes send. Slurm is told which with --signal.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
# A terminal and torchrun may both pass on the same one.
SAME_SIGNAL_SECONDS = 1.0
# sysexits.h calls it a temporary failure: the same command goes on where this one stopped.
EXIT_STATUS = 75


def signals() -> list[signal.Signals]:
    """Those of SIGNALS that this process should answer: nohup has SIGHUP ignored, and it stays so."""
    return [n for n in SIGNALS if n != signal.SIGHUP or signal.getsignal(n) is not signal.SIG_IGN]


def end_with_torchrun() -> None:
    """From now on, end this process soon after its torchrun, whatever it does; without torchrun, do nothing.

    A torchrun that was killed takes the job's store with it: ranks that look for each other would wait for their time
    limit, and those that train could agree on nothing any more.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        with suppress(OSError):  # there may be no reader left
            os.write(2, b"the launcher has ended, and this rank with it\n")
        os._exit(1)

    threading.Thread(target=watch, name="torchrun", daemon=True).start()


class Stopped(BaseException):
    """A signal came where nothing is worth waiting for: before the first step."""


class StopRequest:
    """The first signal that this process got; a second one ends the process at once.

    Attributes:
        name: of the signal, such as "SIGTERM"; None until there is one.
        can_wait: whether there are steps, after the next of which all ranks can stop; before, a signal raises Stopped.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.can_wait = False
        self._at = 0.0

    def listen(self) -> StopRequest:
        """Answer `signals()` from now on. For the main thread."""
        self._pid = os.getpid()
        for number in signals():
            signal.signal(number, self._receive)
        return self

    @property
    def age(self) -> float:
        """Seconds since the signal; 0 without one."""
        return time.monotonic() - self._at if self.name is not None else 0.0

    def ignore(self) -> None:
        """Ignore them from now on: everything is saved, and the process ends by itself."""
        for number in signals():
            signal.signal(number, signal.SIG_IGN)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._pid:  # a data loader's worker, forked with this handler, is to end as it always would
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        if self.name is not None:
            if time.monotonic() - self._at < SAME_SIGNAL_SECONDS:
                return
            os.write(2, b"second signal: stopping at once\n")  # a log might be what the first one interrupted
            os._exit(128 + number)
        self.name, self._at = signal.Signals(number).name, time.monotonic()
        if not self.can_wait:
            raise Stopped(self.name)
