"""Says which rank is late when a collective hangs, shortly before the process group gives up without saying so.

Every rank publishes how far it is in the job's store, from a thread of its own. A rank that gets no further for the
timeout reads what the others published: the late ones are those with the lowest step and the fewest collectives begun.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from titan_prores.config.errors import counted
from titan_prores.distributed.failures import own_connection
from titan_prores.output.log import logger

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, Store

# The message comes at most two polls (2 s) after the timeout; the process group must still be waiting then.
MARGIN_SECONDS = 10
FOR_DATA = "waiting for data"


def group_timeout(seconds: float) -> timedelta:
    """Timeout to give the process group where the watchdog has `seconds`, so that the message comes first."""
    return timedelta(seconds=seconds + MARGIN_SECONDS)


@dataclass(frozen=True)
class Progress:
    """How far a rank is.

    Attributes:
        step: optimizer step it works on.
        collectives: number of collectives it has begun, over all watched groups.
        what: what it was doing when it last said so.
        since: time of its last progress, seconds since the epoch.
        published: time it wrote this; an old one means that the process is stopped or gone.
    """

    step: int
    collectives: int
    what: str
    since: float
    published: float

    @property
    def place(self) -> tuple[int, int]:
        return self.step, self.collectives


class Watchdog:
    """Watches one rank's progress from a daemon thread, which starts with `start` and ends with `close`.

    Args:
        store: the job's store. A clone is used where the store can be cloned, as a rank that waits inside a
            collective may keep the main connection busy.
        rank: of this process.
        world_size: number of ranks.
        timeout_seconds: no progress for so long is reported, once until there is progress again.
        groups: process groups whose collectives count as progress; with several, each rank should pass the same
            number. Without any only `mark` counts. Close the watchdog before they are destroyed.
    """

    def __init__(
        self, store: Store, rank: int, world_size: int, timeout_seconds: float, groups: Sequence[ProcessGroup] = ()
    ) -> None:
        from torch.distributed import PrefixStore

        self._store = PrefixStore("titan_prores.distributed.watchdog", own_connection(store))
        self._rank, self._world_size, self._groups = rank, world_size, tuple(groups)
        self._timeout = timeout_seconds
        self._state: tuple[int, str, int, float] = (0, "starting", 0, time.time())  # step, what, collectives, since
        self._reported = self._patient = self._store_is_gone = False
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        self._thread.start()
        return self

    def mark(self, step: int, what: str, *, patient: bool = False) -> None:
        """Say what this rank does from now on; counts as progress. Cheap enough for several calls a step.

        A `patient` rank may take as long as it needs; those that wait for it can still name it.
        """
        self._patient = patient
        self._state = (step, what, self._state[2], time.time())
        self._reported = False

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Say what this rank does for a while, which may be late; unlike `mark` this is no progress."""
        step, before, collectives, since = self._state
        self._state = (step, what, collectives, since)
        yield
        step, _, collectives, since = self._state
        self._state = (step, before, collectives, since)

    @property
    def timeout(self) -> float:
        """Seconds without progress that are reported."""
        return self._timeout

    def set_timeout(self, seconds: float) -> None:
        """Use another timeout from now on: the first step, which compiles and allocates, may take far longer."""
        self._timeout = seconds

    def close(self) -> None:
        """End the thread. Does not wait for a store that no longer answers. Safe to call twice."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2)

    def __enter__(self) -> Watchdog:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._end.is_set():
            mine = self._look()
            self._publish(mine)
            if not self._reported and not self._patient and time.time() - mine.since >= self._timeout:
                self._report(mine)
                self._reported = True
            self._end.wait(min(1.0, self._timeout / 10))

    def _look(self) -> Progress:
        step, what, before, since = state = self._state
        collectives = sum(_begun(group) for group in self._groups)
        if collectives != before:
            since = time.time()
            if self._state is state:  # otherwise a `mark` came in between, and knows better
                self._state = (step, what, collectives, since)
                self._reported = False
        return Progress(step, collectives, what, since, time.time())

    def _publish(self, progress: Progress) -> None:
        if self._store_is_gone:
            return
        try:
            self._store.set(str(self._rank), json.dumps(asdict(progress)))
        except Exception:
            self._store_is_gone = True  # asked again, it would print each time where it failed

    def _read(self) -> dict[int, Progress | None]:
        """Rank -> what it published, None where it never did. Raises what the store raises."""
        found: dict[int, Progress | None] = {}
        for rank in range(self._world_size):
            known = self._store.check([str(rank)])
            found[rank] = Progress(**json.loads(self._store.get(str(rank)))) if known else None
        return found

    def _report(self, mine: Progress) -> None:
        try:
            everyone = self._read()
        except Exception:
            logger.error(
                "rank %d: no progress for %.0f s (%s), and the store no longer answers, so which rank is late is not "
                "known; most likely the host of the first rank, or its torchrun, has ended",
                self._rank,
                time.time() - mine.since,
                _describe(mine),
            )
            return
        everyone[self._rank] = mine
        late = late_ranks(everyone)
        # The late ones speak for themselves and the first of the others for all who wait: no wall of equal lines.
        waiting = [rank for rank in everyone if rank not in late]
        speakers = [*late, waiting[0]] if waiting else [0]
        if self._rank in speakers:
            logger.error(stall_message(self._rank, everyone, late, time.time()))


def late_ranks(everyone: dict[int, Progress | None]) -> list[int]:
    """The ranks that the others wait for: those that never published, else those at the lowest place."""
    silent = [rank for rank, progress in everyone.items() if progress is None]
    if silent:
        return silent
    lowest = min(progress.place for progress in everyone.values())
    return [rank for rank, progress in everyone.items() if progress.place == lowest]


def stall_message(rank: int, everyone: dict[int, Progress | None], late: Sequence[int], now: float) -> str:
    """One line that names the late ranks.

    Args:
        rank: the rank that says it.
        everyone: rank -> what it published.
        late: what `late_ranks` found.
        now: seconds since the epoch.
    """
    mine = everyone[rank]
    head = f"rank {rank}: no progress for {now - mine.since:.0f} s ({_describe(mine)})"
    if len(late) == len(everyone):
        if all(progress.what == FOR_DATA for progress in everyone.values()):
            return f"{head}; look at the data workers and at the disk that they read"
        return f"{head}; no rank is behind the others, so look at the network or at the last operation"
    shown = []
    for other in late[:8]:
        progress = everyone[other]
        if progress is None:
            shown.append(f"rank {other} (has not started)")
            continue
        text = f"{_describe(progress)}, for {now - progress.since:.0f} s"
        if (silence := now - progress.published) > 10:
            text += f"; no sign of life for {silence:.0f} s"
        shown.append(f"rank {other} ({text})")
    more = f" and {len(late) - 8} more" if len(late) > 8 else ""
    return f"{head}; late: {', '.join(shown)}{more}"


def _describe(progress: Progress) -> str:
    return f"{progress.what}, {counted(progress.collectives, 'collective')} begun"


def _begun(group: ProcessGroup) -> int:
    """Sequence number of the group's newest collective; 0 where the backend has none, or the group has ended."""
    try:
        return group._get_sequence_number_for_group()
    except Exception:
        return 0
