"""Which rank failed first, and what to say about it in a few lines."""

from __future__ import annotations

import json
import os
import sysconfig
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from titan_prores.config.errors import ConfigError, ConfigErrors
from titan_prores.output.log import logger
from titan_prores.output.shell import SPEAKER_SECONDS, tell_torchrun

if TYPE_CHECKING:
    from torch.distributed import Store

# How long a rank that lost a peer waits for that peer's own account before it takes itself for the first.
PEER_GRACE_SECONDS = 2.0

_LOST_PEER = ("connection closed", "connection reset", "connection refused", "broken pipe", "timed out", "nccl")
_GONE = "a rank that this one talks to is gone or late, and said nothing itself"


def summarise(error: BaseException, rank: int) -> str:
    """What went wrong, in words that need no traceback: the error, and the line it came from.

    That is the deepest line outside of Python's and other packages' own code: of a component where it was one.
    """
    if isinstance(error, (ConfigError, ConfigErrors)):
        return str(error)
    if isinstance(error, KeyboardInterrupt):
        return "interrupted (Ctrl-C)"
    frames = traceback.extract_tb(error.__traceback__)
    foreign = [Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "purelib", "platlib")]
    here = Path(__file__).resolve().parents[1]
    own = [
        frame
        for frame in frames
        for path in [Path(frame.filename).resolve()]
        if path.is_relative_to(here) or not any(path.is_relative_to(folder) for folder in foreign)
    ]
    message = str(error).strip() or "(no message)"
    text = f"{type(error).__name__}: {message}"
    if frames:
        frame = (own or frames)[-1]
        text += f"\n  on rank {rank} at {Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line}"
    return text


def own_fault(key: str, error: Exception, problem: str = "") -> ConfigError:
    """A component's failure while a run is built, as a fault of the recipe, with the line it came from.

    `problem` is put before what the exception says.
    """
    fault = ConfigError(key, problem + " ".join(summarise(error, 0).replace("\n  on rank 0", ",").split()))
    fault.__cause__ = error
    return fault


@dataclass(frozen=True)
class Failure:
    """A rank's failure, as it told the others.

    Attributes:
        rank: which failed.
        stage: what it was doing.
        message: the first line of the summary, which may begin with the error's type.
        error_type: name of the error's class.
        signal: name of the one that ended it; empty where none did.
    """

    rank: int
    stage: str
    message: str
    error_type: str
    signal: str = ""

    @classmethod
    def of(cls, error: BaseException, rank: int, stage: str, signal: str = "") -> Failure:
        """What `error` is on this rank; one that only knows that a peer is gone says so."""
        message = f"stopped by {signal}" if signal else summarise(error, rank).splitlines()[0]
        if _is_lost_peer(error) and not isinstance(error, PeerError):
            return cls(rank, stage, f"{PeerError.__name__}: {_GONE} ({message})", PeerError.__name__, signal)
        return cls(rank, stage, message, type(error).__name__, signal)

    def for_status(self) -> dict[str, str | int]:
        """What status.json says of it."""
        error = self.message.removeprefix(f"{self.error_type}: ")
        return {"error": error, "error_type": self.error_type, "rank": self.rank, "stage": self.stage}

    def __str__(self) -> str:
        return f"rank {self.rank} failed first, in {self.stage}: {self.message}"


class PeerError(RuntimeError):
    """Raised here for a failure of another rank, which reports it itself."""


class FailureBoard:
    """A note in the store that the first rank to fail writes and the others read.

    Args:
        store: the job's store; the board keeps a connection of its own where the store can be cloned, as the main one
            may be busy. A store that is gone is not an error here: a rank then only knows about itself.
    """

    KEY = "first_failure"

    def __init__(self, store: Store) -> None:
        from torch.distributed import PrefixStore

        self._store = PrefixStore("titan_prores.distributed.failures", own_connection(store))

    def report(self, mine: Failure) -> Failure:
        """Say that this rank failed; returns the failure that came first, be it this one or another's."""
        try:
            return self._read(self._store.compare_set(self.KEY, "", json.dumps(asdict(mine))))
        except Exception:
            return mine

    def first(self) -> Failure | None:
        """The failure that came first, if any is known. Does not wait."""
        try:
            return self._read(self._store.get(self.KEY)) if self._store.check([self.KEY]) else None
        except Exception:
            return None

    def account(self, error: BaseException, rank: int, stage: str) -> str:
        """Report `error` and return what this rank should print: a whole summary where it was the first, else one line.

        A rank killed from outside cannot report; those that lose their connection to it wait a moment for others to
        be first, and then say that a peer has gone.
        """
        if _is_lost_peer(error):
            self._wait_for_first()
        summary = summarise(error, rank)
        first = self.report(Failure.of(error, rank, stage))
        if first.rank != rank:
            return f"stopped: {first}"
        if _is_lost_peer(error):
            summary = f"{_GONE}\n{summary}"
        return f"rank {rank} failed in {stage}: {summary}"

    def signal_behind(self, error: BaseException) -> str:
        """Name of the signal that ended the peer whose loss `error` is; empty where it is anything else."""
        if not _is_lost_peer(error):
            return ""
        self._wait_for_first()
        first = self.first()
        return first.signal if first is not None else ""

    def _wait_for_first(self) -> None:
        deadline = time.monotonic() + PEER_GRACE_SECONDS
        while self.first() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    @staticmethod
    def _read(content: bytes) -> Failure:
        return Failure(**json.loads(content))


def own_connection(store: Store) -> Store:
    """A clone of `store` with a connection of its own, where its kind has such; otherwise the store itself."""
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError, AttributeError):
        return store


def _is_lost_peer(error: BaseException) -> bool:
    text = str(error).lower()
    return isinstance(error, PeerError) or (
        isinstance(error, RuntimeError) and any(sign in text for sign in _LOST_PEER)
    )


def report_failure(
    error: BaseException, rank: int, stage: str, board: FailureBoard | None, log_file: Path | None
) -> None:
    """Say on this rank what ended the run, and let torchrun name the rank that failed first.

    Args:
        error: what was raised.
        rank: of this process.
        stage: what it was doing.
        board: None while there is no process group.
        log_file: where rank 0 leaves the traceback, if there is a run folder yet.
    """
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ
    text = board.account(error, rank, stage) if board else f"rank {rank} failed in {stage}: {summarise(error, rank)}"
    first = board is None or (board.first() or Failure.of(error, rank, stage)).rank == rank
    if rank == 0 and log_file is not None:
        with suppress(OSError), log_file.open("a", encoding="utf-8") as file:  # the disk may be what failed
            traceback.print_exception(error, file=file)
            text += f"\n  traceback in {log_file}" if first else ""
    elif first and not torchrun:  # which shows it otherwise
        text += "\n" + "".join(traceback.format_exception(error)).rstrip()
    logger.error(text)
    if not torchrun:
        return
    if first and (log_file is not None or not isinstance(error, Exception)):
        tell_torchrun(text)
    elif first:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)
    else:
        # torchrun takes for the cause what it sees end first, in whole seconds; it ends this rank once it has seen it.
        time.sleep(SPEAKER_SECONDS)
