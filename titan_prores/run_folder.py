"""The run folder (`job.dump_folder`): what a run leaves behind, and that no second run writes into it.

Holds recipe.toml, env.json, train.log, metrics.jsonl, tensorboard/ and checkpoint/. Imports torch only to name devices.
"""

from __future__ import annotations

import datetime
import errno
import importlib.metadata
import json
import math
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock
import tomli_w

from titan_prores.config import one_line
from titan_prores.errors import ConfigError
from titan_prores.log import logger
from titan_prores.recipe import Recipe

PACKAGES = ("titan-prores", "torch", "torchao", "torchdata", "numpy")


class RunFolder:
    """Paths of a run, and the few files that the engine itself writes. Making one touches nothing.

    Args:
        path: the folder; need not exist.
        is_main: whether this is the one process (rank 0) that writes; in the others every method does nothing.
    """

    def __init__(self, path: Path, *, is_main: bool) -> None:
        self.path = Path(path)
        self.is_main = is_main
        self._lock: filelock.BaseFileLock | None = None

    @property
    def recipe_file(self) -> Path:
        return self.path / "recipe.toml"

    @property
    def env_file(self) -> Path:
        return self.path / "env.json"

    @property
    def log_file(self) -> Path:
        return self.path / "train.log"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def _lock_file(self) -> Path:
        return self.path / "run.lock"

    @property
    def held(self) -> bool:
        """Whether a live run has the folder open."""
        if not self._lock_file.exists():
            return False
        try:
            with filelock.FileLock(self._lock_file, timeout=0):
                return False
        except filelock.Timeout:
            return True
        except (OSError, NotImplementedError):
            return False

    def open(self) -> None:
        """Create the folder and hold it until `close` or the end of the process.

        Raises:
            ConfigError: it cannot be created or written, or another live run holds it.
        """
        if not self.is_main:
            return
        lock = filelock.FileLock(self._lock_file, timeout=0)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except filelock.Timeout:
            raise self._error("another run that is still alive writes into this folder") from None
        except NotImplementedError:
            logger.warning("the file system of %s has no locks: nothing stops a second run there", self.path)
        except OSError as error:
            raise self._error(f"cannot be written: {error.strerror}") from error
        self._lock = lock
        for left in self.path.glob("*.[0-9]*.tmp"):  # by a writer that was killed
            left.unlink(missing_ok=True)

    def close(self) -> None:
        """Let another run have the folder. Safe to call twice, or without `open`."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def write_file(self, name: str, content: bytes) -> None:
        """Write a file of some component's, whole or not at all, in place of the one of that name."""
        if self.is_main:
            write_atomically(self.path / name, content)

    def note_checkpoint(self, path: Path) -> None:
        """Remember the newest checkpoint, whoever wrote it."""
        if self.is_main:
            write_atomically(self.path / "latest_checkpoint", (os.path.relpath(path, self.path) + "\n").encode())

    def noted_checkpoint(self) -> Path | None:
        """The newest checkpoint that was noted, if it is still there."""
        try:
            path = self.path / (self.path / "latest_checkpoint").read_text(encoding="utf-8").strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return None
        return path if os.path.exists(path) else None  # unlike Path's, never raises on a name that no file can have

    def write_status(self, state: str, step: int, **facts: Any) -> None:
        """Write status.json, for schedulers: torchrun turns every failure of a rank into its own exit status 1.

        Args:
            state: running, finished, stopped (by a signal, everything saved) or failed.
            step: completed updates.
            facts: anything else to say, JSON-ready.
        """
        if self.is_main and self.path.is_dir():
            now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
            status = {"state": state, "step": step, **facts, "time": now}
            file, content = self.path / "status.json", (json.dumps(status, indent=1) + "\n").encode()
            try:
                write_atomically(file, content)
            except OSError as error:
                if not disk_is_full(error) or not file.exists():
                    raise
                with file.open("r+b") as stream:  # the blocks that it has are still its own
                    stream.write(content)
                    stream.truncate()

    def note_start(self, recipe: Recipe, mesh: Mapping[str, int], step: int) -> None:
        """Write what runs here from `step` on: recipe, surroundings with the mesh's degrees, status."""
        self.write_recipe(recipe)
        self.write_env(mesh)
        self.write_status("running", step)

    def write_recipe(self, recipe: Recipe) -> None:
        """Write the resolved recipe, every default filled in, each value with where it came from.

        The file is a recipe itself. One with other content that is already there is kept as recipe.1.toml and so on.
        """
        if self.is_main:
            self._replace(self.recipe_file, annotated_toml(recipe))

    def write_env(self, mesh: Mapping[str, int], extra: Mapping[str, Any] | None = None) -> None:
        """Write what the run ran on; an earlier one is kept as env.1.json and so on.

        Args:
            mesh: axis -> degree.
            extra: further JSON-ready facts.
        """
        if self.is_main:
            facts = {**environment(), "mesh": dict(mesh), **(extra or {})}
            self._replace(self.env_file, json.dumps(facts, indent=2) + "\n")

    def set_aside_metrics(self, step: int) -> int:
        """Move the rows of metrics.jsonl past `step` to metrics.after-step-<step>.jsonl, so that a step occurs once.

        Lines at the end that are no rows, as a killed writer or a power failure leaves, are dropped. No row is lost,
        however often a run resumes: the side file of an earlier time is kept beside the new one, and it is on disk
        before metrics.jsonl is replaced.

        Returns:
            The number of rows moved.
        """
        if not self.is_main or not self.metrics_file.exists():
            return 0
        data = self.metrics_file.read_bytes()
        lines = data.splitlines(keepends=True)
        while lines and _row_step(lines[-1]) is None:
            lines.pop()
        if lines and not lines[-1].endswith(b"\n"):
            lines[-1] += b"\n"
        kept = [line for line in lines if (_row_step(line) or 0) <= step]
        moved = [line for line in lines if (_row_step(line) or 0) > step]
        if moved:
            side = _unused(lambda n: self.path / f"metrics.after-step-{step}{f'.{n}' if n else ''}.jsonl")
            write_atomically(side, b"".join(moved))
        if (content := b"".join(kept)) != data:
            write_atomically(self.metrics_file, content)
        return len(moved)

    def validations(self) -> dict[int, dict[str, Any]]:
        """Step -> row of metrics.jsonl, of every validation."""
        rows = (row for row in read_rows(self.metrics_file, having=b'"validation"') if row.get("validation"))
        return {row["step"]: row for row in rows if isinstance(row.get("step"), int)}

    def _replace(self, file: Path, text: str) -> None:
        content = text.encode()
        if file.exists():
            if file.read_bytes() == content:
                return
            file.rename(_unused(lambda n: file.with_name(f"{file.stem}.{n}{file.suffix}"), first=1))
        write_atomically(file, content)

    def _error(self, problem: str) -> ConfigError:
        return ConfigError("job.dump_folder", problem, value=str(self.path))


