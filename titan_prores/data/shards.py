"""Token shards on disk: documents tokenised once, then read as one long memory-mapped stream a split.

A cache folder holds `train-00000.bin`, `validation-00000.bin` ... (raw little-endian uint16, or uint32 for a vocabulary
of more than 65536) and `index.json`. It appears whole, by one rename, or not at all.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
from filelock import FileLock, Timeout
from pydantic import ValidationError

from titan_prores.config.errors import ConfigError, counted
from titan_prores.config.sections import Section, setting
from titan_prores.protocols.dataset import Dataset, DatasetSection
from titan_prores.protocols.tokenizer import Tokenizer

FORMAT_VERSION = 1
INDEX = "index.json"
SPLITS = ("train", "validation")

_PROGRESS_SECONDS = 5.0
_HEAD_START_SECONDS = 1.0
_OPEN_SHARDS = 128  # memory maps held at once; each holds a file descriptor
_READ_BYTES = 1 << 22
_CHUNK = 1 << 20  # characters of a document that are worked on together
_MAX_INDEX_BYTES = 1 << 26  # some 400,000 shards


# --- The index ----------------------------------------------------------------------------------------------------


class _ShardEntry(Section):
    file: str = setting(pattern=r"^[\w-]+\.bin$")  # beside the index and nowhere else
    tokens: int = setting(gt=0)
    bytes: int = setting(gt=0)
    sha256: str


class _SplitEntry(Section):
    documents: int = setting(ge=0)
    tokens: int = setting(ge=0)
    shards: tuple[_ShardEntry, ...]


class _Splits(Section):
    train: _SplitEntry
    validation: _SplitEntry


class _Index(Section):
    """Content of index.json, which another program may have written."""

    format: Literal[FORMAT_VERSION]
    dtype: Literal["uint16", "uint32"]
    n_vocab: int = setting(gt=0, le=1 << 32)
    eot_id: int = setting(ge=0)
    fingerprint: str
    splits: _Splits


# --- Reading ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shard:
    """One file of tokens. `sha256` is the hex digest of its bytes."""

    path: Path
    n_tokens: int
    n_bytes: int
    sha256: str


class TokenStream:
    """The tokens of one split, as if its shards were one array.

    Attributes:
        name: of the split.
        eot_id: token that ends every document.
    """

    def __init__(self, name: str, shards: Sequence[Shard], dtype: np.dtype, eot_id: int) -> None:
        self.name = name
        self.shards = tuple(shards)
        self.dtype = np.dtype(dtype)
        self.eot_id = eot_id
        self._starts = np.cumsum([0, *(shard.n_tokens for shard in self.shards)])
        self._open = lru_cache(maxsize=_OPEN_SHARDS)(self._map)

    def __reduce__(self) -> tuple[Any, ...]:
        # For worker processes that are not forked: they map the files anew instead of getting copies of them.
        return TokenStream, (self.name, self.shards, self.dtype, self.eot_id)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def _map(self, shard: int) -> np.ndarray:
        return np.memmap(self.shards[shard].path, dtype=self.dtype, mode="r")

    def read(self, start: int, count: int) -> np.ndarray:
        """Tokens [start, start + count), shape [count], int64, across shard borders.

        Raises:
            IndexError: the range is not inside the stream.
        """
        if start < 0 or count < 0 or start + count > len(self):
            raise IndexError(f"tokens [{start}, {start + count}) of a stream of {len(self)}")
        tokens = np.empty(count, dtype=np.int64)
        filled = 0
        shard = int(np.searchsorted(self._starts, start, side="right")) - 1
        while filled < count:
            offset = start + filled - int(self._starts[shard])
            piece = self._open(shard)[offset : offset + count - filled]
            tokens[filled : filled + len(piece)] = piece
            filled += len(piece)
            shard += 1
        return tokens


@dataclass(frozen=True)
class TokenCache:
    """A published cache folder.

    Attributes:
        folder: where it is.
        fingerprint: hash of the token streams' content, whatever the size of their shards.
        train: stream of the training split.
        validation: stream of the held-out split; may be empty.
        n_documents: of both splits together.
        n_vocab: of the tokenizer that made it.
        just_built: whether this process wrote and hashed its shards when it was prepared, so that they need not be read
            to know what they hold.
    """

    folder: Path
    fingerprint: str
    train: TokenStream
    validation: TokenStream
    n_documents: int
    n_vocab: int
    just_built: bool = False

    @classmethod
    def open(cls, folder: Path) -> TokenCache:
        """Open a folder that `prepare` published; looks at the size of each shard but not into it.

        Raises:
            ConfigError: the index or a shard is missing, or a shard is not of the size that the index says. The key,
                `cache_folder`, is relative to the dataset's section.
        """
        index = _read_index(folder / INDEX)
        dtype = np.dtype(index.dtype).newbyteorder("<")
        streams = {}
        for split in SPLITS:
            entries = getattr(index.splits, split).shards
            shards = [Shard(folder / entry.file, entry.tokens, entry.bytes, entry.sha256) for entry in entries]
            for shard in shards:
                _check_size(shard, dtype)
            streams[split] = TokenStream(split, shards, dtype, index.eot_id)
        n_documents = sum(getattr(index.splits, split).documents for split in SPLITS)
        return cls(folder, index.fingerprint, **streams, n_documents=n_documents, n_vocab=index.n_vocab)

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Read shards, compare their hashes with the index and their tokens with the size of the vocabulary.

        Args:
            part: which share of the shards to read, of
            parts: that they are divided into, one a rank.

        Raises:
            ConfigError: a shard has changed since it was written, or holds what no tokenizer gave.
        """
        shards = [(stream, shard) for stream in (self.train, self.validation) for shard in stream.shards]
        for stream, shard in shards[part::parts]:
            _check_size(shard, stream.dtype)
            digest, largest = hashlib.sha256(), 0
            with shard.path.open("rb") as file:
                while block := file.read(_READ_BYTES):
                    digest.update(block)
                    largest = max(largest, int(np.frombuffer(block, stream.dtype).max()))
            if digest.hexdigest() != shard.sha256:
                raise _damaged(shard.path, "does not hold what was written (its hash differs from the index)")
            if largest >= self.n_vocab:  # hashes can be made to fit, and no embedding has a row for it
                raise _damaged(shard.path, f"holds token {largest:,} of a vocabulary of {self.n_vocab:,}")


