"""Output never ends a command, whatever becomes of it, and faults of the input end it in a line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from titan_prores.config.errors import ConfigError, ConfigErrors
from titan_prores.output.shell import run_command

REPOSITORY = Path(__file__).parents[3]
SAY = """
import contextlib, os, sys
from titan_prores.output.shell import run_command

def command():
    opened = open(sys.argv[1], "w")
    for number in range(20_000):
        print("caf\\u00e9 \\udcff", number)
    print("caf\\u00e9", file=sys.stderr, flush=True)
    with contextlib.suppress(OSError):  # as a library of C does
        os.write(1, b"raw")
        os.write(2, b"raw")
    opened.write("went on")
    return 7

if len(sys.argv) > 2:
    del run_command
    sys.exit(command())
sys.exit(run_command(command))
"""


@pytest.mark.parametrize(
    "how", ["$RUN", "$RUN >&-", "$RUN 2>&-", "$RUN <&- >&- 2>&-", "$RUN >/dev/full 2>&1", "{ $RUN; echo $? >&3; } | :"]
)
@pytest.mark.parametrize("encoding, unbuffered", [("ascii", ""), ("utf-8", ""), ("ascii", "1")])
def test_a_command_goes_on_whatever_becomes_of_its_output(
    how: str, encoding: str, unbuffered: str, tmp_path: Path
) -> None:
    file = tmp_path / "file"
    run = f"'{sys.executable}' -c '{SAY}' '{file}'"
    shell = f"exec 3>&1; {how.replace('$RUN', run)}"
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONPATH": str(REPOSITORY), "LANG": "C"}
    environment["PYTHONUNBUFFERED"] = unbuffered
    done = subprocess.run(["bash", "-c", shell], capture_output=True, env=environment, cwd=REPOSITORY, timeout=60)
    status = int(done.stdout.split()[-1]) if "echo" in how else done.returncode
    assert status == 7, done.stderr.decode()
    assert file.read_text() == "went on", "a closed stream's number went to a file"
    assert b"Traceback" not in done.stderr and b"Exception" not in done.stderr
    if how == "$RUN":
        shown = b"caf\\xe9 \\udcff 19999" if encoding == "ascii" else "café \\udcff 19999".encode()
        assert shown in done.stdout


def test_without_that_output_ends_it(tmp_path: Path) -> None:
    """The control: the same command on Python's own streams."""
    arguments = [sys.executable, "-c", SAY, str(tmp_path / "file"), "bare"]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(arguments, capture_output=True, env=environment, timeout=60)
    assert done.returncode == 1 and b"UnicodeEncodeError" in done.stderr


def test_streams_that_a_caller_has_put_there_stay(capsys: pytest.CaptureFixture[str]) -> None:
    ours = sys.stdout
    assert run_command(lambda: print("seen") or 0) == 0
    assert sys.stdout is ours and capsys.readouterr().out == "seen\n"


@pytest.mark.parametrize(
    "error, status, said",
    [
        (ConfigError("a.b", "is wrong"), 2, "error: a.b: is wrong\n"),
        (ConfigErrors([ConfigError("a", "x"), ConfigError("b", "y")]), 2, "error: a: x\nerror: b: y\n2 errors\n"),
        (PermissionError(13, "Permission denied", "/there"), 2, "error: /there: Permission denied\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_what_ends_a_command(error: BaseException, status: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def fail() -> int:
        raise error

    assert run_command(fail) == status
    assert capsys.readouterr().err == said


def test_faults_of_the_code_keep_their_traceback() -> None:
    with pytest.raises(OSError, match="no file is named"):
        run_command(lambda: (_ for _ in ()).throw(OSError("no file is named")))
