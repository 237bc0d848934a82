"""What scripts/slurm.sh hands on, with srun and scontrol that only write down what they are given."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from titan_prores.tools.launch import parser as launcher_options

SCRIPT = Path(__file__).parents[3] / "scripts" / "slurm.sh"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


def submitted(folder: Path, *arguments: str) -> list[str]:
    """The command line that srun gets, from a checkout in a folder with a blank in its name."""
    checkout, programs = folder / "a checkout", folder / "programs"
    for made in (checkout, programs):
        made.mkdir()
    for name, body in {
        "srun": f"""printf '%s\\0' "$@" > '{folder}/given'; pwd > '{folder}/where'""",
        "scontrol": f"""printf '%s\\n' "$@" > '{folder}/asked'; printf 'first-node\\nsecond-node\\n'""",
    }.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    environment = {
        "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
        "HOME": str(folder / "home"),
        "SLURM_SUBMIT_DIR": str(checkout),
        "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_GPUS_ON_NODE": "8",
    }
    subprocess.run(["bash", str(SCRIPT), *arguments], env=environment, check=True, timeout=30)
    assert (folder / "where").read_text().strip() == str(checkout) and not list(checkout.iterdir())
    assert (folder / "asked").read_text().split() == ["show", "hostnames", "node-[1-2]"]
    return (folder / "given").read_text().split("\0")[:-1]


def test_arguments_arrive_as_they_were_given(tmp_path: Path) -> None:
    """Blanks, quotes, globs and what a shell would run are no matter of this script."""
    arguments = [
        "--config",
        "my recipes/run one.toml",
        "--job.description=$(touch ran) `touch ran` ; touch ran",
        "--dataset.files=['data/**/*.jsonl', \"$HOME/x y.txt\"]",
        "--job.dump_folder=~/run",
        "",
        "*",
        "a\nb",
        "\\",
        "'",
    ]
    given = submitted(tmp_path, *arguments)
    at = given.index("first-node:21234")
    assert given[at + 1 :] == arguments
    assert not list(tmp_path.rglob("ran"))


def test_one_launcher_a_node_that_meets_at_the_first(tmp_path: Path) -> None:
    given = submitted(tmp_path, "--config", "x.toml")
    assert given[:5] == ["--ntasks-per-node=1", "--kill-on-bad-exit=1", "python", "scripts/train.py", "launch"]
    options, rest = launcher_options().parse_known_args(given[5:])
    assert rest == ["--config", "x.toml"]
    assert (options.nnodes, options.nproc, options.rdzv_id) == (2, 8, "41234")
    assert options.rdzv_endpoint == "first-node:21234"
