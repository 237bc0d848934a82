"""Tokens that are bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import tiktoken

from titan_prores import Section, register

END_OF_TEXT = "<|endoftext|>"


@register("tokenizer", "bytes")
class BytesTokenizer:
    """The 256 bytes of UTF-8 and an end-of-text mark; needs no file."""

    class Config(Section):
        """No settings."""

    def __init__(self, config: Config) -> None:
        self.encoding = tiktoken.Encoding(
            "bytes",
            pat_str=r"(?s:.{1,256})",  # there is nothing to merge, so where the text is cut does not matter
            mergeable_ranks={bytes([byte]): byte for byte in range(256)},
            special_tokens={END_OF_TEXT: 256},
        )
        self.n_vocab = self.encoding.n_vocab
        self.eot_id = self.encoding.eot_token

    def encode(self, text: str) -> np.ndarray:
        """Shape [bytes of the text], uint32."""
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_long(self, chunks: Iterable[str]) -> Iterator[np.ndarray]:
        """What `encode` gives for the chunks put together, part by part."""
        return map(self.encode, chunks)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""
        return self.encoding.decode(list(ids))

    def fingerprint(self) -> str:
        """Always the same."""
        return "bytes"
