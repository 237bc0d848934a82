"""Documents in local files."""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal

from titan_prores.config import setting
from titan_prores.errors import ConfigError, MissingError, nearest
from titan_prores.protocols import DatasetSection
from titan_prores.registry import register

_COMPRESSIONS = ("", ".gz", ".zst")
_LINE_FORMATS = (".txt", ".jsonl", ".json")
EXTENSIONS = (*(form + compression for form in _LINE_FORMATS for compression in _COMPRESSIONS), ".parquet")


@register("dataset", "text")
class TextFiles:
    """Local files of text, JSON lines or Parquet, also compressed."""

    class Config(DatasetSection):
        """Settings of the dataset."""

        files: tuple[str, ...] = setting(
            help="paths or globs (** for any depth), relative to the working directory; extension tells format: "
            + ", ".join(EXTENSIONS),
            on_resume="free",  # a run may move to where its files lie elsewhere; their tokens are compared
            min_length=1,
        )
        field: str = setting("text", "key or column that holds the text of a document in JSON lines and Parquet")
        txt_document: Literal["file", "paragraph", "line"] = setting(
            "file", "what one document is in a .txt file; blank lines end a paragraph"
        )

    def __init__(self, config: Config) -> None:
        """
        Raises:
            ConfigError: a glob matches no file, a file has an unknown extension, or a package to read it is missing.
        """
        self.config = config
        self.files = sorted({path for pattern in config.files for path in _match(pattern)})
        for path in self.files:
            if _extension(path) is None:
                raise ConfigError("files", "has an extension of no known format", value=path, allowed=EXTENSIONS)
        extensions = {_extension(path) for path in self.files}
        if ".parquet" in extensions:
            _require("pyarrow", "parquet")
        if any(extension.endswith(".zst") for extension in extensions):
            _require("zstandard", "zstd")

    def documents(self) -> Iterator[str]:
        """Every document, file by file in sorted order; a file is streamed, unless it is one document.

        Raises:
            ConfigError: a file is damaged, or one of its records has no text where `field` says; tells file and line.
        """
        for path in self.files:
            extension = _extension(path)
            if extension == ".parquet":
                yield from self._parquet(path)
            elif extension.startswith(".txt"):
                yield from self._txt(path)
            else:
                yield from self._json_lines(path)

    def fingerprint(self) -> str:
        """Hash of the settings and of every file's name, size and time of change."""
        stats = [(path, os.stat(path)) for path in self.files]
        parts = [
            self.config.field,
            self.config.txt_document,
            [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats],
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _txt(self, path: str) -> Iterator[str]:
        lines = (line for _, line in _lines(path))
        if self.config.txt_document == "file":
            yield "".join(lines)
        elif self.config.txt_document == "line":
            yield from (line.rstrip("\n") for line in lines if line.strip())
        else:
            for blank, paragraph in groupby(lines, key=lambda line: not line.strip()):
                if not blank:
                    yield "".join(paragraph).rstrip("\n")

    def _json_lines(self, path: str) -> Iterator[str]:
        for number, line in _lines(path):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ConfigError("files", f"not valid JSON: {error}", where=where) from error
            if not isinstance(record, dict):
                raise ConfigError("files", f"each line must be a JSON object, not {_json_type(record)}", where=where)
            yield _text(record, self.config.field, where)

    def _parquet(self, path: str) -> Iterator[str]:
        import pyarrow
        import pyarrow.parquet

        field = self.config.field
        number = 0
        try:
            with pyarrow.parquet.ParquetFile(path) as file:
                columns = file.schema_arrow.names
                if field not in columns:
                    raise _no_field(field, columns, path)
                for batch in file.iter_batches(batch_size=1024, columns=[field]):
                    for text in batch.column(0).to_pylist():
                        number += 1
                        yield _text({field: text}, field, f"{path}, row {number}")
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError("files", f"cannot be read as Parquet: {_first_line(error)}", where=path) from error


def _match(pattern: str) -> list[str]:
    if os.path.isfile(pattern):  # also a name that holds glob characters
        return [pattern]
    found = [path for path in glob.glob(pattern, recursive=True) if os.path.isfile(path)]
    if not found:
        if os.path.isdir(pattern):
            problem, hint = "is a folder", os.path.join(pattern, "**", "*")
        else:
            problem, hint = "matches no file", _nearest_path(pattern)
        raise MissingError("files", problem, value=pattern, nearest=hint)
    return found


def _nearest_path(pattern: str) -> str | None:
    """The pattern with its first part that does not exist replaced by the name next to it in spelling."""
    path = Path(pattern)
    for depth in range(len(path.parts)):
        parent, name = Path(*path.parts[:depth]), path.parts[depth]
        if not glob.glob(str(parent / name), recursive=True):
            siblings = [entry.name for entry in parent.iterdir()] if parent.is_dir() else []
            hint = nearest(name, siblings)
            return str(Path(parent, hint, *path.parts[depth + 1 :])) if hint else None
    return None


def _extension(path: str) -> str | None:
    """The longest known extension that the path ends in."""
    return max((e for e in EXTENSIONS if path.lower().endswith(e)), key=len, default=None)


def _require(package: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise MissingError("files", f"needs the package {package}: pip install 'titan-prores[{extra}]'")


def _lines(path: str) -> Iterator[tuple[int, str]]:
    """Numbered lines of a text file that may be compressed; line ends become a newline.

    Raises:
        ConfigError: the file cannot be read, decompressed or decoded; tells the last line that could.
    """
    number = 0
    try:
        with open(path, "rb") as raw, io.TextIOWrapper(_decompress(raw, path), encoding="utf-8-sig") as text:
            for number, line in enumerate(text, 1):
                yield number, line
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, *_zstd_errors(path)) as error:
        raise ConfigError(
            "files", f"cannot be read: {_first_line(error)}", where=f"{path}, after line {number}"
        ) from error


def _decompress(raw: BinaryIO, path: str) -> BinaryIO:
    if path.lower().endswith(".gz"):
        return gzip.open(raw)
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_ZstdReader(raw))
    return raw


class _ZstdReader(io.RawIOBase):
    """Decompresses frame after frame. zstandard's own reader takes a file that was cut off for one that ends."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._frame = None  # the frame being read; None between two
        self._compressed = self._plain = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        import zstandard

        while not self._plain:
            self._compressed = self._compressed or self._raw.read(1 << 16)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the compressed file ends in the middle: it was cut off")
                return 0
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._plain = self._frame.decompress(self._compressed)
            self._compressed = b""
            if self._frame.eof:
                self._compressed, self._frame = self._frame.unused_data, None
        count = min(len(buffer), len(self._plain))
        buffer[:count], self._plain = self._plain[:count], self._plain[count:]
        return count


def _zstd_errors(path: str) -> tuple[type[Exception], ...]:
    if not path.lower().endswith(".zst"):
        return ()
    import zstandard

    return (zstandard.ZstdError,)


def _text(record: Mapping[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise _no_field(field, record, where)
    if not isinstance(record[field], str):
        raise ConfigError("field", f"must hold text, not {_json_type(record[field])}", value=field, where=where)
    return record[field]


def _no_field(field: str, present: Iterable[str], where: str) -> ConfigError:
    present = list(present)
    return ConfigError(
        "field", "is not there", value=field, allowed=present or "the record is empty", where=where,
        nearest=nearest(field, present),
    )  # fmt: skip


def _json_type(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "a bool", int: "a number", float: "a number", str: "a string", list: "a list", dict: "an object"}
    return names.get(type(value), type(value).__name__)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
