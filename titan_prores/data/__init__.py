"""Data: documents to token shards, token shards to windows, windows to the microbatches of a rank."""

from titan_prores.data.loader import DataError, TokenWindows, microbatches
from titan_prores.data.order import sample_windows, window_order
from titan_prores.data.shards import TokenCache, TokenStream, prepare
from titan_prores.protocols.batch import IGNORED_LABEL

__all__ = [
    "IGNORED_LABEL",
    "DataError",
    "TokenCache",
    "TokenStream",
    "TokenWindows",
    "microbatches",
    "prepare",
    "sample_windows",
    "window_order",
]
