"""Who logs what, and where."""

import os
import pty
import re
import subprocess
import sys

import pytest

CODE = """
import sys
from pathlib import Path
from titan_prores.output import log
rank = int(sys.argv[1])
log.setup(Path(sys.argv[2]), rank, 2)
log.setup(Path(sys.argv[2]), rank, 2)
log.logger.info("step %d of %s", 3, "[bold]10")
log.logger.warning("late")
"""


def run(rank, file, **streams):
    return subprocess.run([sys.executable, "-c", CODE, str(rank), str(file)], check=True, text=True, **streams)


@pytest.mark.parametrize("rank", [0, 1])
def test_plain_lines(rank, tmp_path):
    shown = run(rank, tmp_path / "train.log", capture_output=True).stderr
    if rank == 0:
        assert re.fullmatch(r"\d\d:\d\d:\d\d step 3 of \[bold\]10\n\d\d:\d\d:\d\d warning: late\n", shown)
        run(rank, tmp_path / "train.log", capture_output=True)
        kept = (tmp_path / "train.log").read_text().splitlines()
        assert len(kept) == 4, "a second run appends"
        assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d step 3 of \[bold\]10", kept[2])
    else:
        assert re.fullmatch(r"\d\d:\d\d:\d\d \[rank 1\] warning: late\n", shown)
        assert not (tmp_path / "train.log").exists()


def test_on_a_terminal(tmp_path):
    ours, theirs = pty.openpty()
    run(0, tmp_path / "train.log", stderr=theirs)
    shown = os.read(ours, 10_000).decode()
    os.close(theirs)
    os.close(ours)
    assert "step 3 of [bold]10" in shown and "warning: late" in shown