def _read_index(path: Path) -> _Index:
    size = _size(path)
    if size > _MAX_INDEX_BYTES:
        raise _damaged(path, f"has {size:,} bytes, more than an index of token shards")
    try:
        return _Index.model_validate_json(path.read_bytes())
    except OSError as error:
        raise ConfigError("cache_folder", f"{path} cannot be read: {error.strerror}") from error
    except ValidationError as error:
        fault = error.errors(include_url=False, include_context=False)[0]
        what = ": ".join(filter(None, [".".join(map(str, fault["loc"])), fault["msg"]]))
        raise _damaged(path, f"is not an index of token shards ({what})") from error


def _check_size(shard: Shard, dtype: np.dtype) -> None:
    found = _size(shard.path)
    if found != shard.n_bytes or shard.n_bytes != shard.n_tokens * dtype.itemsize:
        raise _damaged(
            shard.path,
            f"has {found:,} bytes where the index says {shard.n_tokens:,} tokens and {shard.n_bytes:,} bytes",
        )


def _size(path: Path) -> int:
    """Bytes of a file of the cache folder; a link would lead out of it, a pipe would be waited for."""
    try:
        found = path.lstat()
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _damaged(path, "is missing") from error
    except OSError as error:
        raise ConfigError("cache_folder", f"{path} cannot be read: {error.strerror}") from error
    if not stat.S_ISREG(found.st_mode):
        raise _damaged(path, "is not a regular file")
    return found.st_size


def _damaged(path: Path, problem: str) -> ConfigError:
    return ConfigError("cache_folder", f"{path} {problem}; delete the folder {path.parent} to tokenise again")


# --- Building -----------------------------------------------------------------------------------------------------


