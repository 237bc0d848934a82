"""One readable summary for the rank that failed first, one line for the others."""

import time

import pytest
import torch
from torch.distributed import FileStore, HashStore, TCPStore

from titan_prores.config.errors import ConfigError
from titan_prores.distributed import failures
from titan_prores.distributed.failures import Failure, FailureBoard, summarise


def caught(raising):
    try:
        raising()
    except BaseException as error:
        return error


def raise_value_error():
    torch.ones(2, 3) @ torch.ones(2, 3)


def test_summary_names_error_and_place():
    text = summarise(caught(raise_value_error), rank=3)
    assert text.startswith("RuntimeError: ") and "2x3" in text
    assert "on rank 3 at test_failures.py:" in text and "in raise_value_error" in text


def test_summary_of_a_config_error_is_its_own_text():
    assert (
        summarise(ConfigError("training.steps", "must be greater than 0"), 0)
        == "training.steps: must be greater than 0"
    )
    assert summarise(KeyboardInterrupt(), 0) == "interrupted (Ctrl-C)"


@pytest.fixture(params=["file", "tcp", "hash"])
def store(request, tmp_path):
    if request.param == "file":
        return FileStore(str(tmp_path / "store"), 2)
    if request.param == "hash":
        return HashStore()
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def test_the_first_to_report_wins(store):
    boards = [FailureBoard(store), FailureBoard(store)]
    assert boards[0].first() is None
    first = boards[1].report(Failure.of(ValueError("no"), 1, "step 7"))
    assert (first.rank, first.stage, first.message) == (1, "step 7", "ValueError: no")
    assert boards[0].report(Failure.of(RuntimeError("Connection closed by peer"), 0, "step 8")) == first
    assert boards[0].first() == boards[1].first() == first
    assert first.for_status() == {"error": "no", "error_type": "ValueError", "rank": 1, "stage": "step 7"}


def test_accounts_of_first_and_second(store):
    board = FailureBoard(store)
    text = board.account(caught(raise_value_error), rank=1, stage="step 7")
    assert text.startswith("rank 1 failed in step 7: RuntimeError:") and "raise_value_error" in text
    lost = RuntimeError("[../gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:22144")
    assert board.account(lost, rank=0, stage="step 7").startswith(
        "stopped: rank 1 failed first, in step 7: RuntimeError:"
    )
    assert len(board.account(lost, rank=0, stage="step 7").splitlines()) == 1


def test_peer_that_died_without_a_word(monkeypatch):
    monkeypatch.setattr(failures, "PEER_GRACE_SECONDS", 0.2)
    start = time.monotonic()
    board = FailureBoard(HashStore())
    text = board.account(RuntimeError("Connection closed by peer"), rank=0, stage="step 4")
    assert time.monotonic() - start >= 0.2
    assert "a rank that this one talks to is gone or late" in text
    said = board.first().for_status()
    assert said["error_type"] == "PeerError" and said["error"].startswith("a rank that this one talks to is gone")


def test_a_store_that_is_gone_leaves_a_rank_its_own_failure():
    from datetime import timedelta

    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=5))
    client = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))
    board = FailureBoard(client)
    del server
    assert board.first() is None
    assert board.report(Failure.of(ValueError("mine"), 1, "step 2")).message == "ValueError: mine"
