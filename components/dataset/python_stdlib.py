"""Documents that every Python brings along."""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from titan_prores import ConfigError, DatasetSection, counted, logger, register, setting

_LEFT_OUT = {"site-packages", "dist-packages", "__pycache__", "idlelib"}
_TESTS = {"test", "tests"}


@register("dataset", "python_stdlib")
class PythonStdlib:
    """Source files of the running Python's standard library; needs no download."""

    class Config(DatasetSection):
        """Settings of the dataset."""

        validation_fraction: float = setting(
            0.02, "share of documents held out for validation, chosen by a hash of their text", ge=0, lt=1
        )
        include_tests: bool = setting(False, "also the standard library's own tests, several times as much text")

    def __init__(self, config: Config) -> None:
        """
        Raises:
            ConfigError: this Python has no source files.
        """
        self.folder = Path(sysconfig.get_path("stdlib"))
        left_out = _LEFT_OUT if config.include_tests else _LEFT_OUT | _TESTS
        self.files: list[Path] = []
        for folder, subfolders, names in os.walk(self.folder):
            subfolders[:] = [name for name in subfolders if name not in left_out]
            paths = (Path(folder, name) for name in names if name.endswith(".py"))
            self.files.extend(path for path in paths if path.is_file())  # some systems have links to nothing here
        self.files.sort(key=lambda path: path.relative_to(self.folder).as_posix())
        if not self.files:
            raise ConfigError("name", f"no .py files in {self.folder}", value="python_stdlib")

    def documents(self) -> Iterator[str]:
        """The text of each file, by sorted relative path. The few that are not UTF-8 are skipped, which is logged."""
        skipped = []
        for path in self.files:
            try:
                yield path.read_bytes().decode("utf-8")
            except UnicodeDecodeError:
                skipped.append(path)
        if skipped:
            logger.info("python_stdlib: skipped %s not in UTF-8, such as %s", counted(len(skipped), "file"), skipped[0])

    def fingerprint(self) -> str:
        """Hash of the Python version and of every file's relative path and content."""
        digest = hashlib.sha256(platform.python_version().encode())
        for path in self.files:
            digest.update(path.relative_to(self.folder).as_posix().encode() + b"\0")
            digest.update(hashlib.sha256(path.read_bytes()).digest())
        return digest.hexdigest()

    def sources(self) -> dict[str, str]:
        names = {path.relative_to(self.folder).as_posix(): path for path in self.files}
        return {name: hashlib.sha256(path.read_bytes()).hexdigest()[:16] for name, path in names.items()}