def prepare(
    dataset: Dataset,
    tokenizer: Tokenizer,
    config: DatasetSection,
    *,
    source_name: str,
    tokenizer_name: str,
    say: Callable[[str], None],
    first: bool = True,
) -> TokenCache:
    """Tokenise a dataset once, or open what an earlier or concurrent run made of it.

    Each document is followed by the tokenizer's end-of-text token. A document is held out for validation by a hash of
    its text, so copies of it are never in both splits. Any number of processes may call this together: one builds, the
    others wait. Ctrl-C ends both at once and leaves nothing that would be trusted later.

    Args:
        dataset: what to read; only when there is no cache yet.
        tokenizer: what to encode it with.
        config: the dataset's settings.
        source_name, tokenizer_name: names of the two, for the folder's name and for messages.
        say: takes one line of progress at a time.
        first: whether this process should be the one to build if several start together: the one whose `say` is seen.

    Raises:
        ConfigError: the dataset has no documents or cannot be read, the cache folder cannot be written, or what is in
            it is damaged. Keys are relative to the dataset's section.
        ValueError: the tokenizer gave an id outside its vocabulary.
    """
    key = _key(dataset, tokenizer, config)
    prefix = re.sub(r"[^\w.-]+", "_", f"{source_name}-{tokenizer_name}")
    folder = Path(config.cache_folder) / f"{prefix}-{key}"
    lock = FileLock(folder.with_name(folder.name + ".lock"))
    with _as_config_error(config):
        if folder.exists():
            return _open(folder, tokenizer)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if not first:
            time.sleep(_HEAD_START_SECONDS)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            say(f"waiting for another process that is tokenising into {folder}")
            lock.acquire()
    try:
        missing = not folder.exists()
        if missing:
            _build(dataset, tokenizer, config, folder, source_name, say)
        return replace(_open(folder, tokenizer), just_built=missing)
    finally:
        lock.release()


def _open(folder: Path, tokenizer: Tokenizer) -> TokenCache:
    cache = TokenCache.open(folder)
    if (cache.n_vocab, cache.train.eot_id) != (tokenizer.n_vocab, tokenizer.eot_id):
        raise _damaged(
            folder / INDEX,
            f"is of another tokenizer: {cache.n_vocab:,} tokens, of which {cache.train.eot_id:,} ends a document",
        )
    return cache


