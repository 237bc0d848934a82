"""What a tokenizer must have."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from titan_prores.config.sections import Section

if TYPE_CHECKING:
    import numpy as np


class Tokenizer(Protocol):
    """Text to token ids. Built from its config alone.

    A method `encode_long(chunks: Iterable[str]) -> Iterator[np.ndarray]` may give what `encode` does for the chunks put
    together, part by part; without it a long document is encoded as a whole, which takes memory for all its tokens.
    """

    n_vocab: int
    eot_id: int  # marks the end of a document

    def __init__(self, config: Section) -> None: ...

    def encode(self, text: str) -> np.ndarray:
        """Token ids of `text`, 1-d integer array, without an end-of-text mark. Special tokens in it are plain text."""

    def decode(self, ids: Sequence[int]) -> str:
        """Text of token ids; bytes that are not UTF-8 become U+FFFD."""

    def fingerprint(self) -> str:
        """A string that changes whenever encodings might; part of the token cache's key."""
