"""The watchdog names the rank that the others wait for, and keeps quiet otherwise."""

import logging
import time

import pytest

from tests.distributed.spawn import run_ranks
from titan_prores.distributed.watchdog import FOR_DATA, Progress, Watchdog, late_ranks, stall_message

TIMEOUT = 2.0  # longer than a step takes where other tests run beside it


class Messages(logging.Handler):
    def __init__(self):
        super().__init__()
        self.texts = []
        logging.getLogger("titan_prores").addHandler(self)

    def emit(self, record):
        self.texts.append(record.getMessage())


def one_sleeps(rank, world_size):
    import torch
    import torch.distributed as dist

    messages = Messages()
    group = dist.group.WORLD
    watchdog = Watchdog(dist.distributed_c10d._get_default_store(), rank, world_size, 60, [group]).start()
    for step in range(1, 4):
        watchdog.mark(step, "training")
        dist.all_reduce(torch.zeros(3))
    watchdog.set_timeout(TIMEOUT)
    for step in range(4, 7):  # longer than the timeout in all, but each step is progress
        watchdog.mark(step, "training")
        time.sleep(TIMEOUT / 2)
        dist.all_reduce(torch.zeros(3))
    quiet = list(messages.texts)

    watchdog.mark(7, "training")
    if rank == 1:
        watchdog.mark(7, "looking out of the window")
        time.sleep(3 * TIMEOUT)
    dist.all_reduce(torch.zeros(3))
    watchdog.mark(8, "training")
    late = messages.texts[len(quiet) :]

    dist.barrier()
    start = time.monotonic()
    watchdog.close()
    watchdog.close()
    return quiet, late, time.monotonic() - start


def test_waiting_rank_names_the_sleeping_one():
    (quiet_0, late_0, closing_0), (quiet_1, late_1, _), (quiet_2, late_2, _) = run_ranks(one_sleeps, 3)
    assert quiet_0 == quiet_1 == quiet_2 == []
    assert closing_0 < TIMEOUT
    assert len(late_0) == 1, "reported once, however long it lasts"
    assert late_0[0].startswith("rank 0: no progress for")
    assert "late: rank 1 (looking out of the window" in late_0[0]
    assert "rank 2" not in late_0[0]
    assert len(late_1) == 1 and "late: rank 1" in late_1[0]
    assert late_2 == [], "one waiting rank speaks for all"


def test_survives_a_store_that_vanishes():
    from datetime import timedelta

    from torch.distributed import TCPStore

    messages = Messages()
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    with Watchdog(client, 0, 2, 0.5) as watchdog:
        watchdog.mark(3, "training")
        time.sleep(0.2)
        del server
        deadline = time.monotonic() + 30
        while not messages.texts and time.monotonic() < deadline:
            time.sleep(0.05)
        time.sleep(1)  # no second message
        assert watchdog._thread.is_alive()
    assert not watchdog._thread.is_alive()
    assert len(messages.texts) == 1 and "store no longer answers" in messages.texts[0]


@pytest.mark.parametrize(
    ("places", "late"),
    [([(5, 9), (5, 8), (5, 9)], [1]), ([(5, 9), (6, 2), (5, 9)], [0, 2]), ([(1, 1), None, (0, 0)], [1])],
)
def test_late_ranks(places, late):
    everyone = {r: p and Progress(*p, "training", since=0, published=0) for r, p in enumerate(places)}
    assert late_ranks(everyone) == late


def test_message_when_no_rank_is_behind_and_when_one_is_gone():
    everyone = {r: Progress(5, 9, "training", since=100, published=200) for r in range(2)}
    assert "no rank is behind" in stall_message(0, everyone, [0, 1], now=200)
    waiting = {rank: Progress(5, 9, FOR_DATA, since=100, published=200) for rank in (0, 1)}
    assert stall_message(0, waiting, [0, 1], now=200) == (
        "rank 0: no progress for 100 s (waiting for data, 9 collectives begun); "
        "look at the data workers and at the disk that they read"
    )
    everyone[1] = Progress(5, 8, "validating", since=90, published=100)
    message = stall_message(0, everyone, [1], now=200)
    assert message == (
        "rank 0: no progress for 100 s (training, 9 collectives begun); "
        "late: rank 1 (validating, 8 collectives begun, for 110 s; no sign of life for 100 s)"
    )


def test_what_a_rank_does_meanwhile_is_no_progress():
    import torch.distributed as dist

    watchdog = Watchdog(dist.HashStore(), 0, 1, 60)
    watchdog.mark(3, "step 3")
    begun = watchdog._look()
    with watchdog.doing(FOR_DATA):
        waiting = watchdog._look()
    assert (waiting.what, waiting.place, waiting.since) == (FOR_DATA, begun.place, begun.since)
    assert watchdog._look().what == "step 3"
