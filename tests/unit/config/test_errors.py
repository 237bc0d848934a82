"""Wording of values in messages."""

import pytest

from titan_prores.config.errors import counted


@pytest.mark.parametrize(
    ("number", "noun", "text"),
    [
        (1, "rank", "1 rank"),
        (0, "rank", "0 ranks"),
        (2048, "token", "2,048 tokens"),
        (2, "batch", "2 batches"),
        (1, "batch", "1 batch"),
        (2, "data rank", "2 data ranks"),
    ],
)
def test_counted(number, noun, text):
    assert counted(number, noun) == text