def read_rows(file: Path, having: bytes = b"") -> Iterator[dict[str, Any]]:
    """Rows of a metrics.jsonl, in their order; lines that are none are skipped, and so is a file that is not there.

    Numbers that are not finite are the strings that `float` takes.

    Args:
        file: the metrics.jsonl.
        having: skip lines without these bytes, which costs less than reading them.
    """
    if file.exists():
        with file.open("rb") as lines:
            for line in lines:
                if having in line and _row_step(line) is not None:
                    yield json.loads(line)


def plain(value: Any) -> Any:
    """Strict JSON's nearest to `value`: tensor and array scalars as numbers, the not finite as strings."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    if hasattr(value, "tolist"):  # tensors and numpy's arrays and scalars
        return plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def disk_is_full(error: OSError) -> bool:
    """Whether a write failed for lack of room, on the disk or within a quota."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


def write_atomically(file: Path, content: bytes) -> None:
    """Leave either the old file or the new one whole on disk, wherever the machine stops and whoever else writes it.

    Its folder is made where there is none.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    temporary = file.with_name(f"{file.name}.{socket.gethostname()}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(file)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _row(line: bytes) -> dict[str, Any] | None:
    """A row of metrics.jsonl; None where the line is no JSON object."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) else None


def _row_step(line: bytes) -> int | None:
    """Step of a row, 0 when it has none; None where the line is no JSON object."""
    if (row := _row(line)) is None:
        return None
    step = row.get("step")
    return step if isinstance(step, int) else 0


def _unused(name: Callable[[int], Path], first: int = 0) -> Path:
    """The first path of name(first), name(first + 1) ... that does not exist."""
    number = first
    while name(number).exists():
        number += 1
    return name(number)


_TABLE = re.compile(r"^\[(?P<array>\[?)(?P<name>.+?)\]+$")
_KEY = re.compile(r"^(?P<name>[\w-]+|\"(?:[^\"\\]|\\.)*\") = ")


def annotated_toml(recipe: Recipe) -> str:
    """The resolved recipe as TOML, every value followed by a comment that says where it came from."""
    lines, table, array = [], "", None
    for line in tomli_w.dumps(recipe.to_dict()).split("\n")[:-1]:
        # tomli_w starts keys and headers in the first column and indents what continues a value.
        origin = None
        if found := _TABLE.match(line):
            table = found["name"]
            if found["array"]:
                array = table
                origin = recipe.origins.get(table, "default")
            elif array and not table.startswith(f"{array}."):
                array = None
        elif (found := _KEY.match(line)) and array is None:
            name = found["name"]
            origin = recipe.origins.get(f"{table}.{name}" if table else name, "default")
        lines.append(f"{line}  # {one_line(origin)}" if origin else line)
    return "\n".join(lines) + "\n"


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
        "git": git_state(Path(__file__).resolve().parent.parent),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in PACKAGES}},
    }


def git_state(checkout: Path) -> dict[str, Any] | None:
    """Commit and whether tracked files differ from it; None where `checkout` is not the root of a git checkout."""
    try:
        # An installed package may lie in somebody else's checkout: its commit would say nothing about this code.
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