def _key(dataset: Dataset, tokenizer: Tokenizer, config: DatasetSection) -> str:
    parts = [
        FORMAT_VERSION,
        dataset.fingerprint(),
        tokenizer.fingerprint(),
        config.validation_fraction,
        config.shard_tokens,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


@contextmanager
def _as_config_error(config: DatasetSection) -> Iterator[None]:
    """Put around work on the cache folder alone, so that a dataset's own failure is not blamed on it."""
    try:
        yield
    except (OSError, NotImplementedError) as error:  # the latter from filelock, on a file system without locks
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError("cache_folder", f"cannot be written: {reason}", value=config.cache_folder) from error


def _build(
    dataset: Dataset,
    tokenizer: Tokenizer,
    config: DatasetSection,
    folder: Path,
    source_name: str,
    say: Callable[[str], None],
) -> None:
    """Tokenise into a folder beside `folder` and rename it. The caller holds the lock of `folder`."""
    unfinished = folder.with_name(folder.name + ".unfinished")
    with _as_config_error(config):
        if unfinished.exists():  # a build that was killed
            shutil.rmtree(unfinished)
        unfinished.mkdir()
    try:
        index = _write_shards(dataset, tokenizer, config, unfinished, source_name, say)
        with _as_config_error(config):
            _write_durably(unfinished / INDEX, json.dumps(index, indent=1).encode())
            os.rename(unfinished, folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _write_shards(
    dataset: Dataset,
    tokenizer: Tokenizer,
    config: DatasetSection,
    folder: Path,
    source_name: str,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Write every document into its split; returns the content of index.json."""
    dtype = np.dtype("<u2" if tokenizer.n_vocab <= 1 << 16 else "<u4")
    splits = {name: _SplitWriter(folder, name, dtype, config.shard_tokens) for name in SPLITS}
    started = said = time.monotonic()
    n_documents = n_tokens = n_bytes = 0

    def progress(verb: str) -> str:
        rate = n_bytes / 1e6 / max(time.monotonic() - started, 1e-9)
        read, made = counted(n_documents, "document"), counted(n_tokens, "token")
        return f"{verb} {source_name}: {read}, {made}, {rate:.1f} MB/s"

    try:
        for document in dataset.documents():
            chunks = _chunks(document)
            size, fraction = _size_and_fraction(chunks)
            if not size:
                continue
            split = splits["validation" if fraction < config.validation_fraction else "train"]
            n_documents += 1
            split.n_documents += 1
            n_bytes += size
            for ids in _encode(tokenizer, chunks, n_documents):
                if ids.min() < 0 or ids.max() >= tokenizer.n_vocab:
                    raise ValueError(f"the tokenizer gave an id outside its vocabulary of {tokenizer.n_vocab}")
                with _as_config_error(config):
                    split.add(ids.astype(dtype))
                n_tokens += len(ids)
                if time.monotonic() - said >= _PROGRESS_SECONDS:
                    said = time.monotonic()
                    say(progress("tokenising"))
        if n_documents == 0:
            raise ConfigError("", f"the dataset {source_name} has no documents with any text")
        with _as_config_error(config):
            for split in splits.values():
                split.close()
    finally:
        for split in splits.values():
            split.abandon()
    say(progress("tokenised"))

    content = hashlib.sha256("".join(split.content.hexdigest() for split in splits.values()).encode())
    return {
        "format": FORMAT_VERSION,
        "dtype": dtype.name,
        "n_vocab": tokenizer.n_vocab,
        "eot_id": tokenizer.eot_id,
        "fingerprint": content.hexdigest(),
        "splits": {
            name: {"documents": split.n_documents, "tokens": split.n_tokens, "shards": split.shards}
            for name, split in splits.items()
        },
    }


def _chunks(document: str | Iterable[str]) -> Iterable[str]:
    """A document's text in pieces, which can be iterated again.

    Surrogates without their half, which JSON can hold, become U+FFFD.
    """
    if not isinstance(document, str):
        return document
    if not document.isascii():
        try:
            document.encode()
        except UnicodeEncodeError:
            document = document.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return [document[start : start + _CHUNK] for start in range(0, len(document), _CHUNK)]


def _size_and_fraction(chunks: Iterable[str]) -> tuple[int, float]:
    """Bytes of a text in UTF-8, and a number in [0, 1) that depends on the text alone."""
    digest, size = hashlib.blake2b(digest_size=6), 0
    for chunk in chunks:
        encoded = chunk.encode()
        digest.update(encoded)
        size += len(encoded)
    return size, int.from_bytes(digest.digest(), "little") / 2**48


def _encode(tokenizer: Tokenizer, chunks: Iterable[str], number: int) -> Iterator[np.ndarray]:
    """Tokens of document `number`, with its end, part by part, int64. Raises ConfigError where the tokenizer fails."""
    held = np.empty(0, dtype=np.int64)
    try:
        long = getattr(tokenizer, "encode_long", None)
        for part in long(chunks) if long else [tokenizer.encode("".join(chunks))]:
            if len(held):
                yield held
            held = np.asarray(part).astype(np.int64, casting="safe")
    except ConfigError:  # the text cannot be read
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise ConfigError("", f"the tokenizer fails on document {number}: {what}") from error
    yield np.append(held, tokenizer.eot_id)


class _SplitWriter:
    """Streams the tokens of one split into shards of exactly `shard_tokens`, the last one excepted."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, shard_tokens: int) -> None:
        self.folder = folder
        self.name = name
        self.dtype = dtype
        self.shard_tokens = shard_tokens
        self.shards: list[dict[str, Any]] = []
        self.n_documents = self.n_tokens = 0
        self.content = hashlib.sha256()  # of the whole stream: the same wherever it is cut
        self._file = None

    def add(self, ids: np.ndarray) -> None:
        """Tokens of a document, all or some, the last with its end-of-text token, in the split's dtype."""
        self.n_tokens += len(ids)
        while len(ids):
            if self._file is None:
                self._file = (self.folder / f"{self.name}-{len(self.shards):05d}.bin").open("wb", buffering=1 << 20)
                self._digest, self._held = hashlib.sha256(), 0
            piece, ids = np.split(ids, [self.shard_tokens - self._held])
            raw = piece.tobytes()
            self._file.write(raw)
            self._digest.update(raw)
            self.content.update(raw)
            self._held += len(piece)
            if self._held == self.shard_tokens:
                self.close()

    def close(self) -> None:
        """Finish the shard that is open, if any, and get it onto the disk."""
        if self._file is None:
            return
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self.shards.append(
            {
                "file": Path(self._file.name).name,
                "tokens": self._held,
                "bytes": self._held * self.dtype.itemsize,
                "sha256": self._digest.hexdigest(),
            }
        )
        self._file = None

    def abandon(self) -> None:
        """Let go of a file that an error left open; what its buffer cannot get rid of is of no interest then."""
        if self._file is not None:
            with suppress(OSError):
                self._file.close()
            self._file = None
