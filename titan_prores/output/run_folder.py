"""The run folder (`job.dump_folder`): what a run leaves behind, and that no second run writes into it.

Holds recipe.toml, env.json, train.log, metrics.jsonl, tensorboard/ and checkpoint/. Imports torch only to name devices.
"""

from __future__ import annotations

import datetime
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import filelock

from titan_prores.config.errors import ConfigError
from titan_prores.config.recipe import Recipe
from titan_prores.output.environment import environment
from titan_prores.output.files import disk_is_full, write_atomically
from titan_prores.output.log import logger
from titan_prores.output.recipe_file import annotated_toml
from titan_prores.output.rows import _row_step, read_rows


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
        """Remember the newest checkpoint of any writer."""
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

        Lines at the end that are not rows, as a killed writer or a power failure leaves, are dropped. No row is lost,
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


def _unused(name: Callable[[int], Path], first: int = 0) -> Path:
    """The first path of name(first), name(first + 1) ... that does not exist."""
    number = first
    while name(number).exists():
        number += 1
    return name(number)
