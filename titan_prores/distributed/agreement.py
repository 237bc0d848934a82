"""What one rank wants, done by all ranks after the same step."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import Store


class Agreement:
    """What one rank wants after a step, known to all of them before that step ends.

    Rank 0 announces it for the step after the one that it has finished. No rank can finish that step without rank 0,
    which has begun it after the announcement: so all ranks find the note, at the price of a look into the store a step.

    Args:
        store: the job's store.
        rank: of this process.
        size: number of ranks.
    """

    def __init__(self, store: Store, rank: int, size: int) -> None:
        from torch.distributed import PrefixStore

        self._store = PrefixStore("titan_prores.agreement", store)
        self.rank, self.size = rank, size
        self._rounds: dict[str, int] = {}  # how often each wish has been fulfilled

    def after_step(self, step: int, what: str, wanted: str | None) -> str | None:
        """Collective in effect: every rank calls it after every step, and every rank gets the same.

        Args:
            step: the number of completed updates.
            what: name of the wish, such as "stop".
            wanted: not None on a rank that has it.

        Returns:
            What a rank wanted, after the step at which all have agreed on it; None otherwise.
        """
        if self.size == 1:
            return wanted
        key = f"{what}.{self._rounds.setdefault(what, 0)}"
        if wanted is not None:
            self._store.set(f"{key}.asked", wanted)
        if self._store.check([f"{key}.at"]):
            at, _, reason = self._store.get(f"{key}.at").decode().partition(" ")
            if int(at) == step:
                self._rounds[what] += 1
                return reason
        elif self.rank == 0 and self._store.check([f"{key}.asked"]):
            self._store.set(f"{key}.at", f"{step + 1} {self._store.get(f'{key}.asked').decode()}")
        return None
