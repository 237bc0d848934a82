"""Full checkpoints through torch.distributed.checkpoint: verified, published whole by one rename, written meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import field_validator

from titan_prores import (
    CheckpointSection,
    ConfigError,
    PathInRun,
    ReadPath,
    disk_is_full,
    logger,
    one_of,
    register,
    setting,
)
from titan_prores.checkpoint.folder import CheckpointFolder, FileRecord, records_of

if TYPE_CHECKING:
    import torch
    from torch import nn

    from titan_prores import Mesh, RunFolder
    from titan_prores.components.checkpoint._tensors import Beside


@register("checkpoint", "dcp")
class DistributedCheckpoint:
    """Model and optimizer by torch.distributed.checkpoint, loadable on any number of ranks; complete or not there.

    A checkpoint is a folder `step-<k>`: files of DCP, which hold tensors alone, `meta.json` with everything else, and a
    manifest with size and hash of each file. It is renamed to that name once every rank's bytes are on disk and read
    back.
    """

    class Config(CheckpointSection):
        folder: PathInRun = setting("checkpoint", "folder of the checkpoints, below the run folder")
        resume: str | int = setting(
            "auto",
            'at start: "auto" = newest checkpoint or a fresh start, "must" = newest or fail, "never" = fresh start or '
            "fail, or the step to resume at",
        )
        verify: Literal["always", "sizes", "never"] = setting(
            "always",
            "check before resuming: always compares hashes of all files, sizes compares file sizes, never disables",
        )
        async_mode: Literal["disabled", "thread", "process"] = setting(
            "disabled",
            "disabled: training waits until the checkpoint is saved. thread: copies the rank's weights and optimizer "
            "state to CPU memory and saves them in a background thread. process: as thread, but saves in a separate "
            "low-priority process, which does not share Python's interpreter lock and takes about 300 MB more per rank",
        )
        init_from: ReadPath | None = setting(
            None,
            "folder of a checkpoint, step-<k>, to initialize weights from at a fresh start; optimizer, data and step "
            "start anew",
        )
        init_from_missing: tuple[str, ...] = setting(
            (), "patterns of parameters that may be missing from init_from; they are initialized as usual"
        )
        keep_latest_k: int = setting(10, "keep the K most recent checkpoints; 0 keeps all", ge=0)
        keep_every_steps: int = setting(
            0, "also keep the checkpoint of every N-th step; 0 disables", unit="optimizer steps", ge=0
        )
        keep_best_k: int = setting(
            0, "also keep the K checkpoints with the lowest validation loss, of validated steps; 0 disables", ge=0
        )

        def weights_from(self) -> str | None:
            return self.init_from

        def needs_validation(self) -> str | None:
            return "keep_best_k" if self.keep_best_k else None

        @field_validator("resume")
        @classmethod
        def _known_choice(cls, value: str | int) -> str | int:
            if isinstance(value, int):
                if value < 1:
                    raise ValueError("not a step of a checkpoint (allowed: auto, must, never, or a step from 1)")
                return value
            return one_of(value, ("auto", "must", "never"))

        @field_validator("folder")
        @classmethod
        def _below_the_run_folder(cls, value: str) -> str:
            path = Path(value)
            if path.is_absolute() or ".." in path.parts or path == Path():
                raise ValueError("is not below the run folder (allowed: a name such as checkpoint)")
            return value

        @field_validator("async_mode")
        @classmethod
        def _possible_here(cls, value: str) -> str:
            if value == "process" and not hasattr(os, "memfd_create"):
                raise ValueError("needs memory in files without a name, which this system lacks (allowed: thread)")
            return value

    def __init__(self, config: Config, *, run: RunFolder, mesh: Mesh) -> None:
        self.config, self.mesh, self.run = config, mesh, run
        self.folder = CheckpointFolder(run.path / config.folder)
        self._beside: Beside | None = None  # what writes while training goes on; kept, its memory is dear to get
        self._staged: Future | None = None  # the copy that the writer is waiting for
        self._written: Future | None = None  # a save that goes on while training does
        if config.async_mode != "disabled":
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
            self._group = mesh.new_group()  # collectives of two threads must not meet in one group

    # --- Where to start -------------------------------------------------------------------------------------------

    def choose(self) -> tuple[int | None, str]:
        candidates, reason = self.mesh.on_main(self._candidates)
        self.mesh.on_main(self._check_writable)
        damaged = []
        for step in candidates:
            problems = self._problems(step)
            if not problems:
                found = f"resuming at step {step}, {reason}"
                return step, found + (f"; damaged: {', '.join(damaged)}" if damaged else "")
            logger.warning("checkpoint of step %d is damaged: %s", step, "; ".join(problems[:3]))
            damaged.append(f"step {step}")
        if not candidates:
            return None, reason
        raise ConfigError(
            "resume",
            f"no checkpoint is whole ({', '.join(damaged)} in {self.folder.path}); the log names the files",
            value=self.config.resume,
            allowed="another step, or checkpoint.verify = never to read them all the same",
        )

    def _check_writable(self) -> None:
        """Raise ConfigError where the first save would fail, steps later."""
        try:
            self.folder.path.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.folder.path):
                pass
        except OSError as error:
            if disk_is_full(error):
                return  # there may be room by then, and resuming needs none
            raise ConfigError(
                "folder", f"{self.folder.path} cannot be written: {error.strerror}", value=self.config.folder
            ) from error

    def last_good(self) -> int | None:
        steps = self.mesh.on_main(self.folder.finite)
        return next((step for step in reversed(steps) if not self._problems(step)), None)

    def _candidates(self) -> tuple[list[int], str]:
        """Steps to try, in this order, with why the first that is whole is taken; none, with the reason, to start at 0.

        Raises:
            ConfigError: what the recipe asks for is not there, or there is something in its way.
        """
        path = self.folder.path
        if path.exists() and not path.is_dir():
            raise ConfigError("folder", f"{path} is not a folder", value=self.config.folder)
        try:
            resume, steps = self.config.resume, self.folder.steps()
        except OSError as error:
            raise ConfigError("folder", f"{path} cannot be read: {error.strerror}", value=self.config.folder) from error
        if isinstance(resume, int) and int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):
            resume = "auto"  # torchrun has started this run again, which had resumed there and gone on
        present = f"{path} has {'steps ' + ', '.join(map(str, steps)) if steps else 'no checkpoint'}"
        if isinstance(resume, int):
            if resume not in steps:
                raise ConfigError("resume", f"there is no checkpoint of this step: {present}", value=resume)
            return [resume], "as checkpoint.resume says"
        if resume == "never":
            if steps:
                raise ConfigError(
                    "resume",
                    f"would start again at step 0 over existing checkpoints: {present}",
                    value=resume,
                    allowed='"auto" to go on, or another job.dump_folder to start afresh',
                )
            return [], "starting at step 0, as checkpoint.resume = never says"
        if steps:
            return steps[::-1], f"the newest of {len(steps)} in {path}"
        if resume == "must":
            raise ConfigError("resume", f"there is nothing to resume: {present}", value=resume)
        return [], f"starting at step 0: {present}"

    def _problems(self, step: int) -> list[str]:
        """What is wrong with a checkpoint, found by all ranks together; the same on all of them."""
        if self.config.verify == "never":
            return []
        mine = self.folder.problems(
            step, hashes=self.config.verify == "always", part=self.mesh.rank, parts=self.mesh.size
        )
        return [problem for found in self.mesh.gather(mine) for problem in found]

    def read_meta(self, step: int) -> dict[str, Any]:
        return self.mesh.on_main(lambda: self._read_meta(step))

    def _read_meta(self, step: int) -> dict[str, Any]:
        try:
            return self.folder.meta(step)
        except ValueError as error:
            advice = f"move {self.folder.at(step)} away to resume at another"
            raise ConfigError("resume", f"{error}; {advice}", value=step) from error

    def load(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        from titan_prores.components.checkpoint import _tensors

        try:
            _tensors.load(self.folder.at(step), model, optimizer)
        except RuntimeError as error:
            raise RuntimeError(f"checkpoint of step {step} cannot be read: {error}") from error
        self.mesh.on_main(lambda: self._set_aside([other for other in self.folder.steps() if other > step]))

    def _set_aside(self, steps: list[int]) -> None:
        """Move checkpoints out of the way: the run takes another course than the one they are of."""
        if aside := self.folder.set_aside(steps):
            logger.info("checkpoints of steps %s moved to %s", ", ".join(map(str, steps)), aside)

    def initialize(self, model: nn.Module) -> None:
        if self.config.init_from is None:
            return
        from titan_prores.components.checkpoint import _tensors

        path = Path(self.config.init_from)
        try:
            _tensors.load_weights(path, model, self.config.init_from_missing)
        except (RuntimeError, OSError) as error:
            raise ConfigError("init_from", f"cannot be taken: {error}", value=str(path)) from error
        logger.info("weights taken from %s", path)

    def initial_meta(self) -> dict[str, Any]:
        if self.config.init_from is None:
            return {}
        return self.mesh.on_main(lambda: self._source_meta(Path(self.config.init_from)))

    def _source_meta(self, path: Path) -> dict[str, Any]:
        """Meta of the checkpoint at `path`. Raises ConfigError unless it is a whole one."""
        if (found := CheckpointFolder.containing(path)) is None:
            raise ConfigError("init_from", "not a checkpoint", value=str(path), allowed="a folder step-<k>")
        folder, step = found
        if problems := folder.problems(step, hashes=self.config.verify == "always"):
            raise ConfigError("init_from", f"is damaged: {problems[0]}", value=str(path))
        return folder.meta(step)

    # --- Saving ---------------------------------------------------------------------------------------------------

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, meta: Mapping[str, Any]) -> None:
        from titan_prores.components.checkpoint import _tensors

        self.finish()
        folder = self.mesh.on_main(lambda: self.folder.prepare(step))
        state = _tensors.state(model, optimizer)
        if self.config.async_mode == "disabled":
            self._write(step, folder, lambda: _tensors.save(folder, state), records_of, meta, self.mesh.gather)
            return
        if self._beside is None:
            self._beside = _tensors.Beside(self._group, own_process=self.config.async_mode == "process")
        self._beside.start()
        self._staged = self._beside.stage(state)
        self._written = self._thread.submit(self._write_staged, step, folder, self._staged, meta)

    def _write_staged(self, step: int, folder: Path, staged: Future, meta: Mapping[str, Any]) -> None:
        self._write(
            step,
            folder,
            lambda: self._beside.save(folder, staged.result()),
            self._beside.records_of,
            meta,
            lambda value: self.mesh.gather(value, self._group),
        )

    def _write(
        self,
        step: int,
        folder: Path,
        save: Callable[[], None],
        read_back: Callable[[Path, int], dict[str, FileRecord]],
        meta: Mapping[str, Any],
        gather: Callable[[Any], list[Any]],
    ) -> None:
        """Write, read back and publish. Collective; raises on all ranks what one of them met."""
        try:
            save()
            records, problem = {}, None
            try:
                records = read_back(folder, self.mesh.rank)
            except (OSError, RuntimeError) as error:
                problem = f"rank {self.mesh.rank}: {error}"
            found = gather((records, problem))
            problems = [problem for _, problem in found if problem]
            if not problems and self.mesh.is_main:
                try:
                    self._publish(step, meta, {name: each for records, _ in found for name, each in records.items()})
                except (OSError, RuntimeError) as error:
                    problems = [str(error)]
            # So that no rank goes on for whom there is no checkpoint.
            if problems := gather(problems)[0] or problems:
                raise RuntimeError("; ".join(problems))
        except (OSError, RuntimeError) as error:
            if self.mesh.is_main:
                shutil.rmtree(folder, ignore_errors=True)  # it may be what fills the disk
            raise RuntimeError(f"checkpoint of step {step} cannot be written: {error}") from error

    def _publish(self, step: int, meta: Mapping[str, Any], records: dict[str, Any]) -> None:
        path = self.folder.publish(step, meta, records)
        self.run.note_checkpoint(path)
        logger.info("checkpoint of step %d in %s", step, path)
        config = self.config
        # A validation that a signal had cut short is made up for after its step was saved: only a row has its loss.
        rows = self.run.validations() if config.keep_best_k else {}
        losses = {step: row.get("validation_loss") for step, row in rows.items()}
        for old in self.folder.expendable(config.keep_latest_k, config.keep_every_steps, config.keep_best_k, losses):
            self.folder.remove(old)

    def before_update(self) -> None:
        if self._staged is not None:
            self._staged.result()  # the optimizer is about to change what is being copied
            self._staged = None
        if self._written is not None and self._written.done():
            self.finish()

    def finish(self) -> None:
        written, self._written, self._staged = self._written, None, None
        if written is not None:
            written.result()
