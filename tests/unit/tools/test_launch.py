"""`titan-prores launch`, up to the moment at which it starts processes and from the moment at which they have ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from titan_prores.cli import main
from titan_prores.distributed.signals import SIGNALS
from titan_prores.tools import launch as module
from titan_prores.tools.launch import _conclude, _Passing

DEBUG = Path(__file__).parents[3] / "train_configs" / "debug.toml"


@pytest.fixture(autouse=True)
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list]:
    """What would be started; environment and handlers are put back."""
    before = {number: signal.getsignal(number) for number in SIGNALS}
    environment = dict(os.environ)
    calls: list = []
    monkeypatch.setattr(module, "_start", lambda options, ranks, rest, *_: calls.append((options, ranks, rest)) or 0)
    yield calls
    os.environ.clear()
    os.environ |= environment
    for number, handler in before.items():
        signal.signal(number, handler)


def test_what_is_not_the_launchers_goes_to_the_run(started: list) -> None:
    rest = ["--config", str(DEBUG), "--training.seed=3", "--optimizer.lr", "1e-3"]
    assert main(["launch", "--nproc_per_node", "2", *rest]) == 0
    ((options, ranks, found),) = started
    assert (ranks, options.nnodes, found) == (2, 1, rest)
    assert main(["launch", *rest]) == 0
    assert started[-1][1] >= 1


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--config", str(DEBUG), "--trainig.steps=3"], "did you mean"),
        (["--config", str(DEBUG), "--training.stop_after=3", "--lr_scheduler.warmup_steps=99"], "longer than the run"),
        (["--config", str(DEBUG), "--parallelism.tensor_parallel_degree=3"], "does not fit 2 ranks"),
        (["--config", str(DEBUG), "--nprocs=3"], "--nprocs"),
        (["--nnodes", "2", "--config", str(DEBUG)], "--rdzv-endpoint"),
        ([], "--config"),
    ],
)
def test_a_wrong_command_line_starts_nothing(
    arguments: list[str], said: str, started: list, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["launch", "--nproc", "2", *arguments]) == 2
    assert said in capsys.readouterr().err and not started


def failed(**exit_codes: int) -> SimpleNamespace:
    failures = [(int(r[1:]), SimpleNamespace(exitcode=code, message="")) for r, code in exit_codes.items()]
    return SimpleNamespace(get_first_failure=lambda: failures[0])


@pytest.mark.parametrize(
    "exit_code, signals, status, said",
    [
        (2, [], 2, ""),
        (75, ["SIGTERM"], 75, ""),
        (1, [], 1, ""),
        (139, [], 1, ""),
        (-9, [], 1, "error: rank 1 was killed by SIGKILL"),
        (-9, ["SIGTERM"], 1, "error: rank 1 was killed by SIGKILL"),
        (-15, ["SIGTERM"], 75, ""),  # before it could answer
        (143, ["SIGTERM", "SIGTERM"], 143, ""),
    ],
)
def test_the_exit_status_is_that_of_the_rank(
    exit_code: int, signals: list[str], status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    passing = _Passing()
    passing.names = signals
    assert _conclude(failed(r1=exit_code), passing, tmp_path / "train.log") == status
    err = capsys.readouterr().err
    assert err.startswith(said) and bool(err) == bool(said)


@pytest.mark.parametrize("known", [False, True])
def test_a_traceback_is_kept_once(known: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "train.log"
    log.write_text("first\n" + ("Traceback: here\n" if known else ""))
    message = {"message": "ValueError: no", "extraInfo": {"py_callstack": "Traceback: here\n"}}
    error = SimpleNamespace(get_first_failure=lambda: (1, SimpleNamespace(exitcode=1, message=message)))
    assert _conclude(error, _Passing(), log) == 1
    assert log.read_text() == "first\nTraceback: here\n"
    assert capsys.readouterr().err == ("" if known else f"  traceback in {log}\n")
    log.unlink()
    _conclude(error, _Passing(), log)
    assert capsys.readouterr().err == "Traceback: here\n"


def test_a_signal_before_the_ranks_ends_the_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "_start", lambda *_: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr("psutil.Process.children", lambda self: [])
    assert main(["launch", "--nproc", "2", "--config", str(DEBUG)]) == 75
    assert "stopped by SIGTERM before" in capsys.readouterr().err


@pytest.mark.parametrize(
    "variables, said",
    [
        ({"WORLD_SIZE": "2"}, "RANK, MASTER_ADDR, MASTER_PORT not set"),
        ({"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}, "RANK = '2': is not valid"),
        ({"WORLD_SIZE": "1", "RANK": "first"}, "RANK = 'first': is not valid"),
        ({"WORLD_SIZE": "1", "LOCAL_RANK": "-1"}, "LOCAL_RANK = '-1': is not valid"),
        ({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "70000"}, "MASTER_PORT = '70000'"),
    ],
)
def test_a_place_that_no_launcher_gives(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert main(["--config", str(DEBUG), "--job.device=cpu"]) == 2
    assert said in capsys.readouterr().err


def test_a_machine_without_a_network_is_told_so(
    started: list, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(*_: object, **__: object) -> None:
        raise OSError(101, "Network is unreachable")

    monkeypatch.setattr("socket.create_connection", unreachable)
    assert main(["launch", "--nproc", "2", "--config", str(DEBUG)]) == 2
    assert "error: no network interface is up" in capsys.readouterr().err and not started


def test_an_interface_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from titan_prores.config.errors import MissingError
    from titan_prores.distributed import mesh

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nonesuch")
    with pytest.raises(MissingError, match="GLOO_SOCKET_IFNAME = 'nonesuch': is not a network interface here"):
        mesh.start({"dp_replicate": 1, "dp_shard": 1, "tp": 1}, torch.device("cpu"), mesh.World(0, 0, 1), 60)
    assert not torch.distributed.is_initialized()
