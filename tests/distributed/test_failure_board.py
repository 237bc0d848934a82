"""When one rank fails, the others find out why although all they see is a broken connection."""

from tests.distributed.spawn import run_ranks


def one_fails(rank, world_size):
    import torch
    import torch.distributed as dist

    from titan_prores.distributed.failures import FailureBoard

    board = FailureBoard(dist.distributed_c10d._get_default_store())
    account = None
    try:
        for step in range(1, 5):
            if rank == 1 and step == 3:
                raise ValueError("the third batch is bad")
            dist.all_reduce(torch.zeros(1))
    except Exception as error:
        account = board.account(error, rank, f"step {step}")
    dist.destroy_process_group()  # breaks the connections, as the end of the process would
    return account


def test_first_failure_is_named_on_every_rank():
    accounts = run_ranks(one_fails, 3)
    assert accounts[1].startswith("rank 1 failed in step 3: ValueError: the third batch is bad\n")
    assert "test_failure_board.py" in accounts[1]
    for rank in (0, 2):
        assert accounts[rank] == "stopped: rank 1 failed first, in step 3: ValueError: the third batch is bad"
