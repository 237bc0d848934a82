"""Tokens as a Hugging Face tokenizer.json says, run by the tokenizers library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from titan_prores import ConfigError, MissingError, ReadPath, Section, nearest, register, setting
from titan_prores.components.tokenizer.tiktoken_file import pieces

_MAX_PIECE = 1_000_000  # characters; the library takes some 200 bytes of memory for each


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """A panic of the library, which some files bring about, is not an Exception and would end the run unexplained."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise RuntimeError(str(error)) from error


@register("tokenizer", "hf_file")
class HFFileTokenizer:
    """A tokenizer.json of the Hugging Face tokenizers library."""

    class Config(Section):
        """Settings of the tokenizer."""

        path: ReadPath = setting(help="a tokenizer.json, or a folder with one", on_resume="free")
        eot_token: str = setting("<|endoftext|>", "token that is added at the end of every document")

    def __init__(self, config: Config) -> None:
        """
        Raises:
            ConfigError: the library is not installed, the file cannot be read or is no tokenizer.json, or it has no
                token called eot_token.
        """
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingError(
                "name", "needs the package tokenizers: pip install 'titan-prores[huggingface]'", value="hf_file"
            ) from error

        file = Path(config.path)
        if file.is_dir():
            file /= "tokenizer.json"
        if not file.is_file():
            siblings = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
            raise MissingError("path", "no such file", value=str(file), nearest=nearest(file.name, siblings))
        try:
            raw = file.read_bytes()
            with _panics_as_errors():
                self.tokenizer = Tokenizer.from_buffer(raw)
        except OSError as error:
            raise ConfigError("path", f"cannot be read: {error.strerror}", value=str(file)) from error
        except Exception as error:  # what the library raises is plain Exception
            raise ConfigError(
                "path", f"not a tokenizer.json that the tokenizers library accepts: {error}", value=str(file)
            ) from error
        self.tokenizer.encode_special_tokens = True  # that is, as the plain text they are
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

        vocabulary = self.tokenizer.get_vocab(with_added_tokens=True)
        if config.eot_token not in vocabulary:
            added = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]
            raise ConfigError(
                "eot_token",
                f"not a token of {file}",
                value=config.eot_token,
                nearest=nearest(config.eot_token, added or vocabulary),
            )
        self.n_vocab = max(vocabulary.values()) + 1
        self.eot_id = vocabulary[config.eot_token]
        self._fingerprint = hashlib.sha256(raw + b"\0" + config.eot_token.encode()).hexdigest()

    def encode(self, text: str) -> np.ndarray:
        """Shape [tokens], int64."""
        return np.concatenate(list(self.encode_long([text])))

    def encode_long(self, chunks: Iterable[str]) -> Iterator[np.ndarray]:
        """What `encode` gives for the chunks put together, part by part."""
        for piece in pieces(chunks, _MAX_PIECE):
            with _panics_as_errors():
                ids = self.tokenizer.encode(piece, add_special_tokens=False).ids
            yield np.array(ids, dtype=np.int64)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=False)

    def fingerprint(self) -> str:
        """Hash of the file and of eot_token."""
        return self._fingerprint
