"""The folder that holds a run's checkpoints: which there are, whether they are whole, which may go."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from titan_prores.config.renamed_keys import with_new_keys

MANIFEST, META = "manifest.json", "meta.json"
# What a manifest must know besides, and what of the run's own facts is read before a checkpoint is taken.
NEEDED = (".metadata",)
META_TYPES = {"samples": int, "global_batch_size": int, "recipe": dict, "mesh": dict}
_STEP = re.compile(r"step-(\d{8,})")
_BLOCK_BYTES = 1 << 22


@dataclass(frozen=True)
class FileRecord:
    """What a file held when it was written."""

    bytes: int
    sha256: str


def record(path: Path) -> FileRecord:
    """Read a file and say what it holds."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            size += len(block)
    return FileRecord(size, digest.hexdigest())


def records_of(folder: Path, rank: int) -> dict[str, FileRecord]:
    """What a rank wrote, read back: name -> size and hash. Rank 0 has DCP's own metadata as well."""
    mine = [path for path in folder.iterdir() if path.name.startswith(f"__{rank}_")]
    return {path.name: record(path) for path in [*mine, *([folder / ".metadata"] if rank == 0 else [])]}


class CheckpointFolder:
    """Checkpoints are folders `step-<k>`, each with a manifest of its files: their sizes and hashes.

    One is written under another name and renamed once it is complete, so a folder of that name was whole when it was
    written. What has happened to it since is what `problems` tells.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    @classmethod
    def containing(cls, path: Path) -> tuple[CheckpointFolder, int] | None:
        """The folder that a checkpoint's own folder lies in, and the checkpoint's step; None where it is none."""
        path = Path(path).resolve()
        folder = cls(path.parent)
        return next(((folder, step) for step in folder.steps() if folder.at(step) == path), None)

    def steps(self) -> list[int]:
        """Steps that there are checkpoints of, damaged ones too, ascending."""
        if not self.path.is_dir():
            return []
        named = [(entry, _STEP.fullmatch(entry.name)) for entry in self.path.iterdir()]
        steps = {int(match.group(1)) for entry, match in named if match and entry.is_dir()}
        return sorted(step for step in steps if self.at(step).is_dir())  # one number has one spelling

    def at(self, step: int) -> Path:
        """Folder of a checkpoint, there or not."""
        return self.path / f"step-{step:08d}"

    def unfinished(self, step: int) -> Path:
        """Where a checkpoint is written until it is complete."""
        return self.path / f".unfinished-step-{step:08d}"

    # --- Writing --------------------------------------------------------------------------------------------------

    def prepare(self, step: int) -> Path:
        """Make the folder to write into; leftovers of saves that were killed go."""
        self.path.mkdir(parents=True, exist_ok=True)
        for leftover in self.path.glob(".unfinished-*"):
            _delete(leftover)
        self.unfinished(step).mkdir()
        return self.unfinished(step)

    def publish(self, step: int, meta: Mapping[str, Any], records: Mapping[str, FileRecord]) -> Path:
        """Add meta and manifest to what was written, get everything onto the disk and give it its name.

        Args:
            step: of the checkpoint.
            meta: JSON-ready.
            records: of every file that the ranks have written, by name.

        Raises:
            RuntimeError: the folder does not hold the files that the ranks say they have written.
        """
        folder = self.unfinished(step)
        _write_durably(folder / META, json.dumps(meta, indent=1))
        files = {**records, META: record(folder / META)}
        if wrong := sorted({entry.name for entry in folder.iterdir()} ^ files.keys()):
            raise RuntimeError(f"{folder} and the files that the ranks wrote differ in {', '.join(wrong[:3])}")
        manifest = {"step": step, "files": {name: asdict(each) for name, each in sorted(files.items())}}
        _write_durably(folder / MANIFEST, json.dumps(manifest, indent=1))
        _sync(folder)
        if self.at(step).exists():  # a damaged one: what is whole was resumed from, and later ones moved aside
            self.set_aside([step])
        folder.rename(self.at(step))
        _sync(self.path)
        return self.at(step)

    # --- Reading --------------------------------------------------------------------------------------------------

    def meta(self, step: int) -> dict[str, Any]:
        """What was saved beside the tensors; keys of its recipe that were renamed since have their new names.

        Raises:
            ValueError: it is missing, or not what a save writes.
        """
        found, path = self._json(step, META), self.at(step) / META
        if not isinstance(found, dict) or found.get("step") != step:
            raise ValueError(f"{path} is not of step {step}")
        for key, kind in META_TYPES.items():
            if not isinstance(found.get(key), kind):
                raise ValueError(f"{path} has no {key} as a save writes it")
        if found["samples"] < 0:
            raise ValueError(f"{path} has samples = {found['samples']}")
        return {**found, "recipe": with_new_keys(found["recipe"])}

    def records(self, step: int) -> dict[str, FileRecord]:
        """The manifest: name -> what the file held.

        Raises:
            ValueError: it is missing, or not what a save writes.
        """
        path = self.at(step) / MANIFEST
        try:
            records = {name: FileRecord(**each) for name, each in self._json(step, MANIFEST)["files"].items()}
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{path} is not a manifest") from error
        for name, each in records.items():
            # Joined with the folder, anything else would be a file elsewhere.
            if name in ("", ".", "..") or "/" in name or "\0" in name or os.sep in name:
                raise ValueError(f"{path} names {name!r}, which is not a file of the checkpoint")
            if type(each.bytes) is not int or each.bytes < 0 or not isinstance(each.sha256, str):
                raise ValueError(f"{path} does not say what {name} held")
        if missing := {META, *NEEDED} - records.keys():
            raise ValueError(f"{path} knows nothing of {', '.join(sorted(missing))}")
        return records

    def _json(self, step: int, name: str) -> Any:
        path = self.at(step) / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"{path} cannot be read: {error.strerror}") from error
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{path} is not valid JSON") from error

    def problems(self, step: int, *, hashes: bool, part: int = 0, parts: int = 1) -> list[str]:
        """What is wrong with a checkpoint, a line each; empty where it is as it was written.

        Args:
            step: of the checkpoint.
            hashes: read every file and compare its hash, instead of sizes alone.
            part: which share of the files to look at, of
            parts: that they are divided into, one a rank.
        """
        try:
            records = self.records(step)
            self.meta(step)
        except ValueError as error:
            return [str(error)] if part == 0 else []
        found = []
        for name, expected in list(records.items())[part::parts]:
            path = self.at(step) / name
            try:
                status = path.lstat()
                size = status.st_size
                if not stat.S_ISREG(status.st_mode):  # a link leads elsewhere, and a pipe never ends
                    found.append(f"{path} is not a regular file")
                elif size != expected.bytes:
                    found.append(f"{path} has {size:,} bytes instead of {expected.bytes:,}")
                elif hashes and record(path) != expected:
                    found.append(f"{path} does not hold what was written: its hash differs from the manifest's")
            except OSError as error:
                found.append(f"{path} cannot be read: {error.strerror}")
        return found

    # --- Making room ----------------------------------------------------------------------------------------------

    def set_aside(self, steps: list[int]) -> Path | None:
        """Move checkpoints out of the way, into a folder of their own, which is returned."""
        if not steps:
            return None
        aside = next(p for n in range(1, 10**6) if not (p := self.path / f"set-aside-{n}").exists())
        aside.mkdir()
        for step in steps:
            self.at(step).rename(aside / self.at(step).name)
        return aside

    def expendable(
        self, keep_latest: int, keep_every: int = 0, keep_best: int = 0, losses: Mapping[int, Any] | None = None
    ) -> list[int]:
        """Checkpoints that may go: whole ones. Only those with finite numbers count as kept.

        Args:
            keep_latest: number of most recent checkpoints to keep; 0 keeps all.
            keep_every: also keep the checkpoint of every N-th step; 0 disables.
            keep_best: the also keep the K checkpoints with the lowest validation loss.
            losses: step -> validation loss, of steps that were validated after they were saved.
        """
        if keep_latest == 0:
            return []
        whole = self._whole()
        good = [step for step, meta in whole.items() if meta.get("finite")]
        kept = set(good[-keep_latest:]) | {step for step in good if keep_every and step % keep_every == 0}
        losses = {step: whole[step].get("validation_loss", (losses or {}).get(step)) for step in good}
        measured = [step for step, loss in losses.items() if isinstance(loss, (int, float)) and math.isfinite(loss)]
        kept.update(sorted(measured, key=losses.__getitem__)[:keep_best])
        # One that is not finite is of use until there is a later one that is.
        return [step for step in whole if step not in kept and good and step < good[-1]]

    def finite(self) -> list[int]:
        """Checkpoints with finite numbers whose files have the right sizes, in ascending order."""
        return [step for step, meta in self._whole().items() if meta.get("finite")]

    def _whole(self) -> dict[int, dict[str, Any]]:
        """Checkpoints whose files have the right sizes, in ascending order, with what each says of itself."""
        return {step: self.meta(step) for step in self.steps() if not self.problems(step, hashes=False)}

    def remove(self, step: int) -> None:
        """Delete a checkpoint; half of one never looks like one."""
        doomed = self.path / f".unfinished-removal-{step}"
        self.at(step).rename(doomed)
        _delete(doomed)


def _delete(path: Path) -> None:
    """Delete a folder, or whatever stands in its place; of a link, the link."""
    if path.is_symlink() or not path.is_dir():
        path.unlink()
    else:
        shutil.rmtree(path)


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Make renames and new files of a folder last through a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
