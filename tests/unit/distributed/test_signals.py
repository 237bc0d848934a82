"""Agreeing on the step after which all ranks act, and signals."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from titan_prores.distributed.agreement import Agreement
from titan_prores.distributed.signals import SIGNALS, Stopped, StopRequest

RANKS, STEPS = 4, 40


def run_ranks(wish_at: dict[int, list[int]], seed: int) -> list[list[int]]:
    """Ranks as threads that meet once a step, as in a collective, and dawdle; returns the steps at which each acted.

    Args:
        wish_at: rank -> steps after which it has a wish.
        seed: of the dawdling.
    """
    store, barrier = dist.HashStore(), threading.Barrier(RANKS)
    acted: list[list[int]] = [[] for _ in range(RANKS)]

    def rank_main(rank: int) -> None:
        agreement, dawdle = Agreement(store, rank, RANKS), random.Random(seed + rank)
        for step in range(1, STEPS + 1):
            barrier.wait()  # the collectives of the step: begun by all before one of them is done
            time.sleep(dawdle.random() / 500)
            wanted = f"rank {rank}" if step in wish_at.get(rank, ()) else None
            if agreement.after_step(step, "save", wanted) is not None:
                acted[rank].append(step)

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return acted


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("rank", [0, 3])
def test_all_ranks_act_after_the_same_step(rank: int, seed: int) -> None:
    acted = run_ranks({rank: [5, 20]}, seed)
    assert all(steps == acted[0] for steps in acted)
    first, second = acted[0]
    # Rank 0 announces what it finds for the next step; it may look just before another rank asks.
    assert 6 <= first <= 7 and 21 <= second <= 22


def test_several_ranks_with_one_wish_act_once() -> None:
    acted = run_ranks({rank: [10] for rank in range(RANKS)}, 0)
    assert acted == [[11]] * RANKS


def test_one_rank_acts_at_once() -> None:
    agreement = Agreement(dist.HashStore(), 0, 1)
    assert agreement.after_step(1, "stop", None) is None
    assert agreement.after_step(2, "stop", "SIGTERM") == "SIGTERM"


@pytest.fixture
def request_():
    before = {number: signal.getsignal(number) for number in SIGNALS}
    yield StopRequest().listen()
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_noted_where_there_are_steps(request_: StopRequest, number: signal.Signals) -> None:
    request_.can_wait = True
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), number)  # a terminal and torchrun may both send it
    assert request_.name == number.name


def test_a_signal_before_them_ends_the_run(request_: StopRequest) -> None:
    with pytest.raises(Stopped, match="SIGTERM"):
        os.kill(os.getpid(), signal.SIGTERM)


def test_hanging_up_stays_ignored_under_nohup() -> None:
    before = {number: signal.getsignal(number) for number in SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ignoring = StopRequest().listen()
        ignoring.can_wait = True
        os.kill(os.getpid(), signal.SIGHUP)
        assert ignoring.name is None
        os.kill(os.getpid(), signal.SIGTERM)
        assert ignoring.name == "SIGTERM"
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_nothing_is_answered_once_all_is_saved(request_: StopRequest) -> None:
    request_.can_wait = True
    request_.ignore()
    for number in SIGNALS:
        os.kill(os.getpid(), number)
    assert request_.name is None


def test_a_forked_worker_ends_as_it_always_would(request_: StopRequest) -> None:
    request_.can_wait = True
    started, starts = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(starts, b"!")
        time.sleep(30)
        os._exit(0)
    os.read(started, 1)  # Python forgets a signal that comes while it forks
    os.close(started)
    os.close(starts)
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGTERM


@pytest.mark.parametrize(
    "size, signalled, age, seconds, ends",
    [
        (1, None, 0, 100, None),
        (1, "SIGTERM", 0, 1, "SIGTERM"),
        (2, "SIGTERM", 1, 1, None),  # the others may be in a collective, and it joins them once its data are there
        (2, "SIGTERM", 6, 6, "SIGTERM"),
        (2, None, 0, 111, "no batch for 111 s"),
    ],
)
def test_waiting_for_data_can_be_stopped(
    size: int, signalled: str | None, age: float, seconds: float, ends: str | None
) -> None:
    from titan_prores.data import DataError
    from titan_prores.trainer import Trainer

    asked = SimpleNamespace(name=signalled, age=age)
    mesh, watchdog = SimpleNamespace(size=size), SimpleNamespace(timeout=100)
    trainer = SimpleNamespace(stop_request=asked, mesh=mesh, watchdog=watchdog)
    if ends is None:
        Trainer._wait_for_data(trainer, seconds)
        return
    with pytest.raises((Stopped, DataError), match=ends):
        Trainer._wait_for_data(trainer, seconds)
