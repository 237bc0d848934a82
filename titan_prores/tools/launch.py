"""`titan-prores launch`: the ranks of a run, started by torch's launcher, ending with their words and exit status."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from titan_prores.config import registry, sources
from titan_prores.config.command_line import ArgumentParser, parse
from titan_prores.config.errors import ConfigError
from titan_prores.config.layout import plan_mesh
from titan_prores.config.resolve import resolve
from titan_prores.distributed.signals import EXIT_STATUS, Stopped, signals
from titan_prores.output.shell import cores, environment_of_children

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

EPILOG = """\
All other options are those of titan-prores train: --config RECIPE and --section.key=value ..., see
titan-prores train --help.

Exit status: that of the first rank to fail, or 0: 0 the run went well, 2 the recipe or command line is wrong, 75
stopped by a signal with everything saved (the same command goes on), 1 anything else.
"""


def parser() -> ArgumentParser:
    """Of the launcher's own options, in torchrun's spelling too; what it does not know is the run's."""
    made = ArgumentParser(
        prog="titan-prores launch",
        description="Train with several processes, one per GPU.",
        usage="%(prog)s [--nproc N] [--nnodes N --rdzv-endpoint HOST:PORT] --config FILE [--section.key=value ...]",
        epilog=EPILOG,
    )

    def option(*names: str, **settings: object) -> None:
        spelled = [name.replace("-", "_").replace("__", "--", 1) for name in names]
        made.add_argument(*dict.fromkeys([*names, *spelled]), **settings)

    option(
        "--nproc",
        "--nproc-per-node",
        type=_ranks,
        default=None,
        metavar="N",
        help="processes on this machine; auto (the default): one for each GPU, or one without any",
    )
    option("--nnodes", type=_count, default=1, metavar="N", help="machines; start the same command on each of them")
    option("--rdzv-endpoint", metavar="HOST:PORT", help="rendezvous endpoint: a free port on one of the machines")
    option("--rdzv-id", metavar="ID", help="job id of the rendezvous, unique per job; the same on all machines")
    option(
        "--local-addr", metavar="ADDRESS", help="address of this machine, if its name does not resolve on the others"
    )
    return made


def launch(arguments: Sequence[str], run_recipe: Callable[[Sequence[str]], int]) -> int:
    """Run a command line, without the word launch; returns the exit status.

    A recipe that is wrong is refused here, before a process is started, as far as that can be told without a device.

    Args:
        arguments: the launcher's options, and those of the run.
        run_recipe: runs the rest in this process, where it asks for help or a check and no ranks are needed.

    Raises:
        ConfigError, ConfigErrors: the command line or the recipe is wrong.
    """
    passing = _Passing().listen()
    try:
        return _launch(arguments, run_recipe, passing)
    except Stopped as stopped:
        print(f"stopped by {stopped} before the ranks were started", file=sys.stderr)
        return EXIT_STATUS


