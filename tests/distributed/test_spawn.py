"""The helper that all distributed tests stand on reports failures and hangs instead of waiting for ever."""

import time

import pytest

from tests.distributed.spawn import RanksFailed, run_ranks


def add_up(rank, world_size, offset):
    import torch
    import torch.distributed as dist

    value = torch.tensor(float(rank + offset))
    dist.all_reduce(value)
    return rank, value


def fail_on_one(rank, world_size):
    import torch
    import torch.distributed as dist

    if rank == 1:
        raise ValueError("rank one is unwell")
    dist.all_reduce(torch.zeros(1))


def hang(rank, world_size):
    time.sleep(1000)


def test_results_come_back_in_rank_order():
    results = run_ranks(add_up, 2, 10)
    assert [(rank, value.item()) for rank, value in results] == [(0, 21.0), (1, 21.0)]


def test_failure_names_the_rank_and_shows_its_traceback():
    with pytest.raises(RanksFailed, match=r"rank 1 raised:\n(.*\n)*ValueError: rank one is unwell") as caught:
        run_ranks(fail_on_one, 2)
    assert str(caught.value).startswith("--- rank 1 raised")


def test_a_hang_is_killed_and_its_place_shown():
    start = time.monotonic()
    with pytest.raises(RanksFailed, match=r"did not return(.*\n)*.* in hang"):
        run_ranks(hang, 1, timeout=16)
    assert time.monotonic() - start < 40
