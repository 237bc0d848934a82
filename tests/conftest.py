"""Options of the whole suite, and what no file may leave to the next."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Iterator

import pytest

from titan_prores.output.log import PlainFormatter, logger

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the other cores have workers of their own
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As a shell starts what goes on in the background. What tests start, and interrupt, would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if hasattr(signal, "SIGHUP") and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # likewise, of nohup


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-golden", action="store_true", help="rewrite golden files from what is found")


@pytest.fixture(scope="module", autouse=True)
def no_process_group_left() -> Iterator[None]:
    """A file that leaves one fails, and not those after it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail("this file left a process group behind")


@pytest.fixture
def logged() -> Iterator[list[str]]:
    """What the package logs meanwhile, INFO and above, line by line as the console shows it, without the time.

    pytest's own caplog hears a logger that does not propagate once, twice or not at all, by what ran before.
    """
    lines: list[str] = []
    handler = logging.Handler()
    handler.setFormatter(PlainFormatter())
    handler.emit = lambda record: lines.append(handler.format(record))
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(handler)
    logger.setLevel(level)
