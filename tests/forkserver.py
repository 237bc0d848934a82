"""The parent that ranks are forked from: it has imported once what would take each of them some seconds."""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import multiprocessing.forkserver
import os
import signal
from collections.abc import Mapping
from multiprocessing.context import ForkServerContext
from pathlib import Path
from unittest.mock import patch

REPOSITORY = Path(__file__).parents[1]


@functools.cache
def forkserver() -> ForkServerContext:
    """Makes processes that call a function; the first call starts the parent, with one thread for each of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preloaded"])
    paths = os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    with patch.dict(os.environ, PYTHONPATH=paths, OMP_NUM_THREADS="1"):
        multiprocessing.forkserver.ensure_running()
    return context


def settle(environment: Mapping[str, str]) -> None:
    """What a forked process does first: take an environment, and end with the parent. One thread computes."""
    import torch

    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    os.environ.clear()
    os.environ |= environment
    multiprocessing.set_start_method(None, force=True)  # a fork server's child would start its own workers by another
    torch.set_num_threads(1)
