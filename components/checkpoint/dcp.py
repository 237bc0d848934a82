"""Full checkpoints through torch.distributed.checkpoint, published whole by one rename."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import field_validator

from titan_prores.config import one_of, setting
from titan_prores.errors import ConfigError
from titan_prores.log import logger
from titan_prores.protocols import CheckpointSection
from titan_prores.registry import register

if TYPE_CHECKING:
    import torch
    from torch import nn

    from titan_prores.mesh import Mesh
    from titan_prores.run_folder import RunFolder

_ALWAYS_THERE = ("meta.json", ".metadata")
_STEP = re.compile(r"step-(\d{8,})")


@register("checkpoint", "dcp")
class DistributedCheckpoint:
    """Model and optimizer by torch.distributed.checkpoint, loadable on any number of ranks; published by one rename.

    A checkpoint is a folder `step-<k>`: files of DCP, which hold tensors alone, and `meta.json` with everything else.
    It is written under another name and renamed when it is complete, so a folder of that name is always whole.
    """

    class Config(CheckpointSection):
        folder: str = setting("checkpoint", "below the run folder")
        resume: str | int = setting(
            "auto",
            'at start: "auto" = newest checkpoint or a fresh start, "must" = newest or fail, "never" = fresh start or '
            "fail, or the step to resume at",
        )
        keep_latest_k: int = setting(10, "delete older checkpoints than the last so many; 0 = keep all", ge=0)

        @field_validator("resume")
        @classmethod
        def _known_choice(cls, value: str | int) -> str | int:
            if isinstance(value, int):
                if value < 1:
                    raise ValueError("is no step of a checkpoint (allowed: auto, must, never, or a step from 1)")
                return value
            return one_of(value, ("auto", "must", "never"))

    def __init__(self, config: Config, *, run: RunFolder, mesh: Mesh) -> None:
        self.config, self.mesh = config, mesh
        self.folder = run.path / config.folder

    def steps(self) -> list[int]:
        """Steps that there are whole checkpoints of, ascending."""
        if not self.folder.is_dir():
            return []
        named = [_STEP.fullmatch(entry.name) for entry in self.folder.iterdir()]
        found = [int(match.group(1)) for match in named if match]
        whole = [step for step in found if all((self._path(step) / name).is_file() for name in _ALWAYS_THERE)]
        return sorted(set(whole))

    def choose(self) -> tuple[int | None, str]:
        return self.mesh.on_main(self._choose)

    def _choose(self) -> tuple[int | None, str]:
        if self.folder.exists() and not self.folder.is_dir():
            raise ConfigError("folder", f"{self.folder} is no folder", value=self.config.folder)
        resume, steps = self.config.resume, self.steps()
        present = f"{self.folder} has {'steps ' + ', '.join(map(str, steps)) if steps else 'no checkpoint'}"
        if isinstance(resume, int):
            if resume not in steps:
                raise ConfigError("resume", f"there is no checkpoint of this step: {present}", value=resume)
            return resume, f"resuming at step {resume}, as checkpoint.resume says"
        if resume == "never":
            if steps:
                raise ConfigError(
                    "resume", f"would start again at step 0 over existing checkpoints: {present}", value=resume,
                    allowed='"auto" to go on, or another job.dump_folder to start afresh',
                )  # fmt: skip
            return None, "starting at step 0, as checkpoint.resume = never says"
        if steps:
            return steps[-1], f"resuming at step {steps[-1]}, the newest of {len(steps)} in {self.folder}"
        if resume == "must":
            raise ConfigError("resume", f"there is nothing to resume: {present}", value=resume)
        return None, f"starting at step 0: {present}"

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def read_meta(self, step: int) -> dict[str, Any]:
        return self.mesh.on_main(lambda: self._read_meta(self._path(step) / "meta.json", step))

    def _read_meta(self, path: Path, step: int) -> dict[str, Any]:
        advice = f"move {path.parent} away to resume at another"
        try:
            meta = json.loads(path.read_text(encoding="utf-8"))
            found = meta["step"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError("resume", f"{path} is not what a save writes: {error}; {advice}", value=step) from error
        if found != step:
            raise ConfigError("resume", f"{path.parent} holds step {found}; {advice}", value=step)
        return meta

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from components.checkpoint import _tensors

        try:
            _tensors.load(self._path(step), model, optimizer)
        except RuntimeError as error:
            raise RuntimeError(f"checkpoint of step {step} cannot be read: {error}") from error
        self.mesh.on_main(lambda: self._set_aside([other for other in self.steps() if other > step]))

    def _set_aside(self, steps: list[int]) -> None:
        """Move checkpoints out of the way: the run takes another course than the one they are of."""
        if not steps:
            return
        aside = next(p for n in range(1, 10**6) if not (p := self.folder / f"set-aside-{n}").exists())
        aside.mkdir()
        for step in steps:
            self._path(step).rename(aside / self._path(step).name)
        logger.info("checkpoints of steps %s moved to %s", ", ".join(map(str, steps)), aside)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, meta: Mapping[str, Any]) -> Path:
        unfinished = self.folder / f".unfinished-step-{step:08d}"
        self.mesh.on_main(lambda: self._prepare(unfinished, step))
        from components.checkpoint import _tensors

        try:
            try:
                _tensors.save(unfinished, model, optimizer)
            except RuntimeError as error:
                raise RuntimeError(f"checkpoint of step {step} cannot be written: {error}") from error
            self.mesh.on_main(lambda: self._publish(unfinished, step, meta))
        except BaseException:
            if self.mesh.is_main:
                shutil.rmtree(unfinished, ignore_errors=True)  # it may be what fills the disk
            raise
        return self._path(step)

    def _prepare(self, unfinished: Path, step: int) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._path(step).exists():  # no whole one, or the run would have started there
            self._set_aside([step])
        for leftover in self.folder.glob(".unfinished-*"):
            shutil.rmtree(leftover)
        unfinished.mkdir()

    def _publish(self, unfinished: Path, step: int, meta: Mapping[str, Any]) -> None:
        with open(unfinished / "meta.json", "w", encoding="utf-8") as file:
            json.dump(meta, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(unfinished)
        unfinished.rename(self._path(step))
        _sync_folder(self.folder)
        keep = self.config.keep_latest_k
        for old in self.steps()[:-keep] if keep else []:
            doomed = self.folder / f".unfinished-removal-{old}"
            self._path(old).rename(doomed)  # half a checkpoint must not look like one
            shutil.rmtree(doomed)


def _sync_folder(folder: Path) -> None:
    """Make renames and new files of a folder last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
