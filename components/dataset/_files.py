"""Which files a list of paths and globs names: each real file once, and none lost without a word."""

from __future__ import annotations

import glob
import os
import stat
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titan_prores import ConfigError, MissingError, nearest

_LFS_HEAD = b"version https://git-lfs.github.com/spec/"
_LFS_MAX_BYTES = 1024


@dataclass
class FoundFiles:
    """Files to read, and what the patterns reach besides.

    Attributes:
        paths: one name of each real file, sorted.
        repeated: (other name, name that is read) of files with more than one name.
        folders: folders that a pattern without ** matches; they are not entered.
        repeated_folders: links to folders that were entered under another name.
        dangling: links to nothing, met on the way, that match no pattern themselves.
    """

    paths: list[str] = field(default_factory=list)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    repeated_folders: list[str] = field(default_factory=list)
    dangling: list[str] = field(default_factory=list)

    def skipped(self) -> list[str]:
        """A line for each reason why something was skipped: how many, and an example."""
        reasons = [
            ("links to a folder that is read already", self.repeated_folders),
            ("other names of a file that is read already", [f"{name} for {read}" for name, read in self.repeated]),
            ("folders, which only ** enters", self.folders),
            ("links to nothing", self.dangling),
        ]
        return [f"dataset.files: skipped {what}: {len(of):,}, such as {of[0]}" for what, of in reasons if of]


def find_files(patterns: Sequence[str]) -> FoundFiles:
    """Every real file that the patterns match, under its shortest name.

    Links are followed; files are the same where device and inode are. A name with glob characters that exists stands
    for itself.

    Raises:
        ConfigError: a pattern matches no file, or it matches what cannot be read: a link to nothing, a pipe, a file
            without permission.
    """
    found = FoundFiles()
    names: dict[tuple[int, int] | str, set[str]] = {}
    for pattern in patterns:
        matched, n_folders = False, len(found.folders)
        for path in [pattern] if _is_file_or_link(pattern) else _glob(pattern, "", found):
            status = _status(path, pattern)
            if stat.S_ISDIR(status.st_mode):
                if "**" not in pattern:
                    found.folders.append(path)
                continue
            if not stat.S_ISREG(status.st_mode):
                raise ConfigError(
                    "files", f"{path} is not a regular file (a pipe, a socket or a device)", value=pattern
                )
            if not os.access(path, os.R_OK):
                raise MissingError("files", f"{path} cannot be read: permission denied", value=pattern)
            matched = True
            names.setdefault(_identity(path, status), set()).add(path)
        if not matched:
            if os.path.isdir(pattern):
                problem, hint = "is a folder", os.path.join(pattern, "**", "*")
            elif folders := found.folders[n_folders:]:
                problem, hint = "matches only folders", os.path.join(folders[0], "**", "*")
            else:
                problem, hint = "matches no file", _nearest_path(pattern)
            raise MissingError("files", problem, value=pattern, nearest=hint)
    for same in names.values():
        first, *others = sorted(same, key=lambda path: (path.count(os.sep), path))
        found.paths.append(first)
        found.repeated += [(other, first) for other in others]
    for paths in (found.paths, found.repeated, found.folders, found.repeated_folders, found.dangling):
        paths[:] = sorted(set(paths))  # patterns may meet the same thing
    return found


def refuse_lfs_pointers(key: str, paths: Iterable[str]) -> None:
    """Raise ConfigError where files are Git LFS pointers: a few lines that stand for a file that was not downloaded."""
    pointers = [path for path in paths if _is_lfs_pointer(path)]
    if pointers:
        count = "a Git LFS pointer" if len(pointers) == 1 else f"one of {len(pointers):,} Git LFS pointers"
        raise MissingError(key, f"{pointers[0]} is {count}, not the text itself; run `git lfs pull` in its repository")


def _is_lfs_pointer(path: str) -> bool:
    try:
        if os.stat(path).st_size > _LFS_MAX_BYTES:
            return False
        with open(path, "rb") as file:
            return file.read(len(_LFS_HEAD)) == _LFS_HEAD
    except OSError:  # reading it later says what is wrong
        return False


def _is_file_or_link(path: str) -> bool:
    return os.path.lexists(path) and not os.path.isdir(path)


def _identity(path: str, status: os.stat_result) -> tuple[int, int] | str:
    # Some network file systems have no inode numbers.
    return (status.st_dev, status.st_ino) if status.st_ino else os.path.realpath(path)


def _status(path: str, pattern: str) -> os.stat_result:
    try:
        return os.stat(path)
    except OSError as error:
        if os.path.islink(path):
            problem = f"{path} is a link to {os.readlink(path)}, which does not lead to a file"
        else:
            problem = f"{path} cannot be read: {error.strerror}"
        raise MissingError("files", problem, value=pattern) from error


def _glob(pattern: str, root: str, found: FoundFiles) -> Iterator[str]:
    """What glob.glob gives with recursive=True, but ** enters each real folder once; loops of links would never end."""
    parts = pattern.split(os.sep)
    if "**" not in parts:
        yield from (os.path.join(root, name) for name in glob.glob(pattern, root_dir=root or None))
        return
    depth = parts.index("**")
    rest = os.sep.join(parts[depth + 1 :]) if parts[depth + 1 :] else "*"
    heads = glob.glob(os.sep.join(parts[:depth]) + os.sep, root_dir=root or None) if depth else [""]
    for head in heads:
        for folder in _walk(os.path.join(root, head), pattern, found):
            yield from _glob(rest, folder, found)


def _walk(start: str, pattern: str, found: FoundFiles) -> Iterator[str]:
    """The folder and all below it, hidden ones excepted; links last, so that a folder goes by its own name."""
    seen: set[tuple[int, int] | str] = set()
    folders, links = deque([start]), deque()
    while folders or links:
        folder = (folders or links).popleft()
        identity = _identity(folder, _status(folder or os.curdir, pattern))
        if identity in seen:
            found.repeated_folders.append(folder)
            continue
        seen.add(identity)
        yield folder
        try:
            with os.scandir(folder or os.curdir) as listed:
                entries = sorted((entry for entry in listed if _is_entered(entry.name)), key=lambda entry: entry.name)
        except OSError as error:  # glob would take it for an empty one
            raise MissingError(
                "files", f"the folder {folder} cannot be read: {error.strerror}", value=pattern
            ) from error
        for entry in entries:
            path = os.path.join(folder, entry.name)
            if os.path.isdir(path):  # unlike entry.is_dir(), False of a link that leads to itself
                (links if entry.is_symlink() else folders).append(path)
            elif entry.is_symlink() and not os.path.exists(path):
                found.dangling.append(path)


def _is_entered(name: str) -> bool:
    """Whether ** looks at it: not at hidden names, as in glob, nor at what a file system keeps for its repair."""
    return not name.startswith(".") and name != "lost+found"


def _nearest_path(pattern: str) -> str | None:
    """The pattern with its first part that does not exist replaced by the name next to it in spelling."""
    path = Path(pattern)
    for depth in range(len(path.parts)):
        parent, name = Path(*path.parts[:depth]), path.parts[depth]
        if name == "**":
            return None
        if not glob.glob(str(parent / name)):
            try:
                siblings = [entry.name for entry in parent.iterdir()]
            except OSError:
                siblings = []
            hint = nearest(name, siblings)
            return str(Path(parent, hint, *path.parts[depth + 1 :])) if hint else None
    return None
