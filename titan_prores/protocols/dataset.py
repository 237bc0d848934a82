"""What a dataset must have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Literal, Protocol

from titan_prores.config.contracts import optional
from titan_prores.config.paths import WritePath
from titan_prores.config.sections import Section, setting


class DatasetSection(Section):
    """Base of every dataset's Config."""

    validation_fraction: float = setting(
        0.01, "share of documents held out for validation, chosen by a hash of their text", ge=0, lt=1
    )
    cache_folder: WritePath = setting(
        "outputs/token_cache", "folder of the token shards, kept between runs", on_resume="free"
    )
    shard_tokens: int = setting(100_000_000, "size of a token shard", unit="tokens", on_resume="free", gt=0)
    verify: Literal["always", "sizes"] = setting(
        "always",
        "check of token shards before training: always compares hashes, sizes compares file sizes",
        on_resume="free",
    )
    num_workers: int = setting(
        0, "number of worker processes that read samples ahead; the order does not depend on it", on_resume="free", ge=0
    )


class Dataset(Protocol):
    """A source of text. Its Config is a DatasetSection. Built from its config alone, cheaply: reads no document yet."""

    def __init__(self, config: DatasetSection) -> None: ...

    def documents(self) -> Iterator[str | Iterable[str]]:
        """Every document once, in an order that is the same each time.

        A document too long for memory is an iterable of its text in pieces, the same each time that it is iterated.
        """

    def fingerprint(self) -> str:
        """A string that changes whenever the documents might; part of the token cache's key."""

    @optional
    def sources(self) -> dict[str, str]:
        """Name of each part of the text, such as a file -> a string that changes whenever that part might.

        A checkpoint remembers them, so that a run that cannot resume is told which part changed.
        """
