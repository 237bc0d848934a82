"""What a run ran on: packages, hardware, commit."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("titan-prores", "torch", "torchao", "torchdata", "numpy")


def environment() -> dict[str, Any]:
    """What is worth knowing about a run's surroundings when its numbers are questioned; JSON-ready."""
    import torch

    cuda = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "start_time": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command_line": shlex.join([sys.executable, *sys.argv]),
        "working_directory": os.getcwd(),
        "host": socket.gethostname(),
        "platform": platform.platform(),
        "cpu": _cpu_name(),
        "cpu_count": os.cpu_count(),
        "cuda_devices": cuda,
        "cuda": torch.version.cuda,
        "git": git_state(Path(__file__).resolve().parents[2]),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def git_state(checkout: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None where `checkout` is not the root of a git checkout."""
    try:
        # An installed package may lie in a checkout of another project, whose commit says nothing about this code.
        if Path(_git(checkout, "rev-parse", "--show-toplevel")) != checkout:
            return None
        dirty = _git(checkout, "status", "--porcelain", "--untracked-files=no") != ""
        return {"commit": _git(checkout, "rev-parse", "HEAD"), "dirty": dirty}
    except (OSError, subprocess.SubprocessError):
        return None


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=30
    )
    return done.stdout.strip()


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        if package == "titan-prores":  # used from a checkout, not installed
            from titan_prores import __version__

            return __version__
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