def _launch(arguments: Sequence[str], run_recipe: Callable[[Sequence[str]], int], passing: _Passing) -> int:
    options, rest = parser().parse_known_args(arguments)
    if options.nnodes > 1 and not (options.rdzv_endpoint and options.rdzv_id):
        raise ConfigError("--nnodes", "needs --rdzv-endpoint and --rdzv-id", value=options.nnodes)
    run = parse(rest)
    if run.help is not None or run.list_components is not None:
        return run_recipe(rest)
    ranks = options.nproc or _gpus() or 1
    size = ranks * options.nnodes
    if run.check:
        return run_recipe(rest if run.world_size else [*rest, f"--world-size={size}"])
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(size)}  # parts that are imported may look at them
    tree = sources.load(run.config, run.overrides, registry.DEFAULTS)
    recipe = resolve(tree, size)
    from titan_prores.build import build_components

    build_components(recipe, plan_mesh(recipe.parallelism, size))
    if options.nnodes == 1:
        _check_loopback()  # torch's launcher would try again for minutes
    environment = environment_of_children()
    environment.setdefault("OMP_NUM_THREADS", str(max(cores() // ranks, 1)))
    os.environ.update(environment)  # which is what torch's launcher hands on
    return _start(options, ranks, rest, passing, Path(recipe.job.dump_folder) / "train.log")


def _start(options: argparse.Namespace, ranks: int, rest: Sequence[str], passing: _Passing, log_file: Path) -> int:
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    one = options.nnodes == 1
    logging.disable(logging.ERROR)  # the ranks say what happens, and say it better
    with tempfile.TemporaryDirectory(prefix="launch-", ignore_cleanup_errors=True) as folder:
        settings = LaunchConfig(
            min_nodes=options.nnodes,
            max_nodes=options.nnodes,
            nproc_per_node=ranks,
            run_id=options.rdzv_id or str(uuid.uuid4()),
            rdzv_backend="c10d",
            rdzv_endpoint=options.rdzv_endpoint or "127.0.0.1:0",
            # One machine need not know its own name: looking it up takes minutes where it does not resolve.
            local_addr=options.local_addr or ("127.0.0.1" if one else None),
            # Torch ends the ranks half a minute after a signal, and says nothing of how they ended: ours are passed on.
            signals_to_handle="SIGQUIT",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
        )
        try:
            elastic_launch(settings, sys.executable)("-m", "titan_prores", *rest)
        except ChildFailedError as failed:
            return _conclude(failed, passing, log_file)
        except Exception as error:
            print(f"error: the ranks cannot be started: {' '.join(str(error).split())}", file=sys.stderr)
            return 1
    return 0


class _Passing:
    """Passes signals on to the ranks, which lead sessions of their own. One that comes before them raises Stopped.

    Attributes:
        names: of the signals so far.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def listen(self) -> _Passing:
        """Answer `signals()` from now on. For the main thread."""
        for number in signals():
            signal.signal(number, self._receive)
        return self

    def _receive(self, number: int, frame: FrameType | None) -> None:
        import psutil

        self.names.append(signal.Signals(number).name)
        ranks = psutil.Process().children()
        for rank in ranks:
            with suppress(psutil.Error):
                rank.send_signal(number)
        if not ranks:
            raise Stopped(self.names[-1])


def _conclude(failed: ChildFailedError, passing: _Passing, log_file: Path) -> int:
    """The exit status after a rank ended otherwise than with 0, which has said why itself unless it was killed."""
    rank, first = failed.get_first_failure()
    if first.exitcode < 0:
        name = signal.Signals(-first.exitcode).name
        if name in passing.names:  # before it could answer, so there is nothing to save
            return EXIT_STATUS
        memory = ", as happens where the machine has no memory left" if name == "SIGKILL" else ""
        print(f"error: rank {rank} was killed by {name}{memory}", file=sys.stderr)
        return 1
    if first.exitcode in (2, EXIT_STATUS) or len(passing.names) > 1:
        return first.exitcode
    _keep_traceback(first, log_file)
    return 1


def _keep_traceback(failure: ProcessFailure, log_file: Path) -> None:
    """Put the traceback that a rank left to its launcher into the run's log, or show it where there is none."""
    if not isinstance(failure.message, dict):
        return
    traceback = failure.message["extraInfo"]["py_callstack"].strip()
    try:
        with log_file.open("r+", encoding="utf-8", errors="backslashreplace") as file:
            if traceback not in file.read():
                file.write(f"{traceback}\n")
                print(f"  traceback in {log_file}", file=sys.stderr)
    except OSError:
        print(traceback, file=sys.stderr)


def _check_loopback() -> None:
    """Raise MissingError where processes of this machine cannot talk to each other."""
    from titan_prores.distributed.mesh import no_interface

    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        raise no_interface() from error


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1")
    return int(text)


def _ranks(text: str) -> int | None:
    return None if text in ("auto", "gpu") else _count(text)


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
