"""Text of local files: decompressed and decoded in memory that does not depend on the size of a file."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TextIO

from titan_prores import ConfigError

COMPRESSIONS = (".gz", ".zst", ".bz2", ".xz")

_CHUNK = 1 << 20  # characters
_SIGNATURES = {
    ".gz": re.compile(rb"\x1f\x8b\x08"),
    ".zst": re.compile(rb"\x28\xb5\x2f\xfd"),
    ".bz2": re.compile(rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)"),
    ".xz": re.compile(rb"\xfd7zXZ\x00"),
    ".parquet": re.compile(rb"PAR1(?s:.*)PAR1\Z"),
}


def lines(path: str) -> Iterator[tuple[int, str]]:
    """Numbered lines; line ends become a newline. What is not UTF-8 in them is for `check_text` to find.

    Raises:
        ConfigError: the file cannot be read or decompressed; tells the last line that could.
    """
    number = 0
    with _opened(path, lambda: f"{path}, after line {number}") as text:
        for number, line in enumerate(text, 1):
            yield number, line


def chunks(path: str) -> Iterator[str]:
    """The text in pieces of a million characters, the last one shorter; line ends become a newline.

    Raises:
        ConfigError: the file cannot be read or decompressed, or is not UTF-8; tells the line.
    """
    number = 0
    with _opened(path, lambda: f"{path}, after line {number}") as text:
        while chunk := text.read(_CHUNK):
            check_text(chunk, path, number + 1)
            yield chunk
            number += chunk.count("\n")


def first_character(path: str) -> str:
    """The first character that is not blank; empty where there is none. Raises ConfigError as `lines` does."""
    with _opened(path, lambda: f"{path}, after line 0") as text:
        while chunk := text.read(1024):
            if stripped := chunk.lstrip():
                return stripped[0]
    return ""


def check_text(text: str, path: str, number: int) -> None:
    """Raise ConfigError where text that starts in line `number` of a file was not UTF-8, and tell the line."""
    if text.isascii():
        return
    try:
        text.encode()
    except UnicodeEncodeError as error:
        number += text.count("\n", 0, error.start)
        problem = f"not valid UTF-8: byte 0x{ord(text[error.start]) & 0xFF:02x}"
        raise ConfigError("files", problem, where=f"{path}:{number}") from None


class LongText:
    """The text of a whole file, in pieces, as often as it is asked for."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __iter__(self) -> Iterator[str]:
        return chunks(self._path)


def whole(path: str) -> str | LongText:
    """The text of a file; in pieces where it is long."""
    pieces = chunks(path)
    text = next(pieces, "")
    return text if next(pieces, None) is None else LongText(path)


@contextmanager
def _opened(path: str, where: Callable[[], str]) -> Iterator[TextIO]:
    try:
        with open(path, "rb") as raw:
            _check_signature(raw, path)
            plain = _decompress(raw, path)
            head = plain.peek(256)[:256]
            if head.startswith((b"\xff\xfe", b"\xfe\xff")) or 3 * head.count(0) > len(head):
                raise ConfigError("files", "must be UTF-8 text; this is UTF-16, UTF-32 or binary data", where=path)
            with io.TextIOWrapper(plain, encoding="utf-8-sig", errors="surrogateescape") as text:
                yield text
    except (OSError, EOFError, zlib.error, lzma.LZMAError, *_zstd_errors(path)) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError("files", f"cannot be read: {reason}", where=where()) from error


def _check_signature(raw: BinaryIO, path: str) -> None:
    """Refuse a file of another format than its name says, where its first bytes leave no doubt."""
    head = raw.read(16)
    if head.startswith(b"PAR1"):
        raw.seek(-min(4, len(head)), io.SEEK_END)
        head += raw.read(4)
    raw.seek(0)
    for extension, signature in _SIGNATURES.items():
        if signature.match(head) and not path.lower().endswith(extension):
            problem = f"holds {extension[1:]} data; rename it to end in {extension}"
            raise ConfigError("files", problem, where=path)


class _Streams(io.RawIOBase):
    """What bz2 or xz has compressed, one stream after another.

    bz2.open and lzma.open take what follows a stream and is not another one for rubbish, and say nothing of it.

    Args:
        raw: the file.
        new: makes a decompressor of one stream.
        padding: a byte that may fill the place between streams.
    """

    def __init__(self, raw: BinaryIO, new: Callable[[], Any], padding: bytes = b"") -> None:
        self._raw, self._new, self._padding = raw, new, padding
        self._stream = new()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            given = b""
            if self._stream.eof:
                given = (self._stream.unused_data or self._raw.read(1 << 16)).lstrip(self._padding)
                while not given:
                    if not (block := self._raw.read(1 << 16)):
                        return 0
                    given = block.lstrip(self._padding)
                self._stream = self._new()
            elif self._stream.needs_input and not (given := self._raw.read(1 << 16)):
                raise EOFError("it ends in the middle of a stream")
            if data := self._stream.decompress(given, len(buffer)):
                buffer[: len(data)] = data
                return len(data)


def _decompress(raw: BinaryIO, path: str) -> BinaryIO:
    if path.lower().endswith(".gz"):
        return gzip.open(raw)
    if path.lower().endswith(".bz2"):
        return io.BufferedReader(_Streams(raw, bz2.BZ2Decompressor), 1 << 17)
    if path.lower().endswith(".xz"):
        return io.BufferedReader(_Streams(raw, lzma.LZMADecompressor, padding=b"\0"), 1 << 17)
    if path.lower().endswith(".zst"):
        return io.BufferedReader(_ZstdReader(raw), 1 << 17)
    return raw


class _ZstdReader(io.RawIOBase):
    """Decompresses frame after frame, block by block: a block has at most 128 KiB of text, whatever its own size.

    zstandard's own reader takes a file that was cut off for one that ends, and what it makes of a given number of
    compressed bytes is unbounded: 64 KiB can hold 2 GiB.
    """

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._blocks = self._decompressed()
        self._plain = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:
        while not self._plain:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._plain = memoryview(block)
        count = min(len(buffer), len(self._plain))
        buffer[:count], self._plain = self._plain[:count], self._plain[count:]
        return count

    def _decompressed(self) -> Iterator[bytes]:
        """See RFC 8878, section 3.1."""
        import zstandard

        decompressor = zstandard.ZstdDecompressor()
        while magic := self._raw.read(4):
            if len(magic) == 4 and magic[1:] == b"\x2a\x4d\x18" and magic[0] >> 4 == 5:  # a frame to be skipped
                left = int.from_bytes(self._read(4), "little")
                while left:
                    left -= len(self._read(min(left, 1 << 16)))
                continue
            header = magic + self._read(5 - len(magic))
            header += self._read(zstandard.frame_header_size(header) - len(header))
            frame = decompressor.decompressobj()
            yield frame.decompress(header)
            last = False
            while not last:
                head = self._read(3)
                fields = int.from_bytes(head, "little")
                last, kind, size = fields & 1, fields >> 1 & 3, fields >> 3
                yield frame.decompress(head + self._read(1 if kind == 1 else size))  # kind 1 repeats one byte
            if zstandard.get_frame_parameters(header).has_checksum:
                yield frame.decompress(self._read(4))

    def _read(self, count: int) -> bytes:
        found = self._raw.read(count)
        if len(found) < count:
            raise EOFError("the compressed file ends in the middle: it was cut off")
        return found


def _zstd_errors(path: str) -> tuple[type[Exception], ...]:
    if not path.lower().endswith(".zst"):
        return ()
    import zstandard

    return (zstandard.ZstdError,)
