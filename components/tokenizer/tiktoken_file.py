"""Byte-pair tokens from a file of ranks, run by tiktoken."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import tiktoken

from titan_prores import ConfigError, MissingError, ReadPath, Section, nearest, register, setting

_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
PATTERNS = {
    "llama3": _CL100K,
    "cl100k": _CL100K,
    "gpt2": r"'(?:s|t|re|ve|m|ll|d)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
}

# Letters, digits, marks, several scripts and every sort of white space: what a pattern may leave out.
_SAMPLE = "It's 2048 naïve tokens,\r\n\n\t漢字 и 🙂   end… \u2028_x=[1]  \n "

_MAX_ID = 2**31 - 1
_MAX_PIECE = 100_000  # characters; the regex engine gives up on a run of some hundred thousand blanks
_CUT = re.compile(r"(?s).*(?:\n(?=\S)|\S(?= ))")


def pieces(chunks: Iterable[str], limit: int = _MAX_PIECE) -> Iterator[str]:
    """The text of `chunks` in pieces of at most `limit` characters, cut where no token of the usual patterns would
    reach across.

    That is after a newline that text follows, or before a blank that text precedes, as late as there is one. Where the
    chunks begin and end does not matter.
    """
    text = ""
    for chunk in chunks:
        text, start = text + chunk, 0
        while len(text) - start > limit:
            match = _CUT.match(text, start, start + limit)
            end = match.end() if match else start + limit
            yield text[start:end]
            start = end
        text = text[start:]
    yield text


@register("tokenizer", "tiktoken_file")
class TiktokenFileTokenizer:
    """A tiktoken ranks file, such as Llama 3's tokenizer.model or cl100k_base.tiktoken."""

    class Config(Section):
        """Settings of the tokenizer."""

        path: ReadPath = setting(help="vocabulary file with a line 'base64 rank' for each token", on_resume="free")
        pattern: str = setting("llama3", f"how text is split before merging: {', '.join(PATTERNS)}, or a regex")
        special_tokens: tuple[str, ...] | dict[str, int] = setting(
            ("<|endoftext|>",), "a list, whose ids follow the last rank, or a table of name = id"
        )
        eot_token: str = setting("<|endoftext|>", "special token that is added at the end of every document")

    def __init__(self, config: Config) -> None:
        """
        Raises:
            ConfigError: the file cannot be read or is not a ranks file, the pattern is not a regex or leaves out parts
                of a text, special tokens collide, or eot_token is not one of them.
        """
        raw = _read(config.path)
        ranks = parse_ranks(raw, config.path)
        special_tokens = _special_ids(config.special_tokens, ranks)
        if config.eot_token not in special_tokens:
            raise ConfigError(
                "eot_token",
                "is not among special_tokens",
                value=config.eot_token,
                allowed=list(special_tokens),
                nearest=nearest(config.eot_token, special_tokens),
            )
        pattern = _pattern(config.pattern)
        try:
            self.encoding = tiktoken.Encoding(
                Path(config.path).name, pat_str=pattern, mergeable_ranks=ranks, special_tokens=special_tokens
            )
        except ValueError as error:
            raise ConfigError(
                "pattern", f"not a regex that tiktoken accepts: {' '.join(str(error).split())}", value=config.pattern
            ) from error
        self.n_vocab = self.encoding.n_vocab
        self.eot_id = special_tokens[config.eot_token]
        if self.decode(self.encode(_SAMPLE)) != _SAMPLE:
            raise ConfigError("pattern", "loses a part of the text that matches none of it", value=config.pattern)
        rules = [hashlib.sha256(raw).hexdigest(), pattern, special_tokens, config.eot_token]
        self._fingerprint = hashlib.sha256(json.dumps(rules).encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Shape [tokens], uint32."""
        return np.concatenate(list(self.encode_long([text])))

    def encode_long(self, chunks: Iterable[str]) -> Iterator[np.ndarray]:
        """What `encode` gives for the chunks put together, part by part."""
        for piece in pieces(chunks):
            yield self.encoding.encode_to_numpy(piece, disallowed_special=())

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode(list(ids))

    def fingerprint(self) -> str:
        """Hash of the ranks file, pattern and special tokens."""
        return self._fingerprint


def _read(path: str) -> bytes:
    if re.match(r"\w+://", path):
        raise ConfigError("path", "is a URL; download the file and give its local path", value=path)
    file = Path(path)
    if not file.is_file():
        siblings = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        raise MissingError("path", "no such file", value=path, nearest=nearest(file.name, siblings))
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError("path", f"cannot be read: {error.strerror}", value=path) from error


def parse_ranks(raw: bytes, path: str) -> dict[bytes, int]:
    """Token bytes -> rank, of the content of a ranks file.

    Raises:
        ConfigError: a line is not 'base64 rank', a token or rank comes twice, or a single byte has no rank; says
            which line of `path`.
    """
    ranks: dict[bytes, int] = {}
    lines: dict[int, int] = {}
    for number, line in enumerate(raw.splitlines(), 1):
        if not line.strip():
            continue

        def fault(problem: str, number: int = number) -> ConfigError:
            return ConfigError("path", problem, where=f"{path}:{number}")

        try:
            encoded, rank_text = line.split()
            token, rank = base64.b64decode(encoded, validate=True), int(rank_text)
        except ValueError as error:
            raise fault("not a ranks file: each line must be a token in base64, a space and its rank") from error
        if not token or not 0 <= rank <= _MAX_ID:
            raise fault("an empty token, or a rank that is negative or too large")
        if token in ranks or rank in lines:
            raise fault(f"token or rank {rank} came before" + (f", in line {lines[rank]}" if rank in lines else ""))
        ranks[token], lines[rank] = rank, number
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ConfigError(
            "path", f"not a complete ranks file: {len(missing)} of the 256 single bytes have no rank", value=path
        )
    return ranks


def _special_ids(special_tokens: Sequence[str] | Mapping[str, int], ranks: Mapping[bytes, int]) -> dict[str, int]:
    taken = set(ranks.values())
    if isinstance(special_tokens, Mapping):
        ids = dict(special_tokens)
    else:
        ids = {name: max(taken) + 1 + offset for offset, name in enumerate(special_tokens)}
        if len(ids) < len(special_tokens):
            raise ConfigError("special_tokens", "has a name twice", value=list(special_tokens))
    for name, token_id in ids.items():
        if not 0 <= token_id <= _MAX_ID or token_id in taken or not name:
            problem = "must not be empty" if not name else "is negative or too large, or the id of another token"
            raise ConfigError(f"special_tokens.{name}", problem, value=token_id)
        taken.add(token_id)
    return ids


def _pattern(pattern: str) -> str:
    if pattern not in PATTERNS and re.fullmatch(r"[\w-]*", pattern):
        raise ConfigError(
            "pattern",
            "is neither a preset nor a regex",
            value=pattern,
            allowed=[*PATTERNS, "a regex"],
            nearest=nearest(pattern, PATTERNS),
        )
    return PATTERNS.get(pattern, pattern)
