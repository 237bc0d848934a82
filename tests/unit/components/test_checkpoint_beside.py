"""What writes beside training: the kept copy of a state, and the process that answers calls."""

from __future__ import annotations

import mmap
import operator
import os
import signal
import time

import psutil
import pytest
import torch

from titan_prores.components.checkpoint._process import NICENESS, SIGNALS, WriterProcess
from titan_prores.components.checkpoint._staging import Stager


def state(scale: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
    return {
        "model": {
            "w": torch.arange(6.0).view(2, 3) * scale,
            "transposed": torch.arange(6.0).view(2, 3).t() * scale,
            "none": torch.empty(0, 3),
            "bf16": torch.full((5,), 0.5, dtype=torch.bfloat16),
        },
        "optimizer": {"step": torch.tensor(7.0 * scale), "count": torch.tensor([1, 2, 3])},
    }


def equal(found: dict, expected: dict) -> bool:
    return all(
        found[part].keys() == expected[part].keys()
        and all(torch.equal(found[part][name], tensor) for name, tensor in expected[part].items())
        for part in expected
    )


@pytest.mark.parametrize("in_file", [False, True])
def test_copy_is_of_the_moment_and_in_the_same_memory_each_time(in_file: bool) -> None:
    stager = Stager(os.memfd_create("test") if in_file else None)
    first = state()
    staged = stager.stage(first).result()
    assert equal(staged, first)
    first["model"]["w"].zero_()
    assert equal(staged, state())
    address = staged["model"]["w"].data_ptr()
    again = stager.stage(state(2.0)).result()
    assert equal(again, state(2.0)) and again["model"]["w"].data_ptr() == address


def test_memory_grows_with_the_state() -> None:
    """An optimizer that has not stepped yet has none."""
    stager = Stager()
    small = {"model": state()["model"], "optimizer": {}}
    assert equal(stager.stage(small).result(), small)
    large = {"model": state()["model"], "optimizer": {"moment": torch.ones(5000)}}
    assert equal(stager.stage(large).result(), large)
    assert equal(stager.stage(small).result(), small)


def test_places_are_found_from_another_mapping() -> None:
    file = os.memfd_create("test")
    stager = Stager(file)
    staged = stager.stage(state()).result()
    memory = mmap.mmap(file, stager.bytes)
    for tensors in staged.values():
        for tensor in tensors.values():
            found = stager.place(tensor).tensor(memory)
            assert torch.equal(found, tensor)
            assert found.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
    with pytest.raises(ValueError, match="none of those that were staged"):
        stager.place(torch.ones(3))


def test_calls_are_answered_by_another_process_that_signals_do_not_end() -> None:
    process = WriterProcess()
    try:
        assert process.call(os.getpid) == process.pid != os.getpid()
        assert psutil.Process(process.pid).nice() == min(psutil.Process().nice() + NICENESS, 19)
        assert process.call(os.getpgid, 0) == process.pid
        for number in SIGNALS:
            os.kill(process.pid, number)
        with pytest.raises(RuntimeError, match=r"^ZeroDivisionError: division by zero$"):
            process.call(operator.truediv, 1, 0)
        assert process.call(operator.add, 1, 2) == 3
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(RuntimeError, match="has ended: killed by SIGKILL"):
            process.call(operator.add, 1, 2)
        assert not process.alive
    finally:
        process.close()


@pytest.mark.parametrize("busy", [False, True])
def test_process_ends_with_whoever_made_it(busy: bool) -> None:
    process = WriterProcess()
    assert process.call(operator.add, 1, 2) == 3
    if busy:
        process._connection.send((time.sleep, (60,)))
    found = psutil.Process(process.pid)
    del process
    found.wait(timeout=5)
    assert not found.is_running()
