"""Documents from the Hugging Face hub, or from a local data set in a form that the datasets library knows."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

from titan_prores import ConfigError, MissingError, PathRule, nearest, register, setting
from titan_prores.components.dataset._files import refuse_lfs_pointers
from titan_prores.components.dataset._records import RecordsSection, SkippedRecords

# Neither need be a file here: one may be a name on the hub, the other a pattern of the data set's own files or a URL.
LocalPath = Annotated[str, PathRule()]
DataFile = Annotated[str, PathRule(glob=True, url=True)]


@register("dataset", "huggingface")
class HuggingFaceDataset:
    """A data set of the Hugging Face hub, streamed; runs no code that comes with it and reads no files but its own."""

    class Config(RecordsSection):
        """Settings of the dataset."""

        path: LocalPath = setting(help="name on the hub such as allenai/c4, a local folder, or a format such as json")
        subset: str | None = setting(None, "configuration of the data set, such as en")
        split: str = setting(
            "train", "split of the data set, or several as a+b; validation text is held out of it by hash"
        )
        field: str = setting("text", "column that holds the text of a document; meta.text is text in meta")
        data_files: tuple[DataFile, ...] | None = setting(
            None, "files of the data set to read: globs, or local paths; default all"
        )
        revision: str | None = setting(None, "branch, tag or commit on the hub; default the main branch")
        max_documents: int | None = setting(None, "maximum number of documents; default all", gt=0)

    def __init__(self, config: Config) -> None:
        """
        Raises:
            ConfigError: the datasets library is not installed, or path is a format whose files can hold code.
        """
        self.config = config
        if config.path == "pandas":
            raise ConfigError("path", "reads pickles, which can run code", value="pandas", allowed="parquet, json ...")
        if importlib.util.find_spec("datasets") is None:
            raise MissingError(
                "name", "needs the package datasets: pip install 'titan-prores[huggingface]'", value="huggingface"
            )

    @cached_property
    def _builder(self) -> Any:
        """The library's builder, its files resolved to one revision that fingerprint and documents share."""
        from datasets import load_dataset_builder

        config = self.config
        try:
            builder = load_dataset_builder(
                config.path,
                config.subset,
                data_files=None if config.data_files is None else list(config.data_files),
                revision=config.revision,
            )
        except Exception as error:
            raise _config_error("path", "cannot be opened", config.path, error) from error
        data_files = [file for files in (builder.config.data_files or {}).values() for file in files]
        refuse_lfs_pointers("path", data_files)
        if config.data_files is None and builder.base_path:  # a data set's card may name any file at all
            for file in data_files:
                if not _is_within(file, builder.base_path):
                    raise ConfigError("path", f"names {file}, which is not a file of the data set", value=config.path)
        return builder

    def documents(self) -> Iterator[str]:
        """Documents in the order of the data set, unshuffled.

        Raises:
            ConfigError: the data set, its split or the field does not exist, or reading it fails.
        """
        config, builder = self.config, self._builder
        known = [str(split) for split in builder.config.data_files or builder.info.splits or ()]
        if known and not set(config.split.split("+")) <= set(known):
            raise ConfigError(
                "split",
                "unknown split of the data set",
                value=config.split,
                allowed=known,
                nearest=nearest(config.split, known),
            )
        skipped = SkippedRecords(config.max_skipped_records)
        try:
            rows = builder.as_streaming_dataset(split=config.split)
            records = ((f"{config.path}, record {number}", row) for number, row in enumerate(rows, 1))
            yield from islice(skipped.texts(records, config.field), config.max_documents)
            skipped.report()
        except ConfigError:
            raise
        except Exception as error:
            problem = f"cannot be read after record {skipped.used + skipped.skipped:,}"
            raise _config_error("path", problem, config.path, error) from error

    def fingerprint(self) -> str:
        """Hash of the settings, and of the files with their commit on the hub or, on disk, their time of change."""
        config, files = self.config, self._builder.config.data_files or {}
        parts: list[Any] = [
            [config.path, config.subset, config.split, config.field, config.data_files, config.max_documents],
            {str(split): [list(found), found.origin_metadata] for split, found in files.items()},
            self._builder.hash,
        ]
        if config.max_skipped_records:
            parts.append(config.max_skipped_records)
        return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()

    def sources(self) -> dict[str, str]:
        files = self._builder.config.data_files or {}
        return {
            str(file): str(origin)
            for found in files.values()
            for file, origin in zip(found, found.origin_metadata, strict=True)
        }


def _is_within(file: str, folder: str) -> bool:
    """Whether a path or an address is below another one. Links inside of the folder are the folder's own."""
    if "://" in file or "://" in folder:
        return file.startswith(folder.rstrip("/") + "/") and ".." not in file.split("/")
    written = Path(os.path.abspath(file))
    return any(written.is_relative_to(base) for base in (os.path.abspath(folder), Path(folder).resolve()))


def _config_error(key: str, problem: str, value: str, error: Exception) -> ConfigError:
    lines = str(error).strip().splitlines() or [""]
    return ConfigError(key, f"{problem}: {type(error).__name__}: {lines[0]}".rstrip(": "), value=value)
