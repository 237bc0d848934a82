"""Documents in local files."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Iterator
from itertools import groupby
from typing import Any, Literal

from titan_prores import ConfigError, MissingError, ReadGlob, logger, register, setting
from titan_prores.components.dataset._files import find_files, refuse_lfs_pointers
from titan_prores.components.dataset._reading import (
    COMPRESSIONS,
    LongText,
    check_text,
    chunks,
    first_character,
    lines,
    whole,
)
from titan_prores.components.dataset._records import RecordsSection, SkippedRecords, array_items, no_field, parse

_LINE_FORMATS = (".txt", ".jsonl", ".ndjson", ".json")
_KNOWN = f"{', '.join(_LINE_FORMATS)}, also with {', '.join(COMPRESSIONS)}, and .parquet"
_EXTENSIONS = (*(form + compression for form in _LINE_FORMATS for compression in ("", *COMPRESSIONS)), ".parquet")
_BATCH_ROWS = 256
_READ_BYTES = 1 << 20  # of a column at once, not all of a row group


@register("dataset", "text")
class TextFiles:
    """Local files of text, JSON or Parquet, also compressed."""

    class Config(RecordsSection):
        """Settings of the dataset."""

        files: tuple[ReadGlob, ...] = setting(
            help="paths or globs (** for any depth); the extension tells the format: " + _KNOWN,
            on_resume="free",  # a run may move to where its files lie elsewhere; their tokens are compared
            min_length=1,
        )
        field: str = setting(
            "text", "key or column that holds the text of a document in JSON and Parquet; meta.text is text in meta"
        )
        txt_document: Literal["file", "paragraph", "line"] = setting(
            "file", "what one document is in a .txt file; blank lines end a paragraph"
        )

    def __init__(self, config: Config) -> None:
        """
        Raises:
            ConfigError: a glob matches no file or something that cannot be read, a file has an unknown extension or is
                a Git LFS pointer, or a package to read it is missing.
        """
        self.config = config
        self._found = find_files(config.files)
        self.files = self._found.paths
        for path in self.files:
            if _extension(path) is None:
                raise ConfigError("files", "has an extension of no known format", value=path, allowed=_KNOWN)
        refuse_lfs_pointers("files", self.files)
        extensions = {_extension(path) for path in self.files}
        if ".parquet" in extensions:
            _require("pyarrow", "parquet")
        if any(extension.endswith(".zst") for extension in extensions):
            _require("zstandard", "zstd")

    def documents(self) -> Iterator[str | LongText]:
        """Every document, file by file in sorted order. A file is streamed; one that is a long document, in pieces.

        Logs what was skipped.

        Raises:
            ConfigError: a file is damaged, or more of its records than may be skipped have no text where `field` says;
                tells file and line.
        """
        for line in self._found.skipped():
            logger.warning(line)
        skipped = SkippedRecords(self.config.max_skipped_records)
        for path in self.files:
            extension = _extension(path)
            if extension.startswith(".txt"):
                yield from self._txt(path)
            else:
                records = self._parquet(path) if extension == ".parquet" else self._json(path)
                yield from skipped.texts(records, self.config.field)
        skipped.report()

    def fingerprint(self) -> str:
        """Hash of the settings and of every file's name, size and time of change."""
        stats = [(path, os.stat(path)) for path in self.files]
        parts: list[Any] = [
            self.config.field,
            self.config.txt_document,
            [(path, stat.st_size, stat.st_mtime_ns) for path, stat in stats],
        ]
        if self.config.max_skipped_records:  # a cache made with skips is not one for a recipe that allows none
            parts.append(self.config.max_skipped_records)
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def sources(self) -> dict[str, str]:
        stats = {path: os.stat(path) for path in self.files}
        return {path: f"{stat.st_size} bytes, {stat.st_mtime_ns}" for path, stat in stats.items()}

    def _txt(self, path: str) -> Iterator[str | LongText]:
        if self.config.txt_document == "file":
            yield whole(path)
            return
        valid = _valid_lines(path)
        if self.config.txt_document == "line":
            yield from (line.rstrip("\n") for line in valid if line.strip())
        else:
            for blank, paragraph in groupby(valid, key=lambda line: not line.strip()):
                if not blank:
                    text = io.StringIO()  # a list of short lines takes twenty times their size
                    text.writelines(paragraph)
                    yield text.getvalue().rstrip("\n")

    def _json(self, path: str) -> Iterator[tuple[str, Any]]:
        """Of one array, or of a record a line."""
        if first_character(path) == "[":
            yield from ((f"{path}:{number}", record) for number, record in array_items(chunks(path), path))
            return
        for number, line in lines(path):
            if not line.strip():
                continue
            where = f"{path}:{number}"
            try:
                check_text(line, path, number)
                record = parse(line, where)
            except ConfigError as error:
                record = error
            yield where, record

    def _parquet(self, path: str) -> Iterator[tuple[str, Any]]:
        import pyarrow
        import pyarrow.parquet

        field = self.config.field
        number = 0
        try:
            with pyarrow.parquet.ParquetFile(path, buffer_size=_READ_BYTES, pre_buffer=False) as file:
                columns = file.schema_arrow.names
                column = field if field in columns else field.split(".")[0]
                if column not in columns:
                    raise no_field(field, columns, path)
                for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=[field]):
                    if column not in batch.schema.names:  # a name with dots of which only the first part is there
                        raise no_field(field, columns, path)
                    for value in _values(batch.column(column)):
                        number += 1
                        where = f"{path}, row {number}"
                        if isinstance(value, UnicodeDecodeError):
                            problem = f"not valid UTF-8: byte 0x{value.object[value.start]:02x}"
                            yield where, ConfigError("files", problem, where=where)
                        else:
                            yield where, {column: value}
        except (pyarrow.ArrowException, OSError) as error:
            raise ConfigError(
                "files", f"cannot be read as Parquet: {str(error).splitlines()[0]}", where=path
            ) from error


def _valid_lines(path: str) -> Iterator[str]:
    for number, line in lines(path):
        if not line.isascii():
            check_text(line, path, number)
        yield line


def _values(column: Any) -> list[Any]:
    """Python values of an Arrow column; in the place of a string that is not UTF-8, the error."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        values = []
        for scalar in column:
            try:
                values.append(scalar.as_py())
            except UnicodeDecodeError as error:
                values.append(error)
        return values


def _extension(path: str) -> str | None:
    """The longest known extension that the path ends in."""
    return max((e for e in _EXTENSIONS if path.lower().endswith(e)), key=len, default=None)


def _require(package: str, extra: str) -> None:
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise MissingError("files", f"needs the package {package}: pip install 'titan-prores[{extra}]'")
